//! A task is data and a verdict: a source of problems, and a verifier of answers.
//!
//! ```
//! use stapo_rl::tasks::{Mistakes, Split, Task, TaskSpec};
//! let task = Task::open(&TaskSpec::default())?;
//! let problem = task.problem(7, Split::Train, 0)?;
//! let answer = task.solution(&problem, &Mistakes::NONE)?;
//! assert_eq!(task.judge(&[(&problem, &answer)])?[0].verdict, stapo_core::Verdict::Right);
//! # Ok::<(), stapo_rl::tasks::TaskError>(())
//! ```

pub(crate) mod arithmetic;
pub(crate) mod countdown;
mod drawn;
mod environment;
pub(crate) mod error;
mod generated;
mod guess;
pub mod prompting;
pub(crate) mod rows;
mod spec;
pub(crate) mod split;
pub(crate) mod template;
pub mod tools;
pub mod unseen;
mod wording;

pub use arithmetic::{ArithmeticSpec, Mistakes, Operator};
pub use countdown::CountdownSpec;
pub(crate) use environment::sha256;
pub use environment::{
    Answer, ClassSpec, Environment, EnvironmentSpec, GuessWords, PolicyTurn, ProgramSpec, Reply, Rewards,
    ToolsSpec, UnjudgedTools,
};
pub use error::TaskError;
pub use guess::GuessSpec;
pub(crate) use rows::read_json_lines;
pub use rows::{DataFile, DataPath, FileCensus, file_kind, first_row};
pub(crate) use rows::{bare_name, is_data_file};
pub use spec::{MissingAnswers, RowsSpec, TaskSpec};
pub use split::Split;
pub use stapo_verify::Mode;

use crate::reward::verdict::Verifier;
use crate::reward::{AskJudge, JudgeSpec, Judged, Programs, RewardModelSpec, ScoreResponses, VerifierSpec};
use environment::OpenEnvironment;
use generated::{GeneratedTask, Generator};
use rows::{KeptRows, ProblemRows};
use serde_json::{Map, Value};
use stapo_core::Problem;
use wording::Wording;

/// Every character of the prompts and worked solutions of `arithmetic` and `countdown` with the default templates, in
/// code-point order. A character-level tokenizer needs these tokens.
pub const ALPHABET: &str = " ()*+,-/0123456789:=\\abdeghnorstuwx{}";

/// An open task, whose spec, file, fields and template have been checked.
///
/// A problem is a pure function of seed, split and position; judging keeps the order of the samples. Threads may share
/// a task.
pub struct Task {
    source: ProblemSource,
    verifier: Verifier,
    /// The verifiers of further rewards.
    further: Vec<Verifier>,
    /// What answers the policy between its turns; `None` if a response is one turn.
    environment: Option<OpenEnvironment>,
}

enum ProblemSource {
    Generated(Box<GeneratedTask>),
    Rows(Box<ProblemRows>),
}

impl ProblemSource {
    /// The fields of a problem's row, where the rows of a file are kept.
    fn row(&self, id: &str) -> Option<&Map<String, Value>> {
        match self {
            Self::Generated(_) => None,
            Self::Rows(rows) => rows.row(id),
        }
    }

    fn generated(
        generator: Generator,
        wording: Wording,
        share: f64,
        n_held_out: usize,
    ) -> Result<Self, TaskError> {
        Ok(Self::Generated(Box::new(GeneratedTask::open(generator, wording, share, n_held_out)?)))
    }
}

impl Task {
    /// Opens a task whose settings may be another's: a verifier program starts only if this user has recorded it.
    pub fn open(spec: &TaskSpec) -> Result<Self, TaskError> {
        Self::open_with(spec, Programs::Recorded)
    }

    /// Opens a task that may start the given verifier programs.
    pub fn open_with(spec: &TaskSpec, programs: Programs) -> Result<Self, TaskError> {
        Self::with_verifiers(spec, [], programs)
    }

    fn open_source(spec: &TaskSpec, verifier: &Verifier, kept: KeptRows) -> Result<ProblemSource, TaskError> {
        let source = match spec {
            TaskSpec::Arithmetic(spec) => {
                spec.check()?;
                let template = spec.template.as_deref().unwrap_or(arithmetic::TEMPLATE);
                let wording = Wording::new(template, spec.system.as_deref())?;
                let generator = Generator::Arithmetic(spec.clone());
                ProblemSource::generated(generator, wording, spec.held_out_share, spec.n_held_out)?
            }
            TaskSpec::Countdown(spec) => {
                spec.check()?;
                let template = spec.template.as_deref().unwrap_or(countdown::TEMPLATE);
                let wording = Wording::new(template, spec.system.as_deref())?;
                let generator = Generator::Countdown(spec.clone());
                ProblemSource::generated(generator, wording, spec.held_out_share, spec.n_held_out)?
            }
            TaskSpec::Guess(spec) => {
                spec.check()?;
                let template = spec.template.as_deref().unwrap_or(guess::TEMPLATE);
                let wording = Wording::new(template, spec.system.as_deref())?;
                let generator = Generator::Guess(spec.clone());
                ProblemSource::generated(generator, wording, spec.held_out_share, spec.n_held_out)?
            }
            TaskSpec::Jsonl(spec) | TaskSpec::Parquet(spec) | TaskSpec::File(spec) => {
                ProblemSource::Rows(Box::new(ProblemRows::open(spec, verifier, kept)?))
            }
        };
        if let ProblemSource::Generated(task) = &source {
            task.check_references(verifier)?;
        }
        Ok(source)
    }

