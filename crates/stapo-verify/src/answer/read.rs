//! From tokens to an answer: split at the operator that binds least, then read the parts.

use super::Answer;
use super::chain::{agrees, is_separator, noted, separated};
use super::choice::choice;
use super::collection::{
    MAX_SIGN_CHOICES, add_to_intersection, add_to_union, as_region, described_set, member, spread_signs,
    without_points,
};
use super::lines::{Lined, lines};
use super::matrix::{determinant, matrices, under_det};
use super::parts::{depths, split, trimmed, turned, unquantified};
use super::prose::{is_prose, letter_run, spelled, words};
use super::quantity::{Quantity, quantity};
use super::region::Region;
use super::relation::{Joint, PARAMETER, inequalities, joined, measured, name_of, with_one_parameter};
use crate::budget::{Bounded, Budget, MAX_ELEMENTS, Stop, unreadable};
use crate::equal::region::same_region;
use crate::expr::{Expr, Sign};
use crate::lex::token::{Bracket, Rel, Tok, Token};
use crate::{parse, units};

/// Deepest nesting of collections, such as tuples in sets in tuples.
const MAX_NESTING: usize = 12;

/// Reads `tokens` as one answer, `nesting` levels inside another.
pub(super) fn answer(tokens: &[Token], nesting: usize, budget: &mut Budget) -> Bounded<Answer> {
    budget.spend(10 + tokens.len() as u64)?;
    if nesting > MAX_NESTING {
        return Err(Stop::OverBudget("collections nested too deep"));
    }
    let tokens = unquantified(trimmed(tokens));
    if tokens.is_empty() {
        return unreadable("nothing is there");
    }
    if let Some((letter, rest)) = choice(tokens) {
        return Ok(Answer::Choice { letter, rest: behind_letter(rest, nesting, budget)? });
    }
    if let Some(run) = letter_run(tokens) {
        return Ok(Answer::Run(run));
    }
    if is_prose(tokens) {
        return Ok(Answer::Text { words: words(tokens), broken: None });
    }
    let depths = match depths(tokens) {
        Ok(depths) => depths,
        Err(stop) => return turned(tokens).map_or(Err(stop), |turned| answer(&turned, nesting + 1, budget)),
    };
    if let Some(region) = restated(tokens, &depths, nesting, budget)? {
        return Ok(region);
    }
    let top = |i: usize| depths[i] == 0;
    match lines(tokens, &depths)? {
        Some(Lined::Values(rows)) => return piecewise(&rows, nesting, budget),
        Some(Lined::Statements(inside)) => return answer(&inside, nesting + 1, budget),
        None => {}
    }
    if let Some(parts) = separated(tokens, &depths).or_else(|| noted(tokens, &depths)) {
        return answer(&parts, nesting + 1, budget);
    }
    if (0..tokens.len()).any(|i| top(i) && is_separator(&tokens[i])) {
        return list(tokens, &depths, nesting, budget);
    }
    single(tokens, &depths, nesting, budget)
}

/// A region that is stated twice, as an inequality and after a colon as an interval: `3<k\le4: (3,4]`.
fn restated(
    tokens: &[Token],
    depths: &[u32],
    nesting: usize,
    budget: &mut Budget,
) -> Bounded<Option<Answer>> {
    let top = |i: &usize| depths[*i] == 0;
    let Some(colon) = (0..tokens.len()).filter(top).find(|i| tokens[*i].tok == Tok::Colon) else {
        return Ok(None);
    };
    let (inequality, interval) = (&tokens[..colon], &tokens[colon + 1..]);
    let is_order = |i: usize| matches!(tokens[i].tok, Tok::Rel(rel) if rel.is_order());
    let opens = matches!(interval, [Token { tok: Tok::Open(Bracket::Round | Bracket::Square), .. }, ..]);
    if !opens || !(0..colon).filter(top).any(is_order) {
        return Ok(None);
    }
    let stated = answer(inequality, nesting + 1, budget)?;
    let shown = as_region(&answer(interval, nesting + 1, budget)?);
    match (&stated, shown) {
        (Answer::Region(a), Some(b)) if same_region(a, &b, budget)? => Ok(Some(stated)),
        _ => unreadable("an inequality beside another interval"),
    }
}

