//! Finds the fields of problem, answer and id: as the spec names these, or by the names that common data sets use.

use super::field::FieldPath;
use crate::reward::VerifierSpec;
use crate::tasks::split::content_hash;
use crate::tasks::{FileCensus, RowsSpec};
use serde_json::Value;
use stapo_core::Turn;
use stapo_verify::{Fallback, Order, extract};

/// Names in the order of search. `prompt`, a list of messages, and `reward_model.ground_truth` are those of verl and
/// DAPO-Math-17k.
const PROBLEM_FIELDS: [&str; 5] = ["problem", "question", "prompt", "messages", "conversations"];
const ANSWER_FIELDS: [&str; 4] = ["answer", "reward_model.ground_truth", "ground_truth", "solution"];
/// The fields of a reference program, which no verdict depends on: tests judge programs.
const PROGRAM_FIELDS: [&str; 2] = ["canonical_solution", "code"];
const ID_FIELDS: [&str; 3] = ["id", "unique_id", "extra_info.index"];
/// The names of MBPP and HumanEval on the hub, looked for in rows that tests judge.
const CODE_PROBLEM_FIELDS: [&str; 4] = ["problem", "question", "prompt", "text"];
const CODE_ID_FIELDS: [&str; 2] = ["id", "task_id"];
/// The value of `id_field` for ids that are numbers of rows.
const ROW_NUMBER: &str = "#row";

/// The instruction that DAPO-Math-17k has around each problem. The instruction is removed, because the task's template
/// adds its own.
const DAPO_OPENING: &str =
    "Solve the following math problem step by step. The last line of your response should be";
const DAPO_CLOSING: &str = "Remember to put your answer on its own line after \"Answer:\".";

/// The problem and the remedy of a refusal.
pub(super) type Refusal = (String, String);

pub(super) struct RowLayout {
    problem: FieldPath,
    answer: AnswerField,
    /// `None` if the spec names no field of a solution.
    solution: Option<FieldPath>,
    /// `None` if ids are numbers of rows.
    id: Option<FieldPath>,
}

/// The field of the reference.
enum AnswerField {
    Answer(FieldPath),
    /// A reference program, as it is written; rows that tests judge need none.
    Program(Option<FieldPath>),
}

impl AnswerField {
    fn written(&self) -> &str {
        match self {
            Self::Answer(path) | Self::Program(Some(path)) => path.written(),
            Self::Program(None) => "",
        }
    }

    fn read(&self, row: &Value) -> Result<String, Refusal> {
        let path = match self {
            Self::Program(path) => {
                let program = path.as_ref().and_then(|path| path.get(row).ok()?.as_str());
                return Ok(program.unwrap_or_default().to_string());
            }
            Self::Answer(path) => path,
        };
        text_at(path, "reference", row).and_then(|answer| {
            bare_answer(&answer, path.written() == "solution").ok_or_else(|| {
                let problem = format!("field {:?} holds no reference answer", path.written());
                (
                    problem,
                    "a solution ends with its answer after #### or in \\boxed{}; or set answer_field"
                        .to_string(),
                )
            })
        })
    }
}

/// The texts of a row.
pub(super) struct RowTexts {
    pub(super) id: String,
    /// The turns before the problem, where the row holds a conversation.
    pub(super) earlier_turns: Vec<Turn>,
    /// The text, or the last message of the conversation, which is the user's.
    pub(super) problem: String,
    /// A refusal for a row without a reference.
    pub(super) reference: Result<String, Refusal>,
    /// Present where the spec names a field of a solution.
    pub(super) solution: Option<String>,
}

impl RowTexts {
    /// Rows with the same hash are copies.
    pub(super) fn conversation_hash(&self) -> u64 {
        self.hash_of(|_| true)
    }

    /// Decides on the side of the split. The system message does not count, so that a question under two system messages
    /// is on one side.
    pub(super) fn question_hash(&self) -> u64 {
        self.hash_of(|turn| turn.role != "system")
    }

    fn hash_of(&self, counts: impl Fn(&Turn) -> bool) -> u64 {
        let turns = self.earlier_turns.iter().filter(|turn| counts(turn)).map(|turn| turn.content.as_str());
        content_hash(&turns.chain([self.problem.as_str()]).collect::<Vec<_>>().join("\n"))
    }
}

