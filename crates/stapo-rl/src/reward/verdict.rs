//! Verifiers, which turn responses into verdicts.

mod command;
mod countdown;
pub(super) mod lines;
mod python;

use super::code::CodeJudge;
use super::judge::verifier::JudgeVerifier;
use super::judged::Judged;
use super::permission::{self, Programs};
use super::reward_model::RewardModelVerifier;
use super::rule::by_rule;
use crate::reward::spec::CountdownRule;
use crate::reward::spec::VerifierSpec;
use crate::tasks::countdown::Puzzle;
use crate::tasks::error::TaskError;
use command::External;
use lines::RowOf;
pub(crate) use python::greeting as driver_greeting;
pub use python::show_prints;
use rayon::prelude::*;
use stapo_core::Problem;
use stapo_verify::{Form, Graded, Mode, Rules, grade, grade_answer};

pub(crate) enum Verifier {
    Rule(Rules),
    Countdown(CountdownRule),
    External(Box<External>),
    Code(Box<CodeJudge>),
    Judge(Box<JudgeVerifier>),
    RewardModel(Box<RewardModelVerifier>),
    /// An external program that was not to be started.
    NotStarted,
}

impl Verifier {
    /// Opens a verifier. An external program is started here, so that a failure to start is found before sampling.
    pub(crate) fn open(spec: &VerifierSpec, programs: Programs) -> Result<Self, TaskError> {
        Ok(match spec {
            VerifierSpec::Rule(rule) => Self::Rule((*rule).into()),
            VerifierSpec::Countdown(rule) => Self::Countdown(*rule),
            VerifierSpec::Judge(judge) => Self::Judge(Box::new(JudgeVerifier::open(judge)?)),
            VerifierSpec::RewardModel(model) => {
                Self::RewardModel(Box::new(RewardModelVerifier::open(model)?))
            }
            VerifierSpec::Command(_) | VerifierSpec::Python(_) | VerifierSpec::Code(_)
                if programs == Programs::Never =>
            {
                Self::NotStarted
            }
            VerifierSpec::Command(command) => {
                permission::check(command, programs)?;
                Self::External(Box::new(External::start(command)?))
            }
            VerifierSpec::Python(python) => {
                permission::check(&python.command(), programs)?;
                Self::External(Box::new(External::start_python(python)?))
            }
            VerifierSpec::Code(code) => {
                if let Some(command) = spec.program() {
                    permission::check(&command, programs)?;
                }
                Self::Code(Box::new(CodeJudge::open(code)?))
            }
        })
    }

    /// Whether answers are looked for in boxes.
    pub(crate) fn reads_boxes(&self) -> bool {
        matches!(self, Self::Rule(_) | Self::Countdown(_) | Self::Judge(_) | Self::RewardModel(_))
    }

    /// Whether judging needs the rows of a data file.
    pub(crate) fn reads_rows(&self) -> bool {
        match self {
            Self::External(external) => external.reads_rows(),
            Self::Code(_) | Self::Judge(_) => true,
            _ => false,
        }
    }

    /// One result per sample, in the order of the samples. Rules run on all cores.
    pub(crate) fn judge(
        &self,
        samples: &[(&Problem, &str)],
        row_of: &RowOf,
    ) -> Result<Vec<Judged>, TaskError> {
        match self {
            Self::Rule(rules) => {
                Ok(samples.par_iter().map(|&(problem, text)| by_rule(problem, text, *rules)).collect())
            }
            Self::Countdown(rule) => Ok(samples
                .par_iter()
                .map(|&(problem, text)| countdown::judge(text, &problem.reference, *rule))
                .collect()),
            Self::External(external) => external.judge(samples, row_of),
            Self::Code(code) => code.judge_samples(samples, row_of),
            Self::Judge(judge) => judge.judge(samples, row_of),
            Self::RewardModel(model) => model.judge(samples),
            Self::NotStarted => Err(TaskError::setting(
                "verifier",
                "the program was not started, so nothing can be judged",
                "open the task with Programs::Allowed or Programs::Recorded",
            )),
        }
    }

    /// Checks that the verifier can read the reference; the error is the reason why not.
    pub(crate) fn check_reference(&self, reference: &str) -> Result<(), String> {
        match self {
            Self::Rule(rules) => {
                let unlike = |reason| Err(format!("reference {reference:?}: {reason}"));
                let itself = grade_answer(reference, reference, rules.mode);
                if itself.verdict != stapo_verify::Verdict::Right {
                    return unlike(itself.reason);
                }
                // A formula that is written as the reference is right even if neither can be read: a number decides.
                let other = grade_answer("0", reference, rules.mode);
                let is_unread =
                    rules.mode == Mode::Math && other.verdict == stapo_verify::Verdict::Unparsable;
                if is_unread { unlike(other.reason) } else { Ok(()) }
            }
            Self::Countdown(_) => Puzzle::parse(reference)
                .map(drop)
                .ok_or_else(|| format!("reference {reference:?} does not read like 2,3,5,7:24")),
            Self::External(_) | Self::Code(_) | Self::Judge(_) | Self::RewardModel(_) | Self::NotStarted => {
                Ok(())
            }
        }
    }

    /// The judge, for a verifier that is one.
    pub(crate) fn judge_mut(&mut self) -> Option<&mut JudgeVerifier> {
        match self {
            Self::Judge(judge) => Some(judge),
            _ => None,
        }
    }

    /// The reward model, for a verifier that is one.
    pub(crate) fn reward_model_mut(&mut self) -> Option<&mut RewardModelVerifier> {
        match self {
            Self::RewardModel(model) => Some(model),
            _ => None,
        }
    }

    /// Whether verdicts can depend on the machine's speed, and are taken from the record where a run is made again.
    pub(crate) fn has_time_outs(&self) -> bool {
        matches!(self, Self::Code(_))
    }

    /// Takes over responses, by problem, that went over a limit of time when the run was made.
    pub(crate) fn remember_time_outs(&mut self, time_outs: Vec<(String, String)>) {
        if let Self::Code(code) = self {
            code.remember_time_outs(time_outs);
        }
    }

    /// What an external program shares with this machine because the machine cannot keep it apart.
    pub(crate) fn warnings(&self) -> Vec<String> {
        match self {
            Self::External(external) => external.warnings(),
            Self::Code(code) => code.warnings(),
            _ => Vec::new(),
        }
    }
}

/// The answer of a response that the rules take for right only because the grader does the calculation which the answer
/// leaves to it: `60 + 180` for 240. `None` for any other response.
pub fn left_to_grader(response: &str, reference: &str, rules: Rules) -> Option<String> {
    if rules.mode != Mode::Math || rules.form != Form::Any {
        return None;
    }
    let graded = |form| grade(response, reference, Rules { form, ..rules });
    let is_right = |graded: &Graded| graded.verdict == stapo_verify::Verdict::Right;
    if is_right(&graded(Form::WorkedOut)) {
        return None;
    }
    Some(graded(Form::Any)).filter(is_right)?.extracted
}
