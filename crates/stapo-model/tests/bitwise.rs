//! The same bits every way: however tokens are batched, cut, cached, recomputed or spread over threads.

use crate::testing::{tiny_config, tiny_layers};
use stapo_model::decoder::{
    Gradients, HeadOptions, LoraScale, LoraSpec, LoraTarget, PackedBatch, Pass, Policy, PolicySpec,
    Recompute, TokenScores,
};
use stapo_model::generate::{
    Completion, Engine, EngineMemory, EngineSettings, Filter, Request, SamplingRule, Ticket,
};
use stapo_model::optimizer::{AdamWSettings, Optimizer, Update};
use stapo_model::{CpuOptions, Device, Family, Heads, ModelConfig, Rope, RopeScaling, Simd};

pub fn config(family: Family) -> ModelConfig {
    let config = ModelConfig {
        width: 48,
        layers: tiny_layers(family, Heads { query: 6, kv: 2, dim: 10 }, 77, 3),
        vocabulary: 101,
        max_positions: 256,
        stops: vec![0],
        ..tiny_config(family)
    };
    config.validate("test").unwrap();
    config
}

/// The layers of two families with other sizes and another rope between them.
fn mixed_config() -> ModelConfig {
    let rope = Rope { theta: 1e4, scaling: RopeScaling::Linear { factor: 2.0 } };
    let layers = [
        config(Family::Llama).layers[0].clone(),
        Family::Qwen2.layer(Heads { query: 4, kv: 4, dim: 14 }, rope, 33),
        config(Family::Qwen3).layers[0].clone(),
    ];
    ModelConfig { layers: layers.to_vec(), ..config(Family::Qwen3) }
}

/// A random policy whose biases are not zero.
fn random<'a>(options: CpuOptions, spec: impl Into<PolicySpec<'a>>) -> Policy {
    let mut policy = Policy::random(&Device::cpu(options), spec, 7, 0.2).unwrap();
    let Ok(()) = policy.try_write_base(|spec, mut values| {
        if spec.name.ends_with("_proj.bias") {
            let biases: Vec<f32> =
                (0..values.len()).map(|i| (token(i) % 200) as f32 / 400.0 - 0.25).collect();
            values.write(&biases);
        }
        Ok::<_, std::convert::Infallible>(())
    });
    policy
}

pub fn policy_on(options: CpuOptions, family: Family) -> Policy {
    random(options, &config(family))
}

pub fn policy(family: Family) -> Policy {
    policy_on(CpuOptions::default(), family)
}

/// Adapters of some modules of each stacked product, none of them zero.
fn adapted_on(options: CpuOptions, family: Family) -> Policy {
    use LoraTarget::{Down, Gate, Key, Output, Query, Up, Value};
    let targets = match family {
        Family::Qwen2 => vec![Query, Value, Up],
        Family::Llama => vec![Key, Output, Gate, Down],
        _ => LoraTarget::ALL.to_vec(),
    };
    with_adapters(options, &config(family), targets)
}

fn with_adapters(options: CpuOptions, config: &ModelConfig, targets: Vec<LoraTarget>) -> Policy {
    let lora = LoraSpec { rank: 5, alpha: 8.0, scale: LoraScale::Plain, targets };
    let spec = PolicySpec { config, lora: Some(&lora) };
    let mut policy = random(options, spec);
    policy.start_adapters(9);
    let mut n_before = 0;
    let Ok(()) = policy.try_fill_adapters(|_, values| {
        values
            .iter_mut()
            .enumerate()
            .for_each(|(i, x)| *x = (token(n_before + i) % 200) as f32 / 400.0 - 0.25);
        n_before += values.len();
        Ok::<_, std::convert::Infallible>(())
    });
    policy
}

/// Every family and a model whose layers differ, without adapters and with them.
pub fn policies() -> Vec<(String, Policy)> {
    let plain = Family::ALL.map(|family| (format!("{family:?}"), policy(family)));
    let options = CpuOptions::default();
    let adapted =
        Family::ALL.map(|family| (format!("{family:?} with adapters"), adapted_on(options, family)));
    let mixed = [
        ("mixed layers".to_string(), random(options, &mixed_config())),
        (
            "mixed layers with adapters".into(),
            with_adapters(options, &mixed_config(), LoraTarget::ALL.to_vec()),
        ),
    ];
    plain.into_iter().chain(adapted).chain(mixed).collect()
}

pub fn token(i: usize) -> u32 {
    (i as u32).wrapping_mul(2654435761) >> 8
}

