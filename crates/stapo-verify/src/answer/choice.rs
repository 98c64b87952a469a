//! Multiple-choice letters inside mathematical answers.

use crate::lex::token::{Bracket, Tok, Token};

/// The letter of `(B)`, `B`, `B.` or `(B) 12`, and the tokens of the value behind the letter, if any.
pub(super) fn choice(tokens: &[Token]) -> Option<(char, &[Token])> {
    let tokens = match tokens {
        [Token { tok: Tok::Word(word), .. }, rest @ ..]
            if !rest.is_empty() && matches!(word.to_lowercase().as_str(), "choice" | "option") =>
        {
            rest
        }
        _ => tokens,
    };
    let letter_of = |token: &Token| match &token.tok {
        Tok::Letter(name) | Tok::Word(name) => match name.as_bytes() {
            [letter @ b'A'..=b'H'] => Some(char::from(*letter)),
            _ => None,
        },
        _ => None,
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
    let starts_value =
        matches!(first.tok, Tok::Num(_) | Tok::Frac | Tok::Currency(_) | Tok::Word(_) | Tok::Sqrt)
            || (first.is_spaced
                && matches!(first.tok, Tok::Open(_) | Tok::Letter(_) | Tok::Pi | Tok::Minus | Tok::Func(_)));
    let is_ratio = tokens[1].tok == Tok::Colon && !first.is_spaced;
    (starts_value && !is_ratio).then_some((letter, rest))
}
