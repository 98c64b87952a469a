//! Scores of whole responses under a reward model.

use super::{has_room, tokens};
use crate::shared::input;
use crate::shared::prompts::{PromptRecord, for_each_record};
use crate::shared::terminal::{Output, output};
use anyhow::{Result, bail};
use serde::Serialize;
use serde_json::{Map, Value};
use stapo_rl::LoadedModel;
use stapo_rl::inference::{PackedBatch, Pass, ScoreHead};
use std::io::{BufWriter, Write};
use std::process::ExitCode;

/// Gathers records into batches. A score does not depend on the other records of its batch.
struct Scorer<'a> {
    model: &'a LoadedModel,
    head: ScoreHead,
    pass: Pass,
    batch: PackedBatch,
    records: Vec<(usize, Option<Value>)>,
    out: BufWriter<Output>,
}

/// One line of output.
#[derive(Serialize)]
struct ScoredLine {
    line: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<Value>,
    score: f64,
}

pub fn run(
    input: &str,
    model: &LoadedModel,
    head: ScoreHead,
    chat_arguments: &Map<String, Value>,
) -> Result<ExitCode> {
    let pass = Pass::scoring(&model.policy)?;
    let out = BufWriter::new(output());
    let mut scorer = Scorer { model, head, pass, batch: PackedBatch::new(), records: Vec::new(), out };
    let read = |_, record: &PromptRecord| Ok(tokens(model, record, chat_arguments)?.0);
    let take = |line, record: PromptRecord, tokens: Vec<u32>| scorer.take(line, record, tokens);
    let (n_scored, n_refused) = for_each_record(input, read, take)?;
    scorer.flush()?;
    if n_scored == 0 {
        bail!("input {}: no record to score", input::name(input));
    }
    Ok(if n_refused == 0 { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

impl Scorer<'_> {
    fn take(&mut self, line: usize, record: PromptRecord, mut tokens: Vec<u32>) -> Result<()> {
        if record.tokens.is_none() {
            // As in training, a response that is given as text ends with a stop token.
            tokens.extend(self.model.stops.first());
        }
        if !has_room(self.batch.n_tokens(), tokens.len()) {
            self.flush()?;
        }
        self.batch.push_whole(self.head.scored(&tokens));
        self.records.push((line, record.id));
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let scores = self.pass.forward_scores(&self.model.policy, &std::mem::take(&mut self.batch))?;
        for ((line, id), score) in std::mem::take(&mut self.records).into_iter().zip(scores) {
            serde_json::to_writer(&mut self.out, &ScoredLine { line, id, score })?;
            writeln!(self.out)?;
        }
        Ok(self.out.flush()?)
    }
}
