//! `stapo score`: log-probs, entropies and collisions of given responses, or their scores under a reward model.

mod whole;

use crate::shared::model::ModelArgs;
use crate::shared::option::temperature;
use crate::shared::prompts::{
    Choice, PromptRecord, chat_arguments, check_characters, choice, for_each_record, prompt,
};
use crate::shared::terminal::{Output, output};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::{Map, Value};
use stapo_rl::LoadedModel;
use stapo_rl::inference::{HeadOptions, PackedBatch, Pass, TokenScores};
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::process::ExitCode;

/// Prints log-prob, entropy and collision of every token of given responses, as JSON lines; with a reward model, the
/// score of every response.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// JSON lines: `{"tokens": [..], "prompt_tokens": n}`, or a prompt (`prompt`, `chat` or `messages`) and a
    /// `response`; `id` comes back. `-` = standard input.
    #[arg(long, value_name = "FILE")]
    input: String,
    /// Variables of the chat template, as JSON: '{"enable_thinking": false}'.
    #[arg(long, value_name = "JSON", value_parser = chat_arguments, default_value = "{}", hide_default_value = true)]
    chat_arguments: Map<String, Value>,
    /// Likeliest tokens to list in each response token's place.
    #[arg(long, value_name = "N", default_value_t = 0)]
    alternatives: usize,
    /// Tokens of the longest record. A model with LongRoPE then takes its factors for long sequences, for all records, if this
    /// is more than it was first trained for.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    max_tokens: usize,
    /// Divides the logits.
    #[arg(long, default_value_t = 1.0, value_parser = temperature)]
    temperature: f64,
}

/// Tokens per forward pass; a longer record gets a separate pass.
const BATCH_TOKENS: usize = 4096;

pub fn run(args: &Args) -> Result<ExitCode> {
    let model = args.model.open_with_either_head(args.max_tokens)?;
    if let Some(head) = model.policy.config().score {
        return whole::run(&args.input, &model, head, &args.chat_arguments);
    }
    let options = HeadOptions {
        temperature: args.temperature,
        n_alternatives: args.alternatives,
        ..HeadOptions::default()
    };
    let pass = Pass::scoring(&model.policy)?;
    let out = BufWriter::new(output());
    let mut scorer =
        Scorer { model: &model, options, pass, batch: PackedBatch::new(), records: Vec::new(), out };
    let read = |_, record: &PromptRecord| tokens(&model, record, &args.chat_arguments);
    let take =
        |line, record, (tokens, n_prompt): (Vec<u32>, usize)| scorer.take(line, record, &tokens, n_prompt);
    let (n_scored, n_refused) = for_each_record(&args.input, read, take)?;
    scorer.flush()?;
    if n_scored == 0 {
        bail!("input {}: no record to score", crate::shared::input::name(&args.input));
    }
    Ok(if n_refused == 0 { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// Gathers records into batches. A record's numbers do not depend on the other records of its batch.
struct Scorer<'a> {
    model: &'a LoadedModel,
    options: HeadOptions,
    pass: Pass,
    batch: PackedBatch,
    records: Vec<BatchedRecord>,
    out: BufWriter<Output>,
}

/// A record of the batch, and the range of its tokens among the scored tokens of the batch.
struct BatchedRecord {
    line: usize,
    id: Option<Value>,
    scored: Range<usize>,
}

/// One line of output. Every list has one entry per response token.
#[derive(Serialize)]
struct ScoredLine<'a> {
    line: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: &'a Option<Value>,
    tokens: &'a [u32],
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<Vec<String>>,
    logp: &'a [f32],
    entropy: &'a [f32],
    collision: &'a [f32],
    #[serde(skip_serializing_if = "Option::is_none")]
    alternatives: Option<Vec<Vec<Choice>>>,
}

impl Scorer<'_> {
    fn take(&mut self, line: usize, record: PromptRecord, tokens: &[u32], n_prompt: usize) -> Result<()> {
        if !has_room(self.batch.n_tokens(), tokens.len()) {
            self.flush()?;
        }
        let start = self.batch.n_scored();
        self.batch.push_response(tokens, n_prompt);
        self.records.push(BatchedRecord { line, id: record.id, scored: start..self.batch.n_scored() });
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let batch = std::mem::take(&mut self.batch);
        let scores = self.pass.forward(&self.model.policy, &batch, self.options)?;
        for record in std::mem::take(&mut self.records) {
            self.write(&record, &batch, &scores)?;
        }
        Ok(self.out.flush()?)
    }

    fn write(&mut self, record: &BatchedRecord, batch: &PackedBatch, scores: &TokenScores) -> Result<()> {
        let range = record.scored.clone();
        let tokens = &batch.targets()[range.clone()];
        let text =
            tokens.iter().map(|&token| self.model.token_text(token)).collect::<stapo_rl::Result<_>>()?;
        let choices = |row: &Vec<(u32, f32)>| {
            row.iter().map(|&(token, logp)| choice(self.model, token, logp)).collect::<Result<Vec<_>>>()
        };
        let alternatives = (self.options.n_alternatives > 0)
            .then(|| scores.alternatives[range.clone()].iter().map(choices).collect::<Result<_>>());
        let line = ScoredLine {
            line: record.line,
            id: &record.id,
            tokens,
            text,
            logp: &scores.logp[range.clone()],
            entropy: &scores.entropy[range.clone()],
            collision: &scores.collision[range],
            alternatives: alternatives.transpose()?,
        };
        serde_json::to_writer(&mut self.out, &line)?;
        Ok(writeln!(self.out)?)
    }
}

