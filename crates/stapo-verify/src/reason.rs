//! One line that says why an answer is right or wrong.

use crate::answer::Answer;
use crate::answer::quantity::Quantity;
use crate::approx::{Domain, LogBase, SamplePoint, evaluate};
use crate::budget::Budget;
use crate::equal::value::{Match, compare};
use crate::exact_form::ratio_of;
use crate::expr::Expr;
use crate::number::LOW_BITS;
use crate::number::complex::Complex;
use crate::show;

pub(crate) fn right(a: &Answer, r: &Answer, shown: &str, wanted: &str, budget: &mut Budget) -> String {
    if let (Answer::Scalar(a), Answer::Scalar(r)) = (a, r) {
        return match compare(&a.expr, &r.expr, budget) {
            Ok(Match::Exact) if shown == wanted => format!("both are exactly {shown}"),
            Ok(Match::Rounded) => {
                format!("{} agrees with {} to 6 decimals", decimal(a, shown), decimal(r, wanted))
            }
            Ok(Match::Numeric) => format!("{shown} and {wanted} agree to 30 digits wherever evaluated"),
            _ => format!("{shown} equals {wanted}"),
        };
    }
    if shown == wanted { format!("both are {shown}") } else { format!("{shown} equals {wanted}") }
}

pub(crate) fn wrong(a: &Answer, r: &Answer, shown: &str, wanted: &str, budget: &mut Budget) -> String {
    match (a, r) {
        (Answer::Scalar(a), Answer::Scalar(r)) => wrong_value(a, r, shown, wanted, budget),
        (Answer::Text { .. }, _) => format!("the text \"{shown}\" is not {wanted}"),
        _ if kind(a) != kind(r) => {
            format!("{shown} is {}, but the reference {wanted} is {}", kind(a), kind(r))
        }
        _ => format!("{shown} is not {wanted}"),
    }
}

fn wrong_value(a: &Quantity, r: &Quantity, shown: &str, wanted: &str, budget: &mut Budget) -> String {
    if let (Some(a), Some(r)) = (&a.unit, &r.unit)
        && !a.is_same_kind(r)
    {
        return format!("{shown} is not {wanted}: the units differ");
    }
    for (this, other) in [(a, r), (r, a)] {
        if this.expr.has_decimal()
            && !other.expr.has_decimal()
            && let Ok(Some(value)) = ratio_of(&this.expr, budget)
        {
            let printed = decimal(this, shown);
            let (left, right) = if std::ptr::eq(this, a) {
                (printed.clone(), wanted.to_owned())
            } else {
                (shown.to_owned(), printed.clone())
            };
            return format!("{left} and {right} differ: {printed} is exactly {}", show::ratio(&value));
        }
    }
    match (approximate(&a.expr, budget), approximate(&r.expr, budget)) {
        (Some(x), Some(y)) if x != y && (x != shown || y != wanted) => {
            format!("{shown} is not {wanted}: about {x} against {y}")
        }
        _ => format!("{shown} is not {wanted}"),
    }
}

/// A value that was printed as a decimal in decimals, any other value as shown.
fn decimal(quantity: &Quantity, shown: &str) -> String {
    if !quantity.expr.has_decimal() {
        return shown.to_owned();
    }
    approximate(&quantity.expr, &mut Budget::for_showing()).unwrap_or_else(|| shown.to_owned())
}

/// Twelve significant digits of a real constant.
fn approximate(expr: &Expr, budget: &mut Budget) -> Option<String> {
    let point = SamplePoint { values: &[], log_base: LogBase::Ten, bits: LOW_BITS, domain: Domain::Complex };
    let value = evaluate(expr, &point, budget).ok().filter(Complex::is_real)?;
    value.re.to_decimal(12)
}

fn kind(answer: &Answer) -> &'static str {
    match answer {
        Answer::Scalar(value) if value.expr.variables().is_empty() => "a number",
        Answer::Scalar(_) => "an expression",
        Answer::Tuple { .. } => "a tuple",
        Answer::List(_) => "a list",
        Answer::Set(_) => "a set",
        Answer::Region(_) => "an interval or a union of intervals",
        Answer::Matrix(_) => "a matrix",
        Answer::Cases(_) => "a value by cases",
        Answer::Named { .. } | Answer::Equation(..) => "an equation",
        Answer::Inequality(..) => "an inequality",
        Answer::Ratio(_) => "a ratio",
        Answer::Choice { .. } => "a choice",
        Answer::Empty => "the empty set",
        Answer::Text { .. } | Answer::Run(_) => "a text",
    }
}
