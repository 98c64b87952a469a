//! One type per stage: `Problem` -> `Rollout` -> `Scored` -> `Group`. A stage adds its values as a new type, not by
//! filling `Option` fields.

mod episode;

pub use episode::{Episode, EpisodeTurn, ToolCall, TurnVerdict};

use crate::program::ProgramRun;
use crate::stats::has_spread;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A question with a known answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// Unique within the data set; names the problem in records and messages.
    pub id: String,
    /// The turns of the conversation before the prompt, such as a system message; empty if the prompt is alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier_turns: Vec<Turn>,
    /// The text that the model answers, rendered by the task's template: the last message of the user.
    pub prompt: String,
    /// The answer that the verifier compares with.
    pub reference: String,
}

impl Problem {
    /// The conversation that the model answers: the turns before the prompt, and the prompt as the user's message.
    pub fn messages(&self) -> Vec<Turn> {
        let prompt = Turn { role: "user".into(), content: self.prompt.clone() };
        self.earlier_turns.iter().cloned().chain([prompt]).collect()
    }
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Turn {
    /// `system`, `user`, `assistant` or another role that the chat template knows.
    pub role: String,
    pub content: String,
}

/// Why a response ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Finish {
    /// The model sampled this stop token, which is the last token of the response.
    Stop { token: u32 },
    /// The response reached the length limit.
    LengthLimit,
    /// The episode reached its limit of turns before its environment ended it.
    TurnLimit,
}

/// One episode: a sequence of tokens that the policy was given or has sampled, with the signals of the policy that
/// sampled. The prompt is given; so is whatever an environment answers between two turns of the policy.
///
/// Lengths: `tokens` and `is_sampled` are equal; `logp` and `entropy` have one entry per sampled token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rollout {
    /// Index of the problem in its batch.
    pub problem_idx: usize,
    /// Index of the sample in its group.
    pub sample_idx: usize,
    pub tokens: Vec<u32>,
    /// The first token is given: nothing predicts it.
    pub is_sampled: Vec<bool>,
    /// ln p of each sampled token under the behavior policy, at the sampling temperature.
    pub logp: Vec<f32>,
    /// Entropy in nats over the whole vocabulary, at the sampling temperature.
    pub entropy: Vec<f32>,
    /// The tokens that each sampled one was drawn from, in ascending order, where sampling was truncated: `logp` and
    /// `entropy` are then those of the distribution over these. Empty otherwise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<Vec<u32>>,
    pub finish: Finish,
    /// Optimizer steps that the behavior policy had made in this run; `None` for a policy of another run or engine.
    pub policy_version: Option<u64>,
}

impl Rollout {
    /// `tokens` and `is_sampled` of a response in one turn.
    pub fn one_turn(prompt: &[u32], response: &[u32]) -> (Vec<u32>, Vec<bool>) {
        let mut is_sampled = vec![false; prompt.len()];
        is_sampled.resize(prompt.len() + response.len(), true);
        ([prompt, response].concat(), is_sampled)
    }

    /// The tokens before the first sampled one.
    pub fn prompt(&self) -> &[u32] {
        &self.tokens[..self.n_prompt()]
    }

    /// The tokens from the first sampled one on, those given between turns included.
    pub fn response(&self) -> &[u32] {
        &self.tokens[self.n_prompt()..]
    }

    fn n_prompt(&self) -> usize {
        self.is_sampled.iter().position(|&is_sampled| is_sampled).unwrap_or(self.tokens.len())
    }

    /// Indices in `tokens` of the sampled ones, in the order of `logp` and `entropy`.
    pub fn sampled_positions(&self) -> impl Iterator<Item = usize> {
        let numbered = self.is_sampled.iter().enumerate();
        numbered.filter(|(_, is_sampled)| **is_sampled).map(|(position, _)| position)
    }

    pub fn sampled_tokens(&self) -> impl Iterator<Item = u32> {
        self.sampled_positions().map(|position| self.tokens[position])
    }

