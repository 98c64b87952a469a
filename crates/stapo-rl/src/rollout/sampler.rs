//! Responses sampled by the policy in training.

use super::gathered::{gathered, unreadable};
use super::{RolloutContext, RolloutSource, Sampled, judge, scored};
use crate::error::{Error, Result};
use crate::learn::memory::SamplingMemory;
use crate::plan::config::{LongPrompts, Plan};
use crate::policy::loaded::LoadedModel;
use crate::ranks::wire::{Malformed, Packer, Unpacker};
use crate::ranks::{ExpectedLengths, Transport, deal};
use crate::reward::Judged;
use crate::run::Abandon;
use crate::run::meter::{Meter, Phase};
use crate::tasks::{Environment, Rewards, Split, Task};
use stapo_core::random::Key;
use stapo_core::{Batch, Finish, Group, Problem, Rollout, Scored, Verdict};
use stapo_model::generate::{
    Completion, Engine, EngineSettings, Event, Filter, FinishReason, ForcedLengths, Request, SamplingRule,
};

/// The policy in training as the source of its rollouts.
#[derive(Debug, Default)]
pub struct PolicySource {
    /// By which problems are dealt out to ranks.
    lengths: ExpectedLengths,
}

impl RolloutSource for PolicySource {
    fn next(&mut self, training: &mut RolloutContext) -> Result<Sampled> {
        let RolloutContext { model, task, plan, counters, ranks, meter, abandon, .. } = *training;
        let policy_version = counters.n_updates;
        let memory = training.memory.sample();
        let mut sampler = Sampler { model, memory, task, plan, policy_version, ranks, meter, abandon };
        sampler.roll_out(&mut self.lengths, counters.step + 1, counters.position)
    }
}

/// How the group of each problem is sampled.
#[derive(Debug, Clone, Copy)]
struct GroupSampling {
    key: Key,
    n_samples: usize,
    temperature: f64,
    /// The phase for which tokens and responses are counted as they come.
    phase: Phase,
}

/// What samples: a policy in its memory, asked by a task, as one of several ranks. Each problem is sampled and judged by one
/// rank, and all ranks get all responses. A sample is a function of its key, so who draws it changes no bit.
pub struct Sampler<'a> {
    pub model: &'a LoadedModel,
    pub memory: &'a mut SamplingMemory,
    pub task: &'a Task,
    pub plan: &'a Plan,
    /// Optimizer steps that the policy has made.
    pub policy_version: u64,
    pub ranks: &'a dyn Transport,
    pub meter: &'a Meter,
    pub abandon: &'a Abandon,
}

