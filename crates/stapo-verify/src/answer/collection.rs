//! Lists, sets, tuples, unions and matrices.

use super::read::{answer, depths, is_joint, split};
use super::region::{End, Interval, Region};
use super::relation::Joint;
use super::{Answer, relation};
use crate::budget::{Budget, MAX_ELEMENTS, Step, Stop, unreadable};
use crate::expr::Expr;
use crate::lex::token::{Bracket, Rel, Tok, Token};
use crate::parse;

/// Most values the signs ± of one answer stand for.
pub(super) const MAX_SIGN_CHOICES: usize = 16;

pub(super) fn list(tokens: &[Token], depths: &[u32], nesting: usize, budget: &mut Budget) -> Step<Answer> {
    let says = |wanted: &str| {
        tokens.iter().zip(depths).any(|(token, depth)| {
            *depth == 0 && matches!(&token.tok, Tok::Word(word) if word.eq_ignore_ascii_case(wanted))
        })
    };
    let joint = match (says("or"), says("and")) {
        (true, _) => Joint::Or,
        (false, true) => Joint::And,
        (false, false) => Joint::Comma,
    };
    let items = items(tokens, depths, nesting, budget)?;
    if items.len() == 1 {
        return items.into_iter().next().map_or_else(|| unreadable("an empty list"), Ok);
    }
    relation::joined(items, joint, budget)
}

/// The elements of a list, with ± written out.
fn items(tokens: &[Token], depths: &[u32], nesting: usize, budget: &mut Budget) -> Step<Vec<Answer>> {
    let parts =
        split(tokens, depths, |token| matches!(token.tok, Tok::Comma | Tok::Semicolon) || is_joint(token));
    let mut items = Vec::new();
    for part in parts.into_iter().filter(|part| !part.is_empty()) {
        let has_choice_of_sign =
            part.iter().any(|token| matches!(token.tok, Tok::PlusMinus | Tok::MinusPlus));
        match answer(part, nesting + 1, budget)? {
            Answer::Set(values) if has_choice_of_sign => items.extend(values),
            item => items.push(item),
        }
        if items.len() > MAX_ELEMENTS {
            return Err(Stop::OverBudget("a collection of more than 256 elements"));
        }
    }
    if items.is_empty() {
        return unreadable("a list without elements");
    }
    Ok(items)
}

pub(super) fn bracketed(
    open: Bracket,
    inside: &[Token],
    close: Bracket,
    nesting: usize,
    budget: &mut Budget,
) -> Step<Option<Answer>> {
    let depths = depths(inside)?;
    let is_set = open == Bracket::Set || open == Bracket::Brace;
    if inside.is_empty() {
        return if is_set { Ok(Some(Answer::Empty)) } else { unreadable("empty brackets") };
    }
    if is_set
        && let Some(at) = (1..inside.len())
            .find(|i| depths[*i] == 0 && matches!(inside[*i].tok, Tok::Mid | Tok::Bar | Tok::Colon))
    {
        return answer(&inside[at + 1..], nesting + 1, budget).map(Some);
    }
    let has_comma =
        inside.iter().zip(&depths).any(|(t, d)| *d == 0 && matches!(t.tok, Tok::Comma | Tok::Semicolon));
    if is_set {
        return Ok(Some(Answer::Set(items(inside, &depths, nesting, budget)?)));
    }
    if !has_comma {
        let holds_structure = inside.iter().any(|token| matches!(token.tok, Tok::Begin | Tok::Cup));
        let is_grouping = open == close && matches!(open, Bracket::Round | Bracket::Square);
        return if is_grouping && holds_structure {
            answer(inside, nesting + 1, budget).map(Some)
        } else {
            Ok(None)
        };
    }
    let parts = split(inside, &depths, |token| matches!(token.tok, Tok::Comma | Tok::Semicolon));
    if parts.len() > MAX_ELEMENTS {
        return Err(Stop::OverBudget("a collection of more than 256 elements"));
    }
    let mut items = Vec::new();
    for part in parts {
        items.push(answer(part, nesting + 1, budget)?);
    }
    if open != close && items.len() != 2 {
        return unreadable("an interval with other than two ends");
    }
    Ok(Some(spread_signs(items, open, close)))
}

