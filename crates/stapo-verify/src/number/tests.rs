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
    let two = |a: Real, b: Real, op: fn(&Real, &Real, usize) -> super::super::budget::Bounded<Real>| {
        op(&a, &b, LOW_BITS).unwrap()
    };
    let one =
        |a: Real, op: fn(&Real, usize) -> super::super::budget::Bounded<Real>| op(&a, LOW_BITS).unwrap();
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
