//! Grouped-query causal attention, over packed sequences (training) and over a paged cache (generation).
//!
//! Law: a score is one chain over the head's dimensions, times the scale; a row's maximum is exact; its sum of
//! exponentials takes sixteen lanes (key j in lane j mod 16, keys in increasing order) and a fixed tree; an output is
//! one chain over the keys in increasing order, divided by that sum. So a token's output depends on its query and the
//! keys before it alone: decode, chunked prefill and packed training agree bit by bit, for every block size.

mod core;
mod cpu;
mod cpu_backward;
mod cuda;
mod decode;
pub mod paged;
#[cfg(test)]
mod tests;

use crate::device::Backend;
use crate::{Device, Float, View, ViewMut, check};

/// Head counts; query head `h` reads key/value head `h / (query / kv)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    pub query: usize,
    pub kv: usize,
    pub dim: usize,
}

impl Heads {
    /// Width of a fused row: query heads, key heads, value heads.
    pub fn qkv_width(self) -> usize {
        (self.query + 2 * self.kv) * self.dim
    }

    /// Width of a row of outputs: one vector per query head.
    pub fn out_width(self) -> usize {
        self.query * self.dim
    }

    /// Query heads per key/value head.
    pub fn group(self) -> usize {
        self.query / self.kv
    }

    fn scale(self) -> f64 {
        1.0 / (self.dim as f64).sqrt()
    }

    #[track_caller]
    fn check(self, op: &str) {
        assert!(
            self.dim > 0 && self.kv > 0 && self.query.is_multiple_of(self.kv),
            "{op}: {} query heads of {} dimensions cannot share {} key/value heads",
            self.query,
            self.dim,
            self.kv
        );
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    pub tokens: usize,
    pub sequences: usize,
    pub heads: Heads,
}

/// Shapes: qkv `[T, qkv_width]`, positions already embedded; offsets `[sequences + 1]`, rising from 0 to T, sequence s
/// being the tokens `offsets[s]..offsets[s + 1]`; out `[T, out_width]`; lse `[T, query heads]`, the logarithm of each
/// row's sum of exponentials, kept for backward.
pub fn forward<T: Float>(
    device: &Device,
    dims: Dims,
    qkv: View<'_, T>,
    offsets: View<'_, u32>,
    out: ViewMut<'_, T>,
    lse: ViewMut<'_, T>,
) {
    let op = "attention::forward";
    dims.heads.check(op);
    check(op, "qkv", qkv.len(), dims.tokens * dims.heads.qkv_width());
    check(op, "out", out.len(), dims.tokens * dims.heads.out_width());
    check(op, "lse", lse.len(), dims.tokens * dims.heads.query);
    check(op, "offsets", offsets.len(), dims.sequences + 1);
    match device.backend() {
        Backend::Cpu(cpu) => {
            check_offsets(op, offsets, dims.sequences, dims.tokens);
            cpu::forward(cpu, dims, qkv.host(), offsets.host(), out.into_host(), lse.into_host());
        }
        Backend::Cuda(cuda) => {
            cuda::forward(cuda, dims, qkv.cuda(), offsets.cuda(), out.cuda(), lse.cuda());
        }
    }
}

/// Shapes as in [`forward`]; d_out like out; d_qkv like qkv, overwritten.
pub fn backward<T: Float>(
    device: &Device,
    dims: Dims,
    qkv: View<'_, T>,
    offsets: View<'_, u32>,
    out: View<'_, T>,
    lse: View<'_, T>,
    d_out: View<'_, T>,
    d_qkv: ViewMut<'_, T>,
) {
    let op = "attention::backward";
    dims.heads.check(op);
    check(op, "qkv", qkv.len(), dims.tokens * dims.heads.qkv_width());
    check(op, "out", out.len(), dims.tokens * dims.heads.out_width());
    check(op, "lse", lse.len(), dims.tokens * dims.heads.query);
    check(op, "d_out", d_out.len(), dims.tokens * dims.heads.out_width());
    check(op, "d_qkv", d_qkv.len(), dims.tokens * dims.heads.qkv_width());
    check(op, "offsets", offsets.len(), dims.sequences + 1);
    match device.backend() {
        Backend::Cpu(cpu) => {
            check_offsets(op, offsets, dims.sequences, dims.tokens);
            let saved = cpu_backward::Saved {
                qkv: qkv.host(),
                out: out.host(),
                lse: lse.host(),
                d_out: d_out.host(),
            };
            cpu_backward::backward(cpu, dims, saved, offsets.host(), d_qkv.into_host());
        }
        Backend::Cuda(cuda) => {
            let saved =
                cuda::Saved { qkv: qkv.cuda(), out: out.cuda(), lse: lse.cuda(), d_out: d_out.cuda() };
            cuda::backward(cuda, dims, saved, offsets.cuda(), d_qkv.cuda());
        }
    }
}

#[track_caller]
fn check_offsets(op: &str, offsets: View<'_, u32>, sequences: usize, tokens: usize) {
    let offsets = offsets.host();
    let rises = offsets.is_sorted() && offsets[0] == 0 && offsets[sequences] as usize == tokens;
    assert!(rises, "{op}: offsets must rise from 0 to {tokens}, got {offsets:?}");
}
