//! Log-probs and entropies of given responses under a policy.

use crate::error::Result;
use crate::plan::config::Plan;
use crate::ranks::wire::{Malformed, Packer, Unpacker};
use crate::ranks::{RankError, Transport};
use stapo_core::Rollout;
use stapo_core::batch::{Microbatch, Packing, SequenceLength, SequenceTooLong, pack};
use stapo_core::objective::EntropyBonus;
use stapo_model::OutOfMemory;
use stapo_model::decoder::{HeadOptions, PackedBatch, Pass, PendingScores, Policy, TokenScores};

/// Tokens with the mark of those to score: the sampled ones of a rollout, or the learned ones of a text.
#[derive(Debug, Clone, Copy)]
pub struct Sequence<'a> {
    pub tokens: &'a [u32],
    /// One entry per token; the first is false.
    pub is_scored: &'a [bool],
    /// The tokens that each scored one was drawn from; empty if it was drawn from all.
    pub kept: &'a [Vec<u32>],
}

/// The tokens of a [`Sequence`], and which of them are scored.
pub type MarkedTokens = (Vec<u32>, Vec<bool>);

impl<'a> From<&'a MarkedTokens> for Sequence<'a> {
    fn from((tokens, is_scored): &'a MarkedTokens) -> Self {
        Sequence { tokens, is_scored, kept: &[] }
    }
}

impl<'a> From<&'a Rollout> for Sequence<'a> {
    fn from(rollout: &'a Rollout) -> Self {
        Sequence { tokens: &rollout.tokens, is_scored: &rollout.is_sampled, kept: &rollout.kept }
    }
}

impl Sequence<'_> {
    pub fn n_scored(&self) -> usize {
        self.is_scored.iter().filter(|is_scored| **is_scored).count()
    }

    /// The tokens in front of the first scored one; none if no token is scored.
    fn prompt(&self) -> &[u32] {
        let n_prompt = self.is_scored.iter().position(|is_scored| *is_scored).unwrap_or(0);
        &self.tokens[..n_prompt]
    }

    /// Tokens of the prompt where it is the prompt of the sequence in front as well.
    fn n_shared(&self, before: Option<&Sequence>) -> usize {
        before.filter(|before| before.prompt() == self.prompt()).map_or(0, |_| self.prompt().len())
    }
}

/// How many leading tokens each sequence has in common with the one in front.
fn shared_lengths(sequences: &[Sequence]) -> Vec<SequenceLength> {
    let before = std::iter::once(None).chain(sequences.iter().map(Some));
    let length = |(sequence, before): (&Sequence, Option<&Sequence>)| SequenceLength {
        n_tokens: sequence.tokens.len(),
        n_shared: sequence.n_shared(before),
    };
    sequences.iter().zip(before).map(length).collect()
}

/// Sequences in micro-batches, in order.
pub fn microbatches(
    sequences: &[Sequence],
    packing: Packing,
) -> std::result::Result<Vec<Microbatch>, SequenceTooLong> {
    pack(&shared_lengths(sequences), packing)
}

/// The scores of one sequence's scored tokens. The model's f32 values are widened to the objective's f64, which is exact.
#[derive(Debug, Clone)]
pub struct ResponseScores {
    pub logp: Vec<f64>,
    pub entropy: Vec<f64>,
    pub collision: Vec<f64>,
    pub alternatives: Vec<Vec<(u32, f32)>>,
}

/// The scores of every sequence, in order, by forward passes over micro-batches, which are dealt out to the ranks.
pub fn score(
    pass: &mut Pass,
    policy: &Policy,
    plan: &Plan,
    ranks: &dyn Transport,
    sequences: &[Sequence],
) -> Result<Vec<ResponseScores>> {
    let packing = plan.packing(policy.config());
    let options = HeadOptions { n_alternatives: 0, ..head_options(plan) };
    score_by(packing, options, ranks, sequences, |batch, options| pass.start_score(policy, batch, options))
}

