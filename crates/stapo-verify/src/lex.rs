//! From the text of an answer to tokens: LaTeX, plain text and unicode signs come out the same.

mod macros;
pub(crate) mod numeral;
pub(crate) mod symbols;
pub(crate) mod token;
mod words;

use crate::Rounding;
use crate::budget::{Bounded, MAX_ANSWER_BYTES, Stop, unreadable};
use numeral::Numeral;
use token::{Bracket, Rel, Tok, Token};

/// What the text alone does not say about its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Notation {
    pub(crate) commas: Commas,
    pub(crate) rounding: Rounding,
}

/// The meaning of a plain comma between digits, outside brackets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Commas {
    /// `1,000` is one thousand.
    #[default]
    Thousands,
    /// `1,000` is one and zero.
    Separate,
}

/// Cuts `text` into tokens. Braces and brackets need not match yet, except those of text macros.
pub(crate) fn tokens(text: &str, notation: Notation) -> Bounded<Vec<Token>> {
    if text.len() > MAX_ANSWER_BYTES {
        return Err(Stop::OverBudget("an answer of more than 16 KiB"));
    }
    let chars: Vec<char> = text.chars().map(symbols::narrow).collect();
    let n_dollars = chars.iter().enumerate().filter(|(i, c)| **c == '$' && !is_escaped(&chars, *i)).count();
    let mut lexer = Lexer {
        chars: &chars,
        pos: 0,
        out: Vec::new(),
        groups: Vec::new(),
        is_spaced: false,
        is_apart: false,
        n_brackets: 0,
        notation,
        has_lone_dollar: n_dollars % 2 == 1,
        has_rows: false,
        is_doubled: false,
        is_column: false,
        columns: Vec::new(),
    };
    while lexer.pos < chars.len() {
        lexer.step()?;
    }
    if lexer.groups.iter().any(|group| *group != GroupKind::Math) {
        return unreadable("a text group that is never closed");
    }
    words::resolve_letters(&mut lexer.out);
    Ok(lexer.out)
}

/// The kind of group that an open brace has started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GroupKind {
    Math,
    Text,
    Upright,
    Transparent,
}

#[allow(clippy::struct_excessive_bools, reason = "each is a fact of its own about the text so far")]
struct Lexer<'a> {
    chars: &'a [char],
    pos: usize,
    out: Vec<Token>,
    groups: Vec<GroupKind>,
    is_spaced: bool,
    is_apart: bool,
    /// Open brackets other than braces.
    n_brackets: usize,
    notation: Notation,
    has_lone_dollar: bool,
    /// Whether an environment has been opened, in which two backslashes end a row.
    has_rows: bool,
    /// Whether the text doubles its backslashes, as text that was escaped twice does.
    is_doubled: bool,
    /// Whether the array that begins next is a column of lines after one brace.
    is_column: bool,
    /// For each open array, whether it is such a column.
    columns: Vec<bool>,
}

