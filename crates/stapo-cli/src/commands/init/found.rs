//! What a model and a data file are like.

use anyhow::{Context, Result, bail};
use stapo_core::Problem;
use stapo_rl::model_files::ModelConfig;
use stapo_rl::plan::config::{ModelSource, PromptStyle};
use stapo_rl::reward::code::TestKind;
use stapo_rl::reward::{CodeSpec, CodeStyle, Programs, RuleSpec, VerifierSpec};
use stapo_rl::tasks::prompting::PromptModel;
use stapo_rl::tasks::{
    DataPath, FileCensus, MissingAnswers, Mode, RowsSpec, Task, TaskSpec, file_kind, first_row,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What to look at.
pub struct Wanted {
    pub model: ModelSource,
    pub data: PathBuf,
    pub problem_field: Option<String>,
    pub answer_field: Option<String>,
}

/// What was found.
pub struct Found {
    pub model: ModelSource,
    pub config: ModelConfig,
    pub prompts: PromptModel,
    pub chat: bool,
    pub data: PathBuf,
    pub rows: Rows,
    pub mode: JudgeMode,
    /// What the model is asked.
    pub template: String,
    pub lengths: Lengths,
    /// The rows to train on, where the file names its splits.
    pub only: BTreeMap<String, Vec<String>>,
}

/// The data file.
pub struct Rows {
    pub problem_field: String,
    pub answer_field: String,
    /// `None` if ids are numbers of rows.
    pub id_field: Option<String>,
    pub census: FileCensus,
    /// Problems that remain.
    pub n_problems: usize,
}

/// Prompt lengths in tokens.
pub struct Lengths {
    pub median: usize,
    pub p99: usize,
    pub max: usize,
}

/// The judge that fits the rows: a rule of the grader, or the tests of programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JudgeMode {
    Math,
    MultipleChoice,
    Exact,
    Tests(CodeStyle),
}

impl JudgeMode {
    pub fn name(self) -> &'static str {
        match self {
            Self::Math => "math",
            Self::MultipleChoice => "multiple-choice",
            Self::Exact => "exact",
            Self::Tests(_) => "code",
        }
    }

    pub fn reason(self) -> &'static str {
        match self {
            Self::Math => "the references are numbers and formulas",
            Self::MultipleChoice => "every reference is a letter",
            Self::Exact => "the references are words, so the text in \\boxed{} must be the reference",
            Self::Tests(CodeStyle::Block) => {
                "the rows hold tests, which the program in a fenced block must pass"
            }
            Self::Tests(_) => "the rows hold tests, which the response must pass as a program",
        }
    }

    fn verifier(self) -> VerifierSpec {
        let mode = match self {
            Self::Math => Mode::Math,
            Self::MultipleChoice => Mode::MultipleChoice,
            Self::Exact => Mode::Exact,
            Self::Tests(style) => return VerifierSpec::Code(CodeSpec { style, ..CodeSpec::default() }),
        };
        VerifierSpec::Rule(RuleSpec { mode, ..RuleSpec::default() })
    }

    /// The mode for references, from what most of them look like.
    fn fitting(problems: &[Problem]) -> Self {
        let is_letter =
            |p: &&Problem| p.reference.len() == 1 && p.reference.as_bytes()[0].is_ascii_alphabetic();
        let is_formula =
            |p: &&Problem| p.reference.contains(|c: char| c.is_ascii_digit() || "\\$=".contains(c));
        let n_formulas = problems.iter().filter(is_formula).count();
        if problems.iter().all(|problem| is_letter(&problem)) {
            Self::MultipleChoice
        } else if 2 * n_formulas >= problems.len() {
            Self::Math
        } else {
            Self::Exact
        }
    }
}

impl Found {
    pub fn look(wanted: &Wanted) -> Result<Self> {
        let named = || match &wanted.model {
            ModelSource::Path { path } => format!("model {path}"),
            ModelSource::Builtin | ModelSource::Random { .. } => "the built-in model".to_string(),
        };
        let config = wanted.model.find()?.shape().with_context(named)?;
        let prompts = PromptModel::open(&wanted.model).with_context(named)?;
        let asked = Asked::fitting(&wanted.data, &prompts)?;
        let template = asked.template.clone();
        let spec = RowsSpec {
            only: asked.only.clone(),
            template: Some(template.clone()),
            problem_field: wanted.problem_field.clone(),
            answer_field: wanted.answer_field.clone(),
            missing_answers: MissingAnswers::Drop,
            held_out_share: 1.0,
            // The references are looked at before a rule is chosen, so none of them is refused here.
            verifier: asked.tests.unwrap_or(JudgeMode::Exact).verifier(),
            ..RowsSpec::new(&wanted.data)
        };
        let problems = open(spec.clone())?.held_out(usize::MAX);
        let mode = asked.tests.unwrap_or_else(|| JudgeMode::fitting(&problems));
        let task = open(RowsSpec { verifier: mode.verifier(), ..spec })?;
        let problems = task.held_out(usize::MAX);
        let census = task.census().context("a file has a census")?.clone();
        let chat = prompts.template.is_some();
        if let Some(problem) = problems.iter().find(|problem| !chat && !problem.earlier_turns.is_empty()) {
            bail!(
                "problem {:?}: its prompt is a conversation, and the model has no chat template\nhint: take a model with one, or the user's message alone: --problem-field 'prompt[].content'",
                problem.id
            );
        }
        let lengths = lengths(&prompts, chat, &problems)?;
        let rows = Rows {
            problem_field: census.problem_field.clone(),
            answer_field: census.answer_field.clone(),
            id_field: census.id_field.clone(),
            n_problems: problems.len(),
            census,
        };
        let (model, data) = (wanted.model.clone(), wanted.data.clone());
        Ok(Self { model, config, prompts, chat, data, rows, mode, template, lengths, only: asked.only })
    }