/// As [`score`], under the policy without its adapters.
pub fn score_base(
    pass: &mut Pass,
    policy: &Policy,
    plan: &Plan,
    ranks: &dyn Transport,
    sequences: &[Sequence],
) -> Result<Vec<ResponseScores>> {
    let packing = plan.packing(policy.config());
    let options = HeadOptions { n_alternatives: 0, ..head_options(plan) };
    score_by(packing, options, ranks, sequences, |batch, options| {
        pass.start_score_base(policy, batch, options)
    })
}

/// The likeliest token instead of every scored token of every sequence.
pub fn preferred(
    pass: &mut Pass,
    policy: &Policy,
    plan: &Plan,
    ranks: &dyn Transport,
    sequences: &[Sequence],
) -> Result<Vec<Vec<u32>>> {
    let packing = plan.packing(policy.config());
    let options = HeadOptions { n_alternatives: 1, ..head_options(plan) };
    let scores = score_by(packing, options, ranks, sequences, |batch, options| {
        pass.start_score(policy, batch, options)
    })?;
    let likeliest = |scores: ResponseScores| scores.alternatives.iter().map(|listed| listed[0].0).collect();
    Ok(scores.into_iter().map(likeliest).collect())
}

/// The scores of every sequence, in order: `start` begins the forward pass of a micro-batch.
pub fn score_by(
    packing: Packing,
    options: HeadOptions,
    ranks: &dyn Transport,
    sequences: &[Sequence],
    mut start: impl FnMut(&PackedBatch, HeadOptions) -> std::result::Result<PendingScores, OutOfMemory>,
) -> Result<Vec<ResponseScores>> {
    let mut scored: Vec<(usize, ResponseScores)> = Vec::new();
    let microbatches = microbatches(sequences, packing)?;
    let read = |(pending, packed, microbatch): (PendingScores, Vec<Sequence>, &Microbatch)| {
        let scores = split(&pending.wait(), &packed);
        microbatch.sequences.iter().copied().zip(scores).collect::<Vec<_>>()
    };
    let mut pending = None;
    for microbatch in microbatches.iter().skip(ranks.rank()).step_by(ranks.world()) {
        let chosen: Vec<Sequence> = microbatch.sequences.iter().map(|&idx| sequences[idx]).collect();
        let started = start(&packed(&chosen, packing), options)?;
        // A GPU runs a micro-batch while the host reads the one before.
        if let Some(before) = pending.replace((started, chosen, microbatch)) {
            scored.extend(read(before));
        }
    }
    scored.extend(pending.into_iter().flat_map(read));
    if ranks.world() > 1 {
        scored = all_scores(ranks, &scored)?;
        scored.sort_by_key(|(idx, _)| *idx);
    }
    Ok(scored.into_iter().map(|(_, scores)| scores).collect())
}

/// What all ranks have `computed`: scores, each with the index of its response.
pub fn all_scores(
    ranks: &dyn Transport,
    computed: &[(usize, ResponseScores)],
) -> std::result::Result<Vec<(usize, ResponseScores)>, RankError> {
    let mut packer = Packer::default();
    for (idx, scores) in computed {
        packer.number(*idx);
        scores.pack(&mut packer);
    }
    let mut all = Vec::new();
    for (rank, bytes) in ranks.all_gather(&packer.0)?.iter().enumerate() {
        let mut read = Unpacker(bytes);
        while !read.is_empty() {
            let scores = read.number().and_then(|idx| Ok((idx, ResponseScores::unpack(&mut read)?)));
            let unreadable =
                |Malformed| RankError { rank, problem: "sent scores that cannot be read".into() };
            all.push(scores.map_err(unreadable)?);
        }
    }
    Ok(all)
}

impl ResponseScores {
    /// The values were f32, so that nothing is lost.
    fn pack(&self, packer: &mut Packer) {
        let narrow = |values: &[f64]| values.iter().map(|&value| value as f32).collect::<Vec<f32>>();
        packer.singles(&narrow(&self.logp));
        packer.singles(&narrow(&self.entropy));
        packer.singles(&narrow(&self.collision));
        packer.number(self.alternatives.len());
        for listed in &self.alternatives {
            packer.tokens(&listed.iter().map(|(id, _)| *id).collect::<Vec<_>>());
            packer.singles(&listed.iter().map(|(_, logp)| *logp).collect::<Vec<_>>());
        }
    }

