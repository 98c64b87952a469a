//! Tiny random models against what `transformers` computed on them; `goldens/make_models.py` and `goldens/make_families.py` make
//! both.

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use stapo_model::cuda::{CudaOptions, Precision};
use stapo_model::decoder::{
    Gradients, HeadOptions, PackedBatch, Pass, Policy, PolicySpec, Recompute, TokenScores,
};
use stapo_model::export::{self, ExportOptions, export};
use stapo_model::peft::{self, PeftAdapter};
use stapo_model::{CpuOptions, Device, Family, Pretrained, TensorSpec};
use std::path::{Path, PathBuf};

const CASES: [&str; 24] = [
    "qwen3-tied-gqa2",
    "qwen3-untied-gqa7",
    "qwen3-yarn-gqa1",
    "qwen2-tied-gqa7",
    "qwen2-untied-gqa2",
    "llama-tied-gqa3-bf16",
    "llama3-untied-gqa1",
    "llama-yarn-gqa2",
    "smollm3-tied",
    "smollm3-biased",
    "mistral-window",
    "olmo2-untied",
    "olmo3-windows",
    "gemma3-windows",
    "gemma2-softcaps",
    "phi3-joined",
    "phi3-longrope",
    "granite-scaled",
    "qwen35-hybrid",
    "qwen35-untied",
    "gpt-oss-attention",
    "qwen3-biased",
    "llama-biased",
    "phi3-longrope-long",
];
const TOLERANCE: f32 = 1e-4;
/// Of models with DeltaNet, relative to the largest number.
const HYBRID_TOLERANCE: f32 = 1e-5;

/// Adapters, and the golden models that they are of; `goldens/make_lora.py` makes them.
const ADAPTERS: [(&str, &str); 7] = [
    ("lora-all-linear", "qwen3-tied-gqa2"),
    ("lora-some", "qwen2-untied-gqa2"),
    ("lora-rank1", "llama3-untied-gqa1"),
    ("lora-gemma3", "gemma3-windows"),
    ("lora-olmo3", "olmo3-windows"),
    ("lora-phi3", "phi3-joined"),
    ("lora-phi3-blocks", "phi3-joined"),
];

struct Golden {
    name: &'static str,
    policy: Policy,
    bytes: Vec<u8>,
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name)
}

impl Golden {
    fn open(name: &'static str, device: &Device) -> Self {
        let folder = folder(name);
        let pretrained = Pretrained::open(&folder).unwrap();
        assert_eq!(pretrained.ignored, [""; 0], "{name}");
        let policy = Policy::load(device, &pretrained.config, &pretrained.weights).unwrap();
        let mut golden =
            Self { name, policy, bytes: std::fs::read(folder.join("golden.safetensors")).unwrap() };
        // transformers chooses the factors of LongRoPE for each sequence: all of a case need the same.
        let longest = golden.u32("lengths").into_iter().max().unwrap();
        golden.policy.fit_longest(longest as usize);
        golden
    }

    fn open_adapter((name, base): (&'static str, &str), device: &Device) -> Self {
        let pretrained = Pretrained::open(&folder(base)).unwrap();
        let adapter = PeftAdapter::open(&folder(name)).unwrap();
        let spec = PolicySpec { config: &pretrained.config, lora: Some(&adapter.spec) };
        let mut policy = Policy::load(device, spec, &pretrained.weights).unwrap();
        adapter.read_into(&mut policy).unwrap();
        Self { name, policy, bytes: std::fs::read(folder(name).join("golden.safetensors")).unwrap() }
    }

    fn words(&self, tensor: &str) -> Vec<[u8; 4]> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        file.tensor(tensor).unwrap().data().as_chunks::<4>().0.to_vec()
    }

    fn f32(&self, tensor: &str) -> Vec<f32> {
        self.words(tensor).into_iter().map(f32::from_le_bytes).collect()
    }

    fn u32(&self, tensor: &str) -> Vec<u32> {
        self.words(tensor).into_iter().map(u32::from_le_bytes).collect()
    }

    fn sequences(&self) -> Vec<(Vec<u32>, usize)> {
        let (tokens, lengths, prompts) =
            (self.u32("tokens"), self.u32("lengths"), self.u32("prompt_lengths"));
        let mut rest = tokens.as_slice();
        let mut sequences = Vec::new();
        for (length, n_prompt) in lengths.into_iter().zip(prompts) {
            let (sequence, after) = rest.split_at(length as usize);
            sequences.push((sequence.to_vec(), n_prompt as usize));
            rest = after;
        }
        sequences
    }

