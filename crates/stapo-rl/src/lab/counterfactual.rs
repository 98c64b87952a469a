//! Do silenced tokens matter? A response is continued from a token as it was sampled and from the token that the policy
//! preferred in its place, and the rates of right answers are compared.

mod gradient;

pub use crate::learn::constants::RolledOut;
pub use gradient::{GradientEffect, GradientSummary, gradient_effect, gradient_summary};

use crate::error::{Error, Result};
use crate::learn::learner::Learner;
use crate::learn::scoring::{Sequence, preferred};
use crate::plan::config::Plan;
use crate::rollout::{Beginning, continuations};
use crate::run::meter::Phase;
use crate::train::Trainer;
use serde::{Deserialize, Serialize};
use stapo_core::random::Key;
use stapo_core::record::TokenRecord;
use stapo_core::stats::{PairedComparison, Resampling, StatsError, compare_paired};
use stapo_core::{Problem, Scored, Verdict};
use std::collections::{BTreeMap, BTreeSet};

/// Why a token is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Silenced in training.
    Silenced,
    /// Rewarded and improbable, and kept.
    KeptCandidate,
    /// A random token of a response with a silenced token, other than the one that the policy preferred.
    Random,
    /// A token with a negative advantage, as probable as a silenced token and not the one that the policy preferred.
    Punished,
}

impl Kind {
    pub const ALL: [Self; 4] = [Self::Silenced, Self::KeptCandidate, Self::Random, Self::Punished];

    /// The kind in plain words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Silenced => "silenced",
            Self::KeptCandidate => "candidate, kept",
            Self::Random => "random, same responses",
            Self::Punished => "A < 0, same probability",
        }
    }
}

/// How many continuations, of which tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Continuations of each of the two tokens.
    pub n_samples: usize,
    /// Tokens of each kind in one step, at most.
    pub max_tokens: usize,
    pub seed: u64,
}

/// One token, and what came of it and of the token that the policy preferred in its place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Counterfactual {
    pub step: u64,
    pub kind: Kind,
    pub problem_id: String,
    pub sample_idx: usize,
    pub token_idx: usize,
    pub id: u32,
    pub text: String,
    pub preferred_id: u32,
    pub preferred_text: String,
    pub logp: f64,
    /// Nats.
    pub entropy: f64,
    pub advantage: f64,
    pub n_samples: usize,
    /// Right answers among the continuations of the token as sampled, and of the preferred one.
    pub n_right_sampled: usize,
    pub n_right_preferred: usize,
}

/// A sampled token of a rollout batch: the index of its response among all, and its index among the sampled tokens of
/// that response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Site {
    response: usize,
    token: usize,
}

/// A step's batch with what the policy preferred at every position.
struct ReplayedBatch<'a> {
    step: u64,
    responses: Vec<(&'a Problem, &'a Scored)>,
    rolled: &'a RolledOut,
    preferred: Vec<Vec<u32>>,
}

/// Compares tokens of the trainer's next step, whose batch is `rolled`: the recorded silenced ones and kept candidates,
/// and controls.
pub fn counterfactuals(
    trainer: &mut Trainer,
    plan: &Plan,
    rolled: &RolledOut,
    silenced: &[TokenRecord],
    kept: &[TokenRecord],
    settings: Settings,
) -> Result<Vec<Counterfactual>> {
    if plan.config.environment.is_some() {
        return Err(Error::Misfit {
            key: "environment",
            problem: "answers between turns, and a response that continues from a token gets no answer"
                .into(),
            remedy: "compare tokens of a run without an environment",
        });
    }
    let groups = rolled.batch.groups.iter();
    let responses: Vec<(&Problem, &Scored)> =
        groups.flat_map(|group| group.members.iter().map(|member| (&group.problem, member))).collect();
    let sequences: Vec<Sequence> =
        responses.iter().map(|(_, scored)| Sequence::from(&scored.rollout)).collect();
    let Learner { model, ranks, .. } = &trainer.learner;
    let preferred = preferred(trainer.memory.score(), &model.policy, plan, ranks.as_ref(), &sequences)?;
    let batch = ReplayedBatch { step: trainer.learner.counters.step + 1, responses, rolled, preferred };
    let sites = batch.sites(silenced, kept, settings)?;
    batch.compare(trainer, plan, &sites, settings)
}

