//! Inequalities, names of values, and what a list of relations means together.

use super::Answer;
use super::quantity::{Quantity, quantity};
use super::region::{End, Interval, Region};
use crate::budget::{Bounded, Budget, MAX_ELEMENTS, unreadable};
use crate::equal::region::order;
use crate::equal::value::sign_of;
use crate::exact_form::affordable_form;
use crate::expr::{Expr, Func, UNIT};
use crate::lex::token::{Bracket, Rel, Tok, Token};
use crate::poly::{Atom, Power};
use dashu_ratio::RBig;
use std::cmp::Ordering;

/// Most conditions that may exclude each other.
const MAX_ALTERNATIVES: usize = 16;
/// The name of a parameter that runs over all integers.
pub(crate) const PARAMETER: &str = "any integer";

/// One inequality, or two in a chain `a < x < b`, with the tokens on each side of the relations.
pub(super) fn inequalities(parts: &[&[Token]], rels: &[Rel], budget: &mut Budget) -> Bounded<Answer> {
    match (parts, rels) {
        ([left, right], [rel]) => inequality(left, *rel, right, budget),
        ([low, middle, high], [first, second]) if first.is_order() && second.is_order() => {
            let below = inequality(low, *first, middle, budget)?;
            let above = inequality(middle, *second, high, budget)?;
            if let (Answer::Region(a), Answer::Region(b)) = (&below, &above)
                && a.variable == b.variable
                && let Some(region) = match a.between(b) {
                    Some(region) => Some(region),
                    None => common(a, b, budget)?,
                }
            {
                return Ok(Answer::Region(region));
            }
            Ok(Answer::List(vec![below, above]))
        }
        _ => unreadable("a chain of relations"),
    }
}

fn inequality(left: &[Token], rel: Rel, right: &[Token], budget: &mut Budget) -> Bounded<Answer> {
    let left = measured(quantity(left, budget)?);
    let right = measured(quantity(right, budget)?);
    // `x \\neq\\pm 1` leaves out both values.
    if let (Rel::Ne, Expr::PlusMinus(_, value)) = (rel, &right) {
        let sides = [(**value).clone(), (**value).clone().negated()];
        let [a, b] = &sides;
        if let (Some(a), Some(b)) = (solved(&left, rel, a, budget)?, solved(&left, rel, b, budget)?)
            && let Some(region) = common(&a, &b, budget)?
        {
            return Ok(Answer::Region(region));
        }
    }
    if let Some(region) = solved(&left, rel, &right, budget)? {
        return Ok(Answer::Region(region));
    }
    Ok(Answer::Inequality(left, rel, right))
}

/// The value with its unit as a factor, so that `x > 5 cm` and `x > 5 m` differ.
pub(crate) fn measured(value: Quantity) -> Expr {
    let Some(unit) = value.unit else { return value.expr };
    let mut factors = vec![value.expr, Expr::Num { value: unit.scale, is_decimal: false }];
    for (name, power) in unit.powers {
        let name = format!("{UNIT}{name}");
        factors.push(Expr::Pow(Box::new(Expr::Var(name)), Box::new(Expr::int(i64::from(power)))));
    }
    Expr::Mul(factors)
}

/// The half-line that a linear inequality in one variable describes; `None` for other inequalities.
fn solved(left: &Expr, rel: Rel, right: &Expr, budget: &mut Budget) -> Bounded<Option<Region>> {
    let lefts = left.variables();
    let rights = right.variables();
    match (left, right) {
        (Expr::Var(name), _) if !rights.contains(&name.as_str()) => {
            return Ok(Some(Region::half_line(name, rel, right)));
        }
        (_, Expr::Var(name)) if !lefts.contains(&name.as_str()) => {
            return Ok(Some(Region::half_line(name, rel.mirrored(), left)));
        }
        _ => {}
    }
    match (left, right) {
        (Expr::Call(Func::Abs, args), bound) if rights.is_empty() && is_real(&args[0]) => {
            return around_zero(&args[0], rel, bound, budget);
        }
        (bound, Expr::Call(Func::Abs, args)) if lefts.is_empty() && is_real(&args[0]) => {
            return around_zero(&args[0], rel.mirrored(), bound, budget);
        }
        _ => {}
    }
    let mut names = [lefts, rights].concat();
    names.dedup();
    let [name] = names.as_slice() else { return Ok(None) };
    let difference = Expr::Add(vec![left.clone(), right.clone().negated()]);
    let Some(form) = affordable_form(&difference, budget)? else { return Ok(None) };
    let linear = vec![(Atom::Var((*name).to_owned()), Power { n: 1, d: 1 })];
    let is_linear = form.terms.keys().all(|monomial| {
        *monomial == linear || monomial.iter().all(|(atom, _)| !matches!(atom, Atom::Var(_)))
    });
    let Some(slope) = form.terms.get(&linear).filter(|_| is_linear) else { return Ok(None) };
    let at_zero = difference.map(&mut |node| match node {
        Expr::Var(_) => Expr::int(0),
        other => other,
    });
    let bound = Expr::Mul(vec![at_zero, Expr::Num { value: -RBig::ONE / slope, is_decimal: false }]);
    let rel = if *slope < RBig::ZERO { rel.mirrored() } else { rel };
    Ok(Some(Region::half_line(name, rel, &bound)))
}