    /// Opens a task with the verifiers of further rewards, in addition to the task's.
    pub fn with_verifiers<'a>(
        spec: &TaskSpec,
        further: impl IntoIterator<Item = &'a VerifierSpec>,
        programs: Programs,
    ) -> Result<Self, TaskError> {
        Self::with_environment(spec, further, None, programs)
    }

    /// As [`Task::with_verifiers`], with an environment that answers the policy between its turns.
    pub fn with_environment<'a>(
        spec: &TaskSpec,
        further: impl IntoIterator<Item = &'a VerifierSpec>,
        environment: Option<&EnvironmentSpec>,
        programs: Programs,
    ) -> Result<Self, TaskError> {
        let verifier = Verifier::open(spec.verifier(), programs)?;
        let opened = further.into_iter().map(|verifier| Verifier::open(verifier, programs));
        let further = opened.collect::<Result<Vec<_>, _>>()?;
        let reads_rows = verifier.reads_rows()
            || further.iter().any(Verifier::reads_rows)
            || environment.is_some_and(EnvironmentSpec::reads_rows);
        let kept = if reads_rows { KeptRows::All } else { KeptRows::None };
        let source = Self::open_source(spec, &verifier, kept)?;
        let environment = environment.map(|spec| OpenEnvironment::open(spec, programs)).transpose()?;
        Ok(Self { source, verifier, further, environment })
    }

    /// The problem at `position`. `Train`: generated tasks are endless; a file repeats in epochs, each a permutation
    /// keyed by `seed`. `HeldOut`: the fixed set repeats in its order, for every seed.
    pub fn problem(&self, seed: u64, split: Split, position: u64) -> Result<Problem, TaskError> {
        match (split, &self.source) {
            (Split::Train, ProblemSource::Generated(task)) => task.train(seed, position),
            (Split::Train, ProblemSource::Rows(task)) => task.train(seed, position).cloned(),
            (Split::HeldOut, _) => {
                let held_out = self.held_out_set();
                let n = held_out.len().max(1) as u64;
                held_out.get((position % n) as usize).cloned().ok_or(TaskError::EmptySplit {
                    split: Split::HeldOut.name(),
                    remedy: "raise held_out_share (and n_held_out) of the task, or switch evaluation off",
                })
            }
        }
    }

    /// The first `n` problems of the held-out set, or all where the set has fewer.
    pub fn held_out(&self, n: usize) -> Vec<Problem> {
        self.held_out_set().iter().take(n).cloned().collect()
    }

    /// The number of different problems of a split; `None` for an endless split.
    pub fn n_problems(&self, split: Split) -> Option<u64> {
        match (split, &self.source) {
            (Split::Train, ProblemSource::Generated(_)) => None,
            (Split::Train, ProblemSource::Rows(task)) => Some(task.n_train()),
            (Split::HeldOut, _) => Some(self.held_out_set().len() as u64),
        }
    }

    /// Judges responses, each given with its problem; results are in the order of the samples. Rules never fail. Where
    /// an external verifier fails, the whole call is an error and no sample gets a verdict.
    pub fn judge(&self, samples: &[(&Problem, &str)]) -> Result<Vec<Judged>, TaskError> {
        self.verifier.judge(samples, &|id| self.source.row(id))
    }

    /// Judges responses for every reward: for each verifier, the results in the order of the samples.
    pub fn judge_all(&self, samples: &[(&Problem, &str)]) -> Result<Vec<Vec<Judged>>, TaskError> {
        let judge = |verifier: &Verifier| verifier.judge(samples, &|id| self.source.row(id));
        std::iter::once(&self.verifier).chain(&self.further).map(judge).collect()
    }

    /// Gives every verifier that is a judge its model, which `load` loads.
    pub fn load_judges<E>(
        &mut self,
        mut load: impl FnMut(&JudgeSpec) -> Result<Box<dyn AskJudge>, E>,
    ) -> Result<(), E> {
        let verifiers = std::iter::once(&mut self.verifier).chain(&mut self.further);
        for judge in verifiers.filter_map(Verifier::judge_mut).filter(|judge| !judge.is_loaded()) {
            judge.set(load(judge.spec())?);
        }
        Ok(())
    }

    /// Gives every verifier that is a reward model its model, which `load` loads.
    pub fn load_reward_models<E>(
        &mut self,
        mut load: impl FnMut(&RewardModelSpec) -> Result<Box<dyn ScoreResponses>, E>,
    ) -> Result<(), E> {
        let mut verifiers = std::iter::once(&mut self.verifier).chain(&mut self.further);
        verifiers.try_for_each(|verifier| {
            verifier.reward_model_mut().map_or(Ok(()), |model| model.load(&mut load))
        })
    }

    /// The verifiers of all rewards.
    pub(crate) fn n_verifiers(&self) -> usize {
        1 + self.further.len()
    }

    /// Whether verdicts can depend on the machine's speed.
    pub(crate) fn has_time_outs(&self) -> bool {
        self.verifier.has_time_outs()
    }

    /// Takes over responses, by problem, that went over a limit of time when the run was made.
    pub(crate) fn remember_time_outs(&mut self, time_outs: Vec<(String, String)>) {
        self.verifier.remember_time_outs(time_outs);
    }

    /// What the user should know: which references the verifier cannot read, and what the verifiers' programs share with this
    /// machine because the machine cannot keep them apart.
    pub fn warnings(&self) -> Vec<String> {
        let unreadable = self.census().and_then(|census| {
            let (n, first) = (census.n_unreadable, census.first_unreadable.as_ref()?);
            let n_problems = census.n_train + census.n_held_out;
            Some(format!(
                "{n} of {n_problems} problems have a reference that the verifier cannot read, so that only a response written exactly so is right; {first}"
            ))
        });
        let shared = std::iter::once(&self.verifier).chain(&self.further).flat_map(Verifier::warnings);
        let environment = self.environment.iter().flat_map(OpenEnvironment::warnings);
        unreadable.into_iter().chain(shared).chain(environment).collect()
    }

    /// The fields of a problem's row, where the rows of a file are kept.
    fn row(&self, id: &str) -> Option<&Map<String, Value>> {
        self.source.row(id)
    }

    /// An answer without a response around it, in the form that the task's verifier looks for.
    fn as_marked_answer(&self, answer: &str) -> String {
        let is_marked = !self.verifier.reads_boxes() || answer.contains("\\boxed");
        if is_marked { answer.to_string() } else { format!("\\boxed{{{answer}}}") }
    }

    /// A worked solution. Generated tasks write one, with mistakes, as pretraining uses it; a file holds its own under
    /// `solution_field`, and `mistakes` has no bearing on it.
    pub fn solution(&self, problem: &Problem, mistakes: &Mistakes) -> Result<String, TaskError> {
        match &self.source {
            ProblemSource::Generated(task) => task.solution(problem, mistakes),
            ProblemSource::Rows(task) => {
                task.solution(&problem.id).map(str::to_string).ok_or_else(|| TaskError::NoSolution {
                    id: problem.id.clone(),
                    problem: "the task is a file without solutions".into(),
                    remedy: "name the field of the solution with solution_field; arithmetic and countdown write their own",
                })
            }
        }
    }

    /// The default template of a teacher's prompt, which holds the solution.
    pub fn teacher_template(&self) -> &'static str {
        match &self.source {
            ProblemSource::Generated(_) => generated::TEACHER_TEMPLATE,
            ProblemSource::Rows(_) => rows::TEACHER_TEMPLATE,
        }
    }

    /// The counts of the task's file; `None` for generated tasks.
    pub fn census(&self) -> Option<&FileCensus> {
        match &self.source {
            ProblemSource::Generated(_) => None,
            ProblemSource::Rows(task) => Some(task.census()),
        }
    }

    /// The problems that are known before a run: all problems of a file, and the held-out set of a generated task.
    pub(crate) fn known_problems(&self) -> Vec<&Problem> {
        match &self.source {
            ProblemSource::Generated(task) => task.held_out().iter().collect(),
            ProblemSource::Rows(task) => task.all().collect(),
        }
    }

    /// Leaves known problems out; `is_left_out` has the order of [`Task::known_problems`].
    pub(crate) fn leave_out(&mut self, is_left_out: &[bool]) {
        match &mut self.source {
            ProblemSource::Generated(task) => task.leave_out(is_left_out),
            ProblemSource::Rows(task) => task.leave_out(is_left_out),
        }
    }

    /// The number of an entry of the task's path that has a weight and nothing to train on.
    pub(crate) fn empty_source(&self) -> Option<usize> {
        match &self.source {
            ProblemSource::Generated(_) => None,
            ProblemSource::Rows(task) => task.empty_source(),
        }
    }

    fn held_out_set(&self) -> &[Problem] {
        match &self.source {
            ProblemSource::Generated(task) => task.held_out(),
            ProblemSource::Rows(task) => task.held_out(),
        }
    }
}

#[cfg(test)]
mod tests;
