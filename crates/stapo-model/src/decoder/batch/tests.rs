use super::PackedBatch;
use crate::config::Family;
use crate::decoder::{Gradients, HeadOptions, Pass, Policy, Recompute};
use crate::testing::tiny_config;
use stapo_ops::rng::RngKey;
use stapo_ops::{CpuOptions, Device};

/// Two turns: given, sampled, given, sampled, and given at the end.
const TOKENS: [u32; 12] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8];
const IS_SCORED: [bool; 12] = [false, false, true, true, true, false, false, false, true, true, false, false];

fn policy() -> Policy<f32> {
    let device = Device::cpu(CpuOptions::default());
    let mut policy = Policy::zeros(&device, &tiny_config(Family::Qwen3)).unwrap();
    let mut stream = 0;
    policy.fill(|_, values| {
        stream += 1;
        let key = RngKey::new(9).derive(stream);
        values.iter_mut().enumerate().for_each(|(i, value)| *value = 0.3 * key.normal(i as u64) as f32);
    });
    policy
}

/// A batch in which the two turns are between other sequences.
fn packed(push_turns: impl Fn(&mut PackedBatch)) -> PackedBatch {
    let mut batch = PackedBatch::new();
    batch.push_response(&[7, 7, 2, 0, 1], 2);
    push_turns(&mut batch);
    batch.push_response(&[6, 1], 1);
    batch
}

fn gradient_bits(policy: &Policy<f32>, batch: &PackedBatch, d_logp: &[f32]) -> Vec<Vec<u32>> {
    let mut gradients = Gradients::zeros(policy).unwrap();
    let mut pass = Pass::training(policy, Recompute::Nothing).unwrap();
    pass.forward(policy, batch, HeadOptions::default()).unwrap();
    let d_entropy: Vec<f32> = d_logp.iter().map(|d| 0.1 * d).collect();
    pass.backward(policy, d_logp, &d_entropy, &mut gradients).unwrap();
    // Adding 0 turns -0 into 0, which are the same number.
    let bits = |values: &[f32]| values.iter().map(|value| (value + 0.0).to_bits()).collect();
    gradients.tensors().map(|(_, values)| bits(&values)).collect()
}

#[test]
fn tokens_scored_between_given_ones_have_the_scores_of_their_prefixes() {
    let policy = policy();
    let batch = packed(|batch| batch.push(&TOKENS, &IS_SCORED));
    assert_eq!((batch.n_tokens(), batch.n_scored()), (5 + 12 + 2, 3 + 5 + 1));
    let score = |batch: &PackedBatch| {
        Pass::scoring(&policy).unwrap().forward(&policy, batch, HeadOptions::default()).unwrap()
    };
    let together = score(&batch);
    let positions = (0..TOKENS.len()).filter(|&position| IS_SCORED[position]);
    for (idx, position) in positions.enumerate() {
        let mut prefix = PackedBatch::new();
        prefix.push_response(&TOKENS[..=position], position);
        let alone = score(&prefix);
        let bits = |logp: f32, entropy: f32| (logp.to_bits(), entropy.to_bits());
        let found = bits(together.logp[3 + idx], together.entropy[3 + idx]);
        assert_eq!(found, bits(alone.logp[0], alone.entropy[0]), "token {position}");
    }
}

#[test]
fn given_tokens_have_no_loss() {
    let policy = policy();
    let d_scored = [0.5, -1.0, 0.25, 1.0, -0.75, 0.5, 2.0, -0.5, 1.5];
    let masked = packed(|batch| batch.push(&TOKENS, &IS_SCORED));
    // The same loss with every token but the first scored, where the given ones have a derivative of 0.
    let whole = packed(|batch| batch.push_response(&TOKENS, 1));
    let mut scored = d_scored[3..8].iter();
    let of_turns = IS_SCORED[1..].iter().map(|&is| if is { *scored.next().unwrap() } else { 0.0 });
    let d_whole: Vec<f32> = d_scored[..3].iter().copied().chain(of_turns).chain([d_scored[8]]).collect();
    let found = gradient_bits(&policy, &masked, &d_scored);
    assert_eq!(found, gradient_bits(&policy, &whole, &d_whole));
    assert!(found.iter().flatten().any(|bits| *bits != 0));
}

#[test]
#[should_panic(expected = "the first token must be given")]
fn a_first_token_that_is_scored_is_refused() {
    PackedBatch::new().push(&[1, 2], &[true, true]);
}
