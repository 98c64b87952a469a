//! The responses of a mini-batch.

use crate::learn::constants::ResponseConstants;
use crate::learn::scoring::{ResponseScores, Sequence, widen};
use crate::plan::config::{Plan, Truncated};
use stapo_core::diagnostics::Observed;
use stapo_core::objective::ResponseSignals;
use stapo_core::{Finish, Group, Scored, TokenEffect};
use stapo_model::decoder::TokenScores;

/// One response of a mini-batch with its signals. Columns have one entry per sampled token.
pub struct Member<'a> {
    pub group: &'a Group,
    pub scored: &'a Scored,
    pub constants: &'a ResponseConstants,
    /// True if the behavior policy is the policy before this update.
    pub is_on_policy: bool,
    pub behavior_logp: Vec<f64>,
    pub behavior_entropy: Vec<f64>,
    pub logp: Vec<f64>,
    pub entropy: Vec<f64>,
    /// Absent before a forward pass of training: sampling records none.
    pub collision: Option<Vec<f64>>,
    pub alternatives: Vec<Vec<(u32, f32)>>,
    pub effects: Vec<TokenEffect>,
}

/// The responses of `groups` that take part in the update, each with the signals of the rollout. `constants` has one
/// entry per response of `groups`; `policy_version` counts the optimizer steps of the policy to update.
pub fn members<'a>(
    plan: &Plan,
    groups: &'a [Group],
    constants: &'a [ResponseConstants],
    policy_version: u64,
) -> Vec<Member<'a>> {
    let mut members = Vec::new();
    let mut constants = constants.iter();
    for group in groups {
        for (scored, constants) in group.members.iter().zip(&mut constants) {
            let is_cut = scored.rollout.finish == Finish::LengthLimit;
            if is_cut && plan.config.rollout.truncated == Truncated::Drop {
                continue;
            }
            let logp = widen(&scored.rollout.logp);
            let entropy = widen(&scored.rollout.entropy);
            members.push(Member {
                group,
                scored,
                constants,
                is_on_policy: scored.rollout.policy_version == Some(policy_version),
                behavior_logp: logp.clone(),
                behavior_entropy: entropy.clone(),
                logp,
                entropy,
                collision: None,
                alternatives: Vec::new(),
                effects: Vec::new(),
            });
        }
    }
    members
}

impl Member<'_> {
    pub fn sequence(&self) -> Sequence<'_> {
        Sequence::from(&self.scored.rollout)
    }

    pub fn signals(&self) -> ResponseSignals<'_> {
        ResponseSignals {
            advantage: self.constants.advantages.view(),
            logp: &self.logp,
            behavior_logp: &self.behavior_logp,
            entropy: &self.entropy,
            behavior_entropy: Some(&self.behavior_entropy),
            reference_logp: self.constants.reference_logp.as_deref(),
            sampler_logp: self.constants.sampler_logp.as_deref(),
            collision: self.collision.as_deref(),
        }
    }

    /// Takes over log-probs, entropies and collisions from those of a batch, in which the member's tokens begin at `start`.
    /// Returns their number.
    pub fn set_numbers(&mut self, scores: &TokenScores, start: usize) -> usize {
        let range = start..start + self.behavior_logp.len();
        self.logp = widen(&scores.logp[range.clone()]);
        self.entropy = widen(&scores.entropy[range.clone()]);
        self.collision = Some(widen(&scores.collision[range.clone()]));
        range.len()
    }

    /// Takes over the scores of the training forward pass.
    pub fn set_scores(&mut self, scores: ResponseScores) {
        self.logp = scores.logp;
        self.entropy = scores.entropy;
        self.collision = Some(scores.collision);
        self.alternatives = scores.alternatives;
    }

    /// The scores of the training forward pass.
    pub fn scores(&self) -> ResponseScores {
        ResponseScores {
            logp: self.logp.clone(),
            entropy: self.entropy.clone(),
            collision: self.collision.clone().unwrap_or_default(),
            alternatives: self.alternatives.clone(),
        }
    }

    /// max |logp - behavior_logp| over the tokens.
    pub fn distance(&self) -> f64 {
        self.logp.iter().zip(&self.behavior_logp).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    }

    /// The tokens in the form that the census reads, after the forward pass of training.
    pub fn observed(&self) -> impl Iterator<Item = Observed> {
        (0..self.effects.len()).map(|token_idx| self.observed_at(token_idx))
    }

    /// One token in the form that the census reads.
    pub fn observed_at(&self, token_idx: usize) -> Observed {
        Observed {
            logp: self.logp[token_idx],
            entropy: self.entropy[token_idx],
            collision: self.collision.as_deref().unwrap_or_default()[token_idx],
            effect: self.effects[token_idx],
        }
    }
}
