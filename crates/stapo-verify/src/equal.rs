//! Whether an answer equals the reference.

pub(crate) mod equation;
mod form;
pub(crate) mod quantity;
pub(crate) mod region;
mod sample;
pub(crate) mod value;

use crate::answer::quantity::Quantity;
use crate::answer::region::Region;
use crate::answer::{Answer, as_region, real_region};
use crate::budget::{Bounded, Budget, Stop};
use crate::expr::{Expr, Func};
use crate::lex::token::Bracket;
use equation::{same_equation, same_inequality, same_ratio};
use form::{
    by_part, coordinates, count_of, numbered, of_any_integer, rows_of, sorted_numbers, union_of,
    with_curve_parameter, with_one_constant, with_renamed_argument, with_shared_parameter, without_constant,
    without_note,
};
use quantity::same_quantity;
use region::same_region;
use std::cmp::Ordering;

/// Whether `answer` equals `reference`. Not symmetric: the reference decides what a pair, a unit or a letter means.
pub(crate) fn same(answer: &Answer, reference: &Answer, budget: &mut Budget) -> Bounded<bool> {
    budget.spend(10)?;
    if answer == reference {
        return Ok(true);
    }
    match (answer, reference) {
        (Answer::Choice { .. }, _) | (_, Answer::Choice { .. }) => same_choice(answer, reference, budget),
        (Answer::Named { .. }, _) | (_, Answer::Named { .. }) => same_named(answer, reference, budget),
        (Answer::Scalar(a), Answer::Scalar(r)) => {
            if let Some(expr) = with_one_constant(&a.expr, &r.expr) {
                let a = Quantity { expr, ..a.clone() };
                return Ok(same_quantity(&a, r, budget)? || same_antiderivative(&a.expr, &r.expr, budget)?);
            }
            Ok(same_quantity(a, r, budget)? || same_antiderivative(&a.expr, &r.expr, budget)?)
        }
        (Answer::Scalar(a), Answer::Tuple { items, .. }) => match coordinates(a, items.len(), budget)? {
            Some(vector) => same_in_order(&vector, items, budget),
            None => Ok(false),
        },
        (Answer::Tuple { items, .. }, Answer::Scalar(r)) => match coordinates(r, items.len(), budget)? {
            Some(vector) => same_in_order(items, &vector, budget),
            None => Ok(false),
        },
        (Answer::Empty, Answer::Set(items)) | (Answer::Set(items), Answer::Empty) => Ok(items.is_empty()),
        (Answer::Region(a), Answer::Region(r)) => same_region(a, r, budget),
        (Answer::Inequality(left, rel, right), Answer::Region(region))
        | (Answer::Region(region), Answer::Inequality(left, rel, right))
            if let Some((name, bounded, bound)) = region.as_inequality() =>
        {
            same_inequality((left, *rel, right), (&name, bounded, bound), budget)
        }
        (Answer::Region(a), r) => against_region(r, a, budget),
        (a, Answer::Region(r)) => match real_region(a, budget)? {
            Some(a) => same_region(&a, r, budget),
            None => against_region(a, r, budget),
        },
        (
            Answer::Tuple { items: a, open, close },
            Answer::Tuple { items: r, open: r_open, close: r_close },
        ) => {
            if !same_brackets((*open, *close), (*r_open, *r_close), a.len()) {
                return Ok(false);
            }
            let renamed = with_curve_parameter(a, r);
            same_in_order(renamed.as_deref().unwrap_or(a), r, budget)
        }
        (Answer::Tuple { items: a, open, close }, Answer::List(r))
        | (Answer::List(r), Answer::Tuple { items: a, open, close }) => {
            // `1,2` is the point (1,2) and not the interval [1,2].
            let round = (Bracket::Round, Bracket::Round);
            if !same_brackets((*open, *close), round, a.len()) {
                return Ok(false);
            }
            let (tuple, list) = (by_name(a), by_name(r));
            if matches!(answer, Answer::List(_)) {
                same_in_order(&list, &tuple, budget)
            } else {
                same_in_order(&tuple, &list, budget)
            }
        }
        (Answer::List(a), Answer::List(r)) => same_list(a, r, budget),
        (Answer::Set(a) | Answer::List(a), Answer::Set(r) | Answer::List(r)) => same_set(a, r, budget),
        (Answer::Set(a), Answer::Scalar(_)) => same_set(a, std::slice::from_ref(reference), budget),
        (Answer::List(a), single) if let Some(value) = of_any_integer(a) => {
            same_family(value, single, budget)
        }
        (single, Answer::List(r)) if let Some(value) = of_any_integer(r) => {
            same_family(single, value, budget)
        }
        (Answer::List(a), single) if let Some(value) = without_note(a) => same(value, single, budget),
        (single, Answer::List(r)) if let Some(value) = without_note(r) => same(single, value, budget),
        (Answer::Set(a) | Answer::List(a), single) if a.len() == 1 => same(&a[0], single, budget),
        (single, Answer::Set(r) | Answer::List(r)) if r.len() == 1 => same(single, &r[0], budget),
        _ => same_formula(answer, reference, budget),
    }
}

