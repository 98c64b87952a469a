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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::recorded_answers;
    use stapo_core::{ToolCall, Turn, Verdict};
    use std::cell::Cell;

    const SET: EpisodeSet = EpisodeSet { step: 3, is_evaluation: false, draw: 1 };

    fn problem() -> Problem {
        let [id, prompt, reference] = ["p", "1+1=", "2"].map(String::from);
        Problem { id, earlier_turns: Vec::new(), prompt, reference }
    }

    fn said(text: &str) -> Answer {
        Reply::Continue(vec![Turn { role: "user".into(), content: text.into() }]).into()
    }

    fn ended(verdict: Verdict, reward: Option<f64>) -> Answer {
        let judged = Judged { reward, ..Judged::new(verdict, None, String::new()) };
        Reply::Done(vec![judged]).into()
    }

    /// Two turns of sample 4 of problem 2: an observation and the end.
    fn recorded(usage: AnswerUse) -> RecordedAnswers {
        let turns = vec![
            recorded_turn("first", &said("higher"), 0),
            recorded_turn("second", &ended(Verdict::Right, Some(0.5)), 0),
        ];
        RecordedAnswers::new(vec![SET.record(&problem(), (2, 4), Episode { turns })], usage)
    }

    /// What a turn is answered, and whether the environment was asked.
    fn asked(
        answers: &RecordedAnswers,
        set: EpisodeSet,
        at: (usize, usize),
        texts: &[&str],
        judges: bool,
    ) -> (Answer, bool) {
        let is_asked = Cell::new(false);
        let texts: Vec<String> = texts.iter().map(ToString::to_string).collect();
        let ask = || {
            is_asked.set(true);
            Ok(said("lower"))
        };
        let answer = answers.answer((set, &problem(), at), &texts, judges, ask).unwrap();
        (answer, is_asked.get())
    }

    #[test]
    fn an_answer_is_replayed_to_the_same_turn_of_the_same_episode_alone() {
        let answers = recorded(AnswerUse::Replay);
        let replayed = |set, at, texts: &[&str]| asked(&answers, set, at, texts, true);
        assert_eq!(replayed(SET, (2, 4), &["first"]), (said("higher"), false));
        assert_eq!(replayed(SET, (2, 4), &["first", "second"]), (ended(Verdict::Right, Some(0.5)), false));
        for (set, at, texts) in [
            (EpisodeSet { step: 4, ..SET }, (2, 4), &["first"][..]),
            (EpisodeSet { draw: 0, ..SET }, (2, 4), &["first"]),
            (EpisodeSet { is_evaluation: true, ..SET }, (2, 4), &["first"]),
            (SET, (4, 2), &["first"]),
            (SET, (2, 4), &["another"]),
            (SET, (2, 4), &["first", "another"]),
            (SET, (2, 4), &["first", "second", "third"]),
        ] {
            assert_eq!(replayed(set, at, texts), (said("lower"), true), "{set:?} {at:?} {texts:?}");
        }
        // The verifiers of a task judge again, and what they say counts.
        assert_eq!(asked(&answers, SET, (2, 4), &["first", "second"], false), (said("lower"), true));
        assert_eq!(answers.comparison().0, 1, "that turn was compared");
    }

    #[test]
    fn a_comparison_asks_again_keeps_what_was_recorded_and_names_the_first_difference() {
        let answers = recorded(AnswerUse::Compare);
        assert_eq!(
            asked(&answers, SET, (2, 4), &["first", "second"], true).0,
            ended(Verdict::Right, Some(0.5))
        );
        assert_eq!(asked(&answers, SET, (2, 4), &["first"], true), (said("higher"), true));
        let (n, difference) = answers.comparison();
        let difference = difference.unwrap();
        assert_eq!(n, 2);
        assert!(difference.starts_with("step 3, problem 3, sample 5, turn 2: recorded []"), "{difference}");
    }

    #[test]
    fn calls_observations_and_judgements_are_compared() {
        let call = |sha256: &str| ToolCall {
            tool: "t".into(),
            arguments: "1".into(),
            sha256: sha256.into(),
            failed: false,
            timed_out: false,
        };
        let called = |sha256: &str| Answer { calls: vec![call("x"), call(sha256)], ..said("a") };
        let differs = |before: &Answer, after: &Answer| difference(&recorded_turn("", before, 0), after);
        assert_eq!(differs(&called("y"), &called("y")), None);
        assert!(differs(&called("y"), &called("z")).unwrap().starts_with("call 2: recorded t(1) -> y"));
        assert!(differs(&said("a"), &said("b")).unwrap().starts_with("recorded [\"a\"], found [\"b\"]"));
        let right = ended(Verdict::Right, Some(1.0));
        assert_eq!(differs(&right, &right), None);
        for other in [ended(Verdict::Wrong, Some(1.0)), ended(Verdict::Right, Some(0.5))] {
            assert!(differs(&right, &other).unwrap().starts_with("recorded the judgement"));
        }
    }

    #[test]
    fn an_answer_that_was_asked_for_is_in_the_journal_and_a_replayed_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let mut answers = recorded(AnswerUse::Replay);
        answers.write_to(AnswerJournal::open(folder.path()).unwrap());
        asked(&answers, SET, (2, 4), &["first"], true);
        assert!(recorded_answers(folder.path(), 0).unwrap().is_empty());
        asked(&answers, SET, (0, 1), &["first"], true);
        let [record] = &recorded_answers(folder.path(), 0).unwrap()[..] else { panic!("one episode") };
        let sampled_at = (record.step, record.draw, record.problem_idx, record.sample_idx);
        assert_eq!((sampled_at, record.episode.turns.len()), ((3, 1, 0, 1), 1));
        answers.recorded_up_to(3).unwrap();
        assert!(recorded_answers(folder.path(), 0).unwrap().is_empty());
    }
}
