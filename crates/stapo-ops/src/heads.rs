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

/// The widest head of attention on a GPU.
pub(crate) const MAX_GPU_DIM: usize = 256;
/// The widest head on a GPU whose tiles fit into the shared memory of GPUs before Hopper.
pub(crate) const MAX_NARROW_DIM: usize = 128;

/// How the product of a query and a key becomes a score, and which keys a query sees.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScoreRule {
    /// Multiplies the product.
    pub scale: f64,
    /// The scaled product s becomes `softcap tanh(s / softcap)`.
    pub softcap: Option<f64>,
    /// Keys that a token sees, itself and those right before it; `None`: all keys up to itself.
    pub window: Option<usize>,
}

impl ScoreRule {
    /// All keys, and the scale `dim^-0.5`.
    pub fn plain(dim: usize) -> Self {
        Self { scale: 1.0 / (dim as f64).sqrt(), softcap: None, window: None }
    }

    pub fn is_plain(self, dim: usize) -> bool {
        self == Self::plain(dim)
    }

    /// The first key that the token at `position` sees.
    pub(crate) fn first_key(self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    #[track_caller]
    pub(crate) fn check(self, op: &str) {
        assert!(self.window != Some(0), "{op}: a window of 0 keys");
        assert!(self.softcap.is_none_or(|cap| cap > 0.0), "{op}: softcap {:?}", self.softcap);
    }
}