impl RowLayout {
    /// The layout of a file, from the spec and the file's first row.
    pub(super) fn recognise(spec: &RowsSpec, row: &Value) -> Result<Self, Refusal> {
        let choose = |key: &str, given: Option<&str>, known: &[&str]| -> Result<Option<FieldPath>, Refusal> {
            if let Some(written) = given {
                let path = FieldPath::parse(written);
                return path
                    .map(Some)
                    .map_err(|problem| (problem, format!("{key} = \"NAME\" or \"NAME.INNER\"")));
            }
            let paths = || known.iter().filter_map(|written| FieldPath::parse(written).ok());
            let filled = paths().find(|path| path.get(row).is_ok_and(|value| !value.is_null()));
            Ok(filled.or_else(|| paths().find(|path| path.get(row).is_ok())))
        };
        let missing = |what: &str, key: &str, known: &[&str]| {
            let problem = format!("no field for the {what} is recognised (looked for {})", known.join(", "));
            let flag = key.replace('_', "-");
            let remedy = format!(
                "set task.{key}, or --{flag} of stapo init; stapo eval knows these names only; the row has {}",
                names(row)
            );
            (problem, remedy)
        };
        let (problems, ids): (&[&str], &[&str]) = match spec.verifier {
            VerifierSpec::Code(_) => (&CODE_PROBLEM_FIELDS, &CODE_ID_FIELDS),
            _ => (&PROBLEM_FIELDS, &ID_FIELDS),
        };
        let problem = choose("problem_field", spec.problem_field.as_deref(), problems)?
            .ok_or_else(|| missing("problem", "problem_field", problems))?;
        let given = spec.answer_field.as_deref();
        let answer = match spec.verifier {
            VerifierSpec::Code(_) => AnswerField::Program(choose("answer_field", given, &PROGRAM_FIELDS)?),
            _ => AnswerField::Answer(
                choose("answer_field", given, &ANSWER_FIELDS)?
                    .ok_or_else(|| missing("answer", "answer_field", &ANSWER_FIELDS))?,
            ),
        };
        let solution = choose("solution_field", spec.solution_field.as_deref(), &[])?;
        let id = match spec.id_field.as_deref() {
            Some(ROW_NUMBER) => None,
            given => choose("id_field", given, ids)?,
        };
        Ok(Self { problem, answer, solution, id })
    }

    /// Writes the names of the fields into a census.
    pub(super) fn name_fields(&self, census: &mut FileCensus) {
        census.problem_field = self.problem.written().to_string();
        census.answer_field = self.answer.written().to_string();
        census.id_field = self.id.as_ref().map(|field| field.written().to_string());
    }

    /// `default_id` is the id where ids are numbers of rows.
    pub(super) fn read(&self, row: &Value, default_id: &dyn Fn() -> String) -> Result<RowTexts, Refusal> {
        let (earlier_turns, problem) = conversation_at(&self.problem, row)?;
        let reference = self.answer.read(row);
        let id = self.id.as_ref().map_or_else(|| Ok(default_id()), |path| text_at(path, "id", row))?;
        let solution = self.solution.as_ref().map(|path| text_at(path, "solution", row)).transpose()?;
        let problem = without_dapo_frame(&problem).to_string();
        Ok(RowTexts { id, earlier_turns, problem, reference, solution })
    }
}

/// The text at `path`, or the conversation: the turns before its last message, and that message, which is the user's.
fn conversation_at(path: &FieldPath, row: &Value) -> Result<(Vec<Turn>, String), Refusal> {
    let Ok(Value::Array(messages)) = path.get(row) else {
        return Ok((Vec::new(), text_at(path, "problem", row)?));
    };
    let refuse = |problem: String| {
        let remedy =
            "a conversation is a list of {\"role\": .., \"content\": ..} that ends with the user's message";
        (format!("problem field {:?}: {problem}", path.written()), remedy.to_string())
    };
    let mut turns = turns(messages).map_err(refuse)?;
    match turns.pop() {
        Some(last) if last.role != "user" => {
            Err(refuse(format!("the last message is of role {:?}, expected \"user\"", last.role)))
        }
        Some(last) if !last.content.trim().is_empty() => Ok((turns, last.content.trim().to_string())),
        _ => Err(refuse("empty".into())),
    }
}

/// ShareGPT's names of the speakers, and the roles of chat templates.
const SHAREGPT_ROLES: [(&str, &str); 9] = [
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("bard", "assistant"),
    ("bing", "assistant"),
    ("assistant", "assistant"),
    ("system", "system"),
    ("tool", "tool"),
];

