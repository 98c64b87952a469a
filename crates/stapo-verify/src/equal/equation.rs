//! Equations, inequalities and ratios, equal up to rearrangement and scaling.

use super::sample::{SampleKind, points, sample};
use super::value::{Match, compare};
use crate::approx::{Domain, LogBase, SamplePoint, evaluate};
use crate::budget::{Bounded, Budget, Stop};
use crate::exact_form::affordable_form;
use crate::expr::Expr;
use crate::lex::token::Rel;
use crate::number::LOW_BITS;
use crate::number::complex::Complex;
use crate::poly::{Atom, Poly, Power};
use dashu_ratio::RBig;
use std::cmp::Ordering;
use std::collections::BTreeMap;

/// Whether two equations `left = right` agree up to a constant factor and denominators.
pub(crate) fn same_equation(a: (&Expr, &Expr), b: (&Expr, &Expr), budget: &mut Budget) -> Bounded<bool> {
    Ok(factor(&difference(a), &difference(b), Clear::Denominators, budget)?.is_some())
}

/// Whether two inequalities agree up to a constant factor; a negative factor reverses the relation.
pub(crate) fn same_inequality(
    a: (&Expr, Rel, &Expr),
    b: (&Expr, Rel, &Expr),
    budget: &mut Budget,
) -> Bounded<bool> {
    let (a_gap, b_gap) = (difference((a.0, a.2)), difference((b.0, b.2)));
    let units = [a_gap.units(), b_gap.units()];
    let is_one_sided = units.iter().any(Vec::is_empty);
    let is_one_unit = units.iter().flatten().all(|unit| Some(unit) == units.iter().flatten().next());
    let sign = if is_one_sided && is_one_unit {
        factor(&a_gap.without_units(), &b_gap.without_units(), Clear::Nothing, budget)?
    } else {
        factor(&a_gap, &b_gap, Clear::Nothing, budget)?
    };
    Ok(match sign {
        Some(Ordering::Greater) => a.1 == b.1,
        Some(Ordering::Less) => a.1 == b.1.mirrored(),
        _ => false,
    })
}

