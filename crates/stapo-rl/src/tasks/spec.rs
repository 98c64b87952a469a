//! The keys of a task in a config.

use super::arithmetic::{ArithmeticSpec, spell_out_level};
use super::countdown::CountdownSpec;
use super::guess::GuessSpec;
use super::rows::{DataPath, file_kind};
use crate::reward::spec::VerifierSpec;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de::Error};
use serde_json::Value as Json;
use stapo_core::settings::{self, SettingsError};
use std::collections::BTreeMap;
use std::path::PathBuf;
use toml::{Table, Value};

const PLAIN_TEMPLATE: &str = "{{ problem }}";
const BOXED_TEMPLATE: &str =
    "{{ problem }}\n\nPlease reason step by step, and put your final answer within \\boxed{}.";

/// The source of problems and the verifier of answers: `kind` and the keys of that kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum TaskSpec {
    /// Generated arithmetic expressions.
    Arithmetic(ArithmeticSpec),
    /// Generated countdown problems: reach a target with given numbers.
    Countdown(CountdownSpec),
    /// Hidden numbers, for the environment of kind `guess`.
    Guess(GuessSpec),
    /// A file with one JSON object per line.
    Jsonl(RowsSpec),
    /// A Parquet file.
    Parquet(RowsSpec),
    /// Files of any format that is read.
    File(RowsSpec),
}

impl TaskSpec {
    /// Reads a table; `root` begins every path in messages. The `level` of an arithmetic task stands for the values that
    /// the level sets.
    pub fn read(root: &str, table: Table) -> Result<Self, SettingsError> {
        let mut keys = table.clone();
        // A kind is read by itself, because serde loses the key of an error inside an enum.
        match keys.remove("kind").as_ref().and_then(Value::as_str) {
            Some("arithmetic") => Ok(Self::Arithmetic(settings::read(root, spell_out_level(root, keys)?)?)),
            Some("countdown") => Ok(Self::Countdown(settings::read(root, keys)?)),
            Some("guess") => Ok(Self::Guess(settings::read(root, keys)?)),
            Some("jsonl") => Ok(Self::Jsonl(settings::read(root, keys)?)),
            Some("parquet") => Ok(Self::Parquet(settings::read(root, keys)?)),
            Some("file") => Ok(Self::File(settings::read(root, keys)?)),
            _ => settings::read(root, table),
        }
    }

    /// The task of a file, of the kind that its name says.
    pub fn of_file(rows: RowsSpec) -> Self {
        let name = rows.path.to_string();
        match file_kind(Some(&name).filter(|_| rows.path.entries().len() == 1).map(String::as_str)) {
            "parquet" => Self::Parquet(rows),
            "jsonl" => Self::Jsonl(rows),
            _ => Self::File(rows),
        }
    }

    /// The spec of a file; `None` for a generated task.
    pub fn rows(&self) -> Option<&RowsSpec> {
        match self {
            Self::Jsonl(rows) | Self::Parquet(rows) | Self::File(rows) => Some(rows),
            Self::Arithmetic(_) | Self::Countdown(_) | Self::Guess(_) => None,
        }
    }

    /// The spec of a file with the template written out.
    pub(crate) fn with_template(mut self) -> Self {
        if let Self::Jsonl(rows) | Self::Parquet(rows) | Self::File(rows) = &mut self {
            rows.template = Some(rows.template().to_string());
        }
        self
    }

    /// The system message that the task adds to its prompts.
    pub fn system(&self) -> Option<&str> {
        match self {
            Self::Arithmetic(spec) => spec.system.as_deref(),
            Self::Countdown(spec) => spec.system.as_deref(),
            Self::Guess(spec) => spec.system.as_deref(),
            Self::Jsonl(spec) | Self::Parquet(spec) | Self::File(spec) => spec.system.as_deref(),
        }
    }

    pub fn verifier(&self) -> &VerifierSpec {
        match self {
            Self::Arithmetic(spec) => &spec.verifier,
            Self::Countdown(spec) => &spec.verifier,
            Self::Guess(spec) => &spec.verifier,
            Self::Jsonl(spec) | Self::Parquet(spec) | Self::File(spec) => &spec.verifier,
        }
    }

    /// The kind of the task, as configs name it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Arithmetic(_) => "arithmetic",
            Self::Countdown(_) => "countdown",
            Self::Guess(_) => "guess",
            Self::Jsonl(_) => "jsonl",
            Self::Parquet(_) => "parquet",
            Self::File(_) => "file",
        }
    }

    /// The verifier of tasks of a kind where the config names none.
    pub(crate) fn default_verifier(kind: &str) -> VerifierSpec {
        if kind == "countdown" { CountdownSpec::default().verifier } else { VerifierSpec::default() }
    }

    pub(crate) fn verifier_mut(&mut self) -> &mut VerifierSpec {
        match self {
            Self::Arithmetic(spec) => &mut spec.verifier,
            Self::Countdown(spec) => &mut spec.verifier,
            Self::Guess(spec) => &mut spec.verifier,
            Self::Jsonl(spec) | Self::Parquet(spec) | Self::File(spec) => &mut spec.verifier,
        }
    }

    /// The share of the problems that is not trained on.
    pub fn held_out_share(&self) -> f64 {
        match self {
            Self::Arithmetic(spec) => spec.held_out_share,
            Self::Countdown(spec) => spec.held_out_share,
            Self::Guess(spec) => spec.held_out_share,
            Self::Jsonl(spec) | Self::Parquet(spec) | Self::File(spec) => spec.held_out_share,
        }
    }

    /// True if every problem has a worked solution.
    pub fn has_solutions(&self) -> bool {
        match self {
            Self::Arithmetic(_) | Self::Countdown(_) => true,
            Self::Guess(_) => false,
            Self::Jsonl(spec) | Self::Parquet(spec) | Self::File(spec) => spec.solution_field.is_some(),
        }
    }
}

