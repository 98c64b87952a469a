//! Training a reward model: the derivatives of pairs of scores instead of those of log-probs.

use super::config::PretrainConfig;
use super::preference::{judged_file, row_sequences};
use super::rows::TextRow;
use super::sequence::TextSequence;
use super::{LearnedBatch, Pretrainer};
use crate::error::Result;
use stapo_core::batch::pack_in_order;
use stapo_core::preference::Side;
use stapo_core::record::{HeldOutPairs, RankingMetrics};
use stapo_core::reward_model::{PairEffect, RankingSpec};
use stapo_core::stats::wilson;
use stapo_model::decoder::PackedBatch;

/// A chosen and a rejected response to one prompt.
struct Pair {
    sequences: Vec<TextSequence>,
    margin: f64,
}

/// Whether gradients follow the scores.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Learn,
    Evaluate,
}

/// Sums over pairs.
#[derive(Default)]
struct Sums {
    loss: f64,
    n_pairs: usize,
    n_in_order: usize,
    chosen: f64,
    rejected: f64,
}

impl Pretrainer {
    /// Forward and backward of the pairs of one optimizer step; gradients are un-normalised.
    pub(super) fn learn_ranking(
        &mut self,
        config: &PretrainConfig,
        spec: RankingSpec,
    ) -> Result<LearnedBatch> {
        let pairs = self.pairs(&self.next_rows(config)?)?;
        let sums = self.rank(config, spec, &pairs, Purpose::Learn)?;
        let n_pairs = sums.n_pairs.max(1) as f64;
        let metrics = RankingMetrics {
            n_pairs: sums.n_pairs,
            accuracy: sums.n_in_order as f64 / n_pairs,
            score_chosen: sums.chosen / n_pairs,
            score_rejected: sums.rejected / n_pairs,
            eval: None,
        };
        Ok(LearnedBatch {
            loss: sums.loss,
            entropy_mean: 0.0,
            n_tokens: pairs.iter().map(Pair::n_tokens).sum(),
            n_scored: 2 * sums.n_pairs,
            n_examples: sums.n_pairs as u64,
            scale: 1.0 / n_pairs,
            preference: None,
            reward_model: Some(metrics),
        })
    }

    /// The loss and the accuracy of held-out pairs; `None` without such pairs.
    pub(super) fn held_out_pairs(
        &mut self,
        config: &PretrainConfig,
        spec: RankingSpec,
    ) -> Result<Option<(f64, HeldOutPairs)>> {
        let (n_learned, n_rows) = {
            let (all, n_learned) = judged_file(self.texts.file())?.all();
            (n_learned, all.count())
        };
        let pairs = self.pairs(&(n_learned..n_rows).collect::<Vec<_>>())?;
        let Sums { loss, n_pairs, n_in_order, .. } = self.rank(config, spec, &pairs, Purpose::Evaluate)?;
        let Ok(interval) = wilson(n_in_order, n_pairs, 0.95) else { return Ok(None) };
        let (accuracy, low, high) = (n_in_order as f64 / n_pairs as f64, interval.low, interval.high);
        Ok(Some((loss / n_pairs as f64, HeldOutPairs { n_pairs, accuracy, low, high })))
    }

    /// Rows by their index.
    fn pairs(&self, row_idxs: &[usize]) -> Result<Vec<Pair>> {
        let file = judged_file(self.texts.file())?;
        let model = &self.learner.model;
        let head = model.policy.config().score.unwrap_or_default();
        let pair = |&row_idx: &usize| {
            let mut sequences = row_sequences(file, model, row_idx)?;
            for sequence in &mut sequences {
                let n_scored = head.scored(&sequence.tokens).len();
                sequence.tokens.truncate(n_scored);
            }
            let margin = match file.row_at(row_idx) {
                TextRow::Judged { margin, .. } => *margin,
                _ => 0.0,
            };
            Ok(Pair { sequences, margin })
        };
        row_idxs.iter().map(pair).collect()
    }

    /// Scores pairs micro-batch by micro-batch, and adds their gradients where they are learned from.
    fn rank(
        &mut self,
        config: &PretrainConfig,
        spec: RankingSpec,
        pairs: &[Pair],
        purpose: Purpose,
    ) -> Result<Sums> {
        let lengths: Vec<usize> = pairs.iter().map(Pair::n_tokens).collect();
        let mut sums = Sums::default();
        for microbatch in pack_in_order(&lengths, config.update.microbatch_tokens)? {
            let chosen: Vec<&Pair> = microbatch.sequences.iter().map(|&idx| &pairs[idx]).collect();
            let mut batch = PackedBatch::new();
            chosen.iter().flat_map(|pair| &pair.sequences).for_each(|it| batch.push_whole(&it.tokens));
            let scores = self.pass.forward_scores(&self.learner.model.policy, &batch)?;
            let mut d_scores: Vec<f32> = Vec::with_capacity(scores.len());
            for (pair, scores) in chosen.iter().zip(scores.chunks_exact(2)) {
                d_scores.extend(sums.add(spec, pair, scores));
            }
            if purpose == Purpose::Learn {
                self.learner.backward_scores(&mut self.pass, &d_scores);
            }
        }
        Ok(sums)
    }
}

impl Pair {
    fn n_tokens(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.tokens.len()).sum()
    }
}

impl Sums {
    /// Adds a pair with the scores of its sequences, and returns the derivatives by these.
    fn add(&mut self, spec: RankingSpec, pair: &Pair, scores: &[f64]) -> [f32; 2] {
        let is_swapped = pair.sequences[0].side == Some(Side::Rejected);
        let (chosen, rejected) = if is_swapped { (scores[1], scores[0]) } else { (scores[0], scores[1]) };
        let PairEffect { loss, d_chosen, d_rejected } = spec.evaluate(chosen, rejected, pair.margin);
        self.loss += loss;
        self.n_pairs += 1;
        self.n_in_order += usize::from(chosen > rejected);
        self.chosen += chosen;
        self.rejected += rejected;
        let derivatives = [d_chosen as f32, d_rejected as f32];
        if is_swapped { [derivatives[1], derivatives[0]] } else { derivatives }
    }
}