/// The turns of a list of messages: `role` and `content`, or ShareGPT's `from` and `value`. A single message without a
/// role is the user's.
pub(crate) fn turns(messages: &[Value]) -> Result<Vec<Turn>, String> {
    let turn = |(idx, message): (usize, &Value)| -> Result<Turn, String> {
        let at = idx + 1;
        let role = match (message.get("role"), message.get("from").and_then(Value::as_str)) {
            (None, Some(from)) => {
                let known = SHAREGPT_ROLES.iter().find(|(name, _)| *name == from);
                known.map(|(_, role)| *role).ok_or_else(|| {
                    let names: Vec<&str> = SHAREGPT_ROLES.iter().map(|(name, _)| *name).collect();
                    format!("message {at} is from {from:?}, expected one of {}", names.join(", "))
                })?
            }
            (None, None) if messages.len() == 1 => "user",
            (role, _) => role.and_then(Value::as_str).ok_or_else(|| format!("message {at} has no role"))?,
        };
        let content = message.get("content").or_else(|| message.get("value")).and_then(Value::as_str);
        let content = content.ok_or_else(|| format!("message {at} has no content that is a text"))?;
        Ok(Turn { role: role.to_string(), content: content.to_string() })
    };
    messages.iter().enumerate().map(turn).collect()
}

/// Up to here every whole number is a number of 64 bits.
const MAX_WHOLE: f64 = (1_u64 << 53) as f64;

/// The text or number at `path`.
fn text_at(path: &FieldPath, what: &str, row: &Value) -> Result<String, Refusal> {
    let refuse = |problem: String| {
        let remedy =
            format!("every row needs its {what} in {:?}; this one has {}", path.written(), names(row));
        (format!("{what} field {:?}: {problem}", path.written()), remedy)
    };
    let text = match path.get(row).map_err(refuse)? {
        Value::String(text) => text.trim().to_string(),
        // Digits of larger numbers were lost when the row was read.
        Value::Number(number) if number.is_f64() && number.as_f64().is_some_and(|x| x.abs() >= MAX_WHOLE) => {
            let problem =
                format!("{what} field {:?}: {number}, of which not all digits were read", path.written());
            return Err((problem, "write so large a number as a text, in quotes".to_string()));
        }
        Value::Number(number) => number.to_string(),
        Value::Null => return Err(refuse("empty".into())),
        other => return Err(refuse(format!("expected text or a number, found {}", kind(other)))),
    };
    if text.is_empty() { Err(refuse("empty".into())) } else { Ok(text) }
}

/// The text after GSM8K's `####`, the box of a worked solution, or the text itself.
fn bare_answer(answer: &str, is_solution: bool) -> Option<String> {
    if let Some((_, after)) = answer.rsplit_once("####") {
        let bare = after.trim();
        return (!bare.is_empty()).then(|| bare.to_string());
    }
    if is_solution {
        return extract(answer, Order::BoxFirst, Fallback::Nothing).map(str::to_string);
    }
    Some(answer.to_string())
}

fn without_dapo_frame(problem: &str) -> &str {
    let framed = problem.strip_prefix(DAPO_OPENING).and_then(|rest| rest.split_once("\n\n"));
    match framed.and_then(|(_, rest)| rest.trim_end().strip_suffix(DAPO_CLOSING)) {
        Some(bare) if !bare.trim().is_empty() => bare.trim(),
        _ => problem,
    }
}

fn names(row: &Value) -> String {
    const MAX_NAMES: usize = 20;
    let names: Vec<&str> =
        row.as_object().map(|row| row.keys().map(String::as_str).collect()).unwrap_or_default();
    let more = if names.len() > MAX_NAMES { ", ..." } else { "" };
    format!("{}{more}", names[..names.len().min(MAX_NAMES)].join(", "))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_field_that_is_no_text_is_refused_by_its_kind() {
        let path = FieldPath::parse("problem").unwrap();
        let said = |value: Value| text_at(&path, "problem", &json!({"problem": value})).unwrap_err().0;
        for (value, kind) in
            [(json!(true), "a truth value"), (json!([1]), "a list"), (json!({}), "an object")]
        {
            assert_eq!(
                said(value),
                format!("problem field \"problem\": expected text or a number, found {kind}")
            );
        }
        assert_eq!(said(Value::Null), "problem field \"problem\": empty");
        assert_eq!(said(json!("  ")), "problem field \"problem\": empty");
        assert_eq!(text_at(&path, "problem", &json!({"problem": 12})).unwrap(), "12");
    }
}
