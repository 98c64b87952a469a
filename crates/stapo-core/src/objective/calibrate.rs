//! What the masks read from the whole mini-batch: quantiles, means, and the tokens that random masks draw.

use super::candidate::{Improbable, logp_below};
use super::signals::MaskColumns;
use super::{
    Controls, Mask, ObjectiveError, ObjectiveSpec, QuantileOver, ResponseSignals, Select, StareSigns,
    Surrogate, Threshold, mask,
};
use crate::random::Key;
use crate::stats::quantile_in_place;
use std::ops::Range;

/// Names an optimizer step: keys the random masks, says which pass over the mini-batch is meant, and holds the settings
/// that adapt from step to step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct UpdateKey {
    /// Number of the optimizer step. Random masks differ from step to step and are the same when a step is replayed.
    pub step: u64,
    /// 0, or 1 for the second pass of an objective with two passes.
    pub pass: usize,
    /// From [`ObjectiveSpec::next_controls`] of the step before.
    pub controls: Controls,
}

/// The thresholds of one mini-batch. Given these, the fate of a token depends on the token's own response alone.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibration {
    pub(super) masks: Vec<CalibratedMask>,
    pub(super) penalised: Option<CovCut>,
    /// The tests by which effects are marked as candidates: those of the candidate masks, or the published one.
    pub(super) improbable: Vec<Improbable>,
    pub(super) entropy_coefficient: f64,
    tau_p: f64,
    tau_h: Option<f64>,
}

impl Calibration {
    /// The probability below which a token counts as improbable: the highest threshold of the S2T masks, which
    /// `target_share` finds in the mini-batch; the published value where no mask has such a threshold.
    pub fn tau_p(&self) -> f64 {
        self.tau_p
    }

    /// The entropy threshold of the first mask that has one, in nats.
    pub fn tau_h(&self) -> Option<f64> {
        self.tau_h
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum CalibratedMask {
    Spurious { improbable: Improbable, rule: CandidateRule },
    RandomTokens { improbable: Improbable, lottery: Lottery },
    TopEntropy { at_least: f64 },
    ClipCov { cov: Covariance, low: f64, high: f64, lottery: Lottery },
    LowProbabilityFirst { logp_below: f64, pass: usize },
    ProbabilityWeight { alpha: f64 },
    Taco { ln_a: f64, l: f64 },
    Stare { surprisal_at_least: f64, weight: f64, signs: StareSigns },
    Rsi { low: f64, high: f64 },
    OffPolicySequence { delta: f64 },
}

impl CalibratedMask {
    /// The test for candidates of a mask that has candidates.
    fn improbable(&self) -> Option<Improbable> {
        match *self {
            CalibratedMask::Spurious { improbable, .. } | CalibratedMask::RandomTokens { improbable, .. } => {
                Some(improbable)
            }
            _ => None,
        }
    }
}

/// Which candidates are silenced.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum CandidateRule {
    Below(f64),
    Above(f64),
    Lottery(Lottery),
    All,
    Nothing,
}

/// A random subset of exact size: the tokens with the lowest hashes. Whether a token is in the subset follows from the
/// token's own hash and `cut`, without looking at other tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Lottery {
    key: Key,
    /// The highest hash in the subset; absent for an empty subset.
    cut: Option<u64>,
}

impl Lottery {
    fn hash(key: Key, response_idx: usize, token_idx: usize) -> u64 {
        key.with(response_idx as u64).with(token_idx as u64).bits()
    }

    /// Draws `n_winners` of the eligible tokens, which are given as (response, token).
    fn draw(key: Key, n_winners: usize, eligible: impl Iterator<Item = (usize, usize)>) -> Self {
        if n_winners == 0 {
            return Lottery { key, cut: None };
        }
        let mut hashes: Vec<u64> =
            eligible.map(|(response, token)| Self::hash(key, response, token)).collect();
        let last = n_winners.min(hashes.len());
        let cut = (last > 0).then(|| *hashes.select_nth_unstable(last - 1).1);
        Lottery { key, cut }
    }

    pub(super) fn wins(self, response_idx: usize, token_idx: usize) -> bool {
        self.cut.is_some_and(|cut| Self::hash(self.key, response_idx, token_idx) <= cut)
    }
}

/// `(A - mean A)(logp - mean logp)` over the tokens of a mini-batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Covariance {
    mean_advantage: f64,
    mean_logp: f64,
}

