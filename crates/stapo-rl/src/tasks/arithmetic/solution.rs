//! Worked solutions with mistakes.

use super::expression::{Expression, Operation};
use crate::tasks::error::TaskError;
use crate::tasks::split::check_share;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stapo_core::random::Key;

/// The frequency of mistakes in worked solutions. Shares are per step; the steps after a mistake are consistent with
/// the mistake. The solution of a problem is a function of these values; another `seed` gives another solution.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Mistakes {
    /// The seed of the mistakes.
    pub seed: u64,
    /// A wrong result: off by one, off by ten, another digit, the other sign.
    pub wrong_result_share: f64,
    /// An operation that precedence does not allow yet, as in 7+5*2=12*2, where the expression has one; in countdown, a
    /// random move.
    pub wrong_order_share: f64,
    /// Two operations in one step.
    pub skipped_step_share: f64,
    /// The share of wrong results among the operations that are not written down.
    pub skipped_wrong_share: f64,
    /// The share of letters, in the words between steps, that are replaced by another letter. A typo is improbable, has
    /// low entropy and does not change the answer. In arithmetic only.
    pub typo_share: f64,
}

impl Default for Mistakes {
    /// With these values about 45 % of the solutions of arithmetic at the default level are right.
    fn default() -> Self {
        Self {
            seed: 0,
            wrong_result_share: 0.2,
            wrong_order_share: 0.2,
            skipped_step_share: 0.2,
            skipped_wrong_share: 0.5,
            typo_share: 0.006,
        }
    }
}

impl Mistakes {
    /// Every step is right and written down.
    pub const NONE: Self = Self {
        seed: 0,
        wrong_result_share: 0.0,
        wrong_order_share: 0.0,
        skipped_step_share: 0.0,
        skipped_wrong_share: 0.0,
        typo_share: 0.0,
    };

    pub(in crate::tasks) fn check(&self) -> Result<(), TaskError> {
        check_share("wrong_result_share", self.wrong_result_share)?;
        check_share("wrong_order_share", self.wrong_order_share)?;
        check_share("skipped_step_share", self.skipped_step_share)?;
        check_share("skipped_wrong_share", self.skipped_wrong_share)?;
        check_share("typo_share", self.typo_share)
    }
}

/// The words before a step. The choice of a word has no bearing on the answer, so a policy can lose its mistakes and
/// keep the entropy of this choice.
const WORDS: [&str; 8] = ["so", "now", "then", "next", "thus", "and", "get", "or"];
/// The letters of the words and of `\boxed`, in code-point order. A typo is one of these.
const LETTERS: &[u8] = b"abdeghnorstuwx";

/// The text of a solution: the steps, each after a word, and the box.
pub(super) fn write(mut expression: Expression, mistakes: &Mistakes, key: Key) -> String {
    let mut steps = Vec::new();
    let mut step = 0;
    loop {
        let key = key.with(step);
        step += 1;
        let Some(reduced) = reduce(&expression, mistakes, mistakes.wrong_result_share, key.with(0)) else {
            break;
        };
        expression = reduced;
        if key.with(1).uniform() < mistakes.skipped_step_share {
            let hidden = reduce(&expression, mistakes, mistakes.skipped_wrong_share, key.with(2));
            expression = hidden.unwrap_or(expression);
        }
        if expression.number().is_none() {
            steps.push(format!("{} {expression}, ", word(mistakes, key.with(3))));
        }
    }
    let last = word(mistakes, key.with(step));
    format!("{}{last} \\boxed{{{expression}}}", steps.concat())
}

fn word(mistakes: &Mistakes, key: Key) -> String {
    let word = WORDS[key.with(0).below(WORDS.len() as u64) as usize];
    let typo = |(idx, letter): (usize, char)| {
        let key = key.with(1).with(idx as u64);
        if key.with(0).uniform() < mistakes.typo_share { another_letter(letter, key.with(1)) } else { letter }
    };
    word.chars().enumerate().map(typo).collect()
}

fn another_letter(letter: char, key: Key) -> char {
    let others: Vec<char> = LETTERS.iter().map(|&c| c as char).filter(|&c| c != letter).collect();
    others[key.below(others.len() as u64) as usize]
}

/// The expression reduced by one operation; `None` for an expression without operations.
fn reduce(expression: &Expression, mistakes: &Mistakes, wrong_share: f64, key: Key) -> Option<Expression> {
    let operation = choose(expression, mistakes, key.with(0))?;
    let right = operation.operator.apply_carelessly(operation.left, operation.right);
    let value = if key.with(1).uniform() < wrong_share { wrong_value(right, key.with(2)) } else { right };
    Some(expression.clone().reduce(operation, value))
}

fn choose(expression: &Expression, mistakes: &Mistakes, key: Key) -> Option<Operation> {
    if key.with(0).uniform() < mistakes.wrong_order_share {
        let premature = expression.premature_operations();
        if !premature.is_empty() {
            return Some(premature[key.with(1).below(premature.len() as u64) as usize]);
        }
    }
    expression.next_operation()
}

/// A value near `right` that is not `right`.
fn wrong_value(right: i64, key: Key) -> i64 {
    let sign = if key.with(0).below(2) == 0 { 1 } else { -1 };
    match key.with(1).below(8) {
        0..=2 => right.saturating_add(sign),
        3..=4 if right.unsigned_abs() >= 10 => right.saturating_add(10 * sign),
        5..=6 => with_another_digit(right, key.with(2)),
        7 if right != 0 => right.saturating_neg(),
        _ => right.saturating_sub(sign),
    }
}

fn with_another_digit(right: i64, key: Key) -> i64 {
    let digits = right.unsigned_abs().to_string().len() as u64;
    let power_of_ten = 10_i128.pow(key.with(0).below(digits) as u32);
    let size = i128::from(right.unsigned_abs());
    let digit = size / power_of_ten % 10;
    let other = (digit + 1 + i128::from(key.with(1).below(9))) % 10;
    let changed = (size + (other - digit) * power_of_ten).min(i128::from(i64::MAX)) as i64;
    if right < 0 { -changed } else { changed }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_digit_is_one_other_digit() {
        for right in [0, 7, -3, 40, 105, -98_765, 1_234_567_890] {
            for seed in 0..50 {
                let wrong = with_another_digit(right, Key::new(seed));
                let [a, b] = [right, wrong].map(|value| format!("{:012}", value.unsigned_abs()));
                let n_other = a.bytes().zip(b.bytes()).filter(|(a, b)| a != b).count();
                assert!(n_other == 1 && right.signum() * wrong.signum() >= 0, "{right}: {wrong}");
            }
        }
    }
}
