//! A whole mini-batch evaluated at once, for callers outside training, which have all of it in memory: effects and
//! totals from columns of numbers.

use crate::diagnostics::{Census, Observed, QuadrantCensus, Thresholds};
use crate::objective::{
    AdvantagesRef, ObjectiveError, ObjectiveSpec, ResponseSignals, ScoredResponse, Tally, TokenEffect,
    UpdateKey,
};
use serde::Serialize;

/// The columns of one response, with one entry per token that is in the loss.
#[derive(Debug, Clone, Copy)]
pub struct ResponseColumns<'a> {
    pub logp: &'a [f64],
    pub behavior_logp: &'a [f64],
    pub entropy: &'a [f64],
    pub reference_logp: Option<&'a [f64]>,
    pub behavior_entropy: Option<&'a [f64]>,
    pub sampler_logp: Option<&'a [f64]>,
    pub collision: Option<&'a [f64]>,
    pub teacher_logp: Option<&'a [f64]>,
}

impl<'a> ResponseColumns<'a> {
    /// What the advantages read of the response.
    pub fn scored(&self, group: usize, rewards: &'a [f64]) -> ScoredResponse<'a> {
        ScoredResponse {
            behavior_logp: Some(self.behavior_logp),
            behavior_entropy: self.behavior_entropy,
            reference_logp: self.reference_logp,
            teacher_logp: self.teacher_logp,
            ..ScoredResponse::new(group, rewards, self.logp.len())
        }
    }

    fn signals(&self, advantage: AdvantagesRef<'a>) -> ResponseSignals<'a> {
        ResponseSignals {
            advantage,
            logp: self.logp,
            behavior_logp: self.behavior_logp,
            entropy: self.entropy,
            behavior_entropy: self.behavior_entropy,
            reference_logp: self.reference_logp,
            sampler_logp: self.sampler_logp,
            collision: self.collision,
        }
    }

    /// The tokens as the census sees them, where the response has collisions.
    pub fn observed(&self, effects: &[TokenEffect]) -> Option<impl Iterator<Item = Observed>> {
        let collision = self.collision?;
        let token = move |(t, effect): (usize, &TokenEffect)| Observed {
            logp: self.logp[t],
            entropy: self.entropy[t],
            collision: collision[t],
            effect: *effect,
        };
        Some(effects.iter().enumerate().map(token))
    }
}

/// The keys of a mini-batch that need not be there.
const OPTIONAL: [&str; 7] = [
    "advantage",
    "loss_mask",
    "reference_logp",
    "behavior_entropy",
    "sampler_logp",
    "collision",
    "teacher_logp",
];

/// Names that TRL, verl and their users give to columns of a mini-batch, and our names. Such a column without effect
/// would be a wrong result without a word.
const NAMES_OF_PEERS: [(&str, &str); 20] = [
    ("completion_mask", "loss_mask"),
    ("response_mask", "loss_mask"),
    ("action_mask", "loss_mask"),
    ("mask", "loss_mask"),
    ("logps", "logp"),
    ("log_prob", "logp"),
    ("log_probs", "logp"),
    ("per_token_logps", "logp"),
    ("old_logp", "behavior_logp"),
    ("old_logps", "behavior_logp"),
    ("old_log_prob", "behavior_logp"),
    ("old_log_probs", "behavior_logp"),
    ("old_per_token_logps", "behavior_logp"),
    ("ref_logp", "reference_logp"),
    ("ref_logps", "reference_logp"),
    ("ref_log_prob", "reference_logp"),
    ("ref_per_token_logps", "reference_logp"),
    ("rollout_log_probs", "sampler_logp"),
    ("sampling_per_token_logps", "sampler_logp"),
    ("rewards", "reward"),
];

/// The key that an unknown one may have been meant to be: unknown keys are ignored, but not misspelt ones and those
/// that another trainer has for one of ours.
pub fn meant_key(key: &str) -> Option<&'static str> {
    let of_peer = NAMES_OF_PEERS.iter().find(|(name, _)| *name == key).map(|(_, ours)| *ours);
    of_peer.or_else(|| OPTIONAL.into_iter().find(|known| strsim::damerau_levenshtein(key, known) <= 2))
}

/// The totals of a mini-batch, as `stapo objective` prints them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Totals {
    pub loss: f64,
    pub n_responses: usize,
    pub n_tokens: usize,
    pub n_kept: usize,
    pub n_candidates: usize,
    pub n_silenced: usize,
    pub tau_h: Option<f64>,
    pub clip_fraction: f64,
    pub ratio_min: f64,
    pub ratio_max: f64,
    /// Where every response has collisions and a mask has an entropy threshold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quadrants: Option<[QuadrantCensus; 4]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub silenced_gradient_share: Option<f64>,
}