/// Reads an answer that is no list.
fn single(tokens: &[Token], depths: &[u32], nesting: usize, budget: &mut Budget) -> Bounded<Answer> {
    let top = |i: usize| depths[i] == 0;
    let find = |wanted: Tok| (0..tokens.len()).find(|i| top(*i) && tokens[*i].tok == wanted);
    if find(Tok::Cup).is_some() {
        return union(tokens, depths, nesting, budget);
    }
    if find(Tok::Cap).is_some() {
        return intersection(tokens, depths, nesting, budget);
    }
    if let Some(at) = find(Tok::In) {
        let set = answer(&tokens[at + 1..], nesting + 1, budget)?;
        return member(name_of(&tokens[..at]), set);
    }
    if (0..tokens.len()).any(|i| top(i) && matches!(tokens[i].tok, Tok::Rel(_))) {
        return related(tokens, depths, nesting, budget);
    }
    // `\mathbb R-\{1\}` takes points away too.
    let is_difference =
        |i: &usize| top(*i) && tokens[*i].tok == Tok::Minus && tokens[i + 1].tok == Tok::Open(Bracket::Set);
    if let Some(at) = find(Tok::SetMinus).or_else(|| (1..tokens.len() - 1).find(is_difference)) {
        let whole = answer(&tokens[..at], nesting + 1, budget)?;
        let points = answer(&tokens[at + 1..], nesting + 1, budget)?;
        return without_points(&whole, &points, budget);
    }
    if let Some(matrix) = under_det(tokens) {
        let start = tokens.len() - matrix.len() - usize::from(tokens[1].tok != Tok::Begin);
        return determinant(matrix, &depths[start..start + matrix.len()], budget);
    }
    if let [Token { tok: Tok::Bar, .. }, inside @ .., Token { tok: Tok::Bar, .. }] = tokens
        && let [Token { tok: Tok::Begin, .. }, .., Token { tok: Tok::End, .. }] = inside
    {
        return determinant(inside, &depths[1..tokens.len() - 1], budget);
    }
    if find(Tok::Begin).is_some() {
        return matrices(tokens, depths, budget);
    }
    match tokens {
        [Token { tok: Tok::Empty, .. }] => return Ok(Answer::Empty),
        [Token { tok: Tok::Word(word), .. }] if word == "reals" => {
            return Ok(Answer::Region(Region::everything()));
        }
        [Token { tok: Tok::Word(word), .. }] if word.len() > 4 || units::is_word(word) => {
            return Ok(Answer::Text { words: words(tokens), broken: None });
        }
        [Token { tok: Tok::Open(open), .. }, inside @ .., Token { tok: Tok::Close(close), .. }]
            if depths[1..tokens.len() - 1].iter().all(|d| *d > 0) =>
        {
            if let Some(answer) = bracketed(*open, inside, *close, nesting, budget)? {
                return Ok(answer);
            }
        }
        _ => {}
    }
    if let Some(name) = point_name(tokens, depths) {
        let value = Box::new(answer(&tokens[1..], nesting + 1, budget)?);
        return Ok(Answer::Named { name, left: None, value });
    }
    if find(Tok::Colon).is_some() {
        return ratio(tokens, depths, budget);
    }
    scalar(tokens, budget)
}

/// The name of a point: the letter of `A(1,2)`.
fn point_name(tokens: &[Token], depths: &[u32]) -> Option<String> {
    let [
        Token { tok: Tok::Letter(name), .. },
        Token { tok: Tok::Open(Bracket::Round), .. },
        inside @ ..,
        Token { tok: Tok::Close(Bracket::Round), .. },
    ] = tokens
    else {
        return None;
    };
    let is_point = matches!(name.as_bytes(), [b'A'..=b'Z'])
        && inside.iter().any(|token| token.tok == Tok::Comma)
        && depths[2..tokens.len() - 1].iter().all(|depth| *depth > 0);
    is_point.then(|| name.clone())
}

