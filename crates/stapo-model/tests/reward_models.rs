//! Reward models against what `transformers` computed on them; `goldens/make_reward_models.py` makes both.

use safetensors::SafeTensors;
use stapo_model::cuda::CudaOptions;
use stapo_model::decoder::{Gradients, PackedBatch, Pass, Policy, Recompute};
use stapo_model::export::{ExportOptions, Precision, export};
use stapo_model::{CpuOptions, Device, Family, ModelConfig, Pretrained, SCORE, ScoreHead};
use std::path::{Path, PathBuf};

const CASES: [&str; 5] = ["reward-qwen2", "reward-qwen3", "reward-llama", "reward-gemma2", "reward-gemma3"];
/// Of the largest number of a tensor.
const TOLERANCE: f32 = 1e-4;

struct Golden {
    name: &'static str,
    policy: Policy,
    /// Up to the tokens whose scores are the sequences'.
    sequences: Vec<Vec<u32>>,
    bytes: Vec<u8>,
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name)
}

impl Golden {
    fn open(name: &'static str, device: &Device) -> Self {
        let pretrained = Pretrained::open(&folder(name)).unwrap();
        assert_eq!(pretrained.ignored, [""; 0], "{name}");
        let policy = Policy::load(device, &pretrained.config, &pretrained.weights).unwrap();
        let bytes = std::fs::read(folder(name).join("golden.safetensors")).unwrap();
        let head = pretrained.config.score.unwrap();
        let words = |tensor: &str| -> Vec<u32> {
            let file = SafeTensors::deserialize(&bytes).unwrap();
            let data = file.tensor(tensor).unwrap().data().as_chunks::<4>().0.to_vec();
            data.into_iter().map(u32::from_le_bytes).collect()
        };
        let tokens = words("tokens");
        let mut rest = tokens.as_slice();
        let mut sequences = Vec::new();
        for length in words("lengths") {
            let (sequence, after) = rest.split_at(length as usize);
            sequences.push(head.scored(sequence).to_vec());
            rest = after;
        }
        Self { name, policy, sequences, bytes }
    }

    fn f32(&self, tensor: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let data = file.tensor(tensor).unwrap().data().as_chunks::<4>().0.to_vec();
        data.into_iter().map(f32::from_le_bytes).collect()
    }

    fn scores(&self) -> Vec<f64> {
        let mut pass = Pass::scoring(&self.policy).unwrap();
        pass.forward_scores(&self.policy, &batch(&self.sequences)).unwrap()
    }

    #[track_caller]
    fn check(&self, what: &str, ours: &[f32], theirs: &[f32]) {
        assert_eq!(ours.len(), theirs.len(), "{} {what}", self.name);
        let scale = theirs.iter().fold(0.0_f32, |top, x| top.max(x.abs()));
        let worst = ours.iter().zip(theirs).fold(0.0_f32, |top, (a, b)| top.max((a - b).abs()));
        let is_close = worst.is_finite() && worst <= TOLERANCE * scale;
        assert!(is_close, "{} {what}: off by {worst} of {scale}", self.name);
    }
}

fn batch(sequences: &[Vec<u32>]) -> PackedBatch {
    let mut batch = PackedBatch::new();
    for tokens in sequences {
        batch.push_whole(tokens);
    }
    batch
}

/// The CPU and, where there is one, a GPU in this precision.
fn devices(precision: stapo_model::cuda::Precision) -> Vec<Device> {
    let mut devices = vec![Device::cpu(CpuOptions::default())];
    match Device::cuda(CudaOptions { precision, ..CudaOptions::default() }) {
        Ok(gpu) => devices.push(gpu),
        Err(error) => println!("skipped on a GPU: {error}"),
    }
    devices
}

fn each_golden(check: impl Fn(Golden)) {
    for device in devices(stapo_model::cuda::Precision::F32) {
        for name in CASES {
            check(Golden::open(name, &device));
        }
    }
}

/// The goldens hold a sequence that ends with padding tokens and one of nothing else.
#[test]
fn scores_agree_with_transformers() {
    each_golden(|golden| {
        let ours: Vec<f32> = golden.scores().into_iter().map(|score| score as f32).collect();
        golden.check("scores", &ours, &golden.f32("scores"));
    });
}

#[test]
fn gradients_agree_with_transformers() {
    each_golden(|golden| {
        let mut pass = Pass::training(&golden.policy, Recompute::Layers).unwrap();
        let mut gradients = Gradients::zeros(&golden.policy).unwrap();
        let d_scores = golden.f32("d_scores");
        // In two micro-batches, whose gradients are added.
        for range in [0..2, 2..d_scores.len()] {
            pass.forward_scores(&golden.policy, &batch(&golden.sequences[range.clone()])).unwrap();
            pass.backward_scores(&golden.policy, &d_scores[range], &mut gradients);
        }
        for (spec, ours) in gradients.tensors() {
            golden.check(&spec.name, &ours, &golden.f32(&format!("grad.{}", spec.name)));
        }
    });
}