fn difference((left, right): (&Expr, &Expr)) -> Expr {
    Expr::Add(vec![left.clone(), right.clone().negated()])
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Clear {
    /// Variables may be multiplied out of denominators.
    Denominators,
    Nothing,
}

/// The sign of the constant `c` with `a = c · b`, if there is one.
fn factor(a: &Expr, b: &Expr, clear: Clear, budget: &mut Budget) -> Bounded<Option<Ordering>> {
    if let (Some(fa), Some(fb)) = (affordable_form(a, budget)?, affordable_form(b, budget)?) {
        if fa.is_zero() || fb.is_zero() {
            return Ok((fa.is_zero() && fb.is_zero()).then_some(Ordering::Greater));
        }
        let (fa, fb) = match clear {
            Clear::Denominators => (cleared(&fa, budget)?, cleared(&fb, budget)?),
            Clear::Nothing => (Some(fa), Some(fb)),
        };
        if let (Some(fa), Some(fb)) = (fa, fb)
            && let Some(ratio) = fa.ratio_to(&fb, budget)?
        {
            return Ok(Some(ratio.cmp(&RBig::ZERO)));
        }
    }
    constant_ratio(a, b, budget)
}

/// `form` multiplied by powers of its variables, so that no variable is left in a denominator.
fn cleared(form: &Poly, budget: &mut Budget) -> Bounded<Option<Poly>> {
    let mut lowest: BTreeMap<Atom, Power> = BTreeMap::new();
    for (atom, power) in form.terms.keys().flatten() {
        if matches!(atom, Atom::Var(_)) && power.n < lowest.get(atom).map_or(0, |old| old.n) {
            lowest.insert(atom.clone(), *power);
        }
    }
    let raising = lowest.into_iter().map(|(atom, power)| (atom, Power { n: -power.n, d: power.d })).collect();
    form.mul(&Poly { terms: BTreeMap::from([(raising, RBig::ONE)]) }, budget)
}

/// `a / b` at `point`. A number beyond 2^128 counts as no value, because its last digits are lost.
fn quotient(a: &Expr, b: &Expr, point: &SamplePoint, budget: &mut Budget) -> Bounded<Complex> {
    let a = evaluate(a, point, budget)?;
    let b = evaluate(b, point, budget)?;
    if a.abs(LOW_BITS)?.bound().max(b.abs(LOW_BITS)?.bound()) > LOW_BITS as i64 / 2 {
        return Err(Stop::Undefined("numbers too large to tell apart"));
    }
    a.div(&b, LOW_BITS)
}

/// The sign of the quotient `a / b`, if the quotient has the same value at every sample point.
fn constant_ratio(a: &Expr, b: &Expr, budget: &mut Budget) -> Bounded<Option<Ordering>> {
    let mut names = [a.variables(), b.variables()].concat();
    names.sort_unstable();
    names.dedup();
    if names.is_empty() || a.variables() != b.variables() {
        return Ok(None);
    }
    let mut ratio: Option<Complex> = None;
    let mut n_points = 0;
    let mut n_undefined = 0;
    for (kind, k) in points(a, b) {
        let values = sample(&names, k, kind);
        let is_far = kind == SampleKind::Far;
        let domain = if is_far { Domain::Real } else { Domain::Complex };
        let point = SamplePoint { values: &values, log_base: LogBase::Ten, bits: LOW_BITS, domain };
        let quotient = match budget.attempt(|budget| quotient(a, b, &point, budget)) {
            Ok(quotient) => quotient,
            Err(Stop::Undefined(_) | Stop::OverBudget(_)) if is_far => continue,
            Err(Stop::Undefined(_)) => {
                n_undefined += 1;
                continue;
            }
            Err(stop) => return Err(stop),
        };
        if let Some(old) = &ratio {
            let gap = quotient.sub(old, LOW_BITS)?;
            let is_same = [&gap.re, &gap.im].iter().all(|part| match part.sign() {
                Some(sign) => sign == Ordering::Equal,
                None => part.error_bound() < -60,
            });
            if !is_same {
                return Ok(None);
            }
        }
        n_points += 1;
        ratio = ratio.or(Some(quotient));
    }
    // A factorial has no value at most fractions, so few points say little.
    let is_told = n_points >= 3 && n_points > n_undefined;
    let sign = ratio.filter(|ratio| is_told && ratio.is_real()).and_then(|ratio| ratio.re.sign());
    Ok(sign.filter(|sign| *sign != Ordering::Equal))
}

/// Whether the parts of two ratios are in the same proportion.
pub(crate) fn same_ratio(a: &[Expr], b: &[Expr], budget: &mut Budget) -> Bounded<bool> {
    if a.len() != b.len() {
        return Ok(false);
    }
    // Both may be times of day: 3:30 is not 1:10.
    if is_clock(a) && is_clock(b) {
        return Ok(a == b);
    }
    for (x, y) in a.iter().zip(b) {
        let left = Expr::Mul(vec![x.clone(), b[0].clone()]);
        let right = Expr::Mul(vec![y.clone(), a[0].clone()]);
        if compare(&left, &right, budget)? == Match::No {
            return Ok(false);
        }
    }
    // 0:0 is in proportion to every ratio, so ratios that begin with zero are equal to none.
    Ok(compare(&a[0], &Expr::int(0), budget)? == Match::No
        && compare(&b[0], &Expr::int(0), budget)? == Match::No)
}

/// Whether a ratio reads as an hour and two digits of minutes.
fn is_clock(ratio: &[Expr]) -> bool {
    let is_whole_in = |part: &Expr, low: u8, high: u8| match part {
        Expr::Num { value, .. } => value.is_int() && *value >= RBig::from(low) && *value <= RBig::from(high),
        _ => false,
    };
    matches!(ratio, [hour, minute] if is_whole_in(hour, 1, 24) && is_whole_in(minute, 10, 59))
}
