//! The operands of an expression: numbers, names, groups, fractions and roots.

use super::Parser;
use crate::budget::{Bounded, unreadable};
use crate::expr::{Expr, Func};
use crate::lex::numeral::Numeral;
use crate::lex::token::{Bracket, Tok, Token};
use crate::units;
use dashu_ratio::RBig;

/// Largest set that `C_{10}^{3}` chooses from.
const MAX_COUNT: i64 = 1000;

/// Whether a run of letters is a product of one-letter variables rather than a word.
pub(super) fn splits(run: &str) -> bool {
    run.len() <= 4 && run.is_ascii() && !units::is_word(run)
}

impl Parser<'_> {
    pub(super) fn operand(&mut self) -> Bounded<Expr> {
        self.deeper(Self::operand_here)
    }

    fn operand_here(&mut self) -> Bounded<Expr> {
        let Some(token) = self.tokens.get(self.pos).cloned() else {
            return unreadable("something is missing at the end");
        };
        self.pos += 1;
        match token.tok {
            Tok::Num(numeral) => self.number(&numeral),
            Tok::Letter(name) => self.variable(name),
            Tok::Word(run) if run == "cis" => self.cis(),
            Tok::Word(run) if run.len() == 1 => self.variable(run),
            Tok::Word(run) if splits(&run) && !token.is_text => self.letters(&run),
            Tok::Pi => Ok(Expr::Pi),
            Tok::E => Ok(Expr::E),
            Tok::I => Ok(Expr::I),
            Tok::Infinity => Ok(Expr::Infinity),
            Tok::Frac => {
                let top = self.argument()?;
                let bottom = self.argument()?;
                Ok(Expr::product(vec![top, Expr::Inv(Box::new(bottom))]))
            }
            Tok::Binom => {
                let n = self.argument()?;
                let k = self.argument()?;
                Ok(Expr::Call(Func::Binomial, vec![n, k]))
            }
            Tok::Sqrt => self.root(),
            Tok::Radical(degree) => {
                let radicand = self.operand()?;
                Ok(Expr::Root(Box::new(radicand), Box::new(Expr::int(i64::from(degree)))))
            }
            Tok::Func(func) => self.function(func),
            Tok::Accent(mark) => self.accented(mark),
            Tok::Sum | Tok::Product => self.series(token.tok == Tok::Sum),
            Tok::Integral => self.integral(),
            Tok::Open(Bracket::Round) if self.digits_ahead().is_some() => {
                let numeral = self.digits_ahead().unwrap_or_default();
                self.pos += 2;
                self.number(&numeral)
            }
            Tok::Open(Bracket::Brace) if self.is_prescript() => {
                self.pos += 2;
                self.prescripted()
            }
            Tok::Under | Tok::Caret => self.prescripted(),
            Tok::Open(bracket) => self.group(bracket),
            Tok::Bar => {
                self.n_bars += 1;
                let inside = self.sum()?;
                self.n_bars -= 1;
                if !self.take(&Tok::Bar) {
                    return unreadable("a bar that is never closed");
                }
                Ok(Expr::Call(Func::Abs, vec![inside]))
            }
            other => unreadable(format!("{} where a value was expected", super::describe(&other))),
        }
    }

    /// `\\text{cis}\\,\\theta` is e^{iθ}, a complex number by its angle.
    fn cis(&mut self) -> Bounded<Expr> {
        let angle = self.deeper(Self::cis_angle)?;
        Ok(Expr::Pow(Box::new(Expr::E), Box::new(Expr::Mul(vec![Expr::I, angle]))))
    }

    fn cis_angle(&mut self) -> Bounded<Expr> {
        match self.function(Func::Exp)? {
            Expr::Call(Func::Exp, mut args) if args.len() == 1 => Ok(args.remove(0)),
            _ => unreadable("cis with a power"),
        }
    }

    /// A number, and the base written under it: `101_2`.
    fn number(&mut self, numeral: &Numeral) -> Bounded<Expr> {
        if self.peek() != Some(&Tok::Under) {
            return Ok(Expr::Num { value: numeral.value()?, is_decimal: numeral.is_decimal() });
        }
        self.pos += 1;
        let base = self.base()?;
        Ok(Expr::Num { value: numeral.in_base(base)?, is_decimal: false })
    }

    /// The digits of `(1011)_2`, after the opening bracket.
    fn digits_ahead(&self) -> Option<Numeral> {
        match (self.peek(), self.peek_at(1), self.peek_at(2)) {
            (Some(Tok::Num(numeral)), Some(Tok::Close(Bracket::Round)), Some(Tok::Under)) => {
                Some(numeral.clone())
            }
            _ => None,
        }
    }

    fn base(&mut self) -> Bounded<u32> {
        let is_group = self.take(&Tok::Open(Bracket::Brace));
        let is_round = self.take(&Tok::Open(Bracket::Round));
        if matches!(self.peek(), Some(Tok::Word(word)) if word == "base") {
            self.pos += 1;
        }
        let base = match self.peek() {
            Some(Tok::Num(numeral)) => numeral.whole.parse().ok(),
            Some(Tok::Word(word)) => base_named(&word.to_lowercase()),
            _ => None,
        };
        self.pos += 1;
        if is_round && !self.take(&Tok::Close(Bracket::Round)) {
            return unreadable("a subscript that is no base");
        }
        if is_group && !self.take(&Tok::Close(Bracket::Brace)) {
            return unreadable("a subscript that is no base");
        }
        base.map_or_else(|| unreadable("a subscript that is no base"), Ok)
    }

    /// A name with its subscripts and primes; `f(x)` is one name, `x(x+1)` is a product.
    fn variable(&mut self, mut name: String) -> Bounded<Expr> {
        let mut n_parts = 0;
        loop {
            match self.peek() {
                Some(Tok::Under) => {
                    self.pos += 1;
                    name.push('_');
                    name.push_str(&self.raw_argument()?);
                }
                Some(Tok::Prime) => {
                    self.pos += 1;
                    name.push('\'');
                }
                _ => break,
            }
            n_parts += 1;
            if n_parts > 8 {
                return unreadable("a name with too many subscripts");
            }
        }
        if let Some(count) = self.count_ahead(&name) {
            return Ok(count);
        }
        if let Some(arguments) = self.call_ahead(&name) {
            name.push_str(&arguments);
        }
        Ok(Expr::Var(name))
    }

    /// `C_{10}^{3}` and `P_{10}^{3}` (or A): the number of choices of 3 out of 10, without and with their order.
    fn count_ahead(&mut self, name: &str) -> Option<Expr> {
        let (letter, n) = name.split_once('_')?;
        if !matches!(letter, "C" | "P" | "A") || self.peek() != Some(&Tok::Caret) {
            return None;
        }
        let whole: Option<i64> = n.parse().ok();
        let is_name = letter == "C" && matches!(n, "n" | "m");
        let (k, length) = match (self.peek_at(1), self.peek_at(2), self.peek_at(3)) {
            (Some(Tok::Open(Bracket::Brace)), Some(Tok::Num(k)), Some(Tok::Close(Bracket::Brace))) => (k, 4),
            (Some(Tok::Num(k)), ..) => (k, 2),
            _ => return None,
        };
        let k: i64 = if k.is_plain_whole() { k.whole.parse().ok()? } else { return None };
        let n = match whole {
            Some(n) if (2..=MAX_COUNT).contains(&n) && k <= n => Expr::int(n),
            None if is_name => Expr::Var(n.to_owned()),
            _ => return None,
        };
        self.pos += length;
        let k = Expr::int(k);
        Some(if letter == "C" { Expr::Call(Func::Binomial, vec![n, k]) } else { arrangements(n, k) })
    }

    /// Whether an empty group with an index or a power follows the opening brace: `{}_{10}C_3`.
    fn is_prescript(&self) -> bool {
        self.peek() == Some(&Tok::Close(Bracket::Brace))
            && matches!(self.peek_at(1), Some(Tok::Under | Tok::Caret))
    }

    /// `_{10}C_3` and `^{10}P_3`, after the first sign: choices of 3 out of 10, without and with their order.
    fn prescripted(&mut self) -> Bounded<Expr> {
        let n = self.operand()?;
        let letter = match self.peek() {
            Some(Tok::Letter(name)) if matches!(name.as_str(), "C" | "P") => name.clone(),
            _ => return unreadable("an index before nothing"),
        };
        self.pos += 1;
        if !self.take(&Tok::Under) {
            return unreadable("an index before a letter");
        }
        let k = self.operand()?;
        Ok(if letter == "C" { Expr::Call(Func::Binomial, vec![n, k]) } else { arrangements(n, k) })
    }

    /// The argument list `(x)` after the name of a function, as text: one number or variable, or anything after f, g,
    /// h.
    fn call_ahead(&mut self, name: &str) -> Option<String> {
        if self.peek() != Some(&Tok::Open(Bracket::Round)) {
            return None;
        }
        let is_function = matches!(name.trim_end_matches('\''), "f" | "g" | "h" | "F" | "G" | "H");
        let inside: Vec<&Tok> = self.tokens[self.pos + 1..].iter().map(|token| &token.tok).take(64).collect();
        let length = inside.iter().position(|tok| **tok == Tok::Close(Bracket::Round))?;
        let inside = &inside[..length];
        let is_single = matches!(inside, [Tok::Num(_) | Tok::Letter(_)]);
        let is_nested = inside.iter().any(|tok| matches!(tok, Tok::Open(_)));
        if inside.is_empty() || is_nested || !(is_single || is_function) {
            return None;
        }
        let text: String = inside.iter().map(|tok| tok.spelled()).collect();
        self.pos += length + 2;
        Some(format!("({text})"))
    }

    fn letters(&mut self, run: &str) -> Bounded<Expr> {
        let mut factors = Vec::new();
        let n_letters = run.len();
        for (i, letter) in run.chars().enumerate() {
            factors.push(match letter {
                'e' => Expr::E,
                'i' => Expr::I,
                _ if i + 1 == n_letters => self.variable(letter.to_string())?,
                _ => Expr::Var(letter.to_string()),
            });
        }
        // An exponent after the run applies to the last letter only.
        if self.peek() == Some(&Tok::Caret)
            && let Some(last) = factors.pop()
        {
            factors.push(self.raised(last)?);
        }
        Ok(Expr::product(factors))
    }

    /// A macro's argument: a group, or one digit or sign.
    pub(super) fn argument(&mut self) -> Bounded<Expr> {
        if let Some(Tok::Num(numeral)) = self.peek()
            && numeral.is_plain_whole()
            && numeral.whole.len() > 1
        {
            let rest = numeral.whole[1..].to_owned();
            let digit = i64::from(numeral.whole.as_bytes()[0] - b'0');
            self.tokens[self.pos].tok = Tok::Num(Numeral { whole: rest, ..Numeral::default() });
            return Ok(Expr::int(digit));
        }
        if let Some(letter) = self.letter_of_run() {
            return Ok(letter);
        }
        if self.peek() == Some(&Tok::Minus) {
            self.pos += 1;
            return Ok(self.operand()?.negated());
        }
        self.operand()
    }

    /// Takes the first letter of a run of variables and leaves the others: `a^bc` is a^b · c, as TeX prints it.
    pub(super) fn letter_of_run(&mut self) -> Option<Expr> {
        let Token { tok: Tok::Word(run), is_text: false, .. } = self.tokens.get(self.pos)? else {
            return None;
        };
        if run.len() < 2 || !splits(run) {
            return None;
        }
        let (letter, rest) = (run[..1].to_owned(), run[1..].to_owned());
        self.tokens[self.pos].tok = match rest.as_str() {
            "e" => Tok::E,
            "i" => Tok::I,
            _ if rest.len() == 1 => Tok::Letter(rest),
            _ => Tok::Word(rest),
        };
        Some(match letter.as_str() {
            "e" => Expr::E,
            "i" => Expr::I,
            _ => Expr::Var(letter),
        })
    }

    /// A subscript as text.
    fn raw_argument(&mut self) -> Bounded<String> {
        if !self.take(&Tok::Open(Bracket::Brace)) {
            let text = self.peek().map(Tok::spelled);
            self.pos += 1;
            return text.map_or_else(|| unreadable("a subscript is missing"), Ok);
        }
        let mut text = String::new();
        let mut n_open = 1;
        while let Some(tok) = self.peek() {
            match tok {
                Tok::Open(Bracket::Brace) => n_open += 1,
                Tok::Close(Bracket::Brace) => n_open -= 1,
                _ => text.push_str(&tok.spelled()),
            }
            self.pos += 1;
            if n_open == 0 {
                return Ok(text);
            }
        }
        unreadable("a subscript that is never closed")
    }

    fn root(&mut self) -> Bounded<Expr> {
        let degree = if self.take(&Tok::Open(Bracket::Square)) {
            let degree = self.sum()?;
            if !self.take(&Tok::Close(Bracket::Square)) {
                return unreadable("a root's degree that is never closed");
            }
            degree
        } else {
            Expr::int(2)
        };
        let radicand = self.argument()?;
        Ok(Expr::Root(Box::new(radicand), Box::new(degree)))
    }

    fn group(&mut self, bracket: Bracket) -> Bounded<Expr> {
        let n_bars = std::mem::take(&mut self.n_bars);
        let inside = self.sum()?;
        let inside = self.infix_macro(inside)?;
        self.n_bars = n_bars;
        if !self.take(&Tok::Close(bracket)) {
            return unreadable("brackets that do not match");
        }
        Ok(match bracket {
            Bracket::Floor => Expr::Call(Func::Floor, vec![inside]),
            Bracket::Ceil => Expr::Call(Func::Ceil, vec![inside]),
            Bracket::Set | Bracket::Angle => return unreadable("a set where a value was expected"),
            _ => inside,
        })
    }

    fn accented(&mut self, mark: &str) -> Bounded<Expr> {
        let name = self.raw_argument()?;
        if mark == "over" {
            return unreadable("a sign set over another");
        }
        // `\vec{i}` and `\hat{i}` are the same unit vector.
        let is_axis = mark == "vec" && matches!(name.as_str(), "i" | "j" | "k");
        self.variable(format!("{} {name}", if is_axis { "hat" } else { mark }))
    }

    /// Numerator, denominator and length of `\frac{n}{d}` with whole numbers, `ahead` tokens from here.
    pub(super) fn fraction_ahead(&self, ahead: usize) -> Option<(RBig, RBig, usize)> {
        let mut at = ahead + 1;
        let mut parts = Vec::new();
        let mut digits_left: Option<String> = None;
        while parts.len() < 2 {
            if let Some(rest) = digits_left.take() {
                parts.push(Numeral { whole: rest, ..Numeral::default() });
                continue;
            }
            match (self.peek_at(at)?, self.peek_at(at + 1), self.peek_at(at + 2)) {
                (Tok::Open(Bracket::Brace), Some(Tok::Num(n)), Some(Tok::Close(Bracket::Brace))) => {
                    parts.push(n.clone());
                    at += 3;
                }
                (Tok::Num(n), ..) if n.whole.len() == 1 => {
                    parts.push(n.clone());
                    at += 1;
                }
                (Tok::Num(n), ..) if n.whole.len() == 2 && parts.is_empty() => {
                    digits_left = Some(n.whole[1..].to_owned());
                    parts.push(Numeral { whole: n.whole[..1].to_owned(), ..n.clone() });
                    at += 1;
                }
                _ => return None,
            }
        }
        if !parts.iter().all(Numeral::is_plain_whole) {
            return None;
        }
        Some((parts[0].value().ok()?, parts[1].value().ok()?, at))
    }
}

/// The number of ordered choices of k out of n.
pub(crate) fn arrangements(n: Expr, k: Expr) -> Expr {
    let rest = Expr::Add(vec![n.clone(), k.negated()]);
    let factorial = |x| Expr::Call(Func::Factorial, vec![x]);
    Expr::Mul(vec![factorial(n), Expr::Inv(Box::new(factorial(rest)))])
}

/// The base that a word names: `two`, `sixteen`.
pub(crate) fn base_named(word: &str) -> Option<u32> {
    const NAMES: [&str; 9] = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"];
    match word {
        "twelve" => Some(12),
        "sixteen" => Some(16),
        _ => NAMES.iter().position(|name| *name == word).map(|i| i as u32 + 2),
    }
}
