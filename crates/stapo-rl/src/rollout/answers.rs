//! Answers of environments that a run has recorded. A run that is made again takes them from there.

use crate::error::Result;
use crate::reward::Judged;
use crate::run::AnswerJournal;
use crate::tasks::{Answer, Reply, sha256};
use stapo_core::record::{EpisodeRecord, Extra, SCHEMA};
use stapo_core::{Episode, EpisodeTurn, Problem, TurnVerdict};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Where the episodes that are sampled together belong in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EpisodeSet {
    /// The step that samples them, or after which they are evaluated.
    pub step: u64,
    pub is_evaluation: bool,
    /// How often groups were redrawn before.
    pub draw: u64,
}

impl EpisodeSet {
    /// The record of one of the episodes.
    pub fn record(
        self,
        problem: &Problem,
        (problem_idx, sample_idx): (usize, usize),
        episode: Episode,
    ) -> EpisodeRecord {
        let Self { step, is_evaluation: evaluation, draw } = self;
        let problem_id = problem.id.clone();
        let extra = Extra::new();
        EpisodeRecord {
            schema: SCHEMA,
            step,
            evaluation,
            draw,
            problem_idx,
            sample_idx,
            problem_id,
            episode,
            extra,
        }
    }
}

/// How recorded answers are used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AnswerUse {
    /// They replace the environment's.
    #[default]
    Replay,
    /// The environment is asked as well, and the first difference is kept. The recorded answer counts.
    Compare,
}

/// The recorded answers of a run's episodes.
#[derive(Debug, Default)]
pub struct RecordedAnswers {
    episodes: HashMap<(EpisodeSet, usize, usize), Episode>,
    /// Where answers are written that are not recorded yet.
    journal: Option<Mutex<AnswerJournal>>,
    usage: AnswerUse,
    /// Answers that were compared, and the first that differed, in words.
    compared: Mutex<(usize, Option<String>)>,
}

impl RecordedAnswers {
    pub fn new(records: Vec<EpisodeRecord>, usage: AnswerUse) -> Self {
        let keyed = records.into_iter().map(|record| {
            let set = EpisodeSet { step: record.step, is_evaluation: record.evaluation, draw: record.draw };
            ((set, record.problem_idx, record.sample_idx), record.episode)
        });
        Self { episodes: keyed.collect(), usage, ..Self::default() }
    }

    /// Writes the answers of environments down as they come.
    pub(crate) fn write_to(&mut self, journal: AnswerJournal) {
        self.journal = Some(Mutex::new(journal));
    }

    /// Takes note that the answers up to a step are in the records of the run.
    pub(crate) fn recorded_up_to(&self, step: u64) -> Result<()> {
        let journal = self.journal.as_ref();
        journal.map_or(Ok(()), |journal| journal.lock().unwrap_or_else(PoisonError::into_inner).forget(step))
    }

    pub fn set_use(&mut self, usage: AnswerUse) {
        self.usage = usage;
    }

