//! Log-probs and entropies of given responses under a policy.

use crate::config::Plan;
use crate::error::Result;
use stapo_core::Rollout;
use stapo_core::batch::pack_in_order;
use stapo_model::OutOfMemory;
use stapo_model::decoder::{HeadOptions, PackedBatch, Pass, Policy, TokenScores};

/// A prompt and a response to score.
#[derive(Debug, Clone, Copy)]
pub struct Sequence<'a> {
    pub prompt: &'a [u32],
    pub tokens: &'a [u32],
}

impl<'a> Sequence<'a> {
    pub fn of(rollout: &'a Rollout) -> Self {
        Sequence { prompt: &rollout.prompt_tokens, tokens: &rollout.tokens }
    }
}

/// The scores of one response's tokens. The model's f32 values are widened to the objective's f64, which is exact.
pub struct ResponseScores {
    pub logp: Vec<f64>,
    pub entropy: Vec<f64>,
    pub collision: Vec<f64>,
    pub alternatives: Vec<Vec<(u32, f32)>>,
}

/// The scores of every sequence, in order, by forward passes over micro-batches.
pub fn score(
    pass: &mut Pass,
    policy: &Policy,
    plan: &Plan,
    sequences: &[Sequence],
) -> Result<Vec<ResponseScores>> {
    score_by(plan, sequences, |batch, options| pass.score(policy, batch, options))
}

/// As [`score`], under the policy without its adapters.
pub fn score_base(
    pass: &mut Pass,
    policy: &Policy,
    plan: &Plan,
    sequences: &[Sequence],
) -> Result<Vec<ResponseScores>> {
    score_by(plan, sequences, |batch, options| pass.score_base(policy, batch, options))
}

fn score_by(
    plan: &Plan,
    sequences: &[Sequence],
    mut score: impl FnMut(&PackedBatch, HeadOptions) -> std::result::Result<TokenScores, OutOfMemory>,
) -> Result<Vec<ResponseScores>> {
    let lengths: Vec<usize> = sequences.iter().map(|s| s.prompt.len() + s.tokens.len()).collect();
    let options = HeadOptions { n_alternatives: 0, ..head_options(plan) };
    let mut all = Vec::with_capacity(sequences.len());
    for microbatch in pack_in_order(&lengths, plan.config.update.microbatch_tokens)? {
        let own: Vec<Sequence> = microbatch.sequences.iter().map(|&idx| sequences[idx]).collect();
        let scores = score(&packed(&own), options)?;
        all.extend(split(&scores, &own));
    }
    Ok(all)
}

pub fn head_options(plan: &Plan) -> HeadOptions {
    HeadOptions {
        temperature: plan.config.rollout.temperature,
        n_alternatives: plan.config.record.alternatives,
    }
}

/// Sequences as the model takes them.
pub fn packed(sequences: &[Sequence]) -> PackedBatch {
    let mut batch = PackedBatch::new();
    for Sequence { prompt, tokens } in sequences {
        let all: Vec<u32> = prompt.iter().chain(*tokens).copied().collect();
        batch.push(&all, prompt.len());
    }
    batch
}

/// The scores of a batch, split by sequence.
pub fn split(scores: &TokenScores, sequences: &[Sequence]) -> Vec<ResponseScores> {
    let mut start = 0;
    let mut parts = Vec::with_capacity(sequences.len());
    for sequence in sequences {
        let range = start..start + sequence.tokens.len();
        parts.push(ResponseScores {
            logp: widen(&scores.logp[range.clone()]),
            entropy: widen(&scores.entropy[range.clone()]),
            collision: widen(&scores.collision[range.clone()]),
            alternatives: scores.alternatives.get(range.clone()).map(<[_]>::to_vec).unwrap_or_default(),
        });
        start = range.end;
    }
    parts
}

pub fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}
