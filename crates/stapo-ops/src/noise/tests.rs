use super::fill;
use crate::testing::device;

#[test]
fn noise_has_the_asked_moments_and_depends_on_key_and_place() {
    let device = device();
    let n = 1 << 18;
    let draw = |key| {
        let mut x = device.zeros::<f32>(n).unwrap();
        fill(&device, key, 0.02, x.view_mut());
        x.view().to_vec()
    };
    let x = draw(7);
    let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / n as f64;
    let square = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / n as f64;
    // Four standard errors of mean and deviation.
    assert!(mean.abs() < 4.0 * 0.02 / (n as f64).sqrt(), "{mean}");
    assert!((square.sqrt() / 0.02 - 1.0).abs() < 4.0 / (2.0 * n as f64).sqrt(), "{square}");
    assert_eq!(x, draw(7));
    let n_same = x.iter().zip(draw(8)).filter(|(a, b)| **a == *b).count();
    assert!(n_same < n / 1000, "{n_same} of {n} agree under another key");
    // The values of four places, so that another device or program draws the same model.
    let mut few = device.zeros::<f32>(2).unwrap();
    fill(&device, 0, 37_837.227_237, few.view_mut());
    let first = 0xe220_a839_7b1d_cdaf_u64;
    let second = 0x6e78_9e6a_a1b9_65f4_u64;
    let sum = |x: u64| (0..4).map(|part| (x >> (16 * part) & 0xffff) as f32).sum::<f32>() - 131_070.0;
    assert_eq!(few.view().to_vec(), [sum(first), sum(second)]);
}