impl ReplayedBatch<'_> {
    fn sites(
        &self,
        silenced: &[TokenRecord],
        kept: &[TokenRecord],
        settings: Settings,
    ) -> Result<Vec<(Kind, Site)>> {
        let found = |records: &[TokenRecord]| -> Result<Vec<Site>> {
            let sites: Vec<Site> = records.iter().map(|record| self.find(record)).collect::<Result<_>>()?;
            Ok(spread(&sites, settings.max_tokens))
        };
        let silenced = found(silenced)?;
        let mut used: BTreeSet<Site> = silenced.iter().copied().collect();
        let kept: Vec<Site> = found(kept)?.into_iter().filter(|site| used.insert(*site)).collect();
        let key = Key::new(settings.seed).with(self.step);
        let random: Vec<Site> = silenced
            .iter()
            .enumerate()
            .filter_map(|(idx, site)| {
                let free: Vec<Site> =
                    self.contrasts(site.response).filter(|other| !used.contains(other)).collect();
                let chosen =
                    (!free.is_empty()).then(|| free[key.with(idx as u64).below(free.len() as u64) as usize]);
                chosen.filter(|site| used.insert(*site))
            })
            .collect();
        let punished: Vec<Site> = silenced
            .iter()
            .filter_map(|site| self.punished(*site, &used).filter(|other| used.insert(*other)))
            .collect();
        let kinds = Kind::ALL.into_iter().zip([silenced, kept, random, punished]);
        Ok(kinds.flat_map(|(kind, sites)| sites.into_iter().map(move |site| (kind, site))).collect())
    }

    /// The site of a recorded token. Where the batch has another token there, the replay is not that of the record.
    fn find(&self, record: &TokenRecord) -> Result<Site> {
        let is_recorded = |(problem, scored): &(&Problem, &Scored)| {
            let rollout = &scored.rollout;
            problem.id == record.problem_id
                && rollout.sample_idx == record.sample_idx
                && rollout.sampled_tokens().nth(record.token_idx) == Some(record.id)
        };
        let response = self.responses.iter().position(is_recorded);
        response.map(|response| Site { response, token: record.token_idx }).ok_or_else(|| {
            Error::OtherReplay {
                step: self.step,
                problem_id: record.problem_id.clone(),
                sample_idx: record.sample_idx,
                token_idx: record.token_idx,
            }
        })
    }

    /// The tokens of a response that are not the ones that the policy preferred.
    fn contrasts(&self, response: usize) -> impl Iterator<Item = Site> {
        let tokens = self.responses[response].1.rollout.sampled_tokens().zip(&self.preferred[response]);
        let other = tokens.enumerate().filter(|(_, (token, preferred))| token != *preferred);
        other.map(move |(token, _)| Site { response, token })
    }

    /// The unused token with a negative advantage whose log-prob is nearest to that of `site`.
    fn punished(&self, site: Site, used: &BTreeSet<Site>) -> Option<Site> {
        let logp = self.logp(site);
        let all = (0..self.responses.len()).flat_map(|response| self.contrasts(response));
        let punished = all.filter(|other| self.advantage(*other) < 0.0 && !used.contains(other));
        punished.min_by(|a, b| (self.logp(*a) - logp).abs().total_cmp(&(self.logp(*b) - logp).abs()))
    }

    /// The tokens of a response before a site, and the two that may follow: the sampled and the preferred one.
    fn fork(&self, site: Site) -> (&[u32], [u32; 2]) {
        let rollout = &self.responses[site.response].1.rollout;
        let position = rollout.sampled_positions().nth(site.token).expect("a site is a sampled token");
        let before = &rollout.tokens[rollout.prompt().len()..position];
        (before, [rollout.tokens[position], self.preferred[site.response][site.token]])
    }

    fn logp(&self, site: Site) -> f64 {
        f64::from(self.responses[site.response].1.rollout.logp[site.token])
    }

    fn advantage(&self, site: Site) -> f64 {
        self.rolled.constants[site.response].advantages.view().at(site.token)
    }

    fn compare(
        &self,
        trainer: &mut Trainer,
        plan: &Plan,
        sites: &[(Kind, Site)],
        settings: Settings,
    ) -> Result<Vec<Counterfactual>> {
        // The two continuations of a token have the same number, and so the same random numbers.
        let mut beginnings = Vec::with_capacity(2 * sites.len());
        for (number, (_, site)) in sites.iter().enumerate() {
            let (problem, scored) = self.responses[site.response];
            let (before, choices) = self.fork(*site);
            for token in choices {
                let tokens = before.iter().copied().chain([token]).collect();
                let prompt = scored.rollout.prompt();
                beginnings.push(Beginning { number: number as u64, problem_id: &problem.id, prompt, tokens });
            }
        }
        let meter = trainer.meter();
        meter.expect(Phase::Rollout, beginnings.len() * settings.n_samples);
        let key = Key::new(settings.seed).with(self.step).with(u64::MAX);
        let memory = trainer.memory.sample();
        let model = &trainer.learner.model;
        let continued = continuations(model, memory, plan, &beginnings, (key, settings.n_samples), &meter)?;
        let tokenizer = model.tokenizer()?;
        let text = |token: u32| tokenizer.decode_all(&[token]);
        let mut found = Vec::with_capacity(sites.len());
        for ((kind, site), responses) in sites.iter().zip(continued.chunks_exact(2)) {
            let (problem, scored) = self.responses[site.response];
            let n_right = |responses: &[Vec<u32>]| -> Result<usize> {
                let texts: Vec<String> =
                    responses.iter().map(|tokens| Ok(tokenizer.decode(tokens)?)).collect::<Result<_>>()?;
                let pairs: Vec<(&Problem, &str)> =
                    texts.iter().map(|text| (problem, text.as_str())).collect();
                let judged = trainer.task.judge(&pairs)?;
                Ok(judged.iter().filter(|judged| judged.verdict == Verdict::Right).count())
            };
            let rollout = &scored.rollout;
            let (_, [id, preferred_id]) = self.fork(*site);
            found.push(Counterfactual {
                step: self.step,
                kind: *kind,
                problem_id: problem.id.clone(),
                sample_idx: rollout.sample_idx,
                token_idx: site.token,
                id,
                text: text(id)?,
                preferred_id,
                preferred_text: text(preferred_id)?,
                logp: self.logp(*site),
                entropy: f64::from(rollout.entropy[site.token]),
                advantage: self.advantage(*site),
                n_samples: settings.n_samples,
                n_right_sampled: n_right(&responses[0])?,
                n_right_preferred: n_right(&responses[1])?,
            });
        }
        Ok(found)
    }
}

