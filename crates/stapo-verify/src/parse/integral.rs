//! Definite integrals of sums of powers, worked out exactly.

use super::{Parser, expression};
use crate::budget::{Bounded, Budget, unreadable};
use crate::exact_form::{affordable_form, ratio_of};
use crate::expr::{Expr, Func};
use crate::lex::token::Tok;
use crate::poly::{Atom, Monomial, Power};
use dashu_ratio::RBig;

impl Parser<'_> {
    /// `\int_0^1 3x^2 dx`. An integral without bounds, or of anything but powers of its variable, is not read.
    pub(super) fn integral(&mut self) -> Bounded<Expr> {
        let mut low = None;
        let mut high = None;
        for _ in 0..2 {
            if self.take(&Tok::Under) {
                low = Some(self.deeper(Self::argument)?);
            } else if self.take(&Tok::Caret) {
                high = Some(self.deeper(Self::exponent)?);
            }
        }
        let (Some(low), Some(high)) = (low, high) else { return unreadable("an integral without bounds") };
        let Some((length, variable)) = self.differential_ahead() else {
            return unreadable("an integral without its variable");
        };
        let inside = &self.tokens[self.pos..self.pos + length];
        let integrand = if inside.is_empty() { Expr::int(1) } else { expression(inside, self.budget)? };
        self.pos += length + 1;
        integrated(&integrand, &variable, (&low, &high), self.budget)
    }

    /// The number of tokens before the next differential outside brackets, and the variable of that differential.
    fn differential_ahead(&self) -> Option<(usize, String)> {
        let mut n_open = 0usize;
        for (i, token) in self.tokens[self.pos..].iter().enumerate() {
            match &token.tok {
                Tok::Open(_) => n_open += 1,
                Tok::Close(_) => n_open = n_open.checked_sub(1)?,
                Tok::Letter(name) if n_open == 0 && name != "delta" => {
                    if let Some(variable) = name.strip_prefix('d').filter(|rest| !rest.is_empty()) {
                        return Some((i, variable.to_owned()));
                    }
                }
                _ => {}
            }
        }
        None
    }
}

/// The integral of a sum of powers of `variable`.
fn integrated(
    integrand: &Expr,
    variable: &str,
    (low, high): (&Expr, &Expr),
    budget: &mut Budget,
) -> Bounded<Expr> {
    let Some(form) = affordable_form(integrand, budget)? else {
        return unreadable("an integral of something other than powers");
    };
    let is_infinite = |bound: &Expr| bound.any(|node| *node == Expr::Infinity);
    // Below zero, and at it, a negative power or a logarithm has no integral.
    let is_positive = ratio_of(low, budget).ok().flatten().is_some_and(|low| low > RBig::ZERO)
        && (*high == Expr::Infinity
            || ratio_of(high, budget).ok().flatten().is_some_and(|high| high > RBig::ZERO));
    if is_infinite(low) || (is_infinite(high) && *high != Expr::Infinity) {
        return unreadable("an integral from infinity");
    }
    let mut terms = Vec::new();
    for (monomial, value) in &form.terms {
        let is_variable = |atom: &Atom| *atom == Atom::Var(variable.to_owned());
        let power =
            monomial.iter().find(|(atom, _)| is_variable(atom)).map_or(Power { n: 0, d: 1 }, |(_, p)| *p);
        let raised = RBig::from_parts_signed(power.n.into(), power.d.into()) + RBig::ONE;
        if (power.n < 0 && !is_positive) || (*high == Expr::Infinity && raised >= RBig::ZERO) {
            return unreadable("an integral that may have no value");
        }
        let at = |bound: &Expr| {
            if raised.is_zero() {
                Expr::Call(Func::Ln, vec![bound.clone()])
            } else {
                Expr::Pow(Box::new(bound.clone()), Box::new(number(raised.clone())))
            }
        };
        let mut ends = vec![at(low).negated()];
        if *high != Expr::Infinity {
            ends.push(at(high));
        }
        let scale = if raised.is_zero() { value.clone() } else { value / raised };
        let mut factors = vec![number(scale), Expr::Add(ends)];
        factors.extend(others(monomial, is_variable));
        terms.push(Expr::Mul(factors));
    }
    Ok(if terms.is_empty() { Expr::int(0) } else { Expr::sum(terms) })
}

fn number(value: RBig) -> Expr {
    Expr::Num { value, is_decimal: false }
}

/// The powers of a monomial other than those of the variable.
fn others(monomial: &Monomial, is_variable: impl Fn(&Atom) -> bool) -> Vec<Expr> {
    let power = |power: &Power| number(RBig::from_parts_signed(power.n.into(), power.d.into()));
    let base = |atom: &Atom| match atom {
        Atom::Var(name) => Expr::Var(name.clone()),
        Atom::Pi => Expr::Pi,
        Atom::E => Expr::E,
        Atom::I => Expr::I,
        Atom::Prime(prime) => number(RBig::from(*prime)),
    };
    let kept = monomial.iter().filter(|(atom, _)| !is_variable(atom));
    kept.map(|(atom, p)| Expr::Pow(Box::new(base(atom)), Box::new(power(p)))).collect()
}
