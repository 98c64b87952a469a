//! Step 4 of a training step: what is constant over all updates of a rollout batch. Scoring passes of the reference and
//! the teacher, and advantages.

use crate::error::{Error, Result};
use crate::learn::scoring::{Sequence, score, score_base, widen};
use crate::learn::teacher::Teacher;
use crate::plan::config::{Credit, Plan};
use crate::policy::loaded::LoadedModel;
use crate::ranks::Transport;
use crate::rollout::Sampled;
use crate::run::meter::{Meter, Phase};
use crate::tasks::Task;
use stapo_core::objective::{Advantages, ScoredResponse};
use stapo_core::record::EpisodeRecord;
use stapo_core::{Batch, Episode, Group, Rollout};
use stapo_model::Device;
use stapo_model::decoder::{Pass, Policy};
use std::ops::Range;

/// The constants of one response. Columns have one entry per sampled token.
#[derive(Debug, Clone, PartialEq)]
pub struct ResponseConstants {
    pub advantages: Advantages,
    /// Under the frozen reference policy, where the objective has a KL penalty.
    pub reference_logp: Option<Vec<f64>>,
    /// As the sampling engine reported it, where the rollout came from elsewhere.
    pub sampler_logp: Option<Vec<f64>>,
}

/// The frozen policy of a KL penalty.
pub(crate) enum Reference {
    /// The policy in training without its adapters.
    WithoutAdapters,
    Model(Box<Policy>),
}

impl Reference {
    /// The frozen policy of a KL penalty; `None` for an objective without one.
    pub fn open(plan: &Plan, model: &LoadedModel, device: &Device) -> Result<Option<Self>> {
        if !plan.objective.needs_reference() {
            return Ok(None);
        }
        if plan.has_free_reference() {
            return Ok(Some(Self::WithoutAdapters));
        }
        let source = plan.config.reference.as_ref().unwrap_or(&plan.config.model);
        let mut policy = LoadedModel::open(source, &device.read_only())?.policy;
        policy.fit_longest(plan.longest_sequence());
        let n_model = model.policy.config().vocabulary;
        let n_reference = policy.config().vocabulary;
        if n_model != n_reference {
            return Err(Error::Misfit {
                key: "reference",
                problem: format!("has a vocabulary of {n_reference}, the model one of {n_model}"),
                remedy: "a KL penalty compares distributions over the same tokens: take a reference of the same family",
            });
        }
        Ok(Some(Self::Model(Box::new(policy))))
    }
}

/// The models that score a rollout batch, and the pass that they score in.
pub(crate) struct Scorers<'a> {
    pub pass: &'a mut Pass,
    pub model: &'a LoadedModel,
    pub reference: Option<&'a Reference>,
    pub teacher: Option<&'a Teacher>,
    /// The ranks among which the scoring is dealt out.
    pub ranks: &'a dyn Transport,
    pub meter: &'a Meter,
}

/// A rollout batch that is ready for updates.
#[derive(Debug)]
pub struct RolledOut {
    pub batch: Batch,
    /// In the order of the batch's responses.
    pub constants: Vec<ResponseConstants>,
    /// Problems drawn, including those whose groups were replaced.
    pub n_drawn: u64,
    /// Responses and response tokens sampled, including those of replaced groups.
    pub n_responses: usize,
    pub n_sampled: usize,
    /// What environments of several turns answered, including episodes of replaced groups.
    pub episodes: Vec<EpisodeRecord>,
}

impl RolledOut {
    /// Scores the responses of step `step` and computes their advantages.
    pub(crate) fn prepare(
        scorers: &mut Scorers,
        task: &Task,
        plan: &Plan,
        step: u64,
        sampled: Sampled,
    ) -> Result<Self> {
        scorers.meter.enter(Phase::Calibrate);
        let Sampled { batch, sampler_logp, n_drawn, n_responses, n_sampled, episodes } = sampled;
        let sequences: Vec<Sequence> =
            batch.responses().map(|scored| Sequence::from(&scored.rollout)).collect();
        let reference_logp = match scorers.reference {
            Some(Reference::WithoutAdapters) => {
                let Scorers { pass, model, ranks, .. } = scorers;
                let scored = score_base(pass, &model.policy, plan, *ranks, &sequences)?;
                Some(scored.into_iter().map(|scores| scores.logp).collect())
            }
            Some(Reference::Model(policy)) => Some(scorers.logp_of(policy, plan, &sequences)?),
            None => None,
        };
        let teacher_logp = match scorers.teacher {
            Some(teacher) => {
                let prompted = teacher.prompted(scorers.model, task, plan, &batch)?;
                let taught: Option<Vec<Sequence>> =
                    prompted.as_ref().map(|all| all.iter().map(Sequence::from).collect());
                let taught = taught.as_ref().unwrap_or(&sequences);
                Some(scorers.logp_of(teacher.policy(scorers.model), plan, taught)?)
            }
            None => None,
        };
        let advantages = advantages(plan, &batch, reference_logp.as_deref(), teacher_logp.as_deref())
            .map_err(|source| Error::Objective { step, microbatch: None, source })?;
        let mut reference_logp = reference_logp.into_iter().flatten();
        let mut sampler_logp = sampler_logp.into_iter();
        let of_response = |advantages| ResponseConstants {
            advantages,
            reference_logp: reference_logp.next(),
            sampler_logp: sampler_logp.next(),
        };
        let constants = advantages.into_iter().map(of_response).collect();
        Ok(RolledOut { batch, constants, n_drawn, n_responses, n_sampled, episodes })
    }

