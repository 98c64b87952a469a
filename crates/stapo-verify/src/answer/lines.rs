//! Lines one below the other: a system of statements, or a value for each condition.

use super::parts::{depths, split};
use crate::budget::{Bounded, unreadable};
use crate::lex::token::{Lines, Tok, Token};

/// What lines one below the other say.
pub(super) enum Lined<'a> {
    /// A value and the condition under which it holds, line by line.
    Values(Vec<(&'a [Token], &'a [Token])>),
    /// Statements that hold together.
    Statements(Vec<Token>),
}

/// What the lines between `\begin{cases}` or the like and its end say, where the lines are all of `tokens`.
pub(super) fn lines<'a>(tokens: &'a [Token], around: &[u32]) -> Bounded<Option<Lined<'a>>> {
    let [Token { tok: Tok::BeginLines(kind), .. }, inside @ .., Token { tok: Tok::EndLines(_), .. }] = tokens
    else {
        return Ok(None);
    };
    if around[1..tokens.len() - 1].contains(&0) {
        return Ok(None);
    }
    let depths = depths(inside)?;
    let is_top = |i: usize| depths[i] == 0;
    if *kind == Lines::Cases {
        let mut rows = Vec::new();
        let mut start = 0;
        for row in split(inside, &depths, |token| token.tok == Tok::Row) {
            let top = &depths[start..start + row.len()];
            start += row.len() + 1;
            if !row.is_empty() {
                rows.push(conditioned(row, top));
            }
        }
        let n_conditions = rows.iter().filter(|row| row.is_some()).count();
        if n_conditions == rows.len() && n_conditions > 0 {
            return Ok(Some(Lined::Values(rows.into_iter().flatten().collect())));
        }
        if n_conditions > 0 {
            return unreadable("a case without its condition");
        }
    }
    let is_alignment = |i: usize| is_top(i) && inside[i].tok == Tok::Amp;
    let kept = (0..inside.len()).filter(|i| !is_alignment(*i)).map(|i| inside[i].clone());
    Ok(Some(Lined::Statements(kept.collect())))
}

/// The value and the condition of one line: `x & x>0`, `x, & \text{if } x>0`, `x \text{ if } x>0`.
fn conditioned<'a>(row: &'a [Token], depths: &[u32]) -> Option<(&'a [Token], &'a [Token])> {
    let is_if = |token: &Token| match &token.tok {
        Tok::Word(word) => matches!(word.to_lowercase().as_str(), "if" | "for" | "when" | "where"),
        _ => false,
    };
    let at = (1..row.len()).find(|i| depths[*i] == 0 && (row[*i].tok == Tok::Amp || is_if(&row[*i])))?;
    let value = &row[..at];
    let mut condition = &row[at..];
    while let [first, rest @ ..] = condition
        && (first.tok == Tok::Amp || first.tok == Tok::Comma || is_if(first))
    {
        condition = rest;
    }
    // In `x &= 1` the column only aligns.
    let is_condition = condition.first().is_some_and(|token| !matches!(token.tok, Tok::Rel(_)));
    is_condition.then_some((value, condition))
}
