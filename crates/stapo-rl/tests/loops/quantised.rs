//! Runs whose adapters lie on a quantised base. What needs a GPU says so without one and passes.

use super::plan;
use crate::{PROGRAM, Quiet, device};
use stapo_core::record::Metrics;
use stapo_model::Encoding;
use stapo_rl::device::Device;
use stapo_rl::device::cuda::CudaOptions;
use stapo_rl::model_files::Pretrained;
use stapo_rl::plan::config::ModelSource;
use stapo_rl::policy::identity;
use stapo_rl::ranks::Solo;
use stapo_rl::reward::Programs;
use stapo_rl::run::{Run, this_process};
use stapo_rl::train::{Interrupted, Outcome, Trainer, train};
use stapo_rl::{LoadedModel, Plan, unpack_builtin};
use std::io::Write;
use std::path::Path;

#[path = "../../../stapo-model/tests/gguf_file.rs"]
mod gguf_file;

/// The built-in model as a GGUF file with its layers in `Q8_0`.
fn write_builtin(path: &Path) {
    let folder = unpack_builtin().unwrap();
    let Pretrained { config, weights, .. } = &Pretrained::open(folder.path()).unwrap();
    let tokenizer = std::fs::read_to_string(folder.path().join("tokenizer.json")).unwrap();
    let tokenizer: serde_json::Value = serde_json::from_str(&tokenizer).unwrap();
    let mut tokens: Vec<String> = (0..config.vocabulary).map(|id| format!("<unused {id}>")).collect();
    for (token, id) in tokenizer["model"]["vocab"].as_object().unwrap() {
        // A byte-level vocabulary spells a space so.
        tokens[id.as_u64().unwrap() as usize] = token.replace(' ', "\u{120}");
    }
    let end = config.stops[0] as usize;
    tokens[end] = "<|end|>".into();
    let fields = [
        gguf_file::word("tokenizer.ggml.model", "gpt2"),
        gguf_file::word("tokenizer.ggml.pre", "gpt-2"),
        gguf_file::words("tokenizer.ggml.tokens", &tokens),
        gguf_file::words("tokenizer.ggml.merges", &[]),
        gguf_file::whole("tokenizer.ggml.eos_token_id", end),
    ];
    let encoding = |name: &str| if name.contains("layers") { Encoding::Q8_0 } else { Encoding::F32 };
    gguf_file::write(path, config, &fields, encoding, |spec, encoding, file| {
        let mut numbers = vec![0.0; spec.n_elements()];
        weights.read_f32(&spec.name, &spec.shape, &mut numbers).unwrap();
        match encoding {
            Encoding::Q8_0 => file.write_all(&gguf_file::q8_0(&numbers)),
            _ => numbers.iter().try_for_each(|x| file.write_all(&x.to_le_bytes())),
        }
    })
    .unwrap();
}

fn of_file(path: &Path, overrides: &[&str]) -> Plan {
    let model = format!("model={{kind=\"path\",path={:?}}}", path.display().to_string());
    let own = [&model, "model.lora.rank=4", "update.learning_rate=1e-3", "objective.preset=grpo"];
    let kl = ["objective.kl={kind=\"k3\",beta=0.1}", "record.checkpoint_every_steps=1"];
    let mut plan = plan(&[&own, &kl[..], overrides].concat());
    plan.pin_adapters().unwrap();
    plan
}

/// Trains a run to its end and returns the state hash; `resumed` stops it after a step and resumes it with a setting.
fn trained(folder: &Path, plan: &Plan, device: &Device, resumed: Option<(u64, &str)>) -> String {
    let identity = identity::of_plan(plan, PROGRAM).unwrap();
    let writer = this_process(PROGRAM, "of a test");
    let mut run = Run::create(folder, "", &plan.to_toml(), identity, &writer).unwrap();
    let mut trainer = Trainer::new(plan, device, Programs::Recorded).unwrap();
    let mut quiet = Quiet { stop_after: resumed.map(|(step, _)| step), step: 0 };
    let ended = |error| panic!("{}: {error}", folder.display());
    let outcome = train(plan, &mut run, &mut trainer, &mut quiet).unwrap_or_else(ended);
    let Some((_, set)) = resumed else { return trainer.learner.state_hash().unwrap() };
    assert_eq!(outcome, Outcome::Stopped);
    drop((run, trainer));
    let interrupted = Interrupted::open(folder, &[set.to_string()], false, PROGRAM).unwrap();
    let resumed = interrupted.resume(&writer, device, Programs::Recorded, Solo::ranks());
    let (plan, mut run, mut trainer) = resumed.unwrap();
    train(&plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap_or_else(ended);
    trainer.learner.state_hash().unwrap()
}

#[test]
fn a_quantised_base_trains_samples_and_resumes_to_the_bits_of_bf16() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    write_builtin(&file);
    let gpu = Device::cuda(CudaOptions::default()).map_err(|error| println!("skipped: {error}"));
    let Ok(gpu) = gpu else { return };
    let at = |name: &str| folder.path().join(name);
    let plans = ["bf16", "quantised"].map(|base| {
        let base = format!("model.lora.base={base}");
        of_file(&file, &["steps=3", "device=cuda", &base])
    });
    let expected = trained(&at("in bf16"), &plans[0], &gpu, None);
    assert_eq!(trained(&at("quantised"), &plans[1], &gpu, None), expected, "quantised");
    let other = Some((1, "model.lora.base=bf16"));
    assert_eq!(trained(&at("resumed in bf16"), &plans[1], &gpu, other), expected, "resumed in bf16");
    let other = Some((2, "model.lora.base=quantised"));
    assert_eq!(trained(&at("resumed quantised"), &plans[0], &gpu, other), expected, "resumed quantised");
    let metrics = Run::read_metrics(&at("quantised")).unwrap();
    assert!(metrics.iter().all(|m: &Metrics| m.exactness_max_abs == 0.0));
    // A run opens as it was trained, and on the CPU with the numbers of the file.
    let found = ModelSource::named(&at("quantised").display().to_string()).find().unwrap();
    let values = |device: &Device| {
        let model = LoadedModel::open_found(&found, None, device).unwrap();
        model.policy.trained_tensors().map(|(_, x)| x.to_vec()).collect::<Vec<_>>()
    };
    assert!(values(&gpu) == values(&device(1)), "adapters on the GPU and on the CPU");
}

#[test]
fn a_run_on_a_quantised_file_trains_on_the_cpu_in_f32() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    write_builtin(&file);
    let plan = of_file(&file, &["steps=2"]);
    let expected = trained(&folder.path().join("whole"), &plan, &device(1), None);
    let resumed = Some((1, "model.lora.base=bf16"));
    assert_eq!(trained(&folder.path().join("resumed"), &plan, &device(1), resumed), expected);
    let lora = plan.config.lora.as_ref().unwrap().spec();
    let base = plan.config.model.find().unwrap().quantised_base(&lora).unwrap();
    // Queries, keys, values, output, gate, up and down of four layers, 34 bytes for 32 weights.
    let n_weights = 4 * 128 * (128 + 2 * 64 + 128 + 3 * 384);
    assert_eq!((base.n_weights, base.n_bytes), (n_weights, n_weights / 32 * 34));
}