/// Also in bf16 on a GPU.
#[test]
fn a_score_has_the_same_bits_alone_and_in_any_batch() {
    for device in devices(stapo_model::cuda::Precision::Bf16) {
        for name in CASES {
            let golden = Golden::open(name, &device);
            let mut pass = Pass::scoring(&golden.policy).unwrap();
            let mut score = |sequences: &[Vec<u32>]| {
                let scores = pass.forward_scores(&golden.policy, &batch(sequences)).unwrap();
                scores.into_iter().map(f64::to_bits).collect::<Vec<u64>>()
            };
            let together = score(&golden.sequences);
            let alone: Vec<u64> =
                golden.sequences.iter().flat_map(|one| score(std::slice::from_ref(one))).collect();
            assert_eq!(together, alone, "{name}");
            let reversed: Vec<Vec<u32>> = golden.sequences.iter().rev().cloned().collect();
            let backwards: Vec<u64> = score(&reversed).into_iter().rev().collect();
            assert_eq!(together, backwards, "{name}");
            // A batch of a hundred sequences, for the kernels of many rows.
            let many: Vec<Vec<u32>> = golden.sequences.iter().cycle().take(100).cloned().collect();
            let expected: Vec<u64> = together.iter().cycle().take(100).copied().collect();
            assert_eq!(score(&many), expected, "{name}");
        }
    }
}

#[test]
fn an_export_is_read_again_with_equal_scores() {
    let device = Device::cpu(CpuOptions::default());
    for name in CASES {
        let golden = Golden::open(name, &device);
        let scratch = tempfile::tempdir().unwrap();
        let out = scratch.path().join("model");
        let options = ExportOptions { precision: Precision::F32, ..ExportOptions::default() };
        let mut tensors = golden.policy.merged_tensors();
        export(&out, golden.policy.config(), &[], &options, |spec, values| {
            let (named, tensor) = tensors.next().unwrap();
            assert_eq!(named, spec);
            values.copy_from_slice(&tensor);
            Ok(())
        })
        .unwrap();
        let again = Pretrained::open(&out).unwrap();
        assert_eq!(again.config, *golden.policy.config(), "{name}");
        let policy = Policy::load(&device, &again.config, &again.weights).unwrap();
        let exported = Golden { policy, ..Golden::open(name, &device) };
        // Families that store weights of norms less 1 round once more.
        let tolerance = if golden.policy.config().family == Family::Qwen3 { 0.0 } else { 1e-6 };
        for (ours, read) in golden.scores().into_iter().zip(exported.scores()) {
            assert!((ours - read).abs() <= tolerance, "{name}: {ours} and {read}");
        }
    }
}

#[test]
fn padding_at_the_end_is_skipped_and_nowhere_else() {
    let head = ScoreHead { padding: Some(5) };
    assert_eq!(head.scored(&[5, 1, 5, 2, 5, 5]), [5, 1, 5, 2]);
    assert_eq!(head.scored(&[5, 5]), [5]);
    assert_eq!(ScoreHead { padding: None }.scored(&[1, 5]), [1, 5]);
}

#[test]
fn what_is_no_reward_model_is_refused_by_name() {
    let text = std::fs::read_to_string(folder("reward-qwen2").join("config.json")).unwrap();
    let keys: serde_json::Map<_, _> = serde_json::from_str(&text).unwrap();
    let refused = |changes: &[(&str, serde_json::Value)]| {
        let mut keys = keys.clone();
        keys.extend(changes.iter().map(|(key, value)| ((*key).to_string(), value.clone())));
        ModelConfig::from_hugging_face("config.json", &keys).unwrap_err().to_string()
    };
    let two = refused(&[("id2label", serde_json::json!({"0": "bad", "1": "good"}))]);
    assert!(two.contains("id2label") && two.contains("2 labels"), "{two}");
    let other = refused(&[("architectures", serde_json::json!(["Qwen3ForSequenceClassification"]))]);
    assert!(other.contains("Qwen3ForSequenceClassification"), "{other}");
    // A folder that says it is a reward model and has the weights of a language model.
    let scratch = tempfile::tempdir().unwrap();
    std::fs::copy(
        folder("qwen2-untied-gqa2").join("model.safetensors"),
        scratch.path().join("model.safetensors"),
    )
    .unwrap();
    std::fs::write(scratch.path().join("config.json"), &text).unwrap();
    let missing = Pretrained::open(scratch.path()).unwrap_err().to_string();
    assert!(missing.contains(SCORE), "{missing}");
}
