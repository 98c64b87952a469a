//! Calls of tools in the text of a sampled turn. Any text is read, and what is wrong with a call is a problem that the
//! policy gets to read.

mod hermes;
mod llama;
mod plain;

use super::{FINISH, ToolSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The most calls that are read from one turn.
pub const MAX_CALLS: usize = 32;

/// How a policy writes calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CallFormat {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`: Hermes, Qwen, SmolLM3.
    #[default]
    Hermes,
    /// The whole turn is a JSON object `{"name": .., "parameters": {..}}`, or follows `<|python_tag|>`: Llama 3.
    Llama3,
    /// Fenced blocks that are marked as Python: each is a call of the tool `python`.
    PythonBlock,
    /// Lines `CALL name(arguments)`, for base models.
    Plain,
}

/// A call that the policy wrote.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Call {
    /// The name of the tool.
    pub tool: String,
    pub arguments: Arguments,
}

/// The arguments of a call, as the format gives them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arguments {
    Named(Map<String, Value>),
    /// Text for the only required argument of the tool.
    Text(String),
}

/// What is wrong with a call, in words for the policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallProblem {
    pub text: String,
}

impl CallProblem {
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into() }
    }
}

/// What a sampled turn asks for.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ParsedTurn {
    /// The calls in the order of the text. Those after a call of `finish` are left out.
    pub calls: Vec<Result<Call, CallProblem>>,
    /// The answer that a call of `finish` gave, which ends the episode.
    pub answer: Option<String>,
}

impl CallFormat {
    /// Reads the calls of a turn. A turn without calls asks for nothing: its text is the answer.
    pub fn parse(self, text: &str) -> ParsedTurn {
        let found = match self {
            Self::Hermes => hermes::calls(text),
            Self::Llama3 => llama::calls(text),
            Self::PythonBlock => plain::python_blocks(text),
            Self::Plain => plain::calls(text),
        };
        let mut turn = ParsedTurn::default();
        for call in found {
            if turn.calls.len() == MAX_CALLS {
                turn.calls.push(Err(CallProblem::new(format!("more than {MAX_CALLS} calls in one turn"))));
                break;
            }
            match call {
                Ok(call) if call.tool == FINISH => {
                    turn.answer = Some(call.answer());
                    break;
                }
                call => turn.calls.push(call),
            }
        }
        turn
    }
}

impl Call {
    pub(super) fn named(tool: &str, arguments: Map<String, Value>) -> Self {
        Self { tool: tool.to_string(), arguments: Arguments::Named(arguments) }
    }

    pub(super) fn text(tool: &str, text: &str) -> Self {
        Self { tool: tool.to_string(), arguments: Arguments::Text(text.to_string()) }
    }

    /// The answer in a call of `finish`: its text, its argument `answer`, or its only argument.
    fn answer(&self) -> String {
        match &self.arguments {
            Arguments::Text(text) => text.clone(),
            Arguments::Named(named) => {
                let value =
                    named.get("answer").or_else(|| named.values().next().filter(|_| named.len() == 1));
                value.map(as_text).unwrap_or_default()
            }
        }
    }

    /// The arguments by the names of a schema.
    pub(super) fn bind(&self, schema: &ToolSchema) -> Result<Map<String, Value>, CallProblem> {
        let expected = || format!("{}({})", schema.name, schema.names().join(", "));
        match &self.arguments {
            Arguments::Named(named) => {
                let names = schema.parameters["required"].as_array().into_iter().flatten();
                match names.filter_map(Value::as_str).find(|name| !named.contains_key(*name)) {
                    Some(missing) => Err(CallProblem::new(format!(
                        "argument {missing:?} is missing; expected {}",
                        expected()
                    ))),
                    None => Ok(named.clone()),
                }
            }
            Arguments::Text(text) => match schema.names().as_slice() {
                [only] => Ok(Map::from_iter([((*only).to_string(), Value::from(text.as_str()))])),
                [] if text.trim().is_empty() => Ok(Map::new()),
                _ => Err(CallProblem::new(format!("arguments without names; expected {}", expected()))),
            },
        }
    }
}

/// A value as the text of an argument: strings without quotes.
pub(super) fn as_text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_string)
}

/// Reads `{"name": .., "arguments": {..}}`, where Llama writes `parameters`. Arguments may be a string that holds JSON, as
/// OpenAI's interface has them.
fn from_json(value: &Value) -> Result<Call, CallProblem> {
    let Some(name) = value["name"].as_str().or_else(|| value["function"].as_str()) else {
        return Err(CallProblem::new(r#"a call is a JSON object with "name" and "arguments""#));
    };
    let given = ["arguments", "parameters"].into_iter().map(|key| &value[key]).find(|given| !given.is_null());
    match given {
        None => Ok(Call::named(name, Map::new())),
        Some(Value::Object(arguments)) => Ok(Call::named(name, arguments.clone())),
        Some(Value::String(text)) => Ok(match serde_json::from_str(text) {
            Ok(Value::Object(arguments)) => Call::named(name, arguments),
            _ => Call::text(name, text),
        }),
        Some(other) => {
            let kind = if other.is_array() { "a list" } else { "no object" };
            Err(CallProblem::new(format!("the arguments of {name:?} are {kind}, expected a JSON object")))
        }
    }
}