/// Calibrates `spec` on the mini-batch and hands the effects of each response in turn, with its index, to `take`. These
/// derivatives are those of the un-normalised loss; [`Tally::scale`] makes them those of the mean. An error of `take`
/// ends the evaluation.
pub fn evaluate<E: From<ObjectiveError>>(
    spec: &ObjectiveSpec,
    minibatch: &[(ResponseColumns, AdvantagesRef)],
    update: UpdateKey,
    mut take: impl FnMut(usize, &[TokenEffect]) -> Result<(), E>,
) -> Result<(Tally, Totals), E> {
    let signals: Vec<ResponseSignals> =
        minibatch.iter().map(|(columns, advantage)| columns.signals(*advantage)).collect();
    let calibration = spec.calibrate(&signals, update)?;
    let tau_h = calibration.tau_h();
    let has_collision = minibatch.iter().all(|(columns, _)| columns.collision.is_some());
    let thresholds = tau_h.map(|tau_h| Thresholds { tau_p: calibration.tau_p(), tau_h });
    let mut census = thresholds.filter(|_| has_collision).map(Census::new);
    let mut tallies = Vec::with_capacity(minibatch.len());
    let mut effects = Vec::new();
    for (idx, (response, (columns, _))) in signals.iter().zip(minibatch).enumerate() {
        effects.resize(response.logp.len(), TokenEffect::default());
        tallies.push(spec.evaluate(&calibration, idx, response, &mut effects)?);
        if let Some((census, observed)) = census.as_mut().zip(columns.observed(&effects)) {
            observed.for_each(|token| census.add(&token));
        }
        take(idx, &effects)?;
    }
    let tally = spec.total(&tallies);
    let totals = Totals {
        loss: tally.loss,
        n_responses: tally.n_sequences,
        n_tokens: tally.n_tokens,
        n_kept: tally.n_kept,
        n_candidates: tally.n_candidates,
        n_silenced: tally.n_silenced,
        tau_h,
        clip_fraction: tally.clip_fraction,
        ratio_min: tally.ratio_min,
        ratio_max: tally.ratio_max,
        quadrants: census.as_ref().map(Census::rows),
        silenced_gradient_share: census.as_ref().map(Census::silenced_gradient_share),
    };
    Ok((tally, totals))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objective::Advantages;

    #[test]
    fn keys_of_other_trainers_and_misspelt_ones_are_meant_for_ours() {
        let cases = [
            ("old_log_prob", Some("behavior_logp")),
            ("ref_logp", Some("reference_logp")),
            ("rewards", Some("reward")),
            ("colision", Some("collision")),
            ("something_else", None),
        ];
        for (key, meant) in cases {
            assert_eq!(meant_key(key), meant, "{key}");
        }
    }

    #[test]
    fn each_response_is_handed_on_with_an_effect_per_token() {
        let spec = ObjectiveSpec::from_preset("stapo").unwrap();
        let (long, short) = ([-1.0, -2.0], [-1.0]);
        let columns = |logp| ResponseColumns {
            logp,
            behavior_logp: logp,
            entropy: &[0.5, 0.5][..logp.len()],
            reference_logp: Some(logp),
            behavior_entropy: None,
            sampler_logp: None,
            collision: None,
            teacher_logp: Some(logp),
        };
        let scored = columns(&long).scored(3, &[1.0]);
        assert_eq!((scored.group, scored.rewards, scored.n_tokens), (3, &[1.0][..], 2));
        let advantages = [1.0, -1.0].map(Advantages::Response);
        let minibatch = [(columns(&long), advantages[0].view()), (columns(&short), advantages[1].view())];
        let mut taken = Vec::new();
        let take = |idx: usize, effects: &[TokenEffect]| {
            taken.push((idx, effects.iter().map(|effect| effect.d_logp).collect::<Vec<_>>()));
            Ok::<(), ObjectiveError>(())
        };
        evaluate(&spec, &minibatch, UpdateKey::default(), take).unwrap();
        assert_eq!(taken, [(0, vec![-1.0, -1.0]), (1, vec![1.0])]);
        let stop = |idx: usize, _: &[TokenEffect]| {
            assert_eq!(idx, 0, "an error ends the evaluation");
            Err(ObjectiveError::Advantage { response_idx: idx, value: 7.0 })
        };
        assert!(evaluate(&spec, &minibatch, UpdateKey::default(), stop).is_err());
    }

    /// The census needs the collisions of all responses.
    #[test]
    fn quadrants_are_counted_where_every_response_has_collisions() {
        let spec = ObjectiveSpec::from_preset("stapo").unwrap();
        let (logp, entropy, collision) = ([-1.0, -9.0], [0.5, 0.1], [0.5, 0.9]);
        let columns = |collision| ResponseColumns {
            logp: &logp,
            behavior_logp: &logp,
            entropy: &entropy,
            reference_logp: None,
            behavior_entropy: None,
            sampler_logp: None,
            collision,
            teacher_logp: None,
        };
        let advantage = Advantages::Response(1.0);
        let n_by_quadrant = |has_collisions: [bool; 2]| {
            let minibatch =
                has_collisions.map(|has| (columns(has.then_some(&collision[..])), advantage.view()));
            let take = |_: usize, _: &[TokenEffect]| Ok::<(), ObjectiveError>(());
            let (_, totals) = evaluate(&spec, &minibatch, UpdateKey::default(), take).unwrap();
            totals.quadrants.map(|quadrants| quadrants.map(|quadrant| quadrant.n_tokens))
        };
        // The candidate's entropy is not strictly below the quantile of candidates, which is its entropy.
        assert_eq!(n_by_quadrant([true, true]), Some([2, 0, 2, 0]));
        assert_eq!(n_by_quadrant([true, false]), None);
    }
}
