//! The keys of a verifier in a config.

use super::judge::JudgeSpec;
use super::keep::KeepWeights;
use super::reward_model::RewardModelSpec;
pub use super::rule::RuleSpec;
use crate::tasks::error::TaskError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stapo_sandbox::{Clock, Language, Limits};
use std::path::{Path, PathBuf};

/// What the model of a verifier is.
pub const JUDGE: &str = "judge";
pub const REWARD_MODEL: &str = "reward model";

/// How a response becomes a verdict.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
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
    /// The response is a program, which must pass the tests of its row.
    Code(CodeSpec),
    /// A model judges, alone or together with the math grader.
    Judge(JudgeSpec),
    /// A reward model scores; the math grader decides the verdict.
    #[serde(rename = "reward-model")]
    RewardModel(RewardModelSpec),
}

impl VerifierSpec {
    /// The judge, for a verifier that is one.
    pub fn judge(&self) -> Option<&JudgeSpec> {
        match self {
            Self::Judge(judge) => Some(judge),
            _ => None,
        }
    }

    /// The reward model, for a verifier that is one.
    pub fn reward_model(&self) -> Option<&RewardModelSpec> {
        match self {
            Self::RewardModel(model) => Some(model),
            _ => None,
        }
    }

    /// The device that a judge or a reward model names.
    pub fn device(&self) -> Option<&str> {
        match self {
            Self::Judge(judge) => judge.device.as_deref(),
            Self::RewardModel(model) => model.device.as_deref(),
            _ => None,
        }
    }

    /// Where the weights of a judge or a reward model wait.
    pub fn keep(&self) -> KeepWeights {
        match self {
            Self::Judge(judge) => judge.keep,
            Self::RewardModel(model) => model.keep,
            _ => KeepWeights::Device,
        }
    }

    /// The model of a judge or a reward model: what it is, and its name.
    pub fn model(&self) -> Option<(&'static str, &str)> {
        match self {
            Self::Judge(judge) => Some((JUDGE, &judge.model)),
            Self::RewardModel(model) => Some((REWARD_MODEL, &model.model)),
            _ => None,
        }
    }

    pub(crate) fn model_mut(&mut self) -> Option<&mut String> {
        match self {
            Self::Judge(judge) => Some(&mut judge.model),
            Self::RewardModel(model) => Some(&mut model.model),
            _ => None,
        }
    }

    pub(crate) fn judge_mut(&mut self) -> Option<&mut JudgeSpec> {
        match self {
            Self::Judge(judge) => Some(judge),
            _ => None,
        }
    }

    /// The program that the verifier starts; `None` for a rule.
    pub fn program(&self) -> Option<CommandSpec> {
        match self {
            Self::Rule(_) | Self::Countdown(_) | Self::Judge(_) | Self::RewardModel(_) => None,
            Self::Command(command) => Some(command.clone()),
            Self::Python(python) => Some(python.command()),
            // An interpreter on the PATH is the user's own, and all that it runs is jailed.
            Self::Code(code) => {
                let is_named = code.python.components().count() == 1 && code.language.is_none();
                (!is_named || code.unsafe_code).then(|| CommandSpec::new(&code.python))
            }
        }
    }
}

/// Tests of programs. A row of the data file holds them: `test_list` (statements, MBPP), `test` with `entry_point`
/// (HumanEval), or `tests`, a list of `{args, expected}` with `entry_point`, or of `{input, output}` for standard input and
/// output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
#[serde(default)]
pub struct CodeSpec {
    /// Where the program is in a response.
    pub style: CodeStyle,
    /// The reward of a program that passes some tests.
    pub reward: CodeReward,
    /// The first tests of each row that the prompt may show. A program must pass them, and they do not count in the share of
    /// passed tests.
    pub visible_tests: usize,
    /// The interpreter of programs and tests: a path, or a name on the PATH.
    pub python: PathBuf,
    /// Modules that are imported once, before the first program.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub imports: Vec<String>,
    #[serde(flatten)]
    pub limits: Limits,
    /// The clock that programs read.
    pub clock: Clock,
    /// The seed of the randomness that programs get.
    pub seed: u64,
    /// A language other than Python, whose tests are pairs of standard input and output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub language: Option<Language>,
    /// Runs programs without isolation, with limits only, if this machine cannot isolate them.
    pub unsafe_code: bool,
}

