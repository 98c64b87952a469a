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
fn the_first_non_finite_element_is_found() {
    let device = device();
    for (bad, n) in [(f32::NAN, 9000), (f32::INFINITY, 100_000), (f32::NEG_INFINITY, 1)] {
        let mut x = values::<f32>(1, n);
        assert_eq!(first_non_finite(&device, upload(&device, &x).view()), None);
        for at in [n - 1, n / 2, 0] {
            x[at] = bad;
            assert_eq!(first_non_finite(&device, upload(&device, &x).view()), Some(at));
        }
    }
}

#[test]
fn large_finite_elements_are_finite() {
    let device = device();
    let x = upload(&device, &[f32::MAX; 100]);
    assert_eq!(first_non_finite(&device, x.view()), None);
}
