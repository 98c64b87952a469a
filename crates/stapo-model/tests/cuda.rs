//! The engine on a GPU: what the CPU promises about bits, it promises too. Without a GPU these tests say so and pass.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::print_stdout, reason = "a skipped test says why")]

use stapo_model::cuda::CudaOptions;
use stapo_model::decoder::{Gradients, HeadOptions, PackedBatch, Pass, Policy, Recompute};
use stapo_model::generate::{Engine, EngineMemory, EngineSettings, Request};
use stapo_model::optimizer::{AdamWSettings, Optimizer, Update};
use stapo_model::{CpuOptions, Device, Family, ModelConfig, Rope, RopeKind};

fn gpu() -> Option<Device> {
    Device::cuda(CudaOptions::default()).map_err(|error| println!("skipped: {error}")).ok()
}

fn config(family: Family) -> ModelConfig {
    ModelConfig {
        family,
        width: 192,
        n_layers: 3,
        n_heads: 6,
        n_kv_heads: 2,
        head_dim: 64,
        ffn_width: 320,
        vocabulary: 1003,
        norm_eps: 1e-6,
        rope: Rope { theta: 1e4, kind: RopeKind::Default },
        max_positions: 512,
        qk_norm: family == Family::Qwen3,
        qkv_bias: family == Family::Qwen2,
        tied_embeddings: family == Family::Qwen3,
        bos: None,
        stops: vec![],
    }
}

fn tokens(seed: u32, n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (seed * 7919 + i * 104_729) % 1003).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn sampled_log_probs_are_those_of_training_bit_for_bit() {
    let Some(device) = gpu() else { return };
    for family in Family::ALL {
        let policy = Policy::random(&device, &config(family), 7, 0.1).unwrap();
        // Little room: sequences wait, are sent back and start over, prompts are cut.
        for (kv_bytes, max_rows) in [(64 << 20, 1024), (2 << 20, 37)] {
            let settings =
                EngineSettings { kv_bytes, max_rows, n_alternatives: 2, ..EngineSettings::default() };
            let mut memory = EngineMemory::new();
            let mut engine = Engine::new(&policy, &mut memory, settings).unwrap();
            let prompts: Vec<Vec<u32>> = (0..9).map(|p| tokens(p, 1 + 29 * p as usize)).collect();
            for (problem, prompt) in prompts.iter().enumerate() {
                let (problem, prompt) = (problem as u64, prompt.clone());
                engine
                    .submit(Request { problem, prompt, n_samples: 4, max_tokens: 90, stops: vec![] })
                    .unwrap();
            }
            let mut pass = Pass::scoring(&policy).unwrap();
            let responses = engine.generate().unwrap();
            for together in [1, 5] {
                for part in responses.chunks(together) {
                    let mut batch = PackedBatch::new();
                    for response in part {
                        let prompt = &prompts[response.ticket.0 as usize];
                        let all: Vec<u32> =
                            prompt.iter().copied().chain(response.tokens.iter().map(|t| t.token)).collect();
                        batch.push(&all, prompt.len());
                    }
                    let scores = pass.forward(&policy, &batch, HeadOptions::default()).unwrap();
                    let sampled = || part.iter().flat_map(|response| &response.tokens);
                    let logp: Vec<f32> = sampled().map(|t| t.logp).collect();
                    let entropy: Vec<f32> = sampled().map(|t| t.entropy).collect();
                    assert_eq!(bits(&logp), bits(&scores.logp), "{family:?}");
                    assert_eq!(bits(&entropy), bits(&scores.entropy), "{family:?}");
                }
            }
        }
    }
}

/// Gradients of a batch.
fn gradients(policy: &Policy, recompute: Recompute) -> Vec<(String, Vec<f32>)> {
    let mut batch = PackedBatch::new();
    for (s, n) in [(1, 200), (2, 1), (3, 64), (4, 131)] {
        batch.push(&tokens(s, n), 1 + n / 3);
    }
    let mut pass = Pass::training(policy, recompute).unwrap();
    let mut gradients = Gradients::zeros(policy).unwrap();
    let n = pass.forward(policy, &batch, HeadOptions::default()).unwrap().logp.len();
    let d_logp: Vec<f32> = (0..n).map(|i| (i % 7) as f32 / 3.0 - 1.0).collect();
    pass.backward(policy, &d_logp, &vec![-0.02; n], &mut gradients).unwrap();
    gradients.tensors().map(|(spec, values)| (spec.name.clone(), values)).collect()
}

#[test]
fn gradients_stay_close_to_the_cpus_and_do_not_depend_on_what_is_kept() {
    let Some(device) = gpu() else { return };
    for family in Family::ALL {
        let on_cpu = Policy::random(&Device::cpu(CpuOptions::default()), &config(family), 7, 0.1).unwrap();
        let on_gpu = Policy::random(&device, &config(family), 7, 0.1).unwrap();
        let (expected, all) =
            (gradients(&on_cpu, Recompute::Nothing), gradients(&on_gpu, Recompute::Nothing));
        let [restored, recomputed] =
            [Recompute::Inputs, Recompute::Layers].map(|recompute| gradients(&on_gpu, recompute));
        for (at, ((name, expected), (_, got))) in expected.iter().zip(&all).enumerate() {
            assert_eq!(bits(got), bits(&restored[at].1), "{family:?} {name}: cheap recomputation");
            assert_eq!(bits(got), bits(&recomputed[at].1), "{family:?} {name}: recomputation");
            let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            let off = norm(&mut got.iter().zip(expected).map(|(a, b)| a - b));
            let off = off / norm(&mut expected.iter().copied()).max(1e-12);
            println!("{family:?} {name}: {off:.1e}");
            // bf16 keeps 8 bits of each activation; a small norm weight sums few and nearly cancelling terms.
            assert!(off < 0.1, "{family:?} {name}: off by {off:.2e}");
        }
    }
}

#[test]
fn an_update_moves_the_master_and_a_checkpoint_holds_it() {
    let Some(device) = gpu() else { return };
    let mut policy = Policy::random(&device, &config(Family::Qwen3), 7, 0.1).unwrap();
    let read = |policy: &Policy| policy.tensors().map(|(_, view)| view.to_vec()).collect::<Vec<_>>();
    let before = read(&policy);
    let mut optimizer = Optimizer::new(&policy, AdamWSettings::default()).unwrap();
    for _ in 0..3 {
        let mut batch = PackedBatch::new();
        batch.push(&tokens(5, 100), 1);
        let mut pass = Pass::training(&policy, Recompute::Nothing).unwrap();
        let mut gradients = Gradients::zeros(&policy).unwrap();
        let n = pass.forward(&policy, &batch, HeadOptions::default()).unwrap().logp.len();
        pass.backward(&policy, &vec![1.0; n], &vec![0.0; n], &mut gradients).unwrap();
        // Far below the last digit of bf16.
        let update = Update { lr: 1e-6, scale: 1.0 / n as f64, max_norm: 1.0 };
        optimizer.step(&mut policy, &mut gradients, update).unwrap();
    }
    let after = read(&policy);
    let moved = before.iter().flatten().zip(after.iter().flatten()).filter(|(a, b)| a != b).count();
    assert!(moved * 2 > after.iter().flatten().count(), "{moved} weights moved");
    let mut restored = Policy::zeros(&device, &config(Family::Qwen3)).unwrap();
    let mut values = after.iter();
    restored.fill(|_, to| to.copy_from_slice(values.next().unwrap()));
    assert!(read(&restored).iter().zip(&after).all(|(a, b)| bits(a) == bits(b)));
}