    pub fn n_sampled(&self) -> usize {
        self.sampled_positions().count()
    }

    /// The tokens of the last turn.
    pub fn last_turn(&self) -> &[u32] {
        let n = self.turn_lengths().last().copied().unwrap_or(0);
        &self.tokens[self.tokens.len() - n..]
    }

    /// The number of sampled tokens of each turn. Given tokens separate turns.
    pub fn turn_lengths(&self) -> Vec<usize> {
        let runs = self.is_sampled.chunk_by(|a, b| a == b);
        runs.filter(|run| run[0]).map(<[bool]>::len).collect()
    }
}

/// The verifier's result, as records name the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Right,
    Wrong,
    NoAnswer,
    Unparsable,
    OverBudget,
}

/// The judgement of a judge or a reward model on a response, and that of a rule on the same response.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct JudgeOpinion {
    /// Absent if the judge was not asked because the rule had decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
    pub rule: Verdict,
    /// The log-prob of "yes" less that of "no"; absent for a judge that writes its verdict.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub margin: Option<f64>,
    /// What the judge wrote; absent for a judge that is read by log-probs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The score of a reward model, as it gave it; absent for a judge, and for a response that is too long for the reward model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score: Option<f64>,
}

impl JudgeOpinion {
    /// The opinion where only the rule was asked.
    pub fn of_rule(rule: Verdict) -> Self {
        Self { verdict: None, rule, margin: None, text: None, score: None }
    }

    /// Whether judge and rule agree on whether the response is right; `None` if the judge was not asked.
    pub fn agrees(&self) -> Option<bool> {
        self.verdict.map(|verdict| (verdict == Verdict::Right) == (self.rule == Verdict::Right))
    }
}

/// A rollout with its verdict and reward.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Scored {
    pub rollout: Rollout,
    /// Of the first reward.
    pub verdict: Verdict,
    /// The weighted sum of `rewards`.
    pub reward: f64,
    /// One entry per reward of the run.
    pub rewards: Vec<f64>,
    /// What the tests of the response's program showed; `None` for a task whose answers are not programs.
    pub program: Option<Box<ProgramRun>>,
    /// The judgement of a judge in addition to a rule's; `None` for a run without a judge.
    pub judge: Option<Box<JudgeOpinion>>,
    /// What the environment answered; `None` for a response that a task judged after its only turn.
    pub episode: Option<Box<Episode>>,
}

/// All samples of one problem. Advantages are relative to the rewards of the group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Group {
    pub problem: Problem,
    pub members: Vec<Scored>,
}

impl Group {
    /// True if each reward is the same for all members up to rounding, so that all advantages are 0 and the update
    /// learns nothing.
    pub fn is_unanimous(&self) -> bool {
        let n_rewards = self.members.iter().map(|member| member.rewards.len()).min().unwrap_or(0);
        (0..n_rewards).all(|idx| !has_spread(self.members.iter().map(|member| member.rewards[idx])))
    }
}

/// Reward shaping for long responses (DAPO, Yu et al. 2025, eq. 13): nothing up to `max_tokens - buffer_tokens`,
/// then a linear penalty that reaches -1 at `max_tokens`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OverlongShaping {
    /// The length at which the penalty is -1.
    pub max_tokens: usize,
    /// The tokens before `max_tokens` over which the penalty grows.
    pub buffer_tokens: usize,
}

