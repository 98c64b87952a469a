//! The levels of difficulty.

use super::{ArithmeticSpec, Operator};
use crate::reward::spec::VerifierSpec;
use schemars::{Schema, json_schema};
use stapo_core::settings::{self, SettingsError};
use toml::Table;

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
            system: None,
            verifier: VerifierSpec::default(),
        })
    }
}

/// The keys that a level sets.
const LEVEL_KEYS: [&str; 8] = [
    "min_operators",
    "max_operators",
    "min_operand",
    "max_operand",
    "operators",
    "parentheses_share",
    "negative_results",
    "max_result",
];

/// Adds the key `level` to the schema of the task.
pub(super) fn add_level(schema: &mut Schema) {
    let level = json_schema!({
        "description": "The difficulty, which sets the form of the expressions.",
        "type": "integer",
        "minimum": 1,
        "maximum": LADDER.len(),
    });
    if let Some(properties) = schema.get_mut("properties").and_then(|found| found.as_object_mut()) {
        properties.insert("level".to_string(), level.into());
    }
}

/// A task's table with the values of its `level` instead of that key; keys that the table gives keep their values.
/// `root` begins the path in messages.
pub(in crate::tasks) fn spell_out_level(root: &str, mut table: Table) -> Result<Table, SettingsError> {
    let Some(level) = table.remove("level") else { return Ok(table) };
    let refuse = |problem: String, suggestion: &str| SettingsError::Unreadable {
        path: format!("{root}.level"),
        problem,
        suggestion: suggestion.to_string(),
    };
    let number = level.as_integer().and_then(|level| usize::try_from(level).ok());
    let spec = number.and_then(ArithmeticSpec::at_level).ok_or_else(|| {
        refuse(format!("{level} is not on the ladder"), &format!("a number from 1 to {}", LADDER.len()))
    })?;
    if LEVEL_KEYS.iter().all(|key| table.contains_key(*key)) {
        let problem = format!("{level} changes nothing, because every value that a level sets is given");
        return Err(refuse(problem, "leave the level out, or the values"));
    }
    for (key, value) in settings::to_table(&spec) {
        if LEVEL_KEYS.contains(&key.as_str()) {
            table.entry(key).or_insert(value);
        }
    }
    Ok(table)
}
