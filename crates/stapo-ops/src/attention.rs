//! Grouped-query causal attention, over packed sequences (training) and over a paged cache (generation).
//!
//! Law: a score is one chain over the head's dimensions, times the scale. Keys come in splits of [`paged::SPLIT_KEYS`] by
//! position. In a split, a row's maximum is exact; its sum of exponentials takes sixteen lanes (key j in lane j mod 16,
//! keys in increasing order) and a fixed tree; an output is one chain over the keys in increasing order. Splits are
//! combined in increasing order, a sink after them, and the output is divided by the sum. So a token's output depends on its query and the
//! keys before it alone: decode, chunked prefill and packed training agree bit by bit, for every block size and wherever the keys lie.

mod cache;
pub(crate) mod cpu_backward;
pub(crate) mod cpu_decode;
pub(crate) mod cpu_forward;
pub(crate) mod cpu_paged;
pub(crate) mod cpu_rows;
pub(crate) mod cuda;
mod cuda_backward;
pub(crate) mod cuda_decode;
pub(crate) mod cuda_paged;
pub mod key_copies;
pub mod paged;
pub(crate) mod sequences;
pub mod sinks;
#[cfg(test)]
pub(crate) mod tests;

pub use crate::heads::{Heads, ScoreRule};
pub use sequences::{Keys, Sequences};

use cpu_rows::HostInputs;
use cuda::{CudaInputs, CudaSequences};
use sequences::check_offsets;

use crate::device::Backend;
use crate::{Device, Float, View, ViewMut, check, pitch_of};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dims {
    pub tokens: usize,
    pub sequences: usize,
    pub heads: Heads,
    pub rule: ScoreRule,
}

/// What attention reads of its rows and its weights.
#[derive(Clone, Copy)]
pub struct Inputs<'a, T: Float> {
    /// `[T, qkv_width]`, positions already embedded.
    pub qkv: View<'a, T>,
    /// `[query heads]`: one learned logit for each head, which joins the sum of exponentials of every row and has no value.
    pub sinks: Option<View<'a, T>>,
}

impl<'a, T: Float> From<View<'a, T>> for Inputs<'a, T> {
    fn from(qkv: View<'a, T>) -> Self {
        Self { qkv, sinks: None }
    }
}

impl<'a, T: Float> Inputs<'a, T> {
    #[track_caller]
    fn check(&self, op: &str, tokens: usize, heads: Heads) {
        check(op, "qkv", self.qkv.len(), tokens * heads.qkv_width());
        check(op, "sinks", self.sinks.map_or(heads.query, |sinks| sinks.len()), heads.query);
    }

    fn host(&self) -> HostInputs<'a, T> {
        HostInputs { qkv: self.qkv.host(), sinks: self.sinks.map(|sinks| sinks.host()) }
    }

    fn cuda(&self) -> CudaInputs {
        CudaInputs { qkv: self.qkv.cuda(), sinks: self.sinks.map(|sinks| sinks.cuda()) }
    }
}

/// Shapes: inputs `[T, ..]`; out `[T, out_width]`; lse `[T, query heads]`, the logarithm of each row's sum of exponentials with
/// the sink, kept for backward.
pub fn forward<'a, T: Float>(
    device: &Device,
    dims: Dims,
    inputs: impl Into<Inputs<'a, T>>,
    sequences: impl Into<Sequences<'a, T>>,
    out: ViewMut<'_, T>,
    lse: ViewMut<'_, T>,
) {
    let op = "attention::forward";
    let (inputs, sequences) = (inputs.into(), sequences.into());
    dims.heads.check(op);
    dims.rule.check(op);
    inputs.check(op, dims.tokens, dims.heads);
    pitch_of(op, "out", out.len(), dims.tokens, dims.heads.out_width());
    check(op, "lse", lse.len(), dims.tokens * dims.heads.query);
    sequences.check(op, dims.sequences, dims.heads);
    match device.backend() {
        Backend::Cpu(cpu) => {
            let sequences = sequences.host(op, dims.tokens, dims.heads);
            T::attention_forward(cpu, dims, inputs.host(), sequences, out.into_host(), lse.into_host());
        }
        Backend::Cuda(cuda) => {
            let sequences = CudaSequences::new(dims, inputs.qkv.cuda(), &sequences);
            cuda::forward(cuda, dims, inputs.cuda(), sequences, out.cuda(), lse.cuda());
        }
    }
}

/// What [`forward`] leaves for [`backward`].
#[derive(Clone, Copy)]
pub struct Saved<'a, T: Float> {
    /// `[T, qkv_width]`
    pub qkv: View<'a, T>,
    /// `[T, out_width]`
    pub out: View<'a, T>,
    /// `[T, query heads]`
    pub lse: View<'a, T>,
}

/// What [`backward`] writes.
pub struct Gradients<'a, T: Float> {
    /// `[T, qkv_width]`, overwritten; where keys lie apart, its columns of keys and values are left as they are.
    pub qkv: ViewMut<'a, T>,
    /// Like [`Keys::rows`], overwritten; there if and only if keys lie apart. Each row has the gradient from the queries of its
    /// sequence alone.
    pub keys: Option<ViewMut<'a, T>>,
}

impl<'a, T: Float> From<ViewMut<'a, T>> for Gradients<'a, T> {
    fn from(qkv: ViewMut<'a, T>) -> Self {
        Self { qkv, keys: None }
    }
}

/// Shapes: sequences as in [`forward`]; d_out like out.
pub fn backward<'a, T: Float>(
    device: &Device,
    dims: Dims,
    saved: Saved<'a, T>,
    sequences: impl Into<Sequences<'a, T>>,
    d_out: View<'_, T>,
    to: impl Into<Gradients<'a, T>>,
) {
    let op = "attention::backward";
    let (sequences, to) = (sequences.into(), to.into());
    dims.heads.check(op);
    dims.rule.check(op);
    check(op, "qkv", saved.qkv.len(), dims.tokens * dims.heads.qkv_width());
    pitch_of(op, "out", saved.out.len(), dims.tokens, dims.heads.out_width());
    check(op, "lse", saved.lse.len(), dims.tokens * dims.heads.query);
    check(op, "d_out", d_out.len(), dims.tokens * dims.heads.out_width());
    check(op, "d_qkv", to.qkv.len(), dims.tokens * dims.heads.qkv_width());
    sequences.check(op, dims.sequences, dims.heads);
    let n_keys = sequences.keys.map_or(0, |keys| keys.rows.len());
    check(op, "d_keys", to.keys.as_ref().map_or(0, ViewMut::len), n_keys);
    assert_eq!(
        to.keys.is_some(),
        sequences.keys.is_some(),
        "{op}: keys and their gradients lie in one place"
    );
    match device.backend() {
        Backend::Cpu(cpu) => {
            let sequences = sequences.host(op, dims.tokens, dims.heads);
            let to = (to.qkv.into_host(), to.keys.map(ViewMut::into_host));
            T::attention_backward(cpu, dims, saved, sequences, d_out.host(), to);
        }
        Backend::Cuda(cuda) => {
            let sequences = CudaSequences::new(dims, saved.qkv.cuda(), &sequences);
            let to = (to.qkv.cuda(), to.keys.map(|keys| keys.cuda()));
            cuda_backward::backward(cuda, dims, saved, sequences, d_out.cuda(), to);
        }
    }
}