    fn unpack(read: &mut Unpacker) -> std::result::Result<Self, Malformed> {
        let (logp, entropy, collision) =
            (widen(&read.singles()?), widen(&read.singles()?), widen(&read.singles()?));
        let n_listed = read.number()?;
        let mut alternatives = Vec::new();
        for _ in 0..n_listed {
            let (ids, logp) = (read.tokens()?, read.singles()?);
            if ids.len() != logp.len() {
                return Err(Malformed);
            }
            alternatives.push(ids.into_iter().zip(logp).collect());
        }
        let is_whole = [entropy.len(), collision.len()] == [logp.len(); 2]
            && (alternatives.is_empty() || alternatives.len() == logp.len());
        is_whole.then_some(Self { logp, entropy, collision, alternatives }).ok_or(Malformed)
    }
}

pub fn head_options(plan: &Plan) -> HeadOptions {
    HeadOptions {
        temperature: plan.config.rollout.temperature,
        n_alternatives: plan.config.record.alternatives,
        has_entropy_gradient: plan.objective.entropy_bonus != EntropyBonus::None,
    }
}

/// The sequences of a micro-batch as the model takes them.
pub fn packed(sequences: &[Sequence], packing: Packing) -> PackedBatch {
    let mut batch = PackedBatch::new();
    for (Sequence { tokens, is_scored, kept }, length) in sequences.iter().zip(shared_lengths(sequences)) {
        match length.n_shared {
            n_shared if n_shared > 0 && packing.budget_keys.is_some() => {
                batch.push_sharing(n_shared, tokens, is_scored);
            }
            _ => batch.push(tokens, is_scored),
        }
        batch.keep(kept);
    }
    batch
}

/// The scores of a batch, split by sequence.
pub fn split(scores: &TokenScores, sequences: &[Sequence]) -> Vec<ResponseScores> {
    let mut start = 0;
    let mut parts = Vec::with_capacity(sequences.len());
    for sequence in sequences {
        let range = start..start + sequence.n_scored();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::Solo;

    #[test]
    fn scores_whose_columns_differ_in_length_are_refused() {
        let scores = ResponseScores {
            logp: vec![-0.5, -1.25],
            entropy: vec![0.5, 0.75],
            collision: vec![0.25, 1.0],
            alternatives: vec![vec![(3, -0.5), (1, -2.0)], vec![(7, -1.25)]],
        };
        let [(idx, read)] = &all_scores(&Solo, &[(4, scores.clone())]).unwrap()[..] else { panic!("one") };
        assert_eq!((*idx, &read.logp, &read.alternatives), (4, &scores.logp, &scores.alternatives));
        assert_eq!((&read.entropy, &read.collision), (&scores.entropy, &scores.collision));
        let without = ResponseScores { alternatives: Vec::new(), ..scores.clone() };
        assert!(all_scores(&Solo, &[(4, without)]).is_ok(), "alternatives are not always recorded");
        let tears: [fn(&mut ResponseScores); 3] = [
            |torn| torn.entropy.truncate(1),
            |torn| torn.collision.truncate(1),
            |torn| torn.alternatives.truncate(1),
        ];
        for (idx, tear) in tears.into_iter().enumerate() {
            let mut torn = scores.clone();
            tear(&mut torn);
            assert_eq!(all_scores(&Solo, &[(0, torn)]).unwrap_err().rank, 0, "tear {idx}");
        }
        // One alternative has a token and no log-prob.
        let mut packer = Packer::default();
        for column in [[-0.5], [0.5], [0.25]] {
            packer.singles(&column);
        }
        packer.number(1);
        packer.tokens(&[3, 1]);
        packer.singles(&[-0.5]);
        assert!(ResponseScores::unpack(&mut Unpacker(&packer.0)).is_err());
    }
}