impl OverlongShaping {
    /// The number that is added to the reward of a response of `n_tokens`.
    pub fn penalty(self, n_tokens: usize) -> f64 {
        let free = self.max_tokens.saturating_sub(self.buffer_tokens);
        -(n_tokens.saturating_sub(free) as f64) / self.buffer_tokens.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scored(tokens: Vec<u32>, is_sampled: Vec<bool>, rewards: &[f64]) -> Scored {
        let rollout = Rollout {
            problem_idx: 0,
            sample_idx: 0,
            tokens,
            is_sampled,
            logp: Vec::new(),
            entropy: Vec::new(),
            kept: Vec::new(),
            finish: Finish::LengthLimit,
            policy_version: None,
        };
        let (verdict, reward) = (Verdict::Wrong, rewards[0]);
        let rewards = rewards.to_vec();
        Scored { rollout, verdict, reward, rewards, program: None, judge: None, episode: None }
    }

    #[test]
    fn a_conversation_ends_with_the_prompt() {
        let turn = |role: &str, content: &str| Turn { role: role.into(), content: content.into() };
        let problem = Problem {
            id: String::new(),
            earlier_turns: vec![turn("system", "Be brief.")],
            prompt: "1+1?".into(),
            reference: String::new(),
        };
        assert_eq!(problem.messages(), [turn("system", "Be brief."), turn("user", "1+1?")]);
    }

    #[test]
    fn judge_and_rule_agree_where_both_or_neither_find_a_response_right() {
        let agrees = |verdict, rule| JudgeOpinion { verdict, ..JudgeOpinion::of_rule(rule) }.agrees();
        assert_eq!(agrees(None, Verdict::Right), None);
        assert_eq!(agrees(Some(Verdict::Right), Verdict::Right), Some(true));
        assert_eq!(agrees(Some(Verdict::Wrong), Verdict::NoAnswer), Some(true));
        assert_eq!(agrees(Some(Verdict::Wrong), Verdict::Right), Some(false));
        assert_eq!(agrees(Some(Verdict::Right), Verdict::Wrong), Some(false));
    }

    #[test]
    fn a_rollout_is_its_prompt_and_its_turns() {
        let (tokens, is_sampled) = Rollout::one_turn(&[1, 2], &[3, 4, 5]);
        assert_eq!(
            (tokens.as_slice(), is_sampled.as_slice()),
            (&[1, 2, 3, 4, 5][..], &[false, false, true, true, true][..])
        );
        let rollout = scored(tokens, is_sampled, &[1.0]).rollout;
        assert_eq!(
            (rollout.prompt(), rollout.response(), rollout.last_turn()),
            (&[1, 2][..], &[3, 4, 5][..], &[3, 4, 5][..])
        );
        let turns = vec![false, true, true, true, false, true, true];
        let rollout = scored((1..=7).collect(), turns, &[1.0]).rollout;
        assert_eq!((rollout.turn_lengths(), rollout.last_turn()), (vec![3, 2], &[6, 7][..]));
        assert_eq!((rollout.n_sampled(), rollout.response()), (5, &[2, 3, 4, 5, 6, 7][..]));
    }

    #[test]
    fn long_responses_are_penalised_from_the_end_of_the_free_part() {
        let shaping = OverlongShaping { max_tokens: 100, buffer_tokens: 20 };
        assert_eq!([0, 80, 81, 90, 100].map(|n| shaping.penalty(n)), [0.0, 0.0, -0.05, -0.5, -1.0]);
        let without_buffer = OverlongShaping { max_tokens: 100, buffer_tokens: 0 };
        assert_eq!([100, 101].map(|n| without_buffer.penalty(n)), [0.0, -1.0]);
    }

    #[test]
    fn a_group_is_unanimous_where_every_reward_is() {
        let problem = Problem {
            id: String::new(),
            earlier_turns: Vec::new(),
            prompt: String::new(),
            reference: String::new(),
        };
        let group = |rewards: &[&[f64]]| Group {
            problem: problem.clone(),
            members: rewards.iter().map(|rewards| scored(Vec::new(), Vec::new(), rewards)).collect(),
        };
        assert!(group(&[&[1.0, 0.5], &[1.0, 0.5]]).is_unanimous());
        assert!(!group(&[&[1.0, 0.5], &[1.0, 0.0]]).is_unanimous());
        assert!(group(&[&[1.0, 0.5], &[1.0]]).is_unanimous(), "only rewards that all members have count");
    }
}
