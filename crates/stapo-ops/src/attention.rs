//! Grouped-query causal attention, over packed sequences (training) and over a paged cache (generation).
//!
//! Law: a score is one chain over the head's dimensions, times the scale. Keys come in splits of [`paged::SPLIT_KEYS`] by
//! position. In a split, a row's maximum is exact; its sum of exponentials takes sixteen lanes (key j in lane j mod 16,
//! keys in increasing order) and a fixed tree; an output is one chain over the keys in increasing order. Splits are
//! combined in increasing order, a sink behind them, and the output is divided by the sum. So a token's output depends on its query and the
//! keys before it alone: decode, chunked prefill and packed training agree bit by bit, for every block size.

mod cache;
pub(crate) mod cpu_backward;
pub(crate) mod cpu_decode;
pub(crate) mod cpu_forward;
pub(crate) mod cpu_paged;
pub(crate) mod cpu_rows;
pub(crate) mod cuda;
pub(crate) mod cuda_decode;
pub(crate) mod cuda_paged;
pub mod paged;
pub mod sinks;
#[cfg(test)]
mod tests;

pub use crate::heads::{Heads, ScoreRule};

use cpu_rows::HostInputs;
use cuda::CudaInputs;

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

/// Shapes: inputs `[T, ..]`; offsets `[sequences + 1]`, rising from 0 to T, sequence s
/// being the tokens `offsets[s]..offsets[s + 1]`; out `[T, out_width]`; lse `[T, query heads]`, the logarithm of each
/// row's sum of exponentials with the sink, kept for backward.
pub fn forward<'a, T: Float>(
    device: &Device,
    dims: Dims,
    inputs: impl Into<Inputs<'a, T>>,
    offsets: View<'_, u32>,
    out: ViewMut<'_, T>,
    lse: ViewMut<'_, T>,
) {
    let op = "attention::forward";
    let inputs = inputs.into();
    dims.heads.check(op);
    dims.rule.check(op);
    inputs.check(op, dims.tokens, dims.heads);
    pitch_of(op, "out", out.len(), dims.tokens, dims.heads.out_width());
    check(op, "lse", lse.len(), dims.tokens * dims.heads.query);
    check(op, "offsets", offsets.len(), dims.sequences + 1);
    match device.backend() {
        Backend::Cpu(cpu) => {
            check_offsets(op, offsets, dims.sequences, dims.tokens);
            T::attention_forward(cpu, dims, inputs.host(), offsets.host(), out.into_host(), lse.into_host());
        }
        Backend::Cuda(cuda) => {
            cuda::forward(cuda, dims, inputs.cuda(), offsets.cuda(), out.cuda(), lse.cuda());
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

/// Shapes: offsets as in [`forward`]; d_out like out; d_qkv like qkv, overwritten.
pub fn backward<T: Float>(
    device: &Device,
    dims: Dims,
    saved: Saved<'_, T>,
    offsets: View<'_, u32>,
    d_out: View<'_, T>,
    d_qkv: ViewMut<'_, T>,
) {
    let op = "attention::backward";
    dims.heads.check(op);
    dims.rule.check(op);
    check(op, "qkv", saved.qkv.len(), dims.tokens * dims.heads.qkv_width());
    pitch_of(op, "out", saved.out.len(), dims.tokens, dims.heads.out_width());
    check(op, "lse", saved.lse.len(), dims.tokens * dims.heads.query);
    check(op, "d_out", d_out.len(), dims.tokens * dims.heads.out_width());
    check(op, "d_qkv", d_qkv.len(), dims.tokens * dims.heads.qkv_width());
    check(op, "offsets", offsets.len(), dims.sequences + 1);
    match device.backend() {
        Backend::Cpu(cpu) => {
            check_offsets(op, offsets, dims.sequences, dims.tokens);
            T::attention_backward(cpu, dims, saved, offsets.host(), d_out.host(), d_qkv.into_host());
        }
        Backend::Cuda(cuda) => {
            cuda::backward(cuda, dims, saved, offsets.cuda(), d_out.cuda(), d_qkv.cuda());
        }
    }
}

#[track_caller]
fn check_offsets(op: &str, offsets: View<'_, u32>, sequences: usize, tokens: usize) {
    let offsets = offsets.host();
    let rises = offsets.is_sorted() && offsets[0] == 0 && offsets[sequences] as usize == tokens;
    assert!(rises, "{op}: offsets must rise from 0 to {tokens}, got {offsets:?}");
}
