//! Recorded responses: all of a step without their tokens, and the tokens as the viewer reads them.

use super::http::{Refusal, Response};
use super::question::{is_too_much, unreadable};
use crate::shared::units::size;
use crate::shared::viewer::{Inspected, opinion, recorded};
use serde_json::{Value, json};
use stapo_core::record::ResponseRecord;
use std::path::Path;

/// A larger file of responses is left to `stapo inspect`.
const MAX_BYTES: u64 = 256 << 20;

/// The responses of a step.
pub fn list(run: &Path, step: u64) -> Result<Response, Refusal> {
    let inspected = open(run, step)?;
    let responses: Vec<Value> = inspected.responses.iter().map(summary).collect();
    Ok(Response::json(&json!({ "step": step, "responses": responses })))
}

/// The tokens of a step.
pub fn tokens(run: &Path, step: u64) -> Result<Response, Refusal> {
    Ok(Response::json(&recorded(&open(run, step)?)))
}

fn open(run: &Path, step: u64) -> Result<Inspected, Refusal> {
    let file = run.join("rollouts").join(format!("step-{step:06}.jsonl"));
    let n_bytes = file.symlink_metadata().map_or(0, |metadata| metadata.len());
    if is_too_much(n_bytes, MAX_BYTES) {
        return Err(Refusal::new(
            413,
            format!(
                "step {step}: {} of responses; `stapo inspect --step {step}` writes a page of them",
                size(n_bytes)
            ),
        ));
    }
    Inspected::open(run, Some(step)).map_err(|error| unreadable(&error))
}

pub(super) fn summary(response: &ResponseRecord) -> Value {
    let tokens = &response.tokens;
    let turns = response.episode.as_ref().map(|episode| &episode.turns);
    json!({
        "problem": response.problem_id,
        "sample": response.sample_idx,
        "prompt": response.prompt,
        "reference": response.reference,
        "text": response.text,
        "verdict": response.verdict,
        "reward": response.reward,
        "rewards": response.rewards,
        "advantage": response.advantage,
        "finish": response.finish,
        "n_tokens": tokens.id.len(),
        "n_silenced": tokens.silenced_by.iter().filter(|by| by.is_some()).count(),
        "n_clipped": tokens.clipped.iter().filter(|clipped| **clipped).count(),
        "n_candidates": tokens.is_candidate.iter().filter(|is| **is).count(),
        "program": response.program,
        "judge": response.judge.as_deref().map(opinion),
        "n_turns": turns.map(Vec::len),
        "n_calls": turns.map(|turns| turns.iter().map(|turn| turn.calls.len()).sum::<usize>()),
    })
}
