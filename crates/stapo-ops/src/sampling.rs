//! Drawing the next token.
//!
//! Law: the logits and numbers of a row have the bits of `lm_head::forward`. The reported log-probability and entropy
//! are those of the full distribution at the sampling temperature, whatever the filters, as training computes them; or, where
//! the kept tokens are asked for, those of the distribution over these, as training computes them from the same tokens.

pub(crate) mod cpu;
mod cuda;
mod filter;
#[cfg(test)]
mod tests;

use crate::device::Backend;
use crate::lm_head::cuda::{chunk_rows, row_pitch};
use crate::lm_head::{Alternatives, LogitRule, check_alternatives, check_kept};
use crate::{Buffer, Device, Float, OutOfMemory, View, ViewMut, Weight, check};
use std::ops::RangeInclusive;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SamplingRule {
    /// The most probable token, the lowest id among equals; numbers are those of temperature 1.
    Greedy,
    /// By inverse transform, in the order of the ids, among the tokens the filters leave.
    Draw { temperature: f64, filter: Filter },
}

/// Which tokens may be drawn. The filters apply in this order, and each keeps at least the most probable token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Filter {
    /// Only the `k` most probable.
    pub top_k: Option<usize>,
    /// Of those, the fewest of the most probable that hold this share of their probability; 1 keeps all.
    pub top_p: f64,
    /// Of those, the ones at least this share of the most probable token's probability; 0 keeps all.
    pub min_p: f64,
}

impl Filter {
    pub const NONE: Filter = Filter { top_k: None, top_p: 1.0, min_p: 0.0 };
}

impl SamplingRule {
    /// Temperatures by which logits in f32 can be divided: beyond these a quotient may leave the range of f32.
    pub const TEMPERATURES: RangeInclusive<f64> = 1e-6..=1e6;

    /// The temperature of the reported numbers.
    pub fn temperature(&self) -> f64 {
        match self {
            SamplingRule::Greedy => 1.0,
            SamplingRule::Draw { temperature, .. } => *temperature,
        }
    }
}

/// What tokens are drawn from.
#[derive(Clone, Copy)]
pub struct Inputs<'a, T: Float> {
    /// `[T, D]`.
    pub hidden: View<'a, T>,
    /// `[vocab, D]`.
    pub head: &'a Weight<T>,
    pub rule: LogitRule,
    /// `[T]` in `[0, 1)`, see `rng::RngKey::uniform`; unused when greedy.
    pub uniforms: View<'a, f64>,
}

/// What [`forward`] writes.
pub struct Drawn<'a, T: Float> {
    /// `[T]`.
    pub ids: ViewMut<'a, u32>,
    /// `[T]`.
    pub logp: ViewMut<'a, T>,
    /// `[T]`.
    pub entropy: ViewMut<'a, T>,
    pub alternatives: Option<Alternatives<'a, T>>,
    /// Where asked for, on a CPU only: log-probability and entropy are those of the distribution over the kept tokens.
    pub kept: Option<KeptTokens<'a>>,
}

/// The tokens that the filter kept for each row.
pub struct KeptTokens<'a> {
    /// The most tokens of a row, at least as many as the filter's `top_k` or the vocabulary.
    pub n: usize,
    /// `[T, n]`: in ascending order; rows of fewer tokens end in `u32::MAX`.
    pub ids: ViewMut<'a, u32>,
}

/// A token that the host has not read yet, named by the number of its draw in the last call of [`forward`].
pub fn drawn(number: usize) -> u32 {
    DRAWN | number as u32
}

/// The bit that marks the number of a draw; token ids are smaller.
const DRAWN: u32 = 1 << 31;

/// `out[i] = tokens[i]`, or `ids[j]` where `tokens[i]` is [`drawn`]`(j)`. Shapes: tokens, out `[T]`; ids of any length.
pub fn look_up(device: &Device, tokens: View<'_, u32>, ids: View<'_, u32>, mut out: ViewMut<'_, u32>) {
    check("sampling::look_up", "out", out.len(), tokens.len());
    match device.backend() {
        Backend::Cpu(_) => {
            for (out, &token) in out.host_mut().iter_mut().zip(tokens.host()) {
                *out = if token < DRAWN { token } else { ids.host()[(token - DRAWN) as usize] };
            }
        }
        Backend::Cuda(cuda) => cuda::look_up(cuda, tokens.cuda(), ids.cuda(), out.cuda()),
    }
}

/// Memory for logits on a GPU. It stays in place from call to call, so that calls can be recorded as a CUDA graph.
/// Empty on a CPU, whose threads have scratch memory.
#[derive(Debug)]
pub struct Logits<T: Float>(Buffer<T>);

impl<T: Float> Logits<T> {
    /// Room for the logits of `tokens` tokens, or of one chunk if that is fewer.
    pub fn new(device: &Device, vocab: usize, tokens: usize) -> Result<Self, OutOfMemory> {
        let n_rows = if device.is_async() { chunk_rows(tokens, vocab) } else { 0 };
        Ok(Logits(device.zeros(n_rows * row_pitch(vocab))?))
    }
}

/// Draws a token for each row of `from.hidden`.
pub fn forward<T: Float>(
    device: &Device,
    rule: SamplingRule,
    from: Inputs<'_, T>,
    drawn: Drawn<'_, T>,
    logits: &mut Logits<T>,
) {
    let op = "sampling::forward";
    let tokens = drawn.ids.len();
    assert!(rule.temperature() > 0.0, "{op}: temperature {} is not positive", rule.temperature());
    assert!(from.head.shape().outputs > 0, "{op}: the vocabulary is empty");
    check(op, "hidden", from.hidden.len(), tokens * from.head.shape().inputs);
    check(op, "uniforms", from.uniforms.len(), tokens);
    check(op, "logp", drawn.logp.len(), tokens);
    check(op, "entropy", drawn.entropy.len(), tokens);
    check_alternatives(op, tokens, drawn.alternatives.as_ref());
    check_kept(device, op, drawn.kept.as_ref().map(|kept| (kept.n, kept.ids.len())), tokens);
    match device.backend() {
        Backend::Cpu(cpu) => T::sampling_forward(cpu, rule, from, drawn),
        Backend::Cuda(cuda) => cuda::forward(cuda, rule, from, &drawn, logits.0.view_mut().cuda()),
    }
}
