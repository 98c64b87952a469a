//! How the work of a step falls on ranks, and what the ranks send each other.

use super::cost::{Costs, Tokens};
use super::lengths::Lengths;
use super::links::World;
use super::sampling::shuffled;
use stapo_core::batch::pack_in_order;
use stapo_core::random::Key;
use stapo_model::decoder::Recompute;

/// What a step over several ranks takes in addition to the work of one; seconds are of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankedStep {
    pub world: World,
    /// Seconds that a rank samples on average; the phase `rollout` is that of the slowest.
    pub rollout_mean: f64,
    pub exchange: Exchange,
    /// The share of all ranks' time in which a rank waits for others, exchanges aside.
    pub idle_share: f64,
}

/// Seconds of exchanges, by what is exchanged.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Exchange {
    /// Gradients of micro-batches to their owners, and their addition in the order of the micro-batches, which one rank
    /// needs too but does within its products. Both run during backward.
    pub gradients: f64,
    pub fold: f64,
    /// What backward does not hide of the two.
    pub exposed: f64,
    /// Weights from their owners to all.
    pub weights: f64,
    /// Responses with log-probs and entropies to all.
    pub responses: f64,
    /// Bytes that a rank sends.
    pub bytes_sent: f64,
}

impl Exchange {
    /// Seconds in which ranks exchange instead of computing.
    pub fn seconds(&self) -> f64 {
        self.exposed + self.weights + self.responses
    }
}

/// How the micro-batches of a mini-batch fall on ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rounds {
    pub count: f64,
    /// The slowest micro-batches of all rounds, as a share of the work of all: 1 for one rank, and at least 1 / ranks.
    pub share: f64,
}

impl Rounds {
    /// All of one rank's rounds, whose number is not needed.
    pub const ONE_RANK: Rounds = Rounds { count: 0.0, share: 1.0 };
}

/// Bytes of one element of a gradient, and those that its addition to the sum reads and writes: the gradient is read, the
/// sum is read and written.
const GRADIENT_BYTES: f64 = 4.0;
const FOLD_BYTES: f64 = 12.0;
/// Bytes of a response token: the token, its log-prob and its entropy; log-prob and entropy again after the update's pass.
const RESPONSE_BYTES: f64 = 4.0 + 16.0 + 16.0;
/// Mini-batches that are simulated, with lengths in another order each.
const N_ORDERS: u64 = 8;
/// Sequences of one simulated mini-batch, at most.
const MOST_SEQUENCES: usize = 1 << 15;

/// The work of a step that ranks share.
#[derive(Debug, Clone, Copy)]
pub(super) struct SharedWork<'a> {
    pub costs: Costs<'a>,
    pub lengths: Lengths,
    pub world: World,
    /// Responses of a step and of one mini-batch.
    pub n_responses: usize,
    pub n_minibatch_responses: usize,
    pub microbatch_tokens: usize,
    pub recompute: Recompute,
}

impl SharedWork<'_> {
    /// Packs mini-batches as an update does and deals the micro-batches out. A round ends with its slowest micro-batch,
    /// because owners add the gradients of a round before the next begins.
    pub fn rounds(&self) -> Rounds {
        if self.world.n_ranks == 1 {
            return Rounds::ONE_RANK;
        }
        let prompt = self.lengths.prompt_mean.round() as usize;
        let responses = self.lengths.responses(self.n_minibatch_responses.clamp(1, MOST_SEQUENCES));
        let (mut n_rounds, mut slowest, mut all) = (0.0, 0.0, 0.0);
        for order in 0..N_ORDERS {
            let lengths: Vec<usize> =
                shuffled(&responses, Key::new(order)).iter().map(|response| prompt + response).collect();
            let budget = self.microbatch_tokens.max(lengths.iter().copied().max().unwrap_or(1));
            let packed = pack_in_order(&lengths, budget).expect("no sequence is above the budget");
            let seconds: Vec<f64> = packed
                .iter()
                .map(|microbatch| {
                    let sequences: Vec<usize> =
                        microbatch.sequences.iter().map(|&idx| lengths[idx]).collect();
                    self.microbatch_seconds(&sequences, prompt)
                })
                .collect();
            for round in seconds.chunks(self.world.n_ranks) {
                n_rounds += 1.0;
                slowest += round.iter().copied().fold(0.0, f64::max);
            }
            all += seconds.iter().sum::<f64>();
        }
        Rounds { count: n_rounds / N_ORDERS as f64, share: slowest / all }
    }

    /// Forward and backward of sequences of these lengths.
    fn microbatch_seconds(&self, lengths: &[usize], prompt: usize) -> f64 {
        let all = lengths.iter().sum::<usize>() as f64;
        let squares: f64 = lengths.iter().map(|&length| (length as f64).powi(2)).sum();
        let scored = all - (prompt * lengths.len()) as f64;
        let tokens = Tokens { all, scored, length: squares / all };
        let host = scored * self.costs.machine.fixed.trained_token;
        self.costs.training(tokens, 1.0, self.recompute) + host
    }

    /// What the ranks send each other in a step of `n_updates` optimizer steps, whose passes take `pass_seconds`.
    pub fn exchange(&self, rounds: Rounds, n_updates: f64, pass_seconds: f64) -> Exchange {
        let Self { world, costs, .. } = self;
        let Costs { model, machine, n_adapter, .. } = costs;
        if world.n_ranks == 1 {
            return Exchange::default();
        }
        // Beside adapters the embedding is frozen.
        let embedding = if n_adapter.is_some() { 0.0 } else { (model.vocabulary * model.width) as f64 };
        // A tied embedding has a gradient as a table of inputs and another as the head.
        let lookup = if model.tied_embeddings { embedding } else { 0.0 };
        let n_weights = costs.n_trained() as f64;
        let n_gradients = n_weights + lookup;
        let n_rounds = n_updates * rounds.count;
        // A group of messages for each layer, for the embedding and for the head.
        let n_groups = model.layers.len() as f64 + 2.0;
        let gradient_bytes = GRADIENT_BYTES * n_gradients;
        let gradients = n_rounds * world.exchange(gradient_bytes, n_groups);
        let bandwidth = machine.bandwidth.per_second * machine.shares.elementwise;
        let weight_bytes = self.sent_weight_bytes() * n_weights;
        let response_bytes = RESPONSE_BYTES * self.n_responses as f64 * self.lengths.response_mean;
        let fold = n_rounds * FOLD_BYTES * n_gradients / bandwidth;
        // Nothing is left to compute when the last group, the embedding's, is ready to be sent.
        let last = (gradients + fold) * embedding / n_gradients;
        let backward = pass_seconds * self.backward_share();
        let others = (world.ranks() - 1.0) / world.ranks();
        Exchange {
            gradients,
            fold,
            exposed: last.max(gradients + fold - backward),
            weights: n_updates * world.exchange(weight_bytes, n_groups),
            // Every rank receives the responses of all others.
            responses: others * response_bytes / world.links.host.per_second,
            bytes_sent: others * (n_rounds * gradient_bytes + n_updates * weight_bytes + response_bytes),
        }
    }

    /// Bytes of a weight that its owner sends after an optimizer step: what ops read.
    fn sent_weight_bytes(&self) -> f64 {
        self.costs.compute_bytes()
    }

    /// The share of a training pass that is backward.
    fn backward_share(&self) -> f64 {
        let all = self.lengths.sequence_mean();
        let tokens =
            Tokens { all, scored: self.lengths.response_mean, length: self.lengths.attention_length() };
        1.0 - self.costs.scoring(tokens, 0.0) / self.costs.training(tokens, 0.0, self.recompute)
    }
}
