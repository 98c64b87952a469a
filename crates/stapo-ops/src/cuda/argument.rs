//! What a kernel takes as an argument or as a field of a struct.

use super::slice::Slice;

/// The bits of a kernel's argument. A kernel that declares a narrower type reads the low bits.
pub(crate) trait Argument {
    fn bits(self) -> u64;
}

impl Argument for usize {
    fn bits(self) -> u64 {
        self as u64
    }
}
impl Argument for u64 {
    fn bits(self) -> u64 {
        self
    }
}
impl Argument for f32 {
    fn bits(self) -> u64 {
        u64::from(self.to_bits())
    }
}
impl Argument for f64 {
    fn bits(self) -> u64 {
        self.to_bits()
    }
}
impl Argument for Slice {
    fn bits(self) -> u64 {
        self.address
    }
}
/// `None` is a null pointer.
impl Argument for Option<Slice> {
    fn bits(self) -> u64 {
        self.map_or(0, |slice| slice.address)
    }
}
