//! Evaluation: questions -> samples -> verdicts -> a table with intervals.

mod agreement;
mod benchmark;
mod comparison;
mod decoding;
mod during;
mod folder;
mod table;
mod together;

pub use agreement::{Agreement, SecondVerdict, is_disputed, second_verdict};
pub use benchmark::{Benchmark, KNOWN, OTHER_SAMPLES, QuestionStyle, SIX};
pub use comparison::{Compared, compare, compare_folders};
pub use decoding::Decoding;
pub use during::{Evaluated, expanded, open_benchmarks};
pub(crate) use during::{changed_questions, evaluate_benchmarks};
pub use folder::{EvalFolder, EvalPlan, InterruptedEval};
pub use table::{EvalRow, average, rows};

use crate::error::{Error, Result};
use crate::plan::config::{EpisodeConfig, PromptStyle};
use crate::policy::loaded::LoadedModel;
use crate::reward::Judged;
use crate::rollout::{Asked, EndedEpisode, EpisodeEvent, EpisodeSet, Episodes, RecordedAnswers, finish};
use crate::tasks::Rewards;
use crate::tasks::prompting::Prompting;
use crate::tasks::split::content_hash;
use stapo_core::Finish;
use stapo_core::Problem;
use stapo_core::Verdict;
use stapo_core::random::Key;
use stapo_core::record::{EvalRecord, Extra, SCHEMA};
use stapo_model::generate::{Completion, Engine, EngineMemory, EngineSettings, Event, Request, RequestError};
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// How samples are taken.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EvalSampling<'a> {
    pub seed: u64,
    /// Longest response; the model's own limit may end a response sooner.
    pub max_tokens: usize,
    pub style: &'a PromptStyle,
    pub kv_bytes: usize,
    /// The most rows of a step.
    pub step_rows: usize,
    /// This rank and the number of ranks: of the questions that are left, in order, each goes to the next rank.
    pub share: (usize, usize),
    /// Training steps that the policy has made; absent for a model that is not from a run.
    pub step: Option<u64>,
    /// The limits of episodes, for benchmarks with an environment.
    pub episode: &'a EpisodeConfig,
}

/// The samples that an interrupted evaluation has already.
pub type Done = HashSet<(String, String, String, usize)>;

/// The benchmark, decoding, question and sample number of a record.
pub fn sample_key(record: &EvalRecord) -> (String, String, String, usize) {
    (record.benchmark.clone(), record.decoding.clone(), record.problem_id.clone(), record.sample_idx)
}

/// What happens in an evaluation.
#[derive(Debug)]
pub enum EvalEvent {
    /// The prompt of a question is ready.
    Asked,
    /// A token was sampled.
    Token,
    /// Nothing can be sampled before an environment has answered. Comes again while that is so.
    Waits,
    /// A sample is finished and judged.
    Finished(Box<EvalRecord>),
}

/// The questions of an evaluation, and how they are asked.
#[derive(Clone, Copy)]
pub struct Evaluation<'a> {
    pub model: &'a LoadedModel,
    pub benchmarks: &'a [Benchmark],
    pub decodings: &'a [Decoding],
    pub sampling: EvalSampling<'a>,
    /// Samples that are there already; the same on all ranks.
    pub done: &'a Done,
}

