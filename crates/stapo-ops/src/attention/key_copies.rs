//! Copies of keys and values: one row of qkv, such as one of a prompt, is a row of keys in several sequences, see [`super::Keys`].

use super::cuda;
use crate::cpu::{Cpu, Shared};
use crate::device::Backend;
use crate::heads::Heads;
use crate::{Device, Float, View, ViewMut, check};

/// Which rows of qkv the rows of keys are copies of.
#[derive(Clone, Copy)]
pub struct Copies<'a> {
    /// `[E]`: the row of qkv that each row of keys is a copy of.
    pub rows: View<'a, u32>,
    /// `[T + 1]`: the copies of row t of qkv are `list[starts[t]..starts[t + 1]]`.
    pub starts: View<'a, u32>,
    /// `[E]`
    pub list: View<'a, u32>,
}

/// [`Copies`] on the host.
#[derive(Clone, Copy)]
pub(crate) struct HostCopies<'a> {
    rows: &'a [u32],
    starts: &'a [u32],
    list: &'a [u32],
}

impl<'a> Copies<'a> {
    #[track_caller]
    fn check(&self, op: &str, heads: Heads, n_qkv: usize, n_keys: usize) {
        let n_tokens = self.starts.len() - 1;
        check(op, "qkv", n_qkv, n_tokens * heads.qkv_width());
        check(op, "list", self.list.len(), self.rows.len());
        check(op, "keys", n_keys, self.rows.len() * 2 * heads.kv * heads.dim);
    }

    /// On the host, where the lists can be read.
    #[track_caller]
    fn host(&self, op: &str) -> HostCopies<'a> {
        let host = HostCopies { rows: self.rows.host(), starts: self.starts.host(), list: self.list.host() };
        let are_inside = |rows: &[u32], end: usize| rows.iter().all(|&row| (row as usize) < end);
        assert!(are_inside(host.rows, host.starts.len() - 1), "{op}: a copy of a row that is not there");
        assert!(are_inside(host.list, host.rows.len()), "{op}: a list that names copies that are not there");
        host
    }
}

/// Copies the key and value columns of qkv. Shapes: qkv `[T, qkv_width]`; keys `[E, 2 kv heads, dim]`.
pub fn forward<T: Float>(
    device: &Device,
    heads: Heads,
    copies: Copies<'_>,
    qkv: View<'_, T>,
    keys: ViewMut<'_, T>,
) {
    let op = "attention::key_copies::forward";
    copies.check(op, heads, qkv.len(), keys.len());
    match device.backend() {
        Backend::Cpu(cpu) => {
            T::key_copies_forward(cpu, heads, copies.host(op), qkv.host(), keys.into_host());
        }
        Backend::Cuda(cuda) => cuda::copy_keys(cuda, heads, copies.rows.cuda(), qkv.cuda(), keys.cuda()),
    }
}

/// Overwrites the key and value columns of `d_qkv` with the sums over their copies, in the order of the list, in f32 on a GPU.
/// Shapes as in [`forward`].
pub fn backward<T: Float>(
    device: &Device,
    heads: Heads,
    copies: Copies<'_>,
    d_keys: View<'_, T>,
    d_qkv: ViewMut<'_, T>,
) {
    let op = "attention::key_copies::backward";
    copies.check(op, heads, d_qkv.len(), d_keys.len());
    match device.backend() {
        Backend::Cpu(cpu) => {
            T::key_copies_backward(cpu, heads, copies.host(op), d_keys.host(), d_qkv.into_host());
        }
        Backend::Cuda(cuda) => {
            let lists = (copies.starts.cuda(), copies.list.cuda());
            cuda::add_key_copies(cuda, heads, lists, d_keys.cuda(), d_qkv.cuda());
        }
    }
}

pub(crate) fn forward_cpu<E: Float>(
    cpu: &Cpu,
    heads: Heads,
    copies: HostCopies<'_>,
    qkv: &[E],
    keys: &mut [E],
) {
    let width = 2 * heads.kv * heads.dim;
    let keys = Shared::new(keys);
    cpu.rows(copies.rows.len(), width, |range| {
        for row in range {
            // SAFETY: each task has its own rows.
            let to = unsafe { keys.range(row * width..(row + 1) * width) };
            to.copy_from_slice(&qkv[first_key(heads, copies.rows[row])..][..width]);
        }
    });
}

pub(crate) fn backward_cpu<E: Float>(
    cpu: &Cpu,
    heads: Heads,
    copies: HostCopies<'_>,
    d_keys: &[E],
    d_qkv: &mut [E],
) {
    let width = 2 * heads.kv * heads.dim;
    let d_qkv = Shared::new(d_qkv);
    cpu.rows(copies.starts.len() - 1, width, |range| {
        for token in range {
            let at = first_key(heads, token as u32);
            // SAFETY: each task has its own rows.
            let sums = unsafe { d_qkv.range(at..at + width) };
            sums.fill(E::ZERO);
            for &copy in &copies.list[copies.starts[token] as usize..copies.starts[token + 1] as usize] {
                let from = &d_keys[copy as usize * width..][..width];
                sums.iter_mut().zip(from).for_each(|(sum, x)| *sum += *x);
            }
        }
    });
}

/// Where the keys of a row of qkv begin.
fn first_key(heads: Heads, row: u32) -> usize {
    row as usize * heads.qkv_width() + heads.query * heads.dim
}
