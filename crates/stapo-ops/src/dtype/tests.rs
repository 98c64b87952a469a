use super::{append_bf16, append_f32, bf16_to_f32, f16_to_f32, f32_to_bf16, read_bf16, read_f32};

#[test]
fn half_precision_landmarks_are_exact() {
    let cases = [
        (0x0000, 0.0),
        (0x3c00, 1.0),
        (0xc000, -2.0),
        (0x7bff, 65504.0),
        (0x0400, 2f32.powi(-14)),
        (0x0001, 2f32.powi(-24)),
        (0x83ff, -1023.0 * 2f32.powi(-24)),
        (0x7c00, f32::INFINITY),
    ];
    for (bits, x) in cases {
        assert_eq!(f16_to_f32(bits), x, "{bits:#06x}");
    }
    assert!(f16_to_f32(0x7e01).is_nan());
    assert!(f16_to_f32(0x8000).is_sign_negative());
}

#[test]
fn half_precision_is_monotone_over_all_finite_values() {
    let values: Vec<f32> = (0..0x7c00).map(f16_to_f32).collect();
    assert!(values.windows(2).all(|w| w[0] < w[1]));
}

#[test]
fn bf16_round_trips_and_rounds_to_nearest_even() {
    for bits in (0..=u16::MAX).filter(|bits| !bf16_to_f32(*bits).is_nan()) {
        assert_eq!(f32_to_bf16(bf16_to_f32(bits)), bits);
    }
    assert_eq!(bf16_to_f32(f32_to_bf16(1.0 + 1.0 / 256.0)), 1.0, "a tie goes to the even neighbour");
    assert_eq!(bf16_to_f32(f32_to_bf16(1.0 + 3.0 / 256.0)), 1.0 + 4.0 / 256.0);
    assert!(bf16_to_f32(f32_to_bf16(f32::NAN)).is_nan());
}

#[test]
fn numbers_are_read_as_they_were_appended() {
    let numbers = [0.0, -0.0, 1.0, -1.5, f32::MAX, f32::MIN_POSITIVE, 1e-45, f32::INFINITY, 0.1];
    let (mut wide, mut narrow) = (vec![7], vec![7]);
    append_f32(&numbers, &mut wide);
    append_bf16(&numbers, &mut narrow);
    assert_eq!((&wide[..9], &narrow[..5]), (&[7, 0, 0, 0, 0, 0, 0, 0, 0x80][..], &[7, 0, 0, 0, 0x80][..]));
    let mut read = [0.0; 9];
    read_f32(&wide[1..], &mut read);
    assert_eq!(read.map(f32::to_bits), numbers.map(f32::to_bits));
    read_bf16(&narrow[1..], &mut read);
    assert_eq!(read.map(f32::to_bits), numbers.map(|x| bf16_to_f32(f32_to_bf16(x)).to_bits()));
}
