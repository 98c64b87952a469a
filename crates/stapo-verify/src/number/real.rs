//! Real numbers with a proven error: `mant · 2^exp`, off by less than `2^err`.
//!
//! Integer arithmetic only, so a value has the same bits on every machine.

use super::PRECISION_SLACK;
use crate::budget::{Bounded, Stop};
use dashu_base::{Abs, BitTest, SquareRootRem};
use dashu_int::{IBig, UBig};
use dashu_ratio::RBig;
use std::cmp::Ordering;

/// `err` of a value without error.
const EXACT: i64 = i64::MIN;
/// Largest exponent; larger ones are refused long before they could overflow.
const MAX_EXPONENT: i64 = 1 << 50;

/// The number `mant · 2^exp`, known to within `2^err`.
#[derive(Debug, Clone)]
pub(crate) struct Real {
    pub(super) mant: IBig,
    pub(super) exp: i64,
    pub(super) err: i64,
}

impl Real {
    pub(crate) fn zero() -> Self {
        Self { mant: IBig::ZERO, exp: 0, err: EXACT }
    }

    pub(crate) fn from_int(value: &IBig, bits: usize) -> Bounded<Self> {
        Self { mant: value.clone(), exp: 0, err: EXACT }.rounded(bits)
    }

    pub(crate) fn from_ratio(value: &RBig, bits: usize) -> Bounded<Self> {
        let numerator = Self::from_int(value.numerator(), bits)?;
        if value.is_int() {
            return Ok(numerator);
        }
        let denominator = Self::from_int(&IBig::from(value.denominator().clone()), bits)?;
        numerator.div(&denominator, bits)
    }

    /// A value from fixed point: `fixed / 2^fraction_bits`, off by less than `2^err`.
    pub(super) fn from_fixed(fixed: IBig, fraction_bits: usize, err: i64, bits: usize) -> Bounded<Self> {
        Self { mant: fixed, exp: -(fraction_bits as i64), err }.rounded(bits)
    }

    /// The value in fixed point with `fraction_bits` bits after the point, rounded down.
    pub(super) fn to_fixed(&self, fraction_bits: usize) -> Bounded<IBig> {
        let shift = self.exp + fraction_bits as i64;
        if shift > 1 << 14 {
            return Err(Stop::OverBudget("a function's argument is too large"));
        }
        Ok(shifted(&self.mant, shift))
    }

    /// The exponent of the error once the value is rounded to `2^-fraction_bits`.
    pub(super) fn err_at(&self, fraction_bits: usize) -> i64 {
        joined(self.err, -(fraction_bits as i64))
    }

    pub(crate) fn is_exact_zero(&self) -> bool {
        self.mant.is_zero() && self.err == EXACT
    }

    pub(crate) fn is_exact(&self) -> bool {
        self.err == EXACT
    }

    /// The sign, when the error leaves no doubt; `Equal` only for an exact zero.
    pub(crate) fn sign(&self) -> Option<Ordering> {
        if self.mant.is_zero() {
            return (self.err == EXACT).then_some(Ordering::Equal);
        }
        if self.err != EXACT && self.top() - 1 <= self.err {
            return None;
        }
        Some(if self.mant > IBig::ZERO { Ordering::Greater } else { Ordering::Less })
    }

    /// `t` with |mant · 2^exp| < 2^t; for a mantissa of zero, the exponent of the error.
    pub(super) fn top(&self) -> i64 {
        if self.mant.is_zero() { self.err.max(-MAX_EXPONENT) } else { self.mant.bit_len() as i64 + self.exp }
    }

    /// `t` with |true value| < 2^t.
    pub(crate) fn bound(&self) -> i64 {
        if self.err == EXACT { self.top() } else { self.top().max(self.err) + 1 }
    }

    /// The error's exponent, very small for an exact value.
    pub(crate) fn error_bound(&self) -> i64 {
        self.err.max(-MAX_EXPONENT * 2)
    }

    /// The value with a further error below `2^err`.
    pub(crate) fn widened(&self, err: i64) -> Self {
        Self { err: joined(self.err, err), ..self.clone() }
    }

    pub(crate) fn neg(&self) -> Self {
        Self { mant: -self.mant.clone(), exp: self.exp, err: self.err }
    }

    pub(crate) fn abs(&self) -> Self {
        Self { mant: self.mant.clone().abs(), exp: self.exp, err: self.err }
    }

