//! The rewards of a run.

use super::refusal::{PlanError, require};
use super::{Config, RewardConfig};
use crate::reward::VerifierSpec;
use crate::tasks::TaskSpec;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One of several rewards, as written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RewardSpec {
    /// Names the reward in records.
    pub name: String,
    /// The factor on the reward in the sum of all rewards.
    #[serde(default = "one")]
    pub weight: f64,
    /// How responses are judged; by default with the task's verifier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verifier: Option<VerifierSpec>,
    /// The reward of a right response.
    #[serde(default = "one")]
    pub right: f64,
    /// The reward of every other verdict.
    #[serde(default = "minus_one")]
    pub wrong: f64,
}

fn one() -> f64 {
    1.0
}
fn minus_one() -> f64 {
    -1.0
}

/// A reward of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Reward {
    pub name: String,
    pub weight: f64,
    pub verifier: VerifierSpec,
    pub right: f64,
    pub wrong: f64,
}

/// The rewards of a run, at least one. The first one's verifier becomes the task's, which decides accuracy.
pub(super) fn resolve(config: &Config, task: &mut TaskSpec) -> Result<Vec<Reward>, PlanError> {
    if config.rewards.is_empty() {
        let RewardConfig { right, wrong } = config.reward;
        let verifier = task.verifier().clone();
        return Ok(vec![Reward { name: "reward".to_string(), weight: 1.0, verifier, right, wrong }]);
    }
    let default = TaskSpec::default_verifier(task.kind());
    let mut rewards: Vec<Reward> = Vec::new();
    for spec in &config.rewards {
        let RewardSpec { name, weight, verifier, right, wrong } = spec.clone();
        let verifier = verifier.unwrap_or_else(|| default.clone());
        let is_new = rewards.iter().all(|reward| reward.name != name);
        require(is_new, "rewards.name", &name, "is there twice", "give each reward another name")?;
        rewards.push(Reward { name, weight, verifier, right, wrong });
    }
    require(
        config.reward == RewardConfig::default(),
        "reward",
        "given together with [[rewards]]:",
        "one of the two says what a verdict is worth",
        "leave [reward] out; every entry of [[rewards]] has right and wrong",
    )?;
    let given = task.verifier();
    require(
        *given == default || *given == rewards[0].verifier,
        "task.verifier",
        "given together with [[rewards]]:",
        "one of the two says how responses are judged",
        "leave task.verifier out; the first of [[rewards]] decides accuracy",
    )?;
    task.verifier_mut().clone_from(&rewards[0].verifier);
    Ok(rewards)
}

/// Checks the values of every reward.
pub(super) fn check(config: &Config, rewards: &[Reward]) -> Result<(), PlanError> {
    let n_judges = rewards.iter().filter(|reward| reward.verifier.model().is_some()).count();
    require(
        n_judges <= 1,
        "rewards.verifier",
        "several judges or reward models:",
        "a run has one at most",
        "leave all but one out",
    )?;
    require(
        n_judges == 0 || config.environment.is_none(),
        "environment",
        "given together with a judge or a reward model:",
        "these read responses of one turn",
        "leave the environment out, or judge by a rule",
    )?;
    for reward in rewards {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let is_named = !reward.name.is_empty() && reward.name.chars().all(plain);
        require(is_named, "rewards.name", &reward.name, "expected letters, digits, - _ .", "")?;
        let is_weight = reward.weight.is_finite() && reward.weight != 0.0;
        require(is_weight, "rewards.weight", reward.weight, "expected a number other than 0", "")?;
        let contrast = reward.right.is_finite() && reward.wrong.is_finite() && reward.right > reward.wrong;
        let (key, expected) = if config.rewards.is_empty() {
            ("reward.right", "expected a number above reward.wrong")
        } else {
            ("rewards.right", "expected a number above wrong")
        };
        require(contrast, key, reward.right, expected, "")?;
    }
    Ok(())
}
