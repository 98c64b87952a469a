//! Chains of equalities: where one equation ends and the next begins, and whether the sides agree.

use super::prose::is_joint;
use super::quantity::{Quantity, half_digit, printed_numeral, quantity};
use super::relation::name_of;
use crate::budget::{Bounded, Budget, Stop, unreadable};
use crate::equal::quantity::{is_within, same_quantity};
use crate::equal::value::compare;
use crate::expr::Expr;
use crate::lex::token::{Bracket, Rel, Tok, Token};

/// Most tokens of a side in which the name of the next equation is looked for.
const MAX_SIDE: usize = 256;

/// The tokens with a comma between equations that only white space sets apart; `None` if there are no such
/// equations. `x=1 \quad y=2` and `x=1 y=2` are two equations, not the chain x = 1y = 2.
pub(super) fn separated(tokens: &[Token], depths: &[u32]) -> Option<Vec<Token>> {
    let is_relation = |i: usize| depths[i] == 0 && matches!(tokens[i].tok, Tok::Rel(_));
    (0..tokens.len()).filter(|i| is_relation(*i)).nth(1)?;
    let relations: Vec<usize> = (0..tokens.len()).filter(|i| is_relation(*i)).collect();
    let mut cuts = Vec::new();
    for pair in relations.windows(2) {
        let &[before, after] = pair else { continue };
        let between = before + 1..after;
        let has_cut = between.clone().any(|i| depths[i] == 0 && is_separator(&tokens[i]));
        let gap = between.clone().skip(1).find(|i| depths[*i] == 0 && tokens[*i].is_apart);
        if has_cut {
            continue;
        }
        let side = &tokens[before + 1..after];
        let name = || name_behind(side).map(|at| before + 1 + at);
        cuts.extend(gap.or_else(name).filter(|cut| depths[*cut] == 0));
    }
    if cuts.is_empty() {
        return None;
    }
    let mut parts = Vec::with_capacity(tokens.len() + cuts.len());
    let mut cuts = cuts.into_iter().peekable();
    for (i, token) in tokens.iter().enumerate() {
        if cuts.next_if_eq(&i).is_some() {
            parts.push(Token { tok: Tok::Comma, ..token.clone() });
        }
        parts.push(token.clone());
    }
    Some(parts)
}

/// `2n+1 (n\ge1)` as `2n+1, n\ge1`: a note on a variable in brackets at the end becomes a separate element.
pub(super) fn noted(tokens: &[Token], depths: &[u32]) -> Option<Vec<Token>> {
    let (Tok::Close(Bracket::Round), [value @ .., _]) = (&tokens.last()?.tok, tokens) else { return None };
    let open = (0..value.len()).rev().find(|i| depths[*i] == 0)?;
    let note = &value[open + 1..];
    let is_note = open > 0
        && tokens[open].tok == Tok::Open(Bracket::Round)
        && !matches!(tokens[open - 1].tok, Tok::Rel(_) | Tok::Comma)
        && note.iter().any(|token| matches!(token.tok, Tok::Rel(_) | Tok::In));
    is_note.then(|| {
        let comma = Token { tok: Tok::Comma, ..tokens[open].clone() };
        [&tokens[..open], &[comma], note].concat()
    })
}

/// Whether the token ends one part of a list: a comma, a semicolon, the end of a line, `and` or `or`.
pub(super) fn is_separator(token: &Token) -> bool {
    matches!(token.tok, Tok::Comma | Tok::Semicolon | Tok::Row) || is_joint(token)
}

/// Where a name begins that ends the side of an equation and is apart from a constant before it.
fn name_behind(side: &[Token]) -> Option<usize> {
    if side.len() > MAX_SIDE {
        return None;
    }
    let constant = side.iter().take_while(|token| !matches!(token.tok, Tok::Letter(_))).count();
    (1..side.len().min(constant + 1)).find(|&at| {
        let before = &side[at - 1];
        let ends_value =
            before.is_text || matches!(before.tok, Tok::Num(_) | Tok::Close(_) | Tok::Percent | Tok::Degree);
        // `b h` and `ab` after a number are products.
        let is_one_name = side[at + 1..].iter().all(|token| !token.is_spaced || token.is_text)
            && !is_letter_product(&side[at]);
        side[at].is_spaced && ends_value && is_one_name && name_of(&side[at..]).is_some()
    })
}

