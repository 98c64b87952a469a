//! Answers that are words.

use crate::lex::token::{Bracket, Tok, Token};
use crate::units;

/// Letters that are often variables.
const VARIABLES: &str = "abcdhkmnpqrstuvwxyz";

/// Whether the tokens are words and nothing else.
pub(super) fn is_prose(tokens: &[Token]) -> bool {
    let is_variables = |word: &str| word.len() <= 3 && word.chars().all(|c| VARIABLES.contains(c));
    let n_words =
        tokens.iter().filter(|t| matches!(&t.tok, Tok::Word(w) if t.is_text || !is_variables(w))).count();
    let is_set_name = |word: &str| {
        matches!(word, "reals" | "integers" | "rationals" | "naturals" | "positives" | "complexes")
    };
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

/// Three small letters alone that may be variables. They may also be a word or an order of letters: cab is not bac.
pub(super) fn letter_run(tokens: &[Token]) -> Option<String> {
    match tokens {
        [Token { tok: Tok::Word(run), is_text: false, .. }]
            if run.len() == 3 && !units::is_word(run) && run.chars().all(|c| VARIABLES.contains(c)) =>
        {
            Some(run.clone())
        }
        _ => None,
    }
}

/// Whether tokens that cannot be read as mathematics are mostly words, so that the answer is wrong and not unparsable.
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

/// Whether the token is the word `and` or `or`, or the sign of logic for one of them.
pub(super) fn is_joint(token: &Token) -> bool {
    match &token.tok {
        Tok::Word(word) => {
            matches!(word.to_lowercase().as_str(), "and" | "or" | "或" | "或者" | "且" | "并且" | "和" | "与")
        }
        Tok::Other(sign) => matches!(sign.as_str(), "\\land" | "\\lor"),
        _ => false,
    }
}

/// The tokens as one text that leaves out white space and nothing else.
pub(super) fn spelled(tokens: &[Token]) -> String {
    tokens.iter().map(|token| token.tok.spelled()).collect::<Vec<_>>().join(" ")
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
            Tok::Minus => words.push("-".into()),
            Tok::Prime => words.push("'".into()),
            _ => {}
        }
    }
    words.join(" ")
}
