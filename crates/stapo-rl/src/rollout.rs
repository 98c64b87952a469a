//! Steps 1 to 3 of a training step: problems -> responses -> verdicts and rewards.

mod answers;
mod continuations;
mod conversations;
mod episodes;
mod foreign;
mod gathered;
mod judges;
mod reward_models;
mod sampler;
mod segments;
mod verifier_model;

pub use answers::{AnswerUse, EpisodeSet, RecordedAnswers};
pub use continuations::{Beginning, continuations};
pub use conversations::{ConversationSampling, converse};
pub use episodes::EndedEpisode;
pub(crate) use episodes::{Asked, EpisodeEvent, Episodes};
pub use judges::ModelJudge;
pub use reward_models::ModelScorer;
pub(crate) use sampler::finish;
pub use sampler::{PolicySource, Sampler};
pub use verifier_model::VerifierHome;

use crate::error::Result;
use crate::learn::memory::RunMemory;
use crate::plan::config::{Plan, Reward};
use crate::policy::loaded::LoadedModel;
use crate::ranks::Transport;
use crate::reward::Judged;
use crate::run::meter::Meter;
use crate::run::{Abandon, Counters};
use crate::tasks::{Environment, PolicyTurn, Reply, Task};
use foreign::ForeignRollouts;
use rayon::prelude::*;
use stapo_core::record::EpisodeRecord;
use stapo_core::reward_model::{ScoreMoments, rewards_of_scores};
use stapo_core::{Batch, Episode, JudgeOpinion, Problem, Rollout, Scored, Verdict};

/// Where the rollouts of a run come from.
pub trait RolloutSource {
    /// The rollout batch of the step after those that the policy in training has made. Every response names the version of
    /// the policy whose log-probs it has.
    fn next(&mut self, training: &mut RolloutContext) -> Result<Sampled>;
}

/// The source that a plan names: the policy in training, or a file.
pub(crate) fn open_source(plan: &Plan, model: &LoadedModel, task: &Task) -> Result<Box<dyn RolloutSource>> {
    match &plan.config.rollout.source {
        None => Ok(Box::<PolicySource>::default()),
        Some(file) => Ok(Box::new(ForeignRollouts::open(file, plan, model, task)?)),
    }
}

/// The policy in training, and what a source may use besides it.
pub struct RolloutContext<'a> {
    pub model: &'a LoadedModel,
    pub memory: &'a mut RunMemory,
    pub task: &'a Task,
    pub plan: &'a Plan,
    /// What the policy in training has made so far; `n_updates` is its version.
    pub counters: Counters,
    pub ranks: &'a dyn Transport,
    /// Answers of environments that the run has recorded.
    pub recorded: &'a RecordedAnswers,
    pub meter: &'a Meter,
    pub abandon: &'a Abandon,
}

/// The result of a rollout phase.
#[derive(Debug)]
pub struct Sampled {
    pub batch: Batch,
    /// As another engine reported it, in the order of the batch's responses; empty if the policy sampled.
    pub sampler_logp: Vec<Vec<f64>>,
    /// Problems drawn, including those whose groups were replaced.
    pub n_drawn: u64,
    /// Responses and response tokens sampled, including those of replaced groups.
    pub n_responses: usize,
    pub n_sampled: usize,
    /// What environments of several turns answered, including episodes of replaced groups.
    pub episodes: Vec<EpisodeRecord>,
}

/// What an environment says of the responses to problems: one judgement per reward and response. The judging is done at
/// once, so that verifiers work side by side.
fn judge(
    environment: &dyn Environment,
    model: &LoadedModel,
    problems: &[Problem],
    rollouts: &[&Rollout],
) -> Result<Vec<Vec<Judged>>> {
    let tokenizer = model.tokenizer()?;
    let texts: Vec<String> = rollouts
        .par_iter()
        .map(|rollout| Ok(tokenizer.decode(rollout.response())?))
        .collect::<Result<_>>()?;
    let answered = rollouts.iter().zip(&texts);
    let turn = |(rollout, text): (&&Rollout, _)| PolicyTurn {
        episode: 0,
        problem: &problems[rollout.problem_idx],
        texts: std::slice::from_ref(text),
    };
    let turns: Vec<PolicyTurn> = answered.map(turn).collect();
    let answers = environment.answer(&turns)?;
    assert_eq!(answers.len(), turns.len(), "an environment answers every turn");
    let judged = answers.into_iter().map(|answer| match answer.reply {
        Reply::Done(judged) => judged,
        Reply::Continue(_) => unreachable!("a plan with an environment of several turns samples episodes"),
    });
    Ok(judged.collect())
}

