//! Worked solutions of countdown, found by search, with mistakes.

use super::{Puzzle, operators_from};
use crate::tasks::arithmetic::{Mistakes, Operator};
use stapo_core::random::Key;

/// A number that is available for the next move, with the expression that it is the value of.
#[derive(Debug, Clone)]
struct Tile {
    value: i64,
    text: String,
    /// The precedence of the expression's last operation; 3 for a plain number.
    binding: u8,
}

#[derive(Debug, Clone, Copy)]
struct Move {
    left_idx: usize,
    operator: Operator,
    right_idx: usize,
}

/// Joins all numbers by random operations; `None` if an operation gives a fraction or a negative number.
pub(super) fn join_at_random(numbers: &[i64], key: Key) -> Option<i64> {
    let mut values = numbers.to_vec();
    for step in 0.. {
        if let [value] = values[..] {
            return Some(value);
        }
        let chosen = random_move(values.len(), key.with(step));
        let value = result(&values, chosen)?;
        values = after(&values, chosen, value);
    }
    None
}

/// The text of a solution: steps such as `2*5=10,`, and the whole expression in a box.
pub(super) fn write(puzzle: &Puzzle, mistakes: &Mistakes, key: Key) -> String {
    let mut tiles: Vec<Tile> =
        puzzle.numbers.iter().map(|&value| Tile { value, text: value.to_string(), binding: 3 }).collect();
    let mut steps = Vec::new();
    let mut step = 0;
    while tiles.len() > 1 {
        let key = key.with(step);
        step += 1;
        let values: Vec<i64> = tiles.iter().map(|tile| tile.value).collect();
        let goes_astray = key.with(0).uniform() < mistakes.wrong_order_share;
        let planned = if goes_astray { None } else { search(&values, puzzle.target, key.with(1)) };
        let chosen = planned.unwrap_or_else(|| some_move(&values, key.with(2)));
        let right = result(&values, chosen).unwrap_or(0);
        let is_hidden = tiles.len() > 2 && key.with(3).uniform() < mistakes.skipped_step_share;
        let wrong_share = if is_hidden { mistakes.skipped_wrong_share } else { mistakes.wrong_result_share };
        let is_wrong = key.with(4).uniform() < wrong_share;
        let value = if is_wrong { right.saturating_add(1 + key.with(5).below(3) as i64) } else { right };
        let left = &tiles[chosen.left_idx];
        let right = &tiles[chosen.right_idx];
        if !is_hidden {
            steps.push(format!("{}{}{}={value},", left.value, chosen.operator.symbol(), right.value));
        }
        let joined = join(left, chosen.operator, right, value);
        let (low, high) = ordered(chosen);
        tiles.remove(high);
        tiles[low] = joined;
    }
    format!("{}\\boxed{{{}}}", steps.concat(), tiles[0].text)
}

/// The first move of a solution that joins all values to `target`.
fn search(values: &[i64], target: i64, key: Key) -> Option<Move> {
    let n = values.len();
    let turn = key.bits();
    // The key rotates the order of the moves, so that another key finds another solution of the same problem.
    (0..n * n).map(|place| ((place as u64).wrapping_add(turn % (n * n) as u64) as usize) % (n * n)).find_map(
        |place| {
            let (left_idx, right_idx) = (place / n, place % n);
            if left_idx == right_idx {
                return None;
            }
            operators_from(turn >> 32).find_map(|operator| {
                let is_repeat =
                    left_idx > right_idx && matches!(operator, Operator::Add | Operator::Multiply);
                let chosen = Move { left_idx, operator, right_idx };
                if is_repeat {
                    return None;
                }
                let value = result(values, chosen)?;
                let rest = after(values, chosen, value);
                let reached = if rest.len() == 1 {
                    value == target
                } else {
                    search(&rest, target, key.with(0)).is_some()
                };
                reached.then_some(chosen)
            })
        },
    )
}

/// A random move with an integer result of at least 0; an addition where 20 draws find none.
fn some_move(values: &[i64], key: Key) -> Move {
    (0..20)
        .map(|attempt| random_move(values.len(), key.with(attempt)))
        .find(|&chosen| result(values, chosen).is_some())
        .unwrap_or(Move { left_idx: 0, operator: Operator::Add, right_idx: 1 })
}

fn random_move(n_values: usize, key: Key) -> Move {
    let left_idx = key.with(0).below(n_values as u64) as usize;
    let right_idx = (left_idx + 1 + key.with(1).below(n_values as u64 - 1) as usize) % n_values;
    let operator = Operator::ALL[key.with(2).below(4) as usize];
    Move { left_idx, operator, right_idx }
}

fn result(values: &[i64], chosen: Move) -> Option<i64> {
    let value = chosen.operator.apply(values[chosen.left_idx], values[chosen.right_idx])?;
    (value >= 0).then_some(value)
}

fn after(values: &[i64], chosen: Move, value: i64) -> Vec<i64> {
    let (low, high) = ordered(chosen);
    let mut rest = values.to_vec();
    rest.remove(high);
    rest[low] = value;
    rest
}

fn ordered(chosen: Move) -> (usize, usize) {
    (chosen.left_idx.min(chosen.right_idx), chosen.left_idx.max(chosen.right_idx))
}

fn join(left: &Tile, operator: Operator, right: &Tile, value: i64) -> Tile {
    let binding = operator.precedence();
    let guarded = |tile: &Tile, needed: u8| {
        if tile.binding < needed { format!("({})", tile.text) } else { tile.text.clone() }
    };
    let right_needs = match operator {
        Operator::Add => 1,
        Operator::Subtract | Operator::Multiply => 2,
        Operator::Divide => 3,
    };
    let text = format!("{}{}{}", guarded(left, binding), operator.symbol(), guarded(right, right_needs));
    Tile { value, text, binding }
}
