//! How numbers are stored, and back to f32.

use half::{bf16, f16};

/// The storage of one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Encoding {
    F32,
    F16,
    Bf16,
}

impl Encoding {
    /// Numbers per block, bytes per block: the smallest unit that can be decoded.
    pub fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
        }
    }

    pub(crate) fn decode(self, bytes: &[u8], out: &mut [f32]) {
        let (numbers, size) = self.block();
        assert_eq!(bytes.len() / size * numbers, out.len(), "decode {self:?}: bytes against numbers");
        match self {
            Self::F32 => each::<4>(bytes, out, f32::from_le_bytes),
            Self::F16 => each::<2>(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
            Self::Bf16 => each::<2>(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        }
    }
}

fn each<const SIZE: usize>(bytes: &[u8], out: &mut [f32], read: impl Fn([u8; SIZE]) -> f32) {
    let (chunks, _) = bytes.as_chunks::<SIZE>();
    for (out, chunk) in out.iter_mut().zip(chunks) {
        *out = read(*chunk);
    }
}
