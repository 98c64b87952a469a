//! Forms of one answer: a count as a name with two numbers, a vector as a sum of unit vectors, a value with a note on its
//! variable, an antiderivative with a free constant.

use crate::answer::quantity::Quantity;
use crate::answer::region::Region;
use crate::answer::{Answer, PARAMETER};
use crate::budget::{Bounded, Budget};
use crate::exact_form::affordable_form;
use crate::expr::{Expr, Func};
use crate::parse::arrangements;
use crate::poly::{Atom, Power};

/// The unit vectors along the axes, in order.
const UNIT_VECTORS: [&str; 3] = ["hat i", "hat j", "hat k"];

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
    let is_vector = names.iter().any(|name| UNIT_VECTORS.contains(name) || matches!(*name, "j" | "k"));
    if !is_vector || !(2..=3).contains(&n) {
        return Ok(None);
    }
    let axis = |atom: &Atom| match atom {
        Atom::I => Some(0),
        Atom::Var(name) if name == "j" => Some(1),
        Atom::Var(name) if name == "k" => Some(2),
        Atom::Var(name) => UNIT_VECTORS.iter().position(|unit| unit == name),
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

/// The value of a list of a value and a note on the range of one of its variables: `2n+1, n\ge1`.
pub(super) fn without_note(items: &[Answer]) -> Option<&Answer> {
    let [value, Answer::Region(Region { variable: Some(variable), .. })] = items else { return None };
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

/// The expression with its free additive constant called C, where one side writes `+C` and the other `+c`.
pub(super) fn with_one_constant(a: &Expr, r: &Expr) -> Option<Expr> {
    let a_name = free_constant(a)?;
    let r_name = free_constant(r)?;
    (a_name != r_name && a_name.eq_ignore_ascii_case(r_name)).then(|| {
        a.map(&mut |node| match &node {
            Expr::Var(name) if name == a_name => Expr::Var(r_name.to_owned()),
            _ => node,
        })
    })
}

/// `C` or `c` where the letter is a term of the sum and occurs nowhere else.
fn free_constant(expr: &Expr) -> Option<&str> {
    let Expr::Add(terms) = expr else { return None };
    let name = terms.iter().find_map(|term| match term {
        Expr::Var(name) if matches!(name.as_str(), "C" | "c") => Some(name.as_str()),
        _ => None,
    })?;
    let mut n_uses = 0;
    expr.walk(&mut |node| {
        n_uses += usize::from(matches!(node, Expr::Var(other) if other.eq_ignore_ascii_case(name)));
    });
    (n_uses == 1).then_some(name)
}
