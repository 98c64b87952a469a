//! Sums of ranks against the gradients of each micro-batch, added in order.

use super::GradientSums;
use crate::config::{Family, Heads, ModelConfig};
use crate::decoder::{Gradients, HeadOptions, PackedBatch, Pass, Policy, Recompute};
use crate::ranks::{RankError, Ranks, Share, Solo, Transport};
use crate::testing::{tiny_config, tiny_layers};
use stapo_ops::{CpuOptions, Device, View, ViewMut};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

/// Ranks that are threads of this process. `is_queued` says how the sums use them; both ways have the same result.
struct Threads {
    rank: usize,
    is_queued: bool,
    to: Vec<Mutex<Sender<Vec<u8>>>>,
    from: Vec<Mutex<Receiver<Vec<u8>>>>,
}

impl Threads {
    fn ranks(world: usize, is_queued: bool) -> Vec<Ranks> {
        let mut to: Vec<Vec<_>> = (0..world).map(|_| Vec::new()).collect();
        let mut from: Vec<Vec<_>> = (0..world).map(|_| Vec::new()).collect();
        for sender in &mut to {
            for receiver in &mut from {
                let (send, receive) = channel();
                sender.push(Mutex::new(send));
                receiver.push(Mutex::new(receive));
            }
        }
        let ranks = to.into_iter().zip(from).enumerate();
        ranks.map(|(rank, (to, from))| Arc::new(Threads { rank, is_queued, to, from }) as Ranks).collect()
    }
}

