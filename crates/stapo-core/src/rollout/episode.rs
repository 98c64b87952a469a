//! What an environment answered to the turns of an episode.

use super::{Turn, Verdict};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The answers of an environment in the order of the policy's turns.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Episode {
    pub turns: Vec<EpisodeTurn>,
}

/// The answer to one turn of the policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EpisodeTurn {
    /// SHA-256 of the text that was answered.
    pub text_sha256: String,
    /// The calls that the turn made, in order; each is answered by the observation of the same index.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<ToolCall>,
    /// What the policy was to be given next, before it was cut; empty if the environment ended the episode.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub observations: Vec<Turn>,
    /// Observations that were cut because they were too long.
    #[serde(default)]
    pub n_cut: usize,
    /// The reward that the environment gave to the turn. The last turn has that of the judgement besides.
    #[serde(default)]
    pub reward: f64,
    /// The environment's judgements, one per reward, where it ended the episode.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub judged: Vec<TurnVerdict>,
    /// The discounted sum of rewards from this turn to the last, for each reward of the run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub returns: Vec<f64>,
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ToolCall {
    pub tool: String,
    /// As JSON, or as the policy wrote them where they could not be read.
    pub arguments: String,
    /// SHA-256 of the tool's answer.
    pub sha256: String,
    /// Whether the call was wrong, or the tool could not answer it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
    /// Whether the tool was stopped by a limit of time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub timed_out: bool,
}

/// A judgement that ended an episode.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TurnVerdict {
    pub verdict: Verdict,
    /// The reward that the environment gave; by default that of the verdict.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<String>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

impl Episode {
    /// Sets every turn's return: `G_t = r_t + discount G_(t+1)`. `last` is what the judgement at the end is worth, for each
    /// reward; rewards of turns belong to the first. Returns those of the first turn, which are the episode's.
    pub fn set_returns(&mut self, last: &[f64], discount: f64) -> Vec<f64> {
        let mut after: Option<Vec<f64>> = None;
        for turn in self.turns.iter_mut().rev() {
            let mut returns = match &after {
                None => last.to_vec(),
                Some(after) => after.iter().map(|value| discount * value).collect(),
            };
            returns[0] += turn.reward;
            turn.returns.clone_from(&returns);
            after = Some(returns);
        }
        after.unwrap_or_else(|| last.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(reward: f64) -> EpisodeTurn {
        EpisodeTurn {
            text_sha256: String::new(),
            calls: Vec::new(),
            observations: Vec::new(),
            n_cut: 0,
            reward,
            judged: Vec::new(),
            returns: Vec::new(),
        }
    }

    #[test]
    fn a_return_is_the_discounted_sum_of_later_rewards() {
        let mut episode = Episode { turns: vec![turn(1.0), turn(0.0), turn(-0.5)] };
        assert_eq!(episode.set_returns(&[4.0, 8.0], 0.5), [1.875, 2.0]);
        let returns: Vec<&[f64]> = episode.turns.iter().map(|turn| turn.returns.as_slice()).collect();
        assert_eq!(returns, [&[1.875, 2.0], &[1.75, 4.0], &[3.5, 8.0]]);
    }
}
