//! What ranks send each other at the end of a step.

use super::Outcome;
use crate::error::Result;
use crate::learn::learner::{Learner, Saving};
use crate::ranks::{RankError, Transport};
use serde::{Deserialize, Serialize};
use stapo_core::record::PhaseSeconds;
use stapo_model::decoder::Exchanged;

/// One rank's part in a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    pub rank: usize,
    pub seconds: PhaseSeconds,
    /// The share of these seconds in which the rank waited for others.
    pub idle_share: f64,
    /// Bytes of gradients and weights that the rank sent.
    pub sent_bytes: u64,
    #[serde(default)]
    pub exchanged: ExchangeReport,
    /// The number of the signal that asked the rank to stop.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
}

/// What a rank sent of gradients and weights, and how long it took.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct ExchangeReport {
    /// Seconds of the exchanges of gradients, waiting for the other ranks included. On GPUs with NCCL they run beside
    /// backward; elsewhere these are seconds in which the rank did nothing else.
    pub gradient_seconds: f64,
    /// Seconds of the additions in the order of the micro-batches.
    pub fold_seconds: f64,
    /// Seconds in which a GPU with nothing else to do waited for both.
    pub waited_seconds: f64,
    /// Seconds of the exchanges of weights after optimizer steps.
    pub weight_seconds: f64,
    pub gradient_bytes: u64,
    pub weight_bytes: u64,
}

impl From<Exchanged> for ExchangeReport {
    fn from(exchanged: Exchanged) -> Self {
        let Exchanged { gradient_seconds, fold_seconds, waited_seconds, .. } = exchanged;
        let Exchanged { weight_seconds, gradient_bytes, weight_bytes, .. } = exchanged;
        Self { gradient_seconds, fold_seconds, waited_seconds, weight_seconds, gradient_bytes, weight_bytes }
    }
}

impl StepReport {
    /// The part of this rank since its last report.
    pub fn since_last(learner: &mut Learner, seconds: &PhaseSeconds, signal: Option<i32>) -> Self {
        let exchanged = ExchangeReport::from(learner.take_exchanged());
        let idle_share = learner.ranks.take_waited() / seconds.total().max(1e-9);
        StepReport {
            rank: learner.ranks.rank(),
            seconds: *seconds,
            idle_share,
            sent_bytes: exchanged.gradient_bytes + exchanged.weight_bytes,
            exchanged,
            signal,
        }
    }

    /// The reports of all ranks, by rank.
    pub fn gather(&self, ranks: &dyn Transport) -> Result<Vec<Self>> {
        let report = serde_json::to_vec(self).expect("finite numbers and texts are JSON");
        let all = ranks.all_gather(&report)?;
        let read = |(rank, bytes): (usize, &Vec<u8>)| {
            Ok(serde_json::from_slice(bytes).map_err(unreadable_from(rank))?)
        };
        all.iter().enumerate().map(read).collect()
    }
}

/// What comes next, as rank 0 decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// What a checkpoint needs of all ranks; `None` if none is due.
    pub saving: Option<Saving>,
    /// How the run has ended; `None` while it continues.
    pub outcome: Option<Outcome>,
}

impl Decision {
    /// The decision of rank 0, on every rank; the others have none.
    pub fn share(decision: Option<Self>, ranks: &dyn Transport) -> Result<Self> {
        let sent = decision.map(|decision| serde_json::to_vec(&decision).expect("a few words are JSON"));
        let shared = ranks.broadcast(&sent.unwrap_or_default())?;
        Ok(serde_json::from_slice(&shared).map_err(unreadable_from(0))?)
    }
}

fn unreadable_from(rank: usize) -> impl Fn(serde_json::Error) -> RankError {
    move |error| RankError { rank, problem: format!("sent a report that cannot be read: {error}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::Solo;

    #[test]
    fn what_was_exchanged_is_reported_under_its_name() {
        let exchanged = Exchanged {
            gradient_seconds: 1.0,
            fold_seconds: 2.0,
            waited_seconds: 3.0,
            gradient_bytes: 4,
            weight_seconds: 5.0,
            weight_bytes: 6,
        };
        let found = serde_json::to_value(ExchangeReport::from(exchanged)).unwrap();
        let expected = serde_json::json!({
            "gradient_seconds": 1.0, "fold_seconds": 2.0, "waited_seconds": 3.0, "weight_seconds": 5.0,
            "gradient_bytes": 4, "weight_bytes": 6
        });
        assert_eq!(found, expected);
    }

    #[test]
    fn reports_and_decisions_arrive_as_they_were_sent() {
        let report = StepReport {
            rank: 0,
            seconds: PhaseSeconds::default(),
            idle_share: 0.25,
            sent_bytes: 10,
            exchanged: ExchangeReport::default(),
            signal: Some(15),
        };
        assert_eq!(report.gather(&Solo).unwrap(), [report]);
        let saved = Decision { saving: Some(Saving::State), outcome: Some(Outcome::TargetReached) };
        for decision in [saved, Decision { saving: None, outcome: None }] {
            assert_eq!(Decision::share(Some(decision), &Solo).unwrap(), decision);
        }
        let said = Decision::share(None, &Solo).unwrap_err().to_string();
        assert!(said.contains("rank 0") && said.contains("cannot be read"), "{said}");
    }
}
