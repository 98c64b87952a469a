//! From tokens to an answer: split at the loosest sign first, read the parts.

use super::choice::choice;
use super::collection::{MAX_SIGN_CHOICES, bracketed, list, matrix, member, union, without_points};
use super::quantity::{Quantity, quantity};
use super::region::Region;
use super::{Answer, relation};
use crate::budget::{Budget, Step, Stop, unreadable};
use crate::expr::{Expr, Sign};
use crate::lex::token::{Bracket, Tok, Token};
use crate::units;

/// Deepest nesting of tuples in sets in tuples.
const MAX_NESTING: usize = 12;

/// Whether the text is words and nothing else.
pub(super) fn is_prose(tokens: &[Token]) -> bool {
    if let [Token { tok: Tok::Word(first), .. }, _] = tokens
        && matches!(first.to_lowercase().as_str(), "choice" | "option")
    {
        return false;
    }
    let is_variables =
        |word: &str| word.len() <= 3 && word.chars().all(|c| "abcdhkmnpqrstuvwxyz".contains(c));
    let n_words =
        tokens.iter().filter(|t| matches!(&t.tok, Tok::Word(w) if t.is_text || !is_variables(w))).count();
    let is_set_name =
        |word: &str| matches!(word, "reals" | "integers" | "rationals" | "naturals" | "complexes");
    n_words > 0
        && tokens.iter().all(|token| match &token.tok {
            Tok::Word(word) => !is_set_name(word) && !is_joint(token),
            Tok::Letter(name) => name.len() == 1,
            Tok::Other(sign) => sign == "." || sign == "-",
            Tok::Minus | Tok::Prime | Tok::I | Tok::E => true,
            _ => false,
        })
        && !is_single_letter(tokens)
}

/// Whether a text that is no mathematics is at least mostly words, and so a plain wrong answer.
pub(super) fn is_wordy(tokens: &[Token]) -> bool {
    tokens.iter().any(|token| matches!(&token.tok, Tok::Word(word) if word.len() > 1))
        && tokens.iter().all(|token| {
            matches!(
                token.tok,
                Tok::Word(_)
                    | Tok::Letter(_)
                    | Tok::Num(_)
                    | Tok::Comma
                    | Tok::Semicolon
                    | Tok::Colon
                    | Tok::Prime
                    | Tok::Minus
                    | Tok::I
                    | Tok::E
                    | Tok::Other(_)
                    | Tok::Currency(_)
                    | Tok::Bang
                    | Tok::Open(Bracket::Round)
                    | Tok::Close(Bracket::Round)
                    | Tok::Func(_)
            )
        })
}

fn is_single_letter(tokens: &[Token]) -> bool {
    matches!(tokens, [Token { tok: Tok::Word(word), .. }] if word.chars().count() == 1)
}

pub(super) fn is_joint(token: &Token) -> bool {
    matches!(&token.tok, Tok::Word(word) if matches!(word.to_lowercase().as_str(), "and" | "or"))
}

