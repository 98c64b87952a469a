use super::complex::Complex;
use super::elementary::{atan, exp, ln, pi, sin_cos};
use super::real::Real;
use super::{HIGH_BITS, LOW_BITS};
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
    ] {
        assert_eq!(real(n, d).to_decimal(12).unwrap(), shown);
    }
}

/// Exponents to 2^50 and errors to twice that are taken.
#[test]
fn magnitudes_end_at_their_limit() {
    let is_taken = |fraction_bits, err| Real::from_fixed(1.into(), fraction_bits, err, LOW_BITS).is_ok();
    assert!(is_taken(1 << 50, -(1 << 51)));
    assert!(!is_taken((1 << 50) + 1, 0) && !is_taken(0, -(1 << 51) - 1));
}
