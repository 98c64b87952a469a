//! Where every activation lies in the arena.

use super::layer::heads;
use super::lora::HiddenLayout;
use crate::config::ModelConfig;
use serde::{Deserialize, Serialize};
use stapo_ops::{Buffer, Float, ViewMut};

/// What backward computes once more instead of keeping it. No setting changes a bit of any result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Every activation is kept: fastest, most memory.
    #[default]
    Nothing,
    /// What attention and feed-forward take in is recomputed: norms, rope and swiglu. No product is computed twice.
    Inputs,
    /// All of a layer but its input is recomputed.
    Layers,
}

/// What a pass keeps of its activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// A forward pass alone: all layers share the memory of one.
    Inference,
    /// A forward pass and a backward pass.
    Training(Recompute),
}

/// A run of elements of the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Span {
    start: usize,
    len: usize,
}

/// Several spans of one buffer at once, none overlapping another.
pub fn split<T: Float, const N: usize>(buffer: &mut Buffer<T>, spans: [Span; N]) -> [ViewMut<'_, T>; N] {
    buffer.disjoint_mut(spans.map(|span| span.start..span.start + span.len))
}

/// A span of the arena for each activation of a batch of T tokens of which R are scored. Spans marked "exact" lie in the
/// arena's exact part.
#[derive(Debug, Clone)]
pub struct ArenaLayout {
    pub(super) purpose: Purpose,
    pub n_tokens: usize,
    pub n_scored: usize,
    pub(super) layers: Vec<LayerSpans>,
    /// `[T, D]`: what a half-layer adds to the residual stream; in backward, the gradient of a norm's output.
    pub(super) addend: Span,
    pub(super) head: HeadSpans,
    pub(super) gradients: GradientSpans,
    /// `None` for a pass that leaves adapters out.
    pub(super) adapters: Option<HiddenLayout>,
    pub(super) n_elements: usize,
    pub(super) n_exact: usize,
}

/// The residual stream that comes into a half-layer, and its norm.
#[derive(Debug, Clone, Copy, Default)]
pub struct EntrySpans {
    /// `[T, D]`
    pub stream: Span,
    /// `[T, D]`, or with columns for `x A^T` behind its rows.
    pub normed: Span,
    /// `[T]` exact
    pub inv_rms: Span,
}

/// Activations of one layer. D width, Q query width, W = Q + 2 KV fused width, F feed-forward width.
#[derive(Debug, Clone, Copy)]
pub struct LayerSpans {
    pub attention: EntrySpans,
    /// `[T, W]`: before norm per head and rope.
    pub raw_qkv: Span,
    /// `[T, heads + kv heads]` exact; empty without a norm per head.
    pub head_inv_rms: Span,
    /// `[T, W]`: after rope.
    pub qkv: Span,
    /// `[T, Q]`, or with columns for `x A^T` behind its rows.
    pub attended: Span,
    /// `[T, heads]` exact
    pub lse: Span,
    pub ffn: EntrySpans,
    /// `[T, 2 F]`
    pub gate_up: Span,
    /// `[T, F]`, or with columns for `x A^T` behind its rows.
    pub activated: Span,
    pub hidden: HiddenSpans,
}

/// `[T, pitch]` each: `x A^T` of the adapters of each linear layer; empty where it has none, where it lies behind x, or where
/// adapters are left out. Backward reads them, whatever it recomputes.
#[derive(Debug, Clone, Copy, Default)]
pub struct HiddenSpans {
    pub qkv: Span,
    pub output: Span,
    pub gate_up: Span,
    pub down: Span,
}

/// From the end of the residual stream to the head, for scored rows only.
#[derive(Debug, Clone, Copy)]
pub struct HeadSpans {
    /// `[R, D]`: the residual stream that comes out of the last layer.
    pub stream: Span,
    /// `[R, D]`
    pub normed: Span,
    /// `[R]` exact
    pub inv_rms: Span,
}

/// Gradients of activations, each named after its activation. The gradients of the two halves of a layer and of the head
/// are never needed at the same time: the three groups share one place.
#[derive(Debug, Clone, Copy, Default)]
pub struct GradientSpans {
    /// `[T, D]`: of the residual stream.
    pub stream: Span,
    /// `[R, D]` each
    pub head_normed: Span,
    pub head_stream: Span,
    /// `[T, F]`; `[T, 2 F]`, or with columns for the gradient of `x A^T` behind its rows
    pub activated: Span,
    pub gate_up: Span,
    /// `[T, Q]`; `[T, W]`; `[T, W]`, or with columns for the gradient of `x A^T` behind its rows
    pub attended: Span,
    pub qkv: Span,
    pub raw_qkv: Span,
    /// As the widest of the layers' `hidden`.
    pub hidden: Span,
}

/// Spans start on cache lines.
const ALIGN: usize = 16;

/// Hands out spans one behind the other.
#[derive(Default)]
struct Cursor(usize);

impl Cursor {
    fn take(&mut self, len: usize) -> Span {
        let start = self.0;
        self.0 = (start + len).next_multiple_of(ALIGN);
        Span { start, len }
    }
}

/// The two parts of an arena while they are laid out.
#[derive(Default)]
struct Cursors {
    compute: Cursor,
    exact: Cursor,
}

