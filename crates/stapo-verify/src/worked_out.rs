//! Whether an answer is worked out, or leaves a calculation to the grader. Equality of values does not ask: `99^2+99+1`
//! equals 9901, and so does the question that is copied into the box.
//!
//! The law: an answer is worked out if reducing it by the operations of its domain changes nothing but notation, or
//! leaves only operations that the reference leaves too.

mod operations;
mod question;
mod written;

pub(crate) use question::{is_as_asked, is_copied};
pub(crate) use written::is_in_same_base;

use crate::answer::Answer;
use crate::answer::quantity::Quantity;
use crate::budget::{Bounded, Budget};
use crate::equal::is_same_name;
use crate::expr::{Expr, Func};
use operations::{Left, Operation, is_number, left_in};
use written::operations_of_text;

/// An answer as it is read and as it is written.
#[derive(Clone, Copy)]
pub(crate) struct Written<'a> {
    pub(crate) answer: &'a Answer,
    pub(crate) text: &'a str,
}

/// Whether `answer`, which equals `reference`, is worked out as far as the reference is.
pub(crate) fn is_worked_out(answer: Written, reference: Written, budget: &mut Budget) -> Bounded<bool> {
    if !is_solved(answer.answer, reference.answer) || !is_in_same_unit(answer.answer, reference.answer) {
        return Ok(false);
    }
    let of_text = operations_of_text(answer, budget)?;
    if !of_text.is_empty() && !of_text.is_subset(&operations_of_text(reference, budget)?) {
        return Ok(false);
    }
    let (ours, theirs) = (values(answer.answer, reference.answer), values(reference.answer, answer.answer));
    budget.spend(ours.iter().chain(&theirs).map(Expr::n_nodes).sum())?;
    if theirs.is_empty() {
        return Ok(true);
    }
    if theirs.iter().all(is_number) && !ours.iter().any(is_vector) {
        return Ok(ours.iter().all(is_number));
    }
    let (ours, theirs) = (left_in(&ours, budget)?, left_in(&theirs, budget)?);
    Ok(is_left_too(&ours, &theirs))
}

/// Whether an answer leaves no more to do than its reference.
fn is_left_too(ours: &Left, theirs: &Left) -> bool {
    // A fraction of the same value with a denominator of a higher degree can be reduced: (x^2-1)/(x-1).
    // A reference that leaves fractions to add has no common denominator to compare with.
    let is_reduced = ours.denominator_degree <= theirs.denominator_degree
        || theirs.operations.contains(&Operation::FractionSum);
    // A sum of several functions, whose like terms no form shows, is not longer than the reference.
    let is_collected = ours.n_calls < 2 || ours.n_terms <= theirs.n_terms;
    is_reduced && is_collected && ours.operations.is_subset(&theirs.operations)
}

/// Whether the answer is solved for what the reference is solved for: `2y=4x+2` is not, compared with `y=2x+1`.
fn is_solved(answer: &Answer, reference: &Answer) -> bool {
    match (answer, reference) {
        (Answer::Equation(..), Answer::Named { .. }) => false,
        (Answer::Named { name, left: Some(_), .. }, Answer::Named { name: wanted, left: Some(_), .. }) => {
            is_same_name(name, wanted)
        }
        (Answer::List(items) | Answer::Set(items), Answer::List(wanted) | Answer::Set(wanted)) => {
            let is_equation = |item: &Answer| matches!(item, Answer::Equation(..));
            !items.iter().any(is_equation) || wanted.iter().any(is_equation)
        }
        _ => true,
    }
}