    /// How many answers were compared with the environment's, and the first that differed, in words.
    pub fn comparison(&self) -> (usize, Option<String>) {
        self.compared.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The recorded answer to a turn; `None` if there is none, or where the turn had another text.
    fn find(&self, set: EpisodeSet, at: (usize, usize), texts: &[String]) -> Option<&EpisodeTurn> {
        let turn = self.episodes.get(&(set, at.0, at.1))?.turns.get(texts.len() - 1)?;
        (turn.text_sha256 == sha256(texts.last()?)).then_some(turn)
    }

    /// The answer to a turn of an episode of `problem` whose numbers are `at` (problem and sample): the recorded one, or else
    /// that of `ask`. `judges` says whether the environment judges episodes, and not verifiers.
    pub fn answer(
        &self,
        (set, problem, at): (EpisodeSet, &Problem, (usize, usize)),
        texts: &[String],
        judges: bool,
        ask: impl FnOnce() -> Result<Answer>,
    ) -> Result<Answer> {
        let Some(recorded) = self.find(set, at, texts) else {
            let answer = ask()?;
            if let (Some(journal), Some(text)) = (&self.journal, texts.last()) {
                let episode = Episode { turns: vec![recorded_turn(text, &answer, 0)] };
                let mut journal = journal.lock().unwrap_or_else(PoisonError::into_inner);
                journal.add(set.record(problem, at, episode), texts.len() - 1)?;
            }
            return Ok(answer);
        };
        let reply = match recorded.judged.as_slice() {
            [] => Some(Reply::Continue(recorded.observations.clone())),
            // Verifiers of a task judge again, as they do for responses of one turn.
            _ if !judges => None,
            judged => Some(Reply::Done(judged.iter().map(judgement).collect())),
        };
        let replayed =
            reply.map(|reply| Answer { calls: recorded.calls.clone(), reward: recorded.reward, reply });
        if self.usage == AnswerUse::Replay
            && let Some(replayed) = replayed
        {
            return Ok(replayed);
        }
        let found = ask()?;
        self.compare(set, at, texts.len(), recorded, &found);
        Ok(replayed.unwrap_or(found))
    }

    fn compare(
        &self,
        set: EpisodeSet,
        at: (usize, usize),
        turn: usize,
        recorded: &EpisodeTurn,
        found: &Answer,
    ) {
        let mut compared = self.compared.lock().unwrap_or_else(PoisonError::into_inner);
        compared.0 += 1;
        let Some(difference) = difference(recorded, found) else { return };
        let phase = if set.is_evaluation { "evaluation after step" } else { "step" };
        let (problem, sample) = (at.0 + 1, at.1 + 1);
        let text =
            format!("{phase} {}, problem {problem}, sample {sample}, turn {turn}: {difference}", set.step);
        compared.1.get_or_insert(text);
    }
}

/// How an answer differs from the recorded one.
fn difference(recorded: &EpisodeTurn, found: &Answer) -> Option<String> {
    let mut pairs = recorded.calls.iter().zip(&found.calls).enumerate();
    if let Some((idx, (before, after))) = pairs.find(|(_, (before, after))| before != after) {
        let shown =
            |call: &stapo_core::ToolCall| format!("{}({}) -> {}", call.tool, call.arguments, call.sha256);
        return Some(format!("call {}: recorded {}, called again {}", idx + 1, shown(before), shown(after)));
    }
    let observations = match &found.reply {
        Reply::Continue(observations) => observations.as_slice(),
        Reply::Done(_) => &[],
    };
    if recorded.observations != observations {
        let texts =
            |turns: &[stapo_core::Turn]| turns.iter().map(|turn| turn.content.clone()).collect::<Vec<_>>();
        return Some(format!(
            "recorded {:?}, found {:?}",
            texts(&recorded.observations),
            texts(observations)
        ));
    }
    let Reply::Done(judged) = &found.reply else { return None };
    let verdicts: Vec<_> = judged.iter().map(|judged| (judged.verdict, judged.reward)).collect();
    let before: Vec<_> = recorded.judged.iter().map(|judged| (judged.verdict, judged.reward)).collect();
    (verdicts != before).then(|| format!("recorded the judgement {before:?}, found {verdicts:?}"))
}

fn judgement(recorded: &TurnVerdict) -> Judged {
    let TurnVerdict { verdict, reward, answer, reason } = recorded.clone();
    Judged { reward, ..Judged::new(verdict, answer, reason) }
}

/// An answer as it is recorded.
pub(super) fn recorded_turn(text: &str, answer: &Answer, n_cut: usize) -> EpisodeTurn {
    let (observations, judged) = match &answer.reply {
        Reply::Continue(observations) => (observations.clone(), Vec::new()),
        Reply::Done(judged) => (Vec::new(), judged.clone()),
    };
    let verdict = |judged: Judged| TurnVerdict {
        verdict: judged.verdict,
        reward: judged.reward,
        answer: judged.answer,
        reason: judged.reason,
    };
    EpisodeTurn {
        text_sha256: sha256(text),
        calls: answer.calls.clone(),
        observations,
        n_cut,
        reward: answer.reward,
        judged: judged.into_iter().map(verdict).collect(),
        returns: Vec::new(),
    }
}
