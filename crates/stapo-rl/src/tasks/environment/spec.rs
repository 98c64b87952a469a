//! The keys of an environment in a config.

use crate::reward::spec::{CommandSpec, ProcessLimits, default_python};
use crate::tasks::tools::{CallFormat, ToolSpec, default_workers};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stapo_core::settings::{self, SettingsError};
use std::path::PathBuf;
use toml::{Table, Value};

/// What answers the policy between its turns: `kind` and the keys of that kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum EnvironmentSpec {
    /// Tools that the policy calls. A turn without calls, or a call of `finish`, ends the episode, and the task's verifier
    /// judges the answer.
    Tools(ToolsSpec),
    /// A class of a Python file with `reset(row)` and `step(message)`.
    Python(ClassSpec),
    /// A program that reads the turns so far as one line of JSON and answers with another.
    Command(ProgramSpec),
    /// A game: the policy guesses the number of a task of kind `guess` and learns whether it is higher or lower.
    Guess(GuessWords),
}

/// Tools, and how the policy calls them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ToolsSpec {
    /// The tools, at least one.
    pub tools: Vec<ToolSpec>,
    /// How the policy writes calls.
    #[serde(default)]
    pub format: CallFormat,
    /// The role of messages with observations; by default that of the format: `tool`, `ipython` for `llama3`, or `user`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
}

impl ToolsSpec {
    pub(super) fn role(&self) -> &str {
        self.role.as_deref().unwrap_or(match self.format {
            CallFormat::Hermes => "tool",
            CallFormat::Llama3 => "ipython",
            CallFormat::PythonBlock | CallFormat::Plain => "user",
        })
    }
}

/// A class of the user's. Every episode has an object of it: `reset(row)` once, then `step(message)` for every turn of the
/// policy. `step` returns the next observation, or `(observation, reward, done)`, or a dict with these keys and
/// `verdict`, `answer` and `reason`. An object may be made again, and then gets the earlier messages once more, so a
/// step must depend on the row and the messages alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ClassSpec {
    /// The Python file.
    pub file: PathBuf,
    /// The name of the class in the file.
    #[serde(default = "default_class")]
    pub class: String,
    /// The interpreter: a path, or a name on the PATH.
    #[serde(default = "default_python")]
    pub python: PathBuf,
    /// Processes that answer turns at the same time.
    #[serde(default = "default_workers")]
    pub workers: usize,
    #[serde(flatten)]
    pub limits: ProcessLimits,
}

/// A program of the user's. For each turn of the policy the program reads one line `{"episode", "id", "prompt",
/// "reference", "row", "turns"}`, where `turns` has the texts of all turns so far, and writes one line
/// `{"observation": "..", "reward": 0.5, "done": false}`; with `done`, also `verdict`, `answer` and `reason`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ProgramSpec {
    /// The program: a path, or a name on the PATH.
    pub program: PathBuf,
    /// The arguments of the program.
    #[serde(default)]
    pub args: Vec<String>,
    /// Processes that answer turns at the same time.
    #[serde(default = "default_workers")]
    pub workers: usize,
    #[serde(flatten)]
    pub limits: ProcessLimits,
}

/// The observations of the game.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GuessWords {
    /// After a guess below the number.
    pub higher: String,
    /// After a guess above the number.
    pub lower: String,
    /// After a turn without a number.
    pub unread: String,
}

impl Default for GuessWords {
    fn default() -> Self {
        Self { higher: "higher".into(), lower: "lower".into(), unread: "no number".into() }
    }
}

/// An environment under its key, by which messages name it.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    environment: EnvironmentSpec,
}

fn entry((key, value): (&str, &str)) -> (String, Value) {
    (key.to_string(), Value::String(value.to_string()))
}

fn default_class() -> String {
    "Environment".into()
}

impl EnvironmentSpec {
    /// The tools of a command line: names with commas between them, such as `calculator,search:facts.txt`, or the table of an
    /// environment as in a config; `None` for `none`.
    pub fn of_tools(text: &str) -> Result<Option<Self>, SettingsError> {
        if text == "none" {
            return Ok(None);
        }
        let table = if text.trim_start().starts_with('{') {
            settings::parse(&format!("environment = {text}"))?
        } else {
            let tool = |name: &str| match name.split_once(':') {
                Some((kind, path)) => Table::from_iter([("kind", kind), ("path", path)].map(entry)),
                None => Table::from_iter([entry(("kind", name))]),
            };
            let tools = text.split(',').map(|name| Value::Table(tool(name.trim()))).collect();
            let environment =
                Table::from_iter([entry(("kind", "tools")), ("tools".to_string(), Value::Array(tools))]);
            Table::from_iter([("environment".to_string(), Value::Table(environment))])
        };
        Ok(Some(settings::read::<Named>("tools", table)?.environment))
    }

