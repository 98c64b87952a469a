//! Complex numbers over [`Real`], principal values throughout.

use super::elementary::{atan, exp, ln, pi, sin_cos};
use super::real::Real;
use crate::budget::{Bounded, Stop};
use dashu_int::IBig;
use std::cmp::Ordering;

#[derive(Debug, Clone)]
pub(crate) struct Complex {
    pub(crate) re: Real,
    pub(crate) im: Real,
}

impl Complex {
    pub(crate) fn real(re: Real) -> Self {
        Self { re, im: Real::zero() }
    }

    pub(crate) fn int(value: i64, bits: usize) -> Bounded<Self> {
        Ok(Self::real(Real::from_int(&IBig::from(value), bits)?))
    }

    pub(crate) fn i(bits: usize) -> Bounded<Self> {
        Ok(Self { re: Real::zero(), im: Real::from_int(&IBig::ONE, bits)? })
    }

    /// Whether the imaginary part is zero by construction, not by rounding.
    pub(crate) fn is_real(&self) -> bool {
        self.im.is_exact_zero()
    }

    pub(crate) fn is_exact_zero(&self) -> bool {
        self.re.is_exact_zero() && self.im.is_exact_zero()
    }

    /// The value with a further error below `2^err` in both parts; a real value stays real.
    pub(crate) fn widened(&self, err: i64) -> Self {
        let im = if self.is_real() { self.im.clone() } else { self.im.widened(err) };
        Self { re: self.re.widened(err), im }
    }

    pub(crate) fn neg(&self) -> Self {
        Self { re: self.re.neg(), im: self.im.neg() }
    }

    pub(crate) fn add(&self, other: &Self, bits: usize) -> Bounded<Self> {
        Ok(Self { re: self.re.add(&other.re, bits)?, im: self.im.add(&other.im, bits)? })
    }

    pub(crate) fn sub(&self, other: &Self, bits: usize) -> Bounded<Self> {
        self.add(&other.neg(), bits)
    }

    pub(crate) fn mul(&self, other: &Self, bits: usize) -> Bounded<Self> {
        if self.is_real() && other.is_real() {
            return Ok(Self::real(self.re.mul(&other.re, bits)?));
        }
        let re = self.re.mul(&other.re, bits)?.sub(&self.im.mul(&other.im, bits)?, bits)?;
        let im = self.re.mul(&other.im, bits)?.add(&self.im.mul(&other.re, bits)?, bits)?;
        Ok(Self { re, im })
    }

    pub(crate) fn div(&self, other: &Self, bits: usize) -> Bounded<Self> {
        if other.is_real() {
            return Ok(Self { re: self.re.div(&other.re, bits)?, im: self.im.div(&other.re, bits)? });
        }
        let conjugate = Self { re: other.re.clone(), im: other.im.neg() };
        let top = self.mul(&conjugate, bits)?;
        let norm = other.norm_squared(bits)?;
        Ok(Self { re: top.re.div(&norm, bits)?, im: top.im.div(&norm, bits)? })
    }

    fn norm_squared(&self, bits: usize) -> Bounded<Real> {
        self.re.mul(&self.re, bits)?.add(&self.im.mul(&self.im, bits)?, bits)
    }

    pub(crate) fn abs(&self, bits: usize) -> Bounded<Real> {
        if self.is_real() {
            return Ok(self.re.abs());
        }
        self.norm_squared(bits)?.sqrt(bits)
    }

    /// The angle in (-π, π].
    fn argument(&self, bits: usize) -> Bounded<Real> {
        let (x, y) = (self.re.sign(), self.im.sign());
        let half_turn = pi(bits)?;
        let quarter = half_turn.div(&Real::from_int(&IBig::from(2), bits)?, bits)?;
        match (x, y) {
            (Some(Ordering::Greater), _) => atan(&self.im.div(&self.re, bits)?, bits),
            (_, Some(Ordering::Greater)) => quarter.sub(&atan(&self.re.div(&self.im, bits)?, bits)?, bits),
            (_, Some(Ordering::Less)) => quarter.neg().sub(&atan(&self.re.div(&self.im, bits)?, bits)?, bits),
            (Some(Ordering::Less), Some(Ordering::Equal)) => Ok(half_turn),
            _ => Err(Stop::Undefined("an angle on a branch cut")),
        }
    }