/// Whether two answers that are no collections of answers are equal: matrices, equations, ratios, words.
fn same_formula(answer: &Answer, reference: &Answer, budget: &mut Budget) -> Bounded<bool> {
    match (answer, reference) {
        (Answer::Matrix(a), Answer::Matrix(r)) => same_matrix(a, r, budget),
        (Answer::Cases(a), Answer::Cases(r)) => same_cases(a, r, budget),
        (Answer::Matrix(rows), single @ Answer::Scalar(_)) if is_number(rows) => {
            same(&Answer::Scalar(Quantity::bare(rows[0][0].clone())), single, budget)
        }
        (single @ Answer::Scalar(_), Answer::Matrix(rows)) if is_number(rows) => {
            same(single, &Answer::Scalar(Quantity::bare(rows[0][0].clone())), budget)
        }
        (Answer::Scalar(a), Answer::Matrix(rows)) if let Some(items) = vector(rows) => {
            match coordinates(a, items.len(), budget)? {
                Some(vector) => same_in_order(&vector, &items, budget),
                None => Ok(false),
            }
        }
        (Answer::Matrix(rows), Answer::Tuple { items, .. })
        | (Answer::Tuple { items, .. }, Answer::Matrix(rows))
            if let Some(listed) = rows_of(items) =>
        {
            same_matrix(&listed, rows, budget)
        }
        (Answer::Matrix(rows), Answer::Tuple { items, .. } | Answer::List(items))
        | (Answer::Tuple { items, .. } | Answer::List(items), Answer::Matrix(rows)) => {
            vector(rows).map_or(Ok(false), |vector| same_in_order(&vector, items, budget))
        }
        (Answer::Equation(al, ar), Answer::Equation(rl, rr)) => same_sides((al, ar), (rl, rr), budget),
        (Answer::Equation(left, right), Answer::Scalar(r)) => {
            Ok(claims_value(left, right) && same_quantity(right, r, budget)?)
        }
        (Answer::Scalar(a), Answer::Equation(left, right)) => {
            Ok(claims_value(left, right) && same_quantity(a, right, budget)?)
        }
        (Answer::Run(run), Answer::Scalar(r)) => same_quantity(&letter_product(run), r, budget),
        (Answer::Scalar(a), Answer::Run(run)) => same_quantity(a, &letter_product(run), budget),
        (Answer::Run(run), Answer::Text { words, .. }) | (Answer::Text { words, .. }, Answer::Run(run)) => {
            Ok(run == words)
        }
        (Answer::Inequality(al, a, ar), Answer::Inequality(rl, r, rr)) => {
            same_inequality((al, *a, ar), (rl, *r, rr), budget)
        }
        (Answer::Ratio(a), Answer::Ratio(r)) => same_ratio(a, r, budget),
        (Answer::Ratio(a), Answer::Scalar(r)) if a.len() == 2 => same_quantity(&quotient(a), r, budget),
        (Answer::Scalar(a), Answer::Ratio(r)) if r.len() == 2 => same_quantity(a, &quotient(r), budget),
        (Answer::Text { words: a, .. }, Answer::Text { words: r, .. }) => Ok(a == r),
        _ => Ok(false),
    }
}