/// Parts with ∩ between them.
fn intersection(tokens: &[Token], depths: &[u32], nesting: usize, budget: &mut Budget) -> Bounded<Answer> {
    let mut region = None;
    for part in split(tokens, depths, |token| token.tok == Tok::Cap) {
        region = Some(add_to_intersection(region, &answer(part, nesting + 1, budget)?, budget)?);
    }
    region.map_or_else(|| unreadable("an empty intersection"), |region| Ok(Answer::Region(region)))
}

/// A value for each condition.
fn piecewise(rows: &[(&[Token], &[Token])], nesting: usize, budget: &mut Budget) -> Bounded<Answer> {
    if rows.len() > MAX_ELEMENTS {
        return Err(Stop::OverBudget("a collection of more than 256 elements"));
    }
    let mut cases = Vec::new();
    for (value, condition) in rows {
        cases.push((answer(value, nesting + 1, budget)?, answer(condition, nesting + 1, budget)?));
    }
    Ok(Answer::Cases(cases))
}

/// The value after a multiple-choice letter, if there is one.
fn behind_letter(rest: &[Token], nesting: usize, budget: &mut Budget) -> Bounded<Option<Box<Answer>>> {
    if rest.is_empty() {
        return Ok(None);
    }
    match answer(rest, nesting + 1, budget) {
        Ok(value) => Ok(Some(Box::new(value))),
        Err(Stop::OverBudget(why)) => Err(Stop::OverBudget(why)),
        Err(_) => Ok(Some(Box::new(Answer::Text { words: spelled(rest), broken: None }))),
    }
}

/// Elements with commas, semicolons, `and` or `or` between them.
fn list(tokens: &[Token], depths: &[u32], nesting: usize, budget: &mut Budget) -> Bounded<Answer> {
    let says = |wanted: &str| {
        tokens.iter().zip(depths).any(|(token, depth)| {
            *depth == 0 && matches!(&token.tok, Tok::Word(word) if word.eq_ignore_ascii_case(wanted))
        })
    };
    let has_sign = |wanted: &str| {
        tokens
            .iter()
            .zip(depths)
            .any(|(token, depth)| *depth == 0 && matches!(&token.tok, Tok::Other(sign) if sign == wanted))
    };
    let is_logic = has_sign("\\lor") || has_sign("\\land");
    let says_any = |words: &[&str]| words.iter().any(|word| says(word));
    let joint = match (
        says_any(&["or", "或", "或者"]) || has_sign("\\lor"),
        says_any(&["and", "且", "并且"]) || has_sign("\\land"),
    ) {
        (true, _) => Joint::Or,
        (false, true) => Joint::And,
        (false, false) => Joint::Comma,
    };
    if let Some(groups) = groups(tokens, depths) {
        let lists = groups.into_iter().map(|group| answer(group, nesting + 1, budget));
        return Ok(Answer::List(lists.collect::<Bounded<_>>()?));
    }
    let items = items(tokens, depths, nesting, budget)?;
    let is_statement =
        |item: &Answer| !matches!(item, Answer::Scalar(_) | Answer::Text { .. } | Answer::Choice { .. });
    if is_logic && !items.iter().all(is_statement) {
        return unreadable("a formula of logic");
    }
    let items = with_one_parameter(items);
    if items.len() == 1 {
        return items.into_iter().next().map_or_else(|| unreadable("an empty list"), Ok);
    }
    joined(items, joint, budget)
}

/// The parts between semicolons, where each part is a list of equally many elements: `p=5,q=2; p=7,q=2`.
fn groups<'a>(tokens: &'a [Token], depths: &[u32]) -> Option<Vec<&'a [Token]>> {
    let mut counts = vec![1];
    for (token, depth) in tokens.iter().zip(depths).filter(|(_, depth)| **depth == 0) {
        match token.tok {
            Tok::Semicolon if *depth == 0 => counts.push(1),
            Tok::Comma => *counts.last_mut()? += 1,
            _ => {}
        }
    }
    let is_grouped = counts.len() > 1 && counts[0] > 1 && counts.iter().all(|n| *n == counts[0]);
    is_grouped.then(|| split(tokens, depths, |token| token.tok == Tok::Semicolon))
}

