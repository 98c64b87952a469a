//! Unions of intervals, compared as sets of points.

use super::value::{compare, sign_of};
use crate::answer::region::{End, Interval, Region};
use crate::budget::{Bounded, Budget};
use crate::expr::Expr;
use std::cmp::Ordering;

/// Whether two regions hold the same points. Regions that name different variables differ.
pub(crate) fn same_region(a: &Region, b: &Region, budget: &mut Budget) -> Bounded<bool> {
    if let (Some(x), Some(y)) = (&a.variable, &b.variable)
        && x != y
    {
        return match turned(a) {
            Some(turned) if turned.variable == b.variable => same_region(&turned, b, budget),
            _ => Ok(false),
        };
    }
    let has_unit = |region: &Region| region.ends().any(|end| end.at.has_unit());
    if has_unit(a) != has_unit(b) {
        let all: Vec<&[Expr]> = a.ends().chain(b.ends()).flat_map(|end| end.at.units()).collect();
        // A unit on one side only is left out; two different units are not.
        let is_one = all.iter().all(|unit| *unit == all[0]);
        return Ok(is_one && same_region(&a.without_units(), &b.without_units(), budget)?);
    }
    let (left, right) = match (merged(&a.pieces, budget)?, merged(&b.pieces, budget)?) {
        (Some(left), Some(right)) => (left, right),
        _ => (a.pieces.clone(), b.pieces.clone()),
    };
    if left.len() != right.len() {
        return Ok(false);
    }
    let mut used = vec![false; right.len()];
    'pieces: for piece in &left {
        for (i, other) in right.iter().enumerate() {
            if !used[i] && same_piece(piece, other, budget)? {
                used[i] = true;
                continue 'pieces;
            }
        }
        return Ok(false);
    }
    Ok(true)
}

/// `x < y` as a statement about y: y > x.
fn turned(region: &Region) -> Option<Region> {
    let [piece] = region.pieces.as_slice() else { return None };
    let at = Expr::Var(region.variable.clone()?);
    let (variable, piece) = match (&piece.low.at, &piece.high.at) {
        (Expr::Var(name), Expr::Infinity) => {
            let low = End { at: Expr::Neg(Box::new(Expr::Infinity)), is_closed: false };
            (name, Interval { low, high: End { at, is_closed: piece.low.is_closed } })
        }
        (Expr::Neg(low), Expr::Var(name)) if **low == Expr::Infinity => {
            let high = End { at: Expr::Infinity, is_closed: false };
            (name, Interval { low: End { at, is_closed: piece.high.is_closed }, high })
        }
        _ => return None,
    };
    Some(Region { variable: Some(variable.clone()), pieces: vec![piece] })
}

fn same_piece(a: &Interval, b: &Interval, budget: &mut Budget) -> Bounded<bool> {
    Ok(same_end(&a.low, &b.low, budget)? && same_end(&a.high, &b.high, budget)?)
}

fn same_end(a: &End, b: &End, budget: &mut Budget) -> Bounded<bool> {
    let is_infinite = a.at.any(|node| *node == Expr::Infinity);
    Ok((a.is_closed == b.is_closed || is_infinite) && compare(&a.at, &b.at, budget)?.is_equal())
}

/// The pieces in order, with touching pieces joined and empty pieces left out; `None` when two ends cannot be ordered.
fn merged(pieces: &[Interval], budget: &mut Budget) -> Bounded<Option<Vec<Interval>>> {
    let mut sorted: Vec<Interval> = Vec::new();
    for piece in pieces {
        let Some(order) = order(&piece.low.at, &piece.high.at, budget)? else { return Ok(None) };
        let is_point = order == Ordering::Equal && piece.low.is_closed && piece.high.is_closed;
        if order != Ordering::Less && !is_point {
            continue;
        }
        let mut at = 0;
        while at < sorted.len() {
            let Some(found) = order_of_lows(&sorted[at].low, &piece.low, budget)? else { return Ok(None) };
            if found == Ordering::Greater {
                break;
            }
            at += 1;
        }
        sorted.insert(at, piece.clone());
    }
    let mut result: Vec<Interval> = Vec::new();
    for piece in sorted {
        if let Some(last) = result.last_mut() {
            let Some(gap) = order(&last.high.at, &piece.low.at, budget)? else { return Ok(None) };
            let touches = gap == Ordering::Greater
                || (gap == Ordering::Equal && (last.high.is_closed || piece.low.is_closed));
            if touches {
                let Some(reach) = order(&last.high.at, &piece.high.at, budget)? else { return Ok(None) };
                match reach {
                    Ordering::Less => last.high = piece.high,
                    Ordering::Equal => last.high.is_closed |= piece.high.is_closed,
                    Ordering::Greater => {}
                }
                continue;
            }
        }
        result.push(piece);
    }
    Ok(Some(result))
}

/// The order of two lower ends; at the same place a closed end comes before an open one.
fn order_of_lows(a: &End, b: &End, budget: &mut Budget) -> Bounded<Option<Ordering>> {
    Ok(order(&a.at, &b.at, budget)?.map(|found| found.then(b.is_closed.cmp(&a.is_closed))))
}

/// The order of two ends, infinite ones included; `None` if it cannot be decided.
pub(crate) fn order(a: &Expr, b: &Expr, budget: &mut Budget) -> Bounded<Option<Ordering>> {
    let rank = |expr: &Expr| match expr {
        Expr::Infinity => Some(1),
        Expr::Neg(x) if **x == Expr::Infinity => Some(-1),
        x if x.any(|node| *node == Expr::Infinity) => None,
        _ => Some(0),
    };
    match (rank(a), rank(b)) {
        (Some(0), Some(0)) => sign_of(&Expr::Add(vec![a.clone(), b.clone().negated()]), budget),
        (Some(x), Some(y)) => Ok(Some(i32::cmp(&x, &y))),
        _ => Ok(None),
    }
}
