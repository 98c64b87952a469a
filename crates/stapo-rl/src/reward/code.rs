//! Programs as answers: a response holds a program, and the tests of its row decide.

mod asking;
mod extract;
mod rows;

pub use asking::{Asking, TestKind};
pub use extract::extract;
pub use rows::CodeTests;
pub use stapo_sandbox::{Checks, End, Layers, Level, SUBCOMMAND, launch};

use super::judged::Judged;
use super::spec::{CodeReward, CodeSpec};
use crate::run::restart;
use crate::tasks::error::TaskError;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use stapo_core::{Problem, ProgramEnd, ProgramRun, Verdict};
use stapo_sandbox::{Outcome, Pool, Request, SandboxError, Settings, Tested, Trial};
use std::collections::HashSet;

/// What the tests found about a response.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CodeVerdict {
    /// Whether the program passed all tests.
    pub is_right: bool,
    /// The share of passed tests, those aside that the prompt may show.
    pub share_passed: f64,
    /// All tests passed, or the first that did not, or the limit that was reached.
    pub reason: String,
    /// The first test that failed, with what happened instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing_test: Option<String>,
    /// The program; `None` for a response that holds none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// What the program printed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub printed: String,
    /// The processor time of the program.
    pub cpu_seconds: f64,
    pub end: End,
}

impl CodeVerdict {
    /// What records hold of it.
    fn into_run(self) -> ProgramRun {
        let end = match (&self.program, &self.end) {
            (None, _) => ProgramEnd::NoProgram,
            _ if self.is_right => ProgramEnd::Passed,
            (_, End::Finished) => ProgramEnd::FailedTest,
            (_, End::CpuTime | End::WallTime) => ProgramEnd::TimeOut,
            (_, End::Memory) => ProgramEnd::Memory,
            (_, End::Output) => ProgramEnd::Output,
            (_, End::Processes) => ProgramEnd::Processes,
            (_, End::FileSize) => ProgramEnd::FileSize,
            (_, End::Exited(_) | End::Raised(_) | End::Signal(_) | End::NotBuilt(_)) => ProgramEnd::Crashed,
        };
        let Self { failing_test, printed, cpu_seconds, .. } = self;
        ProgramRun { source: self.program.unwrap_or_default(), end, failing_test, printed, cpu_seconds }
            .bounded()
    }
}

/// Runs the tests of rows against responses.
pub struct CodeJudge {
    pool: Pool,
    spec: CodeSpec,
    /// Responses, by problem, whose programs went over a limit of time when the run was first made. They are not run again:
    /// a faster machine might find another verdict.
    time_outs: HashSet<(String, String)>,
}

impl CodeJudge {
    /// Starts the interpreters, so that what this machine lacks is found before sampling.
    pub fn open(spec: &CodeSpec) -> Result<Self, TaskError> {
        let settings = Settings {
            python: spec.python.clone(),
            imports: spec.imports.clone(),
            limits: spec.limits,
            seed: spec.seed,
            clock: spec.clock,
            language: spec.language.clone(),
            unsafe_code: spec.unsafe_code,
            ..Settings::default()
        };
        let pool = Pool::open(settings, restart::command).map_err(|error| refused(&error, "at the start"))?;
        Ok(Self { pool, spec: spec.clone(), time_outs: HashSet::new() })
    }

    /// What keeps programs apart on this machine.
    pub fn layers(&self) -> &Layers {
        self.pool.layers()
    }

    /// One verdict per response, in order.
    pub fn judge(&self, samples: &[(&str, &CodeTests)]) -> Result<Vec<CodeVerdict>, TaskError> {
        let programs: Vec<Option<String>> = samples
            .iter()
            .map(|(response, tests)| extract(response, self.spec.style, &tests.prompt))
            .collect();
        let trials: Vec<Trial> = programs
            .iter()
            .zip(samples)
            .filter_map(|(program, (_, tests))| {
                Some(Trial { source: program.clone()?, checks: tests.checks.clone() })
            })
            .collect();
        let tested =
            self.pool.test(&trials).map_err(|error| refused(&error, "while programs were tested"))?;
        let mut tested = tested.into_iter();
        let verdict = |program: Option<String>| match program {
            None => CodeVerdict {
                is_right: false,
                share_passed: 0.0,
                reason: "the response holds no program".into(),
                failing_test: None,
                program: None,
                printed: String::new(),
                cpu_seconds: 0.0,
                end: End::Finished,
            },
            Some(program) => {
                let tested = tested.next().expect("one result for each program");
                self.verdict(program, tested)
            }
        };
        Ok(programs.into_iter().map(verdict).collect())
    }

    /// Runs programs with their standard inputs; outcomes have the order of the programs.
    pub fn run(&self, programs: &[(String, String)]) -> Result<Vec<Outcome>, TaskError> {
        let requests: Vec<Request> =
            programs.iter().map(|(source, stdin)| Request { source, stdin }).collect();
        self.pool.run(&requests).map_err(|error| refused(&error, "while programs ran"))
    }

    fn verdict(&self, program: String, tested: Tested) -> CodeVerdict {
        let Tested { tests, outcome } = tested;
        let failing_test = tests.iter().find(|test| !test.passed).map(|test| test.message.clone());
        let is_right = failing_test.is_none() && !tests.is_empty();
        let n_visible = if self.spec.visible_tests < tests.len() { self.spec.visible_tests } else { 0 };
        let hidden = &tests[n_visible..];
        let n_passed = hidden.iter().filter(|test| test.passed).count();
        CodeVerdict {
            is_right,
            // How many tests a program passes in a given time depends on the machine.
            share_passed: if outcome.end.is_time_out() {
                0.0
            } else {
                n_passed as f64 / hidden.len().max(1) as f64
            },
            reason: failing_test.clone().unwrap_or_else(|| match tests.len() {
                1 => "passed the test".into(),
                n => format!("passed all {n} tests"),
            }),
            failing_test,
            program: Some(program),
            printed: [outcome.stdout, outcome.stderr].concat(),
            cpu_seconds: outcome.cpu_seconds,
            end: outcome.end,
        }
    }