impl Sampler<'_> {
    /// Samples one rollout batch, with problems from `position` on. Problems are dealt out to the ranks by the lengths to
    /// expect, which learn from what is sampled.
    fn roll_out(&mut self, lengths: &mut ExpectedLengths, step: u64, position: u64) -> Result<Sampled> {
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
            let sizes: Vec<f64> = problems.iter().map(|problem| lengths.expected(&problem.id)).collect();
            let groups = self.sample_and_score(&problems, &sizes, sampling)?;
            for group in &groups {
                let n_tokens = group.members.iter().map(|member| member.rollout.n_sampled());
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

    /// The indices of the problems of this rank, when problems of these sizes are dealt out.
    fn problems_of_this_rank(&self, sizes: &[f64]) -> Vec<usize> {
        let owners = deal(sizes, self.ranks.world());
        (0..sizes.len()).filter(|&idx| owners[idx] == self.ranks.rank()).collect()
    }

    /// Samples responses to each problem, with verdicts and rewards. Problems are dealt out by their sizes.
    fn sample_and_score(
        &mut self,
        problems: &[Problem],
        sizes: &[f64],
        sampling: GroupSampling,
    ) -> Result<Vec<Group>> {
        let mine = self.problems_of_this_rank(sizes);
        let environment = self.task.environment(Rewards::All);
        let rollouts = self.sample(&*environment, problems, &mine, sampling)?;
        self.meter.enter(Phase::Grade);
        let judged = self.judge(&*environment, problems, &rollouts)?;
        let judged = rollouts.into_iter().zip(judged);
        let mine: Vec<Scored> = judged.map(|(rollout, judged)| scored(self.plan, rollout, &judged)).collect();
        let mut groups: Vec<Group> =
            problems.iter().map(|problem| Group { problem: problem.clone(), members: Vec::new() }).collect();
        let all = if self.ranks.world() == 1 { mine } else { gathered(self.ranks, &mine, problems.len())? };
        for member in all {
            groups[member.rollout.problem_idx].members.push(member);
        }
        Ok(groups)
    }

    /// The judgements of all rollouts. Fails on all ranks where one of them has abandoned its sampling.
    fn judge(
        &self,
        environment: &dyn Environment,
        problems: &[Problem],
        rollouts: &[Rollout],
    ) -> Result<Vec<Vec<Judged>>> {
        let judged = match self.abandon.signal() {
            Some(_) => Vec::new(),
            None => judge(environment, self.model, problems, &rollouts.iter().collect::<Vec<_>>())?,
        };
        self.abandon.agree(self.ranks)?;
        Ok(judged)
    }

    /// Responses to the problems of the indices `mine`, ordered by problem and sample; fewer where the sampling was abandoned.
    fn sample(
        &mut self,
        environment: &dyn Environment,
        problems: &[Problem],
        mine: &[usize],
        sampling: GroupSampling,
    ) -> Result<Vec<Rollout>> {
        let Self { model, plan, policy_version, meter, abandon, .. } = *self;
        meter.enter(sampling.phase);
        meter.expect(sampling.phase, mine.len() * sampling.n_samples);
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
        let mut prompts = Vec::with_capacity(mine.len());
        for &idx in mine {
            if abandon.signal().is_some() {
                return Ok(Vec::new());
            }
            let problem = &problems[idx];
            let prompt = prompting.conversation(&problem.id, &environment.begin(problem))?;
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
        let responses = generate(&mut engine, meter, abandon)?;
        let rollout = |response: Completion| {
            let request_idx = response.ticket.0 as usize;
            let sampled: Vec<u32> = response.tokens.iter().map(|t| t.token).collect();
            let (tokens, is_sampled) = Rollout::one_turn(&prompts[request_idx], &sampled);
            Rollout {
                problem_idx: mine[request_idx],
                sample_idx: response.sample as usize,
                tokens,
                is_sampled,
                logp: response.tokens.iter().map(|t| t.logp).collect(),
                entropy: response.tokens.iter().map(|t| t.entropy).collect(),
                finish: finish(response.finish),
                policy_version: Some(policy_version),
            }
        };
        Ok(responses.into_iter().map(rollout).collect())
    }

    /// Share of right answers on held-out problems; `None` where the task holds none out.
    pub fn held_out_accuracy(&mut self) -> Result<Option<f64>> {
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
        let mine = self.problems_of_this_rank(&vec![1.0; problems.len()]);
        let environment = self.task.environment(Rewards::First);
        let rollouts = self.sample(&*environment, &problems, &mine, sampling)?;
        let judged = self.judge(&*environment, &problems, &rollouts)?;
        let right = judged.iter().filter(|judged| judged[0].verdict == Verdict::Right).count();
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
    let environment = task.environment(Rewards::All);
    let mut problems = Vec::with_capacity(n);
    let mut n_drawn = 0;
    while problems.len() < n {
        let problem = task.problem(plan.config.seed, Split::Train, position + n_drawn)?;
        n_drawn += 1;
        let n_tokens =
            || Ok::<_, Error>(prompting.conversation(&problem.id, &environment.begin(&problem))?.len());
        if is_checked || n_tokens()? <= rollout.max_prompt_tokens {
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

/// Every response, ordered by problem and sample; those that are finished where the sampling is abandoned.
pub(super) fn generate(engine: &mut Engine, meter: &Meter, abandon: &Abandon) -> Result<Vec<Completion>> {
    let mut responses = Vec::new();
    engine.run(|event| {
        match event {
            Event::Token { .. } => meter.add(0, 1),
            Event::Finished(response) => {
                meter.add(1, 0);
                responses.push(response);
            }
        }
        abandon.signal().is_none()
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
