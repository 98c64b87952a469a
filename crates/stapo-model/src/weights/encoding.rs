//! How numbers are stored, and how they are decoded to f32.

use super::blocks;
use half::f16;
use stapo_ops::dtype::{read_bf16, read_f32};
use stapo_ops::quantised::BlockFormat;

/// The storage of one tensor: plain floats, or GGUF's blocks of small integers with scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(non_camel_case_types, reason = "the names that GGUF gives its blocks")]
pub enum Encoding {
    F32,
    F16,
    Bf16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q4_K,
    Q5_K,
    Q6_K,
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
        match (self.block_format(), self) {
            (Some(format), _) => format.block(),
            (None, Self::F32) => (1, 4),
            (None, _) => (1, 2),
        }
    }

    /// The blocks of a quantised tensor; `None` for plain floats.
    pub fn block_format(self) -> Option<BlockFormat> {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => None,
            Self::Q8_0 => Some(BlockFormat::Q8_0),
            Self::Q4_0 => Some(BlockFormat::Q4_0),
            Self::Q4_1 => Some(BlockFormat::Q4_1),
            Self::Q5_0 => Some(BlockFormat::Q5_0),
            Self::Q5_1 => Some(BlockFormat::Q5_1),
            Self::Q4_K => Some(BlockFormat::Q4_K),
            Self::Q5_K => Some(BlockFormat::Q5_K),
            Self::Q6_K => Some(BlockFormat::Q6_K),
        }
    }

    /// Bytes of a tensor of this shape; `None` if the last dimension is not a whole number of blocks, or on overflow.
    pub(crate) fn n_bytes(self, shape: &[usize]) -> Option<usize> {
        let (numbers, bytes) = self.block();
        let (&row, outer) = shape.split_last().unwrap_or((&1, &[]));
        if !row.is_multiple_of(numbers) {
            return None;
        }
        outer.iter().try_fold((row / numbers).checked_mul(bytes)?, |product, &dim| product.checked_mul(dim))
    }

    /// Decodes whole blocks. Panics if the length of `out` is not the number of elements in `bytes`.
    pub(crate) fn decode(self, bytes: &[u8], out: &mut [f32]) {
        let (numbers, size) = self.block();
        assert_eq!(bytes.len() / size * numbers, out.len(), "decode {self:?}: bytes against numbers");
        match self {
            Self::F32 => read_f32(bytes, out),
            Self::F16 => read_f16(bytes, out),
            Self::Bf16 => read_bf16(bytes, out),
            Self::Q8_0 => blocks::decode(bytes, out, blocks::q8_0),
            Self::Q4_0 => blocks::decode(bytes, out, blocks::q4_0),
            Self::Q4_1 => blocks::decode(bytes, out, blocks::q4_1),
            Self::Q5_0 => blocks::decode(bytes, out, blocks::q5_0),
            Self::Q5_1 => blocks::decode(bytes, out, blocks::q5_1),
            Self::Q4_K => blocks::decode(bytes, out, blocks::q4_k),
            Self::Q5_K => blocks::decode(bytes, out, blocks::q5_k),
            Self::Q6_K => blocks::decode(bytes, out, blocks::q6_k),
        }
    }
}

fn read_f16(bytes: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *out = f16::from_le_bytes(*bytes).to_f32();
    }
}
