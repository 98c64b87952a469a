/// How the numbers of a tensor are stored: plain floats, or GGUF's blocks of small integers with scales. Those that the
/// kernel unpacks come first, in the order of their numbers in unpack.cu.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "the names that GGUF gives its blocks")]
pub enum Encoding {
    Bf16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q4_K,
    Q5_K,
    Q6_K,
    F16,
    F32,
}

impl Encoding {
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
    ];

    /// The name as written in files and shown to people.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q4_K => "Q4_K",
            Self::Q5_K => "Q5_K",
            Self::Q6_K => "Q6_K",
        }
    }

    /// Numbers per block and bytes per block: the smallest unit that can be decoded.
    pub fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q8_0 => (32, 34),
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q5_0 => (32, 22),
            Self::Q5_1 => (32, 24),
            Self::Q4_K => (256, 144),
            Self::Q5_K => (256, 176),
            Self::Q6_K => (256, 210),
        }
    }

    /// Whether numbers are stored as blocks of small integers with scales.
    pub fn is_quantised(self) -> bool {
        self.block().0 > 1
    }

    /// Whether a GPU unpacks rows of this encoding.
    pub(super) fn is_unpacked(self) -> bool {
        self.is_quantised() || self == Self::Bf16
    }

    /// Bytes of a tensor of this shape; `None` if the last dimension is not a whole number of blocks, or on overflow.
    pub fn n_bytes(self, shape: &[usize]) -> Option<usize> {
        let (numbers, bytes) = self.block();
        let (&row, outer) = shape.split_last().unwrap_or((&1, &[]));
        if !row.is_multiple_of(numbers) {
            return None;
        }
        outer.iter().try_fold((row / numbers).checked_mul(bytes)?, |product, &dim| product.checked_mul(dim))
    }
}