impl Transport for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.to.len()
    }

    fn exchange(
        &self,
        _device: &Device,
        sends: Vec<(usize, View<'_, f32>)>,
        receives: Vec<(usize, ViewMut<'_, f32>)>,
    ) -> Result<(), RankError> {
        for (to, view) in sends {
            self.send(to, view.to_vec().iter().flat_map(|value| value.to_le_bytes()).collect());
        }
        for (from, mut view) in receives {
            let bytes = self.receive(from)?;
            let words = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            view.write(&words.collect::<Vec<f32>>());
        }
        Ok(())
    }

    fn is_queued(&self) -> bool {
        self.is_queued
    }

    fn send(&self, to: usize, bytes: Vec<u8>) {
        self.to[to].lock().unwrap().send(bytes).unwrap();
    }

    fn receive(&self, from: usize) -> Result<Vec<u8>, RankError> {
        Ok(self.from[from].lock().unwrap().recv().unwrap())
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, RankError> {
        (0..self.world()).for_each(|to| self.send(to, bytes.to_vec()));
        (0..self.world()).map(|from| self.receive(from)).collect()
    }

    fn gather(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, RankError> {
        self.all_gather(&bytes)
    }

    fn broadcast(&self, bytes: &[u8]) -> Result<Vec<u8>, RankError> {
        Ok(self.all_gather(bytes)?.remove(0))
    }

    fn fail(&self, problem: &str) -> RankError {
        RankError { rank: self.rank, problem: problem.to_string() }
    }

    fn take_waited(&self) -> f64 {
        0.0
    }
}

/// Five layers, so that layers share memory where they are alike, and parameters of several slices.
fn policy(tied_embeddings: bool) -> Policy {
    let mut wide = ModelConfig {
        width: 96,
        layers: tiny_layers(Family::Qwen3, Heads { query: 3, kv: 1, dim: 6 }, 400, 5),
        vocabulary: 600,
        tied_embeddings,
        ..tiny_config(Family::Qwen3)
    };
    if !tied_embeddings {
        wide.layers[3] = tiny_layers(Family::Qwen2, Heads { query: 4, kv: 2, dim: 10 }, 300, 1)[0].clone();
    }
    let device = Device::cpu(CpuOptions { threads: 1, ..CpuOptions::default() });
    Policy::random(&device, &wide, 3, 0.2).unwrap()
}

/// The last micro-batch has no scored token: its gradient is zero.
const N_MICROBATCHES: u32 = 5;

fn microbatch(number: u32) -> PackedBatch {
    let mut batch = PackedBatch::new();
    let tokens: Vec<u32> = (0..9 + number).map(|i| (i * i + 7 * number) % 600).collect();
    let n_prompt = if number + 1 == N_MICROBATCHES { tokens.len() } else { 2 };
    batch.push_response(&tokens, n_prompt);
    batch
}

/// Runs forward, and gives backward's two derivatives of each scored token.
fn forward(policy: &Policy, pass: &mut Pass, number: u32) -> (Vec<f32>, Vec<f32>) {
    let scores = pass.forward(policy, &microbatch(number), HeadOptions::default()).unwrap();
    let d_logp = (0..scores.logp.len()).map(|i| 0.5 - 0.25 * (i % 4) as f32).collect();
    (d_logp, vec![0.125; scores.logp.len()])
}

/// The gradient of every parameter: each micro-batch from zero, added in order, and the two of a tied embedding at the end.
fn expected(policy: &Policy) -> Vec<Vec<f32>> {
    let mut pass = Pass::training(policy, Recompute::Nothing).unwrap();
    let mut sums: Vec<Vec<f32>> = Vec::new();
    for number in 0..N_MICROBATCHES {
        let mut gradients = Gradients::zeros(policy).unwrap();
        let (d_logp, d_entropy) = forward(policy, &mut pass, number);
        pass.backward(policy, &d_logp, &d_entropy, &mut gradients).unwrap();
        let parts: Vec<Vec<f32>> = gradients.parts().map(|part| part.to_vec()).collect();
        match number {
            0 => sums = parts,
            _ => sums.iter_mut().flatten().zip(parts.iter().flatten()).for_each(|(sum, part)| *sum += part),
        }
    }
    if policy.weights.head.is_none() {
        let lookup = sums.pop().unwrap();
        sums[0].iter_mut().zip(&lookup).for_each(|(sum, part)| *sum += part);
    }
    sums
}

/// The sums of one rank, with how each is shared out.
fn sums_of(policy: &Policy, ranks: &Ranks) -> Vec<(Share, Vec<f32>)> {
    let mut pass = Pass::training(policy, Recompute::Layers).unwrap();
    let mut sums = GradientSums::new(policy, policy.device(), ranks).unwrap();
    let (rank, world) = (ranks.rank() as u32, ranks.world() as u32);
    for first in (0..N_MICROBATCHES).step_by(world as usize) {
        let n_microbatches = world.min(N_MICROBATCHES - first);
        let scored = (rank < n_microbatches).then(|| forward(policy, &mut pass, first + rank));
        let mut round = sums.round(n_microbatches as usize);
        if let Some((d_logp, d_entropy)) = scored {
            pass.backward(policy, &d_logp, &d_entropy, &mut round).unwrap();
        }
        round.finish().unwrap();
    }
    sums.join();
    sums.owned().map(|(share, sum)| (share, sum.to_vec())).collect()
}

#[test]
fn sums_of_any_number_of_ranks_are_the_micro_batches_added_in_order() {
    for tied in [true, false] {
        let policy = policy(tied);
        let expected = expected(&policy);
        for (world, is_queued) in [(1, false), (2, false), (3, false), (4, false), (2, true), (3, true)] {
            let ranks = if world == 1 { vec![Solo::ranks()] } else { Threads::ranks(world, is_queued) };
            let by_rank: Vec<_> = std::thread::scope(|scope| {
                let policy = &policy;
                let threads: Vec<_> =
                    ranks.iter().map(|ranks| scope.spawn(move || sums_of(policy, ranks))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            for (idx, expected) in expected.iter().enumerate() {
                let parts: Vec<Vec<f32>> = by_rank.iter().map(|sums| sums[idx].1.clone()).collect();
                let joined = by_rank[0][idx].0.joined(&parts);
                let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&joined), bits(expected), "tied {tied}, {world} ranks, parameter {idx}");
            }
        }
    }
}

/// On the CPU products of layers continue from one micro-batch to the next, so that only head and embedding are compared.
#[test]
fn head_and_embedding_of_one_process_that_adds_as_it_goes_have_the_same_sums() {
    for tied in [true, false] {
        let policy = policy(tied);
        let expected = expected(&policy);
        let mut pass = Pass::training(&policy, Recompute::Nothing).unwrap();
        let mut gradients = Gradients::by_microbatch_in(&policy, policy.device()).unwrap();
        // What a mini-batch leaves behind is not part of the next one.
        for _ in 0..2 {
            gradients.clear();
            for number in 0..N_MICROBATCHES {
                let (d_logp, d_entropy) = forward(&policy, &mut pass, number);
                pass.backward(&policy, &d_logp, &d_entropy, &mut gradients).unwrap();
            }
        }
        gradients.join();
        let found: Vec<Vec<f32>> = gradients.sums().map(|sum| sum.to_vec()).collect();
        let compared = if tied { vec![0] } else { vec![0, expected.len() - 1] };
        assert!(compared.iter().all(|&idx| found[idx] == expected[idx]), "tied {tied}");
        gradients.clear();
        assert_eq!(gradients.head_sum_squares(), 0.0, "cleared, and not yet written");
    }
}

#[test]
fn a_probe_finds_numbers_that_are_not_finite_and_adds_nothing() {
    let policy = policy(true);
    let mut pass = Pass::training(&policy, Recompute::Nothing).unwrap();
    let mut sums = GradientSums::new(&policy, policy.device(), &Solo::ranks()).unwrap();
    for (bad, is_finite) in [(1.0, true), (f32::NAN, false)] {
        let (mut d_logp, d_entropy) = forward(&policy, &mut pass, 0);
        d_logp[1] = bad;
        let mut probe = sums.probe();
        pass.backward(&policy, &d_logp, &d_entropy, &mut probe).unwrap();
        assert_eq!(probe.is_finite(), is_finite);
    }
    sums.join();
    assert!(sums.owned().all(|(_, sum)| sum.to_vec().iter().all(|value| *value == 0.0)));
}
