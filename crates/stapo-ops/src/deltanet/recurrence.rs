//! The recurrence of one value head over the rows of one sequence, forward and backward.

use std::ops::Range;

use super::{CHUNK, Heads};
use crate::Float;
use crate::cpu::simd::{Kernel, Lanes, Real, WIDTH};

/// Where the parts of a row that the recurrence takes in lie, of one value head.
pub(super) struct HeadColumns {
    pub query: Range<usize>,
    pub key: Range<usize>,
    pub value: Range<usize>,
    pub beta: usize,
    pub decay: usize,
}

impl HeadColumns {
    pub fn new(heads: Heads, value_head: usize) -> Self {
        let key_head = value_head / heads.group();
        let at = |start: usize, idx: usize, dim: usize| start + idx * dim..start + (idx + 1) * dim;
        Self {
            query: at(0, key_head, heads.key_dim),
            key: at(heads.key_width(), key_head, heads.key_dim),
            value: at(2 * heads.key_width(), value_head, heads.value_dim),
            beta: heads.conv_width() + value_head,
            decay: heads.conv_width() + heads.value + value_head,
        }
    }
}

/// What one row gives to the recurrence of a value head.
#[derive(Clone, Copy)]
struct Row<'a, E> {
    query: &'a [E],
    key: &'a [E],
    value: &'a [E],
    beta: E,
    decay: E,
}

/// The rows of one sequence.
#[derive(Clone, Copy)]
pub(super) struct SequenceRows<'a, E> {
    pub heads: Heads,
    /// `[n, mixed_width]`
    pub mixed: &'a [E],
}

impl<'a, E: Float> SequenceRows<'a, E> {
    #[inline(always)]
    fn row(self, columns: &HeadColumns, idx: usize) -> Row<'a, E> {
        let width = self.heads.mixed_width();
        let row = &self.mixed[idx * width..(idx + 1) * width];
        Row {
            query: &row[columns.query.clone()],
            key: &row[columns.key.clone()],
            value: &row[columns.value.clone()],
            beta: row[columns.beta],
            decay: row[columns.decay],
        }
    }

    pub fn len(self) -> usize {
        self.mixed.len() / self.heads.mixed_width()
    }
}

/// Runs the rows of a sequence through the recurrence of a value head, from `state` on.
pub(super) struct Forward<'a, 'm, E: Float> {
    pub rows: SequenceRows<'a, E>,
    pub value_head: usize,
    /// `[key_dim, value_dim]`
    pub state: &'m mut [E],
    /// Writes the output of a row of the sequence.
    pub out: &'a dyn Fn(usize) -> &'a mut [E],
}

impl<E: Float> Kernel<E> for Forward<'_, '_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let columns = HeadColumns::new(self.rows.heads, self.value_head);
        for idx in 0..self.rows.len() {
            step(l, self.rows.row(&columns, idx), self.state, Some((self.out)(idx)));
        }
    }
}

/// `S = decay S + k^T beta (v - decay k S)`, and `out = q S`.
#[inline(always)]
fn step<L: Lanes>(l: L, row: Row<'_, L::E>, state: &mut [L::E], mut out: Option<&mut [L::E]>) {
    let width = row.value.len();
    let mut at = 0;
    while at < width {
        if at + 4 * WIDTH <= width {
            step_columns::<L, 4>(l, row, state, at, out.as_deref_mut());
            at += 4 * WIDTH;
        } else {
            step_columns::<L, 1>(l, row, state, at, out.as_deref_mut());
            at += WIDTH;
        }
    }
}

/// [`step`] of `N` vectors of columns from `at` on. The sums run over the key dimensions in their order.
#[inline(always)]
fn step_columns<L: Lanes, const N: usize>(
    l: L,
    row: Row<'_, L::E>,
    state: &mut [L::E],
    at: usize,
    out: Option<&mut [L::E]>,
) {
    let zero = L::E::ZERO;
    let decay = l.splat(row.decay);
    let mut read = [l.zero(); N];
    for (state, &key) in state.chunks_exact_mut(row.value.len()).zip(row.key) {
        let key = l.splat(key);
        for (n, read) in read.iter_mut().enumerate() {
            let decayed = l.mul(decay, l.get(state, at + n * WIDTH, zero));
            l.put(state, at + n * WIDTH, decayed);
            *read = l.fma(key, decayed, *read);
        }
    }
    let beta = l.splat(row.beta);
    let corrected: [L::V; N] =
        std::array::from_fn(|n| l.mul(beta, l.sub(l.get(row.value, at + n * WIDTH, zero), read[n])));
    let mut sums = [l.zero(); N];
    for ((state, &key), &query) in state.chunks_exact_mut(row.value.len()).zip(row.key).zip(row.query) {
        let (key, query) = (l.splat(key), l.splat(query));
        for n in 0..N {
            let new = l.fma(key, corrected[n], l.get(state, at + n * WIDTH, zero));
            l.put(state, at + n * WIDTH, new);
            sums[n] = l.fma(query, new, sums[n]);
        }
    }
    if let Some(out) = out {
        for (n, sum) in sums.into_iter().enumerate() {
            l.put(out, at + n * WIDTH, sum);
        }
    }
}

/// The gradients of one row of a key head and one of its value heads.
pub(super) struct RowGradients<'a, E> {
    /// Added to, because several value heads share them.
    pub query: &'a mut [E],
    pub key: &'a mut [E],
    /// Overwritten.
    pub value: &'a mut [E],
    pub beta: &'a mut E,
    pub decay: &'a mut E,
}

