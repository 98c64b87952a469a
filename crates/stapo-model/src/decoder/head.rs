//! The language model head over scored rows: log-probs, entropies and the likeliest alternatives; and back.

use super::accumulate::Accumulate;
use super::arena::Arena;
use super::layout::ArenaLayout;
use super::policy::Policy;
use stapo_ops::lm_head::{self, LastLogits, Targets};
use stapo_ops::{Buffer, Device, Float, OutOfMemory, PendingDownload};

/// How the head is read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadOptions {
    /// Divides the logits; above 0.
    pub temperature: f64,
    /// Likeliest tokens to list in each scored token's place.
    pub n_alternatives: usize,
    /// Whether backward may be given derivatives by entropies. Where it is not, the head of a model with adapters, which is
    /// frozen, computes its logits once instead of twice.
    pub has_entropy_gradient: bool,
}

impl Default for HeadOptions {
    fn default() -> Self {
        Self { temperature: 1.0, n_alternatives: 0, has_entropy_gradient: true }
    }
}

/// Numbers of each scored token, in the order of the batch.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenScores<T = f32> {
    /// `[R]`: the token's log-probability.
    pub logp: Vec<T>,
    /// `[R]`: entropy of the distribution in the token's place, in nats.
    pub entropy: Vec<T>,
    /// `[R]`: the chance that two draws from that distribution agree, sum of p^2.
    pub collision: Vec<T>,
    /// `[R]`, or empty if not asked for: the likeliest tokens in the token's place and their log-probabilities, likeliest
    /// first.
    pub alternatives: Vec<Vec<(u32, T)>>,
}

/// The numbers of each scored token on their way to the host, while the device continues with what is queued.
#[derive(Debug)]
pub struct PendingScores<T: Float = f32> {
    logp: PendingDownload<T>,
    entropy: PendingDownload<T>,
    collision: PendingDownload<T>,
    alternatives: PendingAlternatives<T>,
}

/// The likeliest tokens in each scored token's place on their way to the host.
#[derive(Debug)]
pub struct PendingAlternatives<T: Float = f32> {
    n: usize,
    /// `[R, n]` each
    ids: PendingDownload<u32>,
    logp: PendingDownload<T>,
}

impl<T: Float> PendingScores<T> {
    /// Waits for all numbers.
    pub fn wait(self) -> TokenScores<T> {
        let (scores, alternatives) = self.wait_for_numbers();
        TokenScores { alternatives: alternatives.wait(), ..scores }
    }

    /// Waits for log-probs, entropies and collisions; the alternatives of the result are empty.
    pub fn wait_for_numbers(self) -> (TokenScores<T>, PendingAlternatives<T>) {
        let scores = TokenScores {
            logp: self.logp.wait(),
            entropy: self.entropy.wait(),
            collision: self.collision.wait(),
            alternatives: Vec::new(),
        };
        (scores, self.alternatives)
    }
}

impl<T: Float> PendingAlternatives<T> {
    /// One list for each scored token, likeliest first; nothing where none were asked for.
    pub fn wait(self) -> Vec<Vec<(u32, T)>> {
        alternatives(self.n, &self.ids.wait(), &self.logp.wait())
    }
}

/// What the head gave for scored rows, on the device; backward starts from it.
#[derive(Debug)]
pub struct HeadOutputs<T: Float> {
    dims: lm_head::Dims,
    /// `[R]` each
    logp: Buffer<T>,
    entropy: Buffer<T>,
    collision: Buffer<T>,
    lse: Buffer<T>,
    left: Left,
}

/// What forward leaves to backward besides the numbers of tokens.
#[derive(Debug)]
enum Left {
    /// Logits that backward need not compute again.
    Logits(LastLogits),
    /// The derivatives of log-probs by the normed rows, in the place of the latter's gradient.
    Slopes,
}

