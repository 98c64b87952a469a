//! What ranks tell each other at the end of a step.

use super::Outcome;
use crate::error::Result;
use crate::ranks::{RankError, Ranks, Transport};
use serde::{Deserialize, Serialize};
use stapo_core::record::PhaseSeconds;

/// One rank's part in a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    pub rank: usize,
    pub seconds: PhaseSeconds,
    /// The share of these seconds in which the rank waited for others.
    pub idle_share: f64,
    /// Bytes of gradients and weights that the rank sent.
    pub sent_bytes: u64,
    /// The number of the signal that asked the rank to stop.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
}

impl StepReport {
    /// The part of this rank since its last report.
    pub fn of(ranks: &Ranks, seconds: &PhaseSeconds, signal: Option<i32>) -> Self {
        let idle_share = ranks.take_waited() / seconds.total().max(1e-9);
        StepReport {
            rank: ranks.rank(),
            seconds: *seconds,
            idle_share,
            sent_bytes: ranks.take_sent(),
            signal,
        }
    }

    /// The reports of all ranks, by rank.
    pub fn gather(&self, ranks: &dyn Transport) -> Result<Vec<Self>> {
        let own = serde_json::to_vec(self).expect("finite numbers and texts are JSON");
        let all = ranks.all_gather(&own)?;
        let read =
            |(rank, bytes): (usize, &Vec<u8>)| Ok(serde_json::from_slice(bytes).map_err(of_rank(rank))?);
        all.iter().enumerate().map(read).collect()
    }
}

/// What comes next, as rank 0 decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// How often the other ranks send their part of the state, for a checkpoint.
    pub n_sent: u8,
    /// How the run has ended; `None` while it goes on.
    pub outcome: Option<Outcome>,
}

impl Decision {
    pub fn send(self, ranks: &dyn Transport) -> Result<()> {
        ranks.broadcast(&serde_json::to_vec(&self).expect("a few words are JSON"))?;
        Ok(())
    }

    pub fn receive(ranks: &dyn Transport) -> Result<Self> {
        Ok(serde_json::from_slice(&ranks.broadcast(&[])?).map_err(of_rank(0))?)
    }
}

fn of_rank(rank: usize) -> impl Fn(serde_json::Error) -> RankError {
    move |error| RankError { rank, problem: format!("sent a report that cannot be read: {error}") }
}