impl Covariance {
    pub(super) fn at(self, advantage: f64, logp: f64) -> f64 {
        (advantage - self.mean_advantage) * (logp - self.mean_logp)
    }
}

/// The set of tokens with the highest covariance; among equal covariances the earlier tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct CovCut {
    cov: Covariance,
    /// The lowest-ranked token of the set: covariance, response, token.
    last: (f64, usize, usize),
}

impl CovCut {
    pub(super) fn contains(&self, advantage: f64, logp: f64, response_idx: usize, token_idx: usize) -> bool {
        let (cov, response, token) = self.last;
        let covariance = self.cov.at(advantage, logp);
        covariance > cov || (covariance == cov && (response_idx, token_idx) <= (response, token))
    }
}

impl ObjectiveSpec {
    /// Checks the signals of a mini-batch and derives the thresholds of the masks. `minibatch` holds all responses of
    /// the optimizer step.
    pub fn calibrate(
        &self,
        minibatch: &[ResponseSignals],
        update: UpdateKey,
    ) -> Result<Calibration, ObjectiveError> {
        for (response_idx, response) in minibatch.iter().enumerate() {
            self.check_response(response_idx, response)?;
        }
        let mut tau_h = None;
        let masks = self.masks.iter().enumerate().map(|(mask_idx, mask)| {
            let (mask, threshold) = self.calibrate_mask(mask_idx, mask, minibatch, update);
            tau_h = tau_h.or(threshold);
            mask
        });
        let masks: Vec<CalibratedMask> = masks.collect();
        let penalised = match self.surrogate {
            Surrogate::KlCov { share, .. } => self.cov_cut(minibatch, share),
            _ => None,
        };
        let mut improbable: Vec<Improbable> = masks.iter().filter_map(CalibratedMask::improbable).collect();
        if improbable.is_empty() {
            improbable.push(Improbable::below(mask::PUBLISHED_TAU_P));
        }
        let entropy_coefficient = self.entropy_coefficient(update.controls);
        let tau_p = self.found_tau_p(&improbable);
        Ok(Calibration { masks, penalised, improbable, entropy_coefficient, tau_p, tau_h })
    }

    fn found_tau_p(&self, improbable: &[Improbable]) -> f64 {
        let fixed = self.tau_p();
        let found = improbable.iter().filter_map(|test| match *test {
            Improbable::Below { logp } if logp != logp_below(fixed) => Some(libm::exp(logp)),
            Improbable::Below { .. } => Some(fixed),
            _ => None,
        });
        found.reduce(f64::max).unwrap_or(fixed)
    }

    fn calibrate_mask(
        &self,
        mask_idx: usize,
        mask: &Mask,
        minibatch: &[ResponseSignals],
        update: UpdateKey,
    ) -> (CalibratedMask, Option<f64>) {
        let key = |seed: u64| Key::new(seed).with(update.step).with(mask_idx as u64);
        match *mask {
            Mask::Spurious { tau_p, threshold, q, select, quantile_over, seed } => {
                let improbable = self.improbable(minibatch, tau_p, threshold);
                let (rule, tau_h) =
                    self.spurious_rule(minibatch, improbable, q, select, quantile_over, key(seed));
                (CalibratedMask::Spurious { improbable, rule }, tau_h)
            }
            Mask::RandomTokens { tau_p, q, seed } => {
                let improbable = Improbable::below(tau_p);
                let tau_h = self.low_entropy_threshold(minibatch, improbable, q, QuantileOver::Candidates);
                let n_winners = self.n_candidates_below(minibatch, improbable, tau_h);
                let lottery = Lottery::draw(key(seed), n_winners, positions(minibatch));
                (CalibratedMask::RandomTokens { improbable, lottery }, tau_h)
            }
            Mask::TopEntropy { share } => {
                let mut all: Vec<f64> = self.entropies(minibatch).collect();
                let at_least = quantile_in_place(&mut all, 1.0 - share);
                (CalibratedMask::TopEntropy { at_least: at_least.unwrap_or(f64::NEG_INFINITY) }, at_least)
            }
            Mask::ClipCov { share, low, high, seed } => {
                let cov = self.covariance(minibatch);
                let n_winners = at_least_one(share, n_tokens(minibatch));
                let eligible = positions(minibatch).filter(|&(response_idx, token_idx)| {
                    self.is_cov_candidate(cov, low..high, &minibatch[response_idx], token_idx)
                });
                let lottery = Lottery::draw(key(seed), n_winners, eligible);
                (CalibratedMask::ClipCov { cov, low, high, lottery }, None)
            }
            Mask::LowProbabilityFirst { eta } => {
                (CalibratedMask::LowProbabilityFirst { logp_below: logp_below(eta), pass: update.pass }, None)
            }
            Mask::ProbabilityWeight { alpha } => (CalibratedMask::ProbabilityWeight { alpha }, None),
            Mask::Taco { a, l } => (CalibratedMask::Taco { ln_a: libm::log(a), l }, None),
            Mask::Stare { share, weight, entropy_below, signs, step, .. } => {
                let weight = if step > 0.0 {
                    update.controls.stare_weight.unwrap_or(weight)
                } else if self.mean_entropy(minibatch) < entropy_below {
                    weight
                } else {
                    1.0
                };
                let mut surprisals: Vec<f64> =
                    minibatch.iter().flat_map(|r| self.columns(r).logp).map(|logp| -logp).collect();
                let at_least = quantile_in_place(&mut surprisals, 1.0 - share);
                let surprisal_at_least = at_least.unwrap_or(f64::INFINITY);
                (CalibratedMask::Stare { surprisal_at_least, weight, signs }, None)
            }
            Mask::Rsi { low, high } => (CalibratedMask::Rsi { low, high }, None),
            Mask::OffPolicySequence { delta } => (CalibratedMask::OffPolicySequence { delta }, None),
        }
    }

