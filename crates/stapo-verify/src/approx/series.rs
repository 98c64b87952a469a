//! The value of a sum or product over an index, with a proven error.

use super::{SamplePoint, evaluate};
use crate::budget::{Bounded, Budget, Stop};
use crate::exact_form::{affordable_form, ratio_of};
use crate::expr::{Expr, Func};
use crate::number::complex::Complex;
use crate::number::real::Real;
use crate::poly::{Atom, Power};
use dashu_base::Abs;
use dashu_ratio::RBig;
use std::cmp::Ordering;

/// Most terms of a sum that are added up.
const MAX_TERMS: i64 = 1000;
/// The rest of an infinite sum is proven to be below `2^MAX_REST`.
const MAX_REST: i64 = -140;
/// Bits with which the rest is bounded.
const BOUND_BITS: usize = 64;

/// The sum or product of `term` over all whole `index` between the two bounds; an empty sum is 0, an empty product 1.
pub(crate) fn finite(
    term: &Expr,
    index: &str,
    (from, to): (&Expr, &Expr),
    is_sum: bool,
    point: &SamplePoint,
    budget: &mut Budget,
) -> Bounded<Complex> {
    let from = whole(from, point, budget)?;
    let to = whole(to, point, budget)?;
    if to.saturating_sub(from) >= MAX_TERMS {
        return Err(Stop::OverBudget("a sum of more than 1000 terms"));
    }
    let mut terms = Vec::new();
    for k in from..=to {
        terms.push(at_index(term, index, k, point, budget)?);
    }
    if is_sum {
        return total(&terms, point.bits);
    }
    let mut product = Complex::int(1, point.bits)?;
    for factor in &terms {
        product = product.mul(factor, point.bits)?;
    }
    Ok(product)
}

/// The sum of `term` over all whole `index` from `from` on. Terms are added until the rest is proven to be negligible,
/// which needs terms that shrink at least as fast as a geometric series.
pub(crate) fn infinite(
    term: &Expr,
    index: &str,
    from: &Expr,
    point: &SamplePoint,
    budget: &mut Budget,
) -> Bounded<Complex> {
    let from = whole(from, point, budget)?;
    let mut shrinking = Vec::new();
    factors(term, 1, index, &mut shrinking, budget)?;
    check_convergence(&shrinking, point, budget)?;
    let mut terms = Vec::new();
    for k in from..from.saturating_add(MAX_TERMS) {
        let value = at_index(term, index, k, point, budget)?;
        let size = value.abs(BOUND_BITS)?;
        terms.push(value);
        if (k - from) % 8 != 7 {
            continue;
        }
        if let Some(rest) = rest_bound(&size, &shrinking, k, point, budget)?
            && rest < MAX_REST
        {
            return Ok(total(&terms, point.bits)?.widened(rest));
        }
    }
    Err(Stop::Unreadable("an infinite sum whose rest cannot be bounded".into()))
}

/// Refuses terms that do not shrink in the end: their powers grow, or neither powers nor factorials make them shrink.
fn check_convergence(shrinking: &[Factor], point: &SamplePoint, budget: &mut Budget) -> Bounded<()> {
    if shrinking.iter().any(|factor| matches!(factor, Factor::InverseFactorial { .. })) {
        return Ok(());
    }
    let one = Real::from_ratio(&RBig::ONE, BOUND_BITS)?;
    let mut ratio = one.clone();
    for factor in shrinking {
        if let Factor::Power { base, slope } = factor {
            ratio = ratio.mul(&size_of_power(base, slope, point, budget)?, BOUND_BITS)?;
        }
    }
    match one.sub(&ratio, BOUND_BITS)?.sign() {
        Some(Ordering::Greater) => Ok(()),
        Some(Ordering::Less) => Err(Stop::Undefined("a sum that does not converge")),
        _ => Err(Stop::Unreadable("an infinite sum whose rest cannot be bounded".into())),
    }
}

/// `|base| ^ slope`
fn size_of_power(base: &Expr, slope: &RBig, point: &SamplePoint, budget: &mut Budget) -> Bounded<Real> {
    let power = Expr::Num { value: slope.clone(), is_decimal: false };
    let base = Expr::Call(Func::Abs, vec![base.clone()]);
    evaluate(&Expr::Pow(Box::new(base), Box::new(power)), point, budget)?.abs(BOUND_BITS)
}

/// The sum, added up in halves, so that the error grows with the logarithm of the number of terms.
fn total(terms: &[Complex], bits: usize) -> Bounded<Complex> {
    match terms {
        [] => Ok(Complex::real(Real::zero())),
        [one] => Ok(one.clone()),
        _ => {
            let (left, right) = terms.split_at(terms.len() / 2);
            total(left, bits)?.add(&total(right, bits)?, bits)
        }
    }
}

fn at_index(term: &Expr, index: &str, k: i64, point: &SamplePoint, budget: &mut Budget) -> Bounded<Complex> {
    let mut values = vec![(index, RBig::from(k))];
    values.extend(point.values.iter().cloned());
    evaluate(term, &SamplePoint { values: &values, ..*point }, budget)
}

fn whole(bound: &Expr, point: &SamplePoint, budget: &mut Budget) -> Bounded<i64> {
    let value = evaluate(bound, point, budget)?;
    let value = if value.is_real() { value.re.as_whole() } else { None };
    value
        .and_then(|value| i64::try_from(&value).ok())
        .ok_or(Stop::Undefined("a bound of a sum that is not whole"))
}

