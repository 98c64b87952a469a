//! Prompts on a GPU, computed whole, in chunks and token by token: the same tokens and log-probs, and those of training. Without a
//! GPU these tests say so and pass.

use crate::cuda::{config, gpu};
use stapo_model::decoder::{HeadOptions, PackedBatch, Pass, Policy};
use stapo_model::generate::{Completion, Engine, EngineMemory, EngineSettings, Request};
use stapo_model::{Device, Family, ModelConfig};

const LENGTHS: [usize; 8] = [1, 63, 64, 65, 500, 1023, 1025, 3000];

fn prompt(problem: usize) -> Vec<u32> {
    (0..LENGTHS[problem] as u32).map(|i| (problem as u32 * 7919 + i * 104_729) % 1003).collect()
}

/// A policy for long prompts, whose windows end within prompts.
fn policy(device: &Device, family: Family) -> Policy {
    let mut config = ModelConfig { max_positions: 4096, ..config(family) };
    for layer in &mut config.layers {
        if let Some(attention) = layer.attention_mut().filter(|attention| attention.rule.window.is_some()) {
            attention.rule.window = Some(700);
        }
    }
    Policy::random(device, &config, 7, 0.1).unwrap()
}

/// Three samples of every prompt, and how often a sequence was preempted.
fn sample(policy: &Policy, settings: EngineSettings, has_prefill_kernel: bool) -> (Vec<Completion>, u64) {
    let mut memory = EngineMemory::new();
    let mut engine = Engine::new(policy, &mut memory, settings).unwrap();
    engine.use_prefill_kernel(has_prefill_kernel);
    for problem in 0..LENGTHS.len() {
        let (prompt, problem) = (prompt(problem), problem as u64);
        engine.submit(Request { problem, prompt, n_samples: 3, max_tokens: 70, stops: vec![] }).unwrap();
    }
    let responses = engine.generate().unwrap();
    (responses, engine.n_preemptions())
}

#[test]
fn prompts_give_the_same_bits_whole_in_chunks_and_token_by_token() {
    let Some(device) = gpu() else { return };
    let mut n_preemptions = 0;
    for family in [Family::Qwen3, Family::Llama, Family::Gemma3, Family::GptOss] {
        let policy = policy(&device, family);
        let roomy = EngineSettings { kv_bytes: 256 << 20, max_rows: 8192, ..EngineSettings::default() };
        let (whole, _) = sample(&policy, roomy, true);
        assert_eq!(sample(&policy, roomy, false).0, whole, "{family:?}: without the kernel of prefill");
        // From 128 rows on a chunk goes through the kernel of prefill.
        for max_rows in [1, 100, 129, 700, 1024] {
            let settings = EngineSettings { max_rows, ..roomy };
            assert_eq!(sample(&policy, settings, true).0, whole, "{family:?}: {max_rows} rows");
        }
        let block_bytes = policy.config().layers.len() * 2 * 2 * 2 * 64 * 32;
        let tight = EngineSettings { kv_bytes: 100 * block_bytes, ..roomy };
        let (preempted, n) = sample(&policy, tight, true);
        n_preemptions += n;
        assert_eq!(preempted, whole, "{family:?}: little memory");
        let mut pass = Pass::scoring(&policy).unwrap();
        for response in &whole {
            let prompt = prompt(response.ticket.0 as usize);
            let sampled = response.tokens.iter().map(|token| token.token);
            let all: Vec<u32> = prompt.iter().copied().chain(sampled).collect();
            let mut batch = PackedBatch::new();
            batch.push_response(&all, prompt.len());
            let scores = pass.forward(&policy, &batch, HeadOptions::default()).unwrap();
            let bits = |x: &mut dyn Iterator<Item = f32>| x.map(f32::to_bits).collect::<Vec<_>>();
            let logp = bits(&mut response.tokens.iter().map(|token| token.logp));
            assert_eq!(logp, bits(&mut scores.logp.iter().copied()), "{family:?}, {} tokens", prompt.len());
        }
    }
    assert!(n_preemptions > 0, "no sequence was preempted");
}
