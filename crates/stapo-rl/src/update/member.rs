//! The responses of a mini-batch, and the scores of a forward pass split by response.

use crate::config::{Plan, Truncated};
use stapo_core::diagnostics::Observed;
use stapo_core::objective::{Advantages, ResponseSignals};
use stapo_core::{Finish, Group, Microbatch, Scored, TokenEffect};
use stapo_model::decoder::{PackedBatch, TokenScores};

/// One response of a mini-batch with its signals. The model's f32 values are widened to the objective's f64, which is
/// exact.
pub struct Member<'a> {
    pub group: &'a Group,
    pub scored: &'a Scored,
    pub advantage: &'a Advantages,
    pub behavior_logp: Vec<f64>,
    pub behavior_entropy: Vec<f64>,
    pub logp: Vec<f64>,
    pub entropy: Vec<f64>,
    /// Absent before a forward pass of training: sampling records none.
    pub collision: Option<Vec<f64>>,
    pub reference_logp: Option<Vec<f64>>,
    pub alternatives: Vec<Vec<(u32, f32)>>,
    pub effects: Vec<TokenEffect>,
}

/// The responses of `groups` that take part in the update, each with its advantage and the signals of the rollout.
/// `advantages` has one entry per response of `groups`.
pub fn members<'a>(plan: &Plan, groups: &'a [Group], advantages: &'a [Advantages]) -> Vec<Member<'a>> {
    let mut members = Vec::new();
    let mut advantages = advantages.iter();
    for group in groups {
        for (scored, advantage) in group.members.iter().zip(&mut advantages) {
            let is_cut = scored.rollout.finish == Finish::LengthLimit;
            if is_cut && plan.config.rollout.truncated == Truncated::Drop {
                continue;
            }
            let logp = widen(&scored.rollout.logp);
            let entropy = widen(&scored.rollout.entropy);
            members.push(Member {
                group,
                scored,
                advantage,
                behavior_logp: logp.clone(),
                behavior_entropy: entropy.clone(),
                logp,
                entropy,
                collision: None,
                reference_logp: None,
                alternatives: Vec::new(),
                effects: Vec::new(),
            });
        }
    }
    members
}

impl Member<'_> {
    pub fn signals(&self) -> ResponseSignals<'_> {
        ResponseSignals {
            advantage: self.advantage.view(),
            logp: &self.logp,
            behavior_logp: &self.behavior_logp,
            entropy: &self.entropy,
            behavior_entropy: Some(&self.behavior_entropy),
            reference_logp: self.reference_logp.as_deref(),
            sampler_logp: None,
            collision: self.collision.as_deref(),
        }
    }

    /// Takes over the scores of the training forward pass.
    pub fn set_scores(&mut self, scores: ResponseScores) {
        self.logp = scores.logp;
        self.entropy = scores.entropy;
        self.collision = Some(scores.collision);
        self.alternatives = scores.alternatives;
    }

    /// max |logp - behavior_logp| over the tokens.
    pub fn distance(&self) -> f64 {
        self.logp.iter().zip(&self.behavior_logp).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    }

    /// The tokens in the form that the census reads, after the forward pass of training.
    pub fn observed(&self) -> Vec<Observed> {
        let collision = self.collision.as_deref().unwrap_or_default();
        let token = |t: usize| Observed {
            logp: self.logp[t],
            entropy: self.entropy[t],
            collision: collision[t],
            effect: self.effects[t],
        };
        (0..self.effects.len()).map(token).collect()
    }
}

/// The scores of one response's tokens, widened to f64.
pub struct ResponseScores {
    pub logp: Vec<f64>,
    pub entropy: Vec<f64>,
    pub collision: Vec<f64>,
    pub alternatives: Vec<Vec<(u32, f32)>>,
}

/// The sequences of a micro-batch, prompt and response each, as the model takes them.
pub fn packed(microbatch: &Microbatch, members: &[Member]) -> PackedBatch {
    let mut batch = PackedBatch::new();
    for &idx in &microbatch.sequences {
        let rollout = &members[idx].scored.rollout;
        let tokens: Vec<u32> = rollout.prompt_tokens.iter().chain(&rollout.tokens).copied().collect();
        batch.push(&tokens, rollout.prompt_tokens.len());
    }
    batch
}

/// The scores of a micro-batch, split by response in the order of the micro-batch.
pub fn split_scores(
    scores: &TokenScores,
    microbatch: &Microbatch,
    members: &[Member],
) -> Vec<ResponseScores> {
    let mut start = 0;
    let mut parts = Vec::with_capacity(microbatch.sequences.len());
    for &idx in &microbatch.sequences {
        let range = start..start + members[idx].scored.rollout.tokens.len();
        parts.push(ResponseScores {
            logp: widen(&scores.logp[range.clone()]),
            entropy: widen(&scores.entropy[range.clone()]),
            collision: widen(&scores.collision[range.clone()]),
            alternatives: scores.alternatives.get(range.clone()).map(<[_]>::to_vec).unwrap_or_default(),
        });
        start = range.end;
    }
    parts
}

fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}
