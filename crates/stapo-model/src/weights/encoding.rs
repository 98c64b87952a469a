//! How stored numbers are decoded to f32.

use super::blocks;
use half::f16;
use stapo_ops::dtype::{read_bf16, read_f32};
pub use stapo_ops::quantised::Encoding;

/// Decodes whole blocks. Panics if the length of `out` is not the number of elements in `bytes`.
pub fn decode(encoding: Encoding, bytes: &[u8], out: &mut [f32]) {
    let (numbers, size) = encoding.block();
    assert_eq!(bytes.len() / size * numbers, out.len(), "decode {encoding:?}: bytes against numbers");
    match encoding {
        Encoding::F32 => read_f32(bytes, out),
        Encoding::F16 => read_f16(bytes, out),
        Encoding::Bf16 => read_bf16(bytes, out),
        Encoding::Q8_0 => blocks::decode(bytes, out, blocks::q8_0),
        Encoding::Q4_0 => blocks::decode(bytes, out, blocks::q4_0),
        Encoding::Q4_1 => blocks::decode(bytes, out, blocks::q4_1),
        Encoding::Q5_0 => blocks::decode(bytes, out, blocks::q5_0),
        Encoding::Q5_1 => blocks::decode(bytes, out, blocks::q5_1),
        Encoding::Q4_K => blocks::decode(bytes, out, blocks::q4_k),
        Encoding::Q5_K => blocks::decode(bytes, out, blocks::q5_k),
        Encoding::Q6_K => blocks::decode(bytes, out, blocks::q6_k),
    }
}

fn read_f16(bytes: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *out = f16::from_le_bytes(*bytes).to_f32();
    }
}
