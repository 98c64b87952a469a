//! The levels of difficulty, and the keys of the task in a config.

use super::{ArithmeticSpec, Operator};
use crate::task::verifier_spec::VerifierSpec;
use serde::Deserialize;

pub(super) const DEFAULT: usize = 3;

struct Level {
    operators_from_to: (usize, usize),
    max_operand: i64,
    operators: &'static [Operator],
    parentheses_share: f64,
    negative_results: bool,
    max_result: i64,
}

const LADDER: [Level; 6] = {
    use Operator::{Add, Divide, Multiply, Subtract};
    let without_division = &[Add, Subtract, Multiply];
    let all = &[Add, Subtract, Multiply, Divide];
    [
        Level {
            operators_from_to: (1, 1),
            max_operand: 9,
            operators: &[Add, Subtract],
            parentheses_share: 0.0,
            negative_results: false,
            max_result: 99,
        },
        Level {
            operators_from_to: (1, 2),
            max_operand: 9,
            operators: without_division,
            parentheses_share: 0.0,
            negative_results: false,
            max_result: 99,
        },
        Level {
            operators_from_to: (2, 3),
            max_operand: 9,
            operators: without_division,
            parentheses_share: 0.4,
            negative_results: true,
            max_result: 99,
        },
        Level {
            operators_from_to: (2, 4),
            max_operand: 20,
            operators: all,
            parentheses_share: 0.5,
            negative_results: true,
            max_result: 199,
        },
        Level {
            operators_from_to: (3, 5),
            max_operand: 50,
            operators: all,
            parentheses_share: 0.5,
            negative_results: true,
            max_result: 999,
        },
        Level {
            operators_from_to: (4, 6),
            max_operand: 99,
            operators: all,
            parentheses_share: 0.5,
            negative_results: true,
            max_result: 9999,
        },
    ]
};

impl ArithmeticSpec {
    /// The spec of a level from 1 (`4+3`) to 6 (`91-(36+48)/4*17+5`); `None` for other levels.
    pub fn at_level(level: usize) -> Option<Self> {
        let rung = LADDER.get(level.checked_sub(1)?)?;
        Some(Self {
            min_operators: rung.operators_from_to.0,
            max_operators: rung.operators_from_to.1,
            min_operand: 1,
            max_operand: rung.max_operand,
            operators: rung.operators.to_vec(),
            parentheses_share: rung.parentheses_share,
            negative_results: rung.negative_results,
            max_result: rung.max_result,
            held_out_share: 0.05,
            n_held_out: 500,
            template: None,
            verifier: VerifierSpec::default(),
        })
    }
}

/// The keys of an [`ArithmeticSpec`] in a config: a level, and values that override the level's.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Written {
    level: Option<usize>,
    min_operators: Option<usize>,
    max_operators: Option<usize>,
    min_operand: Option<i64>,
    max_operand: Option<i64>,
    operators: Option<Vec<Operator>>,
    parentheses_share: Option<f64>,
    negative_results: Option<bool>,
    max_result: Option<i64>,
    held_out_share: Option<f64>,
    n_held_out: Option<usize>,
    template: Option<String>,
    verifier: Option<VerifierSpec>,
}

impl TryFrom<Written> for ArithmeticSpec {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        let level = written.level.unwrap_or(DEFAULT);
        let base = Self::at_level(level)
            .ok_or_else(|| format!("level: {level} is not on the ladder, expected 1 to {}", LADDER.len()))?;
        Ok(Self {
            min_operators: written.min_operators.unwrap_or(base.min_operators),
            max_operators: written.max_operators.unwrap_or(base.max_operators),
            min_operand: written.min_operand.unwrap_or(base.min_operand),
            max_operand: written.max_operand.unwrap_or(base.max_operand),
            operators: written.operators.unwrap_or(base.operators),
            parentheses_share: written.parentheses_share.unwrap_or(base.parentheses_share),
            negative_results: written.negative_results.unwrap_or(base.negative_results),
            max_result: written.max_result.unwrap_or(base.max_result),
            held_out_share: written.held_out_share.unwrap_or(base.held_out_share),
            n_held_out: written.n_held_out.unwrap_or(base.n_held_out),
            template: written.template,
            verifier: written.verifier.unwrap_or(base.verifier),
        })
    }
}
