//! Steps 1 to 3 of a training step: problems -> responses -> verdicts and rewards.

mod continuations;
mod foreign;

pub use continuations::{Beginning, continuations};
pub use foreign::ForeignRollouts;

use crate::config::{LongPrompts, Plan, Reward};
use crate::error::{Error, Result};
use crate::loaded_model::LoadedModel;
use crate::meter::{Meter, Phase};
use crate::run_memory::SamplingMemory;
use crate::task::{Judged, Split, Task};
use stapo_core::random::Key;
use stapo_core::{Batch, Finish, Group, Problem, Rollout, Scored, Verdict};
use stapo_model::generate::{
    Completion, Engine, EngineSettings, Event, Filter, FinishReason, ForcedLengths, Request, SamplingRule,
};

/// How the group of each problem is sampled.
#[derive(Debug, Clone, Copy)]
pub struct GroupSampling<'a> {
    pub key: Key,
    pub n_samples: usize,
    pub temperature: f64,
    /// Counts tokens and responses as they come, for this phase.
    pub meter: &'a Meter,
    pub phase: Phase,
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

/// Samples one rollout batch, with problems from `position` on.
pub fn roll_out(
    model: &LoadedModel,
    memory: &mut SamplingMemory,
    task: &Task,
    plan: &Plan,
    step: u64,
    position: u64,
    meter: &Meter,
) -> Result<Sampled> {
    let config = &plan.config;
    let wanted = config.rollout.problems_per_step;
    let mut kept: Vec<Group> = Vec::new();
    let batch = Batch { groups: Vec::new() };
    let mut out = Sampled { batch, sampler_logp: Vec::new(), n_drawn: 0, n_responses: 0, n_sampled: 0 };
    for draw in 0..=config.rollout.max_redraws as u64 {
        let missing = wanted - kept.len();
        let (problems, n_drawn) = draw_problems(model, task, plan, position + out.n_drawn, missing)?;
        out.n_drawn += n_drawn;
        let sampling = GroupSampling {
            key: Key::new(config.seed).with(step).with(draw),
            n_samples: config.rollout.group_size,
            temperature: config.rollout.temperature,
            meter,
            phase: Phase::Rollout,
        };
        let groups = sample_and_score(model, memory, task, plan, &problems, sampling, step - 1)?;
        out.n_responses += groups.iter().map(|group| group.members.len()).sum::<usize>();
        out.n_sampled +=
            groups.iter().flat_map(|group| &group.members).map(|m| m.rollout.tokens.len()).sum::<usize>();
        let is_last = draw == config.rollout.max_redraws as u64;
        kept.extend(groups.into_iter().filter(|group| is_last || !group.is_unanimous()));
        if kept.len() == wanted {
            break;
        }
    }
    out.batch.groups = kept;
    Ok(out)
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

/// Samples responses to each problem, with verdicts and rewards.
fn sample_and_score(
    model: &LoadedModel,
    memory: &mut SamplingMemory,
    task: &Task,
    plan: &Plan,
    problems: &[Problem],
    sampling: GroupSampling,
    policy_version: u64,
) -> Result<Vec<Group>> {
    let rollouts = sample(model, memory, plan, problems, sampling, policy_version)?;
    sampling.meter.enter(Phase::Grade);
    let texts = texts(model, &rollouts)?;
    let judged = task.judge_all(&pairs(problems, &rollouts, &texts))?;
    let mut groups: Vec<Group> =
        problems.iter().map(|problem| Group { problem: problem.clone(), members: Vec::new() }).collect();
    for (idx, rollout) in rollouts.into_iter().enumerate() {
        let of_reward: Vec<&Judged> = judged.iter().map(|all| &all[idx]).collect();
        groups[rollout.problem_idx].members.push(scored(plan, rollout, &of_reward));
    }
    Ok(groups)
}

fn texts(model: &LoadedModel, rollouts: &[Rollout]) -> Result<Vec<String>> {
    let tokenizer = model.tokenizer()?;
    rollouts.iter().map(|rollout| Ok(tokenizer.decode(&rollout.tokens)?)).collect()
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

fn sample(
    model: &LoadedModel,
    memory: &mut SamplingMemory,
    plan: &Plan,
    problems: &[Problem],
    sampling: GroupSampling,
    policy_version: u64,
) -> Result<Vec<Rollout>> {
    sampling.meter.enter(sampling.phase);
    sampling.meter.expect(sampling.phase, problems.len() * sampling.n_samples);
    let limits = &plan.config.rollout;
    let settings = EngineSettings {
        seed: sampling.key.bits(),
        rule: SamplingRule::Draw { temperature: sampling.temperature, filter: Filter::NONE },
        kv_bytes: memory.kv_bytes,
        lengths: limits.lengths.map(|lengths| ForcedLengths { mean: lengths.mean, sigma: lengths.sigma }),
        ..EngineSettings::default()
    };
    let mut engine = Engine::new(&model.policy, &mut memory.engine, settings)?;
    engine.stop_at(model.stop_texts(&plan.style)?);
    let prompting = model.prompting(&plan.style)?;
    let mut prompts = Vec::with_capacity(problems.len());
    for (idx, problem) in problems.iter().enumerate() {
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
        engine.submit(request).map_err(|source| Error::Request { problem_id: problem.id.clone(), source })?;
        prompts.push(prompt);
    }
    let responses = generate(&mut engine, sampling.meter)?;
    Ok(responses
        .into_iter()
        .map(|response| {
            let problem_idx = response.ticket.0 as usize;
            Rollout {
                problem_idx,
                sample_idx: response.sample as usize,
                prompt_tokens: prompts[problem_idx].clone(),
                tokens: response.tokens.iter().map(|t| t.token).collect(),
                logp: response.tokens.iter().map(|t| t.logp).collect(),
                entropy: response.tokens.iter().map(|t| t.entropy).collect(),
                finish: finish(response.finish),
                policy_version,
            }
        })
        .collect())
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

/// Share of right answers on held-out problems.
pub fn held_out_accuracy(
    model: &LoadedModel,
    memory: &mut SamplingMemory,
    task: &Task,
    plan: &Plan,
    policy_version: u64,
    meter: &Meter,
) -> Result<f64> {
    let evaluation = &plan.config.evaluation;
    let problems = task.held_out(evaluation.problems);
    // All evaluations of a run sample with the same key, so that two evaluations differ by the policy alone.
    let sampling = GroupSampling {
        key: Key::new(plan.config.seed).with(u64::MAX),
        n_samples: evaluation.samples,
        temperature: plan.config.rollout.temperature,
        meter,
        phase: Phase::Evaluate,
    };
    let rollouts = sample(model, memory, plan, &problems, sampling, policy_version)?;
    let texts = texts(model, &rollouts)?;
    let judged = task.judge(&pairs(&problems, &rollouts, &texts))?;
    Ok(share_right(judged.iter().map(|judged| judged.verdict)))
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