/// Two choices are equal when their letters agree and, where both have one, the values after the letters; a choice equals a value when the value after the letter does.
fn same_choice(answer: &Answer, reference: &Answer, budget: &mut Budget) -> Bounded<bool> {
    match (answer, reference) {
        (Answer::Choice { letter: a, rest: a_rest }, Answer::Choice { letter: r, rest: r_rest }) => {
            match (a_rest, r_rest) {
                (Some(a_rest), Some(r_rest)) if a == r => same(a_rest, r_rest, budget),
                _ => Ok(a == r),
            }
        }
        (Answer::Choice { letter, rest: None }, other) => same(&letter_value(*letter), other, budget),
        (other, Answer::Choice { letter, rest: None }) => same(other, &letter_value(*letter), budget),
        (Answer::Choice { rest: Some(rest), .. }, other) => same(rest, other, budget),
        (other, Answer::Choice { rest: Some(rest), .. }) => same(other, rest, budget),
        _ => Ok(false),
    }
}

fn letter_value(letter: char) -> Answer {
    Answer::Scalar(Quantity::bare(Expr::Var(letter.to_string())))
}

/// `x = 5` equals 5. Two named values are equal when names and values agree, or when they are the same equation.
fn same_named(answer: &Answer, reference: &Answer, budget: &mut Budget) -> Bounded<bool> {
    match (answer, reference) {
        (Answer::Named { name: a, left: al, value: av }, Answer::Named { name: r, left: rl, value: rv }) => {
            if is_same_name(a, r) && (same(av, rv, budget)? || same_family(av, rv, budget)?) {
                return Ok(true);
            }
            if let Some(renamed) = with_renamed_argument(answer, r) {
                return same(&renamed, reference, budget);
            }
            match (al, rl, &**av, &**rv) {
                (Some(al), Some(rl), Answer::Scalar(av), Answer::Scalar(rv)) => {
                    same_sides((al, av), (rl, rv), budget)
                }
                _ => Ok(false),
            }
        }
        (Answer::Named { left: Some(left), value, .. }, Answer::Equation(rl, rr)) => match &**value {
            Answer::Scalar(value) => same_sides((left, value), (rl, rr), budget),
            _ => Ok(false),
        },
        (Answer::Equation(al, ar), Answer::Named { left: Some(left), value, .. }) => match &**value {
            Answer::Scalar(value) => same_sides((al, ar), (left, value), budget),
            _ => Ok(false),
        },
        (Answer::Named { .. }, Answer::List(items)) if let Some(value) = of_any_integer(items) => {
            same_family(answer, value, budget)
        }
        (Answer::List(items), Answer::Named { .. }) if let Some(value) = of_any_integer(items) => {
            same_family(value, reference, budget)
        }
        (Answer::Named { name, value, .. }, Answer::List(items))
            if let Some(parts) = by_part(name, value) =>
        {
            same_list(&parts, items, budget)
        }
        (Answer::List(items), Answer::Named { name, value, .. })
            if let Some(parts) = by_part(name, value) =>
        {
            same_list(items, &parts, budget)
        }
        (Answer::Named { name, value, .. }, Answer::List(items))
            if let Some(values) = numbered(name, items) =>
        {
            same(value, &Answer::List(values), budget)
        }
        (Answer::List(items), Answer::Named { name, value, .. })
            if let Some(values) = numbered(name, items) =>
        {
            same(&Answer::List(values), value, budget)
        }
        (Answer::Named { name, .. }, Answer::List(items))
        | (Answer::List(items), Answer::Named { name, .. })
            if items.iter().any(
                |item| matches!(item, Answer::Named { name: other, .. } if !is_same_name(name, other)),
            ) =>
        {
            Ok(false)
        }
        (Answer::Named { name, value, .. }, Answer::Scalar(r)) if let Some(count) = count_of(name, value) => {
            same_quantity(&count, r, budget)
        }
        (Answer::Scalar(a), Answer::Named { name, value, .. }) if let Some(count) = count_of(name, value) => {
            same_quantity(a, &count, budget)
        }
        (Answer::Named { value, .. }, other) => same(value, other, budget),
        (other, Answer::Named { value, .. }) => same(other, value, budget),
        _ => Ok(false),
    }
}