/// Whether an expression may be taken as real: z and w are usual names of complex numbers.
fn is_real(expr: &Expr) -> bool {
    !expr.variables().iter().any(|name| matches!(*name, "z" | "w"))
}

/// `|z| < 3` as an interval of real numbers, for a reference that is a part of the real line.
pub(crate) fn real_region(answer: &Answer, budget: &mut Budget) -> Bounded<Option<Region>> {
    match answer {
        Answer::Inequality(Expr::Call(Func::Abs, args), rel, bound) if bound.variables().is_empty() => {
            around_zero(&args[0], *rel, bound, budget)
        }
        Answer::Inequality(bound, rel, Expr::Call(Func::Abs, args)) if bound.variables().is_empty() => {
            around_zero(&args[0], rel.mirrored(), bound, budget)
        }
        Answer::List(items) => {
            let [first @ Answer::Inequality(..), second @ Answer::Inequality(..)] = items.as_slice() else {
                return Ok(None);
            };
            match (real_region(first, budget)?, real_region(second, budget)?) {
                (Some(a), Some(b)) if a.variable == b.variable => common(&a, &b, budget),
                _ => Ok(None),
            }
        }
        _ => Ok(None),
    }
}

/// `|x| < 3` and `|x| > 3`: the inner value lies between -3 and 3, or outside.
fn around_zero(inner: &Expr, rel: Rel, bound: &Expr, budget: &mut Budget) -> Bounded<Option<Region>> {
    let is_positive = sign_of(bound, budget)? == Some(Ordering::Greater);
    if !is_positive || !rel.is_order() || inner.any(|node| matches!(node, Expr::Call(..))) {
        return Ok(None);
    }
    let above = solved(inner, rel, bound, budget)?;
    let below = solved(inner, rel.mirrored(), &bound.clone().negated(), budget)?;
    let (Some(mut above), Some(below)) = (above, below) else { return Ok(None) };
    if matches!(rel, Rel::Lt | Rel::Le) {
        return common(&above, &below, budget);
    }
    above.pieces.extend(below.pieces);
    Ok(Some(above))
}

/// The name that `tokens` spell: `x`, `f(x)`, `AB`, `\angle BEA_1`, `P(A)`, a phrase; `None` if they spell none.
pub(super) fn name_of(tokens: &[Token]) -> Option<String> {
    let mut depth = 0usize;
    // The depth from which numbers belong to the name: inside a subscript or the parentheses of a call.
    let mut numbered_depth = usize::MAX;
    let mut name = String::new();
    for (i, token) in tokens.iter().enumerate() {
        let before = i.checked_sub(1).map(|i| &tokens[i].tok);
        match &token.tok {
            Tok::Letter(text) | Tok::Word(text) => name.push_str(text),
            Tok::Func(Func::Ln | Func::Log | Func::Exp | Func::Abs) => return None,
            Tok::Func(func) => name.push_str(func.name()),
            Tok::E => name.push('e'),
            Tok::I => name.push('i'),
            Tok::Accent(mark) => name.push_str(mark),
            Tok::Under => name.push('_'),
            Tok::Prime => name.push('\''),
            Tok::Frac => name.push_str("frac"),
            Tok::Bar => name.push('|'),
            Tok::Open(Bracket::Square) | Tok::Close(Bracket::Square) => return None,
            Tok::Open(bracket) => {
                depth += 1;
                let holds_numbers =
                    *bracket == Bracket::Round || matches!(before, Some(Tok::Under | Tok::Caret));
                if holds_numbers {
                    numbered_depth = numbered_depth.min(depth);
                }
                if *bracket == Bracket::Round {
                    name.push('(');
                }
            }
            Tok::Close(bracket) => {
                depth = depth.saturating_sub(1);
                if depth < numbered_depth {
                    numbered_depth = usize::MAX;
                }
                if *bracket == Bracket::Round {
                    name.push(')');
                }
            }
            Tok::Num(numeral) if before == Some(&Tok::Under) || depth >= numbered_depth => {
                name.push_str(&numeral.whole);
            }
            Tok::Comma if depth > 0 => name.push(','),
            Tok::Colon => name.push(':'),
            Tok::Minus if depth > 0 && before == Some(&Tok::Open(Bracket::Brace)) => name.push('-'),
            Tok::Caret if before.is_some_and(names_function) && is_inverse(&tokens[i + 1..]) => {
                name.push('^');
            }
            // The event of a probability: `P(X \le 2)`.
            Tok::Rel(rel) if depth >= numbered_depth && !name.starts_with('(') => name.push_str(rel.sign()),
            _ => return None,
        }
    }
    let is_named =
        tokens.iter().any(|t| matches!(t.tok, Tok::Letter(_) | Tok::Word(_) | Tok::Accent(_) | Tok::I));
    // `f(f(x))` of an unknown x is an equation to solve, `f(f(2))` a value.
    let is_composed = name.starts_with(['f', 'g', 'h'])
        && name.matches('(').count() > 1
        && name.contains(['x', 'y', 't'])
        && !name.contains(|c: char| c.is_ascii_digit());
    (is_named && depth == 0 && !is_modulus_of_unknown(tokens) && !is_composed).then_some(name)
}

