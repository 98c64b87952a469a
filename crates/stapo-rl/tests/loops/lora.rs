//! Runs that train adapters.

use super::{check_resumed, plan};
use crate::{Quiet, device, start, whole_run};
use stapo_rl::model_files::write_adapter;
use stapo_rl::plan::config::ModelSource;
use stapo_rl::reward::Programs;
use stapo_rl::run::Checkpoint;
use stapo_rl::train::{Interrupted, Trainer, train};
use stapo_rl::{Error, LoadedModel, Plan, unpack_builtin};
use std::fs;
use std::path::Path;

const ADAPTERS: [&str; 3] = ["model.lora.rank=4", "model.lora.alpha=8", "update.learning_rate=1e-3"];

fn adapted(overrides: &[&str]) -> Plan {
    let mut plan = plan(&[&ADAPTERS, overrides].concat());
    plan.pin_adapters().unwrap();
    plan
}

/// Trains a run in `path` to its end and returns the fingerprint of what it trained.
fn trained(path: &Path, plan: &Plan) -> u64 {
    let (mut run, mut trainer) = start(path, plan);
    train(plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
    trainer.learner.model.policy.fingerprint()
}

fn opened(name: &str) -> Result<LoadedModel, Error> {
    LoadedModel::open_found(&ModelSource::named(name).find()?, None, &device(1))
}

/// The built-in model as a folder.
fn base(folder: &Path) -> String {
    let path = folder.join("base");
    fs::create_dir(&path).unwrap();
    let unpacked = unpack_builtin().unwrap();
    for entry in fs::read_dir(unpacked.path()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), path.join(entry.file_name())).unwrap();
    }
    path.display().to_string()
}

#[test]
fn adapters_train_exactly_resume_to_the_bit_and_leave_small_checkpoints() {
    let penalty = "objective.kl={kind=\"k3\",beta=0.1}";
    let adapters = adapted(&["steps=2", "objective.preset=grpo", penalty, "record.checkpoint_every_steps=1"]);
    let metrics = check_resumed(&adapters);
    assert!(metrics.iter().all(|m| m.exactness_max_abs == 0.0 && m.gradient_norm > 0.0));
    let (hash, _) = whole_run(&adapters);
    let other_start = adapted(&["steps=2", "objective.preset=grpo", penalty, "seed=4"]);
    assert_ne!(whole_run(&other_start).0, hash, "adapters are drawn by the run's seed");
    let copy = adapted(&["steps=2", "objective.preset=grpo", penalty, "reference=builtin"]);
    assert_eq!(
        whole_run(&copy).0,
        hash,
        "the model without adapters is the reference that a second copy would be"
    );
}