    pub(crate) fn add(&self, other: &Self, bits: usize) -> Bounded<Self> {
        let (large, small) = if self.top() >= other.top() { (self, other) } else { (other, self) };
        if small.is_exact_zero() {
            return Ok(large.clone());
        }
        if large.top() - small.top() > (bits + PRECISION_SLACK) as i64 {
            let err = joined(large.err, small.bound());
            return Ok(Self { mant: large.mant.clone(), exp: large.exp, err });
        }
        let exp = large.exp.min(small.exp);
        let mant = shifted(&large.mant, large.exp - exp) + shifted(&small.mant, small.exp - exp);
        Self { mant, exp, err: joined(large.err, small.err) }.rounded(bits)
    }

    pub(crate) fn sub(&self, other: &Self, bits: usize) -> Bounded<Self> {
        self.add(&other.neg(), bits)
    }

    pub(crate) fn mul(&self, other: &Self, bits: usize) -> Bounded<Self> {
        if self.is_exact_zero() || other.is_exact_zero() {
            return Ok(Self::zero());
        }
        let err = joined(
            joined(scaled(other.err, self.top()), scaled(self.err, other.top())),
            if self.err == EXACT { EXACT } else { scaled(other.err, self.err) },
        );
        Self { mant: &self.mant * &other.mant, exp: self.exp + other.exp, err }.rounded(bits)
    }

    pub(crate) fn div(&self, other: &Self, bits: usize) -> Bounded<Self> {
        if other.is_exact_zero() {
            return Err(Stop::Undefined("a division by zero"));
        }
        let top = other.top();
        if other.mant.is_zero() || (other.err != EXACT && other.err > top - 3) {
            return Err(Stop::Undefined("a division by something too close to zero"));
        }
        if self.is_exact_zero() {
            return Ok(Self::zero());
        }
        let shift = ((bits + 4 + other.mant.bit_len()) as i64 - self.mant.bit_len() as i64).clamp(0, 1 << 15)
            as usize;
        let numerator = &self.mant << shift;
        let quotient = &numerator / &other.mant;
        let is_whole = &quotient * &other.mant == numerator;
        let exp = self.exp - other.exp - shift as i64;
        let quotient_top = quotient.bit_len() as i64 + exp;
        let mut err = joined(scaled(self.err, 2 - top), scaled(other.err, quotient_top + 3 - top));
        if !is_whole {
            err = joined(err, exp);
        }
        Self { mant: quotient, exp, err }.rounded(bits)
    }

    /// Square root of a value that is not known to be negative.
    pub(crate) fn sqrt(&self, bits: usize) -> Bounded<Self> {
        if self.is_exact_zero() {
            return Ok(Self::zero());
        }
        let Some(sign) = self.sign() else {
            return Ok(Self { mant: IBig::ZERO, exp: 0, err: self.bound() / 2 + 1 });
        };
        if sign == Ordering::Less {
            return Err(Stop::Undefined("a real square root of a negative number"));
        }
        let length = self.mant.bit_len() as i64;
        let mut shift = (2 * bits as i64 + 8 - length).max(0);
        if (self.exp ^ shift) & 1 == 1 {
            shift += 1;
        }
        let (root, rest) = magnitude(&shifted(&self.mant, shift)).sqrt_rem();
        let exp = (self.exp - shift) / 2;
        let mut err = scaled(self.err, 1 - (self.top() - 2).div_euclid(2));
        if !rest.is_zero() {
            err = joined(err, exp);
        }
        Self { mant: root.into(), exp, err }.rounded(bits)
    }

    /// Whether the value is too large, or its error too large, to tell whether it is an integer.
    pub(crate) fn hides_whole(&self) -> bool {
        self.top() > 1 << 10 || (self.err != EXACT && self.err > -20)
    }

    /// The integer that the value equals: an exact integer, or the integer within an error of at most `2^-20`.
    pub(crate) fn as_whole(&self) -> Option<IBig> {
        if self.hides_whole() {
            return None;
        }
        let nearest = self.nearest();
        let gap = self.sub(&Self { mant: nearest.clone(), exp: 0, err: EXACT }, 1 << 12).ok()?;
        let is_whole = if self.err == EXACT { gap.mant.is_zero() } else { gap.sign().is_none() };
        is_whole.then_some(nearest)
    }

    /// Greatest whole number not above the value, when the error does not leave two candidates.
    pub(crate) fn floor(&self) -> Bounded<IBig> {
        if self.top() > 1 << 12 {
            return Err(Stop::OverBudget("a rounding of a huge number"));
        }
        if self.err == EXACT {
            return Ok(shifted(&self.mant, self.exp));
        }
        let nearest = self.nearest();
        let gap = self.sub(&Self { mant: nearest.clone(), exp: 0, err: EXACT }, 1 << 13)?;
        match gap.sign() {
            Some(Ordering::Less) => Ok(nearest - IBig::ONE),
            Some(_) => Ok(nearest),
            // The value cannot be distinguished from an integer, so it counts as that integer.
            None if self.err < -100 => Ok(nearest),
            None => Err(Stop::Undefined("a rounding too close to call")),
        }
    }

