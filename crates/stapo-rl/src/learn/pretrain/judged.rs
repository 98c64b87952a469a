//! Files of responses that are compared or judged.

use super::file_texts::FileTexts;
use super::rows::{CONVERSATIONS, TextRow, conversation};
use crate::tasks::rows::{FieldPath, turns};
use serde_json::Value;
use stapo_core::Turn;
use stapo_core::preference::Side;

/// The fields of a file.
#[derive(Debug)]
pub(super) struct JudgedLayout {
    /// Absent if every response is a whole conversation.
    prompt: Option<FieldPath>,
    responses: Responses,
    /// By how much the better response is better.
    margin: Option<FieldPath>,
}

#[derive(Debug)]
enum Responses {
    Pair { chosen: FieldPath, rejected: FieldPath },
    Labelled { response: FieldPath, label: FieldPath },
}

/// Names in the order of search.
const PROMPTS: [&str; 4] = ["prompt", "instruction", "question", "problem"];
const RESPONSES: [&str; 2] = ["completion", "response"];

impl JudgedLayout {
    /// The layout of a file, from the spec and the file's first row. A better and a worse response come before a single
    /// one with a label.
    pub(super) fn recognise(spec: &FileTexts, row: &Value) -> Result<Self, String> {
        let find = |given: &Option<String>, names: &[&str]| -> Result<Option<FieldPath>, String> {
            let name =
                given.as_deref().or_else(|| names.iter().find(|name| row.get(**name).is_some()).copied());
            name.map(FieldPath::parse).transpose()
        };
        let prompts: Vec<&str> = PROMPTS.iter().chain(&CONVERSATIONS).copied().collect();
        let given = spec.prompt_field.clone().or_else(|| spec.messages_field.clone());
        let prompt = find(&given, &prompts)?;
        let pair = (find(&spec.chosen_field, &["chosen"])?, find(&spec.rejected_field, &["rejected"])?);
        let labelled = (find(&spec.response_field, &RESPONSES)?, find(&spec.label_field, &["label"])?);
        let responses = match (pair, labelled) {
            ((Some(chosen), Some(rejected)), _) => Responses::Pair { chosen, rejected },
            (_, (Some(response), Some(label))) => Responses::Labelled { response, label },
            _ => {
                return Err(
                    "no field is recognised (looked for chosen with rejected; completion or response with label)"
                        .into(),
                );
            }
        };
        Ok(Self { prompt, responses, margin: None })
    }

    /// Reads a margin from the field that the spec names, or from `margin` where the first row has it.
    pub(super) fn with_margin(self, spec: &FileTexts, row: &Value) -> Result<Self, String> {
        let found = row.get("margin").map(|_| "margin");
        let margin = spec.margin_field.as_deref().or(found).map(FieldPath::parse).transpose()?;
        Ok(Self { margin, ..self })
    }

    pub(super) fn read(&self, spec: &FileTexts, row: &Value) -> Result<TextRow, String> {
        let sides = match &self.responses {
            Responses::Pair { chosen, rejected } => vec![(Side::Chosen, chosen), (Side::Rejected, rejected)],
            Responses::Labelled { response, label } => {
                let is_good = match label.get(row)? {
                    Value::Bool(is_good) => *is_good,
                    Value::Number(number) if [Some(0.0), Some(1.0)].contains(&number.as_f64()) => {
                        number.as_f64() == Some(1.0)
                    }
                    other => {
                        return Err(format!("{:?} is {other}, expected true or false", label.written()));
                    }
                };
                vec![(if is_good { Side::Chosen } else { Side::Rejected }, response)]
            }
        };
        let read = |(side, field): (Side, &FieldPath)| Ok((side, self.response(spec, row, field)?));
        let sides = sides.into_iter().map(read).collect::<Result<_, String>>()?;
        let margin = match &self.margin {
            None => 0.0,
            Some(field) => {
                let value = field.get(row)?;
                let number = value.as_f64().filter(|number| number.is_finite());
                number.ok_or_else(|| format!("{:?} is {value}, expected a number", field.written()))?
            }
        };
        Ok(TextRow::Judged { sides, margin })
    }

    /// The response in a field, with its prompt. A list of messages that begins with another role than the assistant is the
    /// whole conversation; the prompt's field then repeats its beginning.
    fn response(&self, spec: &FileTexts, row: &Value, field: &FieldPath) -> Result<TextRow, String> {
        let prompt = self.prompt.as_ref().map(|path| path.get(row)).transpose()?;
        let answer = match field.get(row)? {
            Value::String(text) => match prompt {
                Some(Value::String(prompt)) if !spec.chat => {
                    return Ok(TextRow::Pair { prompt: prompt.clone(), response: text.clone() });
                }
                _ => vec![turn("assistant", text)],
            },
            Value::Array(messages) => turns(messages)?,
            message @ Value::Object(_) => {
                let mut answer = turns(std::slice::from_ref(message))?;
                for turn in &mut answer {
                    turn.role = "assistant".into();
                }
                answer
            }
            _ => return Err(format!("{:?} is neither a text nor messages", field.written())),
        };
        let is_whole = answer.first().is_some_and(|turn| turn.role != "assistant");
        let asked = match prompt {
            _ if is_whole => Vec::new(),
            Some(Value::String(prompt)) => vec![turn("user", prompt)],
            Some(Value::Array(messages)) => turns(messages)?,
            _ => return Err(format!("{:?} is a response without its prompt", field.written())),
        };
        let turns = [asked, answer].concat();
        if turns.last().is_none_or(|turn| turn.role != "assistant") {
            return Err(format!("{:?} does not end with a message of the assistant", field.written()));
        }
        conversation(spec, &turns)
    }
}

fn turn(role: &str, content: &str) -> Turn {
    Turn { role: role.into(), content: content.into() }
}
