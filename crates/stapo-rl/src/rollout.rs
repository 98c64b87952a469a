//! Steps 1 to 3 of a training step: problems -> responses -> verdicts and rewards.

mod continuations;
mod foreign;
mod gathered;

pub use continuations::{Beginning, continuations};
pub use foreign::{ForeignRollouts, PolicyScorer};
use gathered::{gathered, unreadable};

use crate::error::{Error, Result};
use crate::learn::memory::SamplingMemory;
use crate::plan::config::{LongPrompts, Plan, Reward};
use crate::policy::loaded::LoadedModel;
use crate::ranks::wire::{Malformed, Packer, Unpacker};
use crate::ranks::{ExpectedLengths, Transport, deal};
use crate::reward::Judged;
use crate::run::meter::{Meter, Phase};
use crate::tasks::{Split, Task};
use rayon::prelude::*;
use stapo_core::random::Key;
use stapo_core::{Batch, Finish, Group, Problem, Rollout, Scored, Verdict};
use stapo_model::generate::{
    Completion, Engine, EngineSettings, Event, Filter, FinishReason, ForcedLengths, Request, SamplingRule,
};

/// How the group of each problem is sampled.
#[derive(Debug, Clone, Copy)]
struct GroupSampling {
    key: Key,
    n_samples: usize,
    temperature: f64,
    /// The phase for which tokens and responses are counted as they come.
    phase: Phase,
}

/// The result of a rollout phase.
#[derive(Debug)]
pub struct Sampled {
    pub batch: Batch,
    /// As another engine reported it, in the order of the batch's responses; empty where the policy sampled.
    pub sampler_logp: Vec<Vec<f64>>,
    /// Problems drawn, including those whose groups were replaced.
    pub n_drawn: u64,
    /// Responses and response tokens sampled, including those of replaced groups.
    pub n_responses: usize,
    pub n_sampled: usize,
}

/// What samples: a policy in its memory, asked by a task, as one of several ranks. Each problem is sampled and judged by one
/// rank, and all ranks get all responses. A sample is a function of its key, so who draws it changes no bit.
pub struct Sampler<'a> {
    pub model: &'a LoadedModel,
    pub memory: &'a mut SamplingMemory,
    pub task: &'a Task,
    pub plan: &'a Plan,
    pub ranks: &'a dyn Transport,
    pub meter: &'a Meter,
}

