//! Responses that share the rows of their prompt have the numbers of whole sequences: scores to the bit, gradients to rounding, on
//! the CPU and on a GPU.

use crate::{bitwise, cuda};
use stapo_model::decoder::{Gradients, HeadOptions, PackedBatch, Pass, Policy, Recompute, TokenScores};

/// Prompts with the lengths of their responses. One response has two turns.
const GROUPS: [(usize, &[usize]); 4] = [(40, &[9, 1, 70, 33]), (1, &[5, 6]), (17, &[20]), (70, &[2, 64])];

fn tokens(seed: usize, n: usize) -> Vec<u32> {
    (0..n).map(|i| bitwise::token(i + 977 * seed) % 101).collect()
}

/// The groups as whole sequences, or with the rows of prompts once.
fn batch(shares: bool) -> PackedBatch {
    let mut batch = PackedBatch::new();
    for (group, (n_prompt, responses)) in GROUPS.iter().enumerate() {
        for (idx, n_response) in responses.iter().enumerate() {
            let all = [tokens(group, *n_prompt), tokens(100 + 10 * group + idx, *n_response)].concat();
            let is_given =
                |position: usize| position < *n_prompt || (n_prompt + 3..n_prompt + 6).contains(&position);
            let is_scored: Vec<bool> = (0..all.len()).map(|position| !is_given(position)).collect();
            if shares && idx > 0 {
                batch.push_sharing(*n_prompt, &all, &is_scored);
            } else {
                batch.push(&all, &is_scored);
            }
        }
    }
    batch
}

type Named = Vec<(String, Vec<f32>)>;

fn learned(policy: &Policy, recompute: Recompute, shares: bool) -> (TokenScores, Named) {
    let mut pass = Pass::training(policy, recompute).unwrap();
    let mut gradients = Gradients::zeros(policy).unwrap();
    let options = HeadOptions { temperature: 1.2, n_alternatives: 3, has_entropy_gradient: true };
    let scores = pass.forward(policy, &batch(shares), options).unwrap();
    let d = |shift: usize| -> Vec<f32> {
        (0..scores.logp.len()).map(|i| (bitwise::token(i + shift) % 200) as f32 / 100.0 - 1.0).collect()
    };
    pass.backward(policy, &d(0), &d(77), &mut gradients).unwrap();
    let gradients = gradients.tensors().map(|(spec, values)| (spec.name.clone(), values));
    (scores, gradients.collect())
}

/// `|a - b| / |b|` of vectors.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let off: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    (off / b.iter().map(|b| square(*b)).sum::<f64>().max(1e-30)).sqrt()
}

fn assert_shares(name: &str, policy: &Policy, recompute: Recompute, within: f64) {
    let (expected, whole) = learned(policy, recompute, false);
    let (got, shared) = learned(policy, recompute, true);
    assert_eq!(bitwise::bits(&got.logp), bitwise::bits(&expected.logp), "{name} {recompute:?}");
    assert_eq!(bitwise::bits(&got.entropy), bitwise::bits(&expected.entropy), "{name} {recompute:?}");
    assert_eq!(got.alternatives, expected.alternatives, "{name} {recompute:?}");
    for ((tensor, shared), (_, whole)) in shared.iter().zip(&whole) {
        let distance = distance(shared, whole);
        assert!(distance <= within, "{name} {recompute:?} {tensor}: off by {distance:.2e}");
    }
}

/// What can share rows: layers with states instead of keys cannot.
fn can_share(policy: &Policy) -> bool {
    policy.config().state_bytes(4) == 0
}

#[test]
fn responses_that_share_a_prompt_have_the_scores_and_gradients_of_whole_sequences() {
    for (name, policy) in bitwise::policies().iter().filter(|(_, policy)| can_share(policy)) {
        for recompute in [Recompute::Nothing, Recompute::Inputs, Recompute::Layers] {
            assert_shares(name, policy, recompute, 1e-5);
        }
    }
}

#[test]
fn responses_that_share_a_prompt_on_cuda_have_the_scores_and_gradients_of_whole_sequences() {
    let Some(device) = cuda::gpu() else { return };
    for (name, policy) in cuda::policies(&device).iter().filter(|(_, policy)| can_share(policy)) {
        for recompute in [Recompute::Nothing, Recompute::Inputs, Recompute::Layers] {
            assert_shares(name, policy, recompute, 5e-2);
        }
    }
}

#[test]
fn sharing_computes_each_prompt_once_and_a_prompt_that_differs_is_refused() {
    let (whole, shared) = (batch(false), batch(true));
    let n_saved: usize = GROUPS.iter().map(|(prompt, responses)| prompt * (responses.len() - 1)).sum();
    assert_eq!(whole.n_tokens() - shared.n_tokens(), n_saved);
    assert_eq!((whole.n_key_rows(), shared.n_key_rows()), (0, whole.n_tokens()));
    assert_eq!((whole.longest(), whole.targets()), (shared.longest(), shared.targets()));
    let refused = std::panic::catch_unwind(|| {
        let mut batch = PackedBatch::new();
        batch.push_response(&[1, 2, 3], 2);
        batch.push_sharing(2, &[1, 3, 3], &[false, false, true]);
    });
    let message = *refused.unwrap_err().downcast::<String>().unwrap();
    assert!(message.contains("2 of 3 tokens are no prompt"), "{message}");
}
