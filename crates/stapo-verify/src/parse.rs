//! From tokens to one scalar expression: precedence climbing with a depth limit.

mod antiderivative;
mod function;
mod integral;
mod operand;
mod series;

pub(crate) use operand::{arrangements, base_named};

use crate::budget::{Bounded, Budget, MAX_DEPTH, Stop, unreadable};
use crate::expr::{Expr, Func, Sign};
use crate::lex::token::{Bracket, Tok, Token};
use dashu_ratio::RBig;

/// Reads all of `tokens` as one expression.
pub(crate) fn expression(tokens: &[Token], budget: &mut Budget) -> Bounded<Expr> {
    nested_expression(tokens, 0, budget)
}

/// Reads all of `tokens` as one expression, `depth` levels inside another.
fn nested_expression(tokens: &[Token], depth: usize, budget: &mut Budget) -> Bounded<Expr> {
    let mut parser = Parser { tokens: tokens.to_vec(), pos: 0, depth, n_bars: 0, n_series: 0, budget };
    let expr = parser.sum()?;
    let expr = parser.infix_macro(expr)?;
    match parser.peek() {
        None => Ok(expr),
        Some(tok) => unreadable(format!("{} was not expected there", describe(tok))),
    }
}

pub(crate) struct Parser<'a> {
    /// Owned by the parser, because `\frac12` takes one digit of a number and leaves the other.
    tokens: Vec<Token>,
    pos: usize,
    depth: usize,
    /// Number of open bars `|`. While a bar is open, the next bar closes it.
    n_bars: usize,
    /// Number of sums and products whose terms are being read.
    n_series: usize,
    budget: &'a mut Budget,
}