impl Sampler<'_> {
    /// Samples one rollout batch, with problems from `position` on. Problems are dealt out to the ranks by the lengths to
    /// expect, which learn from what is sampled.
    pub(crate) fn roll_out(
        &mut self,
        lengths: &mut ExpectedLengths,
        step: u64,
        position: u64,
    ) -> Result<Sampled> {
        let config = &self.plan.config;
        let wanted = config.rollout.problems_per_step;
        let mut kept: Vec<Group> = Vec::new();
        let batch = Batch { groups: Vec::new() };
        let mut out = Sampled { batch, sampler_logp: Vec::new(), n_drawn: 0, n_responses: 0, n_sampled: 0 };
        for draw in 0..=config.rollout.max_redraws as u64 {
            let missing = wanted - kept.len();
            let (problems, n_drawn) =
                draw_problems(self.model, self.task, self.plan, position + out.n_drawn, missing)?;
            out.n_drawn += n_drawn;
            let sampling = GroupSampling {
                key: Key::new(config.seed).with(step).with(draw),
                n_samples: config.rollout.group_size,
                temperature: config.rollout.temperature,
                phase: Phase::Rollout,
            };
            let sizes: Vec<f64> = problems.iter().map(|problem| lengths.of(&problem.id)).collect();
            let groups = self.sample_and_score(&problems, &sizes, sampling, step - 1)?;
            for group in &groups {
                let n_tokens = group.members.iter().map(|member| member.rollout.tokens.len());
                lengths.saw(&group.problem.id, n_tokens.clone());
                out.n_responses += group.members.len();
                out.n_sampled += n_tokens.sum::<usize>();
            }
            let is_last = draw == config.rollout.max_redraws as u64;
            kept.extend(groups.into_iter().filter(|group| is_last || !group.is_unanimous()));
            if kept.len() == wanted {
                break;
            }
        }
        out.batch.groups = kept;
        Ok(out)
    }

    /// The problems of this rank, when problems of these sizes are dealt out.
    fn own(&self, sizes: &[f64]) -> Vec<usize> {
        let owners = deal(sizes, self.ranks.world());
        (0..sizes.len()).filter(|&idx| owners[idx] == self.ranks.rank()).collect()
    }

    /// Samples responses to each problem, with verdicts and rewards. Problems are dealt out by their sizes.
    fn sample_and_score(
        &mut self,
        problems: &[Problem],
        sizes: &[f64],
        sampling: GroupSampling,
        policy_version: u64,
    ) -> Result<Vec<Group>> {
        let own = self.own(sizes);
        let rollouts = self.sample(problems, &own, sampling, policy_version)?;
        self.meter.enter(Phase::Grade);
        let texts = texts(self.model, &rollouts)?;
        let judged = self.task.judge_all(&pairs(problems, &rollouts, &texts))?;
        let score = |(idx, rollout): (usize, Rollout)| {
            let of_reward: Vec<&Judged> = judged.iter().map(|all| &all[idx]).collect();
            scored(self.plan, rollout, &of_reward)
        };
        let own: Vec<Scored> = rollouts.into_iter().enumerate().map(score).collect();
        let mut groups: Vec<Group> =
            problems.iter().map(|problem| Group { problem: problem.clone(), members: Vec::new() }).collect();
        let all = if self.ranks.world() == 1 { own } else { gathered(self.ranks, &own, problems.len())? };
        for member in all {
            groups[member.rollout.problem_idx].members.push(member);
        }
        Ok(groups)
    }

    /// Responses to the problems of the indices `own`, ordered by problem and sample.
    fn sample(
        &mut self,
        problems: &[Problem],
        own: &[usize],
        sampling: GroupSampling,
        policy_version: u64,
    ) -> Result<Vec<Rollout>> {
        let Self { model, plan, meter, .. } = *self;
        meter.enter(sampling.phase);
        meter.expect(sampling.phase, own.len() * sampling.n_samples);
        let limits = &plan.config.rollout;
        let settings = EngineSettings {
            seed: sampling.key.bits(),
            rule: SamplingRule::Draw { temperature: sampling.temperature, filter: Filter::NONE },
            kv_bytes: self.memory.kv_bytes,
            ..EngineSettings::default()
        };
        let mut engine = Engine::new(&model.policy, &mut self.memory.engine, settings)?;
        engine.stop_at(model.stop_texts(&plan.style)?);
        let prompting = model.prompting(&plan.style)?;
        let mut prompts = Vec::with_capacity(own.len());
        for &idx in own {
            let problem = &problems[idx];
            let prompt = prompting.tokens(problem)?;
            if prompt.len() > limits.max_prompt_tokens {
                return Err(Error::PromptTooLong {
                    problem_id: problem.id.clone(),
                    n_tokens: prompt.len(),
                    limit: limits.max_prompt_tokens,
                });
            }
            let request = Request {
                problem: idx as u64,
                prompt: prompt.clone(),
                n_samples: sampling.n_samples as u32,
                max_tokens: limits.max_response_tokens,
                stops: model.stops.clone(),
            };
            let refused = |source| Error::Request { problem_id: problem.id.clone(), source };
            let submitted = match limits.lengths {
                Some(lengths) => {
                    let lengths = ForcedLengths { mean: lengths.mean, sigma: lengths.sigma };
                    let lengths = lengths.draw(settings.seed, request.problem, request.n_samples);
                    engine.submit_with_lengths(request, &lengths)
                }
                None => engine.submit(request),
            };
            submitted.map_err(refused)?;
            prompts.push(prompt);
        }
        let responses = generate(&mut engine, meter)?;
        let rollout = |response: Completion| Rollout {
            problem_idx: own[response.ticket.0 as usize],
            sample_idx: response.sample as usize,
            prompt_tokens: prompts[response.ticket.0 as usize].clone(),
            tokens: response.tokens.iter().map(|t| t.token).collect(),
            logp: response.tokens.iter().map(|t| t.logp).collect(),
            entropy: response.tokens.iter().map(|t| t.entropy).collect(),
            finish: finish(response.finish),
            policy_version,
        };
        Ok(responses.into_iter().map(rollout).collect())
    }

    /// Share of right answers on held-out problems; `None` where the task holds none out.
    pub fn held_out_accuracy(&mut self, policy_version: u64) -> Result<Option<f64>> {
        let evaluation = &self.plan.config.evaluation;
        let problems = self.task.held_out(evaluation.problems);
        if problems.is_empty() {
            return Ok(None);
        }
        // All evaluations of a run sample with the same key, so that two evaluations differ by the policy alone.
        let sampling = GroupSampling {
            key: Key::new(self.plan.config.seed).with(u64::MAX),
            n_samples: evaluation.samples,
            temperature: self.plan.config.rollout.temperature,
            phase: Phase::Evaluate,
        };
        let own = self.own(&vec![1.0; problems.len()]);
        let rollouts = self.sample(&problems, &own, sampling, policy_version)?;
        let texts = texts(self.model, &rollouts)?;
        let judged = self.task.judge(&pairs(&problems, &rollouts, &texts))?;
        let right = judged.iter().filter(|judged| judged.verdict == Verdict::Right).count();
        let mut packer = Packer::default();
        packer.number(right);
        packer.number(judged.len());
        let mut sums = [0, 0];
        for (rank, bytes) in self.ranks.all_gather(&packer.0)?.iter().enumerate() {
            let mut read = Unpacker(bytes);
            for sum in &mut sums {
                *sum += read.number().map_err(|Malformed| unreadable(rank))?;
            }
        }
        Ok(Some(sums[0] as f64 / sums[1].max(1) as f64))
    }
}