impl Lexer<'_> {
    fn step(&mut self) -> Bounded<()> {
        let c = self.chars[self.pos];
        if c.is_whitespace()
            || matches!(c, '~' | '\u{200b}' | '\u{feff}' | '\u{200c}' | '\u{200d}' | '\u{2060}')
        {
            self.pos += 1;
            self.is_spaced = true;
            return Ok(());
        }
        if self.is_prefixed() {
            return unreadable("a number of a programming language");
        }
        if self.hex_numeral() || self.number() {
            return Ok(());
        }
        match c {
            '\\' => self.escape(),
            '$' => {
                self.dollar();
                Ok(())
            }
            '{' if self.at("{:}") => {
                self.pos += 3;
                self.push(Tok::Colon);
                Ok(())
            }
            '{' | '}' => self.brace(c),
            '^' => {
                self.raised();
                Ok(())
            }
            'a'..='z' | 'A'..='Z' => {
                self.letters();
                Ok(())
            }
            _ => self.other_sign(c),
        }
    }

    fn push(&mut self, tok: Tok) {
        match tok {
            Tok::Open(bracket) if bracket != Bracket::Brace => self.n_brackets += 1,
            Tok::Close(bracket) if bracket != Bracket::Brace => {
                self.n_brackets = self.n_brackets.saturating_sub(1);
            }
            _ => {}
        }
        let is_text = matches!(self.groups.last(), Some(GroupKind::Text | GroupKind::Upright));
        let is_spaced = std::mem::take(&mut self.is_spaced);
        let is_apart = std::mem::take(&mut self.is_apart);
        self.out.push(Token { tok, is_spaced, is_apart, is_text });
    }

    fn at(&self, text: &str) -> bool {
        text.chars().enumerate().all(|(i, c)| self.chars.get(self.pos + i) == Some(&c))
    }

    fn number(&mut self) -> bool {
        let groups = self.notation.commas == Commas::Thousands && self.n_brackets == 0;
        let starts_number = self.chars[self.pos].is_ascii_digit()
            || (self.chars[self.pos] == '.'
                && self.chars.get(self.pos + 1).is_some_and(char::is_ascii_digit));
        if !starts_number {
            return false;
        }
        let Some((numeral, next)) = numeral::scan(self.chars, self.pos, groups) else { return false };
        self.pos = next;
        self.push(Tok::Num(Numeral { rounding: self.notation.rounding, ..numeral }));
        true
    }

    /// Digits with letters before a subscript between 11 and 36: `1A3_{16}`.
    fn hex_numeral(&mut self) -> bool {
        let start = self.pos;
        let is_digit = |c: &&char| c.is_ascii_digit() || c.is_ascii_uppercase();
        let n = self.chars[start..].iter().take_while(is_digit).count();
        let run: String = self.chars[start..start + n].iter().collect();
        if n == 0
            || run.bytes().all(|b| b.is_ascii_digit())
            || !run.bytes().any(|b| b.is_ascii_digit()) && n < 2
        {
            return false;
        }
        let is_text = matches!(self.groups.last(), Some(GroupKind::Text | GroupKind::Upright));
        let rest: String = self.chars[start + n..].iter().take(6).filter(|c| **c != ' ').collect();
        let rest = rest.strip_prefix('}').filter(|_| is_text).unwrap_or(&rest);
        let Some(rest) = rest.strip_prefix('_') else { return false };
        let digits: String = rest.trim_start_matches('{').chars().take_while(char::is_ascii_digit).collect();
        let Ok(base) = digits.parse::<u32>() else { return false };
        let fits = run.chars().all(|c| c.is_digit(base.clamp(2, 36)));
        if !(11..=36).contains(&base) || !fits {
            return false;
        }
        self.pos = start + n;
        self.push(Tok::Num(Numeral { whole: run, base: Some(base), ..Numeral::default() }));
        true
    }

    /// Whether a number with the mark of its base begins here: `0x1A`, `0b101`.
    fn is_prefixed(&self) -> bool {
        let [first, mark, digit, ..] = &self.chars[self.pos..] else { return false };
        let is_number_before = self.pos > 0
            && (self.chars[self.pos - 1].is_ascii_alphanumeric() || self.chars[self.pos - 1] == '.');
        *first == '0'
            && matches!(mark, 'x' | 'X' | 'b' | 'o')
            && digit.is_ascii_hexdigit()
            && !is_number_before
    }

    fn dollar(&mut self) {
        self.pos += 1;
        let before_number = self.chars[self.pos..]
            .iter()
            .find(|c| !c.is_whitespace())
            .is_some_and(|c| c.is_ascii_digit() || *c == '.');
        if self.has_lone_dollar && before_number {
            self.has_lone_dollar = false;
            self.push(Tok::Currency("dollar"));
        }
    }

    fn brace(&mut self, c: char) -> Bounded<()> {
        self.pos += 1;
        if c == '{' {
            self.groups.push(GroupKind::Math);
            self.push(Tok::Open(Bracket::Brace));
            return Ok(());
        }
        match self.groups.pop() {
            Some(GroupKind::Math) => self.push(Tok::Close(Bracket::Brace)),
            Some(GroupKind::Text | GroupKind::Upright) => self.is_spaced = true,
            Some(GroupKind::Transparent) => {}
            None => return unreadable("a closing brace without an opening one"),
        }
        Ok(())
    }

    /// A caret; `^\circ` and `^\prime` are one sign each.
    fn raised(&mut self) {
        let rest: String =
            self.chars[self.pos + 1..].iter().take(32).filter(|c| !c.is_whitespace()).collect();
        let is_braced = rest.starts_with('{');
        let inner = rest.trim_start_matches('{');
        for (sign, tok) in [("\\circ", Tok::Degree), ("\\degree", Tok::Degree), ("°", Tok::Degree)] {
            if let Some(after) = inner.strip_prefix(sign)
                && (!is_braced || after.starts_with('}'))
            {
                self.skip_past(sign, is_braced);
                self.push(tok);
                return;
            }
        }
        if inner.starts_with("\\prime") || (is_braced && inner.starts_with('\'')) {
            let until = if is_braced { inner.find('}').unwrap_or(0) } else { "\\prime".len() };
            let n_primes = inner[..until].matches("\\prime").count() + inner[..until].matches('\'').count();
            let is_only_primes = inner[..until].replace("\\prime", "").replace('\'', "").is_empty();
            if is_only_primes {
                for _ in 0..n_primes {
                    let sign = if self.chars[self.pos..].contains(&'\'') && !rest.contains("\\prime") {
                        "'"
                    } else {
                        "\\prime"
                    };
                    self.skip_past(sign, false);
                    self.push(Tok::Prime);
                }
                if is_braced {
                    self.skip_past("}", false);
                }
                return;
            }
        }
        self.pos += 1;
        self.push(Tok::Caret);
    }

    /// Moves after the next `sign`, and with `and_brace` after the next closing brace.
    fn skip_past(&mut self, sign: &str, and_brace: bool) {
        while self.pos < self.chars.len() && !self.at(sign) {
            self.pos += 1;
        }
        self.pos += sign.chars().count();
        if and_brace {
            while self.pos < self.chars.len() && self.chars[self.pos] != '}' {
                self.pos += 1;
            }
            self.pos += 1;
        }
        self.pos = self.pos.min(self.chars.len());
    }

    fn other_sign(&mut self, c: char) -> Bounded<()> {
        self.pos += 1;
        if let Some((numerator, denominator)) = symbols::vulgar_fraction(c) {
            self.push(Tok::Frac);
            for part in [numerator, denominator] {
                self.push(Tok::Open(Bracket::Brace));
                self.push(Tok::Num(Numeral { whole: part.into(), ..Numeral::default() }));
                self.push(Tok::Close(Bracket::Brace));
            }
            return Ok(());
        }
        if symbols::superscript(c).is_some() {
            return self.script(c, Tok::Caret, symbols::superscript);
        }
        if symbols::subscript(c).is_some() {
            return self.script(c, Tok::Under, symbols::subscript);
        }
        match c {
            '.' if self.at("..") => {
                self.pos += 2;
                self.push(Tok::Dots);
            }
            '*' if self.at("*") => {
                self.pos += 1;
                self.push(Tok::Caret);
            }
            '<' | '>' | '!' | '≤' | '≥' if self.at("=") => {
                self.pos += 1;
                let rel = match c {
                    '<' | '≤' => Rel::Le,
                    '!' => Rel::Ne,
                    _ => Rel::Ge,
                };
                self.push(Tok::Rel(rel));
            }
            '+' if self.at("/-") => {
                self.pos += 2;
                self.push(Tok::PlusMinus);
            }
            '=' | ':' if self.at("=") => {
                self.pos += 1;
                self.push(Tok::Rel(Rel::Eq));
            }
            _ => match symbols::sign(c) {
                Some(tok) => self.push(tok),
                None if c.is_alphabetic() => self.foreign_word(),
                None => self.push(Tok::Other(c.to_string())),
            },
        }
        Ok(())
    }

    /// Raised or lowered characters as a group: `x²³` is `x^{23}`.
    fn script(&mut self, first: char, opening: Tok, plain: fn(char) -> Option<char>) -> Bounded<()> {
        let mut inner = String::from(plain(first).unwrap_or(first));
        while let Some(c) = self.chars.get(self.pos).and_then(|c| plain(*c)) {
            inner.push(c);
            self.pos += 1;
        }
        self.push(opening);
        self.push(Tok::Open(Bracket::Brace));
        let inside = tokens(&inner, Notation { commas: Commas::Separate, ..self.notation })?;
        self.out.extend(inside);
        self.push(Tok::Close(Bracket::Brace));
        Ok(())
    }
}

fn is_escaped(chars: &[char], at: usize) -> bool {
    chars[..at].iter().rev().take_while(|c| **c == '\\').count() % 2 == 1
}
