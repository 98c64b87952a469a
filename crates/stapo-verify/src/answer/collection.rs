//! Tuples, unions, set membership and matrices, put together from parts that are read.

use super::Answer;
use super::region::{End, Interval, Region};
use super::relation::{common, name_of};
use crate::budget::{Bounded, Budget, unreadable};
use crate::lex::token::{Bracket, Rel, Tok, Token};

/// Most values that the signs ± of one answer may stand for.
pub(super) const MAX_SIGN_CHOICES: usize = 16;

/// `(±1, 2)` is the set of (1, 2) and (-1, 2).
pub(super) fn spread_signs(items: Vec<Answer>, open: Bracket, close: Bracket) -> Answer {
    let n_choices: usize =
        items.iter().map(|item| if let Answer::Set(values) = item { values.len() } else { 1 }).product();
    if n_choices <= 1 || n_choices > MAX_SIGN_CHOICES {
        return Answer::Tuple { items, open, close };
    }
    let mut tuples: Vec<Vec<Answer>> = vec![Vec::new()];
    for item in items {
        let values = if let Answer::Set(values) = item { values } else { vec![item] };
        tuples = tuples
            .iter()
            .flat_map(|tuple| {
                values.iter().map(|value| [tuple.as_slice(), std::slice::from_ref(value)].concat())
            })
            .collect();
    }
    Answer::Set(tuples.into_iter().map(|items| Answer::Tuple { items, open, close }).collect())
}

/// Adds one part of a union `A ∪ B`, which may name the variable: `x ∈ A ∪ B`.
pub(super) fn add_to_union(region: &mut Region, part: Answer) -> Bounded<()> {
    let part = match part {
        Answer::Named { name, value, .. } => {
            region.variable = Some(name);
            *value
        }
        other => other,
    };
    let Some(more) = as_region(&part) else {
        return unreadable("a union of something other than intervals");
    };
    region.variable = region.variable.take().or(more.variable);
    region.pieces.extend(more.pieces);
    Ok(())
}

/// `answer` as a part of the real line, if `answer` can be read as one.
pub(crate) fn as_region(answer: &Answer) -> Option<Region> {
    match answer {
        Answer::Region(region) => Some(region.clone()),
        Answer::Tuple { items, open, close } => {
            let (
                [Answer::Scalar(low), Answer::Scalar(high)],
                Bracket::Round | Bracket::Square,
                Bracket::Round | Bracket::Square,
            ) = (items.as_slice(), open, close)
            else {
                return None;
            };
            let low = End { at: low.expr.clone(), is_closed: *open == Bracket::Square };
            let high = End { at: high.expr.clone(), is_closed: *close == Bracket::Square };
            Some(Region { variable: None, pieces: vec![Interval { low, high }] })
        }
        Answer::Set(items) => {
            let pieces = items.iter().map(|item| match item {
                Answer::Scalar(value) => Some(Interval::point(value.expr.clone())),
                _ => None,
            });
            Some(Region { variable: None, pieces: pieces.collect::<Option<_>>()? })
        }
        Answer::Empty => Some(Region { variable: None, pieces: Vec::new() }),
        _ => None,
    }
}

/// What `x ∈ S` states of `name`, if the left side is a name.
pub(super) fn member(name: Option<String>, set: Answer) -> Bounded<Answer> {
    let Some(name) = name else { return unreadable("something other than a name in a set") };
    Ok(match (as_region(&set), set) {
        // A bare pair after ∈ is an interval.
        (Some(mut region), Answer::Tuple { .. } | Answer::Region(_)) => {
            region.variable = Some(name);
            Answer::Region(region)
        }
        (_, set) => Answer::Named { name, left: None, value: Box::new(set) },
    })
}

/// `{x | x > 1}` and `{x ∈ ℝ | x > 1}`: the real numbers under a condition on them. Another head or domain is not read.
pub(super) fn described_set(head: &[Token], condition: Answer) -> Bounded<Answer> {
    let (head, domain) = match head.iter().position(|token| token.tok == Tok::In) {
        Some(at) => (&head[..at], Some(&head[at + 1..])),
        None => (head, None),
    };
    let is_real = match domain {
        None => true,
        Some([Token { tok: Tok::Word(word), .. }]) => word == "reals",
        Some(_) => false,
    };
    let name = name_of(head);
    let stated = match &condition {
        Answer::Region(region) => region.variable.as_ref(),
        Answer::Named { name, .. } => Some(name),
        _ => None,
    };
    // `{z : |z| < 1}` is what its condition says of z.
    if domain.is_none()
        && let (Some(name), Answer::Inequality(left, _, right)) = (&name, &condition)
        && [left.variables(), right.variables()].concat() == [name.as_str()]
    {
        return Ok(condition);
    }
    if !is_real || name.is_none() || stated != name.as_ref() {
        return unreadable("a set described by other than a condition on real numbers");
    }
    Ok(condition)
}

/// `ℝ \ {1, 2}`: a part of the real line without some points.
pub(super) fn without_points(whole: &Answer, points: &Answer, budget: &mut Budget) -> Bounded<Answer> {
    let (Some(mut region), Answer::Set(items)) = (as_region(whole), points) else {
        return unreadable("a difference of sets");
    };
    for item in items {
        let Answer::Scalar(point) = item else { return unreadable("a difference of sets") };
        let mut others = Region::half_line("", Rel::Ne, &point.expr);
        others.variable.clone_from(&region.variable);
        let Some(rest) = common(&region, &others, budget)? else {
            return unreadable("a difference of sets");
        };
        region = rest;
    }
    Ok(Answer::Region(region))
}

/// `A ∩ B`: the points of both parts.
pub(super) fn add_to_intersection(
    region: Option<Region>,
    part: &Answer,
    budget: &mut Budget,
) -> Bounded<Region> {
    let Some(part) = as_region(part) else { return unreadable("an intersection of other than intervals") };
    let Some(region) = region else { return Ok(part) };
    common(&region, &part, budget)?
        .map_or_else(|| unreadable("an intersection whose ends cannot be ordered"), Ok)
}