/// Whether two antiderivatives with a free constant C differ by a constant: `\\sin^2x+C` and `-\\cos^2x+C`. A difference
/// that is the same at x and at 2x+1, wherever it is evaluated, is a constant. Rounded numbers are not antiderivatives: `\\lfloor
/// x\\rfloor` and `\\lceil x\\rceil` differ by one nearly everywhere.
fn same_antiderivative(a: &Expr, r: &Expr, budget: &mut Budget) -> Bounded<bool> {
    let (Some(a), Some(r)) = (without_constant(a), without_constant(r)) else { return Ok(false) };
    let difference = Expr::Add(vec![a, r.negated()]);
    let has_steps = |func: &Func| func.is_discrete() || matches!(func, Func::Floor | Func::Ceil);
    if difference.any(|node| matches!(node, Expr::Call(func, _) if has_steps(func))) {
        return Ok(false);
    }
    let [name] = difference.variables()[..] else { return Ok(false) };
    let name = name.to_owned();
    let moved = difference.map(&mut |node| match &node {
        Expr::Var(other) if *other == name => {
            Expr::Add(vec![Expr::Mul(vec![Expr::int(2), node.clone()]), Expr::int(1)])
        }
        _ => node,
    });
    Ok(value::compare(&difference, &moved, budget)?.is_equal())
}

/// Whether two families of angles are equal whatever their integer parameter is called: `\pi/4 + k\pi`.
fn same_family(a: &Answer, r: &Answer, budget: &mut Budget) -> Bounded<bool> {
    let (a, r) = match (a, r) {
        (Answer::Named { name: a, value: av, .. }, Answer::Named { name: r, value: rv, .. })
            if is_same_name(a, r) =>
        {
            (&**av, &**rv)
        }
        (Answer::Named { value, .. }, r @ Answer::Scalar(_)) => (&**value, r),
        (a @ Answer::Scalar(_), Answer::Named { value, .. }) => (a, &**value),
        pair => pair,
    };
    let (Answer::Scalar(a), Answer::Scalar(r)) = (a, r) else { return Ok(false) };
    match with_shared_parameter(&a.expr, &r.expr, budget)? {
        Some((a, r)) => Ok(value::compare(&a, &r, budget)?.is_equal()),
        None => Ok(false),
    }
}

/// `y` and `f(x)` are two ways to name a function.
pub(crate) fn is_same_name(a: &str, b: &str) -> bool {
    let is_function = |name: &str| {
        matches!(name, "y" | "f(x)" | "g(x)" | "h(x)" | "y(x)" | "f^-1(x)" | "g^-1(x)" | "h^-1(x)")
    };
    a == b || (is_function(a) && is_function(b) && (a == "y" || b == "y"))
}

/// [`same_equation`] for sides with units: both right sides have the same unit or none.
fn same_sides(a: (&Expr, &Quantity), r: (&Expr, &Quantity), budget: &mut Budget) -> Bounded<bool> {
    let has_same_unit = match (&a.1.unit, &r.1.unit) {
        (None, None) => true,
        (Some(a), Some(r)) => a.is_same_kind(r) && a.scale == r.scale,
        _ => false,
    };
    Ok(has_same_unit && same_equation((a.0, &a.1.expr), (r.0, &r.1.expr), budget)?)
}