#[test]
fn a_run_with_adapters_is_opened_exported_and_gone_on_with() {
    let folder = tempfile::tempdir().unwrap();
    let base = base(folder.path());
    let run = folder.path().join("run");
    let model = format!("model.path={base}");
    let fingerprint = trained(&run, &adapted(&["steps=2", &model]));
    let state = Checkpoint::list(&run).unwrap().pop().unwrap().join("weights.safetensors");
    let whole = fs::metadata(Path::new(&base).join("model.safetensors")).unwrap().len();
    assert!(fs::metadata(&state).unwrap().len() < whole, "checkpoints hold adapters and not the base");

    let found = opened(&run.display().to_string()).unwrap();
    assert_eq!(found.policy.fingerprint(), fingerprint);
    let adapter = folder.path().join("adapter");
    write_adapter(&adapter, &found.policy, &base).unwrap();
    let source = ModelSource::named(&base).find().unwrap();
    let from_peft = LoadedModel::open_found(&source, Some(&adapter), &device(1)).unwrap();
    assert_eq!(from_peft.policy.fingerprint(), fingerprint);

    let further = folder.path().join("further");
    let on = adapted(&["steps=1", &format!("model.path={}", run.display())]);
    assert_ne!(trained(&further, &on), fingerprint);
    opened(&further.display().to_string()).unwrap();
    let from_adapter = plan(&["steps=1", &model, &format!("model.lora.adapter={}", adapter.display())]);
    let third = folder.path().join("third");
    let (_, trainer) = start(&third, &from_adapter);
    assert_eq!(trainer.learner.model.policy.fingerprint(), fingerprint, "the run starts from the adapter");

    let all_weights = plan(&[&format!("model.path={}", run.display())]);
    let whole = Trainer::new(&all_weights, &device(1), Programs::Recorded).err().unwrap().to_string();
    assert!(whole.contains("--merge"), "{whole}");
    let mut other_rank =
        plan(&[&model, "model.lora.rank=5", &format!("model.lora.adapter={}", adapter.display())]);
    let rank = other_rank.pin_adapters().unwrap_err().to_string();
    assert!(rank.contains("model.lora.rank") && rank.contains('4'), "{rank}");
    let of_run = ModelSource::named(&run.display().to_string()).find().unwrap();
    let twice = LoadedModel::open_found(&of_run, Some(&adapter), &device(1)).err().unwrap().to_string();
    assert!(twice.contains("has adapters already"), "{twice}");
    let config = adapter.join("adapter_config.json");
    let text = fs::read_to_string(&config).unwrap();
    assert!(text.contains("\"lora_dropout\": 0.0"), "{text}");
    fs::write(&config, text.replace("\"lora_dropout\": 0.0", "\"lora_dropout\": 0.1")).unwrap();
    let dropout = plan(&[&model, &format!("model.lora.adapter={}", adapter.display())]).pin_adapters();
    let dropout = dropout.unwrap_err().to_string();
    assert!(dropout.contains("lora_dropout 0.1"), "{dropout}");
}

#[test]
fn another_base_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let base = base(folder.path());
    let run = folder.path().join("run");
    trained(&run, &adapted(&["steps=1", &format!("model.path={base}")]));
    let weights = Path::new(&base).join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let last = bytes.len() - 2;
    bytes[last] ^= 1;
    fs::write(&weights, bytes).unwrap();
    let resumed =
        Interrupted::open(&run, &["steps=2".to_string()], false, "of a test").err().unwrap().to_string();
    assert!(resumed.contains("weights"), "{resumed}");
    let error = opened(&run.display().to_string()).err().unwrap().to_string();
    assert!(error.contains("weights"), "{error}");
}

#[test]
fn adapters_lie_on_the_weights_of_an_earlier_run() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    trained(&first, &plan(&["steps=1"]));
    let adapters = adapted(&["steps=1", &format!("model.path={}@1", first.display())]);
    let (mut run, mut trainer) = start(&second, &adapters);
    train(&adapters, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
    let bits = |model: &LoadedModel| -> Vec<Vec<u32>> {
        let tensors = model.policy.tensors();
        tensors.map(|(_, values)| values.to_vec().iter().map(|x| x.to_bits()).collect()).collect()
    };
    let found = opened(&second.display().to_string()).unwrap();
    assert!(bits(&found) == bits(&trainer.learner.model), "base and adapters are those of the trainer");
}

#[test]
fn only_the_layers_of_a_file_that_has_them_quantised_stay_so() {
    let folder = tempfile::tempdir().unwrap();
    let lora = adapted(&[]).config.lora.unwrap().spec();
    let refusal = |name: &str| {
        let found = ModelSource::named(name).find().unwrap();
        found.quantised_base(&lora).unwrap_err().to_string()
    };
    let message = refusal("builtin");
    assert!(message.contains("model.lora.base") && message.contains("no file"), "{message}");
    let message = refusal(&base(folder.path()));
    assert!(message.contains("no layer of the model is quantised"), "{message}");
    let path = folder.path().join("run");
    trained(&path, &plan(&["steps=1", "record.checkpoint_every_steps=1"]));
    let run = path.display().to_string();
    let message = refusal(&run);
    assert!(message.contains("model.lora.base"), "{message}");
}