/// Draws in search of one short problem, at most.
const MAX_DRAWS: usize = 100;

/// The next `n` training problems from `position` on, and how many were drawn. The prompts of a file were checked before
/// the run; those of a generated task are checked as they are drawn.
fn draw_problems(
    model: &LoadedModel,
    task: &Task,
    plan: &Plan,
    position: u64,
    n: usize,
) -> Result<(Vec<Problem>, u64)> {
    let rollout = &plan.config.rollout;
    let is_checked = rollout.long_prompts == LongPrompts::Refuse || task.n_problems(Split::Train).is_some();
    let prompting = model.prompting(&plan.style)?;
    let mut problems = Vec::with_capacity(n);
    let mut n_drawn = 0;
    while problems.len() < n {
        let problem = task.problem(plan.config.seed, Split::Train, position + n_drawn)?;
        n_drawn += 1;
        if is_checked || prompting.tokens(&problem)?.len() <= rollout.max_prompt_tokens {
            problems.push(problem);
        } else if n_drawn > (MAX_DRAWS * n) as u64 {
            return Err(Error::Misfit {
                key: "rollout.max_prompt_tokens",
                problem: format!("{n_drawn} problems gave {} with a prompt this short", problems.len()),
                remedy: "raise it, or ask for shorter problems",
            });
        }
    }
    Ok((problems, n_drawn))
}

fn texts(model: &LoadedModel, rollouts: &[Rollout]) -> Result<Vec<String>> {
    let tokenizer = model.tokenizer()?;
    rollouts.par_iter().map(|rollout| Ok(tokenizer.decode(&rollout.tokens)?)).collect()
}

/// Each response with its problem, as verifiers take them.
fn pairs<'a>(
    problems: &'a [Problem],
    rollouts: &[Rollout],
    texts: &'a [String],
) -> Vec<(&'a Problem, &'a str)> {
    let pairs = rollouts.iter().zip(texts);
    pairs.map(|(rollout, text)| (&problems[rollout.problem_idx], text.as_str())).collect()
}

/// A rollout with the rewards of its verdicts, one verdict for each reward of the plan. The shaping of long responses,
/// where the plan has one, is a part of the first reward.
fn scored(plan: &Plan, rollout: Rollout, judged: &[&Judged]) -> Scored {
    let mut rewards: Vec<f64> =
        plan.rewards.iter().zip(judged).map(|(reward, judged)| value(reward, judged)).collect();
    if let Some(shaping) = plan.config.rollout.overlong {
        rewards[0] += shaping.penalty(rollout.tokens.len());
    }
    let weighted = plan.rewards.iter().zip(&rewards).map(|(reward, value)| reward.weight * value);
    Scored { verdict: judged[0].verdict, reward: weighted.sum(), rewards, rollout }
}

/// The reward of an external verifier, or else the verdict's.
fn value(reward: &Reward, judged: &Judged) -> f64 {
    let by_verdict = if judged.verdict == Verdict::Right { reward.right } else { reward.wrong };
    judged.reward.unwrap_or(by_verdict)
}

/// Every response, ordered by problem and sample.
fn generate(engine: &mut Engine, meter: &Meter) -> Result<Vec<Completion>> {
    let mut responses = Vec::new();
    engine.run(|event| {
        match event {
            Event::Token { .. } => meter.add(0, 1),
            Event::Finished(response) => {
                meter.add(1, 0);
                responses.push(response);
            }
        }
        true
    })?;
    responses.sort_by_key(|response| (response.ticket, response.sample));
    Ok(responses)
}

/// The engine's reason for the end of a response, as records name the reason.
pub(crate) fn finish(reason: FinishReason) -> Finish {
    match reason {
        FinishReason::Stop(token) => Finish::Stop { token },
        FinishReason::LengthLimit => Finish::LengthLimit,
    }
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
