//! What a layer keeps of sequences between calls.

use super::cuda_chunks::{KEPT_NUMBERS, KEPT_ROWS};
use super::{Heads, Sequences, cpu, cuda_inputs};
use crate::{Buffer, Device, Float, OutOfMemory, View};

/// What one layer keeps of sequences between calls.
#[derive(Debug)]
pub struct States<T: Float> {
    /// `[slots, value heads, key_dim, value_dim]`; with the tile, the state at the start of the chunk that a sequence is in.
    pub(super) recurrent: Buffer<T>,
    /// `[slots, kernel - 1, conv_width]`: the last rows that the convolution read; one row more where rows_tile.cu keeps them.
    pub(super) rows: Buffer<T>,
    pub(super) chunk: Option<KeptChunk<T>>,
    n_slots: usize,
}

/// What is kept of the chunk that a sequence is in, see chunk.cu.
#[derive(Debug)]
pub(super) struct KeptChunk<T: Float> {
    /// `[slots, value heads, KEPT_ROWS, dim]`
    pub rows: Buffer<T>,
    /// `[slots, value heads, KEPT_NUMBERS]`
    pub numbers: Buffer<T>,
}

impl<T: Float> States<T> {
    pub fn zeros(device: &Device, heads: Heads, kernel: usize, n_slots: usize) -> Result<Self, OutOfMemory> {
        let has_tile = cuda_inputs::has_tile(device, heads);
        let n_kept = kernel - usize::from(!(has_tile && heads.fit_tile_rows(kernel)));
        let n_rows = n_slots * n_kept * heads.conv_width();
        let chunk = || -> Result<_, OutOfMemory> {
            let rows = device.compute_zeros(n_slots * heads.value * KEPT_ROWS * heads.value_dim)?;
            Ok(KeptChunk { rows, numbers: device.zeros(n_slots * heads.value * KEPT_NUMBERS)? })
        };
        Ok(Self {
            recurrent: device.zeros(n_slots * heads.state_len())?,
            rows: device.compute_zeros(n_rows)?,
            chunk: has_tile.then(chunk).transpose()?,
            n_slots,
        })
    }

    /// Bytes of one slot on a device whose activations have `compute_bytes`: on a GPU in bf16 the state is f32, and the tile keeps
    /// a chunk.
    pub fn slot_bytes(heads: Heads, kernel: usize, compute_bytes: usize) -> usize {
        let f32_bytes = size_of::<f32>();
        let state = heads.state_len() * f32_bytes;
        let keeps_chunk = compute_bytes < f32_bytes && heads.fit_tile();
        let n_kept = kernel - usize::from(!(keeps_chunk && heads.fit_tile_rows(kernel)));
        let rows = n_kept * heads.conv_width() * compute_bytes;
        let chunk = heads.value * (KEPT_ROWS * heads.value_dim * compute_bytes + KEPT_NUMBERS * f32_bytes);
        state + rows + if keeps_chunk { chunk } else { 0 }
    }

    /// Copies the state of each pair's first slot over that of its second. Shape: pairs `[n, 2]`; a slot that one pair writes is in no
    /// other.
    pub fn copy_slots(&mut self, device: &Device, pairs: View<'_, u32>) {
        let n_slots = self.n_slots;
        self.buffers_mut().for_each(|buffer| buffer.copy_blocks(device, pairs, n_slots));
    }

    /// All memory, each buffer the same count of numbers for each slot.
    pub(super) fn buffers_mut(&mut self) -> impl Iterator<Item = &mut Buffer<T>> {
        let Self { recurrent, rows, chunk, .. } = self;
        let chunk = chunk.iter_mut().flat_map(|kept| [&mut kept.rows, &mut kept.numbers]);
        [recurrent, rows].into_iter().chain(chunk)
    }
}

impl<'a, T: Float> Sequences<'a, T> {
    pub(super) fn into_host(self) -> cpu::HostSequences<'a, T> {
        let carried = self.carried.map(|carried| cpu::HostCarried {
            contexts: carried.contexts.host(),
            slots: carried.slots.host(),
            recurrent: carried.states.recurrent.view_mut().into_host(),
            rows: carried.states.rows.view_mut().into_host(),
        });
        cpu::HostSequences { offsets: self.offsets.host(), carried }
    }
}
