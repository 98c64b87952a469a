//! Responses sampled by the policy in training.

use super::gathered::{gathered, unreadable};
use super::{
    Asked, EndedEpisode, EpisodeEvent, EpisodeSet, Episodes, JudgedRollout, RecordedAnswers, RolloutContext,
    RolloutSource, Sampled, judge, scored,
};
use crate::error::{Error, Result};
use crate::learn::memory::{Drafter, SamplingMemory};
use crate::plan::config::{LongPrompts, Plan};
use crate::policy::loaded::LoadedModel;
use crate::ranks::wire::{Malformed, Packer, Unpacker};
use crate::ranks::{ExpectedLengths, Transport, deal};
use crate::run::meter::{Meter, Phase};
use crate::run::{Abandon, Counters};
use crate::tasks::{Environment, Rewards, Split, Task};
use stapo_core::random::Key;
use stapo_core::record::{self, EpisodeRecord, Record};
use stapo_core::{Batch, Episode, Finish, Group, Problem, Rollout, Scored, Verdict};
use stapo_model::generate::{
    Completion, Engine, EngineSettings, Event, Filter, FinishReason, ForcedLengths, Request, SampledToken,
    SamplingRule,
};

/// The policy in training as the source of its rollouts.
#[derive(Debug, Default)]
pub struct PolicySource {
    /// By which problems are dealt out to ranks.
    lengths: ExpectedLengths,
}

impl RolloutSource for PolicySource {
    fn next(&mut self, training: &mut RolloutContext) -> Result<Sampled> {
        let RolloutContext { model, task, plan, counters, ranks, recorded, meter, abandon, .. } = *training;
        let memory = training.memory.sample();
        let mut sampler = Sampler { model, memory, task, plan, counters, ranks, recorded, meter, abandon };
        sampler.roll_out(&mut self.lengths)
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
    /// Where the responses belong in the run.
    set: EpisodeSet,
    /// The rewards that judge a response.
    rewards: Rewards,
}

impl GroupSampling {
    /// Counts the steps of an engine that is done, if it sampled for training.
    fn count_steps(&self, engine: &Engine, meter: &Meter) {
        if self.phase == Phase::Rollout {
            meter.add_steps(engine.step_counts());
        }
    }
}

/// What samples: a policy in its memory, asked by a task, as one of several ranks. Each problem is sampled and judged by one
/// rank, and all ranks get all responses. A sample is a function of its key, so who draws it changes no bit.
pub struct Sampler<'a> {
    pub model: &'a LoadedModel,
    pub memory: &'a mut SamplingMemory,
    pub task: &'a Task,
    pub plan: &'a Plan,
    /// What the policy has made so far; `n_updates` is its version.
    pub counters: Counters,
    pub ranks: &'a dyn Transport,
    /// Answers of environments that the run has recorded.
    pub recorded: &'a RecordedAnswers,
    pub meter: &'a Meter,
    pub abandon: &'a Abandon,
}

