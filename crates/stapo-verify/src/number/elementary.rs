//! Exponential, logarithm, sine, cosine and arc tangent in fixed point, each with its error.

use super::real::{Real, joined};
use crate::budget::{Bounded, Stop};
use dashu_base::{BitTest, SquareRoot};
use dashu_int::IBig;
use std::cmp::Ordering;
use std::sync::OnceLock;

/// Bits after the point of the stored constants.
const CONSTANT_BITS: usize = 2304;
/// Guard bits of a series: the rounding errors of all terms together stay below them.
const GUARD_BITS: usize = 48;
/// Arguments beyond `2^MAX_ARGUMENT_TOP` are refused: the stored constants have too few bits to reduce them.
const MAX_ARGUMENT_TOP: i64 = 64;

pub(crate) fn pi(bits: usize) -> Bounded<Real> {
    let fraction_bits = bits + GUARD_BITS;
    Real::from_fixed(pi_fixed(fraction_bits), fraction_bits, -(fraction_bits as i64) + 1, bits)
}

pub(crate) fn exp(x: &Real, bits: usize) -> Bounded<Real> {
    if x.is_exact_zero() {
        return Real::from_int(&IBig::ONE, bits);
    }
    if x.bound() > 40 {
        return Err(Stop::OverBudget("an exponential of a huge number"));
    }
    if x.error_bound() > -8 {
        return Err(Stop::Undefined("an exponential of something too vague"));
    }
    let fraction_bits = bits + GUARD_BITS + 40;
    let fixed = x.to_fixed(fraction_bits)?;
    let ln2 = ln2_fixed(fraction_bits);
    let half = IBig::ONE << (fraction_bits - 1);
    let count = ((&fixed << fraction_bits) / &ln2 + half) >> fraction_bits;
    let rest = &fixed - &count * &ln2;
    let halvings = 12;
    let small = rest >> halvings;
    let mut term = IBig::ONE << fraction_bits;
    let mut sum = IBig::ONE << fraction_bits;
    let mut k = 1u32;
    while !negligible(&term) {
        term = ((&term * &small) >> fraction_bits) / IBig::from(k);
        sum += &term;
        k += 1;
    }
    for _ in 0..halvings {
        sum = (&sum * &sum) >> fraction_bits;
    }
    // |sum| < 2, so the argument's error carries over once; series and squarings stay within the guard bits.
    let shift = i64::try_from(&count).map_err(|_| Stop::OverBudget("an exponential of a huge number"))?;
    let rounding = -((bits + GUARD_BITS / 2) as i64);
    let mut value =
        Real::from_fixed(sum, fraction_bits, joined(rounding, x.err_at(fraction_bits) + 2), bits)?;
    value.exp += shift;
    value.err += shift;
    Ok(value)
}

/// Natural logarithm of a number known to be positive.
pub(crate) fn ln(x: &Real, bits: usize) -> Bounded<Real> {
    if x.sign() != Some(Ordering::Greater) {
        return Err(Stop::Undefined("a logarithm of something not known to be positive"));
    }
    let fraction_bits = bits + GUARD_BITS + 64;
    let top = x.top();
    // m = x / 2^(top-1) in [1, 2)
    let scaled = Real { mant: x.mant.clone(), exp: x.exp - (top - 1), err: x.err };
    let mut m = scaled.to_fixed(fraction_bits)?;
    let one = IBig::ONE << fraction_bits;
    // ln m = 8 ln m^(1/8), and the series of the root is three times shorter.
    let halvings = 3;
    for _ in 0..halvings {
        m = (m << fraction_bits).sqrt().into();
    }
    let z = ((&m - &one) << fraction_bits) / (&m + &one);
    let sum = atanh_series(&z, fraction_bits) << (halvings + 1);
    let whole = IBig::from(top - 1) * ln2_fixed(fraction_bits);
    let rounding = -((bits + GUARD_BITS / 2) as i64);
    let inherited = if x.is_exact() { rounding } else { x.error_bound() - top + 3 };
    Real::from_fixed(whole + sum, fraction_bits, joined(rounding, inherited), bits)
}

/// Sine and cosine.
pub(crate) fn sin_cos(x: &Real, bits: usize) -> Bounded<(Real, Real)> {
    if x.is_exact_zero() {
        return Ok((Real::zero(), Real::from_int(&IBig::ONE, bits)?));
    }
    if x.bound() > MAX_ARGUMENT_TOP {
        return Err(Stop::OverBudget("an angle is huge"));
    }
    let fraction_bits = bits + GUARD_BITS + MAX_ARGUMENT_TOP as usize;
    let fixed = x.to_fixed(fraction_bits)?;
    let quarter = pi_fixed(fraction_bits + 1) >> 2;
    let half = IBig::ONE << (fraction_bits - 1);
    let count = ((&fixed << fraction_bits) / &quarter + half) >> fraction_bits;
    let one = IBig::ONE << fraction_bits;
    // A smaller angle has a shorter series; each doubling of the angle afterwards costs two bits of precision.
    let halvings = 8;
    let rest = (&fixed - &count * &quarter) >> halvings;
    let square = (&rest * &rest) >> fraction_bits;
    let mut sine = alternating_series(rest, &square, 1, fraction_bits);
    let mut cosine = alternating_series(one.clone(), &square, 0, fraction_bits);
    for _ in 0..halvings {
        let doubled = (&sine * &cosine) >> (fraction_bits - 1);
        cosine = ((&cosine * &cosine) >> (fraction_bits - 1)) - &one;
        sine = doubled;
    }
    let err = joined(-((bits + GUARD_BITS / 2) as i64), x.err_at(fraction_bits));
    let turn = u8::try_from(&(count & IBig::from(3u8))).unwrap_or(0);
    let (s, c) = match turn {
        0 => (sine, cosine),
        1 => (cosine, -sine),
        2 => (-sine, -cosine),
        _ => (-cosine, sine),
    };
    Ok((Real::from_fixed(s, fraction_bits, err, bits)?, Real::from_fixed(c, fraction_bits, err, bits)?))
}