/// `|z|` and `|z_1|`: bars around one letter do not name a value, unlike `|AB|` and `|\vec{a}|`.
fn is_modulus_of_unknown(tokens: &[Token]) -> bool {
    let [Token { tok: Tok::Bar, .. }, inside @ .., Token { tok: Tok::Bar, .. }] = tokens else {
        return false;
    };
    let mut before_subscript = inside.iter().take_while(|token| token.tok != Tok::Under);
    matches!(before_subscript.next(), Some(Token { tok: Tok::Letter(_), .. }))
        && before_subscript.next().is_none()
}

/// Whether the token names a function or a matrix, whose inverse has a name: `f^{-1}(x)`, `A^{-1}`, but not `x^{-1}`.
fn names_function(tok: &Tok) -> bool {
    let Tok::Letter(name) = tok else { return false };
    matches!(name.as_bytes(), [b'f' | b'g' | b'h' | b'A'..=b'Z'])
}

/// `{-1}` after a caret.
fn is_inverse(tokens: &[Token]) -> bool {
    matches!(
        tokens,
        [Token { tok: Tok::Open(_), .. }, Token { tok: Tok::Minus, .. }, Token { tok: Tok::Num(n), .. }, ..] if n.whole == "1"
    )
}

/// The separator between the parts of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Joint {
    And,
    Or,
    Comma,
}

/// The items with a parameter that runs over all integers under one name, so that `2k\pi, k\in Z` and `2n\pi, n\in Z`
/// are the same.
pub(super) fn with_one_parameter(mut items: Vec<Answer>) -> Vec<Answer> {
    let is_integers = |value: &Answer| match value {
        Answer::Text { words, .. } => words == "integers",
        Answer::Scalar(value) => value.expr == Expr::Var("Z".into()),
        _ => false,
    };
    let parameter = match items.last() {
        Some(Answer::Named { name, left: None, value }) if name.len() == 1 && is_integers(value) => {
            name.clone()
        }
        _ => return items,
    };
    let renamed = |node: Expr| match &node {
        Expr::Var(name) if *name == parameter => Expr::Var(PARAMETER.into()),
        _ => node,
    };
    items.pop();
    for item in &mut items {
        let value = match item {
            Answer::Named { value, .. } => &mut **value,
            other => other,
        };
        if let Answer::Scalar(value) = value {
            value.expr = value.expr.map(&mut |node| renamed(node));
        }
    }
    let value = Box::new(Answer::Text { words: "integers".into(), broken: None });
    items.push(Answer::Named { name: PARAMETER.into(), left: None, value });
    items
}