    fn batch(&self) -> PackedBatch {
        let mut batch = PackedBatch::new();
        for (tokens, n_prompt) in self.sequences() {
            batch.push_response(&tokens, n_prompt);
        }
        batch
    }

    fn options(&self, n_alternatives: usize) -> HeadOptions {
        HeadOptions {
            temperature: self.f32("temperature")[0].into(),
            n_alternatives,
            ..HeadOptions::default()
        }
    }

    fn scores(&self, n_alternatives: usize) -> TokenScores {
        let mut pass = Pass::scoring(&self.policy).unwrap();
        pass.forward(&self.policy, &self.batch(), self.options(n_alternatives)).unwrap()
    }

    #[track_caller]
    fn check(&self, what: &str, ours: &[f32], theirs: &[f32]) {
        assert_eq!(ours.len(), theirs.len(), "{} {what}", self.name);
        let tolerance = if self.name.starts_with("qwen35") { HYBRID_TOLERANCE } else { TOLERANCE };
        let scale = theirs.iter().fold(0.0_f32, |top, x| top.max(x.abs()));
        let worst = ours.iter().zip(theirs).fold(0.0_f32, |top, (a, b)| top.max((a - b).abs()));
        assert!(
            worst.is_finite() && worst <= tolerance * scale,
            "{} {what}: off by {worst} of {scale}",
            self.name
        );
    }
}

/// Every case, with adapters and without, on the CPU and, where there is one, on a GPU in f32.
fn goldens() -> Vec<Golden> {
    let of_device = |device: &Device| {
        let is_built = |name: &&str| {
            let config = Pretrained::open(&folder(name)).unwrap().config;
            config.check_device(device).map_err(|error| println!("skipped {name}: {error}")).is_ok()
        };
        let models = CASES.into_iter().filter(is_built).map(|name| Golden::open(name, device));
        let adapters = ADAPTERS.map(|names| Golden::open_adapter(names, device));
        models.chain(adapters).collect::<Vec<_>>()
    };
    devices().iter().flat_map(of_device).collect()
}

fn devices() -> Vec<Device> {
    let mut devices = vec![Device::cpu(CpuOptions::default())];
    match Device::cuda(CudaOptions { precision: Precision::F32, ..CudaOptions::default() }) {
        Ok(gpu) => devices.push(gpu),
        Err(error) => println!("skipped on a GPU: {error}"),
    }
    devices
}

/// A golden model that is in no list would be compared with nothing.
#[test]
fn every_golden_model_is_compared() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    let folders = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let models =
        folders.filter(|path| path.join("golden.safetensors").exists() && path.join("config.json").exists());
    let mut names: Vec<String> =
        models.map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect();
    names.retain(|name| !name.starts_with("reward-"));
    names.sort();
    let mut listed = CASES.to_vec();
    listed.sort_unstable();
    assert_eq!(names, listed);
}

#[test]
fn scores_agree_with_transformers() {
    for golden in goldens() {
        let scores = golden.scores(0);
        golden.check("logp", &scores.logp, &golden.f32("logp"));
        golden.check("entropy", &scores.entropy, &golden.f32("entropy"));
        golden.check("collision", &scores.collision, &golden.f32("collision"));
        if golden.policy.lora().is_some() {
            golden.check("logp of merged weights", &scores.logp, &golden.f32("merged_logp"));
        }
    }
}

/// Of Phi's joined matrices, PEFT saves an adapter of the whole; written is the form with a block for each part.
#[test]
fn a_written_adapter_has_the_tensors_of_peft() {
    for names in ADAPTERS.into_iter().filter(|(name, _)| *name != "lora-phi3") {
        let golden = Golden::open_adapter(names, &Device::cpu(CpuOptions::default()));
        let parent = tempfile::tempdir().unwrap();
        let out = parent.path().join("adapter");
        peft::write(&out, &golden.policy, names.1).unwrap();
        let [ours, theirs] = [&out, &folder(names.0)].map(|at| {
            let keys = std::fs::read_to_string(at.join(peft::CONFIG)).unwrap();
            let keys: serde_json::Value = serde_json::from_str(&keys).unwrap();
            (keys, std::fs::read(at.join(peft::WEIGHTS)).unwrap())
        });
        for key in ["r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"] {
            assert_eq!(ours.0[key], theirs.0[key], "{} {key}", names.0);
        }
        let [ours, theirs] = [&ours.1, &theirs.1].map(|file| SafeTensors::deserialize(file).unwrap());
        assert_eq!(ours.len(), theirs.len(), "{}", names.0);
        for (name, tensor) in ours.tensors() {
            assert_eq!(tensor, theirs.tensor(&name).unwrap(), "{} {name}", names.0);
        }
    }
}