/// The elements of a list, with ± written out.
fn items(tokens: &[Token], depths: &[u32], nesting: usize, budget: &mut Budget) -> Bounded<Vec<Answer>> {
    let parts = split(tokens, depths, is_separator);
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

/// The answer that brackets around all tokens make; `None` if the brackets only group a value.
fn bracketed(
    open: Bracket,
    inside: &[Token],
    close: Bracket,
    nesting: usize,
    budget: &mut Budget,
) -> Bounded<Option<Answer>> {
    let depths = depths(inside)?;
    let is_set = open == Bracket::Set || open == Bracket::Brace;
    if inside.is_empty() {
        return if is_set { Ok(Some(Answer::Empty)) } else { unreadable("empty brackets") };
    }
    if is_set
        && let Some(at) = (1..inside.len())
            .find(|i| depths[*i] == 0 && matches!(inside[*i].tok, Tok::Mid | Tok::Bar | Tok::Colon))
    {
        let condition = answer(&inside[at + 1..], nesting + 1, budget)?;
        if let Some(family) = family(&inside[..at], &condition, nesting, budget)? {
            return Ok(Some(family));
        }
        return described_set(&inside[..at], condition).map(Some);
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

/// A set of values whose parameter runs over all integers, as a value with that note: `\{2k\pi \mid k\in\mathbb Z\}`, or
/// `\{x \mid x=2k\pi, k\in\mathbb Z\}`. `None` for other sets.
fn family(
    head: &[Token],
    condition: &Answer,
    nesting: usize,
    budget: &mut Budget,
) -> Bounded<Option<Answer>> {
    match condition {
        Answer::Named { name, left: None, .. } if name_of(head).as_ref() != Some(name) => {
            let holds_name = |token: &Token| matches!(&token.tok, Tok::Letter(letter) if letter == name);
            if !head.iter().any(holds_name) {
                return Ok(None);
            }
            let items = with_one_parameter(vec![answer(head, nesting + 1, budget)?, condition.clone()]);
            Ok(is_family(&items).then_some(Answer::List(items)))
        }
        Answer::List(items) if is_family(items) => match (&items[0], name_of(head)) {
            (Answer::Named { name, .. }, Some(head)) if *name == head => Ok(Some(condition.clone())),
            _ => Ok(None),
        },
        _ => Ok(None),
    }
}

/// Whether the items are a value and the note that its parameter runs over all integers.
fn is_family(items: &[Answer]) -> bool {
    matches!(items, [_, Answer::Named { name, .. }] if name == PARAMETER)
}

/// Parts with ∪ between them.
fn union(tokens: &[Token], depths: &[u32], nesting: usize, budget: &mut Budget) -> Bounded<Answer> {
    let mut region = Region { variable: None, pieces: Vec::new() };
    for part in split(tokens, depths, |token| token.tok == Tok::Cup) {
        add_to_union(&mut region, answer(part, nesting + 1, budget)?)?;
    }
    Ok(Answer::Region(region))
}

/// Tokens with at least one relation outside brackets.
fn related(tokens: &[Token], depths: &[u32], nesting: usize, budget: &mut Budget) -> Bounded<Answer> {
    let rels: Vec<Rel> = tokens
        .iter()
        .zip(depths)
        .filter_map(|(token, depth)| match token.tok {
            Tok::Rel(rel) if *depth == 0 => Some(rel),
            _ => None,
        })
        .collect();
    let parts = split(tokens, depths, |token| matches!(token.tok, Tok::Rel(_)));
    if rels.iter().all(|rel| matches!(rel, Rel::Eq | Rel::Approx)) {
        return equation(&parts, &rels, nesting, budget);
    }
    inequalities(&parts, &rels, budget)
}

/// A chain of equalities: `x = 2 + 3 = 5` names five x, `2/3 ≈ 0.67` is two thirds.
fn equation(parts: &[&[Token]], rels: &[Rel], nesting: usize, budget: &mut Budget) -> Bounded<Answer> {
    if parts.iter().any(|part| part.is_empty()) {
        return unreadable("a relation with nothing on one side");
    }
    if !agrees(parts, rels, budget)? {
        let words = parts.iter().map(|part| spelled(part)).collect::<Vec<_>>().join("=");
        return Ok(Answer::Text { words, broken: None });
    }
    // The side after an approximation sign is a rounding of the side before it.
    let n_exact = rels.iter().position(|rel| *rel == Rel::Approx).unwrap_or(rels.len()) + 1;
    let is_name_only = n_exact == 1 && name_of(parts[0]).is_some();
    let parts = if is_name_only { parts } else { &parts[..n_exact] };
    let first = parts[0];
    let last = parts[parts.len() - 1];
    if parts.len() == 1 {
        return answer(first, nesting + 1, budget);
    }
    let last = if is_name_only { parts[1] } else { last };
    if let Some(name) = name_of(first) {
        let value = answer(last, nesting + 1, budget)?;
        return Ok(Answer::Named {
            name,
            left: parse::expression(first, budget).ok(),
            value: Box::new(value),
        });
    }
    if parts.len() == 2
        && let Some(name) = name_of(last)
        && let Ok(value) = answer(first, nesting + 1, budget)
    {
        return Ok(Answer::Named {
            name,
            left: parse::expression(last, budget).ok(),
            value: Box::new(value),
        });
    }
    let right = quantity(last, budget)?;
    let left = quantity(first, budget)?;
    if left.unit.is_some_and(|unit| unit.n_unknown > 0) {
        return unreadable("words on the left of an equation");
    }
    let is_constant = left.expr.variables().is_empty() && right.expr.variables().is_empty();
    if is_constant || parts.len() > 2 {
        return Ok(Answer::Scalar(right));
    }
    Ok(Answer::Equation(left.expr, right))
}

/// Parts with colons between them.
fn ratio(tokens: &[Token], depths: &[u32], budget: &mut Budget) -> Bounded<Answer> {
    let mut parts = Vec::new();
    for part in split(tokens, depths, |token| token.tok == Tok::Colon) {
        // A leading zero makes a time of day: 3:05.
        if let [Token { tok: Tok::Num(numeral), .. }] = part
            && numeral.whole.len() > 1
            && numeral.whole.starts_with('0')
        {
            return Ok(Answer::Text { words: words(tokens), broken: None });
        }
        parts.push(measured(quantity(part, budget)?));
        if parts.len() > MAX_SIGN_CHOICES {
            return Err(Stop::OverBudget("a ratio of more than 16 parts"));
        }
    }
    Ok(Answer::Ratio(parts))
}

fn scalar(tokens: &[Token], budget: &mut Budget) -> Bounded<Answer> {
    let value = quantity(tokens, budget)?;
    let choices = sign_choices(&value.expr)?;
    if choices.len() == 1 {
        return Ok(Answer::Scalar(value));
    }
    let with_sign = |expr| Answer::Scalar(Quantity { unit: value.unit.clone(), ..Quantity::bare(expr) });
    Ok(Answer::Set(choices.into_iter().map(with_sign).collect()))
}

/// Every value that an expression with ± stands for. Several ± are independent; where ∓ occurs, one choice decides all
/// the signs.
fn sign_choices(expr: &Expr) -> Bounded<Vec<Expr>> {
    let mut n_signs = 0;
    let mut has_opposite = false;
    expr.walk(&mut |node| {
        if let Expr::PlusMinus(sign, _) = node {
            n_signs += 1;
            has_opposite |= *sign == Sign::Opposite;
        }
    });
    if n_signs == 0 {
        return Ok(vec![expr.clone()]);
    }
    let n_bits = if has_opposite { 1 } else { n_signs };
    if 1usize << n_bits.min(16) > MAX_SIGN_CHOICES {
        return Err(Stop::OverBudget("more than four signs ±"));
    }
    Ok((0..1usize << n_bits)
        .map(|choice| {
            let mut i = 0;
            expr.map(&mut |node| match node {
                Expr::PlusMinus(sign, x) => {
                    let is_minus = (choice >> if has_opposite { 0 } else { i }) & 1 == 1;
                    i += 1;
                    if is_minus == (sign == Sign::Same) { x.negated() } else { *x }
                }
                other => other,
            })
        })
        .collect())
}
