//! A reward model as a reward: its score of a response, in addition to the verdict of the grader's rule. This module knows no model:
//! the room that loads one gives it in as [`ScoreResponses`].

use super::judged::Judged;
use super::keep::KeepWeights;
use super::rule::{RuleSpec, by_rule};
use crate::tasks::error::TaskError;
use rayon::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use stapo_core::reward_model::Normalise;
use stapo_core::{JudgeOpinion, Problem};
use stapo_model::DeviceName;

/// A model that gives a response a score.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RewardModelSpec {
    /// The model: a Hugging Face folder of a `*ForSequenceClassification` with one label, the folder of a finished `stapo rm`, or a
    /// name on the hub.
    pub model: String,
    /// The device of the model: `cpu`, `cuda` or `cuda:N`; by default that of the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Where the weights are while the policy samples and learns on the same GPU.
    #[serde(default, skip_serializing_if = "KeepWeights::is_default")]
    pub keep: KeepWeights,
    /// The system message in front of the problem.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// Renders problem and response with the model's chat template; by default where the model has one. As in the training of the
    /// reward model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat: Option<bool>,
    /// Further variables of the chat template.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub chat_arguments: Map<String, Value>,
    /// The longest problem with its response, in tokens of the reward model. A longer one has the lowest reward, `-clip`.
    #[serde(default = "max_tokens")]
    pub max_tokens: usize,
    /// What scores are measured against.
    #[serde(default)]
    pub normalise: Normalise,
    /// Rewards are cut to the range from `-clip` to `clip`.
    #[serde(default = "clip")]
    pub clip: f64,
    /// The rule that decides the verdict, and so accuracy.
    #[serde(default)]
    pub rule: RuleSpec,
}

fn max_tokens() -> usize {
    4096
}
fn clip() -> f64 {
    10.0
}

impl RewardModelSpec {
    /// Refuses values with which no reward model can work.
    pub(crate) fn check(&self) -> Result<(), TaskError> {
        let refuse = |key, problem: String, remedy: &str| Err(TaskError::setting(key, problem, remedy));
        if self.model.is_empty() {
            return refuse("verifier.model", "is empty".into(), "name the reward model");
        }
        if let Some(Err(error)) = self.device.as_deref().map(str::parse::<DeviceName>) {
            return refuse("verifier.device", error.to_string(), "leave it out for the device of the run");
        }
        self.keep.check(self.device.as_deref())?;
        if !(1..=1 << 20).contains(&self.max_tokens) {
            let remedy = "a number of tokens from 1 to 1048576";
            return refuse("verifier.max_tokens", self.max_tokens.to_string(), remedy);
        }
        if !(self.clip.is_finite() && self.clip > 0.0) {
            return refuse("verifier.clip", self.clip.to_string(), "a number above 0");
        }
        Ok(())
    }
}

/// A model that can be asked for scores. A score depends on problem and response alone, whatever else is scored with it; `None` for
/// a response that is too long.
pub trait ScoreResponses: Send + Sync {
    fn score(&self, samples: &[(&Problem, &str)]) -> Result<Vec<Option<f64>>, TaskError>;
}

/// The verifier of a reward model.
pub(crate) struct RewardModelVerifier {
    spec: RewardModelSpec,
    /// The model; `None` until it is loaded.
    model: Option<Box<dyn ScoreResponses>>,
}

impl RewardModelVerifier {
    pub fn open(spec: &RewardModelSpec) -> Result<Self, TaskError> {
        spec.check()?;
        Ok(Self { spec: spec.clone(), model: None })
    }

    /// Gives the verifier its model, which `load` loads, unless it has one.
    pub fn load<E>(
        &mut self,
        load: &mut impl FnMut(&RewardModelSpec) -> Result<Box<dyn ScoreResponses>, E>,
    ) -> Result<(), E> {
        if self.model.is_none() {
            self.model = Some(load(&self.spec)?);
        }
        Ok(())
    }

