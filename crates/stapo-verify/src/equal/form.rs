//! Forms of one answer: a count as a name with two numbers, a vector as a sum of unit vectors, a value with a note on its
//! variable, an antiderivative with a free constant.

use crate::answer::quantity::Quantity;
use crate::answer::region::{Interval, Region};
use crate::answer::{Answer, PARAMETER, as_region};
use crate::budget::{Bounded, Budget};
use crate::exact_form::{affordable_form, ratio_of};
use crate::expr::{Expr, Func};
use crate::lex::token::Bracket;
use crate::parse::arrangements;
use crate::poly::{Atom, Power};
use dashu_ratio::RBig;

/// The axis of a unit vector: 0 for `\hat{i}` and `\vec{i}`, 1 for j, 2 for k.
fn unit_vector(name: &str) -> Option<usize> {
    let letter = name.strip_prefix("hat ").or_else(|| name.strip_prefix("vec "))?;
    ["i", "j", "k"].iter().position(|axis| *axis == letter)
}

/// `C(10,3)` and `P(10,3)` as the number of choices of 3 out of 10, without and with their order.
pub(super) fn count_of(name: &str, value: &Answer) -> Option<Quantity> {
    let Answer::Tuple { items, .. } = value else { return None };
    let [Answer::Scalar(n), Answer::Scalar(k)] = items.as_slice() else { return None };
    let (n, k) = (n.expr.clone(), k.expr.clone());
    match name {
        "C" => Some(Quantity::bare(Expr::Call(Func::Binomial, vec![n, k]))),
        "P" => Some(Quantity::bare(arrangements(n, k))),
        _ => None,
    }
}

/// The `n` coordinates of a sum of multiples of the unit vectors: `3\hat{i}+2\hat{j}` or `3i+2j`.
pub(super) fn coordinates(value: &Quantity, n: usize, budget: &mut Budget) -> Bounded<Option<Vec<Answer>>> {
    let names = value.expr.variables();
    let is_vector = names.iter().any(|name| unit_vector(name).is_some() || matches!(*name, "j" | "k"));
    if !is_vector || !(2..=3).contains(&n) {
        return Ok(None);
    }
    let axis = |atom: &Atom| match atom {
        Atom::I => Some(0),
        Atom::Var(name) if name == "j" => Some(1),
        Atom::Var(name) if name == "k" => Some(2),
        Atom::Var(name) => unit_vector(name),
        _ => None,
    };
    let Some(form) = affordable_form(&value.expr, budget)? else { return Ok(None) };
    for monomial in form.terms.keys() {
        let axes: Vec<usize> = monomial
            .iter()
            .filter(|(_, power)| *power == Power { n: 1, d: 1 })
            .filter_map(|(atom, _)| axis(atom))
            .collect();
        let n_named = monomial.iter().filter(|(atom, _)| axis(atom).is_some()).count();
        if n_named != 1 || axes.len() != 1 || axes[0] >= n {
            return Ok(None);
        }
    }
    let along = |wanted: usize| {
        value.expr.map(&mut |node| {
            let found = match &node {
                Expr::I => Some(0),
                Expr::Var(name) => axis(&Atom::Var(name.clone())),
                _ => None,
            };
            found.map_or(node, |found| Expr::int(i64::from(found == wanted)))
        })
    };
    Ok(Some((0..n).map(|wanted| Answer::Scalar(Quantity::bare(along(wanted)))).collect()))
}

/// The letter that runs over all integers in a family of angles such as `\pi/4 + k\pi`: the only variable, k, m or n, and
/// every term with it is a multiple of it and of π.
fn free_parameter<'a>(expr: &'a Expr, budget: &mut Budget) -> Bounded<Option<&'a str>> {
    let [name @ ("k" | "m" | "n" | PARAMETER)] = expr.variables()[..] else { return Ok(None) };
    let Some(form) = affordable_form(expr, budget)? else { return Ok(None) };
    let is_angle = form.terms.keys().all(|monomial| {
        let has_pi = monomial.iter().any(|(atom, _)| *atom == Atom::Pi);
        monomial.iter().all(|(atom, power)| match atom {
            Atom::Var(_) => has_pi && *power == Power { n: 1, d: 1 },
            _ => true,
        })
    });
    Ok(is_angle.then_some(name))
}