    /// The value in decimal with `n_digits` significant digits, powers of ten written with an e.
    pub(crate) fn to_decimal(&self, n_digits: usize) -> Option<String> {
        if self.mant.is_zero() {
            return Some("0".into());
        }
        if self.top().abs() > 4096 {
            return None;
        }
        // log10(2) is about 1233/4096; an estimate that is one digit off is corrected below.
        let guess = self.top() * 1233 / 4096;
        let shift = n_digits as i64 + 3 - guess;
        let ten = UBig::from(10u8).pow(shift.unsigned_abs() as usize);
        let scaled = if shift >= 0 {
            shifted(&(self.mant.clone().abs() * ten), self.exp)
        } else if self.exp >= 0 {
            shifted(&self.mant.clone().abs(), self.exp) / ten
        } else {
            self.mant.clone().abs() / (ten << (-self.exp) as usize)
        };
        let text = scaled.to_string();
        let power = text.len() as i64 - 1 - shift;
        let (digits, power) = rounded_digits(&text, n_digits, power);
        let sign = if self.mant < IBig::ZERO { "-" } else { "" };
        Some(format!("{sign}{}", pointed(&digits, power)))
    }

    fn nearest(&self) -> IBig {
        (shifted(&self.mant, self.exp + 1) + IBig::ONE) >> 1
    }

    fn rounded(mut self, bits: usize) -> Bounded<Self> {
        let length = self.mant.bit_len();
        if length > bits {
            let cut = length - bits;
            let is_lossless = self.mant.trailing_zeros() >= Some(cut);
            self.mant >>= cut;
            self.exp += cut as i64;
            if !is_lossless {
                self.err = joined(self.err, self.exp);
            }
        }
        if self.exp.abs() > MAX_EXPONENT || (self.err != EXACT && self.err.abs() > 2 * MAX_EXPONENT) {
            return Err(Stop::OverBudget("a number's magnitude"));
        }
        Ok(self)
    }
}

/// Error bound of a sum of two values.
pub(super) fn joined(a: i64, b: i64) -> i64 {
    match (a == EXACT, b == EXACT) {
        (true, _) => b,
        (_, true) => a,
        _ => a.max(b) + 1,
    }
}

/// Error bound after multiplication by something below `2^top`.
fn scaled(err: i64, top: i64) -> i64 {
    if err == EXACT { EXACT } else { err.saturating_add(top).max(-4 * MAX_EXPONENT) }
}

fn shifted(value: &IBig, shift: i64) -> IBig {
    if shift >= 0 { value << shift as usize } else { value >> (-shift) as usize }
}

fn magnitude(value: &IBig) -> UBig {
    value.clone().into_parts().1
}

/// The first `n` digits, rounded, without trailing zeros, and the power of ten of the first.
fn rounded_digits(text: &str, n: usize, power: i64) -> (String, i64) {
    let mut digits: Vec<u8> = text.bytes().take(n).map(|b| b - b'0').collect();
    let mut power = power;
    if text.as_bytes().get(n).is_some_and(|b| *b >= b'5') {
        let mut i = digits.len();
        loop {
            if i == 0 {
                digits.insert(0, 1);
                power += 1;
                break;
            }
            i -= 1;
            if digits[i] < 9 {
                digits[i] += 1;
                break;
            }
            digits[i] = 0;
        }
    }
    while digits.len() > 1 && digits.last() == Some(&0) {
        digits.pop();
    }
    (digits.iter().map(|d| char::from(b'0' + d)).collect(), power)
}

/// Digits with the point after the first times `10^power`, in the notation a person would choose.
fn pointed(digits: &str, power: i64) -> String {
    let n = digits.len() as i64;
    if (-5..0).contains(&power) {
        return format!("0.{}{digits}", "0".repeat((-power - 1) as usize));
    }
    if (0..15).contains(&power) {
        if n <= power + 1 {
            return format!("{digits}{}", "0".repeat((power + 1 - n) as usize));
        }
        let (whole, fraction) = digits.split_at(power as usize + 1);
        return format!("{whole}.{fraction}");
    }
    let (first, rest) = digits.split_at(1);
    if rest.is_empty() { format!("{first}e{power}") } else { format!("{first}.{rest}e{power}") }
}
