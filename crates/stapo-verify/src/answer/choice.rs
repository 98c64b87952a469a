//! Multiple-choice letters inside mathematical answers.

use super::Answer;
use super::read::answer;
use crate::budget::{Budget, Step, Stop};
use crate::lex::token::{Bracket, Tok, Token};

/// `(B)`, `B`, `B.` or `(B) 12`.
pub(super) fn choice(tokens: &[Token], nesting: usize, budget: &mut Budget) -> Step<Option<Answer>> {
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
    let Some(letter) = letter else { return Ok(None) };
    let Some(first) = rest.first() else { return Ok(Some(Answer::Choice { letter, rest: None })) };
    let starts_value =
        matches!(first.tok, Tok::Num(_) | Tok::Frac | Tok::Currency(_) | Tok::Word(_) | Tok::Sqrt)
            || (first.is_spaced
                && matches!(first.tok, Tok::Open(_) | Tok::Letter(_) | Tok::Pi | Tok::Minus | Tok::Func(_)));
    if !starts_value || tokens[1].tok == Tok::Colon && !first.is_spaced {
        return Ok(None);
    }
    let rest = match answer(rest, nesting + 1, budget) {
        Ok(rest) => Some(Box::new(rest)),
        Err(Stop::OverBudget(why)) => return Err(Stop::OverBudget(why)),
        Err(_) => None,
    };
    Ok(Some(Answer::Choice { letter, rest }))
}
