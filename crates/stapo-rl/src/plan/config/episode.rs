//! The limits of episodes, and how their rewards are credited.

use super::Config;
use super::refusal::{PlanError, count, require, share};
use crate::tasks::{EnvironmentSpec, TaskSpec};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The limits of an episode, and how its rewards are credited. `rollout.max_response_tokens` limits the tokens of a whole
/// episode after its prompt, sampled and given together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EpisodeConfig {
    /// Turns of the policy, at most.
    pub max_turns: usize,
    /// The longest turn, in tokens; `rollout.max_response_tokens` by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_turn_tokens: Option<usize>,
    /// The longest observation, in tokens. A longer one is cut in its middle.
    pub max_observation_tokens: usize,
    /// What a token's advantage compares.
    pub credit: Credit,
    /// The discount of rewards from turn to turn; 1 for none.
    pub discount: f64,
    /// Turns that the environment answers at the same time, at most.
    pub workers: usize,
    /// Where a resumed run takes the answers of steps that it makes again.
    pub resume: AnswerSource,
}

/// What a token's advantage compares.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Credit {
    /// Whole episodes: all tokens of an episode have one advantage.
    #[default]
    Episode,
    /// Turns: the discounted rewards from a turn on, among the turns of the same number in the group.
    Turn,
}

/// Where a resumed run takes the answers of steps that it makes again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AnswerSource {
    /// From the records of these steps and the journal of the unfinished one; the environment answers what they lack.
    #[default]
    Records,
    /// From the environment.
    Environment,
}

impl Default for EpisodeConfig {
    fn default() -> Self {
        Self {
            max_turns: 4,
            max_turn_tokens: None,
            max_observation_tokens: 256,
            credit: Credit::default(),
            discount: 1.0,
            workers: 64,
            resume: AnswerSource::default(),
        }
    }
}

const MAX_TURNS: usize = 1 << 16;
const MAX_OBSERVATION_TOKENS: usize = 1 << 22;
const MAX_WORKERS: usize = 1 << 10;

impl EpisodeConfig {
    /// The longest turn where `n_left` tokens of the episode's limit are left.
    pub fn turn_limit(&self, n_left: usize) -> usize {
        self.max_turn_tokens.map_or(n_left, |limit| limit.min(n_left))
    }
}

/// Checks an environment and the limits of its episodes.
pub(super) fn check(config: &Config, task: &TaskSpec) -> Result<(), PlanError> {
    let Some(environment) = &config.environment else {
        let is_game = matches!(task, TaskSpec::Guess(_));
        let play = "environment = { kind = \"guess\" } plays the game";
        require(
            !is_game,
            "task.kind",
            "guess",
            "hides the answer, and no environment answers guesses",
            play,
        )?;
        let problem = "has no effect, because no environment answers the policy";
        let remedy = "leave it out, or add an environment: environment = { kind = \"tools\", .. }";
        return require(config.episode.is_none(), "episode", "given:", problem, remedy);
    };
    let episode = config.episode.clone().unwrap_or_default();
    count("episode.max_turns", episode.max_turns, MAX_TURNS)?;
    count(
        "episode.max_turn_tokens",
        episode.max_turn_tokens.unwrap_or(1),
        config.rollout.max_response_tokens,
    )?;
    count("episode.max_observation_tokens", episode.max_observation_tokens, MAX_OBSERVATION_TOKENS)?;
    share("episode.discount", episode.discount)?;
    count("episode.workers", episode.workers, MAX_WORKERS)?;
    let kind = environment.kind();
    let is_game = matches!(environment, EnvironmentSpec::Guess(_));
    let remedy = "set task.kind=guess, or take another environment";
    let fits = !is_game || matches!(task, TaskSpec::Guess(_));
    require(fits, "environment.kind", kind, "plays the task of kind guess alone", remedy)?;
    let has_one_reward = !environment.judges() || config.rewards.is_empty();
    let problem = "judges episodes itself, and [[rewards]] has verifiers that would";
    require(has_one_reward, "environment.kind", kind, problem, "leave [[rewards]] out")?;
    for (key, is_given) in [
        ("rollout.lengths", config.rollout.lengths.is_some()),
        ("rollout.source", config.rollout.source.is_some()),
    ] {
        let problem = "has no meaning for episodes, whose turns an environment answers";
        require(!is_given, key, "given:", problem, "leave it out, or leave the environment out")?;
    }
    Ok(())
}
