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
            if !is_open {
                return unreadable("a sum with such bounds");
            }
            let index = format!("{INDEX}{}", self.n_series);
            let is_over_sequence = body.variables().iter().any(|other| mentions(other, &name));
            let term = with_index(&body, &name, &Expr::Var(index.clone()))?;
            let term = if is_over_sequence { self.ordered(&term)? } else { term };
            let mut parts = vec![term, from];
            if to != Expr::Infinity {
                parts.push(to);
            }
            return Ok(Expr::Series { is_sum, index, parts });
        };
        if to.saturating_sub(from) > MAX_TERMS {
            return Err(Stop::OverBudget("a sum of more than 500 terms"));
        }
        let n_nodes = body.n_nodes();
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

    /// The terms and factors in one order. A sum over a sequence has no value to compare by, so that two such sums are
    /// equal only as trees.
    fn ordered(&mut self, term: &Expr) -> Bounded<Expr> {
        self.budget.spend(20 * term.n_nodes())?;
        Ok(term.map(&mut |mut node| {
            if let Expr::Add(list) | Expr::Mul(list) = &mut node {
                list.sort_by_cached_key(|part| format!("{part:?}"));
            }
            node
        }))
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

/// The term with `value` for the index called `name`. A number may also take the place of an index that is all of a
/// subscript, as in `a_k`; another name for the index may take its place anywhere in subscripts and arguments.
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
        (Expr::Var(v), Expr::Var(index)) if mentions(v, name) => {
            let renamed = with_renamed_index(v, name, index);
            is_unclear |= renamed.is_none();
            renamed.map_or(node, Expr::Var)
        }
        _ => node,
    });
    if is_unclear { unreadable("a sum over a sequence") } else { Ok(result) }
}

/// `variable` with `index` instead of `name` in its subscripts and arguments; `None` if the name is part of a longer
/// run of letters, as in `a_{nk}`.
fn with_renamed_index(variable: &str, name: &str, index: &str) -> Option<String> {
    let (head, rest) = variable.split_at(variable.find(['_', '('])?);
    let parts: Vec<&str> = rest.split(name).collect();
    let stands_alone =
        |pair: &[&str]| !pair[0].ends_with(char::is_alphabetic) && !pair[1].starts_with(char::is_alphabetic);
    parts.windows(2).all(stands_alone).then(|| format!("{head}{}", parts.join(index)))
}

/// Whether the index is part of the subscripts or arguments of a name: k in `a_k` and `f(k)`.
pub(super) fn mentions(variable: &str, index: &str) -> bool {
    variable.split_once(['_', '(']).is_some_and(|(_, rest)| rest.contains(index))
}