fn prompt(n: usize) -> Vec<u32> {
    (0..n).map(|i| token(i + 31 * n) % 101).collect()
}

pub fn requests() -> Vec<Request> {
    let shapes = [(1, 3, 20), (40, 4, 30), (17, 1, 50), (16, 2, 9), (5, 5, 25)];
    let request = |(i, (n_prompt, n_samples, max_tokens)): (usize, (usize, u32, usize))| Request {
        problem: i as u64,
        prompt: prompt(n_prompt),
        n_samples,
        max_tokens,
        stops: vec![0, 1],
    };
    shapes.into_iter().enumerate().map(request).collect()
}

pub fn settings() -> EngineSettings {
    let filter = Filter { top_k: Some(60), top_p: 0.95, min_p: 0.001 };
    EngineSettings {
        seed: 3,
        rule: SamplingRule::Draw { temperature: 1.2, filter },
        kv_bytes: 8 << 20,
        ..EngineSettings::default()
    }
}

pub fn generate(policy: &Policy, settings: EngineSettings, requests: &[Request]) -> (Vec<Completion>, u64) {
    generate_in(&mut EngineMemory::new(), policy, settings, requests)
}

fn generate_in(
    memory: &mut EngineMemory,
    policy: &Policy,
    settings: EngineSettings,
    requests: &[Request],
) -> (Vec<Completion>, u64) {
    let mut engine = Engine::new(policy, memory, settings).unwrap();
    for request in requests {
        engine.submit(request.clone()).unwrap();
    }
    let responses = engine.generate().unwrap();
    (responses, engine.n_preemptions())
}

