//! Where every activation lies in the arena.

mod columns;
mod scored;

use super::lora::{HiddenColumns, HiddenLayout};
use crate::config::{LinearRole, ModelConfig};
use columns::LayerColumns;
pub use scored::ScoredRows;
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

/// Rows of a batch, as far as memory is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchRows {
    pub tokens: usize,
    pub scored: usize,
    /// Rows of keys of sequences that share rows; 0 if none do.
    pub keys: usize,
}

impl From<(usize, usize)> for BatchRows {
    fn from((tokens, scored): (usize, usize)) -> Self {
        Self { tokens, scored, keys: 0 }
    }
}

/// A run of elements of the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Span {
    start: usize,
    len: usize,
}

impl Span {
    /// The first `len` elements.
    fn first(self, len: usize) -> Self {
        Self { len, ..self }
    }
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
    /// Whether the pass computes the terms of adapters.
    pub(super) has_adapters: bool,
    pub(super) n_elements: usize,
    pub(super) n_exact: usize,
}

/// The residual stream that comes into a half-layer, and its norm.
#[derive(Debug, Clone, Copy, Default)]
pub struct EntrySpans {
    /// `[T, D]`
    pub stream: Span,
    /// `[T, D]`, or with columns for `x A^T` after its rows.
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
    /// `[T, Q]`, or with columns for `x A^T` after its rows.
    pub attended: Span,
    /// `[T, heads]` exact
    pub lse: Span,
    /// `[E, 2 KV]`: copies of keys and values for sequences that share rows. All layers share its memory, in training with the
    /// gradients of activations: it is made again in backward.
    pub keys: Span,
    /// What attention's norm on its result takes in.
    pub attention_result: ResultSpans,
    pub ffn: EntrySpans,
    /// `[T, 2 F]`
    pub gate_up: Span,
    /// `[T, F]`, or with columns for `x A^T` after its rows.
    pub activated: Span,
    /// What the feed-forward's norm on its result takes in.
    pub ffn_result: ResultSpans,
    pub hidden: HiddenSpans,
    pub gradients: LayerGradientSpans,
}

/// What the norm on a half-layer's result keeps for backward; empty without such a norm.
#[derive(Debug, Clone, Copy, Default)]
pub struct ResultSpans {
    /// `[T, D]`: the half-layer's last product.
    pub product: Span,
    /// `[T]` exact
    pub inv_rms: Span,
}

/// `x A^T` of the adapters of each linear layer. Backward reads it, whatever it recomputes.
#[derive(Debug, Clone, Copy, Default)]
pub struct HiddenSpans {
    pub qkv: HiddenSpan,
    pub output: HiddenSpan,
    pub gate_up: HiddenSpan,
    pub down: HiddenSpan,
}

/// Where `x A^T` of a linear layer's adapters lies.
#[derive(Debug, Clone, Copy, Default)]
pub enum HiddenSpan {
    /// The linear layer has no adapters, or the pass leaves them out.
    #[default]
    Absent,
    /// `[T, pitch]`
    Apart(Span),
    /// After each row of x.
    BehindInput,
}

impl HiddenSpan {
    /// The memory of `x A^T` that does not lie after x.
    pub fn elements(self) -> Span {
        match self {
            Self::Apart(span) => span,
            Self::Absent | Self::BehindInput => Span::default(),
        }
    }
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

/// Gradients of activations that all layers share, each named after its activation. The gradients of the two halves of a
/// layer and of the head are never needed at the same time: the three groups share one memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct GradientSpans {
    /// `[T, D]`: of the residual stream.
    pub stream: Span,
    /// `[R, D]` each
    pub head_normed: Span,
    pub head_stream: Span,
    /// As the widest of the layers' `hidden`.
    pub hidden: Span,
}

/// Gradients of the activations of one layer; empty if there is no backward.
#[derive(Debug, Clone, Copy, Default)]
pub struct LayerGradientSpans {
    /// `[T, F]`
    pub activated: Span,
    /// `[T, 2 F]`
    pub gate_up: OutputSpan,
    /// `[T, Q]`
    pub attended: Span,
    /// `[T, W]`
    pub qkv: Span,
    /// `[T, W]`
    pub raw_qkv: OutputSpan,
    /// `[E, 2 KV]` each: the copies of keys and values, and their gradients.
    pub keys: [Span; 2],
}

/// The gradient of a linear layer's outputs.
#[derive(Debug, Clone, Copy, Default)]
pub struct OutputSpan {
    pub rows: Span,
    /// Whether its rows have columns for the gradient of `x A^T` after them.
    pub is_joined: bool,
}

/// Spans start on cache lines.
const ALIGN: usize = 16;

