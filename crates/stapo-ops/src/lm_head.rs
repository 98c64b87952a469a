//! From final hidden states to numbers per token: the log-probability of a target, the entropy, the collision
//! probability, the most probable alternatives; and back. Tokens are taken in chunks, so that the logits `[T, vocab]`
//! of all tokens are never stored.
//!
//! Law: all numbers are those of `softmax(logits / temperature)`. The logits of a row are one row of `matmul::forward`, changed
//! element by element where a [`LogitRule`] says so,
//! and the sums over a row take sixteen lanes and a fixed tree. So the numbers of a token do not depend on the other
//! tokens, and `sampling` reports the same bits.

pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod row;
#[cfg(test)]
mod tests;

use crate::cuda::Memory;
use crate::device::Backend;
use crate::{Device, Float, View, ViewMut, Weight, Write, check};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dims {
    pub tokens: usize,
    /// Positive.
    pub temperature: f64,
    pub rule: LogitRule,
}

/// How the products of hidden states and head become logits: divided, then capped to `softcap tanh(z / softcap)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitRule {
    pub divisor: f64,
    pub softcap: Option<f64>,
}

impl Default for LogitRule {
    fn default() -> Self {
        Self { divisor: 1.0, softcap: None }
    }
}

impl LogitRule {
    /// Whether the products are the logits.
    pub(crate) fn is_plain(self) -> bool {
        self == Self::default()
    }
}

/// The token that each row is read for, and the tokens that were possible in its place.
#[derive(Clone, Copy)]
pub struct Targets<'a> {
    /// `[T]`.
    pub ids: View<'a, u32>,
    /// Where present, all numbers are those of the distribution over these tokens, on a CPU only.
    pub kept: Option<Kept<'a>>,
}

impl<'a> From<View<'a, u32>> for Targets<'a> {
    fn from(ids: View<'a, u32>) -> Self {
        Targets { ids, kept: None }
    }
}

/// The tokens that a filter kept for each row. The others have probability 0: their logits count as minus infinity.
#[derive(Clone, Copy)]
pub struct Kept<'a> {
    /// The most tokens of a row.
    pub n: usize,
    /// `[T, n]`: rows of fewer tokens end in `u32::MAX`. The target is among them.
    pub ids: View<'a, u32>,
}

impl<'a> Kept<'a> {
    pub(crate) fn row(self, t: usize) -> &'a [u32] {
        let row = &self.ids.host()[t * self.n..(t + 1) * self.n];
        let n = row.iter().position(|id| *id == u32::MAX).unwrap_or(self.n);
        &row[..n]
    }
}

/// The most rows of logits that a GPU holds at once.
pub fn gpu_logit_rows(vocab: usize) -> usize {
    cuda::max_rows(vocab)
}

/// Numbers per token, each `[T]`.
pub struct HeadScores<'a, T: Float> {
    /// Log-probability of the target.
    pub logp: ViewMut<'a, T>,
    /// `-sum p ln p`.
    pub entropy: ViewMut<'a, T>,
    /// `sum p^2`.
    pub collision: ViewMut<'a, T>,
    /// `ln sum exp(logit / temperature)`, kept for backward.
    pub lse: ViewMut<'a, T>,
    /// `[T, D]`, where asked for: the derivatives of `logp` by `hidden`, all that [`backward_frozen`] needs.
    pub slopes: Option<ViewMut<'a, T>>,
}

/// The `n` most probable tokens of each row, best first, the lower id first among equals; fewer than `n` tokens in the
/// vocabulary leave the last entries at id `u32::MAX` and log-probability minus infinity.
pub struct Alternatives<'a, T: Float> {
    pub n: usize,
    /// `[T, n]`.
    pub ids: ViewMut<'a, u32>,
    /// `[T, n]`.
    pub logp: ViewMut<'a, T>,
}

/// Logits of the last chunk of a [`forward`] on a GPU, which [`backward`] of the same tokens need not compute again.
/// Empty on a CPU, and where forward left slopes.
#[derive(Debug, Default)]
pub struct LastLogits(Option<Memory>);

/// Shapes: hidden `[T, D]`; weight `[vocab, D]`.
pub fn forward<'a, T: Float>(
    device: &Device,
    dims: Dims,
    hidden: View<'_, T>,
    weight: &Weight<T>,
    targets: impl Into<Targets<'a>>,
    scores: HeadScores<'_, T>,
    alternatives: Option<Alternatives<'_, T>>,
) -> LastLogits {
    let op = "lm_head::forward";
    let targets = targets.into();
    check_inputs(device, op, dims, hidden, weight, targets);
    check(op, "logp", scores.logp.len(), dims.tokens);
    check(op, "entropy", scores.entropy.len(), dims.tokens);
    check(op, "collision", scores.collision.len(), dims.tokens);
    check(op, "lse", scores.lse.len(), dims.tokens);
    if let Some(slopes) = &scores.slopes {
        check(op, "slopes", slopes.len(), hidden.len());
    }
    check_alternatives(op, dims.tokens, alternatives.as_ref());
    match device.backend() {
        Backend::Cpu(cpu) => {
            T::lm_head_forward(cpu, dims, hidden.host(), weight, targets, scores, alternatives);
            LastLogits(None)
        }
        Backend::Cuda(cuda) => {
            let best = alternatives.as_ref();
            LastLogits(cuda::forward(cuda, dims, hidden.cuda(), weight, targets.ids.cuda(), &scores, best))
        }
    }
}

