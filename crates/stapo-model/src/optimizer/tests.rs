use super::{AdamWSettings, GradientError, Optimizer, TensorState, Update};
use crate::config::{Family, TensorSpec};
use crate::decoder::{Gradients, HeadOptions, PackedBatch, Pass, Policy, Recompute};
use crate::ranks::RankError;
use crate::testing::tiny_config;
use stapo_ops::{CpuOptions, Device, Stored};

fn policy() -> Policy {
    Policy::random(&Device::cpu(CpuOptions::default()), &tiny_config(Family::Qwen2), 1, 0.3).unwrap()
}

const UPDATE: Update = Update { lr: 0.01, scale: 0.1, max_norm: 1.0 };

/// Gradients of the log-prob of a sequence, every token weighed by `weight`.
fn gradients(policy: &Policy, weight: f32) -> Gradients {
    let mut batch = PackedBatch::new();
    batch.push_response(&[1, 5, 2, 7, 7, 3, 0, 12], 2);
    let mut gradients = Gradients::zeros(policy).unwrap();
    let mut pass = Pass::training(policy, Recompute::Nothing).unwrap();
    let n = pass.forward(policy, &batch, HeadOptions::default()).unwrap().logp.len();
    pass.backward(policy, &vec![weight; n], &vec![0.0; n], &mut gradients).unwrap();
    gradients
}

fn weights(policy: &Policy) -> Vec<(String, Vec<f32>)> {
    policy.tensors().map(|(spec, values)| (spec.name.clone(), values.to_vec())).collect()
}

#[test]
fn descending_on_negative_logp_raises_it() {
    let mut policy = policy();
    let mut optimizer = Optimizer::new(&policy, AdamWSettings::default()).unwrap();
    let logp = |policy: &Policy| {
        let mut batch = PackedBatch::new();
        batch.push_response(&[1, 5, 2, 7, 7, 3, 0, 12], 2);
        let mut pass = Pass::scoring(policy).unwrap();
        pass.forward(policy, &batch, HeadOptions::default()).unwrap().logp.iter().sum::<f32>()
    };
    let before = logp(&policy);
    for _ in 0..20 {
        let mut gradients = gradients(&policy, -1.0);
        let norm = optimizer.step(&mut policy, &mut gradients, UPDATE).unwrap();
        assert!(norm > 0.0);
        assert!(
            gradients.tensors().all(|(_, values)| values.iter().all(|v| *v == 0.0)),
            "zero for the next step"
        );
    }
    assert!(logp(&policy) > before + 1.0, "{before} to {}", logp(&policy));
    assert_eq!(policy.n_updates(), 20);
}

#[test]
fn weight_decay_pulls_on_matrices_only() {
    let mut policy = policy();
    policy.fill(|_, values| values.fill(1.0));
    let settings = AdamWSettings { weight_decay: 0.5, ..AdamWSettings::default() };
    let mut optimizer = Optimizer::new(&policy, settings).unwrap();
    let mut none = Gradients::zeros(&policy).unwrap();
    optimizer.step(&mut policy, &mut none, Update { lr: 0.1, ..UPDATE }).unwrap();
    for (spec, values) in policy.tensors() {
        let expected = if spec.shape.len() == 2 { 0.95 } else { 1.0 };
        assert!(values.to_vec().iter().all(|v| *v == expected), "{}", spec.name);
    }
}

#[test]
fn restored_state_goes_on_with_the_same_bits() {
    let (mut policy, mut twin) = (policy(), policy());
    let mut optimizer = Optimizer::new(&policy, AdamWSettings::default()).unwrap();
    for _ in 0..3 {
        let mut gradients = gradients(&policy, -1.0);
        optimizer.step(&mut policy, &mut gradients, UPDATE).unwrap();
    }
    let mut saved: Vec<Stored> = Vec::new();
    let take = |_: &TensorSpec, _, state: TensorState| {
        saved.push(state.to_stored());
        Ok::<(), RankError>(())
    };
    optimizer.visit_moments(&policy, take).unwrap();
    let mut restored = Optimizer::new(&policy, AdamWSettings::default()).unwrap();
    let mut values = weights(&policy).into_iter();
    twin.fill(|spec, to| {
        let (name, from) = values.next().unwrap();
        assert_eq!(name, spec.name);
        to.copy_from_slice(&from);
    });
    let mut saved = saved.into_iter();
    restored.restore(&twin, optimizer.n_steps(), |_, _| saved.next().ok_or("too few tensors")).unwrap();
    let (mut ours, mut theirs) = (gradients(&policy, 0.5), gradients(&twin, 0.5));
    optimizer.step(&mut policy, &mut ours, UPDATE).unwrap();
    restored.step(&mut twin, &mut theirs, UPDATE).unwrap();
    assert_eq!(weights(&policy), weights(&twin));
}

#[test]
fn a_gradient_that_is_no_number_is_named_and_changes_nothing() {
    let mut policy = policy();
    let before = weights(&policy);
    let mut optimizer = Optimizer::new(&policy, AdamWSettings::default()).unwrap();
    let mut spoiled = gradients(&policy, f32::NAN);
    let error = optimizer.step(&mut policy, &mut spoiled, UPDATE).unwrap_err();
    assert!(
        matches!(&error, GradientError::NotFinite { tensor, .. } if tensor == "model.embed_tokens.weight")
    );
    let mut huge = gradients(&policy, 1e30);
    assert_eq!(optimizer.step(&mut policy, &mut huge, UPDATE).unwrap_err(), GradientError::TooLarge);
    assert_eq!(weights(&policy), before);
    assert_eq!((optimizer.n_steps(), policy.n_updates()), (0, 0));
}
