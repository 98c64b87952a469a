//! LaTeX macros and environments.

use super::numeral::Numeral;
use super::symbols::{self, Macro};
use super::token::{Bracket, Lines, Rel, Tok, Token};
use super::{GroupKind, Lexer};
use crate::budget::{Bounded, unreadable};
use crate::expr::Func;

impl Lexer<'_> {
    /// A backslash and the name of a macro.
    pub(super) fn escape(&mut self) -> Bounded<()> {
        if self.is_doubled_here() {
            self.pos += 1;
        }
        let start = self.pos + 1;
        let mut end = start;
        while self.chars.get(end).is_some_and(char::is_ascii_alphabetic) {
            end += 1;
        }
        if end == start {
            end = (start + 1).min(self.chars.len());
        }
        let mut name: String = self.chars[start..end].iter().collect();
        name.truncate(symbols::unglued(&name));
        self.pos = start + name.chars().count();
        match name.as_str() {
            "begin" | "end" => return self.environment(&name),
            "mathbb" | "Bbb" => {
                self.number_set();
                return Ok(());
            }
            "lg" => {
                self.push(Tok::Func(Func::Log));
                self.push(Tok::Under);
                self.push(Tok::Num(Numeral { whole: "10".into(), ..Numeral::default() }));
                return Ok(());
            }
            // A cross product does not commute and is no product of numbers.
            "times" if self.is_after_vector() => {
                self.push(Tok::Other("\\times".into()));
                return Ok(());
            }
            // `45\circ` has lost its caret; `f\circ g` composes functions.
            "circ" if !self.is_after_value() => {
                self.push(Tok::Other("\\circ".into()));
                return Ok(());
            }
            "left" if self.opens_lines() => return Ok(()),
            "not" if self.at("=") => {
                self.pos += 1;
                self.push(Tok::Rel(Rel::Ne));
                return Ok(());
            }
            _ => {}
        }
        match symbols::macro_named(&name) {
            Macro::Token(tok) => self.push(tok),
            Macro::Space => {
                self.is_spaced = true;
                self.is_apart |= matches!(name.as_str(), "quad" | "qquad" | "newline" | "par");
            }
            Macro::Nothing => {}
            Macro::Text => self.group(GroupKind::Text),
            Macro::Upright => self.group(GroupKind::Upright),
            Macro::Transparent => self.group(GroupKind::Transparent),
            Macro::Discard => self.discard_group()?,
            Macro::Sized => {
                while self.chars.get(self.pos).is_some_and(|c| c.is_whitespace()) {
                    self.pos += 1;
                }
                if self.chars.get(self.pos) == Some(&'.') {
                    self.pos += 1;
                }
            }
        }
        Ok(())
    }

    /// Whether two backslashes are before the name of a known macro: `\\\\frac12`. Inside an environment they end a row.
    fn is_doubled_here(&mut self) -> bool {
        if !self.at("\\\\") || (self.has_rows && !self.is_doubled) {
            return false;
        }
        let rest = &self.chars[self.pos + 2..];
        let name: String = rest.iter().take_while(|c| c.is_ascii_alphabetic()).collect();
        let is_macro = name.len() > 1 && (name == "begin" || symbols::is_known(&name));
        self.is_doubled |= is_macro;
        is_macro
    }

    /// Whether the last token ends a vector: `\vec{a}`, `\vec a`.
    fn is_after_vector(&self) -> bool {
        let is_vector = |token: &Token| token.tok == Tok::Accent("vec");
        match self.out.as_slice() {
            [.., accent, Token { tok: Tok::Letter(_), .. }] => is_vector(accent),
            [.., accent, open, _, Token { tok: Tok::Close(Bracket::Brace), .. }] => {
                open.tok == Tok::Open(Bracket::Brace) && is_vector(accent)
            }
            _ => false,
        }
    }

    /// Whether the last token ends a number or a group, and no letter follows.
    fn is_after_value(&self) -> bool {
        let next = self.chars[self.pos..].iter().find(|c| !c.is_whitespace());
        matches!(self.out.last().map(|token| &token.tok), Some(Tok::Num(_) | Tok::Close(_)))
            && !next.is_some_and(char::is_ascii_alphabetic)
    }

    /// Whether `\{` follows, opens a column of lines and has no closing brace: `\left\{\begin{array}{l} … \right.`.
    fn opens_lines(&mut self) -> bool {
        let rest: String = self.chars[self.pos..].iter().filter(|c| !c.is_whitespace()).take(14).collect();
        let is_open = rest == r"\{\begin{array" && {
            let text: String = self.chars[self.pos..].iter().collect();
            text.contains(r"\right.") || text.contains(r"\right .")
        };
        if is_open {
            self.skip_past(r"\{", false);
            self.is_column = true;
        }
        is_open
    }

    /// `\mathbb{R}` becomes the word `reals`, `\mathbb{N}^*` the word `positives`, `\mathbb{R}^+` an interval.
    fn number_set(&mut self) {
        let rest: String = self.chars[self.pos..].iter().take(8).filter(|c| !c.is_whitespace()).collect();
        let letter = rest.trim_start_matches('{').chars().next().unwrap_or(' ');
        let word = match letter {
            'R' => "reals",
            'Z' => "integers",
            'Q' => "rationals",
            'N' => "naturals",
            'C' => "complexes",
            _ => return,
        };
        self.skip_past(&letter.to_string(), rest.starts_with('{'));
        match (letter, self.takes_positive_sign()) {
            ('N' | 'Z', true) => self.push(Tok::Word("positives".into())),
            ('R', true) => {
                let zero = Tok::Num(Numeral { whole: "0".into(), ..Numeral::default() });
                let round = Bracket::Round;
                for tok in [Tok::Open(round), zero, Tok::Comma, Tok::Infinity, Tok::Close(round)] {
                    self.push(tok);
                }
            }
            _ => self.push(Tok::Word(word.into())),
        }
    }

    /// Takes the mark of the positive numbers after a set: `^+`, `_{+}`, and `^*`, which leaves out zero.
    fn takes_positive_sign(&mut self) -> bool {
        let is_natural = self.chars[..self.pos].iter().rev().find(|c| c.is_alphabetic()) == Some(&'N');
        let found = ["^+", "^{+}", "_+", "_{+}", "_{>0}", "^*", "^{*}", r"^\ast", r"^{\ast}"]
            .into_iter()
            .find(|mark| self.at(mark) && (is_natural || !mark.contains(['*', 'a'])));
        self.pos += found.map_or(0, |mark| mark.chars().count());
        found.is_some()
    }

    /// Opens the group that follows a macro.
    fn group(&mut self, group: GroupKind) {
        while self.chars.get(self.pos).is_some_and(|c| c.is_whitespace()) {
            self.pos += 1;
        }
        if self.chars.get(self.pos) == Some(&'{') {
            self.pos += 1;
            self.groups.push(group);
            if group == GroupKind::Text {
                self.is_spaced = true;
            }
        }
    }

    /// Skips the group that follows a macro.
    fn discard_group(&mut self) -> Bounded<()> {
        if self.chars.get(self.pos) != Some(&'{') {
            return Ok(());
        }
        match self.chars[self.pos..].iter().position(|c| *c == '}') {
            Some(length) => self.pos += length + 1,
            None => return unreadable("a group that is never closed"),
        }
        Ok(())
    }

    /// Matrix environments such as `pmatrix` become tokens around their rows; column formats are dropped.
    fn environment(&mut self, word: &str) -> Bounded<()> {
        let Some(length) = self.chars[self.pos..].iter().take(24).position(|c| *c == '}') else {
            return unreadable("an environment without a name");
        };
        let name: String =
            self.chars[self.pos..self.pos + length].iter().filter(|c| c.is_alphabetic()).collect();
        self.pos += length + 1;
        self.has_rows = true;
        let is_column = name == "array"
            && if word == "begin" {
                self.columns.push(std::mem::take(&mut self.is_column));
                self.columns.last() == Some(&true)
            } else {
                self.columns.pop() == Some(true)
            };
        let is_matrix = name.ends_with("matrix") && name != "Vmatrix" || name == "array";
        if word == "begin" && name == "array" {
            let gap = self.chars[self.pos..].iter().take_while(|c| c.is_whitespace()).count();
            if self.chars.get(self.pos + gap) == Some(&'{') {
                self.pos += gap;
                self.discard_group()?;
            }
        }
        if !is_matrix || is_column {
            let lines = match name.as_str() {
                "cases" | "dcases" | "array" => Lines::Cases,
                "aligned" | "align" | "equation" | "gathered" | "split" => Lines::Aligned,
                _ => return unreadable(format!("the environment {name}")),
            };
            self.push(if word == "begin" { Tok::BeginLines(lines) } else { Tok::EndLines(lines) });
            return Ok(());
        }
        // Bars around a matrix mean its determinant.
        let has_bars = name == "vmatrix";
        if has_bars && word == "begin" {
            self.push(Tok::Bar);
        }
        self.push(if word == "begin" { Tok::Begin } else { Tok::End });
        if has_bars && word == "end" {
            self.push(Tok::Bar);
        }
        Ok(())
    }
}