impl Default for CodeSpec {
    fn default() -> Self {
        Self {
            style: CodeStyle::default(),
            reward: CodeReward::default(),
            visible_tests: 0,
            python: default_python(),
            imports: Vec::new(),
            limits: Limits::default(),
            clock: Clock::default(),
            seed: 0,
            language: None,
            unsafe_code: false,
        }
    }
}

/// Where the program is in a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CodeStyle {
    /// In the last fenced block.
    #[default]
    Block,
    /// The response continues the row's `prompt`, which begins the program.
    Complete,
    /// The whole response is the program.
    Whole,
}

/// The reward of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CodeReward {
    /// That of the verdict: all tests passed, or not.
    #[default]
    All,
    /// The share of passed tests.
    Share,
}

impl Default for VerifierSpec {
    fn default() -> Self {
        Self::Rule(RuleSpec::default())
    }
}

/// How the expression in the box is judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CountdownRule {
    /// How often each given number must be used.
    pub number_use: NumberUse,
}

/// How often each given number must be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NumberUse {
    /// Each number exactly once.
    #[default]
    ExactlyOnce,
    /// Each number once or not at all.
    AtMostOnce,
}

/// An external verifier. For each sample the program reads one line `{"sample", "id", "prompt", "response",
/// "reference"}` from standard input and writes one line, in the same order: `{"verdict": "right"}` (or `wrong`,
/// `no_answer`, `unparsable`, `over_budget`), or `{"reward": 0.5}`, or both. A reward without a verdict means `right`
/// above 0 and `wrong` otherwise. The line may also hold `answer`, `reason`, `sample` (which counts from 0) and `id`.
/// The last two are compared with the request, so that a program that repeats `sample` cannot get out of step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct CommandSpec {
    /// The program: a path, or a name on the PATH.
    pub program: PathBuf,
    /// The arguments of the program.
    #[serde(default)]
    pub args: Vec<String>,
    #[serde(flatten)]
    pub limits: ProcessLimits,
}

/// What the interpreter runs: the driver, which the trainer sends as the first line of standard input.
const BOOTSTRAP: &str = "import json, sys; exec(json.loads(sys.stdin.readline()))";

/// How an interpreter starts: isolated, so that it imports from its installation and from the folder that the driver adds,
/// not from the current folder, the user's packages or what the environment names; and without caches of bytecode, in which
/// other code than that of the source may lie.
const ISOLATED: [&str; 4] = ["-I", "-B", "-X", "pycache_prefix=/dev/null"];

impl CommandSpec {
    /// A program with default limits.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self { program: program.into(), args: Vec::new(), limits: ProcessLimits::default() }
    }

    /// An interpreter that serves a name in a Python file. The command line says the file, the name and what the driver
    /// does with it, so that a permission and a hash of the command line are about these.
    pub(crate) fn driver(python: &Path, file: &Path, name: &str, role: &str, limits: ProcessLimits) -> Self {
        let words = ["-c", BOOTSTRAP, &file.display().to_string(), name, role];
        Self { program: python.to_owned(), args: words.map(str::to_string).to_vec(), limits }
    }

    /// An interpreter as it is started.
    pub(crate) fn isolated(mut self) -> Self {
        self.args.splice(0..0, ISOLATED.map(str::to_string));
        self
    }
}

