use super::*;
use stapo_model::export::{ExportOptions, Precision};

/// The built-in model as a reward model, whose head is the formula of `make_reward_model_curve.py`.
fn start(folder: &Path) -> PathBuf {
    let found = crate::plan::config::ModelSource::Builtin.find().unwrap();
    let model = LoadedModel::open_to_rank(&found, None, 0, &device()).unwrap();
    let path = folder.join("start");
    let options = ExportOptions { precision: Precision::F32, ..ExportOptions::default() };
    export_policy(&path, &model.policy, &model.companions, &options).unwrap();
    let file = path.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let n_head = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + n_head]).unwrap();
    let range = &header["score.weight"]["data_offsets"];
    let [from, to] = [0, 1].map(|idx| 8 + n_head + range[idx].as_u64().unwrap() as usize);
    for (idx, element) in bytes[from..to].as_chunks_mut().0.iter_mut().enumerate() {
        *element = ((0.05 * (idx as f64).sin()) as f32).to_le_bytes();
    }
    std::fs::write(&file, bytes).unwrap();
    path
}

/// The curve of TRL's `RewardTrainer` on the same model and rows.
#[test]
fn the_loss_of_a_reward_model_follows_that_of_trl() {
    let curve: Value =
        serde_json::from_str(include_str!("../../../../tests/goldens/reward_model_curve.json")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let rows = curve["rows"].as_array().unwrap();
    let model = format!(
        "model={{kind=\"path\",path={}}}",
        toml::Value::from(start(folder.path()).display().to_string())
    );
    let batch = format!("update.batch_rows={}", rows.len());
    let settings = [
        "steps=8",
        "update.learning_rate=1e-4",
        "update.schedule={kind=\"constant\"}",
        "reward_model.center_coefficient=0.01",
        &model,
        &batch,
    ];
    let (config, mut pretrainer) =
        open_with(&PretrainConfig::ranking(), folder.path(), rows, &settings).unwrap();
    let steps = curve["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 8);
    for (step, theirs) in steps.iter().enumerate() {
        let ours = pretrainer.step(&config).unwrap();
        let accuracy = ours.reward_model.unwrap().accuracy;
        let compared = [("loss", ours.loss), ("gradient_norm", ours.gradient_norm), ("accuracy", accuracy)];
        for (key, ours) in compared {
            let theirs = theirs[key].as_f64().unwrap();
            let near = (ours - theirs).abs() <= 2e-5 * theirs.abs().max(1.0);
            assert!(near, "step {}: {key} {ours}, TRL {theirs}", step + 1);
        }
    }
}
