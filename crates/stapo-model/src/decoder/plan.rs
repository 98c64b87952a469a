//! Where every activation lies in the arena.

use crate::config::ModelConfig;
use std::ops::Range;

/// What a forward pass keeps for backward. None of it changes a bit of any result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// Nothing: there will be no backward.
    Nothing,
    /// Each layer's input; backward computes the rest of the layer once more.
    LayerInputs,
    /// The residual stream and what the products gave; backward computes once more what is cheap: norms, rope and swiglu.
    Products,
    /// Everything: fastest, most memory.
    Everything,
}

/// A range of the arena for each activation of a batch of T tokens of which R are scored. What is marked exact lies in the
/// arena's exact part.
#[derive(Debug, Clone)]
pub struct Plan {
    pub keep: Keep,
    pub n_tokens: usize,
    pub n_scored: usize,
    pub layers: Vec<LayerRanges>,
    /// `[T, D]`: what a half-layer adds to the residual stream; in backward, the gradient of a norm's output.
    pub delta: Range<usize>,
    pub head: HeadRanges,
    pub backward: BackwardRanges,
    pub n_elements: usize,
    pub n_exact: usize,
}

/// Activations of one layer. D width, Q query width, W = Q + 2 KV fused width, F feed-forward width.
#[derive(Debug, Clone)]
pub struct LayerRanges {
    /// `[T, D]`: the residual stream that comes in.
    pub input: Range<usize>,
    /// `[T, D]`, `[T]` exact: the attention's norm.
    pub attention_norm: Range<usize>,
    pub attention_inv_rms: Range<usize>,
    /// `[T, W]`: before norm per head and rope.
    pub raw_qkv: Range<usize>,
    /// `[T, heads + kv heads]` exact; empty without a norm per head.
    pub head_inv_rms: Range<usize>,
    /// `[T, W]`: after rope.
    pub qkv: Range<usize>,
    /// `[T, Q]`, `[T, heads]` exact
    pub attention: Range<usize>,
    pub lse: Range<usize>,
    /// `[T, D]`: the residual stream between the halves.
    pub middle: Range<usize>,
    /// `[T, D]`, `[T]` exact: the feed-forward's norm.
    pub ffn_norm: Range<usize>,
    pub ffn_inv_rms: Range<usize>,
    /// `[T, 2 F]`, `[T, F]`
    pub gate_up: Range<usize>,
    pub ffn: Range<usize>,
}

/// From the residual stream's end to the head, for scored rows only.
#[derive(Debug, Clone)]
pub struct HeadRanges {
    /// `[R, D]`: the residual stream that comes out of the last layer.
    pub rows: Range<usize>,
    /// `[R, D]`, `[R]` exact
    pub norm: Range<usize>,
    pub inv_rms: Range<usize>,
}

/// Gradients; those of the two halves of a layer take turns in one place.
#[derive(Debug, Clone)]
pub struct BackwardRanges {
    /// `[T, D]`: of the residual stream.
    pub residual: Range<usize>,
    /// `[R, D]`, `[R, D]`
    pub head_norm: Range<usize>,
    pub rows: Range<usize>,
    /// `[T, F]`, `[T, 2 F]`
    pub ffn: Range<usize>,
    pub gate_up: Range<usize>,
    /// `[T, Q]`, `[T, W]`, `[T, W]`
    pub attention: Range<usize>,
    pub qkv: Range<usize>,
    pub raw_qkv: Range<usize>,
}

/// Ranges start on cache lines.
const ALIGN: usize = 16;

struct Cursor(usize);

impl Cursor {
    fn take(&mut self, n_elements: usize) -> Range<usize> {
        let start = self.0;
        self.0 = (start + n_elements).next_multiple_of(ALIGN);
        start..start + n_elements
    }
}