impl Default for TaskSpec {
    fn default() -> Self {
        Self::Arithmetic(ArithmeticSpec::default())
    }
}

/// Files of problems. Fields are names, or paths such as `reward_model.ground_truth`, `prompt[].content` (the one
/// message of the user, or the only element) and `choices[0]`. Fields not given are recognised by the names that
/// GSM8K, MATH, DAPO-Math-17k and verl's files use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RowsSpec {
    /// The file, a pattern such as `data/*.parquet`, or a list of these. The content of a file says its format: Parquet,
    /// JSON lines, a JSON array, or CSV by its name; texts also compressed with gzip or zstd.
    pub path: DataPath,
    /// How often each entry of `path` is trained on, relative to the others: a mixture, exact in every 1000 problems, in
    /// an order that the seed decides. By default every problem is trained on equally often.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weights: Vec<f64>,
    /// At most this many rows of each entry of `path` are read, the first ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_rows: Option<u64>,
    /// Only rows whose fields have one of the given values are problems: `only = { split = ["train", "validation"],
    /// level = 3 }`. Fields are names or paths; numbers are equal by value.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "one_value_or_more")]
    pub only: BTreeMap<String, Vec<String>>,
    /// The field of the problem; by default recognised by its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem_field: Option<String>,
    /// The field of the reference answer; by default recognised by its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_field: Option<String>,
    /// The field of a worked solution, which a teacher reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub solution_field: Option<String>,
    /// The field of the problem's id; by default recognised by its name. With `#row`, ids are numbers of rows: `gsm8k-1`, `gsm8k-2`, ...
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id_field: Option<String>,
    /// What happens to rows without a reference answer.
    #[serde(default)]
    pub missing_answers: MissingAnswers,
    /// The share of problems, chosen by the hash of the text, that are held out of training. 1 holds out all problems.
    #[serde(default = "default_held_out_share")]
    pub held_out_share: f64,
    /// A Jinja template over `problem`, `id` and the row's fields. By default the problem as it is, with an
    /// instruction added for verifiers that read `\boxed{}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// The system message of conversations without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// How responses are judged.
    #[serde(default)]
    pub verifier: VerifierSpec,
}

impl RowsSpec {
    /// A file with the default of every other key.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into().into(),
            weights: Vec::new(),
            max_rows: None,
            only: BTreeMap::new(),
            problem_field: None,
            answer_field: None,
            solution_field: None,
            id_field: None,
            missing_answers: MissingAnswers::default(),
            held_out_share: default_held_out_share(),
            template: None,
            system: None,
            verifier: VerifierSpec::default(),
        }
    }

    /// Whether the template is the default that adds an instruction.
    pub(crate) fn has_instruction(&self) -> bool {
        self.template() == BOXED_TEMPLATE
    }

    /// The template, as given or by default. The default is the problem as it is; where the verifier is a rule that
    /// reads `\boxed{}`, the instruction of the STAPO paper, which asks for the box, follows the problem.
    pub fn template(&self) -> &str {
        match (&self.template, &self.verifier) {
            (Some(template), _) => template,
            (None, VerifierSpec::Rule(_) | VerifierSpec::Judge(_) | VerifierSpec::RewardModel(_)) => {
                BOXED_TEMPLATE
            }
            (None, _) => PLAIN_TEMPLATE,
        }
    }
}

/// The values of each field as text, from one value or a list of texts, numbers and booleans.
fn one_value_or_more<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, Vec<String>>, D::Error> {
    let text_of = |value: Json| match value {
        Json::String(text) => Ok(text),
        Json::Number(_) | Json::Bool(_) => Ok(value.to_string()),
        other => Err(D::Error::custom(format!(
            "{other}, expected a text, a number, true or false, or a list of them"
        ))),
    };
    let fields = BTreeMap::<String, Json>::deserialize(deserializer)?;
    let texts_of = |(field, values)| {
        let values = if let Json::Array(values) = values { values } else { vec![values] };
        Ok((field, values.into_iter().map(text_of).collect::<Result<_, _>>()?))
    };
    fields.into_iter().map(texts_of).collect()
}

/// How rows without a reference are treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MissingAnswers {
    /// The file is refused with an error that names the first such row.
    #[default]
    Refuse,
    /// Such rows are left out and counted.
    Drop,
}

fn default_held_out_share() -> f64 {
    0.05
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_or_a_list_of_texts_numbers_and_booleans_chooses_rows() {
        let only = |written: &str| {
            let text = format!("path = \"x.jsonl\"\nonly = {written}");
            toml::from_str::<RowsSpec>(&text).map(|spec| spec.only).map_err(|error| error.to_string())
        };
        let expected = [("b", vec!["true"]), ("n", vec!["3", "1.5"]), ("split", vec!["train"])];
        let expected =
            expected.map(|(field, values)| (field.into(), values.iter().map(ToString::to_string).collect()));
        let found = only(r#"{ split = "train", n = [3, 1.5], b = true }"#).unwrap();
        assert_eq!(found, BTreeMap::from(expected));
        for wrong in ["{ n = [[3]] }", "{ n = { a = 1 } }"] {
            assert!(only(wrong).unwrap_err().contains("expected a text, a number, true or false"));
        }
    }

    #[test]
    fn a_file_has_the_kind_that_its_name_says() {
        let kind = |path: &str| TaskSpec::of_file(RowsSpec::new(path)).kind();
        let files = ["a.jsonl", "a.parquet", "a.csv", "a.jsonl.gz", "a"];
        assert_eq!(files.map(kind), ["jsonl", "parquet", "file", "file", "jsonl"]);
    }
}
