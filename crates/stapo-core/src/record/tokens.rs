//! Records of responses and tokens: `rollouts/`, `tokens/`, `eval/`.

use super::Extra;
use crate::objective::{MaskKind, ObjectiveSpec};
use crate::program::{ProgramRun, TokenCategory};
use crate::rollout::{Episode, Finish, JudgeOpinion, Verdict};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A response with every token that was sampled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ResponseRecord {
    /// Version of the format: 1, or 2 for a record with `given`.
    pub schema: u32,
    /// Training step that sampled the response, from 1.
    pub step: u64,
    /// Name of the problem.
    pub problem_id: String,
    /// Index, from 0, of the response's group in the rollout batch; absent in files written without this key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_idx: Option<usize>,
    /// Index of the response in its group, from 0.
    pub sample_idx: usize,
    /// What the policy read.
    pub prompt: String,
    /// Reference answer.
    pub reference: String,
    /// The whole response.
    pub text: String,
    /// What the verifier decided.
    pub verdict: Verdict,
    /// Reward, after shaping.
    pub reward: f64,
    /// The value of each reward by its name; empty for a run without `[[rewards]]`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rewards: BTreeMap<String, f64>,
    /// Advantage of the response; the mean over its tokens if they differ.
    pub advantage: f64,
    /// How the response ended.
    pub finish: Finish,
    /// Index, from 0, of the mini-batch that the response was in, among the optimizer steps of the training step.
    #[serde(default)]
    pub update_idx: usize,
    /// The entropy threshold of that mini-batch, nats; absent if no mask had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tau_h: Option<f64>,
    /// One column per quantity, each with one entry per sampled token.
    pub tokens: TokenColumns,
    /// Tokens between the sampled ones, in order; empty for a response in one turn. A record with such tokens has
    /// [`ResponseRecord::SCHEMA_WITH_GIVEN`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub given: Vec<GivenTokens>,
    /// What the tests of the response's program showed; absent for a task whose answers are not programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<Box<ProgramRun>>,
    /// What a judge and a rule decided; absent for a run without a judge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judge: Option<Box<JudgeOpinion>>,
    /// What the environment answered; absent for a response that was judged after its only turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub episode: Option<Box<Episode>>,
    #[serde(flatten)]
    pub extra: Extra,
}

/// The answers of an environment in one episode: a line of `episodes/`, which has every episode of its step. A replay
/// takes the answers from there.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EpisodeRecord {
    /// Version of the format.
    pub schema: u32,
    /// The step that sampled the episode, or after which it was evaluated; 0 before the first.
    pub step: u64,
    /// True for an episode of the evaluation on held-out problems.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub evaluation: bool,
    /// How often groups had been redrawn before.
    pub draw: u64,
    /// Index of the problem among those drawn together.
    pub problem_idx: usize,
    pub sample_idx: usize,
    pub problem_id: String,
    #[serde(flatten)]
    pub episode: Episode,
    #[serde(flatten)]
    pub extra: Extra,
}

/// Consecutive tokens that the policy was given after its first sampled token, such as an environment's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GivenTokens {
    /// The number of sampled tokens before them.
    pub after: usize,
    pub id: Vec<u32>,
    pub text: String,
}

impl ResponseRecord {
    /// A reader that knows no given tokens would take `tokens` for the whole response, so these records have a schema that
    /// it refuses.
    pub const SCHEMA_WITH_GIVEN: u32 = 2;

    /// The text of the tokens that are before the sampled token `token_idx`, or at the end for their number.
    pub fn given_before(&self, token_idx: usize) -> Option<&str> {
        self.given.iter().find(|given| given.after == token_idx).map(|given| given.text.as_str())
    }

    /// Fills the column `is_candidate` of a record that was written without that column. `objective` is the run's.
    pub(super) fn derive_candidates(&mut self, objective: &ObjectiveSpec) {
        let tokens = &mut self.tokens;
        if tokens.is_candidate.is_empty() {
            tokens.is_candidate =
                objective.candidates(self.advantage, &tokens.logp, &tokens.behavior_logp).collect();
        }
    }
}

