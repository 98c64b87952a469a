//! Arithmetic expressions: parsing, printing, and reduction by one operation at a time.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// An arithmetic operator. Multiplication and division bind tighter; operators of equal precedence go from left to
/// right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Operator {
    #[serde(rename = "+")]
    Add,
    #[serde(rename = "-")]
    Subtract,
    #[serde(rename = "*")]
    Multiply,
    #[serde(rename = "/")]
    Divide,
}

impl Operator {
    pub const ALL: [Self; 4] = [Self::Add, Self::Subtract, Self::Multiply, Self::Divide];

    pub(in crate::tasks) fn symbol(self) -> char {
        match self {
            Self::Add => '+',
            Self::Subtract => '-',
            Self::Multiply => '*',
            Self::Divide => '/',
        }
    }

    pub(crate) fn from_symbol(symbol: char) -> Option<Self> {
        Self::ALL.into_iter().find(|operator| operator.symbol() == symbol)
    }

    pub(crate) fn precedence(self) -> u8 {
        match self {
            Self::Add | Self::Subtract => 1,
            Self::Multiply | Self::Divide => 2,
        }
    }

    /// The result; `None` if the result is not an integer or does not fit.
    pub(in crate::tasks) fn apply(self, left: i64, right: i64) -> Option<i64> {
        match self {
            Self::Add => left.checked_add(right),
            Self::Subtract => left.checked_sub(right),
            Self::Multiply => left.checked_mul(right),
            Self::Divide => {
                let quotient = left.checked_div(right)?;
                (quotient * right == left).then_some(quotient)
            }
        }
    }

    /// The result after a mistake, when the exact rules may not apply: quotients are truncated, and x/0 is 0.
    pub(super) fn apply_carelessly(self, left: i64, right: i64) -> i64 {
        match self {
            Self::Add => left.saturating_add(right),
            Self::Subtract => left.saturating_sub(right),
            Self::Multiply => left.saturating_mul(right),
            Self::Divide => left.checked_div(right).unwrap_or(0),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Symbol {
    Number(i64),
    Operator(Operator),
    Open,
    Close,
}

/// One operation between two numbers of an expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Operation {
    token_idx: usize,
    pub(super) operator: Operator,
    pub(super) left: i64,
    pub(super) right: i64,
}

/// A well-formed expression over integers. Law: no pair of parentheses holds a single number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Expression(Vec<Symbol>);

impl Expression {
    /// The symbols must form a well-formed expression.
    pub(super) fn new(tokens: Vec<Symbol>) -> Self {
        Self(tokens)
    }

    /// Parses a text; `None` if the text is not an expression.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut tokens = Vec::new();
        let mut rest = text;
        let mut depth = 0_u32;
        while let Some(symbol) = rest.chars().next() {
            let expects_operand = !matches!(tokens.last(), Some(Symbol::Number(_) | Symbol::Close));
            let sign = usize::from(symbol == '-' && matches!(tokens.last(), None | Some(Symbol::Open)));
            let n_digits = rest[sign..].bytes().take_while(u8::is_ascii_digit).count();
            if n_digits > 0 && expects_operand {
                let (number, after) = rest.split_at(sign + n_digits);
                tokens.push(Symbol::Number(number.parse().ok()?));
                rest = after;
                continue;
            }
            let token = match symbol {
                '(' if expects_operand => Symbol::Open,
                ')' if !expects_operand => Symbol::Close,
                _ if !expects_operand => Symbol::Operator(Operator::from_symbol(symbol)?),
                _ => return None,
            };
            depth = match token {
                Symbol::Open => depth + 1,
                Symbol::Close => depth.checked_sub(1)?,
                _ => depth,
            };
            tokens.push(token);
            rest = &rest[symbol.len_utf8()..];
        }
        let complete = matches!(tokens.last(), Some(Symbol::Number(_) | Symbol::Close)) && depth == 0;
        complete.then(|| Self(tokens).without_lone_parentheses())
    }

    /// The value of an expression without operations; `None` otherwise.
    pub(super) fn number(&self) -> Option<i64> {
        match self.0[..] {
            [Symbol::Number(value)] => Some(value),
            _ => None,
        }
    }

    /// The leftmost operation that precedence allows next; `None` for an expression without operations.
    pub(super) fn next_operation(&self) -> Option<Operation> {
        self.operations().find(|&operation| self.may_go_next(operation))
    }

    /// Operations between two numbers that precedence does not allow yet.
    pub(super) fn premature_operations(&self) -> Vec<Operation> {
        self.operations().filter(|&operation| !self.may_go_next(operation)).collect()
    }

    /// Replaces an operation of this expression by `value`.
    pub(super) fn reduce(self, operation: Operation, value: i64) -> Self {
        let at = operation.token_idx;
        let mut tokens = self.0;
        tokens.splice(at - 1..=at + 1, [Symbol::Number(value)]);
        Self(tokens).without_lone_parentheses()
    }

    fn operations(&self) -> impl Iterator<Item = Operation> {
        self.0.windows(3).enumerate().filter_map(|(start, window)| match *window {
            [Symbol::Number(left), Symbol::Operator(operator), Symbol::Number(right)] => {
                Some(Operation { token_idx: start + 1, operator, left, right })
            }
            _ => None,
        })
    }

    fn may_go_next(&self, operation: Operation) -> bool {
        let precedence = operation.operator.precedence();
        let before = operation.token_idx.checked_sub(2).map(|at| self.0[at]);
        let after = self.0.get(operation.token_idx + 2);
        let left_waits = !matches!(before, Some(Symbol::Operator(other)) if other.precedence() >= precedence);
        let right_waits = !matches!(after, Some(Symbol::Operator(other)) if other.precedence() > precedence);
        left_waits && right_waits
    }

    fn without_lone_parentheses(mut self) -> Self {
        while let Some(at) = self
            .0
            .windows(3)
            .position(|window| matches!(window, [Symbol::Open, Symbol::Number(_), Symbol::Close]))
        {
            self.0.remove(at + 2);
            self.0.remove(at);
        }
        self
    }
}

/// A negative number is written in parentheses except at the start: `7*(-3)`, `-3*7`.
impl fmt::Display for Expression {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut comes_first = true;
        for token in &self.0 {
            match *token {
                Symbol::Number(value) if value < 0 && !comes_first => write!(f, "({value})")?,
                Symbol::Number(value) => write!(f, "{value}")?,
                Symbol::Operator(operator) => write!(f, "{}", operator.symbol())?,
                Symbol::Open => f.write_str("(")?,
                Symbol::Close => f.write_str(")")?,
            }
            comes_first = *token == Symbol::Open;
        }
        Ok(())
    }
}