    /// The kind of the task in a config.
    pub fn kind(&self) -> &'static str {
        file_kind(self.data.to_str())
    }

    /// The task as the config will have it, without a verdict; used to look at its splits.
    pub fn split(&self, held_out_share: f64) -> Result<FileCensus> {
        let spec = RowsSpec {
            template: Some(self.template.clone()),
            problem_field: Some(self.rows.problem_field.clone()),
            answer_field: Some(self.rows.answer_field.clone()).filter(|field| !field.is_empty()),
            only: self.only.clone(),
            missing_answers: MissingAnswers::Drop,
            held_out_share,
            verifier: self.mode.verifier(),
            ..RowsSpec::new(&self.data)
        };
        Ok(open(spec)?.census().context("a file has a census")?.clone())
    }
}

fn open(spec: RowsSpec) -> Result<Task> {
    Ok(Task::open_with(&TaskSpec::of_file(spec), Programs::Never)?)
}

/// What the model is asked, and what is known of the judge before the references are looked at.
struct Asked {
    template: String,
    /// The judge of rows that hold tests.
    tests: Option<JudgeMode>,
    only: BTreeMap<String, Vec<String>>,
}

impl Asked {
    fn fitting(data: &Path, prompts: &PromptModel) -> Result<Self> {
        let path = DataPath::from(data.to_owned());
        let first = first_row(&path)?.unwrap_or_default();
        let mut only = BTreeMap::new();
        let Some(kind) = TestKind::of_row(&first) else {
            return Ok(Self { template: template(data, prompts)?, tests: None, only });
        };
        let instruction = kind.instruction().template;
        let (template, style) = if prompts.template.is_some() {
            (instruction.to_string(), CodeStyle::Block)
        } else if !prompts.tokenizer.lost_characters("Answer with the whole program")?.is_empty() {
            // The built-in model reads no words.
            ("{{ problem }}".to_string(), CodeStyle::Whole)
        } else {
            // A base model continues in a block that the prompt opens.
            (format!("{instruction}\n```python\n"), CodeStyle::Whole)
        };
        if first.contains_key("split") {
            only.insert("split".into(), ["train", "validation"].map(String::from).to_vec());
            // A file that names its splits otherwise is trained on as it is.
            let spec = RowsSpec {
                only: only.clone(),
                verifier: JudgeMode::Tests(style).verifier(),
                ..RowsSpec::new(data)
            };
            if open(spec).is_err() {
                only.clear();
            }
        }
        Ok(Self { template, tests: Some(JudgeMode::Tests(style)), only })
    }
}

/// The default, which asks for a box in words; for a tokenizer that knows no words, the built-in model's, what that model continues from.
fn template(data: &Path, prompts: &PromptModel) -> Result<String> {
    let default = RowsSpec::new(data).template().to_string();
    let words = default.replace("{{ problem }}", "");
    let is_seen = prompts.tokenizer.lost_characters(&words)?.is_empty();
    Ok(if is_seen { default } else { "{{ problem }}=".to_string() })
}

fn lengths(prompts: &PromptModel, chat: bool, problems: &[Problem]) -> Result<Lengths> {
    let style = PromptStyle { chat, ..PromptStyle::default() };
    let problems: Vec<&Problem> = problems.iter().collect();
    let mut lengths = prompts.prompting(&style)?.lengths(&problems)?;
    lengths.sort_unstable();
    let at = |share: f64| lengths.get(((lengths.len() - 1) as f64 * share) as usize).copied().unwrap_or(0);
    Ok(Lengths { median: at(0.5), p99: at(0.99), max: at(1.0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_is_what_most_references_look_like() {
        let mode = |references: &[&str]| {
            let problem = |reference: &&str| Problem {
                id: String::new(),
                earlier_turns: Vec::new(),
                prompt: String::new(),
                reference: (*reference).to_string(),
            };
            JudgeMode::fitting(&references.iter().map(problem).collect::<Vec<_>>())
        };
        assert_eq!(mode(&["A", "b", "D"]), JudgeMode::MultipleChoice);
        assert_eq!(
            mode(&["A", "BC", "D"]),
            JudgeMode::Exact,
            "all references are letters, or none counts as one"
        );
        assert_eq!(mode(&["A", "7"]), JudgeMode::Math);
        assert_eq!(mode(&["12", "yes"]), JudgeMode::Math, "half of them are enough");
        assert_eq!(mode(&["12", "yes", "no"]), JudgeMode::Exact);
        assert_eq!([mode(&["\\pi"]), mode(&["x = y"]), mode(&["$x$"])], [JudgeMode::Math; 3]);
        assert_eq!([mode(&["yes"]), mode(&["é"])], [JudgeMode::Exact; 2]);
    }

    #[test]
    fn lengths_are_those_of_sorted_prompts() {
        let prompts = PromptModel::open(&ModelSource::Builtin).unwrap();
        let problem = |n: usize| Problem {
            id: n.to_string(),
            earlier_turns: Vec::new(),
            prompt: "1".repeat(n),
            reference: String::new(),
        };
        // 101 prompts of 1 to 101 characters, the longest first: each character is a token.
        let problems: Vec<Problem> = (1..=101).rev().map(problem).collect();
        let first = lengths(&prompts, false, &problems[100..]).unwrap();
        let Lengths { median, p99, max } = lengths(&prompts, false, &problems).unwrap();
        let offset = first.median - 1;
        assert_eq!((median - offset, p99 - offset, max - offset), (51, 100, 101));
    }
}
