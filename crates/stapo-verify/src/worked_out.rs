//! Whether an answer is worked out, or leaves a calculation to the grader. Equality of values does not ask: `99^2+99+1`
//! equals 9901, and so does the question that is copied into the box.

use crate::answer::Answer;
use crate::answer::quantity::Quantity;
use crate::budget::{Bounded, Budget};
use crate::exact_form::affordable_form;
use crate::expr::{Expr, Func};
use crate::poly::{Poly, Power};
use dashu_base::Abs;
use dashu_ratio::RBig;
use std::collections::BTreeSet;

/// Parts by which an answer may be longer than its reference: `\cos x/\sin x` beside `\cot x`.
const SLACK: usize = 2;

/// Whether `answer`, which equals `reference`, is worked out as far as the reference is. Beside a reference of printed
/// numbers, an answer consists of printed numbers. Beside any other reference, the answer has no function of constants
/// and no arithmetic of printed numbers, and is not longer than both the reference and its own expanded form. A
/// reference that itself leaves something to do asks for no form.
pub(crate) fn is_worked_out(answer: &Answer, reference: &Answer, budget: &mut Budget) -> Bounded<bool> {
    let (ours, theirs) = (values(answer, reference), values(reference, answer));
    budget.spend(ours.iter().chain(&theirs).map(Expr::n_nodes).sum())?;
    if theirs.is_empty() {
        return Ok(true);
    }
    if theirs.iter().all(is_number) {
        return Ok(ours.iter().all(is_number));
    }
    if is_undone(&theirs, budget)? {
        return Ok(true);
    }
    if is_undone(&ours, budget)? {
        return Ok(false);
    }
    let total = |list: &[Expr]| list.iter().map(n_parts).sum::<usize>();
    if total(&ours) <= total(&theirs) + SLACK {
        return Ok(true);
    }
    let mut n_expanded = 0;
    for value in &ours {
        n_expanded += affordable_form(value, budget)?.map_or(0, |form| n_parts_of(&form));
    }
    Ok(total(&ours) <= n_expanded)
}

/// Whether the last side of the answer is written in the base of the reference: `555_{10}` is not, beside `4210_5`.
pub(crate) fn is_in_same_base(answer: &str, reference: &str) -> bool {
    let last_side = answer.rsplit('=').next().unwrap_or(answer);
    bases(last_side) == bases(reference)
}

/// The bases other than ten that stand behind digits, each once.
fn bases(text: &str) -> BTreeSet<u32> {
    let behind =
        text.match_indices('_').filter(|(at, _)| text[..*at].ends_with(|c: char| c.is_ascii_digit()));
    let base = |(at, _): (usize, &str)| {
        let rest = text[at + 1..].trim_start_matches(['{', ' ']);
        let digits = rest.find(|c: char| !c.is_ascii_digit()).map_or(rest, |end| &rest[..end]);
        // `1_000` and `12_345` are grouped thousands.
        digits.parse().ok().filter(|base| digits.len() < 3 && *base != 10)
    };
    behind.filter_map(base).collect()
}

/// The expressions that an answer consists of, without units. Beside a value, an equation is its right side.
fn values(answer: &Answer, other: &Answer) -> Vec<Expr> {
    let mut found = Vec::new();
    collect(answer, matches!(other, Answer::Scalar(_)), &mut found);
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

/// Whether the expression is a number as it is printed: digits, a fraction in lowest terms, a power of ten and what
/// stands before it, with signs, percent and degrees.
fn is_number(expr: &Expr) -> bool {
    match expr {
        Expr::Num { .. } | Expr::Infinity => true,
        Expr::Neg(x) | Expr::Percent(x) | Expr::Degrees(x) => is_number(x),
        Expr::Pow(..) => is_power_of_ten(expr),
        Expr::Mul(factors) => match factors.as_slice() {
            [over, Expr::Inv(under)] => is_in_lowest_terms(over, under),
            [Expr::Num { .. }, power] => is_power_of_ten(power),
            _ => false,
        },
        _ => false,
    }
}

fn is_in_lowest_terms(over: &Expr, under: &Expr) -> bool {
    let (Expr::Num { value: over, .. }, Expr::Num { value: under, .. }) = (over, under) else { return false };
    // A quotient is kept in lowest terms.
    !under.is_zero() && RBig::from((over / under).denominator().clone()) == under.clone().abs()
}

fn is_whole(expr: &Expr) -> bool {
    matches!(expr, Expr::Num { value, .. } if value.is_int())
}

fn is_power_of_ten(expr: &Expr) -> bool {
    matches!(expr, Expr::Pow(base, power) if **base == Expr::int(10) && is_whole(power))
}

/// Whether the expression is a function with a value that could be written down. `\exp` is another way to write e.
fn is_constant_call(expr: &Expr) -> bool {
    match expr {
        Expr::Call(Func::Exp, _) => false,
        Expr::Call(..) | Expr::Series { .. } => expr.variables().is_empty(),
        _ => false,
    }
}

/// Whether there is a function of constants, printed numbers are added, multiplied or raised to a power, a root of a
/// number can be taken in part, or a root stands under a root.
fn is_undone(list: &[Expr], budget: &mut Budget) -> Bounded<bool> {
    let mut nodes = Vec::new();
    for value in list {
        value.walk(&mut |node| nodes.push(node));
    }
    for node in nodes {
        let is_found = match node {
            Expr::Add(terms) => n_numbers(terms) > 1,
            Expr::Mul(factors) => n_numbers(&flat(factors)) > 1,
            Expr::Pow(base, power) => is_number(base) && is_whole(power) && !is_power_of_ten(node),
            Expr::Root(x, _) => {
                matches!(**x, Expr::Root(..))
                    || (is_number(x)
                        && affordable_form(node, budget)?.is_some_and(|form| can_be_taken(&form)))
            }
            other => is_constant_call(other),
        };
        if is_found {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether the form of a root has a factor before the root, or is a number: `11\sqrt2`, 4.
fn can_be_taken(form: &Poly) -> bool {
    form.terms.iter().any(|(atoms, factor)| atoms.is_empty() || !factor.is_one())
}

/// The factors of products in a product, each by itself; the 1 over a fraction bar is none.
fn flat(factors: &[Expr]) -> Vec<Expr> {
    let inner = |factor: &Expr| match factor {
        Expr::Mul(inner) => flat(inner),
        Expr::Neg(x) => flat(std::slice::from_ref(x)),
        one if *one == Expr::int(1) => Vec::new(),
        other => vec![other.clone()],
    };
    factors.iter().flat_map(inner).collect()
}

fn n_numbers(list: &[Expr]) -> usize {
    list.iter().filter(|value| is_number(value)).count()
}

/// Numbers, names and functions of an expression; the degree of a root is none.
fn n_parts(expr: &Expr) -> usize {
    match expr {
        Expr::Call(_, args) => 1 + args.iter().map(n_parts).sum::<usize>(),
        Expr::Pow(a, b) => n_parts(a) + n_parts(b),
        Expr::Root(x, _) => n_parts(x),
        _ if expr.children().is_empty() => 1,
        _ => expr.children().iter().map(n_parts).sum(),
    }
}

/// [`n_parts`] of a sum of products, each with a factor before it.
fn n_parts_of(form: &Poly) -> usize {
    let power = |power: &Power| 1 + usize::from(*power != Power { n: 1, d: 1 });
    form.terms.keys().map(|atoms| 1 + atoms.iter().map(|(_, p)| power(p)).sum::<usize>()).sum()
}