/// Whether `m + n = 34` claims the value 34 for its left side: the left side combines names without numbers, and is not
/// an unknown that has yet to be freed of a sign, a root or a power.
fn claims_value(left: &Expr, right: &Quantity) -> bool {
    let has_coefficient = match left {
        Expr::Add(terms) => {
            terms.iter().any(starts_with_number) || terms.iter().all(|term| matches!(term, Expr::Neg(_)))
        }
        Expr::Neg(_) | Expr::Inv(_) | Expr::Root(..) | Expr::Pow(..) => true,
        // |z| = 5 leaves z unknown, |AB| = 5 is the length of a segment.
        Expr::Call(Func::Abs, args) => is_unknown(&args[0]),
        Expr::Call(func, _) => !func.takes_angle(),
        other => starts_with_number(other),
    };
    !has_coefficient && !is_curve(left) && right.expr != Expr::int(0) && right.expr.variables().is_empty()
}

/// Whether an equation with this left side describes points or a function and claims no value: `x^2+y^2`, `f(f(x))`.
fn is_curve(left: &Expr) -> bool {
    let has_unknown = left.variables().iter().any(|name| matches!(*name, "x" | "y" | "z"));
    let has_power =
        left.any(|node| matches!(node, Expr::Pow(..) | Expr::Root(..) | Expr::Call(Func::Abs, _)));
    let is_called = |name: &&str| name.ends_with(')') && !name.contains(|c: char| c.is_ascii_digit());
    let is_composed =
        matches!(left, Expr::Mul(factors) if factors.len() > 1) && left.variables().iter().any(is_called);
    (matches!(left, Expr::Add(_)) && has_unknown && has_power) || is_composed
}

/// Whether the expression is one variable and no vector.
fn is_unknown(expr: &Expr) -> bool {
    matches!(expr, Expr::Var(name) if !name.contains(' '))
}

/// The product that a run of letters may represent next to a formula: `abc`.
fn letter_product(run: &str) -> Quantity {
    Quantity::bare(Expr::Mul(run.chars().map(|letter| Expr::Var(letter.to_string())).collect()))
}

fn starts_with_number(expr: &Expr) -> bool {
    match expr {
        Expr::Num { .. } | Expr::Percent(_) => true,
        Expr::Mul(factors) => factors.iter().any(starts_with_number),
        Expr::Neg(x) | Expr::Inv(x) => starts_with_number(x),
        Expr::Pow(base, _) => !matches!(**base, Expr::Var(_)),
        _ => false,
    }
}

fn against_region(other: &Answer, region: &Region, budget: &mut Budget) -> Bounded<bool> {
    match as_region(other) {
        Some(other) => same_region(&other, region, budget),
        None => match (other, region.pieces.as_slice()) {
            (Answer::List(items), _) => {
                match as_region(&Answer::Set(items.clone())).or_else(|| union_of(items)) {
                    Some(points) => same_region(&points, region, budget),
                    None => Ok(false),
                }
            }
            _ => Ok(false),
        },
    }
}

/// Brackets matter for two elements, which may be the ends of an interval; more elements are a vector in any brackets.
fn same_brackets(a: (Bracket, Bracket), b: (Bracket, Bracket), n_items: usize) -> bool {
    let vector = |bracket| if bracket == Bracket::Angle { Bracket::Round } else { bracket };
    n_items != 2 || (vector(a.0) == vector(b.0) && vector(a.1) == vector(b.1))
}

/// Coordinates that are all named, in the order of their names: `y = 2, x = 1` is (1, 2).
fn by_name(items: &[Answer]) -> Vec<Answer> {
    let mut sorted = items.to_vec();
    if items.iter().all(|item| matches!(item, Answer::Named { .. })) {
        sorted.sort_by(|a, b| match (a, b) {
            (Answer::Named { name: a, .. }, Answer::Named { name: b, .. }) => a.cmp(b),
            _ => Ordering::Equal,
        });
    }
    sorted
}

