//! Exact arithmetic on integers and fractions; every operation is paid from the budget first.

use crate::budget::{Bounded, Budget, MAX_BITS, Stop};
use dashu_base::{BitTest, Gcd};
use dashu_int::{IBig, UBig};
use dashu_ratio::RBig;

/// Largest `n` whose factorial fits into [`MAX_BITS`], roughly.
const MAX_FACTORIAL: u32 = 5_000;

pub(crate) fn bits_of(value: &RBig) -> usize {
    value.numerator().bit_len().max(value.denominator().bit_len())
}

pub(crate) fn add(a: &RBig, b: &RBig, budget: &mut Budget) -> Bounded<RBig> {
    budget.spend_product(bits_of(a), bits_of(b))?;
    checked(a + b, budget)
}

pub(crate) fn mul(a: &RBig, b: &RBig, budget: &mut Budget) -> Bounded<RBig> {
    budget.spend_product(bits_of(a), bits_of(b))?;
    checked(a * b, budget)
}

pub(crate) fn inverse(a: &RBig) -> Bounded<RBig> {
    if a.is_zero() {
        return Err(Stop::Undefined("a division by zero"));
    }
    Ok(RBig::ONE / a)
}

/// `base ^ power` for a whole power.
pub(crate) fn powi(base: &RBig, power: i64, budget: &mut Budget) -> Bounded<RBig> {
    if power == 0 {
        return Ok(RBig::ONE);
    }
    if base.is_zero() {
        return if power > 0 { Ok(RBig::ZERO) } else { Err(Stop::Undefined("a division by zero")) };
    }
    let is_unit = base.is_int() && base.numerator().bit_len() <= 1;
    if is_unit {
        let is_negative = *base < RBig::ZERO && power % 2 != 0;
        return Ok(if is_negative { -RBig::ONE } else { RBig::ONE });
    }
    let bits = (bits_of(base) as u64).saturating_mul(power.unsigned_abs());
    if bits > MAX_BITS as u64 {
        return Err(Stop::OverBudget("a power grows past 20,000 digits"));
    }
    budget.spend_product(bits as usize, bits as usize)?;
    let exponent = power.unsigned_abs() as usize;
    let (numerator, denominator) = (base.numerator().pow(exponent), base.denominator().pow(exponent));
    let value = RBig::from_parts(numerator, denominator);
    if power > 0 { Ok(value) } else { inverse(&value) }
}

pub(crate) fn factorial(n: u32, budget: &mut Budget) -> Bounded<IBig> {
    if n > MAX_FACTORIAL {
        return Err(Stop::OverBudget("a factorial grows past 20,000 digits"));
    }
    let mut product = UBig::ONE;
    for k in 2..=n {
        budget.spend_product(product.bit_len(), 32)?;
        product *= UBig::from(k);
    }
    Ok(product.into())
}

/// `n (n-1) … (n-k+1) / k!`, for a whole `n` and a whole `k` of at least zero.
pub(crate) fn binomial(n: &IBig, k: u32, budget: &mut Budget) -> Bounded<IBig> {
    let mut value = IBig::ONE;
    let mut factor = n.clone();
    for j in 1..=k {
        if factor.is_zero() {
            return Ok(IBig::ZERO);
        }
        // The product of any j consecutive integers is a multiple of j!, so the division is exact.
        budget.spend_product(value.bit_len(), factor.bit_len() + 64)?;
        value = value * &factor / IBig::from(j);
        factor -= IBig::ONE;
    }
    Ok(value)
}

pub(crate) fn gcd(a: &IBig, b: &IBig, budget: &mut Budget) -> Bounded<IBig> {
    budget.spend_product(a.bit_len(), b.bit_len())?;
    if a.is_zero() {
        return Ok(b.clone());
    }
    if b.is_zero() {
        return Ok(a.clone());
    }
    Ok(IBig::from(a.gcd(b)))
}

fn checked(value: RBig, budget: &mut Budget) -> Bounded<RBig> {
    budget.spend(1)?;
    if bits_of(&value) > MAX_BITS {
        return Err(Stop::OverBudget("a number grows past 20,000 digits"));
    }
    Ok(value)
}
