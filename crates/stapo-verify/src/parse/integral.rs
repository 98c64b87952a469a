//! Definite integrals of sums of powers, worked out exactly, and of functions with a known antiderivative.

use super::antiderivative::{self, number, without_variable};
use super::series::mentions;
use super::{Parser, nested_expression};
use crate::budget::{Bounded, Budget, unreadable};
use crate::equal::value::sign_of;
use crate::exact_form::affordable_form;
use crate::expr::{Expr, Func};
use crate::lex::token::Tok;
use crate::poly::{Atom, Power};
use dashu_ratio::RBig;
use std::cmp::Ordering;

impl Parser<'_> {
    /// `\int_0^1 3x^2 dx`. An integral without bounds, or without a known antiderivative, is not read.
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
        let integrand = if inside.is_empty() {
            Expr::int(1)
        } else {
            nested_expression(inside, self.depth, self.budget)?
        };
        self.pos += length + 1;
        integrated(&integrand, &variable, (&low, &high), self.budget)
    }

    /// The number of tokens before the differential of this integral, and the variable of that differential. Inner
    /// integrals come with a differential each: the last one of `\int\int xy dx dy` is that of the first sign.
    fn differential_ahead(&self) -> Option<(usize, String)> {
        let mut n_open = 0usize;
        let mut n_inner = 0usize;
        for (i, token) in self.tokens[self.pos..].iter().enumerate() {
            match &token.tok {
                Tok::Open(_) => n_open += 1,
                Tok::Close(_) => n_open = n_open.checked_sub(1)?,
                Tok::Integral if n_open == 0 => n_inner += 1,
                Tok::Letter(name) if n_open == 0 && name != "delta" => {
                    if let Some(variable) = name.strip_prefix('d').filter(|rest| !rest.is_empty()) {
                        if n_inner == 0 {
                            return Some((i, variable.to_owned()));
                        }
                        n_inner -= 1;
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
    if integrand.any(|node| matches!(node, Expr::Var(name) if mentions(name, variable))) {
        return unreadable("an integral of an unknown function");
    }
    let is_infinite = |bound: &Expr| bound.any(|node| *node == Expr::Infinity);
    if is_infinite(low) || (is_infinite(high) && *high != Expr::Infinity) {
        return unreadable("an integral from infinity");
    }
    let Some(form) = affordable_form(integrand, budget)? else {
        let found = antiderivative::integrated(integrand, variable, (low, high), budget)?;
        return found.map_or_else(|| unreadable("an integral without a known antiderivative"), Ok);
    };
    // Below zero, and at it, a negative power or a logarithm has no integral.
    let is_positive = sign_of(low, budget)? == Some(Ordering::Greater)
        && (*high == Expr::Infinity || sign_of(high, budget)? == Some(Ordering::Greater));
    budget.spend(10 * form.terms.len() as u64 * (low.n_nodes() + high.n_nodes()))?;
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
        factors.extend(without_variable(monomial, is_variable));
        terms.push(Expr::Mul(factors));
    }
    Ok(if terms.is_empty() { Expr::int(0) } else { Expr::sum(terms) })
}