#[test]
fn alternatives_agree_with_transformers() {
    for golden in goldens() {
        let best: Vec<(u32, f32)> = golden.scores(5).alternatives.into_iter().flatten().collect();
        let (ids, logp): (Vec<u32>, Vec<f32>) = best.into_iter().unzip();
        let golden_logp = golden.f32("top_logp");
        golden.check("alternatives", &logp, &golden_logp);
        for (i, (ours, theirs)) in ids.iter().zip(golden.u32("top_ids")).enumerate() {
            let is_close = |j: usize| (golden_logp[i] - golden_logp[j]).abs() < 1e-3;
            let has_near_twin = (i > 0 && is_close(i - 1)) || (i + 1 < ids.len() && is_close(i + 1));
            assert!(
                *ours == theirs || has_near_twin,
                "{} alternative {i}: {ours}, not {theirs}",
                golden.name
            );
        }
    }
}

/// Logits are defined up to a constant by the log-probabilities of the whole vocabulary.
#[test]
fn logits_agree_with_transformers() {
    for golden in goldens() {
        let vocabulary = golden.policy.config().vocabulary;
        let mut batch = PackedBatch::new();
        for (mut tokens, _) in golden.sequences() {
            tokens.push(0);
            batch.push_response(&tokens, tokens.len() - 1);
        }
        let mut pass = Pass::scoring(&golden.policy).unwrap();
        let options = HeadOptions { n_alternatives: vocabulary, ..HeadOptions::default() };
        let scores = pass.forward(&golden.policy, &batch, options).unwrap();
        for (mut ours, logits) in scores.alternatives.into_iter().zip(golden.f32("logits").chunks(vocabulary))
        {
            ours.sort_by_key(|(id, _)| *id);
            let ours: Vec<f32> = ours.into_iter().map(|(_, logp)| logp).collect();
            let mean = |x: &[f32]| x.iter().sum::<f32>() / x.len() as f32;
            let (our_mean, mean) = (mean(&ours), mean(logits));
            let ours: Vec<f32> = ours.iter().map(|x| x - our_mean + mean).collect();
            golden.check("logits", &ours, logits);
        }
    }
}

#[test]
fn gradients_agree_with_transformers() {
    for golden in goldens() {
        let mut pass = Pass::training(&golden.policy, Recompute::Nothing).unwrap();
        let mut gradients = Gradients::zeros(&golden.policy).unwrap();
        pass.forward(&golden.policy, &golden.batch(), golden.options(0)).unwrap();
        let (d_logp, d_entropy) = (golden.f32("d_logp"), golden.f32("d_entropy"));
        pass.backward(&golden.policy, &d_logp, &d_entropy, &mut gradients).unwrap();
        for (spec, ours) in gradients.tensors() {
            golden.check(&spec.name, &ours, &golden.f32(&format!("grad.{}", spec.name)));
        }
    }
}

/// Both layouts of names that `transformers` has written for multimodal checkpoints, and that of Qwen3.5 with its head that predicts
/// several tokens.
#[test]
fn a_multimodal_checkpoint_is_read_by_its_language_model() {
    for (case, whole, language, others) in [
        ("gemma3-windows", "gemma3", "language_model.model.", &["vision_tower.patch.weight"][..]),
        ("gemma3-windows", "gemma3", "model.language_model.", &["model.vision_tower.patch.weight"]),
        (
            "qwen35-hybrid",
            "qwen3_5",
            "model.language_model.",
            &["model.visual.patch.weight", "mtp.layers.0.mlp.up_proj.weight"],
        ),
    ] {
        let alone = Pretrained::open(&folder(case)).unwrap();
        let bytes = std::fs::read(folder(case).join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors();
        let text = std::fs::read_to_string(folder(case).join("config.json")).unwrap();
        let inner: serde_json::Value = serde_json::from_str(&text).unwrap();
        let outer = serde_json::json!({"model_type": whole, "text_config": inner, "vision_config": {}});
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), outer.to_string()).unwrap();
        let named = |name: &str| format!("{language}{}", name.strip_prefix("model.").unwrap());
        let mut all: Vec<_> = tensors.iter().map(|(name, view)| (named(name), view.clone())).collect();
        all.extend(others.iter().map(|name| ((*name).to_string(), tensors[0].1.clone())));
        let file = safetensors::serialize(all, None).unwrap();
        std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
        for name in PROCESSORS {
            std::fs::write(folder.path().join(name), name).unwrap();
        }
        let read = Pretrained::open(folder.path()).unwrap();
        assert_eq!(read.config, alone.config);
        let ignored: std::collections::BTreeSet<&str> = read.ignored.iter().map(String::as_str).collect();
        assert_eq!(ignored, others.iter().copied().collect());
        for spec in alone.config.tensors() {
            let [ours, expected] = [&read, &alone].map(|model| {
                let mut numbers = vec![0.0; spec.n_elements()];
                model.weights.read_f32(&spec.name, &spec.shape, &mut numbers).unwrap();
                numbers
            });
            assert_eq!(ours, expected, "{}", spec.name);
        }
        assert_exports_whole(&read, folder.path(), whole);
    }
}

