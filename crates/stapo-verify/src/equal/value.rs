//! Whether two expressions have the same value: exactly, up to rounding, or at every sample point.

use super::sample::{SampleKind, points, sample};
use crate::approx::{Domain, HIDDEN_WHOLE, LogBase, SamplePoint, evaluate};
use crate::budget::{Bounded, Budget, Stop};
use crate::exact_form::affordable_form;
use crate::expr::{Expr, Func};
use crate::number::complex::Complex;
use crate::number::real::Real;
use crate::number::{HIGH_BITS, LOW_BITS};
use crate::poly::Poly;
use dashu_base::Abs;
use dashu_ratio::RBig;
use std::cmp::Ordering;

/// How two expressions compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Match {
    Exact,
    /// A printed decimal agrees to six decimals.
    Rounded,
    /// Equal to at least thirty digits wherever evaluated.
    Numeric,
    No,
}

impl Match {
    pub(crate) fn is_equal(self) -> bool {
        self != Self::No
    }
}

/// Fewest points at which both sides must have a value before agreement counts.
const MIN_POINTS: usize = 3;
/// Whole points compared before stopping.
const ENOUGH_POINTS: usize = 6;
/// Bits two values must share to count as equal.
const AGREEING_BITS: i64 = 100;

/// Values below about `2^TINY` that agree are evaluated with more bits before they count as equal.
const TINY: i64 = -240;
/// The gap of two equal values is known to be below `2^MAX_GAP`, however large the values are.
const MAX_GAP: i64 = -40;

/// Compares two expressions: exact forms first, then values at sample points.
pub(crate) fn compare(a: &Expr, b: &Expr, budget: &mut Budget) -> Bounded<Match> {
    if a == b {
        return Ok(Match::Exact);
    }
    if is_infinite(a) || is_infinite(b) {
        return Ok(if infinite_sign(a).is_some() && infinite_sign(a) == infinite_sign(b) {
            Match::Exact
        } else {
            Match::No
        });
    }
    let has_decimal = a.has_decimal() || b.has_decimal();
    if let (Some(fa), Some(fb)) = (affordable_form(a, budget)?, affordable_form(b, budget)?) {
        if fa == fb {
            return Ok(Match::Exact);
        }
        if !has_decimal {
            return Ok(Match::No);
        }
        if let Some(is_near) = near_forms(&fa, &fb) {
            return Ok(if is_near { Match::Rounded } else { Match::No });
        }
    }
    let has_open_log = a.any(is_open_log) || b.any(is_open_log);
    let bases: &[LogBase] = if has_open_log { &[LogBase::Ten, LogBase::E] } else { &[LogBase::Ten] };
    for base in bases {
        let found = at_points(a, b, *base, has_decimal, budget)?;
        if found.is_equal() {
            return Ok(found);
        }
    }
    Ok(Match::No)
}

fn is_open_log(node: &Expr) -> bool {
    matches!(node, Expr::Call(Func::Log, _))
}

fn is_infinite(expr: &Expr) -> bool {
    expr.any(|node| *node == Expr::Infinity)
}

fn infinite_sign(expr: &Expr) -> Option<bool> {
    match expr {
        Expr::Infinity => Some(true),
        Expr::Neg(x) => infinite_sign(x).map(|sign| !sign),
        _ => None,
    }
}

/// Whether two exact forms agree term by term up to rounding; `None` when their shapes differ.
fn near_forms(a: &Poly, b: &Poly) -> Option<bool> {
    if let (Some(a), Some(b)) = (a.as_ratio(), b.as_ratio()) {
        return Some(agree_to_six_decimals(&a, &b));
    }
    if a.terms.keys().ne(b.terms.keys()) {
        return None;
    }
    Some(a.terms.values().zip(b.terms.values()).all(|(a, b)| agree_to_six_decimals(a, b)))
}

/// Whether two numbers agree to six decimals, or to six significant digits below one thousandth.
pub(crate) fn agree_to_six_decimals(a: &RBig, b: &RBig) -> bool {
    let gap = (a - b).abs();
    let size = a.clone().abs().max(b.clone().abs());
    let million = RBig::from(1_000_000);
    let scale = if size < RBig::ONE / RBig::from(1000) { size } else { RBig::ONE };
    gap * million < scale
}

/// The sign of a constant real expression, if the sign can be decided.
pub(crate) fn sign_of(expr: &Expr, budget: &mut Budget) -> Bounded<Option<Ordering>> {
    if let Some(ratio) = affordable_form(expr, budget)?.and_then(|form| form.as_ratio()) {
        return Ok(Some(ratio.cmp(&RBig::ZERO)));
    }
    let point = SamplePoint { values: &[], log_base: LogBase::Ten, bits: LOW_BITS, domain: Domain::Complex };
    match evaluate(expr, &point, budget) {
        Ok(value) if value.is_real() => Ok(value.re.sign().or_else(|| {
            // A value known to be below 2^-AGREEING_BITS counts as zero.
            (value.re.error_bound() < -AGREEING_BITS).then_some(Ordering::Equal)
        })),
        Ok(_) | Err(Stop::Undefined(_)) => Ok(None),
        Err(stop) => Err(stop),
    }
}

