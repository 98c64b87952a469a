use thiserror::Error;

/// Why a statistic has no value. Every message names the argument, its value and the values expected.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum StatsError {
    #[error("{what}: {got} given, expected at least {needed}")]
    TooFew { what: &'static str, needed: usize, got: usize },
    #[error("{what}[{index}]: {value}, expected a finite number")]
    NotFinite { what: &'static str, index: usize, value: f64 },
    #[error("{what}: {left} against {right} entries, expected one pair per question")]
    LengthMismatch { what: &'static str, left: usize, right: usize },
    #[error("{what}: {value}, expected {expected}")]
    OutOfRange { what: &'static str, value: f64, expected: &'static str },
    #[error(
        "question {question}: k = {k}, expected 1 to {n_samples}, its number of samples\nhint: lower k or draw more samples"
    )]
    K { question: usize, k: usize, n_samples: usize },
    #[error(
        "question has {n_correct} correct of {n_samples} samples, expected no more correct ones than samples and at least one sample"
    )]
    Count { n_samples: usize, n_correct: usize },
    #[error("x[{index}]: {value} after {previous}, expected no step back along the curve")]
    NotSorted { index: usize, previous: f64, value: f64 },
}

pub(super) fn at_least(what: &'static str, needed: usize, got: usize) -> Result<(), StatsError> {
    if got < needed { Err(StatsError::TooFew { what, needed, got }) } else { Ok(()) }
}

pub(super) fn all_finite(what: &'static str, values: &[f64]) -> Result<(), StatsError> {
    match values.iter().position(|v| !v.is_finite()) {
        Some(index) => Err(StatsError::NotFinite { what, index, value: values[index] }),
        None => Ok(()),
    }
}

pub(super) fn same_length(what: &'static str, left: usize, right: usize) -> Result<(), StatsError> {
    if left == right { Ok(()) } else { Err(StatsError::LengthMismatch { what, left, right }) }
}

/// Strictly between 0 and 1; refuses NaN.
pub(super) fn open_unit(what: &'static str, value: f64) -> Result<(), StatsError> {
    if value > 0.0 && value < 1.0 {
        Ok(())
    } else {
        Err(StatsError::OutOfRange { what, value, expected: "a number strictly between 0 and 1" })
    }
}