/// Columns with one entry per sampled token.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TokenColumns {
    /// Number of the token in the vocabulary.
    pub id: Vec<u32>,
    /// Text of the token.
    pub text: Vec<String>,
    /// Log-prob under the policy at the update, nats.
    pub logp: Vec<f64>,
    /// Log-prob when the token was sampled, nats.
    pub behavior_logp: Vec<f64>,
    /// Entropy of the distribution the token was drawn from, nats.
    pub entropy: Vec<f64>,
    /// Sum of squared probabilities at the position.
    pub collision: Vec<f64>,
    /// Probability at the update divided by the probability at sampling.
    pub ratio: Vec<f64>,
    /// False for a token that a mask silenced.
    pub kept: Vec<bool>,
    /// The mask that silenced the token, if one did.
    pub silenced_by: Vec<Option<MaskKind>>,
    /// True if the surrogate clipped the ratio.
    pub clipped: Vec<bool>,
    /// True for rewarded and improbable tokens, as [`ObjectiveSpec::candidates`] decides. Empty in files written
    /// without this column; [`super::parse_responses`] fills the column.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub is_candidate: Vec<bool>,
    /// Derivative of the surrogate by `logp` before masks: `ratio * A` where nothing clips. Empty in files written
    /// without this column.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weight: Vec<f64>,
    /// Advantage of each token; empty if all tokens of the response have the response's advantage.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub advantage: Vec<f64>,
    /// Derivative of the normalised loss by `logp`.
    pub d_logp: Vec<f64>,
    /// The likeliest tokens at each position; empty if `record.alternatives` is 0.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub alternatives: Vec<Vec<Alternative>>,
}

/// One of the likeliest tokens at a position.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Alternative {
    /// Number of the token in the vocabulary.
    pub id: u32,
    /// Text of the token.
    pub text: String,
    /// Log-prob, nats.
    pub logp: f64,
}

/// One token with the text around it: in `tokens/` a silenced token, in `explored/` a candidate that was kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TokenRecord {
    /// Version of the format.
    pub schema: u32,
    /// Training step, from 1.
    pub step: u64,
    /// Name of the problem.
    pub problem_id: String,
    /// Index of the response in its group, from 0.
    pub sample_idx: usize,
    /// Index among the sampled tokens of the response, from 0.
    pub token_idx: usize,
    /// Number of the token in the vocabulary.
    pub id: u32,
    /// Text of the token.
    pub text: String,
    /// Absent for a token that was kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub silenced_by: Option<MaskKind>,
    /// What the token is within a Python program; absent for a task whose answers are not programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub category: Option<TokenCategory>,
    /// Log-prob, nats.
    pub logp: f64,
    /// Entropy at the position, nats.
    pub entropy: f64,
    /// Advantage of the token.
    pub advantage: f64,
    /// Norm of the gradient at the logits, without masks.
    pub gradient_norm: f64,
    /// Text before the token.
    pub context_before: String,
    /// Text after the token.
    pub context_after: String,
    /// Likeliest tokens at the position.
    pub alternatives: Vec<Alternative>,
    #[serde(flatten)]
    pub extra: Extra,
}

/// One sample of an evaluation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EvalRecord {
    /// Version of the format.
    pub schema: u32,
    /// Name of the benchmark.
    pub benchmark: String,
    /// How responses were sampled, as in `0.7:0.9` (temperature and top-p).
    pub decoding: String,
    /// Training steps that the policy had made; absent for a model that is not from a run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// Name of the question.
    pub problem_id: String,
    /// Index of the sample, from 0.
    pub sample_idx: usize,
    /// The answer that the verifier compared with.
    #[serde(default)]
    pub reference: String,
    /// The whole response.
    pub text: String,
    /// Token ids of the response. Empty in files written without this column.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tokens: Vec<u32>,
    /// Length of the response.
    pub n_tokens: usize,
    /// How the response ended.
    pub finish: Finish,
    /// The answer in canonical form; absent if the response has no answer or `program` holds it.
    pub answer: Option<String>,
    /// What the verifier decided.
    pub verdict: Verdict,
    /// The reason for the verdict, in one line.
    pub reason: String,
    /// What the tests of the response's program showed; absent for a benchmark whose answers are not programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<Box<ProgramRun>>,
    /// What an environment answered. `text` and `tokens` then have the given tokens too, and `n_tokens` counts the sampled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub episode: Option<Box<Episode>>,
    #[serde(flatten)]
    pub extra: Extra,
}

impl EvalRecord {
    /// Whether the limit cut the response. A question that was not asked, for want of room, has no response.
    #[must_use]
    pub fn is_truncated(&self) -> bool {
        self.finish == Finish::LengthLimit && self.n_tokens > 0
    }
}
