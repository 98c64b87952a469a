//! Sums and products over an index.

use super::Parser;
use crate::budget::{Bounded, Stop, unreadable};
use crate::exact_form::ratio_of;
use crate::expr::{Expr, INDEX};
use crate::lex::token::{Bracket, Rel, Tok};
use dashu_ratio::RBig;

/// Most terms of a sum or product that is written out.
const MAX_TERMS: i64 = 500;

impl Parser<'_> {
    /// `\sum_{k=1}^{10} k^2` written out; `\sum_{k=1}^{n} k^2` and `\sum_{k=1}^\infty x^k` as a series.
    pub(super) fn series(&mut self, is_sum: bool) -> Bounded<Expr> {
        let unclear = || Stop::Unreadable("a sum without bounds".into());
        let mut first = None;
        let mut last = None;
        for _ in 0..2 {
            if self.take(&Tok::Under) {
                first = Some(self.first_index()?);
            } else if self.take(&Tok::Caret) {
                last = Some(self.deeper(Self::exponent)?);
            }
        }
        let (Some((name, from)), Some(to)) = (first, last) else { return Err(unclear()) };
        self.n_series += 1;
        let body = self.product()?;
        self.n_series -= 1;
        let from_value = ratio_of(&from, self.budget)?.filter(RBig::is_int);
        let to_value = ratio_of(&to, self.budget)?.filter(RBig::is_int);
        let bound = |value: Option<RBig>| value.and_then(|value| i64::try_from(value.numerator()).ok());
        let (Some(from), Some(to)) = (bound(from_value), bound(to_value)) else {
            let is_open = to == Expr::Infinity || !from.variables().is_empty() || !to.variables().is_empty();
            if !is_open || body.variables().iter().any(|other| mentions(other, &name)) {
                return unreadable("a sum with such bounds or terms");
            }
            let index = format!("{INDEX}{}", self.n_series);
            let mut parts = vec![with_index(&body, &name, &Expr::Var(index.clone()))?, from];
            if to != Expr::Infinity {
                parts.push(to);
            }
            return Ok(Expr::Series { is_sum, index, parts });
        };
        if to.saturating_sub(from) > MAX_TERMS {
            return Err(Stop::OverBudget("a sum of more than 500 terms"));
        }
        let mut n_nodes = 0;
        body.walk(&mut |_| n_nodes += 1);
        let mut terms = Vec::new();
        for k in from..=to {
            self.budget.spend(5 * n_nodes)?;
            terms.push(with_index(&body, &name, &Expr::Num { value: RBig::from(k), is_decimal: false })?);
        }
        if terms.is_empty() {
            return Ok(Expr::int(i64::from(!is_sum)));
        }
        Ok(if is_sum { Expr::sum(terms) } else { Expr::product(terms) })
    }

    /// The name of the index and its first value, in the group under the sign.
    fn first_index(&mut self) -> Bounded<(String, Expr)> {
        let unclear = || Stop::Unreadable("a sum without a first index".into());
        if !self.take(&Tok::Open(Bracket::Brace)) {
            return Err(unclear());
        }
        let name = match self.operand()? {
            Expr::Var(name) => name,
            // The index is called i here, not the root of -1.
            Expr::I => "i".to_owned(),
            _ => return Err(unclear()),
        };
        if !self.take(&Tok::Rel(Rel::Eq)) {
            return Err(unclear());
        }
        let from = self.sum()?;
        if self.take(&Tok::Close(Bracket::Brace)) { Ok((name, from)) } else { Err(unclear()) }
    }
}

/// The term with `value` for the index called `name`. The index may also be all of a subscript or an argument: `a_k`.
fn with_index(term: &Expr, name: &str, value: &Expr) -> Bounded<Expr> {
    let mut is_unclear = false;
    let result = term.map(&mut |node| match (&node, value) {
        (Expr::Var(v), _) if v == name => value.clone(),
        (Expr::I, _) if name == "i" => value.clone(),
        (Expr::Var(v), Expr::Num { value, .. }) if mentions(v, name) => {
            let head = v.strip_suffix(name).and_then(|rest| rest.strip_suffix('_'));
            is_unclear |= head.is_none_or(|head| mentions(head, name));
            head.map_or(node.clone(), |head| Expr::Var(format!("{head}_{value}")))
        }
        _ => node,
    });
    if is_unclear { unreadable("a sum over a sequence") } else { Ok(result) }
}

/// Whether the index is part of the subscripts or arguments of a name: k in `a_k` and `f(k)`.
fn mentions(variable: &str, index: &str) -> bool {
    variable.split_once(['_', '(']).is_some_and(|(_, rest)| rest.contains(index))
}