/// Both expressions with their free parameter under one name, where each has one and the names differ.
pub(super) fn with_shared_parameter(
    a: &Expr,
    r: &Expr,
    budget: &mut Budget,
) -> Bounded<Option<(Expr, Expr)>> {
    let (Some(a_name), Some(r_name)) = (free_parameter(a, budget)?, free_parameter(r, budget)?) else {
        return Ok(None);
    };
    let renamed = |expr: &Expr, old: &str| {
        expr.map(&mut |node| match &node {
            Expr::Var(name) if name == old => Expr::Var(PARAMETER.into()),
            _ => node,
        })
    };
    Ok((a_name != r_name).then(|| (renamed(a, a_name), renamed(r, r_name))))
}

/// The value of a list of a value and the note that its parameter runs over all integers.
pub(super) fn of_any_integer(items: &[Answer]) -> Option<&Answer> {
    match items {
        [value, Answer::Named { name, .. }] if name == PARAMETER => Some(value),
        _ => None,
    }
}

/// The value of a list of a value and a note on the range of one of its variables: `2n+1, n\ge1`, `2n+1, n\in\mathbb N`.
pub(super) fn without_note(items: &[Answer]) -> Option<&Answer> {
    let is_counting = |set: &Answer| matches!(set, Answer::Text { words, .. } if matches!(words.as_str(), "naturals" | "positives"));
    let (value, variable) = match items {
        [value, Answer::Region(Region { variable: Some(variable), .. })] => (value, variable),
        [value, Answer::Named { name, left: None, value: set }] if is_counting(set) => (value, name),
        _ => return None,
    };
    let expr = match value {
        Answer::Scalar(scalar) => &scalar.expr,
        Answer::Named { value, .. } => match &**value {
            Answer::Scalar(scalar) => &scalar.expr,
            _ => return None,
        },
        _ => return None,
    };
    expr.variables().contains(&variable.as_str()).then_some(value)
}

/// The coordinates of a named tuple, each with its own name: `(x,y)=(1,2)` as x = 1, y = 2.
pub(super) fn by_part(name: &str, value: &Answer) -> Option<Vec<Answer>> {
    let Answer::Tuple { items, open: Bracket::Round, close: Bracket::Round } = value else { return None };
    let names: Vec<&str> = name.strip_prefix('(')?.strip_suffix(')')?.split(',').collect();
    let named = |(name, value): (&str, &Answer)| Answer::Named {
        name: name.to_owned(),
        left: None,
        value: Box::new(value.clone()),
    };
    (names.len() == items.len()).then(|| names.into_iter().zip(items).map(named).collect())
}

/// The values of a list that numbers the solutions for one unknown: `x_1=2, x_2=3` for x.
pub(super) fn numbered(unknown: &str, items: &[Answer]) -> Option<Vec<Answer>> {
    let value = |(i, item): (usize, &Answer)| match item {
        Answer::Named { name, value, .. } if *name == format!("{unknown}_{}", i + 1) => {
            Some((**value).clone())
        }
        _ => None,
    };
    items.iter().enumerate().map(value).collect()
}

/// The union of a list of intervals, one of which cannot be a point: `(-\infty,1)` or `(2,\infty)`.
pub(super) fn union_of(items: &[Answer]) -> Option<Region> {
    let parts: Vec<Region> = items.iter().map(as_region).collect::<Option<_>>()?;
    let is_interval = |item: &Answer| matches!(item, Answer::Tuple { .. } | Answer::Region(_));
    let pieces: Vec<Interval> = parts.into_iter().flat_map(|part| part.pieces).collect();
    let is_no_point = |piece: &Interval| {
        piece.low.is_closed || piece.high.is_closed || piece.ends().any(|at| at.any(|x| *x == Expr::Infinity))
    };
    (items.iter().all(is_interval) && pieces.iter().any(is_no_point))
        .then_some(Region { variable: None, pieces })
}

