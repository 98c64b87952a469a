//! The keys of a tool in a config.

use super::calculator::Calculator;
use super::finish::Finish;
use super::own::Own;
use super::python::Python;
use super::search::Search;
use super::{Tool, ToolSchema};
use crate::reward::spec::{CommandSpec, ProcessLimits, default_python};
use crate::reward::{Programs, check_program};
use crate::tasks::error::TaskError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use stapo_sandbox::Limits;
use std::path::PathBuf;

/// A tool that the policy may call: `kind` and the keys of that kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ToolSpec {
    /// Exact arithmetic: `calculator(expression)`.
    Calculator,
    /// Runs Python in the sandbox and answers what the program printed: `python(code)`.
    Python(PythonToolSpec),
    /// The best paragraphs of a text file for a query, by BM25: `search(query)`.
    Search(SearchSpec),
    /// Ends the episode with an answer: `finish(answer)`.
    Finish,
    /// A function of a Python file, whose type hints and docstring are its schema.
    Function(FunctionSpec),
    /// A program that answers each line of JSON with a line.
    Command(OwnCommandSpec),
}

/// What a program sees of earlier programs of its episode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Session {
    /// Nothing.
    #[default]
    None,
    /// What they defined: the programs of earlier calls run again before this one, and only the output
    /// of the last is the answer. Limits count for all of them together, so a program that went over its time ends the session.
    Episode,
}

/// How the tool `python` runs programs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
#[serde(default)]
pub struct PythonToolSpec {
    /// What a program sees of earlier programs of its episode.
    pub session: Session,
    /// The interpreter: a path, or a name on the PATH.
    pub python: PathBuf,
    /// Modules that are imported once, before the first program.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub imports: Vec<String>,
    #[serde(flatten)]
    pub limits: Limits,
    /// Runs programs without isolation, with limits only, if this machine cannot isolate them.
    pub unsafe_code: bool,
}

impl Default for PythonToolSpec {
    fn default() -> Self {
        Self {
            session: Session::default(),
            python: default_python(),
            imports: Vec::new(),
            limits: Limits::default(),
            unsafe_code: false,
        }
    }
}

/// A text file to search. Blank lines separate its paragraphs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SearchSpec {
    /// The text file.
    pub path: PathBuf,
    /// The paragraphs of an answer.
    #[serde(default = "default_results")]
    pub results: usize,
}

fn default_results() -> usize {
    3
}

/// A tool of the user's: a function of a Python file. The function keeps no state between calls, since several processes
/// answer them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct FunctionSpec {
    /// The Python file.
    pub file: PathBuf,
    /// The function, which is also the name of the tool.
    pub function: String,
    /// The interpreter: a path, or a name on the PATH.
    #[serde(default = "default_python")]
    pub python: PathBuf,
    /// Processes that answer calls at the same time.
    #[serde(default = "default_workers")]
    pub workers: usize,
    #[serde(flatten)]
    pub limits: ProcessLimits,
}

/// A tool of the user's: a program that reads `{"call": 0, "tool": .., "arguments": {..}}` and writes
/// `{"text": ".."}` or `{"error": ".."}`, a line for each call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct OwnCommandSpec {
    /// The name by which the policy calls the tool.
    pub name: String,
    /// What the tool does, for the policy.
    pub description: String,
    /// The arguments by name, each with its JSON Schema. All are required.
    #[serde(default)]
    pub parameters: Map<String, Value>,
    /// The program: a path, or a name on the PATH.
    pub program: PathBuf,
    /// The arguments of the program.
    #[serde(default)]
    pub args: Vec<String>,
    /// Processes that answer calls at the same time.
    #[serde(default = "default_workers")]
    pub workers: usize,
    #[serde(flatten)]
    pub limits: ProcessLimits,
}

pub(crate) fn default_workers() -> usize {
    4
}

impl FunctionSpec {
    fn command(&self) -> CommandSpec {
        CommandSpec::driver(&self.python, &self.file, &self.function, "tool", self.limits.clone())
    }
}

impl OwnCommandSpec {
    fn command(&self) -> CommandSpec {
        let (program, args, limits) = (self.program.clone(), self.args.clone(), self.limits.clone());
        CommandSpec { program, args, limits }
    }

    fn schema(&self) -> ToolSchema {
        let required: Vec<&String> = self.parameters.keys().collect();
        ToolSchema {
            name: self.name.clone(),
            description: self.description.clone(),
            parameters: json!({"type": "object", "properties": self.parameters, "required": required}),
        }
    }
}

impl ToolSpec {
    /// The program that the tool starts outside of the sandbox; `None` if it starts none.
    pub fn program(&self) -> Option<CommandSpec> {
        match self {
            Self::Calculator | Self::Search(_) | Self::Finish => None,
            // An interpreter on the PATH is the user's own, and all that it runs is jailed.
            Self::Python(spec) => (spec.python.components().count() > 1 || spec.unsafe_code)
                .then(|| CommandSpec::new(&spec.python)),
            Self::Function(spec) => Some(spec.command()),
            Self::Command(spec) => Some(spec.command()),
        }
    }

    /// The longest time of a call in seconds; 0 for tools inside the program.
    pub(crate) fn call_limit(&self) -> f64 {
        match self {
            Self::Calculator | Self::Search(_) | Self::Finish => 0.0,
            Self::Python(spec) => spec.limits.wall().as_secs_f64(),
            Self::Function(spec) => spec.limits.sample_seconds,
            Self::Command(spec) => spec.limits.sample_seconds,
        }
    }

    /// Processes that answer calls at the same time; `None` if the machine decides.
    pub(crate) fn workers(&self) -> Option<usize> {
        match self {
            Self::Calculator | Self::Search(_) | Self::Finish | Self::Python(_) => None,
            Self::Function(spec) => Some(spec.workers),
            Self::Command(spec) => Some(spec.workers),
        }
    }

    pub(super) fn open(&self, programs: Programs) -> Result<Box<dyn Tool>, TaskError> {
        Ok(match self {
            Self::Calculator => Box::new(Calculator::new()),
            Self::Finish => Box::new(Finish::new()),
            Self::Search(spec) => Box::new(Search::open(spec)?),
            Self::Python(spec) => {
                if let Some(command) = self.program() {
                    check_program(&command, programs)?;
                }
                Box::new(Python::open(spec)?)
            }
            Self::Function(spec) => Box::new(Own::function(spec.command(), spec.workers, programs)?),
            Self::Command(spec) => {
                Box::new(Own::command(spec.schema(), spec.command(), spec.workers, programs)?)
            }
        })
    }
}
