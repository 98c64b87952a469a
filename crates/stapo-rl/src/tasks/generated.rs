//! Endless tasks: problems are drawn by key, and the hash of a problem's text decides whether the problem is held out.

use super::arithmetic::{self, ArithmeticSpec, Mistakes};
use super::countdown::{self, CountdownSpec};
use super::drawn::DrawnProblem;
use super::guess::GuessSpec;
use super::split::{content_hash, split_of};
use super::template::Question;
use super::wording::Wording;
use super::{Split, TaskError};
use crate::reward::verdict::Verifier;
use stapo_core::Problem;
use stapo_core::random::Key;
use std::collections::HashSet;

/// A teacher's prompt: the problem with its solution, then the problem again. All characters are those of the task.
pub(super) const TEACHER_TEMPLATE: &str = "{{ prompt }}{{ solution }} {{ prompt }}";
/// The random streams of training and held-out problems.
const TRAIN_STREAM: u64 = 1;
const HELD_OUT_SEED: u64 = 0x68656c64;
/// Attempts at drawing one problem of a given shape.
const MAX_TRIES: u64 = 256;
/// Problems drawn in search of one that belongs to training, at most.
const MAX_DRAWS: u64 = 100;
/// Problems drawn for the whole held-out set, at most; this many draws take one or two seconds.
const MAX_HELD_OUT_DRAWS: u64 = 200_000;
/// After this many draws without a new problem, the held-out set is taken to be complete.
const MAX_DRAWS_WITHOUT_NEW: u64 = 20_000;

pub(super) enum Generator {
    Arithmetic(ArithmeticSpec),
    Countdown(CountdownSpec),
    Guess(GuessSpec),
}

impl Generator {
    /// The problem of `key`; `None` if none of [`MAX_TRIES`] attempts meets the spec.
    fn draw(&self, key: Key) -> Option<DrawnProblem> {
        let shape = key.with(0);
        let tries = key.with(1);
        (0..MAX_TRIES).find_map(|attempt| match self {
            Self::Arithmetic(spec) => spec.draw(shape, tries.with(attempt)),
            Self::Countdown(spec) => spec.draw(shape, tries.with(attempt)),
            Self::Guess(spec) => Some(spec.draw(tries.with(attempt))),
        })
    }
}

pub(super) struct GeneratedTask {
    generator: Generator,
    wording: Wording,
    held_out_share: f64,
    held_out: Vec<Problem>,
}

impl GeneratedTask {
    pub(super) fn open(
        generator: Generator,
        wording: Wording,
        held_out_share: f64,
        n_held_out: usize,
    ) -> Result<Self, TaskError> {
        let mut task = Self { generator, wording, held_out_share, held_out: Vec::new() };
        if (0..MAX_DRAWS)
            .all(|position| task.generator.draw(Key::new(HELD_OUT_SEED).with(position)).is_none())
        {
            return Err(too_narrow());
        }
        task.held_out = task.draw_held_out(n_held_out)?;
        if held_out_share < 1.0 {
            task.train(0, 0)?;
        }
        Ok(task)
    }

    /// Checks that the verifier can read the task's references. All references have one form, so one is checked.
    pub(super) fn check_references(&self, verifier: &Verifier) -> Result<(), TaskError> {
        let problem = self.held_out.first().cloned().map_or_else(|| self.train(0, 0), Ok)?;
        verifier.check_reference(&problem.reference).map_err(|why| {
            TaskError::setting("verifier", why, "leave the verifier out: the task brings the one that fits")
        })
    }

    /// Problem `position` of the endless training stream of `seed`.
    pub(super) fn train(&self, seed: u64, position: u64) -> Result<Problem, TaskError> {
        let key = Key::new(seed).with(TRAIN_STREAM).with(position);
        let drawn = (0..MAX_DRAWS)
            .filter_map(|attempt| self.generator.draw(key.with(attempt)))
            .find(|drawn| self.split(drawn) == Split::Train);
        self.render(drawn.ok_or_else(too_narrow)?)
    }