impl Plan {
    pub fn new(config: &ModelConfig, n_tokens: usize, n_scored: usize, keep: Keep) -> Self {
        let (t, r, d) = (n_tokens, n_scored, config.width);
        let (mut at, mut exact) = (Cursor(0), Cursor(0));
        let layers = match keep {
            Keep::Everything => {
                (0..config.n_layers).map(|_| LayerRanges::new(config, t, &mut at, &mut exact)).collect()
            }
            Keep::Products => {
                let shared = LayerRanges::new(config, t, &mut at, &mut exact);
                (0..config.n_layers).map(|layer| shared.next(layer, &mut at, &mut exact)).collect()
            }
            Keep::LayerInputs => {
                let shared = LayerRanges::new(config, t, &mut at, &mut exact);
                let own = |layer| if layer == 0 { shared.input.clone() } else { at.take(t * d) };
                (0..config.n_layers).map(own).map(|input| LayerRanges { input, ..shared.clone() }).collect()
            }
            Keep::Nothing => {
                vec![LayerRanges::new(config, t, &mut at, &mut exact); config.n_layers]
            }
        };
        let delta = at.take(t * d);
        let head = HeadRanges { rows: at.take(r * d), norm: at.take(r * d), inv_rms: exact.take(r) };
        let backward =
            BackwardRanges::new(config, t, r, if keep == Keep::Nothing { None } else { Some(&mut at) });
        Self { keep, n_tokens, n_scored, layers, delta, head, backward, n_elements: at.0, n_exact: exact.0 }
    }

    /// Bytes of the arena where an activation has `compute_bytes`.
    pub fn bytes(&self, compute_bytes: usize) -> usize {
        self.n_elements * compute_bytes + self.n_exact * size_of::<f32>()
    }
}

impl LayerRanges {
    fn new(config: &ModelConfig, t: usize, at: &mut Cursor, exact: &mut Cursor) -> Self {
        let (d, f, q, w) = (config.width, config.ffn_width, query_width(config), qkv_width(config));
        let n_normed_heads = if config.qk_norm { config.n_heads + config.n_kv_heads } else { 0 };
        Self {
            input: at.take(t * d),
            attention_norm: at.take(t * d),
            attention_inv_rms: exact.take(t),
            raw_qkv: at.take(t * w),
            head_inv_rms: exact.take(t * n_normed_heads),
            qkv: at.take(t * w),
            attention: at.take(t * q),
            lse: exact.take(t * config.n_heads),
            middle: at.take(t * d),
            ffn_norm: at.take(t * d),
            ffn_inv_rms: exact.take(t),
            gate_up: at.take(t * 2 * f),
            ffn: at.take(t * f),
        }
    }
}

impl LayerRanges {
    /// The ranges of a further layer that keeps its own products and shares what is made from them.
    fn next(&self, layer: usize, at: &mut Cursor, exact: &mut Cursor) -> Self {
        if layer == 0 {
            return self.clone();
        }
        let [input, raw_qkv, attention, middle, gate_up] =
            [&self.input, &self.raw_qkv, &self.attention, &self.middle, &self.gate_up]
                .map(|r| at.take(r.len()));
        Self { input, raw_qkv, attention, lse: exact.take(self.lse.len()), middle, gate_up, ..self.clone() }
    }
}

impl BackwardRanges {
    fn new(config: &ModelConfig, t: usize, r: usize, at: Option<&mut Cursor>) -> Self {
        let Some(at) = at else {
            let none = 0..0;
            return Self {
                residual: none.clone(),
                head_norm: none.clone(),
                rows: none.clone(),
                ffn: none.clone(),
                gate_up: none.clone(),
                attention: none.clone(),
                qkv: none.clone(),
                raw_qkv: none,
            };
        };
        let (d, f, q, w) = (config.width, config.ffn_width, query_width(config), qkv_width(config));
        let residual = at.take(t * d);
        let turns = at.0;
        let (ffn, gate_up) = (at.take(t * f), at.take(t * 2 * f));
        let ffn_end = std::mem::replace(&mut at.0, turns);
        let (attention, qkv, raw_qkv) = (at.take(t * q), at.take(t * w), at.take(t * w));
        let attention_end = std::mem::replace(&mut at.0, turns);
        let (head_norm, rows) = (at.take(r * d), at.take(r * d));
        at.0 = at.0.max(ffn_end).max(attention_end);
        Self { residual, head_norm, rows, ffn, gate_up, attention, qkv, raw_qkv }
    }
}

pub fn query_width(config: &ModelConfig) -> usize {
    config.n_heads * config.head_dim
}

/// Q + 2 KV.
pub fn qkv_width(config: &ModelConfig) -> usize {
    (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
}