/// `(±1, 2)` is the set of (1, 2) and (-1, 2).
fn spread_signs(items: Vec<Answer>, open: Bracket, close: Bracket) -> Answer {
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

pub(super) fn union(tokens: &[Token], depths: &[u32], nesting: usize, budget: &mut Budget) -> Step<Answer> {
    let mut region = Region { variable: None, pieces: Vec::new() };
    for part in split(tokens, depths, |token| token.tok == Tok::Cup) {
        let part = match answer(part, nesting + 1, budget)? {
            Answer::Named { name, value, .. } => {
                region.variable = Some(name);
                *value
            }
            other => other,
        };
        match as_region(&part) {
            Some(more) => {
                region.variable = region.variable.take().or(more.variable);
                region.pieces.extend(more.pieces);
            }
            None => return unreadable("a union of something other than intervals"),
        }
    }
    Ok(Answer::Region(region))
}

/// `answer` as part of the real line, if it can be one.
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

/// `x ∈ S` is S, said of x.
pub(super) fn member(left: &[Token], right: &[Token], nesting: usize, budget: &mut Budget) -> Step<Answer> {
    let set = answer(right, nesting + 1, budget)?;
    let name = relation::name_of(left);
    match (as_region(&set), set) {
        // A bare pair behind ∈ is an interval.
        (Some(mut region), Answer::Tuple { .. } | Answer::Region(_)) => {
            region.variable = name;
            Ok(Answer::Region(region))
        }
        (_, set) => match name {
            Some(name) => Ok(Answer::Named { name, left: None, value: Box::new(set) }),
            None => Ok(set),
        },
    }
}

/// `ℝ \ {1, 2}`
pub(super) fn without_points(
    left: &[Token],
    right: &[Token],
    nesting: usize,
    budget: &mut Budget,
) -> Step<Answer> {
    let whole = answer(left, nesting + 1, budget)?;
    let points = answer(right, nesting + 1, budget)?;
    let (Answer::Region(region), Answer::Set(items)) = (&whole, &points) else {
        return unreadable("a difference of sets");
    };
    let [Answer::Scalar(point)] = items.as_slice() else { return unreadable("a difference of sets") };
    if *region != Region::everything() {
        return unreadable("a difference of sets");
    }
    let mut region = Region::half_line("", Rel::Ne, &point.expr);
    region.variable = None;
    Ok(Answer::Region(region))
}

pub(super) fn matrix(
    factor: &[Token],
    tokens: &[Token],
    depths: &[u32],
    budget: &mut Budget,
) -> Step<Answer> {
    let [Token { tok: Tok::Begin, .. }, inside @ .., Token { tok: Tok::End, .. }] = tokens else {
        return unreadable("something behind a matrix");
    };
    let inner: Vec<u32> = depths[1..depths.len() - 1].iter().map(|d| d.saturating_sub(1)).collect();
    if depths[1..depths.len() - 1].contains(&0) {
        return unreadable("two matrices side by side");
    }
    let factor = match factor {
        [] => None,
        [Token { tok: Tok::Minus, .. }] => Some(Expr::int(-1)),
        [rest @ .., Token { tok: Tok::Times, .. }] | rest => Some(parse::expression(rest, budget)?),
    };
    let mut rows = Vec::new();
    let mut start = 0;
    for row in split(inside, &inner, |token| token.tok == Tok::Row) {
        let row_depths = &inner[start..start + row.len()];
        start += row.len() + 1;
        if row.is_empty() {
            continue;
        }
        let mut cells = Vec::new();
        for cell in split(row, row_depths, |token| token.tok == Tok::Amp) {
            let value = parse::expression(cell, budget)?;
            cells.push(match &factor {
                Some(factor) => Expr::Mul(vec![factor.clone(), value]),
                None => value,
            });
        }
        rows.push(cells);
    }
    let width = rows.first().map_or(0, Vec::len);
    if width == 0 || rows.iter().any(|row| row.len() != width) || width * rows.len() > MAX_ELEMENTS {
        return unreadable("a matrix with uneven rows");
    }
    Ok(Answer::Matrix(rows))
}
