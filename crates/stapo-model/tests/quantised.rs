//! Models whose frozen layers stay quantised on a GPU, against the same models with these layers in bf16: every number has
//! the same bits. Without a GPU the tests of bits say so and pass.

use crate::testing::{tiny_config, tiny_layers};
use stapo_model::cuda::CudaOptions;
use stapo_model::decoder::{
    Gradients, HeadOptions, LoraScale, LoraSpec, LoraTarget, PackedBatch, Pass, Policy, PolicySpec,
    QuantisedBase, Recompute,
};
use stapo_model::generate::{Engine, EngineMemory, EngineSettings, Request};
use stapo_model::optimizer::{AdamWSettings, Optimizer, Update};
use stapo_model::{
    CpuOptions, Device, Encoding, Family, Heads, ModelConfig, Pretrained, TensorSpec, Weights,
};

/// The down product uses split-K in bf16: it is at least 2048 deep.
fn config(family: Family) -> ModelConfig {
    ModelConfig {
        width: 256,
        layers: tiny_layers(family, Heads { query: 4, kv: 2, dim: 64 }, 2048, 4),
        vocabulary: 1003,
        max_positions: 512,
        tied_embeddings: true,
        ..tiny_config(family)
    }
}

/// Every encoding stands in some layer; the modules of a linear layer differ, and one layer has none that is quantised.
fn mixed(name: &str) -> Encoding {
    let is = |part: &str| name.contains(part);
    match name.strip_prefix("model.layers.").map(|rest| &rest[..1]) {
        None => Encoding::Q8_0,
        Some("0") if is("v_proj") || is("down") => Encoding::Q6_K,
        Some("0") => Encoding::Q4_K,
        Some("1") if is("q_proj") || is("down") => Encoding::Q5_0,
        Some("1") if is("k_proj") || is("gate") => Encoding::Q8_0,
        Some("1") if is("v_proj") || is("up") => Encoding::Q4_1,
        Some("1") => Encoding::Q5_1,
        Some("2") if is("q_proj") || is("up") => Encoding::F16,
        Some("2") if is("k_proj") || is("down") => Encoding::Q4_0,
        Some("2") => Encoding::Q5_K,
        Some(_) if is("q_proj") => Encoding::F32,
        Some(_) => Encoding::Bf16,
    }
}

fn lora(rank: usize, targets: &[LoraTarget]) -> LoraSpec {
    LoraSpec { rank, alpha: 16.0, scale: LoraScale::Plain, targets: targets.to_vec() }
}

fn open(config: &ModelConfig, encoding: impl Fn(&str) -> Encoding) -> Pretrained {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    crate::gguf_file::write_random(&path, config, 0.1, encoding).unwrap();
    Pretrained::open(&path).unwrap()
}

/// The same model with its layers in bf16 and quantised, and adapters that are not zero.
fn both(device: &Device, pretrained: &Pretrained, lora: &LoraSpec) -> [Policy; 2] {
    let spec = PolicySpec { config: &pretrained.config, lora: Some(lora) };
    let weights = &pretrained.weights;
    let plain = Policy::load(device, spec, weights).unwrap();
    let quantised = Policy::load_quantised(device, spec, weights).unwrap();
    [plain, quantised].map(|mut policy| {
        let mut n = 0u32;
        let Ok(()) = policy.try_fill_adapters(|_, values| {
            for value in values {
                n += 1;
                *value = (n.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 25) as f32 - 0.25;
            }
            Ok::<_, std::convert::Infallible>(())
        });
        policy
    })
}

fn cases(device: &Device) -> Vec<(String, [Policy; 2])> {
    use LoraTarget::{Down, Key, Up, Value};
    let cases = [
        (Family::Qwen3, lora(16, &LoraTarget::ALL)),
        (Family::Llama, lora(5, &LoraTarget::ALL)),
        (Family::Qwen2, lora(1, &[Key, Value, Up, Down])),
        (Family::Qwen3, lora(72, &[Up])),
        // Too high a rank to be joined to a layer.
        (Family::Qwen2, lora(136, &LoraTarget::ALL)),
    ];
    let case = |(family, lora): (Family, LoraSpec)| {
        let pretrained = open(&config(family), mixed);
        (format!("{family:?} of rank {}", lora.rank), both(device, &pretrained, &lora))
    };
    cases.into_iter().map(case).collect()
}