/// What the parts of a list mean together: values of one unknown, a region, or a plain list.
pub(super) fn joined(items: Vec<Answer>, joint: Joint, budget: &mut Budget) -> Bounded<Answer> {
    if let Some(region) = joined_region(&items, joint, budget)? {
        return Ok(Answer::Region(region));
    }
    let names: Vec<Option<&String>> = items
        .iter()
        .map(|item| match item {
            Answer::Named { name, .. } => Some(name),
            _ => None,
        })
        .collect();
    let is_one_unknown =
        names[0].is_some() && names[1..].iter().all(|name| name.is_none() || *name == names[0]);
    let Some(name) = names[0].filter(|_| is_one_unknown).cloned() else { return Ok(Answer::List(items)) };
    let mut left = None;
    let values = items
        .into_iter()
        .map(|item| match item {
            Answer::Named { left: expr, value, .. } => {
                left = left.take().or(expr);
                *value
            }
            other => other,
        })
        .collect();
    Ok(Answer::Named { name, left, value: Box::new(Answer::List(values)) })
}

/// `x < 1 or x > 2` is a union, `x > 1 and x < 2` an intersection. A comma is an intersection too, unless every two of the
/// conditions exclude each other: such conditions can only be alternatives, so `x < 1, x > 2` is a union.
fn joined_region(items: &[Answer], joint: Joint, budget: &mut Budget) -> Bounded<Option<Region>> {
    let Some(parts) = items.iter().map(region_part).collect::<Option<Vec<Region>>>() else {
        return Ok(None);
    };
    let is_inequality = |item: &Answer| matches!(item, Answer::Region(Region { variable: Some(_), .. }));
    let [first, rest @ ..] = parts.as_slice() else { return Ok(None) };
    let names_another =
        |part: &Region| part.variable != first.variable && (part.variable.is_some() || joint != Joint::Or);
    if !items.iter().any(is_inequality) || rest.iter().any(names_another) {
        return Ok(None);
    }
    let union = || {
        let pieces = parts.iter().flat_map(|part| part.pieces.iter().cloned()).collect();
        Region { variable: first.variable.clone(), pieces }
    };
    if joint == Joint::Or {
        return Ok(Some(union()));
    }
    let mut both = first.clone();
    for part in rest {
        // Ends that cannot be ordered, as in x > a, x < b, still bound an interval.
        match common(&both, part, budget)?.or_else(|| both.between(part)) {
            Some(met) => both = met,
            None => return Ok(None),
        }
    }
    if !both.pieces.is_empty() || joint == Joint::And {
        return Ok(Some(both));
    }
    Ok(exclude_each_other(&parts, budget)?.then(union))
}

fn exclude_each_other(parts: &[Region], budget: &mut Budget) -> Bounded<bool> {
    if parts.len() > MAX_ALTERNATIVES {
        return Ok(false);
    }
    for (i, part) in parts.iter().enumerate() {
        for other in &parts[..i] {
            if common(part, other, budget)?.is_none_or(|both| !both.pieces.is_empty()) {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// The points that lie in both regions, one piece for each two pieces that meet; `None` if two ends cannot be
/// ordered or there are too many pieces.
pub(super) fn common(a: &Region, b: &Region, budget: &mut Budget) -> Bounded<Option<Region>> {
    if a.pieces.len() * b.pieces.len() > MAX_ELEMENTS {
        return Ok(None);
    }
    let mut pieces = Vec::new();
    for x in &a.pieces {
        for y in &b.pieces {
            let (Some(lows), Some(highs)) =
                (order(&x.low.at, &y.low.at, budget)?, order(&x.high.at, &y.high.at, budget)?)
            else {
                return Ok(None);
            };
            let low = inner(lows.reverse(), &x.low, &y.low);
            let high = inner(highs, &x.high, &y.high);
            match order(&low.at, &high.at, budget)? {
                None => return Ok(None),
                Some(Ordering::Less) => pieces.push(Interval { low, high }),
                Some(Ordering::Equal) if low.is_closed && high.is_closed => {
                    pieces.push(Interval { low, high });
                }
                Some(_) => {}
            }
        }
    }
    Ok(Some(Region { variable: a.variable.clone(), pieces }))
}

/// The first end where the order says less, the second where it says greater; an open end where both are one place.
fn inner(order: Ordering, a: &End, b: &End) -> End {
    match order {
        Ordering::Less => a.clone(),
        Ordering::Greater => b.clone(),
        Ordering::Equal => End { at: a.at.clone(), is_closed: a.is_closed && b.is_closed },
    }
}

/// An inequality or `x = 2` as part of a region.
fn region_part(item: &Answer) -> Option<Region> {
    match item {
        Answer::Region(part) => Some(part.clone()),
        Answer::Named { name, value, .. } => match &**value {
            Answer::Scalar(value) => Some(Region {
                variable: Some(name.clone()),
                pieces: vec![Interval::point(value.expr.clone())],
            }),
            _ => None,
        },
        _ => None,
    }
}