/// A record's tokens, and how many of them are the prompt's.
fn tokens(
    model: &LoadedModel,
    record: &PromptRecord,
    chat_arguments: &Map<String, Value>,
) -> Result<(Vec<u32>, usize)> {
    let mut tokens = prompt(model, record, chat_arguments)?;
    let n_prompt = match (&record.tokens, &record.response) {
        (Some(_), None) => record.prompt_tokens.context("prompt_tokens is missing")?,
        (Some(_), Some(_)) => bail!("both tokens and response, expected one"),
        (None, None) => bail!("no response to score"),
        (None, Some(response)) => {
            let n_prompt = tokens.len();
            check_characters(model, response)?;
            tokens.extend(model.tokenizer()?.encode_rendered(response)?);
            n_prompt
        }
    };
    let config = model.policy.config();
    check_lengths(n_prompt, tokens.len(), config.position_limit(), config.max_positions)?;
    if let Some(token) = tokens.iter().find(|&&token| token as usize >= config.vocabulary) {
        bail!("token {token} is outside the vocabulary of {}", config.vocabulary);
    }
    Ok((tokens, n_prompt))
}

/// Whether a batch takes more tokens.
fn has_room(n_tokens: usize, n_more: usize) -> bool {
    n_tokens + n_more <= BATCH_TOKENS
}

/// Refuses more tokens than the model takes: `limit` with the factors of LongRoPE that are in use, `max_positions` with others.
fn check_lengths(n_prompt: usize, n_tokens: usize, limit: usize, max_positions: usize) -> Result<()> {
    if n_prompt == 0 || n_prompt > n_tokens {
        bail!("{n_prompt} prompt tokens of {n_tokens}, expected at least 1 and at most all");
    }
    if n_tokens > limit && n_tokens <= max_positions {
        bail!(
            "{n_tokens} tokens, the model takes {limit} with LongRoPE's factors for short sequences\nhint: add --max-tokens \
             {n_tokens}, or more where other records are longer"
        );
    }
    if n_tokens > limit {
        bail!("{n_tokens} tokens, the model takes {limit}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_filled_and_a_record_may_fill_the_positions() {
        assert!(has_room(BATCH_TOKENS - 2, 2) && !has_room(BATCH_TOKENS - 1, 2));
        let checked = |n_prompt, n_tokens| check_lengths(n_prompt, n_tokens, 8, 8).map_err(|e| e.to_string());
        assert_eq!([checked(1, 8), checked(8, 8)], [Ok(()), Ok(())]);
        assert_eq!(checked(1, 9).unwrap_err(), "9 tokens, the model takes 8");
        for n_prompt in [0, 5] {
            let said = checked(n_prompt, 4).unwrap_err();
            assert_eq!(said, format!("{n_prompt} prompt tokens of 4, expected at least 1 and at most all"));
        }
    }
}