/// Whether the token is a short run of small letters, which is a product of variables.
fn is_letter_product(token: &Token) -> bool {
    match &token.tok {
        Tok::Word(run) => !token.is_text && run.len() <= 3 && run.bytes().all(|b| b.is_ascii_lowercase()),
        _ => false,
    }
}

/// Whether neighbouring sides of a chain agree wherever both are constants. A side that names something is no constant.
pub(super) fn agrees(parts: &[&[Token]], rels: &[Rel], budget: &mut Budget) -> Bounded<bool> {
    let mut last: Option<(Quantity, &[Token])> = None;
    if let [[Token { tok: name @ Tok::Letter(_), .. }], middle @ .., _] = parts
        && middle.iter().any(|part| part.iter().any(|token| token.tok == *name))
    {
        return unreadable("the unknown in the middle of a chain");
    }
    for (i, part) in parts.iter().enumerate() {
        if name_of(part).is_some() {
            continue;
        }
        let value = match quantity(part, budget) {
            Ok(value) => value,
            Err(Stop::OverBudget(why)) => return Err(Stop::OverBudget(why)),
            // Only the last side may be something other than a value: a point, an interval.
            Err(_) if (i + 1 == parts.len() && rels.last() == Some(&Rel::Eq)) || holds_collection(part) => {
                continue;
            }
            Err(stop) => return Err(stop),
        };
        if rels.get(i.wrapping_sub(1)) == Some(&Rel::Approx)
            && !value.expr.variables().is_empty()
            && last.is_some()
        {
            return Ok(false);
        }
        if !value.expr.variables().is_empty() || value.expr.any(|node| matches!(node, Expr::PlusMinus(..))) {
            continue;
        }
        if let Some((before, tokens)) = &last {
            let rel = rels.get(i.saturating_sub(1)).copied().unwrap_or(Rel::Eq);
            let is_same = match same_constant(before, &value, budget) {
                Err(Stop::Undefined(_)) => false,
                found => found?,
            };
            if !is_same && !rounds((before, tokens), (&value, part), rel, budget)? {
                return Ok(false);
            }
        }
        last = Some((value, part));
    }
    Ok(true)
}

/// Whether two constants are equal; a percent sign may not be missing on one side, as it may against a reference.
fn same_constant(a: &Quantity, b: &Quantity, budget: &mut Budget) -> Bounded<bool> {
    if a.without_percent().is_some() != b.without_percent().is_some() {
        return Ok(compare(&a.expr, &b.expr, budget)?.is_equal());
    }
    same_quantity(a, b, budget)
}

fn holds_collection(tokens: &[Token]) -> bool {
    tokens.iter().any(|token| matches!(token.tok, Tok::Comma | Tok::Begin | Tok::Cup))
}

/// Whether one constant is the other rounded at the last digit that it prints.
fn rounds(
    a: (&Quantity, &[Token]),
    b: (&Quantity, &[Token]),
    rel: Rel,
    budget: &mut Budget,
) -> Bounded<bool> {
    let gap = Expr::Add(vec![a.0.expr.clone(), b.0.expr.clone().negated()]);
    if let (Some(a), Some(b)) = (&a.0.unit, &b.0.unit)
        && !(a.is_same_kind(b) && a.scale == b.scale)
    {
        return Ok(false);
    }
    // An equals sign rounds the side before it, an approximation sign either side.
    let sides = if rel == Rel::Eq { &[b][..] } else { &[a, b] };
    for &(value, tokens) in sides {
        // After an equals sign only a decimal may be rounded.
        let numeral = printed_numeral(tokens).filter(|numeral| rel != Rel::Eq || numeral.is_decimal());
        let Some(numeral) = numeral else { continue };
        let Some(half) = half_digit(&value.expr, numeral, budget)? else { continue };
        if is_within(&gap, &half, budget)? {
            return Ok(true);
        }
    }
    Ok(false)
}