impl<T: Float> HeadOutputs<T> {
    /// Queues the head for the rows that the stack left in the arena. The targets are `[R]`.
    pub fn start(
        policy: &Policy<T>,
        layout: &ArenaLayout,
        arena: &mut Arena<T>,
        targets: Targets<'_>,
        options: HeadOptions,
    ) -> Result<(Self, PendingScores<T>), OutOfMemory> {
        let device = policy.device();
        let dims = lm_head::Dims {
            tokens: layout.n_scored,
            temperature: options.temperature,
            rule: policy.config().logits,
        };
        let mut outputs = Self::zeros(device, dims)?;
        let n = options.n_alternatives.min(policy.config().vocabulary);
        let mut ids = device.zeros(dims.tokens * n)?;
        let mut logp = device.zeros(dims.tokens * n)?;
        let best = lm_head::Alternatives { n, ids: ids.view_mut(), logp: logp.view_mut() };
        let has_slopes = layout.has_frozen_head() && !options.has_entropy_gradient;
        let (hidden, slopes) = if has_slopes {
            let views = arena.head_backward(layout);
            (views.normed, Some(views.d_normed))
        } else {
            (arena.hidden(layout), None)
        };
        let scores = lm_head::HeadScores {
            logp: outputs.logp.view_mut(),
            entropy: outputs.entropy.view_mut(),
            collision: outputs.collision.view_mut(),
            lse: outputs.lse.view_mut(),
            slopes,
        };
        let head = policy.weights.head().matrix();
        let logits = lm_head::forward(device, dims, hidden, head, targets, scores, (n > 0).then_some(best));
        outputs.left = if has_slopes { Left::Slopes } else { Left::Logits(logits) };
        let scores = PendingScores {
            logp: outputs.logp.view().fetch(),
            entropy: outputs.entropy.view().fetch(),
            collision: outputs.collision.view().fetch(),
            alternatives: PendingAlternatives { n, ids: ids.view().fetch(), logp: logp.view().fetch() },
        };
        Ok((outputs, scores))
    }

    fn zeros(device: &Device, dims: lm_head::Dims) -> Result<Self, OutOfMemory> {
        Ok(Self {
            dims,
            logp: device.zeros(dims.tokens)?,
            entropy: device.zeros(dims.tokens)?,
            collision: device.zeros(dims.tokens)?,
            lse: device.zeros(dims.tokens)?,
            left: Left::Logits(LastLogits::default()),
        })
    }

    /// Leaves the gradient of the normed scored rows in the arena and adds to the head's, where this is trained.
    pub fn backward(
        self,
        policy: &Policy<T>,
        layout: &ArenaLayout,
        arena: &mut Arena<T>,
        token_gradients: TokenGradients<'_, T>,
        gradients: &mut impl Accumulate<T>,
    ) -> Result<(), OutOfMemory> {
        let device = policy.device();
        let d_logp = device.upload(token_gradients.d_logp)?;
        let views = arena.head_backward(layout);
        let Left::Logits(logits) = self.left else {
            assert!(
                token_gradients.d_entropy.iter().all(|d| *d == T::ZERO),
                "backward: derivatives by entropies, which forward was asked to leave out"
            );
            lm_head::backward_frozen(device, d_logp.view(), views.d_normed);
            gradients.head_done();
            return Ok(());
        };
        let d_entropy = device.upload(token_gradients.d_entropy)?;
        let grads = lm_head::ScoreGrads {
            targets: token_gradients.targets,
            lse: self.lse.view(),
            entropy: self.entropy.view(),
            d_logp: d_logp.view(),
            d_entropy: d_entropy.view(),
        };
        let head = policy.weights.head().matrix();
        let to = lm_head::HeadGrads { d_hidden: views.d_normed, d_weight: gradients.head() };
        lm_head::backward(device, self.dims, views.normed, head, grads, logits, to);
        gradients.head_done();
        Ok(())
    }
}

/// What backward starts from, `[R]` each.
#[derive(Clone, Copy)]
pub struct TokenGradients<'a, T: Float> {
    pub targets: Targets<'a>,
    pub d_logp: &'a [T],
    pub d_entropy: &'a [T],
}

/// `[R, n]` to one list per row; a vocabulary smaller than `n` gives shorter lists.
pub fn alternatives<T: Float>(n: usize, ids: &[u32], logp: &[T]) -> Vec<Vec<(u32, T)>> {
    let rows = ids.chunks_exact(n.max(1)).zip(logp.chunks_exact(n.max(1)));
    rows.map(|(ids, logp)| {
        ids.iter().copied().zip(logp.iter().copied()).filter(|(id, _)| *id != u32::MAX).collect()
    })
    .collect()
}
