//! Multiple-choice letters inside mathematical answers.

use super::chain::is_separator;
use super::prose::is_joint;
use crate::lex::token::{Bracket, Tok, Token};

/// The letter of `(B)`, `B`, `B.` or `(B) 12`, and the tokens of the value after the letter, if any.
pub(super) fn choice(tokens: &[Token]) -> Option<(char, &[Token])> {
    let tokens = match tokens {
        [Token { tok: Tok::Word(word), .. }, rest @ ..]
            if !rest.is_empty() && matches!(word.to_lowercase().as_str(), "choice" | "option") =>
        {
            rest
        }
        _ => tokens,
    };
    let (letter, rest) = match tokens {
        [one] => (letter_of(one), &tokens[1..]),
        [
            Token { tok: Tok::Open(Bracket::Round), .. },
            one,
            Token { tok: Tok::Close(Bracket::Round), .. },
            rest @ ..,
        ] => (letter_of(one), rest),
        [one, Token { tok: Tok::Close(Bracket::Round) | Tok::Colon, .. }, rest @ ..] => {
            (letter_of(one), rest)
        }
        [one, Token { tok: Tok::Other(sign), .. }, rest @ ..] if sign == "." => (letter_of(one), rest),
        _ => (None, tokens),
    };
    let letter = letter?;
    let Some(first) = rest.first() else { return Some((letter, rest)) };
    if names_another(rest) {
        return None;
    }
    let starts_value =
        matches!(first.tok, Tok::Num(_) | Tok::Frac | Tok::Currency(_) | Tok::Word(_) | Tok::Sqrt)
            || (first.is_spaced
                && matches!(first.tok, Tok::Open(_) | Tok::Letter(_) | Tok::Pi | Tok::Minus | Tok::Func(_)));
    let is_ratio = tokens[1].tok == Tok::Colon && !first.is_spaced;
    (starts_value && !is_ratio).then_some((letter, rest))
}

fn letter_of(token: &Token) -> Option<char> {
    match &token.tok {
        Tok::Letter(name) | Tok::Word(name) => match name.as_bytes() {
            [letter @ b'A'..=b'H'] => Some(char::from(*letter)),
            _ => None,
        },
        _ => None,
    }
}

/// Whether the tokens after a letter name a further letter: `(A) or (B)`, `(A) (B)`, `A. 5, B. 6`.
fn names_another(rest: &[Token]) -> bool {
    let starts_part = |i: usize| i == 0 || is_separator(&rest[i - 1]);
    is_joint(&rest[0])
        || (0..rest.len()).any(|i| {
            let is_letter = |at: usize| rest.get(at).is_some_and(|token| letter_of(token).is_some());
            let is_mark = |at: usize| match rest.get(at).map(|token| &token.tok) {
                None | Some(Tok::Close(Bracket::Round) | Tok::Colon) => true,
                Some(Tok::Other(sign)) => sign == ".",
                _ => false,
            };
            let is_bracketed = rest[i].tok == Tok::Open(Bracket::Round)
                && is_letter(i + 1)
                && rest.get(i + 2).is_some_and(|token| token.tok == Tok::Close(Bracket::Round));
            // A list of options side by side: `A. 5 B. 6`, `(A) 5 (B) 6`.
            let is_option =
                rest[i].is_spaced && (is_bracketed || (is_letter(i) && is_mark(i + 1) && i + 1 < rest.len()));
            // "The answer could be B"
            let ends_words = i > 0
                && i + 1 == rest.len()
                && rest[i].is_spaced
                && is_letter(i)
                && matches!(rest[i - 1].tok, Tok::Word(_));
            (starts_part(i) && (is_bracketed || (is_letter(i) && is_mark(i + 1)))) || is_option || ends_words
        })
}
