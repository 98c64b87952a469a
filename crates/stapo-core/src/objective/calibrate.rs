//! What the masks read from the whole mini-batch: quantiles, means, and the tokens that random masks draw.

use super::candidate::{is_candidate, logp_below};
use super::{
    Mask, MaskSignals, ObjectiveError, ObjectiveSpec, OffPolicy, QuantileOver, ResponseSignals, Select,
    Surrogate,
};
use crate::random::Key;
use crate::stats::quantile_in_place;

/// Names an optimizer step: keys the random masks, and says which pass over the mini-batch is meant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UpdateKey {
    /// Number of the optimizer step. Random masks differ from step to step and are the same when a step is replayed.
    pub step: u64,
    /// 0, or 1 for the second pass of an objective with two passes.
    pub pass: usize,
}

/// The thresholds of one mini-batch. Given these, the fate of a token depends on the token's own response alone.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibration {
    pub(super) masks: Vec<CalibratedMask>,
    pub(super) penalised: Option<CovCut>,
    tau_h: Option<f64>,
}

impl Calibration {
    /// The entropy threshold of the first mask that has one, in nats.
    pub fn tau_h(&self) -> Option<f64> {
        self.tau_h
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum CalibratedMask {
    Spurious { logp_below: f64, rule: CandidateRule },
    RandomTokens { lottery: Lottery },
    TopEntropy { at_least: f64 },
    ClipCov { cov: Covariance, low: f64, high: f64, lottery: Lottery },
    LowProbabilityFirst { logp_below: f64, pass: usize },
    ProbabilityWeight { alpha: f64 },
    Taco { ln_a: f64, l: f64 },
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
    pub(super) fn of(self, advantage: f64, logp: f64) -> f64 {
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
        let own = self.cov.of(advantage, logp);
        own > cov || (own == cov && (response_idx, token_idx) <= (response, token))
    }
}

impl ObjectiveSpec {
    /// Checks the signals of a mini-batch and derives the thresholds of the masks. `minibatch` holds all responses of the
    /// optimizer step.
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
        let masks = masks.collect();
        let penalised = match self.surrogate {
            Surrogate::KlCov { share, .. } => self.cov_cut(minibatch, share),
            _ => None,
        };
        Ok(Calibration { masks, penalised, tau_h })
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
            Mask::Spurious { tau_p, q, select, quantile_over, seed } => {
                let logp_below = logp_below(tau_p);
                let (rule, tau_h) =
                    self.spurious_rule(minibatch, logp_below, q, select, quantile_over, key(seed));
                (CalibratedMask::Spurious { logp_below, rule }, tau_h)
            }
            Mask::RandomTokens { tau_p, q, seed } => {
                let logp_below = logp_below(tau_p);
                let tau_h = self.low_entropy_threshold(minibatch, logp_below, q, QuantileOver::Candidates);
                let n_winners = self.n_candidates_below(minibatch, logp_below, tau_h);
                let lottery = Lottery::draw(key(seed), n_winners, positions(minibatch));
                (CalibratedMask::RandomTokens { lottery }, tau_h)
            }
            Mask::TopEntropy { share } => {
                let mut all: Vec<f64> = minibatch.iter().flat_map(|r| self.signals(r).1).copied().collect();
                let at_least = quantile_in_place(&mut all, 1.0 - share);
                (CalibratedMask::TopEntropy { at_least: at_least.unwrap_or(f64::NEG_INFINITY) }, at_least)
            }
            Mask::ClipCov { share, low, high, seed } => {
                let cov = self.covariance(minibatch);
                let eligible = positions(minibatch).filter(|&(response, token)| {
                    let response = &minibatch[response];
                    let logp = self.signals(response).0[token];
                    self.is_cov_candidate(
                        cov,
                        low,
                        high,
                        response.advantage,
                        logp,
                        response.behavior_logp[token],
                    )
                });
                let n_winners = at_least_one(share, n_tokens(minibatch));
                let lottery = Lottery::draw(key(seed), n_winners, eligible);
                (CalibratedMask::ClipCov { cov, low, high, lottery }, None)
            }
            Mask::LowProbabilityFirst { eta } => {
                (CalibratedMask::LowProbabilityFirst { logp_below: logp_below(eta), pass: update.pass }, None)
            }
            Mask::ProbabilityWeight { alpha } => (CalibratedMask::ProbabilityWeight { alpha }, None),
            Mask::Taco { a, l } => (CalibratedMask::Taco { ln_a: libm::log(a), l }, None),
        }
    }

