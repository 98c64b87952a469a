//! The tool `python`: programs in the sandbox.

use super::calls::as_text;
use super::{Observation, PythonToolSpec, Session, Tool, ToolSchema};
use crate::reward::code::{End, layer_warnings, refused};
use crate::run::restart;
use crate::tasks::error::TaskError;
use serde_json::{Map, Value};
use stapo_sandbox::{Pool, Request, Settings};

/// Runs the programs of a session, given as JSON on standard input, and shows the output of the last.
const RUNNER: &str = include_str!("runner.py");
/// Modules of the runner.
const RUNNER_IMPORTS: [&str; 5] = ["ast", "contextlib", "io", "json", "sys"];

pub(super) struct Python {
    schema: ToolSchema,
    session: Session,
    pool: Pool,
}

impl Python {
    pub(super) fn open(spec: &PythonToolSpec) -> Result<Self, TaskError> {
        let imports = RUNNER_IMPORTS.map(str::to_string).into_iter().chain(spec.imports.iter().cloned());
        let settings = Settings {
            python: spec.python.clone(),
            imports: imports.collect(),
            limits: spec.limits,
            unsafe_code: spec.unsafe_code,
            ..Settings::default()
        };
        let pool = Pool::open(settings, restart::command).map_err(|error| refused(&error, "at the start"))?;
        let description = match spec.session {
            Session::None => {
                "Runs a Python program and returns what it prints. Programs do not see each other."
            }
            Session::Episode => {
                "Runs Python and returns what it prints. Later calls see what earlier calls have defined."
            }
        };
        let schema = ToolSchema::of_strings("python", description, &[("code", "the program")]);
        Ok(Self { schema, session: spec.session, pool })
    }
}

impl Tool for Python {
    fn schema(&self) -> &ToolSchema {
        &self.schema
    }

    fn call(
        &self,
        arguments: &Map<String, Value>,
        earlier: &[Map<String, Value>],
    ) -> Result<Observation, TaskError> {
        let code = |arguments: &Map<String, Value>| arguments.get("code").map(as_text).unwrap_or_default();
        let mut programs: Vec<String> = match self.session {
            Session::None => Vec::new(),
            Session::Episode => earlier.iter().map(code).collect(),
        };
        programs.push(code(arguments));
        let stdin = Value::from(programs).to_string();
        let outcomes = self
            .pool
            .run(&[Request { source: RUNNER, stdin: &stdin }])
            .map_err(|error| refused(&error, "in a call"))?;
        let Some(outcome) = outcomes.into_iter().next() else {
            return Ok(Observation::failure("error: the program has no result"));
        };
        let (printed, complaint) = (outcome.stdout.trim_end(), outcome.stderr.trim_end());
        let mut text = [printed, complaint].join("\n").trim_matches('\n').to_string();
        match &outcome.end {
            End::Finished => {}
            // The runner has printed what the program raised.
            End::Exited(_) if !text.is_empty() => {}
            end => text = format!("{text}\nerror: the program {end}").trim_start().to_string(),
        }
        Ok(Observation {
            text,
            failed: outcome.end != End::Finished,
            timed_out: outcome.end.is_time_out(),
            seconds: 0.0,
        })
    }

    fn warnings(&self) -> Vec<String> {
        layer_warnings(self.pool.layers())
    }
}
