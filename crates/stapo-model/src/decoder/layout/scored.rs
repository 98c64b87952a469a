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