/// Hands out spans one after another.
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
        rows: impl Into<BatchRows>,
        purpose: Purpose,
        adapters: Option<&HiddenLayout>,
    ) -> Self {
        let BatchRows { tokens: n_tokens, scored: n_scored, keys: n_keys } = rows.into();
        let mut at = Cursors::default();
        let width = config.width;
        let hidden = |layer, role| adapters.map(|hidden| hidden.columns(layer, role)).unwrap_or_default();
        let columns = |(index, spec)| LayerColumns::new(width, spec, |role| hidden(index, role));
        let columns: Vec<LayerColumns> = (0..).zip(&config.layers).map(columns).collect();
        let mut layers = LayerSpans::all(&columns, (n_tokens, width), purpose, &mut at);
        let addend = at.compute.take(n_tokens * width);
        let head = HeadSpans {
            stream: at.compute.take(n_scored * width),
            normed: at.compute.take(n_scored * width),
            inv_rms: at.exact.take(n_scored),
        };
        let mut gradients = GradientSpans::default();
        if let Purpose::Training(_) = purpose {
            gradients.stream = at.compute.take(n_tokens * width);
            let mut head_at = Cursor(at.compute.0);
            gradients.head_normed = head_at.take(n_scored * width);
            gradients.head_stream = head_at.take(n_scored * width);
            let (start, mut end) = (at.compute.0, head_at.0);
            for (layer, columns) in layers.iter_mut().zip(&columns) {
                let layer_end;
                (layer.gradients, layer_end) = LayerGradientSpans::new(columns, (n_tokens, n_keys), start);
                layer.keys = layer.gradients.keys[0];
                end = end.max(layer_end);
            }
            at.compute.0 = end;
        } else {
            let widest = columns.iter().map(|columns| columns.keys).max().unwrap_or(0);
            let shared = at.compute.take(n_keys * widest);
            for (layer, columns) in layers.iter_mut().zip(&columns) {
                layer.keys = shared.first(n_keys * columns.keys);
            }
        }
        let start = at.compute.0;
        let mut end = start;
        for (index, layer) in layers.iter_mut().enumerate() {
            if purpose == Purpose::Inference {
                at.compute.0 = start;
            }
            layer.hidden = HiddenSpans::new(|role| match hidden(index, role) {
                HiddenColumns { pitch: 0, .. } => HiddenSpan::Absent,
                HiddenColumns { is_joined: true, .. } => HiddenSpan::BehindInput,
                HiddenColumns { pitch, .. } => HiddenSpan::Apart(at.compute.take(n_tokens * pitch)),
            });
            end = end.max(at.compute.0);
        }
        at.compute.0 = end;
        if let (Purpose::Training(_), Some(hidden)) = (purpose, adapters) {
            gradients.hidden = at.compute.take(n_tokens * hidden.widest_pitch());
        }
        Self {
            purpose,
            n_tokens,
            n_scored,
            layers,
            addend,
            head,
            gradients,
            has_adapters: adapters.is_some(),
            n_elements: at.compute.0,
            n_exact: at.exact.0,
        }
    }

    /// Whether backward goes through the head and leaves the head's weight as it is.
    pub(super) fn has_frozen_head(&self) -> bool {
        matches!(self.purpose, Purpose::Training(_)) && self.has_adapters
    }

    /// Bytes of the arena where an activation has `compute_bytes`.
    pub fn bytes(&self, compute_bytes: usize) -> usize {
        self.n_elements * compute_bytes + self.n_exact * size_of::<f32>()
    }
}

impl HiddenSpans {
    fn new(mut span: impl FnMut(LinearRole) -> HiddenSpan) -> Self {
        Self {
            qkv: span(LinearRole::QueryKeyValue),
            output: span(LinearRole::AttentionOutput),
            gate_up: span(LinearRole::GateUp),
            down: span(LinearRole::Down),
        }
    }
}

impl EntrySpans {
    fn new((t, width): (usize, usize), normed_columns: usize, at: &mut Cursors) -> Self {
        Self {
            stream: at.compute.take(t * width),
            normed: at.compute.take(t * normed_columns),
            inv_rms: at.exact.take(t),
        }
    }
}

impl ResultSpans {
    fn new(t: usize, columns: usize, at: &mut Cursors) -> Self {
        let n_rows = if columns > 0 { t } else { 0 };
        Self { product: at.compute.take(t * columns), inv_rms: at.exact.take(n_rows) }
    }

    fn cut(self, t: usize, columns: usize) -> Self {
        let n_rows = if columns > 0 { t } else { 0 };
        Self { product: self.product.first(t * columns), inv_rms: self.inv_rms.first(n_rows) }
    }
}