impl Parser<'_> {
    fn peek(&self) -> Option<&Tok> {
        self.tokens.get(self.pos).map(|token| &token.tok)
    }

    fn peek_at(&self, ahead: usize) -> Option<&Tok> {
        self.tokens.get(self.pos + ahead).map(|token| &token.tok)
    }

    fn take(&mut self, tok: &Tok) -> bool {
        let is_there = self.peek() == Some(tok);
        if is_there {
            self.pos += 1;
        }
        is_there
    }

    /// Runs `read` one level deeper.
    fn deeper<T>(&mut self, read: impl FnOnce(&mut Self) -> Bounded<T>) -> Bounded<T> {
        self.budget.spend(5)?;
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(Stop::OverBudget("groups nested too deep"));
        }
        let result = read(self);
        self.depth -= 1;
        result
    }

    /// `n \choose k` and `a \over b`, where `left` is all that is before the macro.
    fn infix_macro(&mut self, left: Expr) -> Bounded<Expr> {
        if self.take(&Tok::Choose) {
            return Ok(Expr::Call(Func::Binomial, vec![left, self.sum()?]));
        }
        if self.take(&Tok::Over) {
            return Ok(Expr::Mul(vec![left, Expr::Inv(Box::new(self.sum()?))]));
        }
        Ok(left)
    }

    /// A sum of signed products.
    fn sum(&mut self) -> Bounded<Expr> {
        let mut terms = Vec::new();
        loop {
            self.budget.spend(5)?;
            let mut is_negative = false;
            let mut either: Option<Sign> = None;
            loop {
                match self.peek() {
                    Some(Tok::Plus) => {}
                    Some(Tok::Minus) => is_negative = !is_negative,
                    Some(Tok::PlusMinus) => either = Some(Sign::Same),
                    Some(Tok::MinusPlus) => either = Some(Sign::Opposite),
                    _ => break,
                }
                self.pos += 1;
            }
            let mut term = self.product()?;
            if is_negative {
                // `-(-5)` stays as it is written: working it out is a separate step.
                let is_negative_number = matches!(&term, Expr::Num { value, .. } if *value < RBig::ZERO);
                term = if is_negative_number { Expr::Neg(Box::new(term)) } else { term.negated() };
            }
            if let Some(sign) = either {
                term = Expr::PlusMinus(sign, Box::new(term));
            }
            terms.push(term);
            if !matches!(self.peek(), Some(Tok::Plus | Tok::Minus | Tok::PlusMinus | Tok::MinusPlus)) {
                break;
            }
        }
        let sum = Expr::sum(terms);
        if self.take(&Tok::Mod) {
            let modulus = self.product()?;
            return Ok(Expr::Call(Func::Mod, vec![sum, modulus]));
        }
        Ok(sum)
    }

    /// Factors side by side or joined by signs; division applies to the next factor alone.
    fn product(&mut self) -> Bounded<Expr> {
        let mut start = self.pos;
        let mut factors = vec![self.mixed_number_or_power()?];
        loop {
            self.budget.spend(5)?;
            match self.peek() {
                Some(Tok::Times) => {
                    self.pos += 1;
                    start = self.pos;
                    factors.push(self.signed_power()?);
                }
                Some(Tok::Slash) => {
                    self.pos += 1;
                    start = self.pos;
                    let divisor = self.signed_power()?;
                    factors.push(Expr::Inv(Box::new(divisor)));
                }
                Some(tok) if self.starts_operand(tok) => {
                    let before = std::mem::replace(&mut start, self.pos);
                    if self.starts_digits()
                        && (self.is_number_before() || is_digits(&self.tokens[before..start]))
                    {
                        return unreadable("two numbers side by side");
                    }
                    factors.push(self.power()?);
                }
                _ => return Ok(Expr::product(factors)),
            }
        }
    }

    /// Whether a number follows, bare or alone in braces.
    fn starts_digits(&self) -> bool {
        match (self.peek(), self.peek_at(1), self.peek_at(2)) {
            (Some(Tok::Open(Bracket::Brace)), Some(Tok::Num(_)), Some(Tok::Close(Bracket::Brace))) => true,
            (Some(tok), ..) => matches!(tok, Tok::Num(_)),
            _ => false,
        }
    }

    fn is_number_before(&self) -> bool {
        let is_exponent = self.pos > 1 && self.tokens[self.pos - 2].tok == Tok::Caret;
        self.pos > 0 && matches!(self.tokens[self.pos - 1].tok, Tok::Num(_)) && !is_exponent
    }

    fn starts_operand(&self, tok: &Tok) -> bool {
        match tok {
            Tok::Num(_)
            | Tok::Letter(_)
            | Tok::Func(_)
            | Tok::Pi
            | Tok::E
            | Tok::I
            | Tok::Infinity
            | Tok::Frac
            | Tok::Binom
            | Tok::Sqrt
            | Tok::Radical(_)
            | Tok::Accent(_)
            | Tok::Sum
            | Tok::Product
            | Tok::Integral => true,
            Tok::Open(bracket) => *bracket != Bracket::Set && *bracket != Bracket::Angle,
            Tok::Bar => self.n_bars == 0,
            Tok::Word(run) => run == "cis" || operand::splits(run),
            _ => false,
        }
    }

    /// A factor after a sign of multiplication or division may carry its own minus: `2 · -3`.
    fn signed_power(&mut self) -> Bounded<Expr> {
        let mut is_negative = false;
        let mut either: Option<Sign> = None;
        loop {
            match self.peek() {
                Some(Tok::Plus) => {}
                Some(Tok::Minus) => is_negative = !is_negative,
                Some(Tok::PlusMinus) => either = Some(Sign::Same),
                _ => break,
            }
            self.pos += 1;
        }
        let mut value = self.power()?;
        if is_negative {
            value = value.negated();
        }
        Ok(match either {
            Some(sign) => Expr::PlusMinus(sign, Box::new(value)),
            None => value,
        })
    }

    /// `3\frac{1}{2}` and `3 1/2` are three and a half; anything else is a power.
    fn mixed_number_or_power(&mut self) -> Bounded<Expr> {
        let Some(Tok::Num(whole)) = self.peek() else { return self.power() };
        if !whole.is_plain_whole() {
            return self.power();
        }
        let fraction = match (self.peek_at(1), self.peek_at(2), self.peek_at(3)) {
            (Some(Tok::Frac), ..) => self.fraction_ahead(1),
            (Some(Tok::Num(n)), Some(Tok::Slash), Some(Tok::Num(d)))
                if n.is_plain_whole() && d.is_plain_whole() =>
            {
                Some((n.value()?, d.value()?, 4))
            }
            _ => None,
        };
        let Some((n, d, length)) = fraction.filter(|(n, d, _)| n < d && !n.is_zero()) else {
            return self.power();
        };
        let value = whole.value()? + n / d;
        self.pos += length;
        self.postfixed(Expr::Num { value, is_decimal: false })
    }

    /// A base and its exponents; a tower of exponents is read from right to left.
    fn power(&mut self) -> Bounded<Expr> {
        let base = self.operand()?;
        let base = self.postfixed(base)?;
        self.raised(base)
    }

    fn raised(&mut self, base: Expr) -> Bounded<Expr> {
        if !self.take(&Tok::Caret) {
            return Ok(base);
        }
        let exponent = self.deeper(Self::exponent)?;
        let power = Expr::Pow(Box::new(base), Box::new(exponent));
        let power = self.postfixed(power)?;
        // A further caret raises the whole power, as in {a^b}^c; `exponent` has read the plain tower a^b^c.
        if self.peek() == Some(&Tok::Caret) { self.deeper(|parser| parser.raised(power)) } else { Ok(power) }
    }

    fn exponent(&mut self) -> Bounded<Expr> {
        let mut is_negative = false;
        while let Some(Tok::Plus | Tok::Minus) = self.peek() {
            is_negative ^= self.peek() == Some(&Tok::Minus);
            self.pos += 1;
        }
        let is_group = self.peek() == Some(&Tok::Open(Bracket::Brace));
        let mut exponent = match self.letter_of_run() {
            Some(letter) => letter,
            None => self.operand()?,
        };
        if !is_group && self.peek() == Some(&Tok::Bang) {
            exponent = self.postfixed(exponent)?;
        }
        if self.peek() == Some(&Tok::Caret) {
            exponent = self.raised(exponent)?;
        }
        Ok(if is_negative { exponent.negated() } else { exponent })
    }

    /// The minutes and seconds after a degree sign, as parts of a degree: `30^\circ 15'`.
    fn minutes_ahead(&mut self) -> Bounded<Option<RBig>> {
        let mut parts: Option<RBig> = None;
        for (n_primes, scale) in [(1, 60), (2, 3600)] {
            let Some(Tok::Num(numeral)) = self.peek_at(1) else { break };
            if !(2..2 + n_primes).all(|ahead| self.peek_at(ahead) == Some(&Tok::Prime)) {
                break;
            }
            let more = numeral.value()? / RBig::from(scale);
            parts = Some(parts.unwrap_or(RBig::ZERO) + more);
            self.pos += 1 + n_primes;
        }
        Ok(parts)
    }

    /// Postfix signs after an operand: factorial, percent, degree.
    fn postfixed(&mut self, mut value: Expr) -> Bounded<Expr> {
        let mut n_signs = 0;
        loop {
            value = match self.peek() {
                Some(Tok::Bang) if self.peek_at(1) == Some(&Tok::Bang) => {
                    self.pos += 1;
                    Expr::Call(Func::DoubleFactorial, vec![value])
                }
                Some(Tok::Bang) => Expr::Call(Func::Factorial, vec![value]),
                Some(Tok::Percent) => Expr::Percent(Box::new(value)),
                Some(Tok::Degree) => {
                    let parts = self.minutes_ahead()?;
                    Expr::Degrees(Box::new(match (parts, value) {
                        (Some(parts), Expr::Num { value, is_decimal }) => {
                            Expr::Num { value: value + parts, is_decimal }
                        }
                        (Some(parts), value) => {
                            Expr::Add(vec![value, Expr::Num { value: parts, is_decimal: false }])
                        }
                        (None, value) => value,
                    }))
                }
                _ => return Ok(value),
            };
            self.pos += 1;
            n_signs += 1;
            if self.depth + n_signs > MAX_DEPTH {
                return Err(Stop::OverBudget("too many signs in a row"));
            }
        }
    }
}

/// Whether the tokens are one number, alone in braces or with a percent sign: `{5}6` is printed as 56, not as a product.
fn is_digits(tokens: &[Token]) -> bool {
    let tokens = match tokens {
        [rest @ .., Token { tok: Tok::Percent, .. }] => rest,
        [Token { tok: Tok::Open(Bracket::Brace), .. }, rest @ .., Token { tok: Tok::Close(_), .. }] => rest,
        _ => tokens,
    };
    matches!(tokens, [Token { tok: Tok::Num(_), .. }])
}

fn describe(tok: &Tok) -> String {
    match tok {
        Tok::Word(word) | Tok::Letter(word) => format!("the word {word}"),
        Tok::Other(sign) => format!("the sign {sign}"),
        Tok::Close(_) => "a closing bracket".into(),
        Tok::Comma => "a comma".into(),
        Tok::Rel(_) => "a relation".into(),
        _ => format!("the sign {tok:?}").to_lowercase(),
    }
}