/// A response, one judgement per reward, and what an environment of several turns answered.
pub(crate) struct JudgedRollout {
    pub rollout: Rollout,
    pub judged: Vec<Judged>,
    pub episode: Option<Box<Episode>>,
}

/// A rollout with the rewards of its verdicts, one verdict for each reward of the plan. The shaping of long responses,
/// where the plan has one, is a part of the first reward; so are the rewards of turns.
fn scored(plan: &Plan, judged: JudgedRollout) -> Scored {
    let JudgedRollout { rollout, judged, mut episode } = judged;
    let mut rewards: Vec<f64> =
        plan.rewards.iter().zip(&judged).map(|(reward, judged)| value(reward, judged)).collect();
    if let Some(shaping) = plan.config.rollout.overlong {
        rewards[0] += shaping.penalty(rollout.n_sampled());
    }
    if let Some(episode) = &mut episode {
        rewards = episode.set_returns(&rewards, plan.episode().discount);
    }
    let program = judged[0].program.clone();
    let judge = opinion(&judged);
    let reward = weighted_sum(plan, &rewards);
    Scored { verdict: judged[0].verdict, reward, rewards, program, judge, episode, rollout }
}

/// Turns the scores of the plan's reward model into rewards, which read the scores of all groups. `moments` are those of all
/// earlier steps.
pub fn reward_scores(plan: &Plan, batch: &mut Batch, moments: &mut ScoreMoments) {
    let Some((reward_idx, spec)) = plan.scored_reward() else { return };
    let score = |scored: &Scored| scored.judge.as_ref().and_then(|opinion| opinion.score);
    let scores: Vec<Vec<Option<f64>>> =
        batch.groups.iter().map(|group| group.members.iter().map(score).collect()).collect();
    let rewards = rewards_of_scores(&scores, spec.normalise, spec.clip, moments);
    let members = batch.groups.iter_mut().flat_map(|group| &mut group.members);
    for (member, reward) in members.zip(rewards.into_iter().flatten()) {
        let shaping = plan.config.rollout.overlong.filter(|_| reward_idx == 0);
        let penalty = shaping.map_or(0.0, |shaping| shaping.penalty(member.rollout.n_sampled()));
        member.rewards[reward_idx] = reward + penalty;
        member.reward = weighted_sum(plan, &member.rewards);
    }
}

fn weighted_sum(plan: &Plan, rewards: &[f64]) -> f64 {
    plan.rewards.iter().zip(rewards).map(|(reward, value)| reward.weight * value).sum()
}

/// The judgement of the judge among the verifiers. If another verifier decides accuracy, its verdict is the rule's.
fn opinion(judged: &[Judged]) -> Option<Box<JudgeOpinion>> {
    let mut opinion = judged.iter().find_map(|judged| judged.judge.clone())?;
    if judged[0].judge.is_none() {
        opinion.rule = judged[0].verdict;
    }
    Some(opinion)
}

/// The reward of an external verifier, or else the verdict's.
fn value(reward: &Reward, judged: &Judged) -> f64 {
    let by_verdict = if judged.verdict == Verdict::Right { reward.right } else { reward.wrong };
    judged.reward.unwrap_or(by_verdict)
}

/// Share of responses judged right.
pub fn accuracy(batch: &Batch) -> f64 {
    share_right(batch.responses().map(|scored| scored.verdict))
}

fn share_right(verdicts: impl Iterator<Item = Verdict>) -> f64 {
    let mut n_all = 0_usize;
    let n_right = verdicts.inspect(|_| n_all += 1).filter(|verdict| *verdict == Verdict::Right).count();
    n_right as f64 / n_all.max(1) as f64
}

#[cfg(test)]
mod tests;