    /// The kind of the environment, as configs name it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Tools(_) => "tools",
            Self::Python(_) => "python",
            Self::Command(_) => "command",
            Self::Guess(_) => "guess",
        }
    }

    /// The programs that the environment starts outside of the sandbox, each with a name for messages.
    pub fn programs(&self) -> Vec<(String, CommandSpec)> {
        match self {
            Self::Tools(spec) => {
                let numbered = spec.tools.iter().enumerate();
                numbered
                    .filter_map(|(idx, tool)| Some((format!("tool {}", idx + 1), tool.program()?)))
                    .collect()
            }
            Self::Python(spec) => vec![("environment".into(), spec.command())],
            Self::Command(spec) => vec![("environment".into(), spec.command())],
            Self::Guess(_) => Vec::new(),
        }
    }

    /// Whether the environment judges episodes, and not the task's verifiers.
    pub fn judges(&self) -> bool {
        !matches!(self, Self::Tools(_))
    }

    /// The longest time of an answer in seconds; 0 if answers take no time that counts.
    pub(crate) fn answer_limit(&self) -> f64 {
        match self {
            Self::Tools(spec) => spec.tools.iter().map(ToolSpec::call_limit).fold(0.0, f64::max),
            Self::Python(spec) => spec.limits.sample_seconds,
            Self::Command(spec) => spec.limits.sample_seconds,
            Self::Guess(_) => 0.0,
        }
    }

    /// The answers that its programs give at the same time; `None` if the machine decides.
    pub(crate) fn answers_at_once(&self) -> Option<usize> {
        match self {
            Self::Tools(spec) => spec.tools.iter().filter_map(ToolSpec::workers).min(),
            Self::Python(spec) => Some(spec.workers),
            Self::Command(spec) => Some(spec.workers),
            Self::Guess(_) => None,
        }
    }

    /// The role of messages with observations.
    pub(crate) fn observation_role(&self) -> &str {
        match self {
            Self::Tools(spec) => spec.role(),
            Self::Python(_) | Self::Command(_) | Self::Guess(_) => "user",
        }
    }

    /// Whether answers need the rows of a data file.
    pub(crate) fn reads_rows(&self) -> bool {
        matches!(self, Self::Python(_) | Self::Command(_))
    }
}

impl ClassSpec {
    pub(super) fn command(&self) -> CommandSpec {
        CommandSpec::driver(&self.python, &self.file, &self.class, "environment", self.limits.clone())
    }
}

impl ProgramSpec {
    pub(super) fn command(&self) -> CommandSpec {
        let (program, args, limits) = (self.program.clone(), self.args.clone(), self.limits.clone());
        CommandSpec { program, args, limits }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> EnvironmentSpec {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn observations_have_the_role_that_the_format_of_calls_is_trained_with() {
        let role = |format: &str| {
            let spec = read(&format!("kind = \"tools\"\ntools = [{{kind = \"calculator\"}}]\n{format}"));
            spec.observation_role().to_string()
        };
        for (format, expected) in [
            ("", "tool"),
            ("format = \"hermes\"", "tool"),
            ("format = \"llama3\"", "ipython"),
            ("format = \"python_block\"", "user"),
            ("format = \"plain\"", "user"),
            ("format = \"plain\"\nrole = \"function\"", "function"),
        ] {
            assert_eq!(role(format), expected, "{format}");
        }
        assert_eq!(read("kind = \"guess\"").observation_role(), "user");
    }

    /// The slowest tool says how long an answer may take, and the one of the fewest processes how many come at once.
    #[test]
    fn tools_answer_as_slowly_as_the_slowest_and_as_few_at_once_as_the_fewest() {
        let program = |name: &str, workers: usize, seconds: f64| {
            format!(
                "{{kind = \"command\", name = \"{name}\", description = \"d\", program = \"p\", workers = {workers}, sample_seconds = {seconds:?}}}"
            )
        };
        let tools = |tools: &[String]| read(&format!("kind = \"tools\"\ntools = [{}]", tools.join(", ")));
        let calculator = "{kind = \"calculator\"}".to_string();
        let alone = tools(std::slice::from_ref(&calculator));
        assert_eq!((alone.answer_limit(), alone.answers_at_once()), (0.0, None));
        let several = tools(&[program("a", 8, 2.5), calculator, program("b", 3, 0.5)]);
        assert_eq!((several.answer_limit(), several.answers_at_once()), (2.5, Some(3)));
        let named: Vec<String> = several.programs().into_iter().map(|(name, _)| name).collect();
        assert_eq!(named, ["tool 1", "tool 3"]);
        let class = read("kind = \"python\"\nfile = \"e.py\"\nworkers = 7\nsample_seconds = 4.0");
        assert_eq!((class.answer_limit(), class.answers_at_once()), (4.0, Some(7)));
        let served = read("kind = \"command\"\nprogram = \"p\"");
        assert_eq!((served.answer_limit(), served.answers_at_once()), (30.0, Some(4)));
        assert_eq!(read("kind = \"guess\"").answers_at_once(), None);
        let reads = |spec: &EnvironmentSpec| (spec.judges(), spec.reads_rows(), spec.programs().len());
        assert_eq!([&class, &served].map(reads), [(true, true, 1); 2]);
        assert_eq!(reads(&several), (false, false, 2));
        assert_eq!(reads(&read("kind = \"guess\"")), (true, false, 0));
    }

    #[test]
    fn tools_of_a_command_line_are_names_or_a_table() {
        let tools = |text: &str| match EnvironmentSpec::of_tools(text).unwrap() {
            Some(EnvironmentSpec::Tools(spec)) => spec.tools,
            other => panic!("{other:?}"),
        };
        assert_eq!(EnvironmentSpec::of_tools("none"), Ok(None));
        let both = tools("calculator, search:facts.txt");
        assert_eq!(both[0], ToolSpec::Calculator);
        let ToolSpec::Search(search) = &both[1] else { panic!("{both:?}") };
        assert_eq!((search.path.to_str(), search.results), (Some("facts.txt"), 3));
        assert_eq!(tools("{kind = \"tools\", tools = [{kind = \"finish\"}]}"), [ToolSpec::Finish]);
        assert!(EnvironmentSpec::of_tools("abacus").is_err());
    }
}