impl LayerSpans {
    /// The spans of all layers: what a layer keeps for backward is in separate memory, the rest in memory that layers
    /// share.
    fn all(columns: &[LayerColumns], rows: (usize, usize), purpose: Purpose, at: &mut Cursors) -> Vec<Self> {
        if purpose == Purpose::Training(Recompute::Nothing) {
            return columns.iter().map(|columns| Self::new(columns, rows, at)).collect();
        }
        let Some(widest) = columns.iter().copied().reduce(LayerColumns::widest) else { return Vec::new() };
        let shared = Self::new(&widest, rows, at);
        let spans = |(index, columns): (usize, &LayerColumns)| {
            let layer = shared.cut(columns, rows.0);
            match purpose {
                _ if index == 0 => layer,
                Purpose::Training(Recompute::Inputs) => layer.with_products(at),
                Purpose::Training(Recompute::Layers) => layer.with_input(at),
                Purpose::Training(Recompute::Nothing) | Purpose::Inference => layer,
            }
        };
        columns.iter().enumerate().map(spans).collect()
    }

    fn new(columns: &LayerColumns, (t, width): (usize, usize), at: &mut Cursors) -> Self {
        Self {
            attention: EntrySpans::new((t, width), columns.attention_normed, at),
            raw_qkv: at.compute.take(t * columns.raw_qkv),
            head_inv_rms: at.exact.take(t * columns.normed_heads),
            qkv: at.compute.take(t * columns.qkv),
            attended: at.compute.take(t * columns.attended),
            lse: at.exact.take(t * columns.heads),
            keys: Span::default(),
            attention_result: ResultSpans::new(t, columns.result, at),
            ffn: EntrySpans::new((t, width), columns.ffn_normed, at),
            gate_up: at.compute.take(t * 2 * columns.ffn),
            activated: at.compute.take(t * columns.activated),
            ffn_result: ResultSpans::new(t, columns.result, at),
            hidden: HiddenSpans::default(),
            gradients: LayerGradientSpans::default(),
        }
    }

    /// The same memory for a layer of these columns, which are no wider.
    fn cut(self, columns: &LayerColumns, t: usize) -> Self {
        let entry = |spans: EntrySpans, normed_columns| EntrySpans {
            normed: spans.normed.first(t * normed_columns),
            ..spans
        };
        Self {
            attention: entry(self.attention, columns.attention_normed),
            raw_qkv: self.raw_qkv.first(t * columns.raw_qkv),
            head_inv_rms: self.head_inv_rms.first(t * columns.normed_heads),
            qkv: self.qkv.first(t * columns.qkv),
            attended: self.attended.first(t * columns.attended),
            lse: self.lse.first(t * columns.heads),
            attention_result: self.attention_result.cut(t, columns.result),
            ffn: entry(self.ffn, columns.ffn_normed),
            gate_up: self.gate_up.first(t * 2 * columns.ffn),
            activated: self.activated.first(t * columns.activated),
            ffn_result: self.ffn_result.cut(t, columns.result),
            ..self
        }
    }

    /// With separate memory for the residual stream and the layer's products.
    fn with_products(self, at: &mut Cursors) -> Self {
        let [attention_result, ffn_result] =
            [self.attention_result, self.ffn_result].map(|result| ResultSpans {
                product: at.compute.take(result.product.len),
                inv_rms: at.exact.take(result.inv_rms.len),
            });
        let mut take = |span: Span| at.compute.take(span.len);
        Self {
            attention_result,
            ffn_result,
            attention: EntrySpans { stream: take(self.attention.stream), ..self.attention },
            raw_qkv: take(self.raw_qkv),
            attended: take(self.attended),
            ffn: EntrySpans { stream: take(self.ffn.stream), ..self.ffn },
            gate_up: take(self.gate_up),
            lse: at.exact.take(self.lse.len),
            ..self
        }
    }

    /// With separate memory for the layer's input.
    fn with_input(self, at: &mut Cursors) -> Self {
        let stream = at.compute.take(self.attention.stream.len);
        Self { attention: EntrySpans { stream, ..self.attention }, ..self }
    }
}

impl LayerGradientSpans {
    /// Spans from `start` on, and the end of the last.
    fn new(columns: &LayerColumns, (t, n_keys): (usize, usize), start: usize) -> (Self, usize) {
        let [mut ffn, mut attention] = [Cursor(start), Cursor(start)];
        let output = |at: &mut Cursor, columns: usize, behind: usize| OutputSpan {
            rows: at.take(t * (columns + behind)),
            is_joined: behind > 0,
        };
        let spans = Self {
            activated: ffn.take(t * columns.ffn),
            gate_up: output(&mut ffn, 2 * columns.ffn, columns.behind_d_gate_up),
            attended: attention.take(t * columns.query),
            qkv: attention.take(t * columns.d_qkv),
            raw_qkv: output(&mut attention, columns.d_raw_qkv, columns.behind_d_qkv),
            keys: [(); 2].map(|()| attention.take(n_keys * columns.keys)),
        };
        (spans, ffn.0.max(attention.0))
    }
}