    fn spurious_rule(
        &self,
        minibatch: &[ResponseSignals],
        logp_below: f64,
        q: f64,
        select: Select,
        over: QuantileOver,
        key: Key,
    ) -> (CandidateRule, Option<f64>) {
        match select {
            Select::Full => (CandidateRule::All, None),
            Select::LowEntropy => {
                let tau_h = self.low_entropy_threshold(minibatch, logp_below, q, over);
                (tau_h.map_or(CandidateRule::Nothing, CandidateRule::Below), tau_h)
            }
            Select::HighEntropy => {
                let tau_h = self.low_entropy_threshold(minibatch, logp_below, 1.0 - q, over);
                (tau_h.map_or(CandidateRule::Nothing, CandidateRule::Above), tau_h)
            }
            Select::Random => {
                let tau_h = self.low_entropy_threshold(minibatch, logp_below, q, over);
                let n_winners = self.n_candidates_below(minibatch, logp_below, tau_h);
                let candidates = positions(minibatch).filter(|&(response, token)| {
                    let response = &minibatch[response];
                    is_candidate(response.advantage, self.signals(response).0[token], logp_below)
                });
                (CandidateRule::Lottery(Lottery::draw(key, n_winners, candidates)), tau_h)
            }
        }
    }

    /// The q-quantile of the entropies that `over` selects; absent where `over` selects none.
    fn low_entropy_threshold(
        &self,
        minibatch: &[ResponseSignals],
        logp_below: f64,
        q: f64,
        over: QuantileOver,
    ) -> Option<f64> {
        let mut counted: Vec<f64> = match over {
            QuantileOver::AllTokens => minibatch.iter().flat_map(|r| self.signals(r).1).copied().collect(),
            QuantileOver::Candidates => self.candidate_entropies(minibatch, logp_below).collect(),
        };
        quantile_in_place(&mut counted, q)
    }

    fn n_candidates_below(
        &self,
        minibatch: &[ResponseSignals],
        logp_below: f64,
        tau_h: Option<f64>,
    ) -> usize {
        let tau_h = tau_h.unwrap_or(f64::NEG_INFINITY);
        self.candidate_entropies(minibatch, logp_below).filter(|&entropy| entropy < tau_h).count()
    }

    fn candidate_entropies(
        &self,
        minibatch: &[ResponseSignals],
        logp_below: f64,
    ) -> impl Iterator<Item = f64> {
        minibatch.iter().flat_map(move |response| {
            let (logp, entropy) = self.signals(response);
            let is_own = move |logp: f64| is_candidate(response.advantage, logp, logp_below);
            logp.iter().zip(entropy).filter(move |(logp, _)| is_own(**logp)).map(|(_, &entropy)| entropy)
        })
    }

    fn covariance(&self, minibatch: &[ResponseSignals]) -> Covariance {
        let n = n_tokens(minibatch).max(1) as f64;
        let advantages: f64 = minibatch.iter().map(|r| r.advantage * r.logp.len() as f64).sum();
        let logps: f64 = minibatch.iter().map(|r| self.signals(r).0.iter().sum::<f64>()).sum();
        Covariance { mean_advantage: advantages / n, mean_logp: logps / n }
    }