/// What [`backward`] starts from, each `[T]`.
#[derive(Clone, Copy)]
pub struct ScoreGrads<'a, T: Float> {
    pub targets: Targets<'a>,
    /// From [`forward`].
    pub lse: View<'a, T>,
    /// From [`forward`].
    pub entropy: View<'a, T>,
    pub d_logp: View<'a, T>,
    pub d_entropy: View<'a, T>,
}

/// What [`backward`] writes.
pub struct HeadGrads<'a, T: Float> {
    /// `[T, D]`, overwritten.
    pub d_hidden: ViewMut<'a, T>,
    /// `[vocab, D]`: one chain over the tokens, on a GPU in chunks from the last to the first, which overwrites or adds.
    /// `None` for a frozen head.
    pub d_weight: Option<(ViewMut<'a, T>, Write)>,
}

/// Recomputes all logits but those of the last chunk, which `logits` may hold. Shapes: hidden `[T, D]`; weight
/// `[vocab, D]`.
pub fn backward<T: Float>(
    device: &Device,
    dims: Dims,
    hidden: View<'_, T>,
    weight: &Weight<T>,
    grads: ScoreGrads<'_, T>,
    logits: LastLogits,
    to: HeadGrads<'_, T>,
) {
    let op = "lm_head::backward";
    check_inputs(device, op, dims, hidden, weight, grads.targets);
    check(op, "lse", grads.lse.len(), dims.tokens);
    check(op, "entropy", grads.entropy.len(), dims.tokens);
    check(op, "d_logp", grads.d_logp.len(), dims.tokens);
    check(op, "d_entropy", grads.d_entropy.len(), dims.tokens);
    check(op, "d_hidden", to.d_hidden.len(), hidden.len());
    if let Some((d_weight, _)) = &to.d_weight {
        check(op, "d_weight", d_weight.len(), weight.shape().len());
    }
    match device.backend() {
        Backend::Cpu(cpu) => T::lm_head_backward(cpu, dims, hidden.host(), weight, grads, to),
        Backend::Cuda(cuda) => cuda::backward(cuda, dims, hidden.cuda(), weight, grads, logits.0, &to),
    }
}

/// [`backward`] of a frozen head whose [`forward`] left `slopes`, for derivatives by log-probabilities alone: no logits are
/// computed again. Shapes: d_logp `[T]`; slopes `[T, D]`, which become the gradient of `hidden`.
pub fn backward_frozen<T: Float>(device: &Device, d_logp: View<'_, T>, slopes: ViewMut<'_, T>) {
    let tokens = d_logp.len();
    assert!(
        slopes.len().is_multiple_of(tokens.max(1)),
        "lm_head::backward_frozen: {} slopes of {tokens} tokens",
        slopes.len()
    );
    match device.backend() {
        Backend::Cpu(cpu) => T::lm_head_scale_rows(cpu, d_logp.host(), slopes.into_host()),
        Backend::Cuda(cuda) => cuda::scale_rows(cuda, d_logp.cuda(), slopes.cuda()),
    }
}

#[track_caller]
fn check_inputs<T: Float>(
    device: &Device,
    op: &str,
    dims: Dims,
    hidden: View<'_, T>,
    weight: &Weight<T>,
    Targets { ids: targets, kept }: Targets<'_>,
) {
    let vocab = weight.shape().outputs;
    assert!(dims.temperature > 0.0, "{op}: temperature {} is not positive", dims.temperature);
    check(op, "hidden", hidden.len(), dims.tokens * weight.shape().inputs);
    check(op, "targets", targets.len(), dims.tokens);
    check_kept(device, op, kept.map(|kept| (kept.n, kept.ids.len())), dims.tokens);
    // On a GPU the check would wait for the targets to be copied back.
    let Backend::Cpu(_) = device.backend() else { return };
    if let Some(t) = targets.host().iter().position(|id| *id as usize >= vocab) {
        panic!("{op}: target {} of token {t} is not below {vocab}", targets.host()[t]);
    }
}

#[track_caller]
pub(crate) fn check_alternatives<T: Float>(
    op: &str,
    tokens: usize,
    alternatives: Option<&Alternatives<'_, T>>,
) {
    if let Some(best) = alternatives {
        check(op, "alternatives.ids", best.ids.len(), tokens * best.n);
        check(op, "alternatives.logp", best.logp.len(), tokens * best.n);
    }
}

/// Checks tokens of rows that are kept, given by the most of a row and the length of all rows.
#[track_caller]
pub(crate) fn check_kept(device: &Device, op: &str, kept: Option<(usize, usize)>, tokens: usize) {
    if let Some((n, len)) = kept {
        assert!(matches!(device.backend(), Backend::Cpu(_)), "{op}: kept tokens are for CPUs");
        check(op, "kept", len, tokens * n);
    }
}
