//! Means and deviations of rewards and advantages.

use super::Whiten;
use crate::objective::{Advantages, ObjectiveError};
use crate::stats::has_spread;

fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)))
}

/// `R - mean`; 0 if the rewards have no spread. The rounded mean of equal rewards can differ from the rewards.
pub(super) fn centred(rewards: &[f64]) -> Vec<f64> {
    if !has_spread(rewards.iter().copied()) {
        return vec![0.0; rewards.len()];
    }
    let mean = rewards.iter().sum::<f64>() / rewards.len() as f64;
    rewards.iter().map(|reward| reward - mean).collect()
}

pub(super) fn left_out(rewards: &[f64]) -> Result<Vec<f64>, ObjectiveError> {
    if rewards.len() == 1 {
        return Err(ObjectiveError::LoneResponse { response_idx: None });
    }
    let n = rewards.len() as f64;
    Ok(centred(rewards).into_iter().map(|d| d * (n / (n - 1.0))).collect())
}

pub(super) fn group_z_score(rewards: &[f64], ddof: u8, epsilon: f64) -> Result<Vec<f64>, ObjectiveError> {
    let centred = centred(rewards);
    let std = deviation(&centred, ddof, rewards)?;
    if std == 0.0 {
        return Ok(centred);
    }
    Ok(centred.into_iter().map(|d| d / (std + epsilon)).collect())
}

/// The deviation of all rewards of a batch; 0 if the rewards have no spread.
pub(super) fn batch_std(rewards: &[f64], ddof: u8) -> Result<f64, ObjectiveError> {
    deviation(&centred(rewards), ddof, rewards)
}

/// The deviation of values that are centred already, which come from `rewards`.
fn deviation(centred: &[f64], ddof: u8, rewards: &[f64]) -> Result<f64, ObjectiveError> {
    if centred.iter().all(|&d| d == 0.0) {
        return Ok(0.0);
    }
    let squares: f64 = centred.iter().map(|d| d * d).sum();
    let std = (squares / (rewards.len() as f64 - f64::from(ddof))).sqrt();
    if std.is_finite() && std > 0.0 {
        return Ok(std);
    }
    let (lowest, highest) = range(rewards.iter().copied());
    Err(ObjectiveError::Spread { response_idx: None, lowest, highest })
}

/// Normalises advantages over the whole batch, in place. `lengths` are the tokens of each response.
pub(super) fn whiten(
    whiten: Whiten,
    lengths: &[usize],
    advantages: &mut [Advantages],
) -> Result<(), ObjectiveError> {
    let epsilon = match whiten {
        Whiten::None => return Ok(()),
        Whiten::Responses { epsilon } | Whiten::Tokens { epsilon } => epsilon,
    };
    let by_token = matches!(whiten, Whiten::Tokens { .. });
    let counted: Vec<(f64, f64)> =
        advantages.iter().zip(lengths).flat_map(|(own, &length)| counted(own, length, by_token)).collect();
    let n: f64 = counted.iter().map(|(_, count)| count).sum();
    let differs = has_spread(counted.iter().filter(|(_, count)| *count > 0.0).map(|(value, _)| *value));
    let mean = counted.iter().map(|(value, count)| value * count).sum::<f64>() / n;
    let squares: f64 = counted.iter().map(|(value, count)| (value - mean).powi(2) * count).sum();
    let std = (squares / (n - 1.0)).sqrt();
    if differs && !(std.is_finite() && std > 0.0) {
        let (lowest, highest) = range(counted.iter().map(|(value, _)| *value));
        return Err(ObjectiveError::Spread { response_idx: None, lowest, highest });
    }
    let normalise = |value: &mut f64| {
        *value = if differs { (*value - mean) / (std + epsilon) } else { 0.0 };
    };
    for own in advantages {
        match own {
            Advantages::Response(value) => normalise(value),
            Advantages::Tokens(values) => values.iter_mut().for_each(normalise),
        }
    }
    Ok(())
}

/// The values that a response adds to the statistics of a batch, each with how often the value counts.
fn counted(advantages: &Advantages, length: usize, by_token: bool) -> Vec<(f64, f64)> {
    match advantages {
        Advantages::Response(value) => vec![(*value, if by_token { length as f64 } else { 1.0 })],
        Advantages::Tokens(values) if by_token => values.iter().map(|&value| (value, 1.0)).collect(),
        Advantages::Tokens(_) => vec![(advantages.mean(), 1.0)],
    }
}