/// The rows of a matrix that is written as a list of lists: `[[1,2],[3,4]]`.
pub(super) fn rows_of(items: &[Answer]) -> Option<Vec<Vec<Expr>>> {
    let cell = |item: &Answer| match item {
        Answer::Scalar(value) if value.unit.is_none() => Some(value.expr.clone()),
        _ => None,
    };
    let row = |item: &Answer| match item {
        Answer::Tuple { items, open: Bracket::Square, close: Bracket::Square } => {
            items.iter().map(cell).collect::<Option<Vec<Expr>>>()
        }
        _ => None,
    };
    let rows: Vec<Vec<Expr>> = items.iter().map(row).collect::<Option<_>>()?;
    rows.iter().all(|row| row.len() == rows[0].len()).then_some(rows)
}

/// The expression with its constants `c_1`, `c_2` in the case of the other side's, where only the case differs.
fn with_numbered_constants(a: &Expr, r: &Expr) -> Option<Expr> {
    let is_constant = |name: &str| {
        let number = name.strip_prefix("C_").or_else(|| name.strip_prefix("c_"));
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
    };
    if !a.any(|node| matches!(node, Expr::Var(name) if is_constant(name))) {
        return None;
    }
    let (ours, theirs) = (a.variables(), r.variables());
    let other_case =
        |name: &str| theirs.iter().find(|other| other.eq_ignore_ascii_case(name) && **other != name);
    let is_renamed = |name: &str| is_constant(name) && !theirs.contains(&name) && other_case(name).is_some();
    let is_plain = |name: &&str| !is_constant(name) || is_renamed(name);
    if !ours.iter().all(is_plain) {
        return None;
    }
    Some(a.map(&mut |node| match &node {
        Expr::Var(name) if is_renamed(name) => {
            Expr::Var(other_case(name).map_or("", |other| other).to_owned())
        }
        _ => node,
    }))
}

/// The expression with its free additive constant called C, where one side writes `+C` and the other `+c`.
pub(super) fn with_one_constant(a: &Expr, r: &Expr) -> Option<Expr> {
    if let Some(renamed) = with_numbered_constants(a, r) {
        return Some(renamed);
    }
    let a_name = free_constant(a)?;
    let r_name = free_constant(r)?;
    let is_free = |name: &str, other: &Expr| !other.variables().contains(&name);
    // A capital C is a constant of integration, whatever the answer calls it.
    let is_renamed =
        a_name.eq_ignore_ascii_case(r_name) || (r_name == "C" && is_free(a_name, r) && is_free(r_name, a));
    (a_name != r_name && is_renamed).then(|| {
        a.map(&mut |node| match &node {
            Expr::Var(name) if name == a_name => Expr::Var(r_name.to_owned()),
            _ => node,
        })
    })
}

/// The expression with its free constant C left out.
pub(super) fn without_constant(expr: &Expr) -> Option<Expr> {
    let name = free_constant(expr).filter(|name| *name == "C")?;
    let Expr::Add(terms) = expr else { return None };
    let is_constant = |term: &&Expr| matches!(term, Expr::Var(other) if other == name);
    Some(Expr::sum(terms.iter().filter(|term| !is_constant(term)).cloned().collect()))
}