    /// The threshold of an S2T mask with the values of the mini-batch.
    fn improbable(&self, minibatch: &[ResponseSignals], tau_p: f64, threshold: Threshold) -> Improbable {
        match threshold {
            Threshold::TauP => Improbable::below(tau_p),
            Threshold::TargetShare { share } => {
                let mut rewarded: Vec<f64> = self.rewarded(minibatch, |columns, t| columns.logp[t]).collect();
                let logp = quantile_in_place(&mut rewarded, share).unwrap_or(f64::NEG_INFINITY);
                Improbable::Below { logp }
            }
            Threshold::Surprise { c, b } => Improbable::Surprising { c, b },
            Threshold::Influence { kappa, .. } => {
                Improbable::Influential { kappa, curvature: threshold.curvature() }
            }
        }
    }

    fn spurious_rule(
        &self,
        minibatch: &[ResponseSignals],
        improbable: Improbable,
        q: f64,
        select: Select,
        over: QuantileOver,
        key: Key,
    ) -> (CandidateRule, Option<f64>) {
        match select {
            Select::Full => (CandidateRule::All, None),
            Select::LowEntropy => {
                let tau_h = self.low_entropy_threshold(minibatch, improbable, q, over);
                (tau_h.map_or(CandidateRule::Nothing, CandidateRule::Below), tau_h)
            }
            Select::HighEntropy => {
                let tau_h = self.low_entropy_threshold(minibatch, improbable, 1.0 - q, over);
                (tau_h.map_or(CandidateRule::Nothing, CandidateRule::Above), tau_h)
            }
            Select::Random => {
                let tau_h = self.low_entropy_threshold(minibatch, improbable, q, over);
                let n_winners = self.n_candidates_below(minibatch, improbable, tau_h);
                let candidates = positions(minibatch).filter(|&(response_idx, token_idx)| {
                    let response = &minibatch[response_idx];
                    response.advantage.at(token_idx) > 0.0
                        && improbable.holds(&self.columns(response), token_idx)
                });
                (CandidateRule::Lottery(Lottery::draw(key, n_winners, candidates)), tau_h)
            }
        }
    }

    /// The q-quantile of the entropies that `over` selects; absent if `over` selects none.
    fn low_entropy_threshold(
        &self,
        minibatch: &[ResponseSignals],
        improbable: Improbable,
        q: f64,
        over: QuantileOver,
    ) -> Option<f64> {
        let mut counted: Vec<f64> = match over {
            QuantileOver::AllTokens => self.entropies(minibatch).collect(),
            QuantileOver::RewardedTokens => {
                self.rewarded(minibatch, |columns, t| columns.entropy[t]).collect()
            }
            QuantileOver::Candidates => self.candidate_entropies(minibatch, improbable).collect(),
        };
        quantile_in_place(&mut counted, q)
    }