/// A factor of a term, by how it changes from one index to the next.
enum Factor {
    /// `base ^ (slope · index + …)`
    Power { base: Expr, slope: RBig },
    /// `(slope · index + start) ^ power`
    Linear { slope: RBig, start: RBig, power: i64 },
    /// `1 / (slope · index + start)!`
    InverseFactorial { slope: RBig, start: RBig },
}

/// The factors of `term ^ sign` that depend on the index.
fn factors(term: &Expr, sign: i64, index: &str, found: &mut Vec<Factor>, budget: &mut Budget) -> Bounded<()> {
    let unclear = || Stop::Unreadable("an infinite sum whose rest cannot be bounded".into());
    let depends = |expr: &Expr| expr.any(|node| matches!(node, Expr::Var(name) if name == index));
    if !depends(term) {
        return Ok(());
    }
    match term {
        Expr::Mul(list) => list.iter().try_for_each(|factor| factors(factor, sign, index, found, budget)),
        Expr::Neg(x) => factors(x, sign, index, found, budget),
        Expr::Inv(x) => factors(x, -sign, index, found, budget),
        Expr::Pow(base, power) if !depends(base) => {
            let (slope, _) = linear(power, index, budget)?.ok_or_else(unclear)?;
            let slope = if sign < 0 { -slope } else { slope };
            found.push(Factor::Power { base: (**base).clone(), slope });
            Ok(())
        }
        Expr::Pow(base, power) if !depends(power) => {
            let power = ratio_of(power, budget)?.filter(RBig::is_int).ok_or_else(unclear)?;
            let power =
                i64::try_from(power.numerator()).ok().filter(|n| n.abs() <= 64).ok_or_else(unclear)?;
            let (slope, start) = linear(base, index, budget)?.ok_or_else(unclear)?;
            found.push(Factor::Linear { slope, start, power: sign * power });
            Ok(())
        }
        Expr::Call(Func::Factorial, args) if sign < 0 => {
            let (slope, start) = linear(&args[0], index, budget)?.ok_or_else(unclear)?;
            found.push(Factor::InverseFactorial { slope, start });
            Ok(())
        }
        _ => {
            let (slope, start) = linear(term, index, budget)?.ok_or_else(unclear)?;
            found.push(Factor::Linear { slope, start, power: sign });
            Ok(())
        }
    }
}

/// Slope and start of `slope · index + start` with constant numbers.
fn linear(expr: &Expr, index: &str, budget: &mut Budget) -> Bounded<Option<(RBig, RBig)>> {
    let Some(form) = affordable_form(expr, budget)? else { return Ok(None) };
    let alone = vec![(Atom::Var(index.to_owned()), Power { n: 1, d: 1 })];
    if !form.terms.keys().all(|monomial| monomial.is_empty() || *monomial == alone) {
        return Ok(None);
    }
    let at = |monomial: &Vec<(Atom, Power)>| form.terms.get(monomial).cloned().unwrap_or(RBig::ZERO);
    Ok(Some((at(&alone), at(&Vec::new()))))
}

/// `b` with a sum of all terms after index `k` below `2^b`, where `size` is the size of the term at `k`. `None` if the
/// terms are not yet known to shrink.
///
/// After `k` every factor changes by at most the ratio taken here, so the rest is at most `size · q / (1 - q)`.
fn rest_bound(
    size: &Real,
    shrinking: &[Factor],
    k: i64,
    point: &SamplePoint,
    budget: &mut Budget,
) -> Bounded<Option<i64>> {
    let one = Real::from_ratio(&RBig::ONE, BOUND_BITS)?;
    let mut ratio = one.clone();
    for factor in shrinking {
        let at = |slope: &RBig, start: &RBig, k: i64| slope * RBig::from(k) + start;
        let change = match factor {
            Factor::Power { base, slope } => size_of_power(base, slope, point, budget)?,
            Factor::Linear { slope, start, power } => {
                let (here, next) = (at(slope, start, k), at(slope, start, k + 1));
                // The index has not yet passed the zero of the factor.
                if here.is_zero() || (here < RBig::ZERO) != (*slope < RBig::ZERO) {
                    return Ok(None);
                }
                let power = if *power > 0 { (next / here).abs().pow(*power as isize) } else { RBig::ONE };
                Real::from_ratio(&power, BOUND_BITS)?
            }
            Factor::InverseFactorial { slope, start } => {
                let here = at(slope, start, k);
                let is_growing = slope.is_int() && *slope > RBig::ZERO && here.is_int() && here >= RBig::ZERO;
                if !is_growing {
                    return Err(Stop::Unreadable("an infinite sum of factorials that do not grow".into()));
                }
                Real::from_ratio(&(RBig::ONE / (here + RBig::ONE)), BOUND_BITS)?
            }
        };
        ratio = ratio.mul(&change, BOUND_BITS)?;
    }
    let gap = one.sub(&ratio, BOUND_BITS)?;
    if gap.sign() != Some(Ordering::Greater) {
        return Ok(None);
    }
    Ok(Some(size.mul(&ratio, BOUND_BITS)?.div(&gap, BOUND_BITS)?.bound()))
}
