//! The input of `generate` and `score`: JSON lines turned into tokens.

use crate::shared::input::{self, Line, MAX_LINE_BYTES};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use stapo_rl::LoadedModel;
use stapo_rl::inference::Message;
use stapo_rl::tasks::unseen::listed;

/// A record of the input. Which fields must be there depends on the command.
#[derive(Deserialize, Default)]
pub struct PromptRecord {
    /// Copied to the output.
    pub id: Option<Value>,
    pub prompt: Option<String>,
    pub chat: Option<String>,
    pub messages: Option<Vec<ChatMessage>>,
    pub tokens: Option<Vec<u32>>,
    pub prompt_tokens: Option<usize>,
    pub response: Option<String>,
}

/// An alternative token in the output.
#[derive(Serialize)]
pub struct Choice {
    token: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    logp: f32,
}

#[derive(Deserialize)]
pub struct ChatMessage {
    pub role: String,
    pub content: String,
}

/// How prompts are rendered and where responses end.
#[derive(clap::Args)]
pub struct PromptOptions {
    /// Variables of the chat template, as JSON: '{"enable_thinking": false}'.
    #[arg(long, value_name = "JSON", value_parser = chat_arguments, default_value = "{}", hide_default_value = true)]
    pub chat_arguments: Map<String, Value>,
    /// Ends a response at this text too; may be repeated.
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
}

/// The variables of a chat template on the command line.
pub fn chat_arguments(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("not a JSON object: {error}"))
}

pub fn choice(model: &LoadedModel, token: u32, logp: f32) -> Result<Choice> {
    Ok(Choice { token, text: model.token_text(token)?, logp })
}

/// The tokens of a record's prompt, from the one field that gives it.
pub fn prompt(
    model: &LoadedModel,
    record: &PromptRecord,
    chat_arguments: &Map<String, Value>,
) -> Result<Vec<u32>> {
    let given =
        [record.prompt.is_some(), record.chat.is_some(), record.messages.is_some(), record.tokens.is_some()];
    match given.into_iter().filter(|&is_given| is_given).count() {
        0 => bail!("no prompt\nhint: give one of prompt, chat, messages, tokens"),
        1 => {}
        n => bail!("{n} prompts, expected one of prompt, chat, messages, tokens"),
    }
    if let Some(text) = &record.prompt {
        check_characters(model, text)?;
        return Ok(model.tokenizer()?.encode(text)?);
    }
    if let Some(text) = &record.chat {
        return chat(model, &[Message { role: "user".into(), content: text.clone() }], chat_arguments);
    }
    if let Some(messages) = &record.messages {
        let plain = |m: &ChatMessage| Message { role: m.role.clone(), content: m.content.clone() };
        return chat(model, &messages.iter().map(plain).collect::<Vec<_>>(), chat_arguments);
    }
    Ok(record.tokens.clone().unwrap_or_default())
}

/// Refuses a text with characters that the model's tokenizer would lose.
pub fn check_characters(model: &LoadedModel, text: &str) -> Result<()> {
    let lost = model.tokenizer()?.lost_characters(text)?;
    if lost.is_empty() {
        return Ok(());
    }
    bail!(
        "the model's tokenizer has no token for {}\nhint: leave these characters out; the built-in model reads arithmetic such as 12+30=",
        listed(&lost)
    )
}

fn chat(model: &LoadedModel, messages: &[Message], arguments: &Map<String, Value>) -> Result<Vec<u32>> {
    if model.template.is_some() {
        messages.iter().try_for_each(|message| check_characters(model, &message.content))?;
    }
    match model.encode_chat(messages, arguments)? {
        Some(tokens) => Ok(tokens),
        None => bail!("the model has no chat template\nhint: give the whole text as prompt"),
    }
}

/// Reads the input line by line; blank lines are skipped. `read` turns a record into a value or refuses the record;
/// `take` gets the line's number, from 1, the record and the value. A refusal is reported on standard error with file
/// and line, and reading continues; an error of `take` ends the command. Returns how many records were taken and
/// refused.
pub fn for_each_record<R>(
    path: &str,
    mut read: impl FnMut(usize, &PromptRecord) -> Result<R>,
    mut take: impl FnMut(usize, PromptRecord, R) -> Result<()>,
) -> Result<(usize, usize)> {
    let name = input::name(path);
    let (mut n_taken, mut n_refused) = (0, 0);
    let mut lines = input::open(path)?;
    for number in 1.. {
        let at = || format!("input {name}, line {number}");
        let Some(line) = input::next_line(&mut *lines, MAX_LINE_BYTES).with_context(at)? else { break };
        let record = match line {
            Line::Text(bytes) if bytes.trim_ascii().is_empty() => continue,
            Line::Text(bytes) => {
                serde_json::from_slice::<PromptRecord>(&bytes).context("not a record in JSON")
            }
            Line::TooLong => Err(anyhow::anyhow!(input::too_long(MAX_LINE_BYTES))),
        };
        match record.and_then(|record| read(number, &record).map(|made| (record, made))) {
            Ok((record, made)) => {
                n_taken += 1;
                take(number, record, made)?;
            }
            Err(error) => {
                n_refused += 1;
                eprintln!("error: {name}:{number}: {error:#}");
            }
        }
    }
    Ok((n_taken, n_refused))
}