/// `f(t)=t^2+1` with the argument of the other side, where that is f(x).
pub(super) fn with_renamed_argument(answer: &Answer, wanted: &str) -> Option<Answer> {
    let Answer::Named { name, value, .. } = answer else { return None };
    let argument = |name: &str| {
        let (function, rest) = name.split_once('(')?;
        let argument = rest.strip_suffix(')')?;
        matches!(argument.as_bytes(), [b'a'..=b'z']).then(|| (function.to_owned(), argument.to_owned()))
    };
    let ((function, old), (wanted_function, new)) = (argument(name)?, argument(wanted)?);
    let Answer::Scalar(value) = &**value else { return None };
    if function != wanted_function || old == new || value.expr.variables().contains(&new.as_str()) {
        return None;
    }
    let expr = value.expr.map(&mut |node| match &node {
        Expr::Var(name) if *name == old => Expr::Var(new.clone()),
        _ => node,
    });
    let value = Box::new(Answer::Scalar(Quantity { expr, ..value.clone() }));
    Some(Answer::Named { name: wanted.to_owned(), left: None, value })
}

/// The coordinates of a curve with the parameter of the other side, where each side has another one in two coordinates or
/// more: `(1+s, 2-s)` and `(1+t, 2-t)`.
pub(super) fn with_curve_parameter(items: &[Answer], wanted: &[Answer]) -> Option<Vec<Answer>> {
    let parameter = |items: &[Answer]| {
        let mut names: Vec<String> = Vec::new();
        for item in items {
            let Answer::Scalar(value) = item else { return None };
            names.extend(value.expr.variables().iter().map(|name| (*name).to_owned()));
        }
        let (first, others) = names.split_first()?;
        let is_parameter =
            ["t", "s", "u", "r", "k", "lambda", "mu", "\\lambda", "\\mu", "λ", "μ"].contains(&first.as_str());
        let is_alone = !others.is_empty() && others.iter().all(|name| name == first);
        (is_parameter && is_alone).then(|| first.clone())
    };
    let (old, new) = (parameter(items)?, parameter(wanted)?);
    let renamed = |item: &Answer| match item {
        Answer::Scalar(value) => {
            let expr = value.expr.map(&mut |node| match &node {
                Expr::Var(name) if *name == old => Expr::Var(new.clone()),
                _ => node,
            });
            Answer::Scalar(Quantity { expr, ..value.clone() })
        }
        other => other.clone(),
    };
    (old != new).then(|| items.iter().map(renamed).collect())
}

/// A letter for a constant, where it is a term of the sum and occurs nowhere else.
fn free_constant(expr: &Expr) -> Option<&str> {
    let Expr::Add(terms) = expr else { return None };
    let name = terms.iter().find_map(|term| match term {
        Expr::Var(name) if matches!(name.as_str(), "C" | "c" | "K" | "k" | "D") => Some(name.as_str()),
        _ => None,
    })?;
    let mut n_uses = 0;
    expr.walk(&mut |node| {
        n_uses += usize::from(matches!(node, Expr::Var(other) if other.eq_ignore_ascii_case(name)));
    });
    (n_uses == 1).then_some(name)
}

/// The elements as numbers in order of size, where all are exact numbers without a unit or a sign such as %; `None` for
/// other collections. Long collections are compared so, instead of each element with each.
pub(super) fn sorted_numbers(items: &[Answer], budget: &mut Budget) -> Bounded<Option<Vec<RBig>>> {
    let is_inexact = |node: &Expr| {
        matches!(
            node,
            Expr::Num { is_decimal: true, .. }
                | Expr::Var(_)
                | Expr::Percent(_)
                | Expr::Degrees(_)
                | Expr::Call(..)
        )
    };
    let mut numbers = Vec::with_capacity(items.len());
    for item in items {
        let Answer::Scalar(Quantity { expr, unit: None, as_measure: None, half_digit: None }) = item else {
            return Ok(None);
        };
        if expr.any(is_inexact) {
            return Ok(None);
        }
        match budget.attempt(|budget| ratio_of(expr, budget)) {
            Ok(Some(number)) => numbers.push(number),
            _ => return Ok(None),
        }
    }
    budget.spend(8 * numbers.len() as u64)?;
    numbers.sort();
    Ok(Some(numbers))
}
