//! Runs of letters.

use super::token::Tok;
use super::{Group, Lexer};
use crate::expr::Func;
use crate::units;

impl Lexer<'_> {
    /// A run of letters: a constant, a function, a variable or a word.
    pub(super) fn letters(&mut self) {
        let n = self.chars[self.pos..].iter().take_while(|c| c.is_ascii_alphabetic()).count();
        let run: String = self.chars[self.pos..self.pos + n].iter().collect();
        // "math.pi", "np.sqrt(2)"
        let is_module = matches!(run.as_str(), "np" | "math" | "sympy" | "sp")
            && self.chars.get(self.pos + n) == Some(&'.');
        self.pos += n;
        if is_module {
            self.pos += 1;
            return;
        }
        let group = self.groups.last().copied().unwrap_or(Group::Math);
        if group == Group::Upright
            && let Some(tok) = upright(&run)
        {
            return self.push(tok);
        }
        if matches!(group, Group::Text | Group::Upright) {
            return self.push(Tok::Word(run));
        }
        match run.as_str() {
            "sqrt" => self.push(Tok::Radical(2)),
            "cbrt" => self.push(Tok::Radical(3)),
            "pi" | "Pi" | "PI" => self.push(Tok::Pi),
            "inf" | "infty" | "infinity" | "Infinity" | "oo" => self.push(Tok::Infinity),
            "e" => self.push(Tok::E),
            "i" => self.push(Tok::I),
            _ => self.run_of_letters(run),
        }
    }

    fn run_of_letters(&mut self, run: String) {
        if let Some(func) = Func::named(&run) {
            return self.push(Tok::Func(func));
        }
        if run.len() == 1 {
            return self.push(Tok::Letter(run));
        }
        // sinx, cos2x, lnx
        for length in (2..run.len()).rev() {
            if run.len() - length <= 2
                && !units::is_word(&run)
                && let Some(func) = Func::named(&run[..length])
            {
                self.push(Tok::Func(func));
                self.pos -= run.len() - length;
                return;
            }
        }
        self.push(Tok::Word(run));
    }

    /// A word in letters other than a to z.
    pub(super) fn foreign_word(&mut self) {
        let start = self.pos - 1;
        while self.chars.get(self.pos).is_some_and(|c| c.is_alphabetic()) {
            self.pos += 1;
        }
        self.push(Tok::Word(self.chars[start..self.pos].iter().collect()));
    }
}

/// What an upright run is when it is no unit: a function, a constant, a variable.
fn upright(run: &str) -> Option<Tok> {
    if let Some(func) = Func::named(run) {
        return Some(Tok::Func(func));
    }
    match run {
        "e" => Some(Tok::E),
        "i" => Some(Tok::I),
        _ if run.len() == 1 && units::lookup(run).is_none() => Some(Tok::Letter(run.into())),
        _ => None,
    }
}
