//! Files of texts: conversations, prompts with responses, or texts alone.

use super::file_texts::FileTexts;
use crate::tasks::rows::{FieldPath, turns};
use serde_json::Value;
use stapo_core::Turn;
use stapo_core::preference::Side;

/// One row.
#[derive(Debug, Clone, PartialEq)]
pub enum TextRow {
    /// Rendered with the chat template. Holds at least one turn of the assistant, and none before the first of another
    /// role.
    Conversation(Vec<Turn>),
    /// A prompt, and the response that has a loss.
    Pair { prompt: String, response: String },
    /// A text that has a loss as a whole.
    Text(String),
    /// A response as it was sampled.
    Recorded { prompt: String, tokens: Vec<u32>, is_learned: Vec<bool> },
    /// Responses to one prompt that are compared or judged, each a pair or a conversation that ends with the response; and by how
    /// much the chosen one is better, 0 where no field says so.
    Judged { sides: Vec<(Side, TextRow)>, margin: f64 },
}

impl TextRow {
    /// The texts of a row.
    pub(super) fn parts(&self) -> Vec<&str> {
        match self {
            TextRow::Judged { sides, .. } => sides.iter().flat_map(|(_, row)| row.parts()).collect(),
            TextRow::Conversation(turns) => turns.iter().map(|turn| turn.content.as_str()).collect(),
            TextRow::Pair { prompt, response } => vec![prompt, response],
            TextRow::Text(text) => vec![text],
            TextRow::Recorded { prompt, .. } => vec![prompt],
        }
    }
}

/// The fields of a file.
#[derive(Debug)]
pub(super) enum TextLayout {
    Conversation(FieldPath),
    Pair { prompt: FieldPath, response: FieldPath },
    Text(FieldPath),
}

/// Names in the order of search.
pub(super) const CONVERSATIONS: [&str; 3] = ["messages", "conversation", "conversations"];
const PAIRS: [(&str, &str); 7] = [
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("problem", "solution"),
    ("question", "solution"),
    ("question", "answer"),
    ("problem", "answer"),
];
const TEXTS: [&str; 1] = ["text"];

impl TextLayout {
    /// The layout of a file, from the spec and the file's first row.
    pub(super) fn recognise(spec: &FileTexts, row: &Value) -> Result<Self, String> {
        let path = |written: &String| FieldPath::parse(written);
        match (&spec.messages_field, &spec.prompt_field, &spec.response_field) {
            (Some(messages), None, None) => Ok(Self::Conversation(path(messages)?)),
            (None, Some(prompt), Some(response)) => {
                Ok(Self::Pair { prompt: path(prompt)?, response: path(response)? })
            }
            (None, None, Some(text)) => Ok(Self::Text(path(text)?)),
            (None, None, None) => Self::find(row),
            (None, Some(_), None) => Err("prompt_field is given without response_field".into()),
            (Some(_), _, _) => Err("messages_field is given with prompt_field or response_field".into()),
        }
    }

    fn find(row: &Value) -> Result<Self, String> {
        let has = |name: &str| row.get(name).is_some();
        let path = |name: &str| FieldPath::parse(name);
        if let Some(name) = CONVERSATIONS.iter().find(|name| has(name)) {
            return Ok(Self::Conversation(path(name)?));
        }
        if let Some((prompt, response)) = PAIRS.iter().find(|(p, r)| has(p) && has(r)) {
            return Ok(Self::Pair { prompt: path(prompt)?, response: path(response)? });
        }
        if let Some(name) = TEXTS.iter().find(|name| has(name)) {
            return Ok(Self::Text(path(name)?));
        }
        let pairs: Vec<String> = PAIRS.iter().map(|(p, r)| format!("{p} with {r}")).collect();
        Err(format!(
            "no field is recognised (looked for {}; {}; {})",
            CONVERSATIONS.join(", "),
            pairs.join(", "),
            TEXTS.join(", ")
        ))
    }

    /// The row as a text, a pair or a conversation. A pair is a conversation where the spec asks for chat, or where one of
    /// its sides is a list of messages.
    pub(super) fn read(&self, spec: &FileTexts, row: &Value) -> Result<TextRow, String> {
        match self {
            Self::Text(path) => Ok(TextRow::Text(text_at(path, row)?)),
            Self::Conversation(path) => {
                let Value::Array(messages) = path.get(row)? else {
                    return Err(format!("{:?} is not a list of messages", path.written()));
                };
                conversation(spec, &turns(messages)?)
            }
            Self::Pair { prompt, response } => {
                let sides = [(prompt.get(row)?, "user"), (response.get(row)?, "assistant")];
                if !spec.chat && sides.iter().all(|(value, _)| !value.is_array()) {
                    return Ok(TextRow::Pair {
                        prompt: text_at(prompt, row)?,
                        response: text_at(response, row)?,
                    });
                }
                let side = |(value, role): (&Value, &str)| match value {
                    Value::Array(messages) => turns(messages),
                    Value::String(text) => Ok(vec![Turn { role: role.into(), content: text.clone() }]),
                    _ => Err(format!("the side of the {role} is neither a text nor a list of messages")),
                };
                let [asked, answered] = sides.map(side);
                conversation(spec, &[asked?, answered?].concat())
            }
        }
    }
}

/// A conversation that can be learned from, with the system message of the spec where it has none.
pub(super) fn conversation(spec: &FileTexts, turns: &[Turn]) -> Result<TextRow, String> {
    let is_answer = |turn: &Turn| turn.role == "assistant";
    match turns.first() {
        None => return Err("a conversation without messages".into()),
        Some(first) if is_answer(first) => {
            return Err("a conversation that begins with the assistant".into());
        }
        Some(_) if !turns.iter().any(is_answer) => {
            return Err("a conversation without a message of the assistant".into());
        }
        Some(_) => {}
    }
    let has_system = turns.iter().any(|turn| turn.role == "system");
    let system = spec.system.iter().filter(|_| !has_system);
    let system = system.map(|text| Turn { role: "system".into(), content: text.clone() });
    Ok(TextRow::Conversation(system.chain(turns.iter().cloned()).collect()))
}

fn text_at(path: &FieldPath, row: &Value) -> Result<String, String> {
    let text = path.get(row)?.as_str().ok_or_else(|| format!("no text `{}`", path.written()))?;
    Ok(text.to_owned())
}
