//! Intervals and their unions on the real line.

use crate::expr::Expr;
use crate::lex::token::Rel;

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct End {
    pub(crate) at: Expr,
    pub(crate) is_closed: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Interval {
    pub(crate) low: End,
    pub(crate) high: End,
}

/// A union of intervals; a point is an interval of length zero.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Region {
    /// The variable that the region was stated for, if one was named.
    pub(crate) variable: Option<String>,
    pub(crate) pieces: Vec<Interval>,
}

impl Region {
    pub(crate) fn everything() -> Self {
        Self { variable: None, pieces: vec![Interval { low: below(), high: above() }] }
    }

    /// All `variable` with `variable rel bound`.
    pub(crate) fn half_line(variable: &str, rel: Rel, bound: &Expr) -> Self {
        let end = |is_closed| End { at: bound.clone(), is_closed };
        let pieces = match rel {
            Rel::Lt | Rel::Le => vec![Interval { low: below(), high: end(rel == Rel::Le) }],
            Rel::Gt | Rel::Ge => vec![Interval { low: end(rel == Rel::Ge), high: above() }],
            Rel::Ne => {
                vec![Interval { low: below(), high: end(false) }, Interval { low: end(false), high: above() }]
            }
            Rel::Eq | Rel::Approx => vec![Interval { low: end(true), high: end(true) }],
        };
        Self { variable: Some(variable.to_owned()), pieces }
    }

    pub(crate) fn ends(&self) -> impl Iterator<Item = &End> {
        self.pieces.iter().flat_map(|piece| [&piece.low, &piece.high])
    }

    /// The region with every end as a bare number.
    pub(crate) fn without_units(&self) -> Self {
        let bare = |end: &End| End { at: end.at.without_units(), is_closed: end.is_closed };
        let pieces =
            self.pieces.iter().map(|piece| Interval { low: bare(&piece.low), high: bare(&piece.high) });
        Self { variable: self.variable.clone(), pieces: pieces.collect() }
    }

    /// A half-line whose end has other variables, as an inequality: `x < y`.
    pub(crate) fn as_inequality(&self) -> Option<(Expr, Rel, &Expr)> {
        let ([piece], Some(name)) = (self.pieces.as_slice(), &self.variable) else { return None };
        let (end, below, up_to) = match (is_infinite(&piece.low), is_infinite(&piece.high)) {
            (true, false) => (&piece.high, Rel::Lt, Rel::Le),
            (false, true) => (&piece.low, Rel::Gt, Rel::Ge),
            _ => return None,
        };
        let rel = if end.is_closed { up_to } else { below };
        (!end.at.variables().is_empty()).then(|| (Expr::Var(name.clone()), rel, &end.at))
    }

    /// The part common to two half-lines that face each other.
    pub(crate) fn between(&self, other: &Self) -> Option<Self> {
        if self.variable != other.variable {
            return None;
        }
        let ([a], [b]) = (self.pieces.as_slice(), other.pieces.as_slice()) else { return None };
        let piece = if is_infinite(&a.high) && is_infinite(&b.low) {
            Interval { low: a.low.clone(), high: b.high.clone() }
        } else if is_infinite(&a.low) && is_infinite(&b.high) {
            Interval { low: b.low.clone(), high: a.high.clone() }
        } else {
            return None;
        };
        Some(Self { variable: self.variable.clone(), pieces: vec![piece] })
    }
}

impl Interval {
    /// The places of both ends.
    pub(crate) fn ends(&self) -> impl Iterator<Item = &Expr> {
        [&self.low.at, &self.high.at].into_iter()
    }

    pub(crate) fn point(at: Expr) -> Self {
        Self { low: End { at: at.clone(), is_closed: true }, high: End { at, is_closed: true } }
    }
}

fn below() -> End {
    End { at: Expr::Neg(Box::new(Expr::Infinity)), is_closed: false }
}

fn above() -> End {
    End { at: Expr::Infinity, is_closed: false }
}

fn is_infinite(end: &End) -> bool {
    end.at.any(|node| *node == Expr::Infinity)
}
