//! Values with percent signs, degrees and units.

use super::value::{compare, sign_of};
use crate::answer::quantity::Quantity;
use crate::budget::{Bounded, Budget};
use crate::exact_form::ratio_of;
use crate::expr::Expr;
use crate::units::{self, Unit};
use dashu_ratio::RBig;
use std::cmp::Ordering;

/// Whether two quantities are equal in value after their units are converted. A unit on one side only is ignored.
pub(crate) fn same_quantity(a: &Quantity, r: &Quantity, budget: &mut Budget) -> Bounded<bool> {
    if let Some(is_same) = same_measure(a, r, budget)? {
        return Ok(is_same);
    }
    let (a_unit, r_unit) = (unit_of(a), unit_of(r));
    // `\pi\text{ rad}` and 180° are the same angle.
    let is_radian = |unit: &Option<Unit>| unit.as_ref().is_some_and(|unit| unit.powers.is_empty());
    let is_degrees = |quantity: &Quantity| quantity.without_degrees().is_some();
    if (is_radian(&a_unit) && is_degrees(r)) || (is_degrees(a) && is_radian(&r_unit)) {
        return Ok(compare(&a.expr, &r.expr, budget)?.is_equal());
    }
    let is_percent_of_unit = (a_unit.is_some() && r_unit.is_none() && r.without_percent().is_some())
        || (r_unit.is_some() && a_unit.is_none() && a.without_percent().is_some());
    // A single noun may be after the answer's number where the reference has none; a phrase or a group may not.
    let has_phrase =
        r_unit.is_none() && a_unit.as_ref().is_some_and(|unit| unit.n_unknown > 1 || unit.is_group());
    if is_percent_of_unit || has_phrase {
        return Ok(false);
    }
    if let (Some(a_unit), Some(r_unit)) = (&a_unit, &r_unit) {
        let is_related = a_unit.is_same_kind(r_unit) || share_a_word(a_unit, r_unit);
        if !is_related {
            return Ok(false);
        }
        if a_unit.is_same_kind(r_unit) && a_unit.scale != r_unit.scale {
            let a = scaled(&bare(a), &a_unit.scale);
            return Ok(compare(&a, &scaled(&bare(r), &r_unit.scale), budget)?.is_equal());
        }
        return Ok(compare(&bare(a), &bare(r), budget)?.is_equal() || round_alike(a, r, budget)?);
    }
    same_number(a, r, budget)
}

/// Compares `5 m` as a length where the other side has a unit, or where the reference is a bare number.
fn same_measure(a: &Quantity, r: &Quantity, budget: &mut Budget) -> Bounded<Option<bool>> {
    let measured = |quantity: &Quantity| {
        let (expr, unit) = quantity.as_measure.clone()?;
        Some(Quantity { unit: Some(unit), ..Quantity::bare(*expr) })
    };
    if r.unit.is_some()
        && let Some(a) = measured(a)
    {
        return same_quantity(&a, r, budget).map(Some);
    }
    if a.unit.is_some()
        && let Some(r) = measured(r)
    {
        return same_quantity(a, &r, budget).map(Some);
    }
    // A plain K compared with a bare number may be a thousand.
    if r.expr.variables().is_empty()
        && r.as_measure.is_none()
        && let Some(a) = measured(a).filter(|a| !a.unit.as_ref().is_some_and(Unit::is_kelvin))
    {
        return same_quantity(&a, r, budget).map(Some);
    }
    Ok(None)
}

/// The unit; a degree sign counts as a unit.
fn unit_of(quantity: &Quantity) -> Option<Unit> {
    quantity.unit.clone().or_else(|| quantity.without_degrees().and_then(|_| units::lookup("degree")))
}

/// The value without degree signs.
fn bare(quantity: &Quantity) -> Expr {
    quantity.without_degrees().unwrap_or_else(|| quantity.expr.clone())
}

fn scaled(expr: &Expr, scale: &RBig) -> Expr {
    Expr::Mul(vec![expr.clone(), Expr::Num { value: scale.clone(), is_decimal: false }])
}

/// Whether both units are unknown words and the reference `b` has all words of `a`: "values" for "integer values".
fn share_a_word(a: &Unit, b: &Unit) -> bool {
    let is_unknown = |unit: &Unit| unit.powers.keys().all(|word| units::lookup(word).is_none());
    is_unknown(a) && is_unknown(b) && a.powers.iter().all(|(word, power)| b.powers.get(word) == Some(power))
}

fn same_number(a: &Quantity, r: &Quantity, budget: &mut Budget) -> Bounded<bool> {
    if compare(&bare(a), &bare(r), budget)?.is_equal() || round_alike(a, r, budget)? {
        return Ok(true);
    }
    // Where only one side is in degrees, the other side may be in radians.
    let has_degrees = a.without_degrees().is_some() != r.without_degrees().is_some();
    if has_degrees && compare(&a.expr, &r.expr, budget)?.is_equal() {
        return Ok(true);
    }
    match (a.without_percent(), r.without_percent()) {
        // The reference is 50%, the answer 50.
        (None, Some(r)) => Ok(compare(&bare(a), &r, budget)?.is_equal()),
        // The reference is 50, the answer 50%. An answer of 0.5% does not equal 0.5.
        (Some(a), None) => Ok(is_at_least_one(&r.expr, budget)? && compare(&a, &bare(r), budget)?.is_equal()),
        _ => Ok(false),
    }
}

/// Whether one side is a printed decimal and the other side rounds to it at the digits shown.
fn round_alike(a: &Quantity, r: &Quantity, budget: &mut Budget) -> Bounded<bool> {
    // `1.00000e9` is a billion and no integer near it, while a decimal reference stands for what rounds to it.
    let is_exact_integer = a.half_digit.is_some()
        && !r.expr.has_decimal()
        && ratio_of(&r.expr, budget)?.is_some_and(|value| value.is_int());
    let halves = if is_exact_integer { [&None, &r.half_digit] } else { [&a.half_digit, &r.half_digit] };
    for half in halves.into_iter().flatten() {
        let gap = Expr::Add(vec![a.expr.clone(), r.expr.clone().negated()]);
        if is_within(&gap, half, budget)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether `gap` lies between `-half` and `half`, ends included.
pub(crate) fn is_within(gap: &Expr, half: &RBig, budget: &mut Budget) -> Bounded<bool> {
    let half = Expr::Num { value: half.clone(), is_decimal: false };
    for side in [gap.clone(), gap.clone().negated()] {
        let room = Expr::Add(vec![half.clone(), side]);
        if !room.variables().is_empty() || matches!(sign_of(&room, budget)?, None | Some(Ordering::Less)) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn is_at_least_one(expr: &Expr, budget: &mut Budget) -> Bounded<bool> {
    if !expr.variables().is_empty() {
        return Ok(true);
    }
    for shifted in
        [Expr::Add(vec![expr.clone(), Expr::int(-1)]), Expr::Add(vec![expr.clone().negated(), Expr::int(-1)])]
    {
        if matches!(sign_of(&shifted, budget)?, Some(Ordering::Greater | Ordering::Equal)) {
            return Ok(true);
        }
    }
    Ok(false)
}