/// Responses without the tickets, which count submissions.
fn content(responses: Vec<Completion>) -> Vec<Completion> {
    responses.into_iter().map(|response| Completion { ticket: Ticket(0), ..response }).collect()
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Sequences of many lengths, some longer than a register tile or a block of the cache.
fn sequences() -> Vec<(Vec<u32>, usize)> {
    [(2, 1), (70, 9), (33, 32), (16, 4), (129, 1), (17, 17), (48, 20)]
        .map(|(n, n_prompt)| (prompt(n), n_prompt))
        .to_vec()
}

fn batch(sequences: &[(Vec<u32>, usize)]) -> PackedBatch {
    let mut batch = PackedBatch::new();
    for (tokens, n_prompt) in sequences {
        batch.push_response(tokens, *n_prompt);
    }
    batch
}

pub fn scores(policy: &Policy, sequences: &[(Vec<u32>, usize)]) -> TokenScores {
    let options = HeadOptions { temperature: 1.2, n_alternatives: 3, has_entropy_gradient: true };
    Pass::scoring(policy).unwrap().forward(policy, &batch(sequences), options).unwrap()
}

fn gradient_bits(gradients: &Gradients) -> Vec<(String, Vec<u32>)> {
    gradients.tensors().map(|(spec, values)| (spec.name.clone(), bits(&values))).collect()
}

/// Gradients of a loss over the sequences, run in the given micro-batches.
fn gradients(policy: &Policy, recompute: Recompute, microbatches: &[&[(Vec<u32>, usize)]]) -> Gradients {
    let mut gradients = Gradients::zeros(policy).unwrap();
    let mut pass = Pass::training(policy, recompute).unwrap();
    let mut n_before = 0;
    for sequences in microbatches {
        let scores = pass.forward(policy, &batch(sequences), HeadOptions::default()).unwrap();
        let d = |shift: usize| -> Vec<f32> {
            (0..scores.logp.len()).map(|i| (token(n_before + i + shift) % 200) as f32 / 100.0 - 1.0).collect()
        };
        pass.backward(policy, &d(0), &d(77), &mut gradients).unwrap();
        n_before += scores.logp.len();
    }
    gradients
}

/// Compares what was sampled with a training forward pass over the responses to `requests`.
#[track_caller]
fn assert_trained(name: &str, policy: &Policy, requests: &[Request], responses: &[Completion]) {
    let whole: Vec<(Vec<u32>, usize)> = responses
        .iter()
        .map(|r| {
            let mut tokens = requests[r.ticket.0 as usize].prompt.clone();
            let n_prompt = tokens.len();
            tokens.extend(r.tokens.iter().map(|t| t.token));
            (tokens, n_prompt)
        })
        .collect();
    let trained = scores(policy, &whole);
    let sampled: Vec<_> = responses.iter().flat_map(|r| &r.tokens).collect();
    let logp: Vec<f32> = sampled.iter().map(|t| t.logp).collect();
    let entropy: Vec<f32> = sampled.iter().map(|t| t.entropy).collect();
    assert_eq!(bits(&logp), bits(&trained.logp), "{name}");
    assert_eq!(bits(&entropy), bits(&trained.entropy), "{name}");
}

#[test]
fn sampled_logp_equals_training_forward() {
    for (family, policy) in policies() {
        let (responses, _) = generate(&policy, settings(), &requests());
        assert_trained(&family, &policy, &requests(), &responses);
    }
}

/// Rollouts much longer than the windows, in memory that would not hold one of them in all layers; some are preempted.
#[test]
fn blocks_in_front_of_windows_are_free_for_long_rollouts() {
    let requests = [(300, 3, 500), (7, 2, 700)].map(|(n_prompt, n_samples, max_tokens)| Request {
        problem: n_prompt as u64,
        prompt: prompt(n_prompt),
        n_samples,
        max_tokens,
        stops: vec![],
    });
    let mut some_preempted = false;
    for family in [Family::Gemma3, Family::GptOss, Family::Mistral] {
        let config = ModelConfig { max_positions: 1024, ..config(family) };
        let policy = Policy::random(&Device::cpu(CpuOptions::default()), &config, 7, 0.2).unwrap();
        let (roomy, _) = generate(&policy, settings(), &requests);
        assert_trained(&format!("{family:?}"), &policy, &requests, &roomy);
        // Values are padded to 16 columns.
        let bytes_of_all = 800 * config.layers.len() * 2 * (10 + 16) * 4;
        let tight = EngineSettings { kv_bytes: bytes_of_all - 1, max_rows: 40, ..settings() };
        let (responses, n_preempted) = generate(&policy, tight, &requests);
        assert_eq!(responses, roomy, "{family:?}");
        some_preempted |= n_preempted > 0;
    }
    assert!(some_preempted, "the memory is too roomy to test preemption");
}

#[test]
fn chunked_prefill_equals_whole() {
    for policy in [policy(Family::Qwen3), policy(Family::Qwen35)] {
        let (whole, _) = generate(&policy, settings(), &requests());
        for max_rows in [1, 7, 16, 33] {
            let (chunked, _) = generate(&policy, EngineSettings { max_rows, ..settings() }, &requests());
            assert_eq!(chunked, whole, "{max_rows} rows");
        }
    }
}

/// States of sequences cannot be cut back: samples start from copies of the state at their prompt's end, wait where no state is free, and
/// are computed again after a preemption.
#[test]
fn sequences_with_states_do_not_depend_on_the_memory_for_states() {
    let policy = policy(Family::Qwen35);
    let long = |(i, n_prompt)| Request {
        problem: i,
        prompt: prompt(n_prompt),
        n_samples: 5,
        max_tokens: 100,
        stops: vec![],
    };
    let requests: Vec<Request> = [(0, 20), (1, 33), (2, 1), (3, 16)].map(long).to_vec();
    let (undisturbed, n_preemptions) = generate(&policy, settings(), &requests);
    assert_eq!(n_preemptions, 0);
    let mut n_preempted = 0;
    // Values are padded to 16 columns, which makes keys and values nearly twice as wide.
    let sequence_bytes = 2 * policy.config().sequence_bytes(144, 1, 4) as usize;
    for kv_bytes in [sequence_bytes, 2 * sequence_bytes, 5 * sequence_bytes] {
        for (max_rows, max_sequences) in [(1024, 1024), (7, 1024), (1024, 3), (9, 2)] {
            let settings = EngineSettings { kv_bytes, max_rows, max_sequences, ..settings() };
            let (found, n_preemptions) = generate(&policy, settings, &requests);
            assert_eq!(found, undisturbed, "{kv_bytes} bytes, {max_rows} rows, {max_sequences} sequences");
            n_preempted += n_preemptions;
        }
    }
    assert!(n_preempted > 0, "the memory is too large to test preemption");
}

#[test]
fn preempted_equals_undisturbed() {
    let policy = policy(Family::Qwen2);
    let long = |(i, n_prompt)| Request {
        problem: i,
        prompt: prompt(n_prompt),
        n_samples: 4,
        max_tokens: 100,
        stops: vec![],
    };
    let requests: Vec<Request> = [(0, 20), (1, 33), (2, 1)].map(long).to_vec();
    let (undisturbed, n_preemptions) = generate(&policy, settings(), &requests);
    assert_eq!(n_preemptions, 0);
    // A block holds 16 positions of 3 layers in 9,984 bytes: there are 20 to 40 blocks, and each of the twelve sequences
    // grows to seven to nine of them.
    for kv_bytes in [200_000, 300_000, 400_000] {
        let (preempted, n_preemptions) =
            generate(&policy, EngineSettings { kv_bytes, ..settings() }, &requests);
        assert!(n_preemptions > 0, "{kv_bytes} bytes are too many to test preemption");
        assert_eq!(preempted, undisturbed, "{kv_bytes} bytes");
    }
}

#[test]
fn planning_ahead_changes_nothing() {
    for (policy, kv_bytes) in [Family::Qwen3, Family::Qwen35]
        .into_iter()
        .flat_map(|family| [8 << 20, 400_000].map(|kv_bytes| (policy(family), kv_bytes)))
    {
        let settings = EngineSettings { kv_bytes, n_alternatives: 2, ..settings() };
        let mut memory = EngineMemory::new();
        let mut engine = Engine::new(&policy, &mut memory, settings).unwrap();
        engine.plan_ahead(true);
        for request in requests() {
            engine.submit(request).unwrap();
        }
        assert_eq!(
            engine.generate().unwrap(),
            generate(&policy, settings, &requests()).0,
            "{kv_bytes} bytes"
        );
    }
}

#[test]
fn an_engine_in_the_memory_of_another_gives_the_same() {
    let policy = policy(Family::Qwen2);
    let mut memory = EngineMemory::new();
    let (first, _) = generate_in(&mut memory, &policy, settings(), &requests());
    // Another engine of the same size with other work, one of another size, and one of the first size once more.
    let others = EngineSettings { seed: 9, rule: SamplingRule::Greedy, ..settings() };
    let (greedy, _) = generate_in(&mut memory, &policy, others, &requests()[1..]);
    let smaller = EngineSettings { kv_bytes: 400_000, ..settings() };
    assert_eq!(generate_in(&mut memory, &policy, smaller, &requests()).0, first);
    assert_eq!(generate_in(&mut memory, &policy, settings(), &requests()).0, first);
    assert_eq!(generate(&policy, others, &requests()[1..]).0, greedy);
}

#[test]
fn memory_serves_another_policy_of_the_same_shape() {
    let mut memory = EngineMemory::new();
    let first = policy(Family::Qwen2);
    let second = Policy::random(first.device(), first.config(), 8, 0.2).unwrap();
    for policy in [&first, &second, &first] {
        let (shared, _) = generate_in(&mut memory, policy, settings(), &requests());
        assert_eq!(shared, generate(policy, settings(), &requests()).0);
    }
    let other_shape = policy(Family::Qwen3);
    let (shared, _) = generate_in(&mut memory, &other_shape, settings(), &requests());
    assert_eq!(shared, generate(&other_shape, settings(), &requests()).0);
}

#[test]
fn a_sample_does_not_depend_on_its_company() {
    let policy = policy(Family::Llama);
    let (together, _) = generate(&policy, settings(), &requests());
    let mut alone = Vec::new();
    for request in requests() {
        alone.extend(generate(&policy, settings(), &[request]).0);
    }
    assert_eq!(content(alone), content(together.clone()));
    let few = EngineSettings { max_sequences: 2, ..settings() };
    assert_eq!(content(generate(&policy, few, &requests()).0), content(together));
}

#[test]
fn a_batch_of_one_equals_a_batch_of_many() {
    for (family, policy) in policies() {
        let together = scores(&policy, &sequences());
        let alone: Vec<TokenScores> = sequences().into_iter().map(|s| scores(&policy, &[s])).collect();
        let joined =
            |of: fn(&TokenScores) -> &[f32]| bits(&alone.iter().flat_map(of).copied().collect::<Vec<_>>());
        assert_eq!(joined(|s| &s.logp), bits(&together.logp), "{family:?}");
        assert_eq!(joined(|s| &s.entropy), bits(&together.entropy), "{family:?}");
        assert_eq!(joined(|s| &s.collision), bits(&together.collision), "{family:?}");
        let alternatives: Vec<_> = alone.into_iter().flat_map(|s| s.alternatives).collect();
        assert_eq!(alternatives, together.alternatives, "{family:?}");
    }
}

#[test]
fn cutting_into_microbatches_changes_no_gradient_bit() {
    for (family, policy) in policies() {
        let all = sequences();
        let whole = gradient_bits(&gradients(&policy, Recompute::Nothing, &[&all]));
        for cut in 1..all.len() {
            let (first, second) = all.split_at(cut);
            let cut_bits = gradient_bits(&gradients(&policy, Recompute::Nothing, &[first, second]));
            assert_eq!(cut_bits, whole, "{family:?} cut after {cut} sequences");
        }
    }
}

#[test]
fn recomputing_layers_changes_no_gradient_bit() {
    for (family, policy) in policies() {
        let all = sequences();
        let kept = gradient_bits(&gradients(&policy, Recompute::Nothing, &[&all]));
        for recompute in [Recompute::Inputs, Recompute::Layers] {
            let recomputed = gradient_bits(&gradients(&policy, recompute, &[&all]));
            assert_eq!(recomputed, kept, "{family:?} {recompute:?}");
        }
    }
}

/// The bits of all weights by name, and responses.
type Trained = (Vec<(String, Vec<u32>)>, Vec<Completion>);

/// Training and generation of a policy without adapters and of one with them.
fn trained(options: CpuOptions) -> [Trained; 2] {
    [policy_on(options, Family::Qwen3), adapted_on(options, Family::Qwen3)].map(train)
}

/// Three training steps and a generation from the result.
fn train(mut policy: Policy) -> Trained {
    let settings = AdamWSettings { weight_decay: 0.1, ..AdamWSettings::default() };
    let mut optimizer = Optimizer::new(&policy, settings).unwrap();
    for _ in 0..3 {
        let mut gradients = gradients(&policy, Recompute::Nothing, &[&sequences()]);
        let update = Update { lr: 0.01, scale: 1.0 / 300.0, max_norm: 0.5 };
        optimizer.step(&mut policy, &mut gradients, update).unwrap();
    }
    let weights =
        policy.tensors().map(|(spec, values)| (spec.name.clone(), bits(&values.to_vec()))).collect();
    let responses = generate(&policy, self::settings(), &requests()).0;
    (weights, responses)
}

#[test]
fn training_and_generation_do_not_depend_on_the_number_of_threads() {
    let one = trained(CpuOptions { threads: 1, ..CpuOptions::default() });
    for threads in [2, 3, 7] {
        let many = trained(CpuOptions { threads, ..CpuOptions::default() });
        assert!(many == one, "{threads} threads");
    }
}

#[test]
fn training_and_generation_do_not_depend_on_the_instruction_set() {
    let best = trained(CpuOptions::default());
    for simd in Simd::available() {
        assert!(trained(CpuOptions { simd, ..CpuOptions::default() }) == best, "{simd:?}");
    }
}

#[test]
fn adapters_start_as_the_base_model_and_leave_it_as_it_was() {
    let plain = policy(Family::Qwen3);
    let lora = LoraSpec { rank: 4, alpha: 8.0, scale: LoraScale::Plain, targets: LoraTarget::ALL.to_vec() };
    let spec = PolicySpec { config: plain.config(), lora: Some(&lora) };
    let mut adapted: Policy = Policy::random(plain.device(), spec, 7, 0.2).unwrap();
    adapted.start_adapters(1);
    let base = scores(&plain, &sequences());
    assert_eq!(scores(&adapted, &sequences()), base, "the second factors are zero");
    let of_adapters = gradients(&adapted, Recompute::Nothing, &[&sequences()]);
    assert_eq!(of_adapters.zero_tensors(&adapted), Vec::<&stapo_model::TensorSpec>::new());
    let is_zero = |values: &[f32]| values.iter().all(|x| *x == 0.0);
    for (spec, values) in of_adapters.tensors() {
        assert!(spec.name.contains(".lora_"), "{} is frozen", spec.name);
        assert_eq!(is_zero(&values), spec.name.contains(".lora_A."), "{}", spec.name);
    }
    let mut optimizer = Optimizer::new(&adapted, AdamWSettings::default()).unwrap();
    let mut of_adapters = of_adapters;
    let update = Update { lr: 0.1, scale: 1.0 / 300.0, max_norm: 1.0 };
    optimizer.step(&mut adapted, &mut of_adapters, update).unwrap();
    assert_ne!(scores(&adapted, &sequences()).logp, base.logp);
    let options = HeadOptions { temperature: 1.2, n_alternatives: 3, has_entropy_gradient: true };
    let without = Pass::scoring(&adapted)
        .unwrap()
        .start_score_base(&adapted, &batch(&sequences()), options)
        .unwrap()
        .wait();
    assert_eq!(without, base, "the reference is the same weights without the adapter");
}
