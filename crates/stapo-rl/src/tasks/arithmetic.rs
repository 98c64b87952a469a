//! Multi-step integer arithmetic: the answer to `(8-3)*4+7=` is `so 5*4+7, then 20+7, thus \boxed{27}`.
//!
//! Each step writes the whole remaining expression, so that the next step depends on the step before it alone. A model
//! of a few million parameters learns this by copying, and the steps after a mistake are consistent with the mistake.

mod expression;
mod level;
mod solution;

pub use expression::Operator;
pub(super) use level::spell_out_level;
pub use solution::Mistakes;

use super::drawn::DrawnProblem;
use super::error::TaskError;
use super::split::check_share;
use crate::reward::spec::VerifierSpec;
use expression::{Expression, Symbol};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Map;
use stapo_core::random::Key;

pub(super) const TEMPLATE: &str = "{{ problem }}=";
/// The most operators of an expression. The length of a worked solution grows with the square of this number.
const MAX_OPERATORS: usize = 20;
/// The largest operand and intermediate value, so that no product overflows.
const MAX_VALUE: i64 = 1_000_000_000;

/// Generated arithmetic expressions. `level` sets the form of the expressions, and the other keys override single values.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(transform = level::add_level)]
pub struct ArithmeticSpec {
    /// The fewest operators of an expression.
    pub min_operators: usize,
    /// The most operators of an expression.
    pub max_operators: usize,
    /// The smallest operand.
    pub min_operand: i64,
    /// The largest operand.
    pub max_operand: i64,
    /// The operators that occur.
    pub operators: Vec<Operator>,
    /// The share of expressions with a pair of parentheses that changes the value. Such an expression has two or more
    /// operators.
    pub parentheses_share: f64,
    /// Whether intermediate and final results may be below zero.
    pub negative_results: bool,
    /// The largest absolute value of intermediate and final results.
    pub max_result: i64,
    /// The share of expressions, chosen by the hash of the text, that are held out of training.
    pub held_out_share: f64,
    /// The size of the held-out set; the set is smaller where there are fewer such expressions.
    pub n_held_out: usize,
    /// A Jinja template over `problem`; by default the problem as it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// The system message of every conversation; none by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// How responses are judged.
    pub verifier: VerifierSpec,
}

impl Default for ArithmeticSpec {
    fn default() -> Self {
        Self::at_level(level::DEFAULT).expect("the default level is on the ladder")
    }
}

impl ArithmeticSpec {
    pub(super) fn check(&self) -> Result<(), TaskError> {
        let refuse = |key, problem: String, remedy: &str| Err(TaskError::setting(key, problem, remedy));
        if self.min_operators == 0 || self.min_operators > self.max_operators {
            let problem =
                format!("{} is not from 1 to max_operators {}", self.min_operators, self.max_operators);
            return refuse("min_operators", problem, "an expression has at least one operator");
        }
        if self.max_operators > MAX_OPERATORS {
            let problem = format!("{} is above {MAX_OPERATORS}", self.max_operators);
            return refuse("max_operators", problem, "fewer operators, larger operands");
        }
        if self.min_operand < 0 || self.min_operand > self.max_operand {
            let problem = format!("{} is not from 0 to max_operand {}", self.min_operand, self.max_operand);
            return refuse("min_operand", problem, "operands are not negative; results may be");
        }
        for (key, value) in [("max_operand", self.max_operand), ("max_result", self.max_result)] {
            if !(1..=MAX_VALUE).contains(&value) {
                return refuse(
                    key,
                    format!("{value} is not from 1 to {MAX_VALUE}"),
                    "two or three digits are hard enough",
                );
            }
        }
        if self.operators.is_empty() {
            return refuse("operators", "empty".into(), "some of \"+\", \"-\", \"*\", \"/\"");
        }
        check_share("parentheses_share", self.parentheses_share)?;
        check_share("held_out_share", self.held_out_share)
    }

    /// One attempt at a problem: `None` where the drawn expression breaks a rule of the spec. The number of operators
    /// and the parentheses depend on `shape` alone, so that failed attempts do not change the shares of shapes.
    pub(super) fn draw(&self, shape: Key, attempt: Key) -> Option<DrawnProblem> {
        let choices = (self.max_operators - self.min_operators) as u64 + 1;
        let n_operators = self.min_operators + shape.with(0).below(choices) as usize;
        let has_group = n_operators >= 2 && shape.with(1).uniform() < self.parentheses_share;
        let expression = self.draw_expression(n_operators, has_group, attempt)?;
        let value = self.value(expression.clone())?;
        Some(DrawnProblem {
            problem: expression.to_string(),
            reference: value.to_string(),
            fields: Map::new(),
        })
    }

    fn draw_expression(&self, n_operators: usize, has_group: bool, key: Key) -> Option<Expression> {
        let n_operands = n_operators + 1;
        let span = (self.max_operand - self.min_operand) as u64 + 1;
        let operand = |idx: usize| self.min_operand + key.with(0).with(idx as u64).below(span) as i64;
        let operators: Vec<Operator> = (0..n_operators as u64)
            .map(|idx| self.operators[key.with(1).with(idx).below(self.operators.len() as u64) as usize])
            .collect();
        let group = if has_group { Some(draw_group(&operators, key.with(2))?) } else { None };
        let mut tokens = Vec::with_capacity(2 * n_operands + 1);
        for idx in 0..n_operands {
            if idx > 0 {
                tokens.push(Symbol::Operator(operators[idx - 1]));
            }
            if group.is_some_and(|(first, _)| first == idx) {
                tokens.push(Symbol::Open);
            }
            tokens.push(Symbol::Number(operand(idx)));
            if group.is_some_and(|(_, last)| last == idx) {
                tokens.push(Symbol::Close);
            }
        }
        Some(Expression::new(tokens))
    }

    /// The value; `None` if an intermediate result breaks a rule of the spec.
    fn value(&self, mut expression: Expression) -> Option<i64> {
        while let Some(next) = expression.next_operation() {
            let value = next.operator.apply(next.left, next.right)?;
            if value.abs() > self.max_result || (value < 0 && !self.negative_results) {
                return None;
            }
            expression = expression.reduce(next, value);
        }
        expression.number()
    }
}

/// The worked solution of a generated problem, with the mistakes that `key` draws.
pub(super) fn solution(problem: &str, mistakes: &Mistakes, key: Key) -> Option<String> {
    let expression = Expression::parse(problem)?;
    Some(solution::write(expression, mistakes, key))
}

/// The first and last operand inside a pair of parentheses; `None` if the pair would not change the value.
fn draw_group(operators: &[Operator], key: Key) -> Option<(usize, usize)> {
    let n_operands = operators.len() + 1;
    let n_inside = 2 + key.with(0).below(n_operands as u64 - 2) as usize;
    let first = key.with(1).below((n_operands - n_inside) as u64 + 1) as usize;
    let last = first + n_inside - 1;
    let weakest = operators[first..last].iter().map(|operator| operator.precedence()).min()?;
    let before = first.checked_sub(1).map(|idx| operators[idx]);
    let matters_before = before.is_some_and(|operator| match operator {
        Operator::Add => false,
        Operator::Subtract => weakest == 1,
        Operator::Multiply => weakest == 1,
        Operator::Divide => true,
    });
    let matters_after = operators.get(last).is_some_and(|operator| operator.precedence() > weakest);
    (matters_before || matters_after).then_some((first, last))
}
