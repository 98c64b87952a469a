//! The heads of attention, which rope and attention share.

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

    /// What a score is multiplied by.
    pub(crate) fn scale(self) -> f64 {
        1.0 / (self.dim as f64).sqrt()
    }

    #[track_caller]
    pub(crate) fn check(self, op: &str) {
        assert!(
            self.dim > 0 && self.kv > 0 && self.query.is_multiple_of(self.kv),
            "{op}: {} query heads of {} dimensions cannot share {} key/value heads",
            self.query,
            self.dim,
            self.kv
        );
    }
}