    /// True for the tokens that Clip-Cov draws from: covariance within the bounds, ratio not clipped.
    pub(super) fn is_cov_candidate(
        &self,
        cov: Covariance,
        low: f64,
        high: f64,
        advantage: f64,
        logp: f64,
        behavior_logp: f64,
    ) -> bool {
        let c = cov.of(advantage, logp);
        if !(low < c && c < high) {
            return false;
        }
        let point = super::surrogate::Point {
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
                (cov.of(response.advantage, self.signals(response).0[token_idx]), response_idx, token_idx)
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

    /// The log-probs and entropies that the masks read. [`Self::check_response`] has checked that these are present.
    pub(super) fn signals<'a>(&self, response: &ResponseSignals<'a>) -> (&'a [f64], &'a [f64]) {
        let entropy = match self.mask_signals {
            MaskSignals::Current => response.entropy,
            MaskSignals::Behavior => response.behavior_entropy.unwrap_or(response.entropy),
        };
        (self.signal_logp(response.logp, response.behavior_logp), entropy)
    }

    pub(super) fn check_response(
        &self,
        response_idx: usize,
        response: &ResponseSignals,
    ) -> Result<(), ObjectiveError> {
        if !response.advantage.is_finite() {
            return Err(ObjectiveError::Advantage { response_idx, value: response.advantage });
        }
        let missing = |field, needed_by, remedy| {
            Err(ObjectiveError::Missing { response_idx, field, needed_by, remedy })
        };
        if self.needs_reference() && response.reference_logp.is_none() {
            return missing(
                "reference_logp",
                "the KL penalty",
                "give reference_logp, or set kl.kind = \"none\"",
            );
        }
        if self.off_policy != OffPolicy::None && response.sampler_logp.is_none() {
            return missing(
                "sampler_logp",
                "off_policy",
                "give sampler_logp, or set off_policy.kind = \"none\"",
            );
        }
        let reads_entropy = self.masks.iter().any(Mask::reads_entropy);
        if self.mask_signals == MaskSignals::Behavior && reads_entropy && response.behavior_entropy.is_none()
        {
            return missing(
                "behavior_entropy",
                "mask_signals = \"behavior\"",
                "give behavior_entropy, or set mask_signals = \"current\"",
            );
        }
        let fields = [
            ("logp", Some(response.logp), true),
            ("behavior_logp", Some(response.behavior_logp), true),
            ("entropy", Some(response.entropy), false),
            ("behavior_entropy", response.behavior_entropy, false),
            ("reference_logp", response.reference_logp, true),
            ("sampler_logp", response.sampler_logp, true),
        ];
        for (field, values, is_logp) in fields {
            let Some(values) = values else { continue };
            if values.len() != response.logp.len() {
                let expected = response.logp.len();
                return Err(ObjectiveError::Length { response_idx, field, got: values.len(), expected });
            }
            let (bad, expected) = if is_logp {
                (first_bad(values, is_logp_value), "a finite log-prob, at most 0")
            } else {
                (first_bad(values, is_entropy_value), "a finite entropy, at least 0")
            };
            if let Some(token_idx) = bad {
                let value = values[token_idx];
                return Err(ObjectiveError::Value { response_idx, field, token_idx, value, expected });
            }
        }
        Ok(())
    }
}

/// How far log-probs and entropies computed in f32 may leave their range by rounding.
const ROUNDING: f64 = 1e-3;

fn is_logp_value(x: f64) -> bool {
    x <= ROUNDING && x > f64::NEG_INFINITY
}

fn is_entropy_value(x: f64) -> bool {
    (-ROUNDING..f64::INFINITY).contains(&x)
}

/// The first value that is not good. The check of all values has no branch per value, so that it vectorises; the position
/// is searched only after the check has failed.
fn first_bad(values: &[f64], is_good: impl Fn(f64) -> bool) -> Option<usize> {
    let all_good = values.iter().fold(true, |good, &x| good & is_good(x));
    if all_good { None } else { values.iter().position(|&x| !is_good(x)) }
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
