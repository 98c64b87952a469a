use super::super::budget::Bounded;
use super::complex::Complex;
use super::elementary::{atan, exp, ln, pi, sin_cos};
use super::real::Real;
use super::{HIGH_BITS, LOW_BITS};
use dashu_int::IBig;
use dashu_ratio::RBig;
use std::cmp::Ordering;

fn real(n: i64, d: u64) -> Real {
    Real::from_ratio(&RBig::from_parts(n.into(), d.into()), LOW_BITS).unwrap()
}

/// `a` and `b` differ by less than their errors, and the errors are small.
fn assert_same(a: &Real, b: &Real) {
    let gap = a.sub(b, LOW_BITS).unwrap();
    assert!(
        matches!(gap.sign(), None | Some(Ordering::Equal)),
        "{:?} and {:?}",
        a.to_decimal(40),
        b.to_decimal(40)
    );
    assert!(gap.error_bound() < a.bound().max(0) - 180, "an error of 2^{}", gap.error_bound());
}

#[test]
fn constants_have_their_known_digits() {
    assert_eq!(pi(LOW_BITS).unwrap().to_decimal(40).unwrap(), "3.141592653589793238462643383279502884197");
    assert_eq!(
        exp(&real(1, 1), LOW_BITS).unwrap().to_decimal(40).unwrap(),
        "2.718281828459045235360287471352662497757"
    );
    assert_eq!(
        ln(&real(2, 1), LOW_BITS).unwrap().to_decimal(40).unwrap(),
        "0.6931471805599453094172321214581765680755"
    );
    assert_eq!(
        real(2, 1).sqrt(LOW_BITS).unwrap().to_decimal(40).unwrap(),
        "1.41421356237309504880168872420969807857"
    );
    assert_eq!(
        atan(&real(1, 3), LOW_BITS).unwrap().to_decimal(30).unwrap(),
        "0.321750554396642193401404614359"
    );
}

#[test]
fn functions_invert_each_other_within_their_errors() {
    for (n, d) in [(1, 1), (1, 7), (13, 4), (1000, 3), (1, 100_000), (99, 100)] {
        let x = real(n, d);
        assert_same(&exp(&ln(&x, LOW_BITS).unwrap(), LOW_BITS).unwrap(), &x);
        let root = x.sqrt(LOW_BITS).unwrap();
        assert_same(&root.mul(&root, LOW_BITS).unwrap(), &x);
        let (sine, cosine) = sin_cos(&x, LOW_BITS).unwrap();
        let norm = sine
            .mul(&sine, LOW_BITS)
            .unwrap()
            .add(&cosine.mul(&cosine, LOW_BITS).unwrap(), LOW_BITS)
            .unwrap();
        assert_same(&norm, &real(1, 1));
        let (sine, cosine) = sin_cos(&atan(&x, LOW_BITS).unwrap(), LOW_BITS).unwrap();
        assert_same(&sine.div(&cosine, LOW_BITS).unwrap(), &x);
    }
}

#[test]
fn both_precisions_agree() {
    for (n, d) in [(1, 3), (22, 7), (-5, 2), (100, 1)] {
        let ratio = RBig::from_parts(n.into(), (d as u64).into());
        let (low, high) =
            (Real::from_ratio(&ratio, LOW_BITS).unwrap(), Real::from_ratio(&ratio, HIGH_BITS).unwrap());
        assert_same(&exp(&low, LOW_BITS).unwrap(), &exp(&high, HIGH_BITS).unwrap());
        assert_same(&sin_cos(&low, LOW_BITS).unwrap().0, &sin_cos(&high, HIGH_BITS).unwrap().0);
        assert_same(&atan(&low, LOW_BITS).unwrap(), &atan(&high, HIGH_BITS).unwrap());
    }
}

#[test]
fn perfect_squares_have_exact_roots() {
    assert!(real(9, 4).sqrt(LOW_BITS).unwrap().is_exact());
    assert!(!real(2, 1).sqrt(LOW_BITS).unwrap().is_exact());
}