fn same_in_order(a: &[Answer], r: &[Answer], budget: &mut Budget) -> Bounded<bool> {
    if a.len() != r.len() {
        return Ok(false);
    }
    for (a, r) in a.iter().zip(r) {
        if !same(a, r, budget)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Two lists are equal when they hold the same elements equally often, in any order.
fn same_list(a: &[Answer], r: &[Answer], budget: &mut Budget) -> Bounded<bool> {
    if a.len() != r.len() {
        return Ok(false);
    }
    if let (Some(a), Some(r)) = (sorted_numbers(a, budget)?, sorted_numbers(r, budget)?) {
        return Ok(a == r);
    }
    let mut used = vec![false; r.len()];
    'items: for item in a {
        for (i, other) in r.iter().enumerate() {
            if !used[i] && same(item, other, budget)? {
                used[i] = true;
                continue 'items;
            }
        }
        return Ok(false);
    }
    Ok(true)
}

/// Two sets are equal when they hold the same elements, however often each element is written.
fn same_set(a: &[Answer], r: &[Answer], budget: &mut Budget) -> Bounded<bool> {
    if let (Some(mut a), Some(mut r)) = (sorted_numbers(a, budget)?, sorted_numbers(r, budget)?) {
        a.dedup();
        r.dedup();
        return Ok(a == r);
    }
    for (these, those) in [(a, r), (r, a)] {
        'items: for item in these {
            for other in those {
                let is_same = if std::ptr::eq(these, a) {
                    same(item, other, budget)?
                } else {
                    same(other, item, budget)?
                };
                if is_same {
                    continue 'items;
                }
            }
            return Ok(false);
        }
    }
    Ok(true)
}

fn same_matrix(a: &[Vec<Expr>], r: &[Vec<Expr>], budget: &mut Budget) -> Bounded<bool> {
    if a.len() != r.len() || a[0].len() != r[0].len() {
        return Ok(false);
    }
    for (x, y) in a.iter().flatten().zip(r.iter().flatten()) {
        if !value::compare(x, y, budget)?.is_equal() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A matrix of one row and one column is a number.
fn is_number(rows: &[Vec<Expr>]) -> bool {
    rows.len() == 1 && rows[0].len() == 1
}

/// The same values under the same conditions, in any order.
fn same_cases(a: &[(Answer, Answer)], r: &[(Answer, Answer)], budget: &mut Budget) -> Bounded<bool> {
    if a.len() != r.len() {
        return Ok(false);
    }
    let mut used = vec![false; r.len()];
    'cases: for (value, condition) in a {
        for (i, (other_value, other_condition)) in r.iter().enumerate() {
            if !used[i] && same(condition, other_condition, budget)? && same(value, other_value, budget)? {
                used[i] = true;
                continue 'cases;
            }
        }
        return Ok(false);
    }
    Ok(true)
}

/// A matrix of one row or one column as a list.
fn vector(rows: &[Vec<Expr>]) -> Option<Vec<Answer>> {
    let is_vector = rows.len() == 1 || rows.iter().all(|row| row.len() == 1);
    is_vector.then(|| rows.iter().flatten().map(|x| Answer::Scalar(Quantity::bare(x.clone()))).collect())
}

fn quotient(parts: &[Expr]) -> Quantity {
    Quantity::bare(Expr::Mul(vec![parts[0].clone(), Expr::Inv(Box::new(parts[1].clone()))]))
}

/// [`same`], where an undefined value equals nothing.
pub(crate) fn is_same(answer: &Answer, reference: &Answer, budget: &mut Budget) -> Bounded<bool> {
    match same(answer, reference, budget) {
        Err(Stop::Undefined(_)) => Ok(false),
        other => other,
    }
}
