//! The keys of a verifier in a config.

use serde::{Deserialize, Serialize};
use stapo_verify::{Fallback, Form, Mode, Order, Rounding, Rules};
use std::path::PathBuf;

/// How a response becomes a verdict.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum VerifierSpec {
    /// The math grader with one of its rules.
    Rule(RuleSpec),
    /// The answer is an expression over given numbers that reaches a target; references have the form `2,3,5,7:24`.
    Countdown(CountdownRule),
    /// A program that keeps running and writes one line of JSON per sample.
    Command(CommandSpec),
    /// A function of a Python file, called by a process of the user's interpreter.
    Python(PythonSpec),
}

impl VerifierSpec {
    /// The program that the verifier starts; `None` for a rule.
    pub fn program(&self) -> Option<CommandSpec> {
        match self {
            Self::Rule(_) | Self::Countdown(_) => None,
            Self::Command(command) => Some(command.clone()),
            Self::Python(python) => Some(python.command()),
        }
    }
}

impl Default for VerifierSpec {
    fn default() -> Self {
        Self::Rule(RuleSpec::default())
    }
}

/// How the expression in the box is judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CountdownRule {
    pub number_use: NumberUse,
}

/// How often each given number must be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NumberUse {
    #[default]
    ExactlyOnce,
    AtMostOnce,
}

/// The grader's settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RuleSpec {
    pub mode: Mode,
    pub order: Order,
    pub fallback: Fallback,
    /// Absent where the config does not name it, so that a config is written back as it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rounding: Option<Rounding>,
    /// Absent for the same reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub form: Option<Form>,
}

impl From<RuleSpec> for Rules {
    fn from(spec: RuleSpec) -> Self {
        let RuleSpec { mode, order, fallback, rounding, form } = spec;
        let (rounding, form) = (rounding.unwrap_or_default(), form.unwrap_or_default());
        Self { mode, order, fallback, rounding, form }
    }
}

/// An external verifier. For each sample the program reads one line `{"sample", "id", "prompt", "response",
/// "reference"}` from standard input and writes one line, in the same order: `{"verdict": "right"}` (or `wrong`,
/// `no_answer`, `unparsable`, `over_budget`), or `{"reward": 0.5}`, or both. A reward without a verdict means `right`
/// above 0 and `wrong` otherwise. The line may also hold `answer`, `reason`, `sample` (which counts from 0) and `id`.
/// The last two are compared with the request, so that a program that repeats `sample` cannot get out of step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommandSpec {
    pub program: PathBuf,
    #[serde(default)]
    pub args: Vec<String>,
    /// The longest wait for the next line.
    #[serde(default = "default_sample_seconds")]
    pub sample_seconds: f64,
    /// The longest wait for all samples of one call.
    #[serde(default = "default_batch_seconds")]
    pub batch_seconds: f64,
    /// The longest line that the program may write.
    #[serde(default = "default_max_line_bytes")]
    pub max_line_bytes: usize,
    /// Names of environment variables that the program gets besides PATH, HOME, LANG, LC_*, TMPDIR and TZ.
    #[serde(default)]
    pub env: Vec<String>,
    /// Whether the program may use the network.
    #[serde(default)]
    pub network: bool,
    /// Whether the program sees this machine's `/tmp` instead of a private one.
    #[serde(default)]
    pub shared_tmp: bool,
    /// The most address space of the program and of each of its children, in MiB; 0 for no limit.
    #[serde(default = "default_memory_mib")]
    pub memory_mib: u64,
    /// The largest file that the program may write, in MiB; 0 for no limit.
    #[serde(default = "default_file_mib")]
    pub file_mib: u64,
    /// The most files that the program may have open at once.
    #[serde(default = "default_open_files")]
    pub open_files: u64,
}

impl CommandSpec {
    /// A program with default limits.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
            sample_seconds: default_sample_seconds(),
            batch_seconds: default_batch_seconds(),
            max_line_bytes: default_max_line_bytes(),
            env: Vec::new(),
            network: false,
            shared_tmp: false,
            memory_mib: default_memory_mib(),
            file_mib: default_file_mib(),
            open_files: default_open_files(),
        }
    }
}

/// A function `reward(prompt, response, reference, row)` of a Python file, where `row` is the row of the data file. The
/// function returns a number (the reward), True or False (the verdict), or a dict with the keys of a program's line. With
/// `batch` it is called once for all samples of a step, with four lists, and returns a list. The keys below `batch` mean
/// what they mean for a program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PythonSpec {
    pub file: PathBuf,
    #[serde(default = "default_function")]
    pub function: String,
    /// The interpreter: a path, or a name on the PATH.
    #[serde(default = "default_python")]
    pub python: PathBuf,
    #[serde(default)]
    pub batch: bool,
    /// The longest wait for one sample; with `batch`, `batch_seconds` alone counts.
    #[serde(default = "default_sample_seconds")]
    pub sample_seconds: f64,
    /// The longest wait for all samples of one call, and for the file to be loaded.
    #[serde(default = "default_batch_seconds")]
    pub batch_seconds: f64,
    #[serde(default = "default_max_line_bytes")]
    pub max_line_bytes: usize,
    #[serde(default)]
    pub env: Vec<String>,
    #[serde(default)]
    pub network: bool,
    #[serde(default)]
    pub shared_tmp: bool,
    #[serde(default = "default_memory_mib")]
    pub memory_mib: u64,
    #[serde(default = "default_file_mib")]
    pub file_mib: u64,
    #[serde(default = "default_open_files")]
    pub open_files: u64,
}

/// What the interpreter runs: the driver, which the trainer sends as the first line of standard input.
const BOOTSTRAP: &str = "import json, sys; exec(json.loads(sys.stdin.readline()))";

impl PythonSpec {
    /// A function called `reward`, with default limits.
    pub fn new(file: impl Into<PathBuf>) -> Self {
        let CommandSpec {
            sample_seconds,
            batch_seconds,
            max_line_bytes,
            memory_mib,
            file_mib,
            open_files,
            ..
        } = CommandSpec::new("");
        Self {
            file: file.into(),
            function: default_function(),
            python: default_python(),
            batch: false,
            sample_seconds,
            batch_seconds,
            max_line_bytes,
            env: Vec::new(),
            network: false,
            shared_tmp: false,
            memory_mib,
            file_mib,
            open_files,
        }
    }

    /// The interpreter's process. The command line names the file, the function and how it is called, so that a
    /// permission and a hash of the command line are about these.
    pub fn command(&self) -> CommandSpec {
        let calls = if self.batch { "batch" } else { "sample" };
        let words = ["-c", BOOTSTRAP, &self.file.display().to_string(), &self.function, calls];
        CommandSpec {
            program: self.python.clone(),
            args: words.map(str::to_string).to_vec(),
            sample_seconds: if self.batch { self.batch_seconds } else { self.sample_seconds },
            batch_seconds: self.batch_seconds,
            max_line_bytes: self.max_line_bytes,
            env: self.env.clone(),
            network: self.network,
            shared_tmp: self.shared_tmp,
            memory_mib: self.memory_mib,
            file_mib: self.file_mib,
            open_files: self.open_files,
        }
    }
}

fn default_function() -> String {
    "reward".into()
}

fn default_python() -> PathBuf {
    "python3".into()
}

fn default_sample_seconds() -> f64 {
    30.0
}

fn default_batch_seconds() -> f64 {
    600.0
}

fn default_max_line_bytes() -> usize {
    1 << 20
}

fn default_memory_mib() -> u64 {
    32 << 10
}

fn default_file_mib() -> u64 {
    1024
}

fn default_open_files() -> u64 {
    1024
}