/// What the process of a verifier may take and see. The keys are in the table of the verifier;
/// [`settings::read`](stapo_core::settings::read) refuses unknown ones, which serde cannot do for keys of two structs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ProcessLimits {
    /// The longest wait for the verdict of the next sample, in seconds. A Python function that takes whole batches has
    /// `batch_seconds` instead.
    pub sample_seconds: f64,
    /// The longest wait for all samples of one call, and for a Python file to be loaded, in seconds.
    pub batch_seconds: f64,
    /// The longest line that the program may write.
    pub max_line_bytes: usize,
    /// Names of environment variables that the program gets besides PATH, HOME, LANG, LC_*, TMPDIR and TZ.
    pub env: Vec<String>,
    /// Whether the program may use the network.
    pub network: bool,
    /// Whether the program sees this machine's `/tmp` instead of a private one.
    pub shared_tmp: bool,
    /// The most address space of the program and of each of its children, in MiB; 0 for no limit.
    pub memory_mib: u64,
    /// The largest file that the program may write, in MiB; 0 for no limit.
    pub file_mib: u64,
    /// The most files that the program may have open at once.
    pub open_files: u64,
}

impl Default for ProcessLimits {
    fn default() -> Self {
        Self {
            sample_seconds: 30.0,
            batch_seconds: 600.0,
            max_line_bytes: 1 << 20,
            env: Vec::new(),
            network: false,
            shared_tmp: false,
            memory_mib: 32 << 10,
            file_mib: 1024,
            open_files: 1024,
        }
    }
}

impl ProcessLimits {
    /// Refuses limits under which no program can work.
    pub(crate) fn check(&self) -> Result<(), TaskError> {
        for (key, seconds) in [("sample_seconds", self.sample_seconds), ("batch_seconds", self.batch_seconds)]
        {
            if !(seconds > 0.0 && seconds <= 1e6) {
                return Err(TaskError::setting(
                    key,
                    format!("{seconds} s"),
                    "a time above 0 and up to 1e6 s",
                ));
            }
        }
        if self.max_line_bytes == 0 {
            return Err(TaskError::setting(
                "max_line_bytes",
                "0",
                "a verdict takes some 30 bytes; default 1 MiB",
            ));
        }
        // The launcher, of some 100 MiB of address space, is under the same self.
        if (1..256).contains(&self.memory_mib) {
            return Err(TaskError::setting(
                "memory_mib",
                self.memory_mib.to_string(),
                "0 for no limit, or at least 256",
            ));
        }
        if self.open_files < 16 {
            return Err(TaskError::setting("open_files", self.open_files.to_string(), "at least 16"));
        }
        if let Some(name) = self.env.iter().find(|name| name.is_empty() || name.contains(['=', '\0'])) {
            return Err(TaskError::setting("env", format!("{name:?}"), "names of environment variables"));
        }
        Ok(())
    }
}

/// A function `reward(prompt, response, reference, row)` of a Python file, where `row` is the row of the data file. The
/// function returns a number (the reward), True or False (the verdict), or a dict with the keys of a program's line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct PythonSpec {
    /// The Python file.
    pub file: PathBuf,
    /// The name of the function in the file.
    #[serde(default = "default_function")]
    pub function: String,
    /// The interpreter: a path, or a name on the PATH.
    #[serde(default = "default_python")]
    pub python: PathBuf,
    /// Calls the function once for all samples of a step, with four lists; it returns a list.
    #[serde(default)]
    pub batch: bool,
    #[serde(flatten)]
    pub limits: ProcessLimits,
}

impl PythonSpec {
    /// A function called `reward`, with default limits.
    pub fn new(file: impl Into<PathBuf>) -> Self {
        Self {
            file: file.into(),
            function: default_function(),
            python: default_python(),
            batch: false,
            limits: ProcessLimits::default(),
        }
    }

    /// The interpreter's process.
    pub fn command(&self) -> CommandSpec {
        let role = if self.batch { "batch" } else { "sample" };
        let mut limits = self.limits.clone();
        if self.batch {
            limits.sample_seconds = limits.batch_seconds;
        }
        CommandSpec::driver(&self.python, &self.file, &self.function, role, limits)
    }
}

fn default_function() -> String {
    "reward".into()
}

