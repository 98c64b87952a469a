//! What `generate` and `score` share: a model opened for running, and lines of JSON turned into its tokens.

use anyhow::{Context, Result, anyhow, bail};
use serde::Deserialize;
use serde_json::{Map, Value};
use stapo_rl::model::decoder::Policy;
use stapo_rl::model::{ChatTemplate, CpuOptions, Device, Error, Message, Pretrained, Tokenizer};
use std::io::BufRead;
use std::path::Path;

/// A model in memory with its tokenizer.
pub struct Language {
    pub policy: Policy,
    /// Why there is none, for models that are only numbers.
    tokenizer: std::result::Result<Tokenizer, Error>,
    template: Option<ChatTemplate>,
}

/// A record as users write it; which fields it needs depends on the command.
#[derive(Deserialize)]
pub struct Record {
    /// Comes back with the answer.
    pub id: Option<Value>,
    pub prompt: Option<String>,
    pub chat: Option<String>,
    pub messages: Option<Vec<Turn>>,
    pub tokens: Option<Vec<u32>>,
    pub prompt_tokens: Option<usize>,
    pub response: Option<String>,
}

#[derive(Deserialize)]
pub struct Turn {
    role: String,
    content: String,
}

impl Language {
    /// `threads` overrides the environment's and the machine's number.
    pub fn open(path: &Path, threads: Option<usize>) -> Result<Self> {
        let mut options = CpuOptions::from_env()?;
        options.threads = threads.unwrap_or(options.threads);
        let pretrained = Pretrained::open(path).with_context(|| format!("model {}", path.display()))?;
        let tokenizer = match pretrained.tokenizer() {
            Err(other) if !matches!(other, Error::Missing { .. }) => return Err(other.into()),
            found_or_missing => found_or_missing,
        };
        let template = pretrained.chat_template()?;
        let policy = Policy::load(&Device::cpu(options), &pretrained.config, &pretrained.weights)?;
        Ok(Self { policy, tokenizer, template })
    }

    /// For text in or out.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_ref().map_err(|missing| anyhow!("{missing}"))
    }

    /// The tokens of a record's prompt, from whichever field gives one.
    pub fn prompt(&self, record: &Record) -> Result<Vec<u32>> {
        let given = [record.prompt.is_some(), record.chat.is_some(), record.messages.is_some(), record.tokens.is_some()];
        match given.into_iter().filter(|&is_given| is_given).count() {
            0 => bail!("no prompt\nhint: give one of prompt, chat, messages, tokens"),
            1 => {}
            n => bail!("{n} prompts, expected one of prompt, chat, messages, tokens"),
        }
        if let Some(text) = &record.prompt {
            return Ok(self.tokenizer()?.encode(text)?);
        }
        if let Some(text) = &record.chat {
            return self.chat(&[Message { role: "user".into(), content: text.clone() }]);
        }
        if let Some(turns) = &record.messages {
            let message = |turn: &Turn| Message { role: turn.role.clone(), content: turn.content.clone() };
            return self.chat(&turns.iter().map(message).collect::<Vec<_>>());
        }
        Ok(record.tokens.clone().unwrap_or_default())
    }

    fn chat(&self, messages: &[Message]) -> Result<Vec<u32>> {
        let Some(template) = &self.template else {
            bail!("the model has no chat template\nhint: give the whole text as prompt");
        };
        let text = template.prompt(messages, &Map::new())?;
        Ok(self.tokenizer()?.encode_rendered(&text)?)
    }
}

/// Calls `take` with each record that is not blank and its line number, from 1. A line that cannot be read or that
/// `take` refuses is reported on standard error with its place; returns how many were taken and refused.
pub fn for_each_record(path: &str, mut take: impl FnMut(usize, Record) -> Result<()>) -> Result<(usize, usize)> {
    let (mut n_taken, mut n_refused) = (0, 0);
    for (index, line) in crate::input::open(path)?.split(b'\n').enumerate() {
        let line = line.with_context(|| format!("input {}", crate::input::name(path)))?;
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let outcome = serde_json::from_slice(&line)
            .context("not a record in JSON")
            .and_then(|record| take(index + 1, record));
        match outcome {
            Ok(()) => n_taken += 1,
            Err(error) => {
                n_refused += 1;
                report_line(path, index + 1, &error);
            }
        }
    }
    Ok((n_taken, n_refused))
}

pub fn report_line(path: &str, line: usize, error: &anyhow::Error) {
    eprintln!("error: {}:{line}: {error:#}", crate::input::name(path));
}