/// Arc tangent, in (-π/2, π/2).
pub(crate) fn atan(x: &Real, bits: usize) -> Bounded<Real> {
    if x.is_exact_zero() {
        return Ok(Real::zero());
    }
    if x.top() > 1 {
        // atan x = ±π/2 - atan(1/x)
        let inverse = atan(&Real::from_int(&IBig::ONE, bits)?.div(x, bits)?, bits)?;
        let quarter = pi(bits)?.div(&Real::from_int(&IBig::from(2), bits)?, bits)?;
        let quarter = if x.sign() == Some(Ordering::Less) { quarter.neg() } else { quarter };
        return quarter.sub(&inverse, bits);
    }
    let fraction_bits = bits + GUARD_BITS + 16;
    let one = IBig::ONE << fraction_bits;
    let mut fixed = x.to_fixed(fraction_bits)?;
    let halvings = 3;
    for _ in 0..halvings {
        // atan x = 2 atan(x / (1 + sqrt(1 + x²)))
        let radicand = (&one * &one) + &fixed * &fixed;
        let root: IBig = radicand.sqrt().into();
        fixed = (&fixed << fraction_bits) / (&one + root);
    }
    let square = (&fixed * &fixed) >> fraction_bits;
    let mut power = fixed.clone();
    let mut sum = fixed;
    let mut k = 1u32;
    while !negligible(&power) {
        power = -((&power * &square) >> fraction_bits);
        k += 2;
        sum += &power / IBig::from(k);
    }
    let err = joined(-((bits + GUARD_BITS / 2) as i64), x.err_at(fraction_bits));
    Real::from_fixed(sum << halvings, fraction_bits, err, bits)
}

/// Sum of `first · (-square)^k / ((start+1)(start+2)…)`: sine from start 1, cosine from start 0.
fn alternating_series(first: IBig, square: &IBig, start: u32, fraction_bits: usize) -> IBig {
    let mut term = first.clone();
    let mut sum = first;
    let mut k = start;
    while !negligible(&term) {
        term = -((&term * square) >> fraction_bits) / IBig::from((k + 1) * (k + 2));
        sum += &term;
        k += 2;
    }
    sum
}

/// `z + z³/3 + z⁵/5 + …`
fn atanh_series(z: &IBig, fraction_bits: usize) -> IBig {
    let square = (z * z) >> fraction_bits;
    let mut power = z.clone();
    let mut sum = z.clone();
    let mut k = 1u32;
    while !negligible(&power) {
        power = (&power * &square) >> fraction_bits;
        k += 2;
        sum += &power / IBig::from(k);
    }
    sum
}

/// Whether a term is at most one unit in the last place, which ends its series. Shifts round down, so a negative term
/// never gets past -1.
fn negligible(term: &IBig) -> bool {
    term.bit_len() <= 1
}

fn pi_fixed(fraction_bits: usize) -> IBig {
    static PI: OnceLock<IBig> = OnceLock::new();
    let stored = PI.get_or_init(|| {
        // Machin: π/4 = 4 atan(1/5) - atan(1/239)
        let bits = CONSTANT_BITS + 64;
        let sum = inverse_atan(5, bits) * IBig::from(16) - inverse_atan(239, bits) * IBig::from(4);
        sum >> 64
    });
    truncated(stored, fraction_bits)
}

fn ln2_fixed(fraction_bits: usize) -> IBig {
    static LN2: OnceLock<IBig> = OnceLock::new();
    let stored = LN2.get_or_init(|| {
        // ln 2 = 2 atanh(1/3)
        let bits = CONSTANT_BITS + 64;
        let third = (IBig::ONE << bits) / IBig::from(3);
        atanh_series(&third, bits) >> 63
    });
    truncated(stored, fraction_bits)
}

fn truncated(stored: &IBig, fraction_bits: usize) -> IBig {
    assert!(
        fraction_bits <= CONSTANT_BITS,
        "constant asked for with {fraction_bits} bits, {CONSTANT_BITS} are stored"
    );
    stored >> (CONSTANT_BITS - fraction_bits)
}

fn inverse_atan(n: u32, bits: usize) -> IBig {
    let square = IBig::from(n * n);
    let mut power = (IBig::ONE << bits) / IBig::from(n);
    let mut sum = power.clone();
    let mut k = 1u32;
    while !power.is_zero() {
        power = -(power / &square);
        k += 2;
        sum += &power / IBig::from(k);
    }
    sum
}
