//! Episodes: turns of the policy, answered by an environment. Finished turns go to worker threads, and the engine continues
//! with other sequences; an answered turn continues on its keys and values.
//!
//! What the clock decides, such as the order of answers, changes no token: draws are keyed by problem, sample and position,
//! and an answer depends on its episode alone.

use super::answers::{EpisodeSet, RecordedAnswers, recorded_turn};
use crate::error::{Error, Result};
use crate::plan::config::EpisodeConfig;
use crate::reward::Judged;
use crate::tasks::prompting::Prompting;
use crate::tasks::{Answer, Environment, PolicyTurn, Reply};
use stapo_core::random::Key;
use stapo_core::{Episode, Finish, Problem, Turn, Verdict};
use stapo_model::Tokenizer;
use stapo_model::generate::{Completion, Engine, Event, FinishReason, Ticket};
use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// An episode that has ended. Columns as in [`stapo_core::Rollout`].
#[derive(Debug)]
pub struct EndedEpisode {
    /// The request, whose samples are episodes.
    pub ticket: Ticket,
    pub sample: u32,
    pub tokens: Vec<u32>,
    pub is_sampled: Vec<bool>,
    pub logp: Vec<f32>,
    pub entropy: Vec<f32>,
    pub finish: Finish,
    /// One per reward.
    pub judged: Vec<Judged>,
    pub episode: Episode,
}

/// A problem whose samples are episodes.
pub(crate) struct Asked<'a> {
    /// Its number in the records of the run.
    pub problem_idx: usize,
    pub problem: &'a Problem,
    pub prompt: Vec<u32>,
}

/// How episodes are played.
pub(crate) struct Episodes<'a> {
    pub environment: &'a dyn Environment,
    pub prompting: Prompting<'a>,
    pub tokenizer: &'a Tokenizer,
    /// Tokens that end a turn.
    pub stops: &'a [u32],
    pub limits: EpisodeConfig,
    /// Tokens of an episode after its prompt, at most.
    pub max_tokens: usize,
    pub set: EpisodeSet,
    pub recorded: &'a RecordedAnswers,
    /// The number of judgements that end an episode.
    pub n_rewards: usize,
}

/// What happens while episodes are played.
pub(crate) enum EpisodeEvent {
    /// A token was sampled.
    Token,
    Ended(Box<EndedEpisode>),
    /// Nothing can be sampled before the environment has answered. Comes again while that is so.
    Waits,
    /// The environment has answered.
    GoesOn,
}

/// Takes events; `false` ends the episodes.
type Take<'t> = &'t mut dyn FnMut(EpisodeEvent) -> Result<bool>;

/// A finished turn on its way to the environment.
struct Job {
    key: (Ticket, u32),
    texts: Vec<String>,
    /// The stop token that the policy sampled.
    ended_with: Option<u32>,
}

/// An answered turn on its way back.
struct Answered {
    key: (Ticket, u32),
    answer: Answer,
    /// Tokens that the policy is given next; empty if the episode has ended.
    given: Vec<u32>,
    n_cut: usize,
}

/// What a worker sends: an answer, an error, or the payload of a panic.
type Delivery = thread::Result<Result<Answered>>;

/// An episode that is going on.
struct Going {
    tokens: Vec<u32>,
    is_sampled: Vec<bool>,
    logp: Vec<f32>,
    entropy: Vec<f32>,
    texts: Vec<String>,
    episode: Episode,
    finish: Finish,
}

/// How often the wait for an answer looks for a request to stop.
const LOOK: Duration = Duration::from_millis(100);

