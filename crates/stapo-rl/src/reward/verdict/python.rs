//! A Python function as verifier: what the trainer sends to the interpreter, and how it reads the answers.
//!
//! The interpreter runs a driver that the trainer sends as the first line, so that nothing is written to disk. The driver
//! loads the user's file, answers once that the function is there, and from then on answers each request line with one
//! line: the verdict, what the function printed, or the traceback of what it raised.

use super::lines::{read_reply, shortened};
use crate::reward::judged::Judged;
use crate::reward::spec::PythonSpec;
use serde::Deserialize;
use serde_json::value::Value;
use std::sync::OnceLock;

/// What the interpreter runs.
const DRIVER: &str = include_str!("driver.py");

static SHOW: OnceLock<fn(&str)> = OnceLock::new();

/// Names the function that shows people what reward functions print, line by line. The first call in a process counts;
/// without one, nothing is shown.
pub fn show_prints(show: fn(&str)) {
    SHOW.get_or_init(|| show);
}

/// The problem and the remedy of a failure.
type Problem = (String, String);

/// A Python file and function that an interpreter serves.
pub(super) struct Worker {
    file: String,
    function: String,
}

#[derive(Deserialize)]
struct Greeting {
    error: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FunctionReply {
    sample: u64,
    id: String,
    /// What the function returned, as a verifier's line.
    reply: Option<Value>,
    #[serde(default)]
    printed: String,
    /// Why there is no reply: a traceback, or a value that is no reward.
    error: Option<String>,
}

/// The first line that the interpreter reads.
pub(crate) fn greeting() -> Vec<u8> {
    let mut line = Value::from(DRIVER).to_string().into_bytes();
    line.push(b'\n');
    line
}

/// Reads the driver's answer to the greeting.
pub(super) fn read_greeting(line: &[u8]) -> Result<(), Problem> {
    match serde_json::from_slice::<Greeting>(line) {
        Ok(Greeting { error: None }) => Ok(()),
        Ok(Greeting { error: Some(error) }) => {
            let remedy = "file and function of the verifier: a Python file that loads, and a function in it; python = \"PATH\" names another interpreter";
            Err((error, remedy.into()))
        }
        Err(_) => Err((format!("wrote {}", shortened(line)), "python: an interpreter of Python 3".into())),
    }
}

impl Worker {
    pub(super) fn new(spec: &PythonSpec) -> Self {
        Self { file: spec.file.display().to_string(), function: spec.function.clone() }
    }

    /// The file and the function, for messages.
    pub(super) fn name(&self) -> String {
        format!("{}:{}", self.file, self.function)
    }

    /// Reads the reply to a request; `sample_name` names the sample in what is shown.
    pub(super) fn read_reply(
        &self,
        line: &[u8],
        id: &str,
        sample: u64,
        sample_name: &str,
    ) -> Result<Judged, Problem> {
        let remedy =
            || format!("{} returns a number, True, False, or a dict with reward or verdict", self.function);
        let answer: FunctionReply = serde_json::from_slice(line)
            .map_err(|error| (format!("wrote {}: {error}", shortened(line)), remedy()))?;
        for text in answer.printed.lines() {
            self.show(&format!("{sample_name}: {text}"));
        }
        if answer.sample != sample || answer.id != id {
            return Err((format!("answered sample {} ({:?})", answer.sample, answer.id), remedy()));
        }
        match (answer.reply, answer.error) {
            (Some(reply), None) => {
                read_reply(reply.to_string().as_bytes(), id, sample).map_err(|problem| (problem, remedy()))
            }
            (_, error) => Err((error.unwrap_or_else(|| "no reply".into()), remedy())),
        }
    }

    /// Shows people a line about this function.
    pub(super) fn show(&self, text: &str) {
        if let Some(show) = SHOW.get() {
            show(&format!("{}, {text}", self.name()));
        }
    }
}
