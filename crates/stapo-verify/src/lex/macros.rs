//! LaTeX macros and environments.

use super::numeral::Numeral;
use super::symbols::{self, Macro};
use super::token::{Lines, Rel, Tok};
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
        let name: String = self.chars[start..end].iter().collect();
        self.pos = end;
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

    /// Whether two backslashes stand before the name of a known macro: `\\\\frac12`. Inside an environment they end a row.
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

    /// `\mathbb{R}` becomes the word `reals`, and so on.
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
        self.push(Tok::Word(word.into()));
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
        let is_matrix = name.ends_with("matrix") && name != "Vmatrix" || name == "array";
        if !is_matrix {
            let lines = match name.as_str() {
                "cases" | "dcases" => Lines::Cases,
                "aligned" | "align" | "equation" | "gathered" | "split" => Lines::Aligned,
                _ => return unreadable(format!("the environment {name}")),
            };
            self.push(if word == "begin" { Tok::BeginLines(lines) } else { Tok::EndLines(lines) });
            return Ok(());
        }
        if word == "begin" && name == "array" && self.chars.get(self.pos) == Some(&'{') {
            self.discard_group()?;
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