/// The way back through the recurrence of a value head. States are computed again: first those at the borders of chunks, then, from
/// the last chunk to the first, those in front of each row.
pub(super) struct Backward<'a, 'm, E: Float> {
    pub rows: SequenceRows<'a, E>,
    pub value_head: usize,
    /// The gradient of the output of a row.
    pub d_out: &'a dyn Fn(usize) -> &'a [E],
    pub to: &'a dyn Fn(usize) -> RowGradients<'a, E>,
    /// [`Backward::memory_len`] numbers, holding anything.
    pub memory: &'m mut [E],
}

impl<E: Float> Backward<'_, '_, E> {
    /// States at the borders of chunks, states of one chunk, the gradient of a state and two rows of columns.
    pub fn memory_len(heads: Heads, n_rows: usize) -> usize {
        let state = heads.key_dim * heads.value_dim;
        (n_rows.div_ceil(CHUNK) + CHUNK + 1) * state + 2 * heads.value_dim
    }
}

impl<E: Float> Kernel<E> for Backward<'_, '_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let heads = self.rows.heads;
        let columns = HeadColumns::new(heads, self.value_head);
        let state_len = heads.key_dim * heads.value_dim;
        let n_rows = self.rows.len();
        let n_chunks = n_rows.div_ceil(CHUNK);
        let (borders, rest) = self.memory.split_at_mut(n_chunks * state_len);
        let (states, rest) = rest.split_at_mut(CHUNK * state_len);
        let (d_state, vectors) = rest.split_at_mut(state_len);
        for chunk in 0..n_chunks {
            let (before, border) = borders.split_at_mut(chunk * state_len);
            let border = &mut border[..state_len];
            let Some(last) = chunk.checked_sub(1) else {
                border.fill(E::ZERO);
                continue;
            };
            border.copy_from_slice(&before[last * state_len..]);
            for idx in last * CHUNK..chunk * CHUNK {
                step(l, self.rows.row(&columns, idx), border, None);
            }
        }
        d_state.fill(E::ZERO);
        for chunk in (0..n_chunks).rev() {
            let first = chunk * CHUNK;
            let n = CHUNK.min(n_rows - first);
            states[..state_len].copy_from_slice(&borders[chunk * state_len..][..state_len]);
            for at in 1..n {
                let (before, state) = states.split_at_mut(at * state_len);
                let state = &mut state[..state_len];
                state.copy_from_slice(&before[(at - 1) * state_len..]);
                step(l, self.rows.row(&columns, first + at - 1), state, None);
            }
            for at in (0..n).rev() {
                let state = &states[at * state_len..][..state_len];
                let (row, mut to) = (self.rows.row(&columns, first + at), (self.to)(first + at));
                step_backward(l, row, state, (self.d_out)(first + at), d_state, vectors, &mut to);
            }
        }
    }
}

/// The way back through [`step`] from the state in front of the row. `d_state` holds the gradient of the state after the row, and
/// then that of the state in front of it.
#[inline(always)]
fn step_backward<L: Lanes>(
    l: L,
    row: Row<'_, L::E>,
    state: &[L::E],
    d_out: &[L::E],
    d_state: &mut [L::E],
    vectors: &mut [L::E],
    to: &mut RowGradients<'_, L::E>,
) {
    let zero = L::E::ZERO;
    let width = row.value.len();
    let (error, d_read) = vectors.split_at_mut(width);
    let decay = l.splat(row.decay);
    let mut d_beta = l.zero();
    for at in (0..width).step_by(WIDTH) {
        let (mut read, mut d_corrected) = (l.zero(), l.zero());
        let d_out = l.get(d_out, at, zero);
        let states = state.chunks_exact(width).zip(d_state.chunks_exact_mut(width));
        for (((state, d_state), &key), &query) in states.zip(row.key).zip(row.query) {
            let key = l.splat(key);
            read = l.fma(key, l.mul(decay, l.get(state, at, zero)), read);
            let d_behind = l.fma(l.splat(query), d_out, l.get(d_state, at, zero));
            l.put(d_state, at, d_behind);
            d_corrected = l.fma(key, d_behind, d_corrected);
        }
        let of_value = l.mul(l.splat(row.beta), d_corrected);
        l.put(to.value, at, of_value);
        l.put(d_read, at, l.sub(l.zero(), of_value));
        let missed = l.sub(l.get(row.value, at, zero), read);
        l.put(error, at, missed);
        d_beta = l.fma(d_corrected, missed, d_beta);
    }
    *to.beta = l.sum(d_beta);
    let mut d_decay = l.zero();
    let states = state.chunks_exact(width).zip(d_state.chunks_exact_mut(width));
    for (i, (state, d_state)) in states.enumerate() {
        let key = l.splat(row.key[i]);
        let (mut d_query, mut d_key) = (l.zero(), l.zero());
        for at in (0..width).step_by(WIDTH) {
            let before = l.get(state, at, zero);
            let decayed = l.mul(decay, before);
            let corrected = l.mul(l.splat(row.beta), l.get(error, at, zero));
            let d_read = l.get(d_read, at, zero);
            let behind = l.fma(key, corrected, decayed);
            let d_behind = l.get(d_state, at, zero);
            d_query = l.fma(behind, l.get(d_out, at, zero), d_query);
            d_key = l.fma(d_behind, corrected, l.fma(decayed, d_read, d_key));
            let d_decayed = l.fma(key, d_read, d_behind);
            d_decay = l.fma(d_decayed, before, d_decay);
            l.put(d_state, at, l.mul(decay, d_decayed));
        }
        to.query[i] += l.sum(d_query);
        to.key[i] += l.sum(d_key);
    }
    *to.decay = l.sum(d_decay);
}
