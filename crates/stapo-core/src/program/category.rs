//! What a sampled token is within a Python program, from a small lexer.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The kind of source text that a sampled token is part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TokenCategory {
    Identifier,
    Keyword,
    /// A number or a string; docstrings are strings.
    Literal,
    /// An operator, a delimiter or a bracket.
    Operator,
    Comment,
    /// Blanks, indentation and line ends.
    Whitespace,
    /// Text of the response outside the program.
    Prose,
}

impl TokenCategory {
    pub const ALL: [Self; 7] = [
        Self::Identifier,
        Self::Keyword,
        Self::Literal,
        Self::Operator,
        Self::Comment,
        Self::Whitespace,
        Self::Prose,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Identifier => "identifier",
            Self::Keyword => "keyword",
            Self::Literal => "literal",
            Self::Operator => "operator",
            Self::Comment => "comment",
            Self::Whitespace => "whitespace",
            Self::Prose => "prose",
        }
    }
}

/// The words that Python 3 reserves.
const KEYWORDS: [&str; 35] = [
    "False", "None", "True", "and", "as", "assert", "async", "await", "break", "class", "continue", "def",
    "del", "elif", "else", "except", "finally", "for", "from", "global", "if", "import", "in", "is",
    "lambda", "nonlocal", "not", "or", "pass", "raise", "return", "try", "while", "with", "yield",
];

/// The category of the bytes `from..to` of a response whose program is `source`: that of the first character that is not
/// blank.
pub fn category_in_response(response: &str, source: &str, from: usize, to: usize) -> TokenCategory {
    // A program is a part of its response, or begins with the prompt and ends with the response.
    let (shift, end) = match response.rfind(source).filter(|_| !source.is_empty()) {
        Some(start) if start <= from && from < start + source.len() => (-(start as isize), to - start),
        None if source.ends_with(response) => {
            let prompt = source.len() - response.len();
            (prompt as isize, to + prompt)
        }
        _ => return TokenCategory::Prose,
    };
    category_at(source, from.saturating_add_signed(shift), end.min(source.len()))
}

fn category_at(source: &str, from: usize, to: usize) -> TokenCategory {
    let covered = lexed(source).into_iter().filter(|lexeme| lexeme.end > from && lexeme.start < to);
    let category = |lexeme: Lexeme| lexeme.category;
    covered
        .map(category)
        .find(|found| *found != TokenCategory::Whitespace)
        .unwrap_or(TokenCategory::Whitespace)
}

/// A run of bytes of one category.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Lexeme {
    start: usize,
    end: usize,
    category: TokenCategory,
}

/// The lexemes of a program, which cover its bytes. A program that Python refuses is read as far as it goes: a string that
/// is not closed reaches to the end of its line, or of the program.
fn lexed(source: &str) -> Vec<Lexeme> {
    let mut lexemes = Vec::new();
    let mut start = 0;
    while let Some(first) = source[start..].chars().next() {
        let rest = &source[start..];
        let run = |is: &dyn Fn(char) -> bool| rest.find(|c| !is(c)).unwrap_or(rest.len());
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        let (category, length) = if let Some(length) = string_length(rest) {
            (TokenCategory::Literal, length)
        } else if first.is_whitespace() {
            (TokenCategory::Whitespace, run(&char::is_whitespace))
        } else if first == '#' {
            (TokenCategory::Comment, run(&|c| c != '\n'))
        } else if first.is_ascii_digit()
            || first == '.' && rest[1..].starts_with(|c: char| c.is_ascii_digit())
        {
            (TokenCategory::Literal, run(&|c| is_word(c) || c == '.'))
        } else if is_word(first) {
            let length = run(&is_word);
            let is_keyword = KEYWORDS.contains(&&rest[..length]);
            (if is_keyword { TokenCategory::Keyword } else { TokenCategory::Identifier }, length)
        } else {
            (TokenCategory::Operator, first.len_utf8())
        };
        lexemes.push(Lexeme { start, end: start + length, category });
        start += length;
    }
    lexemes
}

/// The length of the string literal that a text begins with, its prefix included.
fn string_length(text: &str) -> Option<usize> {
    let prefix = text.find(['"', '\'']).filter(|&at| at <= 2)?;
    if !text[..prefix].chars().all(|c| "rRbBuUfF".contains(c)) {
        return None;
    }
    let quote = &text[prefix..=prefix];
    let triple = quote.repeat(3);
    let is_triple = text[prefix..].starts_with(&triple);
    let closing = if is_triple { triple.as_str() } else { quote };
    let mut at = prefix + closing.len();
    while let Some(c) = text[at..].chars().next() {
        if text[at..].starts_with(closing) {
            return Some(at + closing.len());
        }
        if c == '\n' && !is_triple {
            return Some(at);
        }
        at += c.len_utf8();
        if c == '\\' {
            at += text[at..].chars().next().map_or(0, char::len_utf8);
        }
    }
    Some(text.len())
}

#[cfg(test)]
pub(super) fn words(source: &str) -> Vec<(&str, TokenCategory)> {
    lexed(source).into_iter().map(|lexeme| (&source[lexeme.start..lexeme.end], lexeme.category)).collect()
}
