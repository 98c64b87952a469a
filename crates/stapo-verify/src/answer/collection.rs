//! Tuples, unions, set membership and matrices, put together from parts that are read.

use super::Answer;
use super::parts::{depths, split};
use super::quantity::Quantity;
use super::region::{End, Interval, Region};
use super::relation::{common, name_of};
use crate::budget::{Bounded, Budget, MAX_ELEMENTS, unreadable};
use crate::expr::Expr;
use crate::lex::token::{Bracket, Rel, Tok, Token};
use crate::parse;

/// Most values that the signs ± of one answer may stand for.
pub(super) const MAX_SIGN_CHOICES: usize = 16;

/// Most rows of a determinant.
const MAX_DETERMINANT: usize = 4;

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
        // A bare pair behind ∈ is an interval.
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

/// The determinant of a square matrix between bars.
pub(super) fn determinant(tokens: &[Token], depths: &[u32], budget: &mut Budget) -> Bounded<Answer> {
    let inner: Vec<u32> = depths.iter().map(|depth| depth.saturating_sub(1)).collect();
    let depths = if depths.first() == Some(&0) { depths } else { &inner };
    let Answer::Matrix(rows) = matrix(&[], tokens, depths, budget)? else {
        return unreadable("bars around something other than a matrix");
    };
    if rows.len() > MAX_DETERMINANT || rows[0].len() != rows.len() {
        return unreadable("a determinant that is not square or has more than four rows");
    }
    let columns: Vec<usize> = (0..rows.len()).collect();
    Ok(Answer::Scalar(Quantity::bare(minor(&rows, &columns))))
}

/// The determinant of the last rows in the given columns, expanded along the first of those rows.
fn minor(rows: &[Vec<Expr>], columns: &[usize]) -> Expr {
    let Some(row) = rows.get(rows.len() - columns.len()).filter(|_| !columns.is_empty()) else {
        return Expr::int(1);
    };
    let terms = columns.iter().enumerate().map(|(i, column)| {
        let others: Vec<usize> = columns.iter().copied().filter(|other| other != column).collect();
        let term = Expr::Mul(vec![row[*column].clone(), minor(rows, &others)]);
        if i % 2 == 0 { term } else { term.negated() }
    });
    Expr::sum(terms.collect())
}

/// The terms of a sum of matrices, each with its sign as its first token; `None` for anything else.
pub(super) fn matrix_terms(tokens: &[Token], depths: &[u32]) -> Option<Vec<Vec<Token>>> {
    let is_sign = |i: usize| depths[i] == 0 && matches!(tokens[i].tok, Tok::Plus | Tok::Minus);
    let is_begin = |token: &Token| token.tok == Tok::Begin;
    if !tokens.iter().any(is_begin) || !(1..tokens.len()).any(is_sign) {
        return None;
    }
    let mut terms: Vec<Vec<Token>> = vec![Vec::new()];
    for (i, token) in tokens.iter().enumerate() {
        if is_sign(i) && i > 0 {
            terms.push(Vec::new());
        }
        if !(is_sign(i) && token.tok == Tok::Plus) {
            terms.last_mut()?.push(token.clone());
        }
    }
    (terms.len() > 1 && terms.iter().all(|term| term.iter().any(is_begin))).then_some(terms)
}

/// The sum of matrices of one size.
pub(super) fn matrix_sum(terms: &[Vec<Token>], budget: &mut Budget) -> Bounded<Answer> {
    let mut sum: Option<Vec<Vec<Expr>>> = None;
    for term in terms {
        let depths = depths(term)?;
        let at = term.iter().position(|token| token.tok == Tok::Begin).unwrap_or(0);
        let Answer::Matrix(rows) = matrix(&term[..at], &term[at..], &depths[at..], budget)? else {
            return unreadable("a sum of a matrix and something else");
        };
        let Some(old) = sum.take() else {
            sum = Some(rows);
            continue;
        };
        if old.len() != rows.len() || old[0].len() != rows[0].len() {
            return unreadable("a sum of matrices of different sizes");
        }
        let added = |(a, b): (Vec<Expr>, Vec<Expr>)| {
            a.into_iter().zip(b).map(|(x, y)| Expr::Add(vec![x, y])).collect::<Vec<Expr>>()
        };
        sum = Some(old.into_iter().zip(rows).map(added).collect());
    }
    sum.map_or_else(|| unreadable("an empty sum of matrices"), |rows| Ok(Answer::Matrix(rows)))
}

/// A matrix between `\begin` and `\end`, every entry multiplied by the factor in front of it.
pub(super) fn matrix(
    factor: &[Token],
    tokens: &[Token],
    depths: &[u32],
    budget: &mut Budget,
) -> Bounded<Answer> {
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