/// Whether the answer is measured as the reference is: 500 cm is not for 5 m, nor π for 180°.
fn is_in_same_unit(answer: &Answer, reference: &Answer) -> bool {
    match (answer, reference) {
        (Answer::Named { value, .. }, other) => is_in_same_unit(value, other),
        (other, Answer::Named { value, .. }) => is_in_same_unit(other, value),
        (Answer::Scalar(a), Answer::Scalar(r)) => {
            let is_same_scale = match (unit_of(a), unit_of(r)) {
                (Some(a), Some(r)) => !a.is_same_kind(r) || a.scale == r.scale,
                _ => true,
            };
            let is_turn = |value: &Quantity| value.expr.any(|node| *node == Expr::Pi);
            let is_degrees = |value: &Quantity| value.without_degrees().is_some();
            is_same_scale && !(is_degrees(a) && is_turn(r)) && !(is_turn(a) && is_degrees(r))
        }
        (
            Answer::Tuple { items, .. } | Answer::List(items) | Answer::Set(items),
            Answer::Tuple { items: wanted, .. } | Answer::List(wanted) | Answer::Set(wanted),
        ) => items.iter().zip(wanted).all(|(item, wanted)| is_in_same_unit(item, wanted)),
        _ => true,
    }
}

fn unit_of(value: &Quantity) -> Option<&crate::units::Unit> {
    value.unit.as_ref().or(value.as_measure.as_ref().map(|(_, unit)| unit))
}

/// Whether the expression is a sum of multiples of unit vectors.
fn is_vector(expr: &Expr) -> bool {
    expr.any(|node| matches!(node, Expr::Var(name) if name == AXIS))
}

/// The name of a unit vector next to coordinates.
const AXIS: &str = "unit vector";

/// The expressions that an answer consists of, without units. Compared with a value, an equation is its right side; compared with
/// coordinates, a sum is a sum of multiples of unit vectors.
fn values(answer: &Answer, other: &Answer) -> Vec<Expr> {
    let mut found = Vec::new();
    collect(answer, matches!(other, Answer::Scalar(_)), &mut found);
    let is_beside_coordinates = matches!(other, Answer::Tuple { .. } | Answer::Matrix(_));
    if let (Answer::Scalar(_), true) = (answer, is_beside_coordinates) {
        for expr in &mut found {
            *expr = expr.map(&mut |node| match &node {
                Expr::I => Expr::Mul(vec![Expr::Var(AXIS.into()), Expr::Var("i".into())]),
                Expr::Var(name) => Expr::Mul(vec![Expr::Var(AXIS.into()), Expr::Var(name.clone())]),
                _ => node,
            });
        }
    }
    found
}

fn collect(answer: &Answer, is_beside_value: bool, found: &mut Vec<Expr>) {
    let mut add = |expr: &Expr| found.push(expr.without_units());
    match answer {
        Answer::Scalar(value) => add(measure(value)),
        Answer::Tuple { items, .. } | Answer::List(items) | Answer::Set(items) => {
            for item in items {
                collect(item, is_beside_value, found);
            }
        }
        Answer::Region(region) => region.ends().for_each(|end| add(&end.at)),
        Answer::Matrix(rows) => rows.iter().flatten().for_each(add),
        Answer::Cases(cases) => {
            for (value, condition) in cases {
                collect(value, is_beside_value, found);
                collect(condition, is_beside_value, found);
            }
        }
        Answer::Named { value, .. } => collect(value, is_beside_value, found),
        Answer::Equation(left, right) => {
            if !is_beside_value {
                add(left);
            }
            add(measure(right));
        }
        Answer::Inequality(left, _, right) => [left, right].into_iter().for_each(add),
        // Two parts of a ratio are also their quotient.
        Answer::Ratio(parts) => match parts.as_slice() {
            [over, under] => {
                add(&Expr::Mul(vec![over.clone(), Expr::Inv(Box::new(under.clone()))]));
            }
            parts => parts.iter().for_each(add),
        },
        Answer::Choice { rest, .. } => rest.iter().for_each(|rest| collect(rest, is_beside_value, found)),
        Answer::Run(_) | Answer::Empty | Answer::Text { .. } => {}
    }
}

/// The number before the letter where that letter may be a unit: five for `5 m`.
fn measure(value: &Quantity) -> &Expr {
    value.as_measure.as_ref().map_or(&value.expr, |(number, _)| number)
}

/// Whether the function is a logarithm.
fn is_logarithm(func: Func) -> bool {
    matches!(func, Func::Ln | Func::Log | Func::LogBase)
}
