//! One algorithm = one value. An [`ObjectiveSpec`] says how a mini-batch of responses turns into a number per token.
//!
//! Every objective of the family reaches the network only through the log-prob (and, for an entropy bonus, the entropy)
//! of the sampled token, so an objective is a pure function: [`ObjectiveSpec::advantages`] turns the rewards of a
//! rollout batch into advantages, [`ObjectiveSpec::calibrate`] reads a whole mini-batch once,
//! [`ObjectiveSpec::evaluate`] then gives each token its [`TokenEffect`], response by response, un-normalised;
//! [`Tally`] holds the one scale that turns sums into the mean. Evaluating a response depends on the calibration and
//! that response alone, so cutting a mini-batch into micro-batches in another way changes no bit.

mod advantage;
mod axes;
mod calibrate;
mod candidate;
mod check;
mod control;
mod deferral;
mod error;
mod evaluate;
mod fate;
mod load;
mod mask;
mod preset;
mod signals;
mod surrogate;

pub use advantage::{Advantage, Distillation, MultipleRewards, Normalizer, ScoredResponse, Whiten};
pub use axes::{
    Aggregate, Denominator, EntropyBonus, Kl, MaskSignals, OffPolicy, Ratio, SilencedResponses,
    SilencedTokens, WeightLevel,
};
pub use calibrate::{Calibration, UpdateKey};
pub use candidate::{Threshold, influence, is_improbable, logp_below};
pub use control::Controls;
pub use deferral::Deferral;
pub use error::ObjectiveError;
pub use evaluate::{SequenceTally, Tally, TokenEffect};
pub use load::SpecError;
pub use mask::{Mask, MaskKind, QuantileOver, Select, StareSigns};
pub(crate) use preset::plain;
pub use preset::{Preset, RolloutSettings, preset, presets};
pub use signals::{Advantages, AdvantagesRef, ResponseSignals};
pub use surrogate::Surrogate;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An algorithm of the family as a value. Every axis is a closed set, tagged by `kind`; [`preset()`] gives the published
/// values.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(transform = load::add_preset)]
pub struct ObjectiveSpec {
    /// How rewards become an advantage.
    #[serde(default)]
    pub advantage: Advantage,
    /// When several rewards of a response become one number.
    #[serde(default)]
    pub multiple_rewards: MultipleRewards,
    /// Last normalisation of the advantages, over the whole rollout batch.
    #[serde(default)]
    pub whiten: Whiten,
    /// KL penalty to the reference as part of the reward, from the log-probs at sampling: a constant of the update,
    /// subtracted from the reward of a response, or token by token under `advantage.kind = "return"`.
    #[serde(default)]
    pub kl_in_reward: Kl,
    /// What a teacher adds to the advantage.
    #[serde(default)]
    pub distillation: Distillation,
    /// Which tokens are silenced or weighed down. A token is kept if every mask keeps the token.
    #[serde(default)]
    pub masks: Vec<Mask>,
    /// Whose log-probs and entropies decide a token's fate.
    #[serde(default)]
    pub mask_signals: MaskSignals,
    /// The importance ratio, of a token or of its whole response.
    #[serde(default)]
    pub ratio: Ratio,
    /// How ratio and advantage become the value that is maximised.
    pub surrogate: Surrogate,
    /// How the values of all tokens become one number.
    #[serde(default)]
    pub aggregate: Aggregate,
    /// What the means divide by.
    #[serde(default)]
    pub denominator: Denominator,
    /// Penalty for leaving a frozen reference policy, in the loss.
    #[serde(default)]
    pub kl: Kl,
    /// Reward for entropy.
    #[serde(default)]
    pub entropy_bonus: EntropyBonus,
    /// Correction for rollouts sampled by another engine, which reports its own log-probs.
    #[serde(default)]
    pub off_policy: OffPolicy,
}

impl ObjectiveSpec {
    /// Optimizer steps per mini-batch: 2 for objectives that update in two passes (Lopti), else 1.
    pub fn n_passes(&self) -> usize {
        if self.masks.iter().any(|mask| matches!(mask, Mask::LowProbabilityFirst { .. })) { 2 } else { 1 }
    }

    /// True if [`Self::calibrate`] reads log-probs or entropies of the current policy. Mini-batches after the first
    /// of a rollout batch then need a scoring pass.
    pub fn calibrates_on_current_policy(&self) -> bool {
        self.mask_signals == MaskSignals::Current && self.chooses_among_tokens()
    }

    /// True if the fate of a token depends on the other tokens of its mini-batch.
    pub fn chooses_among_tokens(&self) -> bool {
        self.masks.iter().any(Mask::needs_calibration) || matches!(self.surrogate, Surrogate::KlCov { .. })
    }

    /// True if the objective reads a frozen reference policy, in the loss or in the reward.
    pub fn needs_reference(&self) -> bool {
        self.kl_needs_reference() || self.kl_in_reward != Kl::None
    }

    /// True if the loss reads a frozen reference policy.
    pub(crate) fn kl_needs_reference(&self) -> bool {
        self.kl != Kl::None
    }

    /// True if the advantages read a teacher's log-probs.
    pub fn needs_teacher(&self) -> bool {
        self.distillation != Distillation::None
    }
}

#[cfg(test)]
mod tests;