impl Episodes<'_> {
    /// The longest first turn.
    pub fn first_limit(&self) -> usize {
        self.limits.turn_limit(self.max_tokens)
    }

    /// Plays the episodes of all requests of the engine, which were submitted in the order of `asked`. They end in any order.
    pub fn play(&self, engine: &mut Engine, asked: &[Asked], take: Take) -> Result<()> {
        engine.park_turns();
        let (jobs, queue) = channel::<Job>();
        let (answers, answered) = channel::<Delivery>();
        let queue = Mutex::new(queue);
        thread::scope(|scope| {
            for _ in 0..self.limits.workers {
                let (queue, answers) = (&queue, answers.clone());
                scope.spawn(move || self.work(asked, queue, &answers));
            }
            // Without this sender, a queue that no worker serves any more is known by its end.
            drop(answers);
            let played = self.conduct(engine, asked, (&jobs, &answered), take);
            // The workers end when these ends are gone.
            drop((jobs, answered));
            played
        })
    }

    /// Answers turns until there are no more.
    fn work(&self, asked: &[Asked], queue: &Mutex<Receiver<Job>>, answers: &Sender<Delivery>) {
        loop {
            let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok(job) = job else { return };
            let delivery = catch_unwind(AssertUnwindSafe(|| self.answer(asked, &job)));
            if answers.send(delivery).is_err() {
                return;
            }
        }
    }

    fn answer(&self, asked: &[Asked], job: &Job) -> Result<Answered> {
        let Asked { problem_idx, problem, .. } = asked[job.key.0.0 as usize];
        let at = (problem_idx, job.key.1 as usize);
        let EpisodeSet { step, draw, is_evaluation } = self.set;
        let key =
            Key::new(step).with(draw).with(u64::from(is_evaluation)).with(at.0 as u64).with(at.1 as u64);
        let turn = PolicyTurn { episode: key.bits() >> 11, problem, texts: &job.texts };
        let ask = || Ok(self.environment.answer(&[turn])?.remove(0));
        let asked = (self.set, problem, at);
        let answer = self.recorded.answer(asked, &job.texts, self.environment.judges(), ask)?;
        let Reply::Continue(observations) = &answer.reply else {
            return Ok(Answered { key: job.key, answer, given: Vec::new(), n_cut: 0 });
        };
        let mut observations: Vec<Turn> = observations.clone();
        let mut n_cut = 0;
        for observation in &mut observations {
            n_cut += usize::from(self.prompting.cut(observation, self.limits.max_observation_tokens)?);
        }
        let opening = self.environment.begin(problem);
        let given = self.prompting.continuation(&opening, &observations, job.ended_with)?;
        Ok(Answered { key: job.key, answer, given, n_cut })
    }

    /// Runs the engine, hands finished turns to the workers and continues answered ones.
    fn conduct(
        &self,
        engine: &mut Engine,
        asked: &[Asked],
        (jobs, answered): (&Sender<Job>, &Receiver<Delivery>),
        take: Take,
    ) -> Result<()> {
        let mut going: BTreeMap<(Ticket, u32), Going> = BTreeMap::new();
        let mut n_waiting = 0;
        while !engine.is_idle() || n_waiting > 0 {
            while let Some(delivery) = next_answer(answered, engine.is_idle() && n_waiting > 0, take)? {
                n_waiting -= 1;
                let delivery = delivery.unwrap_or_else(|panic: Box<dyn Any + Send>| resume_unwind(panic))?;
                let ended = self.go_on(engine, asked, &mut going, delivery)?;
                if let Some(ended) = ended
                    && !take(EpisodeEvent::Ended(Box::new(ended)))?
                {
                    return Ok(());
                }
            }
            if engine.is_idle() && n_waiting > 0 {
                return Ok(());
            }
            let mut finished = Vec::new();
            let mut goes_on = Ok(true);
            engine.step(|event| match event {
                Event::Token { .. } if matches!(goes_on, Ok(true)) => goes_on = take(EpisodeEvent::Token),
                Event::Token { .. } => {}
                Event::Finished(turn) => finished.push(turn),
            })?;
            if !goes_on? {
                return Ok(());
            }
            for turn in finished {
                let job = self.finish_turn(asked, &mut going, &turn)?;
                n_waiting += 1;
                jobs.send(job).expect("workers wait for jobs until the sender is dropped");
            }
        }
        Ok(())
    }

    /// Adds a finished turn to its episode.
    fn finish_turn(
        &self,
        asked: &[Asked],
        going: &mut BTreeMap<(Ticket, u32), Going>,
        turn: &Completion,
    ) -> Result<Job> {
        let key = (turn.ticket, turn.sample);
        let episode = going.entry(key).or_insert_with(|| Going::new(&asked[key.0.0 as usize].prompt));
        let ids: Vec<u32> = turn.tokens.iter().map(|sampled| sampled.token).collect();
        episode.tokens.extend(&ids);
        episode.is_sampled.resize(episode.tokens.len(), true);
        episode.logp.extend(turn.tokens.iter().map(|sampled| sampled.logp));
        episode.entropy.extend(turn.tokens.iter().map(|sampled| sampled.entropy));
        episode.finish = super::finish(turn.finish);
        let ended_with = match turn.finish {
            FinishReason::Stop(token) => Some(token).filter(|token| self.stops.contains(token)),
            FinishReason::LengthLimit => None,
        };
        // Some calls begin with a special token, so special tokens stay, but for the one that ends the turn.
        let n_text = ids.len() - usize::from(ended_with.is_some());
        episode.texts.push(self.tokenizer.decode_all(&ids[..n_text])?);
        Ok(Job { key, texts: episode.texts.clone(), ended_with })
    }

    /// Continues an episode after an answer, or ends it and returns it.
    fn go_on(
        &self,
        engine: &mut Engine,
        asked: &[Asked],
        going: &mut BTreeMap<(Ticket, u32), Going>,
        answered: Answered,
    ) -> Result<Option<EndedEpisode>> {
        let Answered { key, answer, given, n_cut } = answered;
        let question = &asked[key.0.0 as usize];
        let episode = going.get_mut(&key).expect("an answered turn belongs to an episode that goes on");
        let text = episode.texts.last().map_or("", String::as_str);
        episode.episode.turns.push(recorded_turn(text, &answer, n_cut));
        let n_used = episode.tokens.len() - question.prompt.len() + given.len();
        let max_tokens = self.limits.turn_limit(self.max_tokens.saturating_sub(n_used));
        let is_last = episode.texts.len() >= self.limits.max_turns;
        let judged = match answer.reply {
            Reply::Done(judged) => judged,
            Reply::Continue(_) if is_last => {
                episode.finish = Finish::TurnLimit;
                self.unfinished("the episode reached its limit of turns")
            }
            Reply::Continue(_) if max_tokens == 0 => {
                episode.finish = Finish::LengthLimit;
                self.unfinished("the episode reached its limit of tokens")
            }
            Reply::Continue(_) => {
                let refused = |source| Error::Request { problem_id: question.problem.id.clone(), source };
                engine.extend(key, &given, max_tokens).map_err(refused)?;
                episode.tokens.extend(&given);
                episode.is_sampled.resize(episode.tokens.len(), false);
                return Ok(None);
            }
        };
        engine.release(key.0, key.1);
        let Going { tokens, is_sampled, logp, entropy, episode, finish, .. } =
            going.remove(&key).expect("the episode was there");
        let (ticket, sample) = key;
        Ok(Some(EndedEpisode { ticket, sample, tokens, is_sampled, logp, entropy, finish, judged, episode }))
    }

    /// The judgements of an episode that its environment would have continued.
    fn unfinished(&self, reason: &str) -> Vec<Judged> {
        vec![Judged::new(Verdict::NoAnswer, None, reason.to_string()); self.n_rewards]
    }
}

/// An answer that is there; with `waits`, the next one. `None`: none is there, or `take` ended the wait.
fn next_answer(answered: &Receiver<Delivery>, waits: bool, take: Take) -> Result<Option<Delivery>> {
    if let Ok(delivery) = answered.try_recv() {
        return Ok(Some(delivery));
    }
    while waits && take(EpisodeEvent::Waits)? {
        match answered.recv_timeout(LOOK) {
            Ok(delivery) => return take(EpisodeEvent::GoesOn).map(|goes_on| goes_on.then_some(delivery)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    Ok(None)
}

impl Going {
    fn new(prompt: &[u32]) -> Self {
        Self {
            tokens: prompt.to_vec(),
            is_sampled: vec![false; prompt.len()],
            logp: Vec::new(),
            entropy: Vec::new(),
            texts: Vec::new(),
            episode: Episode::default(),
            finish: Finish::LengthLimit,
        }
    }
}