    pub(super) fn held_out(&self) -> &[Problem] {
        &self.held_out
    }

    /// Leaves held-out problems out, by place.
    pub(super) fn leave_out(&mut self, is_left_out: &[bool]) {
        let mut left_out = is_left_out.iter();
        self.held_out.retain(|_| left_out.next() != Some(&true));
    }

    /// The worked solution of one of this task's problems.
    pub(super) fn solution(&self, problem: &Problem, mistakes: &Mistakes) -> Result<String, TaskError> {
        mistakes.check()?;
        let key = Key::new(mistakes.seed).with(content_hash(&problem.id));
        let written = match &self.generator {
            Generator::Arithmetic(_) => arithmetic::solution(&problem.id, mistakes, key),
            Generator::Countdown(_) => countdown::solution(&problem.id, mistakes, key),
            Generator::Guess(_) => {
                return Err(TaskError::NoSolution {
                    id: problem.id.clone(),
                    problem: "a game of guess has no worked solution".into(),
                    remedy: "take another task: arithmetic and countdown write solutions",
                });
            }
        };
        written.ok_or_else(|| TaskError::NoSolution {
            id: problem.id.clone(),
            problem: "it is not one of this task's problems".into(),
            remedy: "ask with a problem that `problem` or `held_out` of the same task gave",
        })
    }

    fn split(&self, drawn: &DrawnProblem) -> Split {
        split_of(content_hash(&drawn.problem), self.held_out_share)
    }

    /// The first `n` distinct held-out problems of the held-out stream, or fewer where the draws find fewer.
    fn draw_held_out(&self, n: usize) -> Result<Vec<Problem>, TaskError> {
        if self.held_out_share == 0.0 || n == 0 {
            return Ok(Vec::new());
        }
        let mut seen = HashSet::new();
        let mut drawn_problems: Vec<DrawnProblem> = Vec::new();
        let mut last_new = 0;
        for position in 0..MAX_HELD_OUT_DRAWS {
            if drawn_problems.len() == n || position - last_new > MAX_DRAWS_WITHOUT_NEW {
                break;
            }
            let Some(drawn) = self.generator.draw(Key::new(HELD_OUT_SEED).with(position)) else { continue };
            if self.split(&drawn) == Split::HeldOut && seen.insert(drawn.problem.clone()) {
                drawn_problems.push(drawn);
                last_new = position;
            }
        }
        if drawn_problems.is_empty() { Err(too_narrow()) } else { self.render_all(drawn_problems) }
    }

    /// The problems in the same order, faster than one by one.
    fn render_all(&self, drawn_problems: Vec<DrawnProblem>) -> Result<Vec<Problem>, TaskError> {
        let questions: Vec<Question> = drawn_problems
            .iter()
            .map(|drawn| Question { id: &drawn.problem, problem: &drawn.problem, fields: &drawn.fields })
            .collect();
        let prompts = self.wording.prompts(&questions)?;
        Ok(drawn_problems
            .into_iter()
            .zip(prompts)
            .map(|(drawn, prompt)| self.problem(drawn, prompt))
            .collect())
    }

    fn render(&self, drawn: DrawnProblem) -> Result<Problem, TaskError> {
        let prompt = self.wording.prompt(&drawn.problem, &drawn.problem, &drawn.fields)?;
        Ok(self.problem(drawn, prompt))
    }

    fn problem(&self, drawn: DrawnProblem, prompt: String) -> Problem {
        Problem {
            id: drawn.problem,
            earlier_turns: self.wording.turns(&[]),
            prompt,
            reference: drawn.reference,
        }
    }
}

fn too_narrow() -> TaskError {
    TaskError::setting(
        "spec",
        format!("no problem that keeps to it came up in {MAX_DRAWS} draws of {MAX_TRIES} tries"),
        "widen the range of numbers and results, or move held_out_share away from 0 and 1",
    )
}
