//! Why a config was refused, and the checks of single values.

use stapo_core::objective::SpecError;
use stapo_core::settings::{SettingsError, hint};
use thiserror::Error;

/// Why a config was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PlanError {
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error(transparent)]
    Objective(#[from] SpecError),
    #[error("config.{key}: {problem}{}", hint(remedy))]
    Refused { key: &'static str, problem: String, remedy: &'static str },
}

impl PlanError {
    /// The path of the key that the error is about, as in `rollout.group_size`.
    pub fn key(&self) -> Option<String> {
        let key = match self {
            PlanError::Settings(error) | PlanError::Objective(SpecError::Settings(error)) => error.key()?,
            PlanError::Objective(SpecError::UnknownPreset { .. }) => "objective.preset".to_string(),
            PlanError::Objective(SpecError::Refused { key, .. }) => format!("objective.{key}"),
            PlanError::Objective(SpecError::RefusedPreference { key, .. }) => format!("preference.{key}"),
            PlanError::Refused { key, .. } => (*key).to_string(),
        };
        Some(key.strip_prefix("config.").map_or(key.clone(), str::to_string))
    }
}

/// Refuses `value` of `key` where it is not good. `expected` continues after the value: `expected ..`, or a verb.
pub(crate) fn require(
    is_good: bool,
    key: &'static str,
    value: impl std::fmt::Display + Copy,
    expected: &str,
    remedy: &'static str,
) -> Result<(), PlanError> {
    if is_good {
        return Ok(());
    }
    let comma = if expected.starts_with("expected") { "," } else { "" };
    let value = Some(value.to_string()).filter(|text| !text.is_empty()).unwrap_or("\"\"".to_string());
    Err(PlanError::Refused { key, problem: format!("{value}{comma} {expected}"), remedy })
}

/// A count from 1 to `max`.
pub(super) fn count(key: &'static str, value: usize, max: usize) -> Result<(), PlanError> {
    at_least_one(key, value as u64)?;
    require(value <= max, key, value, &format!("expected at most {max}"), "")
}

pub(crate) fn at_least_one(key: &'static str, value: u64) -> Result<(), PlanError> {
    require(value >= 1, key, value, "expected at least 1", "")
}

pub(crate) fn positive(key: &'static str, value: f64) -> Result<(), PlanError> {
    require(value.is_finite() && value > 0.0, key, value, "expected a positive number", "")
}

/// A share, both ends included.
pub(super) fn share(key: &'static str, value: f64) -> Result<(), PlanError> {
    require((0.0..=1.0).contains(&value), key, value, "expected a number from 0 to 1", "")
}

pub(super) fn in_unit(key: &'static str, value: f64) -> Result<(), PlanError> {
    require((0.0..1.0).contains(&value), key, value, "expected a number in [0, 1)", "")
}