/// Of a number of 5 more bits than are kept, the last 5 may be zeros.
#[test]
fn zeros_are_cut_without_an_error() {
    let shifted = |length: usize| {
        let odd = (IBig::ONE << (length - 1)) + IBig::ONE;
        Real::from_int(&(odd << 5), LOW_BITS).unwrap()
    };
    assert!(shifted(LOW_BITS).is_exact() && !shifted(LOW_BITS + 1).is_exact());
}

#[test]
fn a_division_by_noise_is_refused() {
    let noise = real(1, 3).sub(&real(1, 3).mul(&real(1, 1), LOW_BITS).unwrap(), LOW_BITS).unwrap();
    assert!(real(1, 1).div(&noise, LOW_BITS).is_err());
}

#[test]
fn euler_holds() {
    let turn = Complex { re: Real::zero(), im: pi(LOW_BITS).unwrap() };
    let value = turn.exp(LOW_BITS).unwrap();
    assert_same(&value.re, &real(-1, 1));
    assert_same(&value.im, &Real::zero());
}

#[test]
fn decimals_are_printed_as_people_write_them() {
    for (n, d, shown) in [
        (1, 4, "0.25"),
        (-7, 2, "-3.5"),
        (1, 3, "0.333333333333"),
        (123_456, 1, "123456"),
        (1, 1_000_000_000, "1e-9"),
        // Large values, whole and not, of which the last digits are not shown.
        (1_234_567_890_123_456_789, 1, "1.23456789012e18"),
        (1_234_567_890_123_456_789, 4, "3.08641972531e17"),
        (999_999_999_999_400, 1, "999999999999000"),
        (999_999_999_999_600, 1, "1e15"),
    ] {
        assert_eq!(real(n, d).to_decimal(12).unwrap(), shown, "{n}/{d}");
    }
}

/// Exponents to 2^50 and errors to twice that are taken.
#[test]
fn magnitudes_end_at_their_limit() {
    let is_taken = |fraction_bits, err| Real::from_fixed(1.into(), fraction_bits, err, LOW_BITS).is_ok();
    assert!(is_taken(1 << 50, -(1 << 51)));
    assert!(!is_taken((1 << 50) + 1, 0) && !is_taken(0, -(1 << 51) - 1));
}

/// An error that is too small would call different values equal, and one that is too large would leave equal ones undecided: the
/// power of two that bounds the error of each operation, and that of the value.
#[test]
fn errors_of_operations_are_as_small_as_they_are_known_to_be() {
    let third = || real(1, 3);
    let large = || real(1_000_003, 7);
    let two = |a: Real, b: Real, op: fn(&Real, &Real, usize) -> Bounded<Real>| op(&a, &b, LOW_BITS).unwrap();
    let one = |a: Real, op: fn(&Real, usize) -> Bounded<Real>| op(&a, LOW_BITS).unwrap();
    let sine = |x: &Real, bits: usize| Ok(sin_cos(x, bits)?.0);
    let cosine = |x: &Real, bits: usize| Ok(sin_cos(x, bits)?.1);
    let operations = [
        ("third", third(), -256, 0),
        ("large", large(), -237, 19),
        ("add", two(third(), large(), Real::add), -235, 19),
        ("sub", two(third(), large(), Real::sub), -235, 19),
        ("mul", two(third(), large(), Real::mul), -235, 17),
        ("div small", two(third(), large(), Real::div), -267, -17),
        ("div large", two(large(), third(), Real::div), -230, 20),
        ("div exact", two(real(1, 1), real(3, 1), Real::div), -256, 0),
        ("sqrt", one(third(), Real::sqrt), -251, 1),
        ("sqrt large", one(large(), Real::sqrt), -242, 10),
        ("sqrt exact", one(real(2, 1), Real::sqrt), -254, 2),
        ("exp", one(third(), exp), -251, 2),
        ("exp large", one(real(701, 7), exp), -99, 146),
        ("exp negative", one(real(-701, 7), exp), -387, -143),
        ("ln", one(third(), ln), -250, 2),
        ("ln large", one(large(), ln), -250, 5),
        ("ln near one", one(real(1_000_001, 1_000_000), ln), -250, -18),
        ("sin", one(third(), sine), -253, 0),
        ("cos", one(third(), cosine), -253, 1),
        ("sin large", one(large(), sine), -234, -2),
        ("atan", one(third(), atan), -253, 0),
        ("atan large", one(large(), atan), -251, 2),
        ("pi", pi(LOW_BITS).unwrap(), -253, 3),
    ];
    for (name, value, error, bound) in operations {
        assert_eq!((value.error_bound(), value.bound()), (error, bound), "{name}");
    }
}

