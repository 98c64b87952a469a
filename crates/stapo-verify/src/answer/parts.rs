//! Brackets and separators: where the parts of an answer begin and end.

use crate::budget::{Bounded, unreadable};
use crate::lex::token::{Bracket, Tok, Token};

/// `tokens` without the braces around all of them and without punctuation at the end.
pub(super) fn trimmed(tokens: &[Token]) -> &[Token] {
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
    // The innermost braces stay where commas separate elements inside them: {1, 2} is a set.
    let inside = &tokens[n_layers..tokens.len() - n_layers];
    let keeps_one = n_layers > 0 && (inside.is_empty() || has_top_comma(inside));
    let n_peeled = n_layers - usize::from(keeps_one);
    &tokens[n_peeled..tokens.len() - n_peeled]
}

/// `tokens` without "for all x" or "for every real x" at their end: the answer before it holds everywhere.
pub(super) fn unquantified(tokens: &[Token]) -> &[Token] {
    const KINDS: [&str; 6] = ["real", "positive", "integer", "integers", "natural", "nonnegative"];
    let says = |token: &Token, words: &[&str]| match &token.tok {
        Tok::Word(word) => words.contains(&word.to_lowercase().as_str()),
        _ => false,
    };
    let starts =
        |pair: &[Token]| says(&pair[0], &["for"]) && says(&pair[1], &["all", "any", "every", "each"]);
    let Some(at) = tokens.windows(2).position(starts).filter(|at| *at > 0) else { return tokens };
    let rest = &tokens[at + 2..];
    let n_kinds = rest.iter().take_while(|token| says(token, &KINDS)).count();
    let is_quantifier = matches!(
        &rest[n_kinds..],
        [Token { tok: Tok::Letter(_), .. }]
            | [
                Token { tok: Tok::Letter(_), .. },
                Token { tok: Tok::In, .. },
                Token { tok: Tok::Word(_), .. }
            ]
    );
    if is_quantifier { trimmed(&tokens[..at]) } else { tokens }
}

/// How many pairs of braces enclose all of the tokens.
fn n_brace_layers(tokens: &[Token]) -> usize {
    let n_leading = tokens.iter().take_while(|token| token.tok == Tok::Open(Bracket::Brace)).count();
    if n_leading == 0 {
        return 0;
    }
    // A pair encloses everything if it stays open over all tokens in the middle, so the lowest depth reached there
    // bounds the number of such pairs.
    let n_trailing = tokens.iter().rev().take_while(|token| token.tok == Tok::Close(Bracket::Brace)).count();
    let mut depth = n_leading;
    let mut lowest = n_leading;
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

/// How many brackets are open around each token. A bracket is not counted as being inside its own pair.
pub(super) fn depths(tokens: &[Token]) -> Bounded<Vec<u32>> {
    let mut stack: Vec<Bracket> = Vec::new();
    let mut n_matrices = 0u32;
    let mut depths = Vec::with_capacity(tokens.len());
    for token in tokens {
        match token.tok {
            Tok::Close(close) => match stack.pop() {
                Some(open) if matches(open, close) => {}
                _ => return unreadable("brackets that do not match"),
            },
            Tok::End | Tok::EndLines(_) => n_matrices = n_matrices.saturating_sub(1),
            _ => {}
        }
        depths.push(stack.len() as u32 + n_matrices);
        match token.tok {
            Tok::Open(open) => stack.push(open),
            Tok::Begin | Tok::BeginLines(_) => n_matrices += 1,
            _ => {}
        }
    }
    if !stack.is_empty() || n_matrices > 0 {
        return unreadable("a bracket that is never closed");
    }
    Ok(depths)
}

/// Intervals with a bracket turned outwards at an end that is left out, such as `]1,2[`, with round brackets in its place;
/// `None` if the square brackets do not enclose the two ends of intervals.
pub(super) fn turned(tokens: &[Token]) -> Option<Vec<Token>> {
    let mut n_commas: Option<usize> = None;
    let mut turned = Vec::with_capacity(tokens.len());
    for token in tokens {
        let tok = match (&token.tok, n_commas) {
            (Tok::Open(Bracket::Square), None) => Tok::Open(Bracket::Square),
            (Tok::Close(Bracket::Square), None) => Tok::Open(Bracket::Round),
            (Tok::Open(Bracket::Square), Some(1)) => Tok::Close(Bracket::Round),
            (Tok::Close(Bracket::Square), Some(1)) => Tok::Close(Bracket::Square),
            (Tok::Open(Bracket::Square) | Tok::Close(Bracket::Square), Some(_)) => return None,
            (other, _) => other.clone(),
        };
        n_commas = match (&tok, n_commas) {
            (Tok::Open(Bracket::Square | Bracket::Round), None) => Some(0),
            (Tok::Close(Bracket::Square | Bracket::Round), Some(1)) => None,
            (Tok::Comma | Tok::Semicolon, Some(n)) => Some(n + 1),
            (_, n) => n,
        };
        turned.push(Token { tok, ..token.clone() });
    }
    Some(turned).filter(|turned| n_commas.is_none() && depths(turned).is_ok())
}

/// Round and square brackets may close each other, as in half-open intervals.
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