/// Files of a multimodal model's processors, which its class in `transformers` is loaded with.
const PROCESSORS: [&str; 4] = [
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
];

/// An export of a multimodal checkpoint has the tensors and keys of the whole checkpoint, and the files of its processors.
fn assert_exports_whole(model: &Pretrained, folder: &Path, model_type: &str) {
    let out = folder.join("exported");
    let options = ExportOptions { precision: export::Precision::F32, ..ExportOptions::default() };
    let read = |spec: &TensorSpec, to: &mut [f32]| model.weights.read_f32(&spec.name, &spec.shape, to);
    let written = export(&out, &model.config, &model.companions().unwrap(), &options, read).unwrap();
    assert_eq!(written.n_shards, 2);
    let files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let files = files.map(|name| std::fs::read(out.join(name)).unwrap());
    let exported: Vec<_> =
        files.iter().flat_map(|file| SafeTensors::deserialize(file).unwrap().tensors()).collect();
    let original = std::fs::read(folder.join("model.safetensors")).unwrap();
    let original = SafeTensors::deserialize(&original).unwrap();
    assert_same_tensors(model_type, model.config.family, &exported, &original);
    let config: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(out.join("config.json")).unwrap()).unwrap();
    assert_eq!((&config["model_type"], config.get("vision_config").is_some()), (&model_type.into(), true));
    assert_eq!(config["text_config"]["model_type"], model.config.family.name());
    for name in PROCESSORS {
        assert_eq!(std::fs::read_to_string(out.join(name)).unwrap(), name);
    }
    let again = Pretrained::open(&out).unwrap();
    assert_eq!((again.config, again.ignored), (model.config.clone(), model.ignored.clone()));
}

/// Equal names, shapes and numbers, those exported in f32.
fn assert_same_tensors(
    case: &str,
    family: Family,
    exported: &[(String, TensorView<'_>)],
    original: &SafeTensors<'_>,
) {
    let numbers = |tensor: &TensorView<'_>| -> Vec<f32> {
        let bytes = tensor.data();
        match tensor.dtype() {
            Dtype::F32 => bytes.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect(),
            Dtype::BF16 => {
                let halves = bytes.as_chunks().0.iter().map(|two| u32::from(u16::from_le_bytes(*two)));
                halves.map(|half| f32::from_bits(half << 16)).collect()
            }
            other => panic!("{case}: {other:?}"),
        }
    };
    assert_eq!(exported.len(), original.len(), "{case}");
    for (name, tensor) in exported {
        let original = original.tensor(name).unwrap_or_else(|_| panic!("{case}: {name} is new"));
        assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::F32, original.shape()), "{case} {name}");
        // These norms are read as 1 + w, and 1 is subtracted again.
        let is_less_one = [Family::Gemma2, Family::Gemma3, Family::Qwen35].contains(&family)
            && name.ends_with("norm.weight")
            && !name.contains("linear_attn");
        let limit = if is_less_one { 2e-7 } else { 0.0 };
        let (ours, theirs) = (numbers(tensor), numbers(&original));
        assert!(ours.iter().zip(&theirs).all(|(a, b)| (a - b).abs() <= limit), "{case} {name}");
    }
}

#[test]
fn an_export_has_the_tensors_and_the_description_of_its_folder() {
    for case in CASES {
        let model = Pretrained::open(&folder(case)).unwrap();
        let parent = tempfile::tempdir().unwrap();
        let out = parent.path().join("exported");
        let options = ExportOptions { precision: export::Precision::F32, ..ExportOptions::default() };
        let read = |spec: &TensorSpec, to: &mut [f32]| model.weights.read_f32(&spec.name, &spec.shape, to);
        export(&out, &model.config, &model.companions().unwrap(), &options, read).unwrap();
        assert_eq!(Pretrained::open(&out).unwrap().config, model.config, "{case}");
        let files = [&out, &folder(case)].map(|at| std::fs::read(at.join("model.safetensors")).unwrap());
        let [exported, original] = files.each_ref().map(|file| SafeTensors::deserialize(file).unwrap());
        assert_same_tensors(case, model.config.family, &exported.tensors(), &original);
    }
}
