//! The end of a forward pass, for scored rows only.

use super::{ArenaLayout, EntrySpans, Span};

/// Where the scored rows of the last layer come from and go to, behind attention.
pub struct ScoredRows {
    /// `[T, D]`: the residual stream in front of attention.
    pub stream: Span,
    /// `[T, Q]`
    pub attended: Span,
    /// The last layer and the head as those of a batch of the scored rows alone. The stream and what was attended lie in the memory of
    /// queries, keys and values, which nothing reads any more.
    pub layout: ArenaLayout,
}

impl ArenaLayout {
    /// `None` where few rows are not scored, or there is no layer.
    pub fn scored_rows(&self) -> Option<ScoredRows> {
        let (t, r) = (self.n_tokens, self.n_scored);
        let mut layout = self.clone();
        let last = layout.layers.last_mut().filter(|_| 2 * r <= t)?;
        let rows = |span: Span| span.first(span.len / t * r);
        let (stream, attended) = (last.attention.stream, last.attended);
        let (few, few_attended) = (rows(stream).len, rows(attended).len);
        if few > last.qkv.len || few_attended > last.raw_qkv.len {
            return None;
        }
        last.attention.stream = last.qkv.first(few);
        last.attended = last.raw_qkv.first(few_attended);
        let EntrySpans { stream: ffn_stream, normed, inv_rms } = last.ffn;
        last.ffn = EntrySpans { stream: rows(ffn_stream), normed: rows(normed), inv_rms: rows(inv_rms) };
        last.gate_up = rows(last.gate_up);
        last.activated = rows(last.activated);
        layout.addend = rows(layout.addend);
        layout.n_tokens = r;
        Some(ScoredRows { stream, attended, layout })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Heads, ModelConfig};
    use crate::decoder::layout::Purpose;

    /// A layer of `heads` in a model of `width`, with `scored` of 10 rows scored.
    fn scored_rows(width: usize, heads: Heads, scored: usize) -> Option<ScoredRows> {
        let known = ModelConfig::known("qwen3-0.6b").unwrap();
        let layer = known.family.layer(heads, known.attentions().next().unwrap().rope.clone(), 12);
        let config = ModelConfig { width, layers: vec![layer; 2], ..known };
        ArenaLayout::new(&config, (10, scored), Purpose::Inference, None).scored_rows()
    }

    #[test]
    fn half_of_the_rows_are_few_and_fit_where_queries_keys_and_values_were() {
        let heads = Heads { query: 2, kv: 1, dim: 8 };
        let ScoredRows { stream, attended, layout } = scored_rows(48, heads, 5).unwrap();
        assert_eq!((stream.len, attended.len, layout.n_tokens, layout.addend.len), (480, 160, 5, 240));
        let last = &layout.layers[1];
        assert_eq!((last.attention.stream.len, last.attended.len), (240, 80));
        assert_eq!((last.ffn.stream.len, last.ffn.normed.len, last.ffn.inv_rms.len), (240, 240, 5));
        assert_eq!((last.gate_up.len, last.activated.len), (120, 60));
        assert!(scored_rows(48, heads, 6).is_none(), "more than half of the rows");
        // Queries, keys and values of 10 rows have 320 numbers, and five rows of the stream as many.
        assert!(scored_rows(64, heads, 5).is_some() && scored_rows(65, heads, 5).is_none());
    }
}
