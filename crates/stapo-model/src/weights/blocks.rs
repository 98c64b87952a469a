//! GGUF's quantised blocks. Each block holds small integers q and scales; the f32 operations and their order are those
//! of the reference implementation, each rounded once, so that the results agree bit for bit.

use half::f16;

/// Applies `block`, which decodes `BYTES` bytes to `NUMBERS` numbers, over the tensor.
pub(super) fn decode<const BYTES: usize, const NUMBERS: usize>(
    bytes: &[u8],
    out: &mut [f32],
    block: impl Fn(&[u8; BYTES], &mut [f32; NUMBERS]),
) {
    let (stored, _) = bytes.as_chunks::<BYTES>();
    let (numbers, _) = out.as_chunks_mut::<NUMBERS>();
    for (stored, numbers) in stored.iter().zip(numbers) {
        block(stored, numbers);
    }
}

/// d, 32 signed bytes: x = d q.
pub(super) fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = scale(block, 0);
    for (out, &q) in out.iter_mut().zip(&block[2..]) {
        *out = f32::from(q.cast_signed()) * d;
    }
}

/// d, 16 bytes of nibbles (low nibbles first): x = d (q - 8).
pub(super) fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = scale(block, 0);
    for (i, &byte) in block[2..].iter().enumerate() {
        out[i] = d * (f32::from(byte & 15) - 8.0);
        out[i + 16] = d * (f32::from(byte >> 4) - 8.0);
    }
}

/// d, m, 16 bytes of nibbles: x = d q + m.
pub(super) fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (scale(block, 0), scale(block, 2));
    for (i, &byte) in block[4..].iter().enumerate() {
        out[i] = d * f32::from(byte & 15) + m;
        out[i + 16] = d * f32::from(byte >> 4) + m;
    }
}

/// d, 32 fifth bits, 16 bytes of nibbles: x = d (q - 16).
pub(super) fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = scale(block, 0);
    let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    for (i, &byte) in block[6..].iter().enumerate() {
        out[i] = d * (f32::from((byte & 15) | fifth_bit(high, i)) - 16.0);
        out[i + 16] = d * (f32::from((byte >> 4) | fifth_bit(high, i + 16)) - 16.0);
    }
}

/// d, m, 32 fifth bits, 16 bytes of nibbles: x = d q + m.
pub(super) fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m) = (scale(block, 0), scale(block, 2));
    let high = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
    for (i, &byte) in block[8..].iter().enumerate() {
        out[i] = d * f32::from((byte & 15) | fifth_bit(high, i)) + m;
        out[i + 16] = d * f32::from((byte >> 4) | fifth_bit(high, i + 16)) + m;
    }
}

/// d, dmin, 8 six-bit pairs (s, m), 128 bytes of nibbles: x = (d s) q - (dmin m), a pair for every 32 numbers.
pub(super) fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let pairs = scale_min_pairs(block);
    let (nibbles, _) = block[16..].as_chunks::<32>();
    for (j, (nibbles, out)) in nibbles.iter().zip(out.as_chunks_mut::<64>().0).enumerate() {
        let ((d_low, m_low), (d_high, m_high)) = (pairs[2 * j], pairs[2 * j + 1]);
        for (i, &byte) in nibbles.iter().enumerate() {
            out[i] = d_low * f32::from(byte & 15) - m_low;
            out[i + 32] = d_high * f32::from(byte >> 4) - m_high;
        }
    }
}

/// As `Q4_K` with a fifth bit per number: bit 2j of `high[i]` for number 64 j + i, bit 2j + 1 for 64 j + 32 + i.
pub(super) fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let pairs = scale_min_pairs(block);
    let high = &block[16..48];
    let (nibbles, _) = block[48..].as_chunks::<32>();
    for (j, (nibbles, out)) in nibbles.iter().zip(out.as_chunks_mut::<64>().0).enumerate() {
        let ((d_low, m_low), (d_high, m_high)) = (pairs[2 * j], pairs[2 * j + 1]);
        for (i, (&byte, &high)) in nibbles.iter().zip(high).enumerate() {
            let fifth = |bit: usize| ((high >> bit) & 1) << 4;
            out[i] = d_low * f32::from((byte & 15) | fifth(2 * j)) - m_low;
            out[i + 32] = d_high * f32::from((byte >> 4) | fifth(2 * j + 1)) - m_high;
        }
    }
}

/// 128 bytes of nibbles, 64 bytes of two high bits, 16 signed scales s, d: x = (d s) (q - 32), a scale for every 16.
pub(super) fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let d = scale(block, 208);
    for half in 0..2 {
        let low = &block[half * 64..][..64];
        let high = &block[128 + half * 32..][..32];
        let scales = &block[192 + half * 8..][..8];
        let out = &mut out[half * 128..][..128];
        for i in 0..32 {
            let two_bits = |quarter: usize| ((high[i] >> (2 * quarter)) & 3) << 4;
            let q = [low[i] & 15, low[i + 32] & 15, low[i] >> 4, low[i + 32] >> 4];
            for (quarter, q) in q.into_iter().enumerate() {
                let s = f32::from(scales[2 * quarter + i / 16].cast_signed());
                out[32 * quarter + i] = (d * s) * (f32::from(q | two_bits(quarter)) - 32.0);
            }
        }
    }
}

/// The f16 at byte `at`.
fn scale(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn fifth_bit(high: u32, i: usize) -> u8 {
    (((high >> i) & 1) << 4) as u8
}

/// The 8 pairs (d s, dmin m) of `Q4_K` and `Q5_K`: s and m of 6 bits each, packed in bytes 4..16 of the block. Within
/// these 12 bytes the first four s and m are the low six bits of bytes 0..4 and 4..8; the last four have their low four
/// bits in bytes 8..12 and their top two bits above those of the first four.
fn scale_min_pairs(block: &[u8]) -> [(f32, f32); 8] {
    let (d, dmin) = (scale(block, 0), scale(block, 2));
    let packed = &block[4..16];
    std::array::from_fn(|j| {
        let (s, m) = if j < 4 {
            (packed[j] & 63, packed[j + 4] & 63)
        } else {
            (packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4)
        };
        (d * f32::from(s), dmin * f32::from(m))
    })
}
