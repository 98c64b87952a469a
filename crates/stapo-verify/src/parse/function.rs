//! Functions with their arguments.

use super::Parser;
use crate::budget::{Bounded, unreadable};
use crate::expr::{Expr, Func};
use crate::lex::token::{Bracket, Tok};

impl Parser<'_> {
    /// A function with its power, base and argument: `\sin^2 x`, `\log_2 8`, `\max(1, 2)`.
    pub(super) fn function(&mut self, mut func: Func) -> Bounded<Expr> {
        let mut power = None;
        let mut base = None;
        loop {
            if self.take(&Tok::Caret) {
                power = Some(self.deeper(Self::exponent)?);
            } else if self.take(&Tok::Under) {
                // A whole number, not one digit as after `\frac`: `\log_10 x` means base ten.
                base = Some(self.operand()?);
            } else {
                break;
            }
        }
        if power == Some(Expr::int(-1)) {
            func = match func {
                Func::Sin => Func::Asin,
                Func::Cos => Func::Acos,
                Func::Tan => Func::Atan,
                other => other,
            };
            if func.gives_angle() {
                power = None;
            }
        }
        let mut args = self.arguments(func)?;
        if let (Func::Log, Some(base)) = (func, base) {
            func = Func::LogBase;
            args.insert(0, base);
        }
        let expected = match func {
            Func::LogBase => args.len() == 2,
            Func::Gcd | Func::Lcm | Func::Max | Func::Min => !args.is_empty(),
            _ => args.len() == 1,
        };
        if !expected {
            return unreadable(format!("{} with {} arguments", func.name(), args.len()));
        }
        let call = Expr::Call(func, args);
        Ok(match power {
            Some(power) => Expr::Pow(Box::new(call), Box::new(power)),
            None => call,
        })
    }

    fn arguments(&mut self, func: Func) -> Bounded<Vec<Expr>> {
        for (open, close) in [
            (Tok::Open(Bracket::Round), Tok::Close(Bracket::Round)),
            (Tok::Open(Bracket::Brace), Tok::Close(Bracket::Brace)),
            (Tok::Open(Bracket::Set), Tok::Close(Bracket::Set)),
            (Tok::Open(Bracket::Square), Tok::Close(Bracket::Square)),
        ] {
            if !self.take(&open) {
                continue;
            }
            let n_bars = std::mem::take(&mut self.n_bars);
            let mut args = vec![self.deeper(Self::sum)?];
            while self.take(&Tok::Comma) || self.take(&Tok::Semicolon) {
                args.push(self.deeper(Self::sum)?);
            }
            self.n_bars = n_bars;
            if !self.take(&close) {
                return unreadable("a function's argument that is never closed");
            }
            // sin(30)° means the sine of 30 degrees.
            if func.takes_angle() && self.take(&Tok::Degree) {
                args = args.into_iter().map(|arg| Expr::Degrees(Box::new(arg))).collect();
            }
            return Ok(args);
        }
        // Without brackets the argument is the factors side by side up to the next function: 2x in sin 2x cos y.
        let mut is_negative = false;
        while self.take(&Tok::Minus) {
            is_negative = !is_negative;
        }
        let mut factors = vec![self.deeper(Self::mixed_number_or_power)?];
        while let Some(tok) = self.peek() {
            let goes_on = self.starts_operand(tok)
                && !matches!(
                    tok,
                    Tok::Func(_) | Tok::Open(Bracket::Round | Bracket::Square) | Tok::Num(_) | Tok::Sum
                );
            if !goes_on {
                break;
            }
            factors.push(self.deeper(Self::power)?);
        }
        let argument = Expr::product(factors);
        Ok(vec![if is_negative { argument.negated() } else { argument }])
    }
}
