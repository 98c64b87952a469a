//! Columns of a layer's activations.

use crate::config::{AttentionSpec, DeltaNetSpec, LayerSpec, LinearRole, Mixer, QkNorm};
use crate::decoder::lora::HiddenColumns;

/// Columns of the activations of a layer. Layers that share memory share that of the widest.
#[derive(Debug, Clone, Copy)]
pub(super) struct LayerColumns {
    pub attention_normed: usize,
    pub raw_qkv: usize,
    pub qkv: usize,
    pub d_qkv: usize,
    pub d_raw_qkv: usize,
    pub normed_heads: usize,
    pub query: usize,
    pub attended: usize,
    pub heads: usize,
    /// Of copies of keys and values.
    pub keys: usize,
    pub ffn_normed: usize,
    pub ffn: usize,
    pub activated: usize,
    /// Of the products that are normed before they are added to the residual stream.
    pub result: usize,
    /// After the gradients of the outputs of queries, keys and values, and of gate and up.
    pub behind_d_qkv: usize,
    pub behind_d_gate_up: usize,
}

impl LayerColumns {
    pub fn new(width: usize, spec: &LayerSpec, hidden: impl Fn(LinearRole) -> HiddenColumns) -> Self {
        let behind =
            |role| Some(hidden(role)).filter(|hidden| hidden.is_joined).map_or(0, |hidden| hidden.pitch);
        let behind_gradient = |role| {
            Some(hidden(role)).filter(|hidden| hidden.joins_gradients).map_or(0, |hidden| hidden.pitch)
        };
        let (projected, query) = spec.mixer_widths();
        let keys = spec.attention().map_or(0, |attention| 2 * attention.heads.kv * attention.heads.dim);
        let (normed_heads, heads) = match &spec.mixer {
            Mixer::Attention(AttentionSpec { heads, qk_norm: QkNorm::Absent, .. }) => (0, heads.query),
            Mixer::Attention(AttentionSpec { heads, .. }) => (heads.query + heads.kv, heads.query),
            Mixer::DeltaNet(DeltaNetSpec { heads, .. }) => (heads.n_norms(), 0),
        };
        // With a gate on attention's outputs, queries, keys and values are followed by the gates and by the outputs in front of them;
        // their gradients after rope by those before it, and these two.
        let gated = spec.attention().filter(|attention| attention.has_output_gate);
        let (behind_raw, behind_d) =
            gated.map_or((0, 0), |attention| (query, attention.heads.qkv_width() + query));
        Self {
            attention_normed: width + behind(LinearRole::QueryKeyValue),
            raw_qkv: projected + behind_raw,
            qkv: projected,
            d_qkv: projected + behind_d,
            d_raw_qkv: projected,
            normed_heads,
            query,
            attended: query + behind(LinearRole::AttentionOutput),
            heads,
            keys,
            ffn_normed: width + behind(LinearRole::GateUp),
            ffn: spec.ffn_width(),
            activated: spec.ffn_width() + behind(LinearRole::Down),
            result: if spec.norms.after().is_some() { width } else { 0 },
            behind_d_qkv: behind_gradient(LinearRole::QueryKeyValue),
            behind_d_gate_up: behind_gradient(LinearRole::GateUp),
        }
    }

    /// Of two layers that share the memory of their activations. Gradients are laid out for each layer by itself.
    pub fn widest(self, other: Self) -> Self {
        Self {
            attention_normed: self.attention_normed.max(other.attention_normed),
            raw_qkv: self.raw_qkv.max(other.raw_qkv),
            qkv: self.qkv.max(other.qkv),
            normed_heads: self.normed_heads.max(other.normed_heads),
            attended: self.attended.max(other.attended),
            heads: self.heads.max(other.heads),
            ffn_normed: self.ffn_normed.max(other.ffn_normed),
            ffn: self.ffn.max(other.ffn),
            activated: self.activated.max(other.activated),
            result: self.result.max(other.result),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_that_share_memory_have_the_wider_of_every_column() {
        let from = |at: usize| LayerColumns {
            attention_normed: at,
            raw_qkv: at + 1,
            qkv: at + 2,
            d_qkv: at + 3,
            d_raw_qkv: at + 4,
            normed_heads: at + 5,
            query: at + 6,
            attended: at + 7,
            heads: at + 8,
            keys: at + 9,
            ffn_normed: at + 10,
            ffn: at + 11,
            activated: at + 12,
            result: at + 13,
            behind_d_qkv: at + 14,
            behind_d_gate_up: at + 15,
        };
        let shared = |columns: LayerColumns| {
            let LayerColumns { attention_normed, raw_qkv, qkv, normed_heads, attended, heads, .. } = columns;
            let LayerColumns { ffn_normed, ffn, activated, result, .. } = columns;
            [
                attention_normed,
                raw_qkv,
                qkv,
                normed_heads,
                attended,
                heads,
                ffn_normed,
                ffn,
                activated,
                result,
            ]
        };
        let (narrow, wide) = (from(1), from(100));
        assert_eq!(shared(narrow.widest(wide)), shared(wide));
        assert_eq!(shared(wide.widest(narrow)), shared(wide));
        assert_eq!(narrow.widest(wide).d_qkv, narrow.d_qkv, "gradients are those of the layer itself");
    }
}
