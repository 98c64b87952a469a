use super::*;
use crate::testing::*;

#[test]
fn sum_of_squares_is_the_same_on_all_devices_and_close_to_double() {
    for n in [0, 1, 33, 4097, 100_003] {
        let x = values::<f32>(1, n);
        assert_same_on_all_devices(|device| {
            let sum = sum_squares(device, [upload(device, &x).view()]);
            vec![vec![f32::from_bits((sum.to_bits() >> 32) as u32), f32::from_bits(sum.to_bits() as u32)]]
        });
        let exact: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
        let got = sum_squares(&device(), [upload(&device(), &x).view()]);
        assert!((got - exact).abs() <= 1e-6 * exact, "{got} {exact}");
    }
}

#[test]
fn sums_of_blocks_of_ranges_fold_to_the_sum_of_the_whole() {
    let x = values::<f32>(1, 100_003);
    let y = values::<f32>(2, 33);
    let device = device();
    let (a, b) = (upload(&device, &x), upload(&device, &y));
    let whole = sum_squares(&device, [a.view(), b.view()]);
    for cut in [0, 16_384, 81_920] {
        let mut parts = square_parts(&device, [a.range(0..cut), a.range(cut..x.len()), b.view()]);
        let after = parts.remove(1);
        parts[0].extend(after);
        assert_eq!(fold_squares(&device, &parts).to_bits(), whole.to_bits(), "cut at {cut}");
    }
}

#[test]
fn the_first_non_finite_element_is_found() {
    let device = device();
    for (bad, n) in [(f32::NAN, 9000), (f32::INFINITY, 100_000), (f32::NEG_INFINITY, 1)] {
        let mut x = values::<f32>(1, n);
        assert_eq!(first_non_finite(&device, upload(&device, &x).view()), None);
        for at in [n - 1, n / 2, 0] {
            x[at] = bad;
            assert_eq!(first_non_finite(&device, upload(&device, &x).view()), Some(at));
            let (good, bad) = (upload(&device, &[1.0, -2.0]), upload(&device, &x));
            assert!(are_finite(&device, [good.view(), good.range(1..1)]));
            assert!(!are_finite(&device, [good.view(), bad.view()]));
        }
    }
}

#[test]
fn large_finite_elements_are_finite() {
    let device = device();
    let x = upload(&device, &[f32::MAX; 100]);
    assert_eq!(first_non_finite(&device, x.view()), None);
}

#[test]
fn a_fingerprint_tells_a_changed_bit_and_a_moved_element_but_not_the_sign_of_zero() {
    let device = device();
    let sums = |x: &[f32]| {
        let (a, b) = x.split_at(x.len() / 3);
        fingerprint(&device, [upload(&device, a).view(), upload(&device, b).view()])
    };
    for n in [3, 33, 4097, 100_003] {
        let mut x = values::<f32>(1, n);
        x[0] = 0.0;
        let before = sums(&x);
        x[0] = -0.0;
        assert_eq!(sums(&x), before);
        for at in [n - 1, n / 2, n / 3] {
            let kept = x[at];
            x[at] = f32::from_bits(kept.to_bits() ^ 1);
            assert_ne!(sums(&x), before, "{n} {at}");
            x[at] = kept;
        }
        x.swap(1, n - 1);
        assert_ne!(sums(&x), before, "{n}");
    }
}

#[test]
fn only_zeros_are_zero() {
    let device = device();
    let mut x = vec![0.0f32; 5000];
    x[7] = -0.0;
    assert!(is_zero(&device, upload(&device, &x).view()));
    x[4999] = f32::from_bits(1);
    assert!(!is_zero(&device, upload(&device, &x).view()));
}
