//! Half-precision storage formats, and little-endian numbers of files. Widening to f32 is exact; rounding to bf16 is to the
//! nearest, ties to even.

#[cfg(test)]
mod tests;

/// bfloat16: the upper half of an f32.
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// IEEE half precision, subnormals, infinities and NaN included.
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff);
    let wide = match magnitude {
        // Subnormal: an integer multiple of 2^-24.
        0..0x0400 => (magnitude as f32 * 2f32.powi(-24)).to_bits(),
        0x0400..0x7c00 => (magnitude << 13) + ((127 - 15) << 23),
        _ => (magnitude << 13) | 0x7f80_0000,
    };
    f32::from_bits(sign | wide)
}

/// The nearest bfloat16, ties to even; NaN stays NaN.
pub fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x0040;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// Reads little-endian f32, four bytes for each number of `out`.
pub fn read_f32(bytes: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *out = f32::from_le_bytes(*bytes);
    }
}

/// Reads little-endian bfloat16, two bytes for each number of `out`.
pub fn read_bf16(bytes: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *out = bf16_to_f32(u16::from_le_bytes(*bytes));
    }
}

/// Appends the numbers as little-endian f32.
pub fn append_f32(numbers: &[f32], bytes: &mut Vec<u8>) {
    bytes.reserve(4 * numbers.len());
    for x in numbers {
        bytes.extend_from_slice(&x.to_le_bytes());
    }
}

/// Appends the nearest bfloat16 of the numbers, little-endian.
pub fn append_bf16(numbers: &[f32], bytes: &mut Vec<u8>) {
    bytes.reserve(2 * numbers.len());
    for &x in numbers {
        bytes.extend_from_slice(&f32_to_bf16(x).to_le_bytes());
    }
}
