//! Records of responses and tokens: `rollouts/`, `tokens/`, `eval/`.

use super::Extra;
use crate::objective::MaskKind;
use crate::rollout::{Finish, Verdict};
use serde::{Deserialize, Serialize};

/// A sampled response with every token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ResponseRecord {
    pub schema: u32,
    pub step: u64,
    pub problem_id: String,
    pub sample_idx: usize,
    pub prompt: String,
    pub reference: String,
    pub text: String,
    pub verdict: Verdict,
    pub reward: f64,
    pub advantage: f64,
    pub finish: Finish,
    /// Which optimizer step of the training step learned from it, from 0: its mini-batch.
    #[serde(default)]
    pub update_idx: usize,
    /// The entropy threshold of that mini-batch, nats; absent where there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tau_h: Option<f64>,
    pub tokens: TokenColumns,
    #[serde(flatten)]
    pub extra: Extra,
}

/// Per-token columns of one length.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenColumns {
    pub id: Vec<u32>,
    pub text: Vec<String>,
    pub logp: Vec<f64>,
    pub behavior_logp: Vec<f64>,
    /// Nats.
    pub entropy: Vec<f64>,
    /// Sum of squared probabilities.
    pub collision: Vec<f64>,
    pub ratio: Vec<f64>,
    pub kept: Vec<bool>,
    pub silenced_by: Vec<Option<MaskKind>>,
    pub clipped: Vec<bool>,
    /// Slope of the surrogate before masks: `ratio * A` where nothing clips. Empty in runs older than this column.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weight: Vec<f64>,
    /// Of the normalised loss.
    pub d_logp: Vec<f64>,
    /// The likeliest tokens, where they were asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub alternatives: Vec<Vec<Alternative>>,
}

/// What the model could have said.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Alternative {
    pub id: u32,
    pub text: String,
    pub logp: f64,
}

/// One token with its surroundings: in `tokens/` one that was silenced, in `explored/` a rewarded improbable one that was kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenRecord {
    pub schema: u32,
    pub step: u64,
    pub problem_id: String,
    pub sample_idx: usize,
    /// Place in the response, from 0.
    pub token_idx: usize,
    pub id: u32,
    pub text: String,
    /// Absent for a token that was kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub silenced_by: Option<MaskKind>,
    pub logp: f64,
    /// Nats.
    pub entropy: f64,
    pub advantage: f64,
    /// At the logits, as if no mask were there.
    pub gradient_norm: f64,
    pub context_before: String,
    pub context_after: String,
    pub alternatives: Vec<Alternative>,
    #[serde(flatten)]
    pub extra: Extra,
}

/// One sample of an evaluation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalRecord {
    pub schema: u32,
    pub benchmark: String,
    pub decoding: String,
    /// Training steps the policy had seen; absent for a model that comes from no run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    pub problem_id: String,
    pub sample_idx: usize,
    /// What the verifier compared with.
    #[serde(default)]
    pub reference: String,
    pub text: String,
    /// Ids of the response. Empty in evaluations older than this column.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tokens: Vec<u32>,
    pub n_tokens: usize,
    pub finish: Finish,
    /// The answer in canonical form, where there was one.
    pub answer: Option<String>,
    pub verdict: Verdict,
    /// Why, in one line.
    pub reason: String,
    #[serde(flatten)]
    pub extra: Extra,
}
