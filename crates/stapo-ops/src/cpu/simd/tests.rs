use super::*;

/// Applies exp and sigmoid/silu at the level the device forces.
struct Apply<'a> {
    x: &'a [f32],
    exp: &'a mut [f32],
    silu: &'a mut [f32],
}

impl Kernel<f32> for Apply<'_> {
    #[inline(always)]
    fn run<L: Lanes<E = f32>>(self, l: L) {
        for at in (0..self.x.len()).step_by(WIDTH) {
            let x = l.get(self.x, at, 0.0);
            l.put(self.exp, at, l.exp(x));
            l.put(self.silu, at, silu_parts(l, x).1);
        }
    }
}

fn apply(simd: Simd, x: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let (mut exp, mut silu) = (vec![0.0; x.len()], vec![0.0; x.len()]);
    f32::dispatch(simd, Apply { x, exp: &mut exp, silu: &mut silu });
    (exp, silu)
}

/// Units in the last place between a result and the exact value.
fn ulps(got: f32, exact: f64) -> f64 {
    let rounded = exact as f32;
    let spacing = f64::from(f32::from_bits(rounded.abs().to_bits() + 1)) - f64::from(rounded.abs());
    (f64::from(got) - exact).abs() / spacing
}

#[test]
fn exp_is_within_one_unit_in_the_last_place() {
    let x: Vec<f32> = (-87_000..88_300).map(|i| i as f32 / 1000.0 + 0.00037).collect();
    let (exp, _) = apply(Simd::best(), &x);
    let worst = x.iter().zip(exp).map(|(x, y)| ulps(y, f64::from(*x).exp())).fold(0.0, f64::max);
    assert!(worst < 1.0, "{worst} ulp");
}

#[test]
fn exp_has_the_promised_ends() {
    let x = [f32::NEG_INFINITY, -88.0, -1e30, 0.0, f32::NAN, 100.0, f32::INFINITY];
    for simd in Simd::available() {
        let (exp, _) = apply(simd, &x);
        assert_eq!(exp[..4], [0.0, 0.0, 0.0, 1.0]);
        assert!(exp[4].is_nan());
        assert!(exp[5] > 2e38 && exp[6] > 2e38);
    }
}

#[test]
fn ln_is_within_one_unit_in_the_last_place() {
    let mut worst = 0f64;
    for i in 0..200_000u32 {
        let x = f32::from_bits(0x0080_0000 + i * 10_000);
        worst = worst.max(ulps(ln_f32(x), f64::from(x).ln()));
    }
    assert!(worst < 1.0, "{worst} ulp");
    assert_eq!(ln_f32(1.0), 0.0);
    assert_eq!(ln_f32(0.0), f32::NEG_INFINITY);
    assert_eq!(ln_f32(f32::INFINITY), f32::INFINITY);
    assert!(ln_f32(-1.0).is_nan() && ln_f32(f32::NAN).is_nan());
    let tiny = f32::from_bits(12345);
    assert!(ulps(ln_f32(tiny), f64::from(tiny).ln()) < 1.0);
}

#[test]
fn transcendentals_have_the_same_bits_at_every_level() {
    let x: Vec<f32> = (0..100_000u32).map(|i| f32::from_bits(i.wrapping_mul(42_949))).collect();
    let expected = apply(Simd::Scalar, &x);
    for simd in Simd::available() {
        let got = apply(simd, &x);
        for (got, expected) in [(got.0, &expected.0), (got.1, &expected.1)] {
            let same = got
                .iter()
                .zip(expected)
                .all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()));
            assert!(same, "{}", simd.name());
        }
    }
}

#[test]
fn levels_are_parsed_by_name_and_refused_with_a_remedy() {
    assert_eq!(Simd::parse(Simd::best().name()), Ok(Simd::best()));
    let unknown = Simd::parse("sse9").unwrap_err().to_string();
    assert_eq!(unknown, "simd level \"sse9\" is unknown\nhint: use scalar, avx2, avx512 or neon");
    let foreign = if cfg!(target_arch = "x86_64") { Simd::Neon } else { Simd::Avx2 };
    assert_eq!(Simd::parse(foreign.name()), Err(SimdError::Unsupported(foreign)));
}

struct Transpose<'a>(&'a [f32], &'a mut [f32]);

impl Kernel<f32> for Transpose<'_> {
    #[inline(always)]
    fn run<L: Lanes<E = f32>>(self, l: L) {
        let mut rows = [l.zero(); WIDTH];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = l.get(self.0, i * WIDTH, 0.0);
        }
        for (i, column) in l.transpose(rows).into_iter().enumerate() {
            l.put(self.1, i * WIDTH, column);
        }
    }
}

#[test]
fn every_level_transposes() {
    let x: Vec<f32> = (0..256u16).map(f32::from).collect();
    for simd in Simd::available() {
        let mut y = vec![0.0; 256];
        f32::dispatch(simd, Transpose(&x, &mut y));
        assert!((0..256).all(|i| y[i] == x[i % 16 * 16 + i / 16]), "{}", simd.name());
    }
}