    /// Mini-batches of whole groups, each with the constants of its responses.
    pub fn minibatches(&self, plan: &Plan) -> Vec<(&[Group], &[ResponseConstants])> {
        let mut rest = self.constants.as_slice();
        let with_constants = |groups| {
            let (constants, after) = rest.split_at(n_responses(groups));
            rest = after;
            (groups, constants)
        };
        self.batch.minibatches(plan.config.update.problems_per_minibatch).map(with_constants).collect()
    }
}

fn n_responses(groups: &[Group]) -> usize {
    groups.iter().map(|group| group.members.len()).sum()
}

impl Scorers<'_> {
    fn logp_of(&mut self, policy: &Policy, plan: &Plan, sequences: &[Sequence]) -> Result<Vec<Vec<f64>>> {
        let scores = score(self.pass, policy, plan, self.ranks, sequences)?;
        Ok(scores.into_iter().map(|scores| scores.logp).collect())
    }
}

/// The advantages of a whole rollout batch, in the order of its responses.
fn advantages(
    plan: &Plan,
    batch: &Batch,
    reference_logp: Option<&[Vec<f64>]>,
    teacher_logp: Option<&[Vec<f64>]>,
) -> std::result::Result<Vec<Advantages>, stapo_core::ObjectiveError> {
    let weights: Vec<f64> = plan.rewards.iter().map(|reward| reward.weight).collect();
    let reads_tokens = plan.objective.advantages_read_tokens();
    let columns: Vec<(Vec<f64>, Vec<f64>)> = if reads_tokens {
        batch.responses().map(|s| (widen(&s.rollout.logp), widen(&s.rollout.entropy))).collect()
    } else {
        Vec::new()
    };
    let credit = if plan.config.environment.is_some() { plan.episode().credit } else { Credit::Episode };
    let parts: Vec<Vec<CreditedPart>> = credited_parts(batch, credit);
    let responses: Vec<ScoredResponse> = parts
        .iter()
        .enumerate()
        .flat_map(|(idx, parts)| parts.iter().map(move |part| (idx, part)))
        .map(|(idx, part)| ScoredResponse {
            behavior_logp: columns.get(idx).map(|(logp, _)| &logp[part.tokens.clone()]),
            behavior_entropy: columns.get(idx).map(|(_, entropy)| &entropy[part.tokens.clone()]),
            reference_logp: reference_logp.map(|all| &all[idx][part.tokens.clone()]),
            teacher_logp: teacher_logp.map(|all| &all[idx][part.tokens.clone()]),
            ..ScoredResponse::new(part.group, part.rewards, part.tokens.len())
        })
        .collect();
    let mut advantages = plan.objective.advantages(&responses, &weights)?.into_iter();
    Ok(parts.iter().map(|parts| joined(parts, advantages.by_ref().take(parts.len()))).collect())
}

/// Sampled tokens of a response that have an advantage together.
struct CreditedPart<'a> {
    /// Parts with the same number are compared with each other.
    group: usize,
    rewards: &'a [f64],
    tokens: Range<usize>,
}

/// For each response of a batch, the whole of it or its turns.
fn credited_parts(batch: &Batch, credit: Credit) -> Vec<Vec<CreditedPart<'_>>> {
    let n_groups = batch.groups.len();
    let numbered = batch.groups.iter().enumerate();
    let parts = numbered.flat_map(|(group_idx, group)| {
        let n_common = common_turns(group);
        group.members.iter().map(move |scored| match &scored.episode {
            Some(episode) if credit == Credit::Turn => {
                let number = |turn_idx: usize| turn_idx.min(n_common - 1) * n_groups + group_idx;
                turn_parts(episode, &scored.rollout, number)
            }
            _ => {
                let tokens = 0..scored.rollout.n_sampled();
                vec![CreditedPart { group: group_idx, rewards: &scored.rewards, tokens }]
            }
        })
    });
    parts.collect()
}

/// The turns that at least two episodes of a group have, at least one. A turn beyond them, which would be compared with
/// none, is compared with the last of them.
fn common_turns(group: &Group) -> usize {
    let episodes = group.members.iter().filter_map(|member| member.episode.as_ref());
    let mut n_turns: Vec<usize> = episodes.map(|episode| episode.turns.len()).collect();
    n_turns.sort_unstable();
    n_turns.iter().rev().nth(1).copied().unwrap_or(1).max(1)
}

/// The turns of an episode; `number` gives the group of a turn by its index.
fn turn_parts<'a>(
    episode: &'a Episode,
    rollout: &Rollout,
    number: impl Fn(usize) -> usize,
) -> Vec<CreditedPart<'a>> {
    let mut parts = Vec::with_capacity(episode.turns.len());
    let mut start = 0;
    for (turn_idx, (turn, n_tokens)) in episode.turns.iter().zip(rollout.turn_lengths()).enumerate() {
        let tokens = start..start + n_tokens;
        start = tokens.end;
        parts.push(CreditedPart { group: number(turn_idx), rewards: &turn.returns, tokens });
    }
    parts
}

/// The advantages of a response from those of its parts.
fn joined(parts: &[CreditedPart], mut advantages: impl Iterator<Item = Advantages>) -> Advantages {
    match parts {
        [_] => advantages.next().expect("every part has an advantage"),
        _ => Advantages::Tokens(
            advantages
                .zip(parts)
                .flat_map(|(advantages, part)| match advantages {
                    Advantages::Response(advantage) => vec![advantage; part.tokens.len()],
                    Advantages::Tokens(advantages) => advantages,
                })
                .collect(),
        ),
    }
}

#[cfg(test)]
mod tests;
