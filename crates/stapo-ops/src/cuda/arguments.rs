//! What kernels take: numbers, addresses, and structs of them by value.

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

/// The fields of a kernel's struct in their order, laid out as C does it: a field of 8 bytes starts at a multiple of 8,
/// a field of 4 bytes at a multiple of 4.
#[derive(Default)]
pub(crate) struct Fields {
    words: Vec<u64>,
    /// Whether the upper half of the last word is still free.
    is_half_free: bool,
}

impl Fields {
    /// An address, a `u64` or a `double`.
    pub(crate) fn eight_bytes(mut self, field: impl Argument) -> Self {
        self.words.push(field.bits());
        self.is_half_free = false;
        self
    }

    /// An `int` or a `float`.
    pub(crate) fn four_bytes(mut self, field: impl Argument) -> Self {
        let bits = field.bits() & u64::from(u32::MAX);
        match self.words.last_mut().filter(|_| self.is_half_free) {
            Some(word) => *word |= bits << 32,
            None => self.words.push(bits),
        }
        self.is_half_free = !self.is_half_free;
        self
    }

    /// The fields of another struct after these, from a multiple of 8 bytes on.
    pub(crate) fn join(mut self, other: &Fields) -> Self {
        self.words.extend(&other.words);
        self.is_half_free = other.is_half_free;
        self
    }

    pub(super) fn words(&self) -> &[u64] {
        &self.words
    }
}

#[cfg(test)]
mod tests {
    use super::Fields;

    #[test]
    fn fields_are_laid_out_as_in_c() {
        let fields =
            Fields::default().four_bytes(1usize).eight_bytes(2usize).four_bytes(3usize).four_bytes(4usize);
        assert_eq!(fields.words(), [1, 2, 3 | 4 << 32]);
        assert_eq!(Fields::default().four_bytes(-1.0f32).four_bytes(1.0f32).words(), [0x3f80_0000_bf80_0000]);
    }
}