fn at_points(
    a: &Expr,
    b: &Expr,
    log_base: LogBase,
    has_decimal: bool,
    budget: &mut Budget,
) -> Bounded<Match> {
    let mut names = [a.variables(), b.variables()].concat();
    names.sort_unstable();
    names.dedup();
    if names.is_empty() {
        let point = SamplePoint { values: &[], log_base, bits: LOW_BITS, domain: Domain::Complex };
        return at_point(a, b, &point, has_decimal, budget)?
            .ok_or(Stop::Undefined("an expression without a value"));
    }
    let mut n_agreeing = 0;
    let mut n_one_sided = 0;
    let mut n_hidden = 0;
    let mut is_rounded = false;
    for (kind, k) in points(a, b) {
        let values = sample(&names, k, kind);
        let point = SamplePoint { values: &values, log_base, bits: LOW_BITS, domain: kind.domain() };
        let found = if kind == SampleKind::Far {
            // Far away a power or an exponential may be too large to evaluate.
            match budget.attempt(|budget| at_point(a, b, &point, has_decimal, budget)) {
                Err(Stop::OverBudget(_)) => None,
                found => found?,
            }
        } else {
            match at_point(a, b, &point, has_decimal, budget) {
                Err(HIDDEN_WHOLE) => {
                    n_hidden += 1;
                    continue;
                }
                found => found?,
            }
        };
        match found {
            Some(Match::No) => return Ok(Match::No),
            Some(found) => {
                is_rounded |= found == Match::Rounded;
                n_agreeing += 1;
            }
            None if matches!(kind, SampleKind::Whole | SampleKind::Counted) => {
                n_one_sided +=
                    usize::from(evaluate(a, &point, budget).is_ok() != evaluate(b, &point, budget).is_ok());
            }
            None => {}
        }
        if kind == SampleKind::Whole && n_agreeing >= ENOUGH_POINTS {
            break;
        }
    }
    if n_hidden > n_agreeing {
        return Err(HIDDEN_WHOLE);
    }
    // A factorial has no value at most fractions: where one side alone has one, the sides differ.
    if n_agreeing < MIN_POINTS || n_one_sided > n_agreeing {
        return Err(Stop::Undefined("an expression without a value at most points"));
    }
    Ok(if is_rounded { Match::Rounded } else { Match::Numeric })
}

/// Compares at `point`, first with its precision and then with [`HIGH_BITS`]; `None` when a side has no value there.
fn at_point(
    a: &Expr,
    b: &Expr,
    point: &SamplePoint,
    has_decimal: bool,
    budget: &mut Budget,
) -> Bounded<Option<Match>> {
    for bits in [point.bits, HIGH_BITS] {
        let point = SamplePoint { bits, ..*point };
        let (x, y) = match (evaluate(a, &point, budget), evaluate(b, &point, budget)) {
            (Ok(x), Ok(y)) => (x, y),
            (Err(HIDDEN_WHOLE), _) | (_, Err(HIDDEN_WHOLE)) if bits < HIGH_BITS => continue,
            (Err(Stop::Undefined(_)), _) | (_, Err(Stop::Undefined(_))) => return Ok(None),
            (Err(stop), _) | (_, Err(stop)) => return Err(stop),
        };
        let gap = x.sub(&y, bits)?;
        let size = x.abs(bits)?.bound().max(y.abs(bits)?.bound());
        let parts = [is_zero(&gap.re, size), is_zero(&gap.im, size)];
        if parts.contains(&Some(false)) {
            let is_near = has_decimal && near(&x, &y, bits)?;
            return Ok(Some(if is_near { Match::Rounded } else { Match::No }));
        }
        // Next to zero many functions agree to hundreds of bits: sin x and x differ by x^3/6.
        let is_clear = match bits {
            HIGH_BITS => size > 2 * TINY,
            _ => size > TINY / 4,
        };
        let is_zero_gap = [&gap.re, &gap.im].iter().all(|part| part.is_exact_zero());
        if parts == [Some(true), Some(true)] && (is_clear || is_zero_gap) {
            return Ok(Some(Match::Numeric));
        }
    }
    Err(Stop::OverBudget("two values too close to tell apart"))
}

/// Whether a difference of values below `2^size` is zero: `Some(false)` if certainly not, `Some(true)` if zero to
/// [`AGREEING_BITS`], `None` if the error is too large to tell.
fn is_zero(gap: &Real, size: i64) -> Option<bool> {
    match gap.sign() {
        Some(Ordering::Equal) => Some(true),
        Some(_) => Some(false),
        None => {
            let error = gap.error_bound();
            let is_small = error < size.max(0) - AGREEING_BITS && error < size.max(-1000) - 40;
            // 2^1000 and 2^1000 + 1 share a thousand bits and differ.
            (is_small && error < MAX_GAP).then_some(true)
        }
    }
}

fn near(x: &Complex, y: &Complex, bits: usize) -> Bounded<bool> {
    let million = Real::from_ratio(&RBig::from(1_000_000), bits)?;
    let thousandth = Real::from_ratio(&(RBig::ONE / RBig::from(1000)), bits)?;
    for (a, b) in [(&x.re, &y.re), (&x.im, &y.im)] {
        let gap = a.sub(b, bits)?.abs().mul(&million, bits)?;
        let larger =
            if a.abs().sub(&b.abs(), bits)?.sign() == Some(Ordering::Greater) { a.abs() } else { b.abs() };
        let is_small = larger.sub(&thousandth, bits)?.sign() == Some(Ordering::Less);
        let scale = if is_small { larger } else { Real::from_ratio(&RBig::ONE, bits)? };
        let is_same = gap.is_exact_zero() || gap.sub(&scale, bits)?.sign() == Some(Ordering::Less);
        if !is_same {
            return Ok(false);
        }
    }
    Ok(true)
}