impl Evaluation<'_> {
    /// Samples every question of every benchmark with every decoding, the questions of a decoding in one batch, and shows
    /// `take` of every token and every judged sample; `false` from `take` ends the evaluation. A sample depends
    /// on the seed, the decoding, the benchmark, the question and its own number alone, so an interrupted and resumed
    /// evaluation has the samples of an uninterrupted one.
    pub fn run(
        &self,
        memory: &mut EngineMemory,
        mut take: impl FnMut(EvalEvent) -> Result<bool>,
    ) -> Result<()> {
        let Evaluation { model, benchmarks, decodings, sampling, done } = *self;
        for decoding in decodings {
            // Texts that end a response are the engine's, so benchmarks with other texts are sampled apart; and an environment
            // is a benchmark's.
            for benchmarks in benchmarks.chunk_by(|a, b| a.stops() == b.stops() && !a.has_episodes()) {
                let work = Work { model, benchmarks, decoding, sampling, done };
                if !work.run(memory, &mut take)? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// The evaluation of the questions of benchmarks that end responses at the same texts, under one decoding.
struct Work<'a> {
    model: &'a LoadedModel,
    benchmarks: &'a [Benchmark],
    decoding: &'a Decoding,
    sampling: EvalSampling<'a>,
    done: &'a Done,
}

/// A finished response that is not judged yet.
struct Waiting<'a> {
    benchmark: &'a Benchmark,
    problem: &'a Problem,
    response: Completion,
    since: Instant,
}

/// The longest time that a response waits for others that are judged with it. An interruption loses those that wait.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

fn is_due(waiting: &[Waiting]) -> bool {
    waiting.first().is_some_and(|first| {
        waiting.len() >= first.benchmark.n_judged_together() || first.since.elapsed() > LONGEST_WAIT
    })
}

impl Work<'_> {
    fn run(
        &self,
        memory: &mut EngineMemory,
        take: &mut impl FnMut(EvalEvent) -> Result<bool>,
    ) -> Result<bool> {
        let settings = EngineSettings {
            seed: Key::new(self.sampling.seed).with(content_hash(&self.decoding.name)).bits(),
            rule: self.decoding.rule,
            kv_bytes: self.sampling.kv_bytes,
            max_rows: self.sampling.step_rows,
            ..EngineSettings::default()
        };
        let stops = self.benchmarks.first().map_or(&[][..], Benchmark::stops);
        let mut style = self.sampling.style.clone();
        style.stop.extend(stops.iter().map(ToString::to_string));
        let mut engine = Engine::new(&self.model.policy, memory, settings)?;
        engine.stop_at(self.model.stop_texts(&style)?);
        let prompting = self.prompting()?;
        let mut asked = Vec::new();
        let (rank, world) = self.sampling.share;
        let questions =
            self.benchmarks.iter().flat_map(|b| b.problems.iter().map(move |problem| (b, problem)));
        let left = questions.filter(|(benchmark, problem)| !self.is_done(benchmark, problem));
        for (benchmark, problem) in left.skip(rank).step_by(world) {
            let request = self.request(&prompting, benchmark, problem)?;
            let prompt = request.prompt.clone();
            match engine.submit(request) {
                Ok(_) => {
                    asked.push((benchmark, Asked { problem_idx: asked.len(), problem, prompt }));
                    if !take(EvalEvent::Asked)? {
                        return Ok(false);
                    }
                }
                Err(error @ (RequestError::PromptTooLong { .. } | RequestError::EmptyPrompt)) => {
                    if !self.refuse(benchmark, problem, &error, take)? {
                        return Ok(false);
                    }
                }
                Err(source) => return Err(Error::Request { problem_id: problem.id.clone(), source }),
            }
        }
        match self.benchmarks.first().filter(|benchmark| benchmark.has_episodes()) {
            Some(benchmark) => {
                let asked: Vec<Asked> = asked.into_iter().map(|(_, asked)| asked).collect();
                self.play(&mut engine, benchmark, &asked, take)
            }
            None => self.ask(&mut engine, &asked, take),
        }
    }

    /// Samples responses in one turn.
    fn ask(
        &self,
        engine: &mut Engine,
        asked: &[(&Benchmark, Asked)],
        take: &mut impl FnMut(EvalEvent) -> Result<bool>,
    ) -> Result<bool> {
        let mut outcome = Ok(true);
        let mut waiting: Vec<Waiting> = Vec::new();
        engine.run(|event| {
            // Samples that finish in the step of a failed or last one are not written: that line may be torn.
            match (event, &outcome) {
                (Event::Finished(response), Ok(true)) => {
                    let (benchmark, Asked { problem, .. }) = &asked[response.ticket.0 as usize];
                    if !self.has(benchmark, problem, response.sample as usize) {
                        waiting.push(Waiting { benchmark, problem, response, since: Instant::now() });
                    }
                }
                (Event::Token { .. }, Ok(true)) => outcome = take(EvalEvent::Token),
                _ => {}
            }
            if is_due(&waiting) && matches!(outcome, Ok(true)) {
                outcome = self.judge(&std::mem::take(&mut waiting), take);
            }
            matches!(outcome, Ok(true))
        })?;
        if outcome? { self.judge(&waiting, take) } else { Ok(false) }
    }

    /// Turns questions into tokens, with the tools of the benchmarks.
    fn prompting(&self) -> Result<Prompting<'_>> {
        let tools = self.benchmarks.first().and_then(|benchmark| benchmark.task().tool_schemas());
        Ok(self.model.prompting(self.sampling.style)?.with_tools(tools))
    }

    /// Samples episodes of a benchmark, which its environment answers and judges.
    fn play(
        &self,
        engine: &mut Engine,
        benchmark: &Benchmark,
        asked: &[Asked],
        take: &mut impl FnMut(EvalEvent) -> Result<bool>,
    ) -> Result<bool> {
        let environment = benchmark.task().environment(Rewards::All);
        let episodes = Episodes {
            environment: &*environment,
            prompting: self.prompting()?,
            tokenizer: self.model.tokenizer()?,
            stops: &self.model.stops,
            limits: self.sampling.episode.clone(),
            max_tokens: self.sampling.max_tokens,
            set: EpisodeSet { step: self.sampling.step.unwrap_or(0), is_evaluation: true, draw: 0 },
            recorded: &RecordedAnswers::default(),
            n_rewards: benchmark.task().n_verifiers(),
        };
        let mut goes_on = true;
        episodes.play(engine, asked, &mut |event| {
            match event {
                EpisodeEvent::Token => goes_on = take(EvalEvent::Token)?,
                EpisodeEvent::Ended(ended) => {
                    let problem = asked[ended.ticket.0 as usize].problem;
                    if !self.has(benchmark, problem, ended.sample as usize) {
                        let record = self.played(benchmark, problem, *ended)?;
                        goes_on = take(EvalEvent::Finished(Box::new(record)))?;
                    }
                }
                EpisodeEvent::Waits => goes_on = take(EvalEvent::Waits)?,
                EpisodeEvent::GoesOn => {}
            }
            Ok(goes_on)
        })?;
        Ok(goes_on)
    }

    /// The record of an episode. Its text and tokens have what the policy was given between its turns.
    fn played(&self, benchmark: &Benchmark, problem: &Problem, ended: EndedEpisode) -> Result<EvalRecord> {
        let n_prompt =
            ended.is_sampled.iter().position(|&is_sampled| is_sampled).unwrap_or(ended.tokens.len());
        let tokens = ended.tokens[n_prompt..].to_vec();
        let record = EvalRecord {
            text: self.model.tokenizer()?.decode(&tokens)?,
            n_tokens: ended.logp.len(),
            tokens,
            finish: ended.finish,
            episode: Some(Box::new(ended.episode)),
            ..self.blank(benchmark, problem, ended.sample as usize)
        };
        let mut judged = ended.judged.into_iter();
        let first = judged.next().expect("an episode ends with a judgement");
        Ok(with_verdict(record, first, judged.next()))
    }

    fn is_done(&self, benchmark: &Benchmark, problem: &Problem) -> bool {
        (0..benchmark.n_samples).all(|sample| self.has(benchmark, problem, sample))
    }

    fn has(&self, benchmark: &Benchmark, problem: &Problem, sample: usize) -> bool {
        let sample_key = (benchmark.name.clone(), self.decoding.name.clone(), problem.id.clone(), sample);
        self.done.contains(&sample_key)
    }

    fn request(&self, prompting: &Prompting, benchmark: &Benchmark, problem: &Problem) -> Result<Request> {
        let key = Key::new(content_hash(&benchmark.name)).with(content_hash(&problem.id));
        Ok(Request {
            problem: key.bits(),
            prompt: prompting.tokens(problem)?,
            n_samples: benchmark.n_samples as u32,
            max_tokens: self.sampling.max_tokens,
            stops: self.model.stops.clone(),
        })
    }

    /// Records a question whose prompt is empty or too long for the model as not answered, with the reason.
    fn refuse(
        &self,
        benchmark: &Benchmark,
        problem: &Problem,
        error: &RequestError,
        take: &mut impl FnMut(EvalEvent) -> Result<bool>,
    ) -> Result<bool> {
        for sample in (0..benchmark.n_samples).filter(|&sample| !self.has(benchmark, problem, sample)) {
            let reason = error.to_string().lines().next().unwrap_or_default().to_string();
            let mut record = self.blank(benchmark, problem, sample);
            record.reason = reason;
            if !take(EvalEvent::Finished(Box::new(record)))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Judges samples, those of a benchmark at once, and gives their records away.
    fn judge(&self, waiting: &[Waiting], take: &mut impl FnMut(EvalEvent) -> Result<bool>) -> Result<bool> {
        for waiting in waiting.chunk_by(|a, b| std::ptr::eq(a.benchmark, b.benchmark)) {
            let records = waiting.iter().map(|sample| self.unjudged(sample)).collect::<Result<Vec<_>>>()?;
            let samples: Vec<(&Problem, &str)> = waiting
                .iter()
                .zip(&records)
                .map(|(sample, record)| (sample.problem, record.text.as_str()))
                .collect();
            let judged = waiting[0].benchmark.judge(&samples)?;
            for (record, (judged, second)) in records.into_iter().zip(judged) {
                let record = with_verdict(record, judged, second);
                if !take(EvalEvent::Finished(Box::new(record)))? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    fn unjudged(&self, sample: &Waiting) -> Result<EvalRecord> {
        let Waiting { benchmark, problem, response, .. } = sample;
        let tokens: Vec<u32> = response.tokens.iter().map(|sampled| sampled.token).collect();
        Ok(EvalRecord {
            text: self.model.tokenizer()?.decode(&tokens)?,
            n_tokens: tokens.len(),
            tokens,
            finish: finish(response.finish),
            ..self.blank(benchmark, problem, response.sample as usize)
        })
    }

    fn blank(&self, benchmark: &Benchmark, problem: &Problem, sample_idx: usize) -> EvalRecord {
        EvalRecord {
            schema: SCHEMA,
            benchmark: benchmark.name.clone(),
            decoding: self.decoding.name.clone(),
            step: self.sampling.step,
            problem_id: problem.id.clone(),
            reference: problem.reference.clone(),
            sample_idx,
            text: String::new(),
            tokens: Vec::new(),
            n_tokens: 0,
            finish: Finish::LengthLimit,
            answer: None,
            verdict: Verdict::NoAnswer,
            reason: String::new(),
            program: None,
            episode: None,
            extra: Extra::new(),
        }
    }
}

/// A record with its verdict, and that of a second verifier where there is one.
fn with_verdict(mut record: EvalRecord, judged: Judged, second: Option<Judged>) -> EvalRecord {
    record.verdict = judged.verdict;
    record.reason = judged.reason;
    record.answer = judged.canonical.or(judged.answer).filter(|_| judged.program.is_none());
    record.program = judged.program;
    if let Some(second) = second {
        agreement::note(&mut record, second);
    }
    record
}

#[cfg(test)]
mod tests;
