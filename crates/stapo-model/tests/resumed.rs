//! A state that was stored and read back trains on with the same bits, whatever the family.

use crate::bitwise::{bits, config, policy, token};
use stapo_model::decoder::{Gradients, HeadOptions, PackedBatch, Pass, Policy, Recompute};
use stapo_model::optimizer::{AdamWSettings, Optimizer, TensorState, Update};
use stapo_model::ranks::RankError;
use stapo_model::{CpuOptions, Device, Family, Stored, TensorSpec};
use std::convert::Infallible;

const N_STEPS: u64 = 2;

fn settings() -> AdamWSettings {
    AdamWSettings { weight_decay: 0.1, ..AdamWSettings::default() }
}

fn learn(policy: &mut Policy, optimizer: &mut Optimizer) {
    let mut batch = PackedBatch::new();
    for (seed, n) in [(1, 70), (2, 5), (3, 33)] {
        let tokens: Vec<u32> = (0..n).map(|i| token(i + 97 * seed) % 101).collect();
        batch.push_response(&tokens, 1 + n / 3);
    }
    let mut pass = Pass::training(policy, Recompute::Nothing).unwrap();
    let mut gradients = Gradients::zeros(policy).unwrap();
    let n = pass.forward(policy, &batch, HeadOptions::default()).unwrap().logp.len();
    let d_logp: Vec<f32> = (0..n).map(|i| (i % 7) as f32 / 3.0 - 1.0).collect();
    pass.backward(policy, &d_logp, &vec![-0.02; n], &mut gradients).unwrap();
    let update = Update { lr: 0.01, scale: 0.01, max_norm: 0.5 };
    optimizer.step(policy, &mut gradients, update).unwrap();
}

fn weights(policy: &Policy) -> Vec<(String, Vec<u32>)> {
    policy.tensors().map(|(spec, values)| (spec.name.clone(), bits(&values.to_vec()))).collect()
}

/// Weights and moments in their stored form, read into a new policy and a new optimizer.
fn read_back(policy: &Policy, optimizer: &Optimizer, family: Family) -> (Policy, Optimizer) {
    let stored: Vec<Stored> = policy.tensors().map(|(_, rows)| rows.view().read_stored()).collect();
    let mut moments = Vec::new();
    let take = |_: &TensorSpec, _, state: TensorState| {
        moments.push(state.to_stored());
        Ok::<(), RankError>(())
    };
    optimizer.visit_moments(policy, take).unwrap();
    let mut again = Policy::zeros(&Device::cpu(CpuOptions::default()), &config(family)).unwrap();
    let mut from = stored.iter();
    again
        .try_write(|_, mut view| {
            view.write_stored(from.next().unwrap());
            Ok::<_, Infallible>(())
        })
        .unwrap();
    let mut resumed = Optimizer::new(&again, settings()).unwrap();
    let mut from = moments.into_iter();
    resumed.restore(&again, N_STEPS, |_, _| Ok::<_, Infallible>(from.next().unwrap())).unwrap();
    (again, resumed)
}

#[test]
fn every_family_trains_on_with_the_same_bits_behind_a_stored_state() {
    for family in Family::ALL {
        let mut whole = policy(family);
        let mut optimizer = Optimizer::new(&whole, settings()).unwrap();
        for _ in 0..N_STEPS {
            learn(&mut whole, &mut optimizer);
        }
        let (mut resumed, mut its_optimizer) = read_back(&whole, &optimizer, family);
        let before = weights(&whole);
        assert_eq!(weights(&resumed), before, "{family:?}");
        learn(&mut whole, &mut optimizer);
        learn(&mut resumed, &mut its_optimizer);
        assert_ne!(weights(&whole), before, "{family:?}: the weights moved");
        assert_eq!(weights(&resumed), weights(&whole), "{family:?}");
    }
}