    /// The verdicts of the rule, with the scores as rewards. The caller normalises them once it has the scores of all groups.
    pub fn judge(&self, samples: &[(&Problem, &str)]) -> Result<Vec<Judged>, TaskError> {
        let Some(model) = &self.model else {
            let problem =
                format!("the reward model {} was not loaded, so it scores nothing", self.spec.model);
            let remedy = "stapo train loads reward models; other commands need a rule";
            return Err(TaskError::setting("verifier", problem, remedy));
        };
        let rules = self.spec.rule.into();
        let scores = model.score(samples)?;
        let judged = samples.par_iter().zip(scores).map(|(&(problem, text), score)| {
            let by_rule = by_rule(problem, text, rules);
            let opinion = JudgeOpinion { score, ..JudgeOpinion::of_rule(by_rule.verdict) };
            let reward = Some(score.unwrap_or(-self.spec.clip));
            Judged { reward, judge: Some(Box::new(opinion)), ..by_rule }
        });
        Ok(judged.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stapo_core::Verdict;

    /// Scores the length of a response; one of more than five characters is too long.
    struct Lengths;

    impl ScoreResponses for Lengths {
        fn score(&self, samples: &[(&Problem, &str)]) -> Result<Vec<Option<f64>>, TaskError> {
            Ok(samples.iter().map(|(_, text)| Some(text.len() as f64).filter(|n| *n <= 5.0)).collect())
        }
    }

    fn spec(set: &str) -> RewardModelSpec {
        toml::from_str(&format!("model = \"m\"\n{set}")).unwrap()
    }

    #[test]
    fn a_response_that_is_too_long_has_the_lowest_reward_and_the_rule_decides_verdicts() {
        let mut verifier = RewardModelVerifier::open(&spec("clip = 3.0")).unwrap();
        let [id, prompt, reference] = ["p", "1+1=", "2"].map(String::from);
        let problem = Problem { id, earlier_turns: Vec::new(), prompt, reference };
        let samples = [(&problem, "2"), (&problem, "\\boxed{2}")];
        assert!(verifier.judge(&samples).unwrap_err().to_string().contains("was not loaded"));
        let mut n_loaded = 0;
        for _ in 0..2 {
            let mut load = |_: &RewardModelSpec| {
                n_loaded += 1;
                Ok::<_, TaskError>(Box::new(Lengths) as Box<dyn ScoreResponses>)
            };
            verifier.load(&mut load).unwrap();
        }
        assert_eq!(n_loaded, 1, "a model is loaded once");
        let judged = verifier.judge(&samples).unwrap();
        let found: Vec<_> =
            judged.iter().map(|it| (it.verdict, it.reward, it.judge.clone().unwrap().score)).collect();
        assert_eq!(found[0].1, Some(1.0));
        assert_eq!(found[0].2, Some(1.0));
        assert_eq!(found[1], (Verdict::Right, Some(-3.0), None));
    }

    #[test]
    fn settings_that_no_reward_model_can_work_with_are_refused() {
        for taken in ["", "max_tokens = 1", "max_tokens = 1048576", "clip = 1e-300", "device = \"cuda:1\""] {
            assert!(spec(taken).check().is_ok(), "{taken}");
        }
        for (refused, key) in [
            ("max_tokens = 0", "verifier.max_tokens"),
            ("max_tokens = 1048577", "verifier.max_tokens"),
            ("clip = 0.0", "verifier.clip"),
            ("clip = inf", "verifier.clip"),
            ("device = \"tpu\"", "verifier.device"),
            ("keep = \"host\"\ndevice = \"cuda\"", "verifier.keep"),
        ] {
            let said = spec(refused).check().unwrap_err().to_string();
            assert!(said.contains(key), "{refused}: {said}");
        }
        assert!(RewardModelSpec { model: String::new(), ..spec("") }.check().is_err());
    }
}