    /// The judgements of samples whose rows hold the tests.
    pub(super) fn judge_samples<'a>(
        &self,
        samples: &[(&Problem, &str)],
        row_of: &dyn Fn(&str) -> Option<&'a Map<String, Value>>,
    ) -> Result<Vec<Judged>, TaskError> {
        let tests = samples.iter().map(|(problem, _)| {
            let row = row_of(&problem.id).ok_or("no row of a data file holds its tests".to_string());
            row.and_then(CodeTests::from_row).map_err(|problem_of_row| {
                TaskError::setting(
                    "verifier",
                    format!("problem {:?}: {problem_of_row}", problem.id),
                    "the verifier `code` judges problems of a data file",
                )
            })
        });
        let tests = tests.collect::<Result<Vec<_>, _>>()?;
        let is_known = |(problem, response): &(&Problem, &str)| {
            !self.time_outs.is_empty()
                && self.time_outs.contains(&(problem.id.clone(), (*response).to_string()))
        };
        let run = samples.iter().zip(&tests).filter(|(sample, _)| !is_known(sample));
        let pairs: Vec<(&str, &CodeTests)> = run.map(|((_, response), tests)| (*response, tests)).collect();
        let mut verdicts = self.judge(&pairs)?.into_iter();
        let judged = samples.iter().zip(&tests).map(|(sample, tests)| {
            let verdict = if is_known(sample) {
                CodeVerdict {
                    is_right: false,
                    share_passed: 0.0,
                    reason: "went over a limit of time when the run was made".into(),
                    failing_test: None,
                    program: extract(sample.1, self.spec.style, &tests.prompt),
                    printed: String::new(),
                    cpu_seconds: 0.0,
                    end: End::CpuTime,
                }
            } else {
                verdicts.next().expect("one verdict for each program that ran")
            };
            self.judged(verdict)
        });
        Ok(judged.collect())
    }

    /// Takes over responses, by problem, whose programs went over a limit of time.
    pub(crate) fn remember_time_outs(&mut self, time_outs: Vec<(String, String)>) {
        self.time_outs.extend(time_outs);
    }

    fn judged(&self, verdict: CodeVerdict) -> Judged {
        let named = match (&verdict.program, verdict.is_right) {
            (None, _) => Verdict::NoAnswer,
            (_, true) => Verdict::Right,
            _ if verdict.end.is_time_out() => Verdict::OverBudget,
            _ => Verdict::Wrong,
        };
        let reward = (self.spec.reward == CodeReward::Share).then_some(verdict.share_passed);
        let reason = verdict.reason.clone();
        let answer = verdict.program.clone();
        let program = Some(Box::new(verdict.into_run()));
        Judged { reward, program, ..Judged::new(named, answer, reason) }
    }

    /// What the user should know about how programs are kept apart.
    pub fn warnings(&self) -> Vec<String> {
        layer_warnings(self.layers())
    }
}

/// What the user should know about the layers that keep programs apart.
pub(crate) fn layer_warnings(layers: &Layers) -> Vec<String> {
    match layers.level {
        Level::Namespaces => Vec::new(),
        Level::Filters => vec![format!(
            "programs of the model run without namespaces ({}): seccomp and Landlock keep them from files, sockets and other processes; they can see process numbers and file names",
            layers.without_namespaces.as_deref().unwrap_or("not asked for")
        )],
        Level::None => vec![
            "programs of the model run with limits only, as `unsafe_code` allows: they can read and write what you can"
                .into(),
        ],
    }
}

pub(crate) fn refused(error: &SandboxError, place: &str) -> TaskError {
    TaskError::Verifier {
        program: "code".into(),
        place: place.into(),
        problem: error.problem.clone(),
        remedy: error.remedy.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_say_how_a_program_ended() {
        let ended = |end: End, is_right: bool, program: Option<&str>| {
            let verdict = CodeVerdict {
                is_right,
                share_passed: 0.0,
                reason: String::new(),
                failing_test: None,
                program: program.map(str::to_string),
                printed: String::new(),
                cpu_seconds: 0.5,
                end,
            };
            verdict.into_run().end
        };
        for (end, expected) in [
            (End::Finished, ProgramEnd::FailedTest),
            (End::CpuTime, ProgramEnd::TimeOut),
            (End::WallTime, ProgramEnd::TimeOut),
            (End::Memory, ProgramEnd::Memory),
            (End::Output, ProgramEnd::Output),
            (End::Processes, ProgramEnd::Processes),
            (End::FileSize, ProgramEnd::FileSize),
            (End::Exited(1), ProgramEnd::Crashed),
            (End::Raised("ValueError".into()), ProgramEnd::Crashed),
            (End::Signal(11), ProgramEnd::Crashed),
        ] {
            assert_eq!(ended(end, false, Some("x = 1")), expected);
        }
        // A program that passed its tests may end as it likes afterwards.
        assert_eq!(ended(End::Exited(1), true, Some("x = 1")), ProgramEnd::Passed);
        assert_eq!(ended(End::Finished, false, None), ProgramEnd::NoProgram);
    }
}