    fn n_candidates_below(
        &self,
        minibatch: &[ResponseSignals],
        improbable: Improbable,
        tau_h: Option<f64>,
    ) -> usize {
        let tau_h = tau_h.unwrap_or(f64::NEG_INFINITY);
        self.candidate_entropies(minibatch, improbable).filter(|&entropy| entropy < tau_h).count()
    }

    fn candidate_entropies(
        &self,
        minibatch: &[ResponseSignals],
        improbable: Improbable,
    ) -> impl Iterator<Item = f64> {
        let entropies = self
            .rewarded(minibatch, move |columns, t| improbable.holds(columns, t).then(|| columns.entropy[t]));
        entropies.flatten()
    }

    /// `of` each token with A > 0.
    fn rewarded<T>(
        &self,
        minibatch: &[ResponseSignals],
        of: impl Fn(&MaskColumns, usize) -> T + Copy,
    ) -> impl Iterator<Item = T> {
        minibatch.iter().filter(|response| !response.advantage.rewards_nothing()).flat_map(move |response| {
            let columns = self.columns(response);
            let tokens = 0..response.logp.len();
            tokens.filter(|&t| response.advantage.at(t) > 0.0).map(move |t| of(&columns, t))
        })
    }

    fn entropies(&self, minibatch: &[ResponseSignals]) -> impl Iterator<Item = f64> {
        minibatch.iter().flat_map(|response| self.columns(response).entropy).copied()
    }

    fn mean_entropy(&self, minibatch: &[ResponseSignals]) -> f64 {
        self.entropies(minibatch).sum::<f64>() / n_tokens(minibatch).max(1) as f64
    }

    fn covariance(&self, minibatch: &[ResponseSignals]) -> Covariance {
        let n = n_tokens(minibatch).max(1) as f64;
        let advantages: f64 = minibatch.iter().map(|r| r.advantage.sum(r.logp.len())).sum();
        let logps: f64 = minibatch.iter().map(|r| self.columns(r).logp.iter().sum::<f64>()).sum();
        Covariance { mean_advantage: advantages / n, mean_logp: logps / n }
    }

    /// True for the tokens that Clip-Cov draws from: covariance strictly within the bounds, ratio not clipped.
    pub(super) fn is_cov_candidate(
        &self,
        cov: Covariance,
        bounds: Range<f64>,
        response: &ResponseSignals,
        token_idx: usize,
    ) -> bool {
        let logp = self.columns(response).logp[token_idx];
        let behavior_logp = response.behavior_logp[token_idx];
        let advantage = response.advantage.at(token_idx);
        let c = cov.at(advantage, logp);
        if !(bounds.start < c && c < bounds.end) {
            return false;
        }
        let point = super::surrogate::SurrogatePoint {
            ratio: libm::exp(logp - behavior_logp),
            advantage,
            logp,
            behavior_logp,
            penalised: false,
        };
        !self.surrogate.at(point).clipped
    }

    fn cov_cut(&self, minibatch: &[ResponseSignals], share: f64) -> Option<CovCut> {
        let cov = self.covariance(minibatch);
        let mut ranked: Vec<(f64, usize, usize)> = positions(minibatch)
            .map(|(response_idx, token_idx)| {
                let response = &minibatch[response_idx];
                let logp = self.columns(response).logp[token_idx];
                (cov.at(response.advantage.at(token_idx), logp), response_idx, token_idx)
            })
            .collect();
        let n_chosen = at_least_one(share, ranked.len()).min(ranked.len());
        let nth = n_chosen.checked_sub(1)?;
        let by_rank = |a: &(f64, usize, usize), b: &(f64, usize, usize)| {
            b.0.total_cmp(&a.0).then_with(|| (a.1, a.2).cmp(&(b.1, b.2)))
        };
        let last = *ranked.select_nth_unstable_by(nth, by_rank).1;
        Some(CovCut { cov, last })
    }
}

fn n_tokens(minibatch: &[ResponseSignals]) -> usize {
    minibatch.iter().map(|response| response.logp.len()).sum()
}

fn positions(minibatch: &[ResponseSignals]) -> impl Iterator<Item = (usize, usize)> {
    minibatch
        .iter()
        .enumerate()
        .flat_map(|(idx, response)| (0..response.logp.len()).map(move |token| (idx, token)))
}

/// `share` of `n`, rounded down, and at least 1, as the authors' code of Clip-Cov and KL-Cov counts.
fn at_least_one(share: f64, n: usize) -> usize {
    ((share * n as f64) as usize).max(1)
}