/// At most `most` of the sites, spread evenly.
fn spread(sites: &[Site], most: usize) -> Vec<Site> {
    let n = most.min(sites.len());
    (0..n).map(|idx| sites[idx * sites.len() / n]).collect()
}

/// What came of the tokens of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct KindSummary {
    pub kind: Kind,
    pub n_tokens: usize,
    /// Problems of a step; the unit of chance, since tokens of one problem are alike.
    pub n_problems: usize,
    /// Mean rates of right answers over the problems.
    pub right_sampled: f64,
    pub right_preferred: f64,
    /// As sampled minus preferred, over problems; `None` for fewer than two.
    pub paired: Option<PairedComparison>,
}

/// One summary for each kind that has tokens.
pub fn summaries(
    all: &[Counterfactual],
    resampling: &Resampling,
) -> std::result::Result<Vec<KindSummary>, StatsError> {
    let mut found = Vec::new();
    for kind in Kind::ALL {
        let mut problems: BTreeMap<(u64, &str), Vec<&Counterfactual>> = BTreeMap::new();
        for token in all.iter().filter(|token| token.kind == kind) {
            problems.entry((token.step, &token.problem_id)).or_default().push(token);
        }
        if problems.is_empty() {
            continue;
        }
        let rates = |n_right: fn(&Counterfactual) -> usize| -> Vec<f64> {
            let by_problem = problems.values().map(|tokens| {
                let n_samples: usize = tokens.iter().map(|token| token.n_samples).sum();
                tokens.iter().map(|token| n_right(token)).sum::<usize>() as f64 / n_samples.max(1) as f64
            });
            by_problem.collect()
        };
        let sampled = rates(|token| token.n_right_sampled);
        let preferred = rates(|token| token.n_right_preferred);
        let mean = |rates: &[f64]| rates.iter().sum::<f64>() / rates.len() as f64;
        found.push(KindSummary {
            kind,
            n_tokens: problems.values().map(Vec::len).sum(),
            n_problems: problems.len(),
            right_sampled: mean(&sampled),
            right_preferred: mean(&preferred),
            paired: if sampled.len() < 2 {
                None
            } else {
                Some(compare_paired(&preferred, &sampled, resampling)?)
            },
        });
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