fn gpu() -> Option<Device> {
    Device::cuda(CudaOptions::default()).map_err(|error| println!("skipped: {error}")).ok()
}

fn tokens(seed: u32, n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (seed * 7919 + i * 104_729) % 1003).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn batch() -> PackedBatch {
    let mut batch = PackedBatch::new();
    for (s, n) in [(1, 200), (2, 1), (3, 64), (4, 131)] {
        batch.push_response(&tokens(s, n), 1 + n / 3);
    }
    batch
}

/// Log-probs of the policy and of its base, and the bits of every trained tensor after two steps.
fn learned(policy: &mut Policy, recompute: Recompute) -> Vec<Vec<u32>> {
    let mut pass = Pass::training(policy, recompute).unwrap();
    let mut sums = Gradients::zeros(policy).unwrap();
    let mut optimizer = Optimizer::new(policy, AdamWSettings::default()).unwrap();
    let mut found = Vec::new();
    for _ in 0..2 {
        let base = pass.start_score_base(policy, &batch(), HeadOptions::default()).unwrap().wait();
        let scores = pass.forward(policy, &batch(), HeadOptions::default()).unwrap();
        let n = scores.logp.len();
        let d_logp: Vec<f32> = (0..n).map(|i| (i % 7) as f32 / 3.0 - 1.0).collect();
        pass.backward(policy, &d_logp, &vec![-0.02; n], &mut sums).unwrap();
        found.extend([base.logp, scores.logp, scores.entropy].map(|x| bits(&x)));
        found.extend(sums.tensors().map(|(_, values)| bits(&values)));
        optimizer.step(policy, &mut sums, Update { lr: 1e-3, scale: 1.0 / n as f64, max_norm: 1.0 }).unwrap();
    }
    found.extend(policy.trained_tensors().map(|(_, values)| bits(&values.to_vec())));
    found
}

/// The tokens and log-probs of responses: decode of 1, 9, and more sequences than the kernels for few rows take.
fn sampled(policy: &Policy) -> Vec<(u32, u32)> {
    let mut found = Vec::new();
    for (n_prompts, n_samples) in [(1, 1), (3, 3), (9, 10)] {
        let settings = EngineSettings { kv_bytes: 64 << 20, max_rows: 512, ..EngineSettings::default() };
        let mut memory = EngineMemory::new();
        let mut engine = Engine::new(policy, &mut memory, settings).unwrap();
        for problem in 0..n_prompts {
            let prompt = tokens(problem as u32, 3 + 41 * problem as usize);
            engine.submit(Request { problem, prompt, n_samples, max_tokens: 30, stops: vec![] }).unwrap();
        }
        let responses = engine.generate().unwrap();
        found.extend(responses.iter().flat_map(|r| &r.tokens).map(|t| (t.token, t.logp.to_bits())));
    }
    found
}

fn named(tensors: impl Iterator<Item = (TensorSpec, Vec<f32>)>) -> Vec<(String, Vec<u32>)> {
    tensors.map(|(spec, values)| (spec.name, bits(&values))).collect()
}

#[test]
fn quantised_layers_are_unpacked_to_the_numbers_of_the_file_rounded_once() {
    let Some(device) = gpu() else { return };
    for (name, [plain, quantised]) in cases(&device) {
        let all = |policy: &Policy| named(policy.tensors().map(|(spec, rows)| (spec.clone(), rows.to_vec())));
        let (expected, got) = (all(&plain), all(&quantised));
        for (expected, got) in expected.iter().zip(&got) {
            let n_off = expected.1.iter().zip(&got.1).filter(|(a, b)| a != b).count();
            assert!(n_off == 0 && expected.0 == got.0, "{name}: {} differs in {n_off} numbers", expected.0);
        }
        assert_eq!(expected.len(), got.len());
        let merged = |policy: &Policy| named(policy.merged_tensors().map(|(spec, x)| (spec.clone(), x)));
        assert!(merged(&plain) == merged(&quantised), "{name}: merged");
        assert!(quantised.first_non_finite().is_none(), "{name}");
    }
}

