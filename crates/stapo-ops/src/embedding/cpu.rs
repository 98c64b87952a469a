use super::Dims;
use crate::Float;
use crate::cpu::{Cpu, Shared};

#[track_caller]
pub(crate) fn check_ids(ids: &[u32], vocab: usize) {
    if let Some(t) = ids.iter().position(|id| *id as usize >= vocab) {
        panic!("embedding: id {} of token {t} is not below {vocab}", ids[t]);
    }
}

pub(crate) fn forward<E: Float>(cpu: &Cpu, d: Dims, ids: &[u32], table: &[E], out: &mut [E]) {
    let out = Shared::new(out);
    cpu.rows(d.tokens, d.width, |rows| {
        for t in rows {
            // SAFETY: each task has its own rows.
            let row = unsafe { out.range(t * d.width..(t + 1) * d.width) };
            row.copy_from_slice(&table[ids[t] as usize * d.width..][..d.width]);
        }
    });
}

pub(crate) fn backward<E: Float>(cpu: &Cpu, d: Dims, ids: &[u32], d_out: &[E], d_table: &mut [E]) {
    let d_table = Shared::new(d_table);
    cpu.rows(d.width, d.tokens, |columns| {
        for (id, row) in ids.iter().zip(d_out.chunks_exact(d.width)) {
            let at = *id as usize * d.width;
            // SAFETY: each task has its own columns.
            let sums = unsafe { d_table.range(at + columns.start..at + columns.end) };
            for (sum, x) in sums.iter_mut().zip(&row[columns.clone()]) {
                *sum += *x;
            }
        }
    });
}

pub(crate) fn backward_apart<E: Float>(
    cpu: &Cpu,
    d: Dims,
    ids: &[u32],
    d_out: &[E],
    apart: &mut [E],
    d_table: &mut [E],
) {
    let mut distinct = ids.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    let rows = |id: u32| id as usize * d.width..(id as usize + 1) * d.width;
    for &id in &distinct {
        apart[rows(id)].fill(E::ZERO);
    }
    backward(cpu, d, ids, d_out, apart);
    for &id in &distinct {
        d_table[rows(id)].iter_mut().zip(&apart[rows(id)]).for_each(|(sum, x)| *sum += *x);
    }
}