/// Reads `tokens` as one answer, `nesting` levels inside another.
pub(super) fn answer(tokens: &[Token], nesting: usize, budget: &mut Budget) -> Step<Answer> {
    budget.spend(10 + tokens.len() as u64)?;
    if nesting > MAX_NESTING {
        return Err(Stop::OverBudget("collections nested too deep"));
    }
    let tokens = trimmed(tokens);
    if tokens.is_empty() {
        return unreadable("nothing is there");
    }
    if let Some(choice) = choice(tokens, nesting, budget)? {
        return Ok(choice);
    }
    if is_prose(tokens) {
        return Ok(Answer::Text { words: words(tokens), broken: None });
    }
    let depths = depths(tokens)?;
    let top = |i: usize| depths[i] == 0;
    let is_list = (0..tokens.len())
        .any(|i| top(i) && (matches!(tokens[i].tok, Tok::Comma | Tok::Semicolon) || is_joint(&tokens[i])));
    if is_list {
        return list(tokens, &depths, nesting, budget);
    }
    let find = |wanted: Tok| (0..tokens.len()).find(|i| top(*i) && tokens[*i].tok == wanted);
    if find(Tok::Cup).is_some() {
        return union(tokens, &depths, nesting, budget);
    }
    if let Some(at) = find(Tok::In) {
        return member(&tokens[..at], &tokens[at + 1..], nesting, budget);
    }
    if (0..tokens.len()).any(|i| top(i) && matches!(tokens[i].tok, Tok::Rel(_))) {
        return relation::read(tokens, &depths, nesting, budget);
    }
    if let Some(at) = find(Tok::SetMinus) {
        return without_points(&tokens[..at], &tokens[at + 1..], nesting, budget);
    }
    if let Some(at) = find(Tok::Begin) {
        return matrix(&tokens[..at], &tokens[at..], &depths[at..], budget);
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
    if find(Tok::Colon).is_some() {
        return ratio(tokens, &depths, budget);
    }
    scalar(tokens, budget)
}

/// Without braces around everything and punctuation at the end.
fn trimmed(tokens: &[Token]) -> &[Token] {
    let mut end = tokens.len();
    while end > 0
        && match &tokens[end - 1].tok {
            Tok::Comma | Tok::Semicolon => true,
            Tok::Other(sign) => sign == ".",
            _ => false,
        }
    {
        end -= 1;
    }
    let tokens = &tokens[..end];
    let n_layers = n_brace_layers(tokens);
    // The innermost layer stays when it separates elements: {1, 2} is a set.
    let inside = &tokens[n_layers..tokens.len() - n_layers];
    let keeps_one = n_layers > 0 && (inside.is_empty() || has_top_comma(inside));
    let n_peeled = n_layers - usize::from(keeps_one);
    &tokens[n_peeled..tokens.len() - n_peeled]
}

/// How many pairs of braces enclose all of the tokens.
fn n_brace_layers(tokens: &[Token]) -> usize {
    let n_leading = tokens.iter().take_while(|token| token.tok == Tok::Open(Bracket::Brace)).count();
    if n_leading == 0 {
        return 0;
    }
    // The lowest depth between the leading braces and the closing ones at the end bounds the layers.
    let n_trailing = tokens.iter().rev().take_while(|token| token.tok == Tok::Close(Bracket::Brace)).count();
    let (mut depth, mut lowest) = (n_leading, n_leading);
    let middle = tokens.get(n_leading..tokens.len().saturating_sub(n_trailing)).unwrap_or(&[]);
    for token in middle {
        match token.tok {
            Tok::Open(Bracket::Brace) => depth += 1,
            Tok::Close(Bracket::Brace) => depth = depth.saturating_sub(1),
            _ => {}
        }
        lowest = lowest.min(depth);
    }
    if depth == n_trailing { lowest.min(n_trailing) } else { 0 }
}

fn has_top_comma(tokens: &[Token]) -> bool {
    depths(tokens)
        .is_ok_and(|depths| tokens.iter().zip(depths).any(|(token, d)| d == 0 && token.tok == Tok::Comma))
}

/// How many brackets are open around each token; a bracket itself counts as outside.
pub(super) fn depths(tokens: &[Token]) -> Step<Vec<u32>> {
    let mut stack: Vec<Bracket> = Vec::new();
    let mut n_matrices = 0u32;
    let mut depths = Vec::with_capacity(tokens.len());
    for token in tokens {
        match token.tok {
            Tok::Close(close) => match stack.pop() {
                Some(open) if matches(open, close) => {}
                _ => return unreadable("brackets that do not match"),
            },
            Tok::End => n_matrices = n_matrices.saturating_sub(1),
            _ => {}
        }
        depths.push(stack.len() as u32 + n_matrices);
        match token.tok {
            Tok::Open(open) => stack.push(open),
            Tok::Begin => n_matrices += 1,
            _ => {}
        }
    }
    if !stack.is_empty() || n_matrices > 0 {
        return unreadable("a bracket that is never closed");
    }
    Ok(depths)
}

/// Round and square brackets may close each other: half-open intervals.
fn matches(open: Bracket, close: Bracket) -> bool {
    let is_loose = |b| matches!(b, Bracket::Round | Bracket::Square);
    open == close || (is_loose(open) && is_loose(close))
}

/// The parts between top-level tokens that `cuts` accepts.
pub(super) fn split<'a>(
    tokens: &'a [Token],
    depths: &[u32],
    cuts: impl Fn(&Token) -> bool,
) -> Vec<&'a [Token]> {
    let mut parts = Vec::new();
    let mut start = 0;
    for i in 0..tokens.len() {
        if depths[i] == 0 && cuts(&tokens[i]) {
            parts.push(&tokens[start..i]);
            start = i + 1;
        }
    }
    parts.push(&tokens[start..]);
    parts
}

fn ratio(tokens: &[Token], depths: &[u32], budget: &mut Budget) -> Step<Answer> {
    let mut parts = Vec::new();
    for part in split(tokens, depths, |token| token.tok == Tok::Colon) {
        // 3:05 is a time of day.
        if let [Token { tok: Tok::Num(numeral), .. }] = part
            && numeral.whole.len() > 1
            && numeral.whole.starts_with('0')
        {
            return Ok(Answer::Text { words: words(tokens), broken: None });
        }
        parts.push(quantity(part, budget)?.expr);
        if parts.len() > MAX_SIGN_CHOICES {
            return Err(Stop::OverBudget("a ratio of more than 16 parts"));
        }
    }
    Ok(Answer::Ratio(parts))
}

fn scalar(tokens: &[Token], budget: &mut Budget) -> Step<Answer> {
    let value = quantity(tokens, budget)?;
    let choices = sign_choices(&value.expr)?;
    if choices.len() == 1 {
        return Ok(Answer::Scalar(value));
    }
    let with_sign = |expr| Answer::Scalar(Quantity { expr, unit: value.unit.clone(), as_measure: None });
    Ok(Answer::Set(choices.into_iter().map(with_sign).collect()))
}

/// Every value an expression with ± stands for; ± and ∓ together go by one choice, several ± are independent.
fn sign_choices(expr: &Expr) -> Step<Vec<Expr>> {
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

/// The tokens as lower-case words.
pub(super) fn words(tokens: &[Token]) -> String {
    let mut words: Vec<String> = Vec::new();
    for token in tokens {
        match &token.tok {
            Tok::Word(word) | Tok::Letter(word) => words.push(word.to_lowercase()),
            Tok::Num(numeral) => words.push(numeral.whole.clone()),
            Tok::I => words.push("i".into()),
            Tok::E => words.push("e".into()),
            Tok::Colon => words.push(":".into()),
            _ => {}
        }
    }
    words.join(" ")
}