#[test]
fn floors_and_whole_numbers_are_found_through_the_error() {
    let floor = |value: &Real| i64::try_from(value.floor().unwrap()).unwrap();
    assert_eq!(
        [real(7, 2), real(-7, 2), real(4, 1), real(-4, 1), real(0, 1)].map(|x| floor(&x)),
        [3, -4, 4, -4, 0]
    );
    let root = |n: i64| real(n, 1).sqrt(LOW_BITS).unwrap();
    assert_eq!([floor(&root(2)), floor(&root(15)), floor(&root(17))], [1, 3, 4]);
    assert_eq!([floor(&root(2).neg()), floor(&root(15).neg())], [-2, -4]);
    let two = root(2).mul(&root(2), LOW_BITS).unwrap();
    assert_eq!((floor(&two), two.as_whole().map(|n| i64::try_from(n).unwrap())), (2, Some(2)));
    assert!(root(2).as_whole().is_none() && real(7, 2).as_whole().is_none());
    assert_eq!(real(4, 1).as_whole().map(|n| i64::try_from(n).unwrap()), Some(4));
}

/// A sum over the bits of values (FNV-1a), and over the reasons where there is none.
#[derive(Debug, PartialEq, Eq)]
struct Sum(u64);

impl Sum {
    fn add(&mut self, text: &str) {
        for byte in text.bytes().chain([0]) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn value(&mut self, value: Bounded<Real>) {
        match value {
            Ok(Real { mant, exp, err }) => self.add(&format!("{mant} {exp} {err}")),
            Err(stop) => self.add(&format!("{stop:?}")),
        }
    }

    fn complex(&mut self, value: Bounded<Complex>) {
        match value {
            Ok(Complex { re, im }) => [re, im].into_iter().for_each(|part| self.value(Ok(part))),
            Err(stop) => self.add(&format!("{stop:?}")),
        }
    }
}

/// Exact and inexact numbers, also those at the limits of functions.
fn numbers(bits: usize) -> Vec<Real> {
    let ratio = |n: i64, d: u64| Real::from_ratio(&RBig::from_parts(n.into(), d.into()), bits).unwrap();
    let power = |top: usize| Real::from_int(&(IBig::ONE << (top - 1)), bits).unwrap();
    let tiny = |top: i64| Real { mant: 1.into(), exp: top - 1, err: i64::MIN };
    let mut all = vec![ratio(0, 1), ratio(1, 1), ratio(3, 1), ratio(3, 4), ratio(-5, 2), ratio(4, 1)];
    all.extend([ratio(1, 3), ratio(-22, 7), ratio(1_000_003, 7), ratio(-701, 7), ratio(1, 1_000_003)]);
    all.extend([
        ratio(2, 1).sqrt(bits).unwrap(),
        pi(bits).unwrap(),
        ratio(7, 3).widened(-19),
        ratio(7, 3).widened(-20),
    ]);
    all.extend([
        ratio(1, 3).widened(-8),
        ratio(1, 3).widened(-9),
        ratio(1, 3).widened(-3),
        ratio(2, 1).widened(-101),
    ]);
    all.extend([
        ratio(2, 1).widened(-99),
        ratio(2, 1).widened(-100),
        ratio(1, 3).sub(&ratio(1, 3), bits).unwrap(),
    ]);
    all.extend([39, 40, 41, 64, 65, 1024, 1025, 4096, 4097].map(power));
    all.extend([-3, -270, -290, -4096, -4097, -15_000, -17_000].map(tiny));
    all
}

/// Of the two precisions, one after the other.
const SUMS: [u64; 34] = [
    0xf9d1_ca65_3e63_ba25,
    0x9b86_e2a4_ec14_76a2,
    0x0d77_76ab_f1ea_89ae,
    0xe4b6_807f_c78c_0b2f,
    0x9f6c_caf6_a82e_f0aa,
    0xf391_9311_fccc_b2ec,
    0x3af7_52c9_b419_0e85,
    0xdf34_ef46_483a_9bd4,
    0xc12a_bcc1_ee06_cdde,
    0x144f_3834_b036_d3cc,
    0x9c17_9e6d_c9e1_d08a,
    0x2067_1e73_b718_403a,
    0xf8b4_8c38_ba5d_64cf,
    0xde5e_2ef0_52e4_ac23,
    0x2bc0_9f73_7e16_8ab1,
    0x8e78_e285_e6bd_1886,
    0x7ab5_b4e3_d675_7b7a,
    0xbeeb_6453_038c_2c59,
    0x95cd_2da8_47a8_1e0f,
    0x99e3_f91e_ebbc_3e25,
    0xeb6e_7972_5b9a_0926,
    0xdafd_86bf_2204_70c7,
    0x99a6_aec2_04a3_7958,
    0x7994_f79c_d179_d644,
    0xb3d6_e001_e5c1_b17e,
    0xf531_2355_bc32_4d4d,
    0x1acf_68a3_bf30_662d,
    0x3d4a_4958_2766_ac70,
    0xba81_fb60_8a86_4d28,
    0xea1b_99e1_1330_f0b3,
    0x64f2_25f2_f18a_4582,
    0x6dc9_6b3f_f147_10b7,
    0xb2da_ca37_b64f_e6f5,
    0x5dfb_a4db_2cca_e87b,
];

/// No value depends on the machine, so that the bits of many values, by operation, are these. The tests above say that the values
/// are right; here a change of any bit, error or refusal is noticed.
#[test]
fn values_have_the_same_bits_everywhere() {
    let mut found = vec![];
    for bits in [LOW_BITS, HIGH_BITS] {
        let all = numbers(bits);
        let mut sum = |operation: &mut dyn FnMut(&mut Sum)| {
            let mut sum = Sum(0xcbf2_9ce4_8422_2325);
            operation(&mut sum);
            found.push(sum.0);
        };
        for operation in [Real::add, Real::sub, Real::mul, Real::div] {
            sum(&mut |sum| {
                for a in &all {
                    for b in &all {
                        sum.value(operation(a, b, bits));
                    }
                }
            });
        }
        let sine = |x: &Real, bits: usize| Ok(sin_cos(x, bits)?.0);
        let cosine = |x: &Real, bits: usize| Ok(sin_cos(x, bits)?.1);
        for operation in [Real::sqrt, exp, ln, sine, cosine, atan] {
            sum(&mut |sum| all.iter().for_each(|x| sum.value(operation(x, bits))));
        }
        sum(&mut |sum| {
            for x in all.iter().flat_map(|x| [x.clone(), x.neg()]) {
                sum.add(&format!("{:?} {:?} {:?}", x.sign(), x.floor(), x.as_whole()));
                sum.add(&format!("{} {} {}", x.bound(), x.error_bound(), x.hides_whole()));
                sum.add(&format!("{:?}", [1, 2, 12, 40].map(|n_digits| x.to_decimal(n_digits))));
                sum.value(Ok(x.widened(-50)));
            }
        });
        let some = [0, 1, 2, 4, 6, 7, 9, 11, 15, 21];
        let planes =
            some.iter().flat_map(|re| some.map(|im| Complex { re: all[*re].clone(), im: all[im].clone() }));
        let planes: Vec<Complex> = planes.collect();
        for operation in [Complex::exp, Complex::ln, Complex::sqrt, Complex::asin, Complex::atan] {
            sum(&mut |sum| planes.iter().for_each(|z| sum.complex(operation(z, bits))));
        }
        sum(&mut |sum| {
            for (a, b) in planes.iter().zip(planes.iter().rev().cycle().skip(7)) {
                sum.complex(a.mul(b, bits));
                sum.complex(a.div(b, bits));
                sum.complex(a.pow(b, bits));
                sum.complex(a.sin_cos(bits).and_then(|(sine, cosine)| sine.add(&cosine.widened(-200), bits)));
                sum.value(a.abs(bits));
                (-3..5).for_each(|n| sum.complex(a.powi(n, bits)));
            }
        });
    }
    assert_eq!(found, SUMS);
}