impl Sampler<'_> {
    /// Samples the rollout batch of the next step. Problems are dealt out to the ranks by the lengths to expect, which learn
    /// from what is sampled.
    fn roll_out(&mut self, lengths: &mut ExpectedLengths) -> Result<Sampled> {
        let config = &self.plan.config;
        let (step, position) = (self.counters.step + 1, self.counters.position);
        let wanted = config.rollout.problems_per_step;
        let mut kept: Vec<Group> = Vec::new();
        let batch = Batch { groups: Vec::new() };
        let (sampler_logp, episodes) = (Vec::new(), Vec::new());
        let mut out = Sampled { batch, sampler_logp, n_drawn: 0, n_responses: 0, n_sampled: 0, episodes };
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
                set: EpisodeSet { step, is_evaluation: false, draw },
                rewards: Rewards::All,
            };
            let sizes: Vec<f64> = problems.iter().map(|problem| lengths.expected(&problem.id)).collect();
            let groups = self.sample_and_score(&problems, &sizes, sampling)?;
            for group in &groups {
                let n_tokens = group.members.iter().map(|member| member.rollout.n_sampled());
                lengths.saw(&group.problem.id, n_tokens.clone());
                out.n_responses += group.members.len();
                out.n_sampled += n_tokens.sum::<usize>();
                out.episodes.extend(group.members.iter().filter_map(|member| {
                    let Rollout { problem_idx, sample_idx, .. } = member.rollout;
                    let episode = Episode::clone(member.episode.as_ref()?);
                    Some(sampling.set.record(&group.problem, (problem_idx, sample_idx), episode))
                }));
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
        let judged = self.sample(problems, &mine, sampling)?.into_iter();
        let mine: Vec<Scored> = judged.map(|judged| scored(self.plan, judged)).collect();
        let mut groups: Vec<Group> =
            problems.iter().map(|problem| Group { problem: problem.clone(), members: Vec::new() }).collect();
        let all = if self.ranks.world() == 1 { mine } else { gathered(self.ranks, &mine, problems.len())? };
        for member in all {
            groups[member.rollout.problem_idx].members.push(member);
        }
        Ok(groups)
    }

    /// Judged responses to the problems of the indices `mine`, ordered by problem and sample. Fails on all ranks where one of
    /// them has abandoned its sampling.
    fn sample(
        &mut self,
        problems: &[Problem],
        mine: &[usize],
        sampling: GroupSampling,
    ) -> Result<Vec<JudgedRollout>> {
        self.meter.enter(sampling.phase);
        self.meter.expect(sampling.phase, mine.len() * sampling.n_samples);
        let environment = self.task.environment(sampling.rewards);
        let judged = if self.plan.config.environment.is_some() {
            self.play(&*environment, problems, mine, sampling)?
        } else {
            let rollouts = self.sample_turns(&*environment, problems, mine, sampling)?;
            if sampling.phase == Phase::Rollout {
                self.meter.enter(Phase::Grade);
            }
            self.judge(&*environment, problems, rollouts)?
        };
        self.abandon.agree(self.ranks)?;
        Ok(judged)
    }

    /// The judgements of rollouts in one turn; none if the sampling was abandoned.
    fn judge(
        &self,
        environment: &dyn Environment,
        problems: &[Problem],
        rollouts: Vec<Rollout>,
    ) -> Result<Vec<JudgedRollout>> {
        if self.abandon.signal().is_some() {
            return Ok(Vec::new());
        }
        let judged = judge(environment, self.model, problems, &rollouts.iter().collect::<Vec<_>>())?;
        let pairs = rollouts.into_iter().zip(judged);
        Ok(pairs.map(|(rollout, judged)| JudgedRollout { rollout, judged, episode: None }).collect())
    }

    /// The prompts of the problems `mine`; `None` if the sampling was abandoned.
    fn prompts<'p>(
        &self,
        environment: &dyn Environment,
        problems: &'p [Problem],
        mine: &[usize],
    ) -> Result<Option<Vec<Asked<'p>>>> {
        let prompting = self.model.prompting(&self.plan.style)?.with_tools(self.task.tool_schemas());
        let limit = self.plan.config.rollout.max_prompt_tokens;
        let mut asked = Vec::with_capacity(mine.len());
        for &problem_idx in mine {
            if self.abandon.signal().is_some() {
                return Ok(None);
            }
            let problem = &problems[problem_idx];
            let prompt = prompting.conversation(&problem.id, &environment.begin(problem))?;
            if prompt.len() > limit {
                let (problem_id, n_tokens) = (problem.id.clone(), prompt.len());
                return Err(Error::PromptTooLong { problem_id, n_tokens, limit });
            }
            asked.push(Asked { problem_idx, problem, prompt });
        }
        Ok(Some(asked))
    }

    /// An engine with a request for each problem.
    fn start(&mut self, asked: &[Asked], sampling: GroupSampling, max_tokens: usize) -> Result<Engine<'_>> {
        let Self { model, plan, .. } = *self;
        // Evaluations sample from the whole distribution.
        let is_training = sampling.phase == Phase::Rollout;
        let (filter, n_kept) = if is_training { plan.config.rollout.truncation() } else { (Filter::NONE, 0) };
        let settings = EngineSettings {
            seed: sampling.key.bits(),
            rule: SamplingRule::Draw { temperature: sampling.temperature, filter },
            n_kept,
            speculation: plan.config.rollout.speculate.into(),
            ..self.memory.settings()
        };
        let mut engine = Engine::new(&model.policy, &mut self.memory.engine, settings)?;
        if let Some(Drafter { policy, engine: memory, kv_bytes }) = &mut self.memory.drafter {
            engine.draft_with(policy, memory, *kv_bytes)?;
        }
        engine.stop_at(model.stop_texts(&plan.style)?);
        for Asked { problem_idx, problem, prompt } in asked {
            let request = Request {
                problem: *problem_idx as u64,
                prompt: prompt.clone(),
                n_samples: sampling.n_samples as u32,
                max_tokens,
                stops: model.stops.clone(),
            };
            let refused = |source| Error::Request { problem_id: problem.id.clone(), source };
            let submitted = match plan.config.rollout.lengths {
                Some(lengths) => {
                    let lengths = ForcedLengths { mean: lengths.mean, sigma: lengths.sigma };
                    let lengths = lengths.draw(settings.seed, request.problem, request.n_samples);
                    engine.submit_with_lengths(request, &lengths)
                }
                None => engine.submit(request),
            };
            submitted.map_err(refused)?;
        }
        Ok(engine)
    }

    /// Responses in one turn, ordered by problem and sample; fewer where the sampling was abandoned.
    fn sample_turns(
        &mut self,
        environment: &dyn Environment,
        problems: &[Problem],
        mine: &[usize],
        sampling: GroupSampling,
    ) -> Result<Vec<Rollout>> {
        let Self { plan, counters, meter, abandon, .. } = *self;
        let Some(asked) = self.prompts(environment, problems, mine)? else { return Ok(Vec::new()) };
        let mut engine = self.start(&asked, sampling, plan.config.rollout.max_response_tokens)?;
        let responses = generate(&mut engine, meter, abandon)?;
        sampling.count_steps(&engine, meter);
        let rollout = |response: Completion| {
            let Asked { problem_idx, prompt, .. } = &asked[response.ticket.0 as usize];
            let sampled: Vec<u32> = response.tokens.iter().map(|t| t.token).collect();
            let (tokens, is_sampled) = Rollout::one_turn(prompt, &sampled);
            Rollout {
                problem_idx: *problem_idx,
                sample_idx: response.sample as usize,
                tokens,
                is_sampled,
                logp: response.tokens.iter().map(|t| t.logp).collect(),
                entropy: response.tokens.iter().map(|t| t.entropy).collect(),
                kept: kept(response.tokens),
                finish: finish(response.finish),
                policy_version: Some(counters.n_updates),
            }
        };
        Ok(responses.into_iter().map(rollout).collect())
    }

    /// Episodes, ordered by problem and sample; fewer where the sampling was abandoned.
    fn play(
        &mut self,
        environment: &dyn Environment,
        problems: &[Problem],
        mine: &[usize],
        sampling: GroupSampling,
    ) -> Result<Vec<JudgedRollout>> {
        let Self { model, task, plan, counters, recorded, meter, abandon, .. } = *self;
        let Some(asked) = self.prompts(environment, problems, mine)? else { return Ok(Vec::new()) };
        let episodes = Episodes {
            environment,
            prompting: model.prompting(&plan.style)?.with_tools(task.tool_schemas()),
            tokenizer: model.tokenizer()?,
            stops: &model.stops,
            limits: plan.episode(),
            max_tokens: plan.config.rollout.max_response_tokens,
            set: sampling.set,
            recorded,
            n_rewards: if sampling.rewards == Rewards::All { plan.rewards.len() } else { 1 },
        };
        let mut engine = self.start(&asked, sampling, episodes.first_limit())?;
        let judged = |ended: EndedEpisode| JudgedRollout {
            rollout: Rollout {
                problem_idx: asked[ended.ticket.0 as usize].problem_idx,
                sample_idx: ended.sample as usize,
                tokens: ended.tokens,
                is_sampled: ended.is_sampled,
                logp: ended.logp,
                entropy: ended.entropy,
                kept: Vec::new(),
                finish: ended.finish,
                policy_version: Some(counters.n_updates),
            },
            judged: ended.judged,
            episode: Some(Box::new(ended.episode)),
        };
        let mut ended = Vec::new();
        episodes.play(&mut engine, &asked, &mut |event| {
            match event {
                EpisodeEvent::Token => meter.add(0, 1),
                EpisodeEvent::Waits => meter.enter(Phase::Environment),
                EpisodeEvent::GoesOn => meter.enter(sampling.phase),
                EpisodeEvent::Ended(episode) => {
                    meter.add(1, 0);
                    ended.push(*episode);
                }
            }
            Ok(abandon.signal().is_none())
        })?;
        sampling.count_steps(&engine, meter);
        ended.sort_by_key(|episode| (episode.ticket, episode.sample));
        Ok(ended.into_iter().map(judged).collect())
    }

    /// Share of right answers on held-out problems, `None` where the task holds none out; and what environments answered.
    pub fn held_out_accuracy(&mut self) -> Result<(Option<f64>, Vec<EpisodeRecord>)> {
        let evaluation = &self.plan.config.evaluation;
        let problems = self.task.held_out(evaluation.problems);
        if problems.is_empty() {
            return Ok((None, Vec::new()));
        }
        // All evaluations of a run sample with the same key, so that two evaluations differ by the policy alone.
        let sampling = GroupSampling {
            key: Key::new(self.plan.config.seed).with(u64::MAX),
            n_samples: evaluation.samples,
            temperature: self.plan.config.rollout.temperature,
            phase: Phase::Evaluate,
            set: EpisodeSet { step: self.counters.step, is_evaluation: true, draw: 0 },
            rewards: Rewards::First,
        };
        let mine = self.problems_of_this_rank(&vec![1.0; problems.len()]);
        let judged = self.sample(&problems, &mine, sampling)?;
        let right = judged.iter().filter(|judged| judged.judged[0].verdict == Verdict::Right).count();
        let mut packer = Packer::default();
        packer.number(right);
        packer.number(judged.len());
        let episodes = judged.into_iter().filter_map(|judged| {
            let Rollout { problem_idx, sample_idx, .. } = judged.rollout;
            let at = (problem_idx, sample_idx);
            Some(sampling.set.record(&problems[problem_idx], at, *judged.episode?))
        });
        packer.text(&episodes.map(|record| record.to_line()).collect::<String>());
        let mut sums = [0, 0];
        let mut episodes = Vec::new();
        for (rank, bytes) in self.ranks.all_gather(&packer.0)?.iter().enumerate() {
            let mut read = Unpacker(bytes);
            for sum in &mut sums {
                *sum += read.number().map_err(|Malformed| unreadable(rank))?;
            }
            let lines = read.text().map_err(|Malformed| unreadable(rank))?;
            episodes.extend(record::parse_lines(&lines).map_err(|_| unreadable(rank))?.records);
        }
        episodes.sort_by_key(|record: &EpisodeRecord| (record.problem_idx, record.sample_idx));
        Ok((Some(sums[0] as f64 / sums[1].max(1) as f64), episodes))
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
    let prompting = model.prompting(&plan.style)?.with_tools(task.tool_schemas());
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

/// The tokens that each sampled one was drawn from; nothing where these were not asked for.
fn kept(tokens: Vec<SampledToken>) -> Vec<Vec<u32>> {
    tokens.into_iter().map(|sampled| sampled.kept).filter(|kept| !kept.is_empty()).collect()
}

/// The engine's reason for the end of a response, as records name the reason.
pub(crate) fn finish(reason: FinishReason) -> Finish {
    match reason {
        FinishReason::Stop(token) => Finish::Stop { token },
        FinishReason::LengthLimit => Finish::LengthLimit,
    }
}
