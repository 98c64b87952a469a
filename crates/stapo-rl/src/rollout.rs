//! Steps 1 to 4 of a training step: problems -> responses -> verdicts and rewards -> advantages.

use crate::config::Plan;
use crate::error::{Error, Result};
use crate::loaded_model::LoadedModel;
use crate::task::{Judged, Split, Task};
use stapo_core::objective::{Advantages, ScoredResponse};
use stapo_core::random::Key;
use stapo_core::{Batch, Finish, Group, ObjectiveError, Problem, Rollout, Scored};
use stapo_model::generate::{
    Engine, EngineMemory, EngineSettings, Filter, FinishReason, Request, SamplingRule,
};

/// How the group of each problem is sampled.
#[derive(Debug, Clone, Copy)]
pub struct GroupSampling {
    pub key: Key,
    pub n_samples: usize,
    pub temperature: f64,
}

/// The result of a rollout phase.
#[derive(Debug)]
pub struct RolledOut {
    pub batch: Batch,
    /// In the order of the batch's responses.
    pub advantages: Vec<Advantages>,
    /// Problems drawn, including those whose groups were replaced.
    pub n_drawn: u64,
    /// Response tokens sampled, including those of replaced groups.
    pub n_sampled: usize,
}

/// Samples one rollout batch, with problems from `position` on.
pub fn roll_out(
    model: &LoadedModel,
    memory: &mut EngineMemory,
    task: &Task,
    plan: &Plan,
    step: u64,
    position: u64,
) -> Result<RolledOut> {
    let config = &plan.config;
    let wanted = config.rollout.problems_per_step;
    let mut kept: Vec<Group> = Vec::new();
    let batch = Batch { groups: Vec::new() };
    let mut out = RolledOut { batch, advantages: Vec::new(), n_drawn: 0, n_sampled: 0 };
    for draw in 0..=config.rollout.max_redraws as u64 {
        let missing = wanted - kept.len();
        let problems: Vec<Problem> = (0..missing as u64)
            .map(|i| Ok(task.problem(config.seed, Split::Train, position + out.n_drawn + i)?))
            .collect::<Result<_>>()?;
        out.n_drawn += missing as u64;
        let sampling = GroupSampling {
            key: Key::new(config.seed).with(step).with(draw),
            n_samples: config.rollout.group_size,
            temperature: config.rollout.temperature,
        };
        let groups = sample_and_score(model, memory, task, plan, &problems, sampling, step - 1)?;
        out.n_sampled +=
            groups.iter().flat_map(|group| &group.members).map(|m| m.rollout.tokens.len()).sum::<usize>();
        let is_last = draw == config.rollout.max_redraws as u64;
        kept.extend(groups.into_iter().filter(|group| is_last || !group.is_unanimous()));
        if kept.len() == wanted {
            break;
        }
    }
    out.batch.groups = kept;
    out.advantages =
        advantages(plan, &out.batch).map_err(|source| Error::Objective { step, microbatch: None, source })?;
    Ok(out)
}

/// The advantages of a whole rollout batch, in the order of its responses.
fn advantages(plan: &Plan, batch: &Batch) -> std::result::Result<Vec<Advantages>, ObjectiveError> {
    let members = batch.groups.iter().enumerate().flat_map(|(group_idx, group)| {
        group.members.iter().map(move |scored| (group_idx, [scored.reward], scored.rollout.tokens.len()))
    });
    let members: Vec<_> = members.collect();
    let responses: Vec<ScoredResponse> = members
        .iter()
        .map(|(group_idx, rewards, n_tokens)| ScoredResponse::new(*group_idx, rewards, *n_tokens))
        .collect();
    plan.objective.advantages(&responses, &[1.0])
}

/// Samples responses to each problem, with verdicts and rewards.
pub fn sample_and_score(
    model: &LoadedModel,
    memory: &mut EngineMemory,
    task: &Task,
    plan: &Plan,
    problems: &[Problem],
    sampling: GroupSampling,
    policy_version: u64,
) -> Result<Vec<Group>> {
    let rollouts = sample(model, memory, plan, problems, sampling, policy_version)?;
    let tokenizer = model.tokenizer()?;
    let texts = rollouts
        .iter()
        .map(|rollout| Ok(tokenizer.decode(&rollout.tokens)?))
        .collect::<Result<Vec<String>>>()?;
    let pairs: Vec<(&Problem, &str)> = rollouts
        .iter()
        .zip(&texts)
        .map(|(rollout, text)| (&problems[rollout.problem_idx], text.as_str()))
        .collect();
    let judged = task.judge(&pairs)?;
    let mut groups: Vec<Group> =
        problems.iter().map(|problem| Group { problem: problem.clone(), members: Vec::new() }).collect();
    for (rollout, judged) in rollouts.into_iter().zip(judged) {
        let reward = reward(plan, &judged, rollout.tokens.len());
        groups[rollout.problem_idx].members.push(Scored { rollout, verdict: judged.verdict, reward });
    }
    Ok(groups)
}

/// The reward of an external verifier, or else the verdict's, plus the shaping of long responses where the plan has
/// one.
fn reward(plan: &Plan, judged: &Judged, n_tokens: usize) -> f64 {
    let rewards = plan.config.reward;
    let by_verdict = if judged.verdict == stapo_core::Verdict::Right { rewards.right } else { rewards.wrong };
    judged.reward.unwrap_or(by_verdict)
        + plan.config.rollout.overlong.map_or(0.0, |shaping| shaping.penalty(n_tokens))
}

fn sample(
    model: &LoadedModel,
    memory: &mut EngineMemory,
    plan: &Plan,
    problems: &[Problem],
    sampling: GroupSampling,
    policy_version: u64,
) -> Result<Vec<Rollout>> {
    let limits = &plan.config.rollout;
    let settings = EngineSettings {
        seed: sampling.key.bits(),
        rule: SamplingRule::Draw { temperature: sampling.temperature, filter: Filter::NONE },
        kv_bytes: limits.kv_mib << 20,
        ..EngineSettings::default()
    };
    let mut engine = Engine::new(&model.policy, memory, settings)?;
    let mut prompts = Vec::with_capacity(problems.len());
    for (idx, problem) in problems.iter().enumerate() {
        let prompt = model.encode(&problem.prompt, limits.chat)?;
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
    let responses = engine.generate()?;
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
    memory: &mut EngineMemory,
    task: &Task,
    plan: &Plan,
    policy_version: u64,
) -> Result<f64> {
    let evaluation = &plan.config.evaluation;
    let problems = task.held_out(evaluation.problems);
    // All evaluations of a run sample with the same key, so that two evaluations differ by the policy alone.
    let sampling = GroupSampling {
        key: Key::new(plan.config.seed).with(u64::MAX),
        n_samples: evaluation.samples,
        temperature: plan.config.rollout.temperature,
    };
    let groups = sample_and_score(model, memory, task, plan, &problems, sampling, policy_version)?;
    Ok(accuracy(&Batch { groups }))
}

/// Share of responses judged right.
pub fn accuracy(batch: &Batch) -> f64 {
    let n = batch.responses().count().max(1) as f64;
    batch.responses().filter(|scored| scored.verdict == stapo_core::Verdict::Right).count() as f64 / n
}
