//! Why a batch cannot be evaluated.

use thiserror::Error;

/// Why a batch cannot be evaluated. `response_idx` counts from 0 within the batch.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum ObjectiveError {
    #[error("response {response_idx}: {field} has {got} entries, logp has {expected}")]
    Length { response_idx: usize, field: &'static str, got: usize, expected: usize },
    #[error("response {response_idx}: {field}[{token_idx}] is {value}, expected {expected}")]
    Value { response_idx: usize, field: &'static str, token_idx: usize, value: f64, expected: &'static str },
    #[error("response {response_idx}: advantage is {value}, expected a finite number")]
    Advantage { response_idx: usize, value: f64 },
    #[error("response {response_idx}: {field} is missing; {needed_by} needs it\nhint: {remedy}")]
    Missing { response_idx: usize, field: &'static str, needed_by: &'static str, remedy: &'static str },
    #[error(
        "response {response_idx}: {what} of token {token_idx} is not finite (logp {logp}, behavior_logp {behavior_logp})\nhint: such log-probs come from different tokens or different models"
    )]
    NotFinite { response_idx: usize, token_idx: usize, what: &'static str, logp: f64, behavior_logp: f64 },
    #[error(
        "response {response_idx}: {got} rewards, expected {expected}\nhint: every response has the same rewards, one per weight"
    )]
    RewardCount { response_idx: usize, got: usize, expected: usize },
    #[error(
        "group of 1 response: leave_one_out has no other response to compare with\nhint: sample at least 2 responses per problem"
    )]
    LoneResponse { response_idx: Option<usize> },
    #[error("reward {reward_idx} of the group is {value}, expected a finite number")]
    Reward { reward_idx: usize, value: f64 },
    #[error(
        "rewards from {lowest:e} to {highest:e}: the square of their deviation is not a number that f64 can hold\nhint: scale the rewards; differences between 1e-150 and 1e150 have a deviation"
    )]
    Spread { response_idx: Option<usize>, lowest: f64, highest: f64 },
}

impl ObjectiveError {
    /// The response at fault, the first of a group at fault; absent for faults of a whole batch.
    pub fn response_idx(&self) -> Option<usize> {
        match *self {
            Self::Length { response_idx, .. }
            | Self::Value { response_idx, .. }
            | Self::Advantage { response_idx, .. }
            | Self::Missing { response_idx, .. }
            | Self::RewardCount { response_idx, .. }
            | Self::NotFinite { response_idx, .. } => Some(response_idx),
            Self::LoneResponse { response_idx } | Self::Spread { response_idx, .. } => response_idx,
            Self::Reward { .. } => None,
        }
    }

    /// The error of a group whose first response is `first`.
    #[must_use]
    pub(super) fn of_group(mut self, first: usize) -> Self {
        if let Self::LoneResponse { response_idx } | Self::Spread { response_idx, .. } = &mut self {
            *response_idx = Some(first);
        }
        self
    }

    /// The error with the index of its token replaced by `of_token(index)`, for a caller that left tokens out.
    #[must_use]
    pub fn map_token_idx(mut self, of_token: impl Fn(usize) -> usize) -> Self {
        if let Self::Value { token_idx, .. } | Self::NotFinite { token_idx, .. } = &mut self {
            *token_idx = of_token(*token_idx);
        }
        self
    }
}