    pub(crate) fn exp(&self, bits: usize) -> Bounded<Self> {
        let size = exp(&self.re, bits)?;
        if self.is_real() {
            return Ok(Self::real(size));
        }
        let (sine, cosine) = sin_cos(&self.im, bits)?;
        Ok(Self { re: size.mul(&cosine, bits)?, im: size.mul(&sine, bits)? })
    }

    pub(crate) fn ln(&self, bits: usize) -> Bounded<Self> {
        if self.is_real() && self.re.sign() == Some(Ordering::Greater) {
            return Ok(Self::real(ln(&self.re, bits)?));
        }
        let two = Real::from_int(&IBig::from(2), bits)?;
        let size = ln(&self.norm_squared(bits)?, bits)?.div(&two, bits)?;
        Ok(Self { re: size, im: self.argument(bits)? })
    }

    pub(crate) fn sqrt(&self, bits: usize) -> Bounded<Self> {
        if self.is_real() {
            return match self.re.sign() {
                Some(Ordering::Less) => Ok(Self { re: Real::zero(), im: self.re.neg().sqrt(bits)? }),
                _ => Ok(Self::real(self.re.sqrt(bits)?)),
            };
        }
        let half = Real::from_int(&IBig::ONE, bits)?.div(&Real::from_int(&IBig::from(2), bits)?, bits)?;
        self.pow(&Self::real(half), bits)
    }

    /// `n`-th power for a whole `n`.
    pub(crate) fn powi(&self, n: i64, bits: usize) -> Bounded<Self> {
        let mut base = if n < 0 { Self::int(1, bits)?.div(self, bits)? } else { self.clone() };
        let mut left = n.unsigned_abs();
        let mut result = Self::int(1, bits)?;
        loop {
            if left & 1 == 1 {
                result = result.mul(&base, bits)?;
            }
            left >>= 1;
            if left == 0 {
                return Ok(result);
            }
            base = base.mul(&base, bits)?;
        }
    }

    /// Principal value of `self ^ power`.
    pub(crate) fn pow(&self, power: &Self, bits: usize) -> Bounded<Self> {
        if self.is_exact_zero() {
            return match power.re.sign() {
                Some(Ordering::Greater) => Ok(self.clone()),
                _ => Err(Stop::Undefined("zero to a power that is not positive")),
            };
        }
        self.ln(bits)?.mul(power, bits)?.exp(bits)
    }

    /// Sine and cosine, by the exponential off the real line.
    pub(crate) fn sin_cos(&self, bits: usize) -> Bounded<(Self, Self)> {
        if self.is_real() {
            let (sine, cosine) = sin_cos(&self.re, bits)?;
            return Ok((Self::real(sine), Self::real(cosine)));
        }
        let i = Self::i(bits)?;
        let forward = self.mul(&i, bits)?.exp(bits)?;
        let backward = self.mul(&i, bits)?.neg().exp(bits)?;
        let two = Self::int(2, bits)?;
        let sine = forward.sub(&backward, bits)?.div(&two.mul(&i, bits)?, bits)?;
        Ok((sine, forward.add(&backward, bits)?.div(&two, bits)?))
    }

    /// Arc sine: real inside [-1, 1] by `atan2(x, sqrt(1 - x²))`.
    pub(crate) fn asin(&self, bits: usize) -> Bounded<Self> {
        let one = Self::int(1, bits)?;
        let cosine = one.sub(&self.mul(self, bits)?, bits)?.sqrt(bits)?;
        if !self.is_real() || !cosine.is_real() {
            return Err(Stop::Undefined("an arc sine outside [-1, 1]"));
        }
        Ok(Self::real(Self { re: cosine.re, im: self.re.clone() }.argument(bits)?))
    }

    pub(crate) fn atan(&self, bits: usize) -> Bounded<Self> {
        if !self.is_real() {
            return Err(Stop::Undefined("an arc tangent of a complex number"));
        }
        Ok(Self::real(atan(&self.re, bits)?))
    }
}
