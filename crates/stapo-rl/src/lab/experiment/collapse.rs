//! When a run collapses, in three senses.

use super::runs::SeedRun;
use crate::learn::canary::no_longer_ends;
use stapo_core::stats::Lifetime;

/// What has to happen to a run for it to count as collapsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Collapse {
    /// The mean entropy of a step is below the plan's share of the first step's
    /// ([`crate::plan::config::CanaryConfig::is_collapse`]).
    Entropy,
    /// The training accuracy, as the mean of [`WINDOW`] steps, is below half of the best such mean so far.
    Accuracy,
    /// Responses no longer end ([`no_longer_ends`]), by the mean of [`WINDOW`] steps.
    Endings,
}

/// Steps over which accuracies and cut responses are averaged, so that a batch of hard problems is no collapse.
const WINDOW: usize = 10;

/// The part of the best accuracy that a run may lose.
const LOST: f64 = 0.5;

impl Collapse {
    pub const ALL: [Self; 3] = [Self::Entropy, Self::Accuracy, Self::Endings];

    pub fn name(self) -> &'static str {
        match self {
            Self::Entropy => "entropy",
            Self::Accuracy => "accuracy",
            Self::Endings => "endings",
        }
    }

    /// The step of a run's collapse, or its last step where it has not collapsed; a run that recovers has collapsed all
    /// the same.
    pub fn lifetime(self, run: &SeedRun<'_>) -> Lifetime {
        let column = match self {
            Self::Entropy => {
                let first = run.metrics[0].entropy_mean;
                run.metrics.iter().position(|m| run.canaries.is_collapse(first, m.entropy_mean))
            }
            Self::Accuracy => {
                let accuracies: Vec<f64> = run.metrics.iter().map(|m| m.accuracy).collect();
                falls_at(&accuracies)
            }
            Self::Endings => {
                let shares: Vec<f64> = run.metrics.iter().map(|m| m.truncated_share).collect();
                means(&shares).find(|&(_, mean)| no_longer_ends(shares[0], mean)).map(|(column, _)| column)
            }
        };
        let last = run.metrics.len() - 1;
        Lifetime { time: run.metrics[column.unwrap_or(last)].step as f64, is_event: column.is_some() }
    }
}

/// The last place of the first window whose mean is below [`LOST`] of the best mean of a window before.
fn falls_at(accuracies: &[f64]) -> Option<usize> {
    let mut best = 0.0;
    for (place, mean) in means(accuracies) {
        if mean < LOST * best {
            return Some(place);
        }
        best = f64::max(best, mean);
    }
    None
}

/// The last place of every window with its mean.
fn means(values: &[f64]) -> impl Iterator<Item = (usize, f64)> {
    let windows = values.windows(WINDOW).enumerate();
    windows.map(|(start, window)| (start + WINDOW - 1, window.iter().sum::<f64>() / WINDOW as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_best_lost_for_ten_steps_is_a_collapse_and_one_bad_step_is_none() {
        let mut accuracies = vec![0.8; 30];
        accuracies[15] = 0.0;
        assert_eq!(falls_at(&accuracies), None);
        accuracies.extend([0.0; 10]);
        // Of ten steps at 0.8 the mean is at half after five steps at 0, and below after six.
        assert_eq!(falls_at(&accuracies), Some(35));
        assert_eq!(falls_at(&[0.0; 50]), None, "nothing to lose");
        assert_eq!(falls_at(&[0.9, 0.0]), None, "too short to say");
    }
}