pub(crate) fn default_python() -> PathBuf {
    "python3".into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_under_which_no_program_can_work_are_refused() {
        let good = ProcessLimits::default();
        let checked = |limits: ProcessLimits| limits.check().map_err(|error| error.to_string());
        for taken in [
            good.clone(),
            ProcessLimits { sample_seconds: 1e6, batch_seconds: 1e-3, ..good.clone() },
            ProcessLimits { max_line_bytes: 1, memory_mib: 256, open_files: 16, ..good.clone() },
            ProcessLimits { memory_mib: 0, file_mib: 0, env: vec!["A".into()], ..good.clone() },
        ] {
            assert_eq!(checked(taken), Ok(()));
        }
        for (refused, key) in [
            (ProcessLimits { sample_seconds: 0.0, ..good.clone() }, "sample_seconds"),
            (ProcessLimits { sample_seconds: f64::NAN, ..good.clone() }, "sample_seconds"),
            (ProcessLimits { batch_seconds: 1.1e6, ..good.clone() }, "batch_seconds"),
            (ProcessLimits { max_line_bytes: 0, ..good.clone() }, "max_line_bytes"),
            (ProcessLimits { memory_mib: 255, ..good.clone() }, "memory_mib"),
            (ProcessLimits { memory_mib: 1, ..good.clone() }, "memory_mib"),
            (ProcessLimits { open_files: 15, ..good.clone() }, "open_files"),
            (ProcessLimits { env: vec!["A".into(), "B=1".into()], ..good.clone() }, "env"),
            (ProcessLimits { env: vec![String::new()], ..good }, "env"),
        ] {
            let said = checked(refused).unwrap_err();
            assert!(said.contains(&format!("task {key}: ")), "{key}: {said}");
        }
    }

    /// Programs of strangers reach no network and share no folder unless a config says so.
    #[test]
    fn programs_are_kept_apart_by_default() {
        let limits = ProcessLimits::default();
        assert!(!limits.network && !limits.shared_tmp && limits.env.is_empty());
        assert!(limits.memory_mib > 0 && limits.file_mib > 0);
        let code = CodeSpec::default();
        assert!(!code.unsafe_code && code.language.is_none() && code.visible_tests == 0);
        let read: CommandSpec = toml::from_str("program = \"p\"").unwrap();
        assert_eq!(read, CommandSpec::new("p"), "keys that are left out have the same defaults");
    }

    #[test]
    fn a_function_of_whole_batches_has_the_time_of_a_batch_for_its_first_verdict() {
        let single = PythonSpec::new("judge.py").command();
        let batch = PythonSpec { batch: true, ..PythonSpec::new("judge.py") }.command();
        assert_eq!(single.args[2..], ["judge.py", "reward", "sample"]);
        assert_eq!(batch.args[2..], ["judge.py", "reward", "batch"]);
        assert_eq!((single.limits.sample_seconds, single.limits.batch_seconds), (30.0, 600.0));
        assert_eq!((batch.limits.sample_seconds, batch.limits.batch_seconds), (600.0, 600.0));
        let isolated = single.clone().isolated();
        assert_eq!(isolated.args[..2], ["-I", "-B"]);
        assert_eq!(isolated.args[4..], single.args);
    }

    #[test]
    fn only_the_model_of_a_verifier_has_a_device_and_a_place() {
        let read = |text: &str| -> VerifierSpec { toml::from_str(text).unwrap() };
        let judge = read("kind = \"judge\"\nmodel = \"m\"\ndevice = \"cuda:1\"");
        assert_eq!((judge.model(), judge.device()), (Some((JUDGE, "m")), Some("cuda:1")));
        let scorer = read("kind = \"reward-model\"\nmodel = \"m\"\nkeep = \"host\"");
        assert_eq!((scorer.model(), scorer.device()), (Some((REWARD_MODEL, "m")), None));
        assert_eq!((scorer.keep(), judge.keep()), (KeepWeights::Host, KeepWeights::Device));
        assert!(judge.judge().is_some() && judge.reward_model().is_none());
        assert!(scorer.judge().is_none() && scorer.reward_model().is_some());
        let rule = VerifierSpec::default();
        assert_eq!((rule.model(), rule.device(), rule.keep()), (None, None, KeepWeights::Device));
    }
}