impl ArenaLayout {
    /// With the memory that adapters need; without it a pass leaves adapters out.
    pub fn new(
        config: &ModelConfig,
        (n_tokens, n_scored): (usize, usize),
        purpose: Purpose,
        adapters: Option<HiddenLayout>,
    ) -> Self {
        let mut at = Cursors::default();
        let behind = adapters.map_or([0; 4], HiddenLayout::behind);
        let first = LayerSpans::new(config, n_tokens, behind, &mut at);
        let mut layers = vec![first];
        for _ in 1..config.n_layers {
            layers.push(match purpose {
                Purpose::Training(Recompute::Nothing) => LayerSpans::new(config, n_tokens, behind, &mut at),
                Purpose::Training(Recompute::Inputs) => first.with_own_products(&mut at),
                Purpose::Training(Recompute::Layers) => first.with_own_input(&mut at),
                Purpose::Inference => first,
            });
        }
        let addend = at.compute.take(n_tokens * config.width);
        let head = HeadSpans {
            stream: at.compute.take(n_scored * config.width),
            normed: at.compute.take(n_scored * config.width),
            inv_rms: at.exact.take(n_scored),
        };
        let gradients = match purpose {
            Purpose::Training(_) => {
                let behind = adapters.map_or([0; 4], HiddenLayout::behind_gradients);
                GradientSpans::new(config, (n_tokens, n_scored), behind, &mut at.compute)
            }
            Purpose::Inference => GradientSpans::default(),
        };
        let layout = Self {
            purpose,
            n_tokens,
            n_scored,
            layers,
            addend,
            head,
            gradients,
            adapters,
            n_elements: at.compute.0,
            n_exact: at.exact.0,
        };
        layout.with_hidden()
    }

    /// Whether backward goes through the head and leaves the head's weight as it is.
    pub(super) fn has_frozen_head(&self) -> bool {
        matches!(self.purpose, Purpose::Training(_)) && self.adapters.is_some()
    }

    /// With memory for `x A^T` of adapters that are not joined, and for its gradient.
    fn with_hidden(mut self) -> Self {
        let Some(hidden) = self.adapters else { return self };
        let apart = hidden.apart();
        let mut at = Cursor(self.n_elements);
        let mut take = || {
            let [qkv, output, gate_up, down] = apart.map(|pitch| at.take(self.n_tokens * pitch));
            HiddenSpans { qkv, output, gate_up, down }
        };
        let first = take();
        for (index, layer) in self.layers.iter_mut().enumerate() {
            let shares = index == 0 || self.purpose == Purpose::Inference;
            layer.hidden = if shares { first } else { take() };
        }
        if let Purpose::Training(_) = self.purpose {
            let widest = hidden.pitches.into_iter().max().unwrap_or(0);
            self.gradients.hidden = at.take(self.n_tokens * widest);
        }
        self.n_elements = at.0;
        self
    }

    /// Bytes of the arena where an activation has `compute_bytes`.
    pub fn bytes(&self, compute_bytes: usize) -> usize {
        self.n_elements * compute_bytes + self.n_exact * size_of::<f32>()
    }
}

impl EntrySpans {
    fn new(config: &ModelConfig, t: usize, n_behind: usize, at: &mut Cursors) -> Self {
        Self {
            stream: at.compute.take(t * config.width),
            normed: at.compute.take(t * (config.width + n_behind)),
            inv_rms: at.exact.take(t),
        }
    }
}

impl LayerSpans {
    fn new(config: &ModelConfig, t: usize, behind: [usize; 4], at: &mut Cursors) -> Self {
        let [qkv, output, gate_up, down] = behind;
        let heads = heads(config);
        let n_normed_heads = if config.qk_norm { heads.query + heads.kv } else { 0 };
        Self {
            attention: EntrySpans::new(config, t, qkv, at),
            raw_qkv: at.compute.take(t * heads.qkv_width()),
            head_inv_rms: at.exact.take(t * n_normed_heads),
            qkv: at.compute.take(t * heads.qkv_width()),
            attended: at.compute.take(t * (heads.out_width() + output)),
            lse: at.exact.take(t * heads.query),
            ffn: EntrySpans::new(config, t, gate_up, at),
            gate_up: at.compute.take(t * 2 * config.ffn_width),
            activated: at.compute.take(t * (config.ffn_width + down)),
            hidden: HiddenSpans::default(),
        }
    }

    /// A further layer that keeps the residual stream and its products, and shares the memory of what is recomputed.
    fn with_own_products(self, at: &mut Cursors) -> Self {
        let mut own = |span: Span| at.compute.take(span.len);
        Self {
            attention: EntrySpans { stream: own(self.attention.stream), ..self.attention },
            raw_qkv: own(self.raw_qkv),
            attended: own(self.attended),
            ffn: EntrySpans { stream: own(self.ffn.stream), ..self.ffn },
            gate_up: own(self.gate_up),
            lse: at.exact.take(self.lse.len),
            ..self
        }
    }

    /// A further layer that keeps its input and shares the memory of everything else.
    fn with_own_input(self, at: &mut Cursors) -> Self {
        let stream = at.compute.take(self.attention.stream.len);
        Self { attention: EntrySpans { stream, ..self.attention }, ..self }
    }
}

impl GradientSpans {
    fn new(config: &ModelConfig, (t, r): (usize, usize), behind: [usize; 4], at: &mut Cursor) -> Self {
        let [qkv, _, gate_up, _] = behind;
        let heads = heads(config);
        let stream = at.take(t * config.width);
        let [mut head, mut ffn, mut attention] = [Cursor(at.0), Cursor(at.0), Cursor(at.0)];
        let spans = Self {
            stream,
            head_normed: head.take(r * config.width),
            head_stream: head.take(r * config.width),
            activated: ffn.take(t * config.ffn_width),
            gate_up: ffn.take(t * (2 * config.ffn_width + gate_up)),
            attended: attention.take(t * heads.out_width()),
            qkv: attention.take(t * heads.qkv_width()),
            raw_qkv: attention.take(t * (heads.qkv_width() + qkv)),
            hidden: Span::default(),
        };
        at.0 = head.0.max(ffn.0).max(attention.0);
        spans
    }
}