#[test]
fn training_with_quantised_layers_has_the_bits_of_bf16() {
    let Some(device) = gpu() else { return };
    for recompute in [Recompute::Nothing, Recompute::Inputs, Recompute::Layers] {
        for (name, [mut plain, mut quantised]) in cases(&device) {
            let (expected, got) = (learned(&mut plain, recompute), learned(&mut quantised, recompute));
            let off = expected.iter().zip(&got).position(|(a, b)| a != b);
            assert_eq!((off, expected.len()), (None, got.len()), "{name}, {recompute:?}");
            // Adapters have changed: what is unpacked beside them has too.
            assert!(sampled(&plain) == sampled(&quantised), "{name}: sampled");
        }
    }
}

#[test]
fn sampling_with_quantised_layers_has_the_bits_of_bf16() {
    let Some(device) = gpu() else { return };
    for (name, [plain, quantised]) in cases(&device) {
        let expected = sampled(&plain);
        assert!(expected == sampled(&quantised), "{name}");
        assert!(expected == sampled(&quantised), "{name}, again");
    }
}

/// A large layer: every multiprocessor unpacks, and the products of few rows start early.
#[test]
fn wide_quantised_layers_have_the_bits_of_bf16() {
    let Some(device) = gpu() else { return };
    let wide = ModelConfig {
        width: 2048,
        layers: tiny_layers(Family::Qwen3, Heads { query: 16, kv: 8, dim: 128 }, 6144, 2),
        ..config(Family::Qwen3)
    };
    for encoding in [Encoding::Q4_K, Encoding::Q6_K] {
        let pretrained = open(&wide, |_| encoding);
        let [mut plain, mut quantised] = both(&device, &pretrained, &lora(32, &LoraTarget::ALL));
        assert!(sampled(&plain) == sampled(&quantised), "{}: sampled", encoding.name());
        let (expected, got) =
            (learned(&mut plain, Recompute::Nothing), learned(&mut quantised, Recompute::Nothing));
        assert!(expected == got, "{}: learned", encoding.name());
    }
}

fn refusal(device: &Device, spec: PolicySpec<'_>, weights: &Weights) -> String {
    Policy::load_quantised(device, spec, weights).err().unwrap().to_string()
}

#[test]
fn what_cannot_stay_quantised_is_refused_by_name() {
    let pretrained = open(&config(Family::Qwen3), mixed);
    let (lora, cpu) = (lora(8, &LoraTarget::ALL), Device::cpu(CpuOptions::default()));
    let spec = PolicySpec { config: &pretrained.config, lora: Some(&lora) };
    let message = refusal(&cpu, spec, &pretrained.weights);
    assert!(message.contains("CPU") && message.contains("model.lora.base"), "{message}");
    // The embedding alone is quantised.
    let head = |name: &str| if name.contains("layers") { Encoding::Bf16 } else { Encoding::Q8_0 };
    let plain = open(&config(Family::Qwen3), head);
    let message = QuantisedBase::stored(&plain.config, &lora, &plain.weights).unwrap_err().to_string();
    assert!(
        message.contains("no layer of the model is quantised") && message.contains("model.gguf"),
        "{message}"
    );
}

#[test]
fn the_memory_of_quantised_layers_is_counted_by_their_blocks() {
    let config = config(Family::Qwen3);
    let pretrained = open(&config, |_| Encoding::Q8_0);
    let base = QuantisedBase::stored(&config, &lora(16, &LoraTarget::ALL), &pretrained.weights).unwrap();
    let per_layer = 256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 2048;
    assert_eq!(base.n_weights, 4 * per_layer);
    assert_eq!(base.n_bytes, 4 * per_layer / 32 * 34);
    // Gate and up, with 64 columns and rows for adapters.
    assert_eq!(base.n_unpacked, (2 * 2048 + 64) * (256 + 64));
}
