//! `LongRoPE`: a run and everything that reads its policy have the factors of its longest sequence.

use super::{Quiet, device, plan, start, train};
use serde_json::{Value, json};
use stapo_model::config::{LongFactors, RopeScaling};
use stapo_rl::plan::config::ModelSource;
use stapo_rl::{FoundModel, LoadedModel};
use std::fs;
use std::path::Path;

/// The built-in model with other factors above 64 tokens than below.
fn long_model(folder: &Path) -> String {
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/base");
    for entry in fs::read_dir(base).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
    }
    let text = fs::read_to_string(folder.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["rope_parameters"] = json!({
        "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64,
        "short_factor": vec![1.0; 16], "long_factor": vec![2.0; 16],
    });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    folder.display().to_string()
}

fn factors(model: &LoadedModel) -> LongFactors {
    match model.policy.config().attentions().next().unwrap().rope.scaling {
        RopeScaling::Long { used, .. } => used,
        ref other => panic!("{other:?}"),
    }
}

fn found(name: &str) -> FoundModel {
    ModelSource::named(name).find().unwrap()
}

#[test]
fn the_policy_of_a_run_is_read_with_the_factors_that_it_was_trained_with() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    fs::create_dir(&model).unwrap();
    let name = long_model(&model);
    let read = |found: &FoundModel| factors(&LoadedModel::open_found(found, None, &device(1)).unwrap());
    for (max_response, expected) in [(32, LongFactors::Short), (33, LongFactors::Long)] {
        let response = format!("rollout.max_response_tokens={max_response}");
        let named = format!("model={{kind=\"path\",path={name:?}}}");
        let plan = plan(&["steps=1", "rollout.max_prompt_tokens=32", &response, &named]);
        let path = folder.path().join(format!("run-{max_response}"));
        let (mut run, mut trainer) = start(&path, &plan);
        assert_eq!(factors(&trainer.learner.model), expected);
        train(&plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
        for step in ["", "@0", "@1"] {
            let run = found(&format!("{}{step}", path.display()));
            assert_eq!(read(&run), expected, "{max_response}{step}");
            assert_eq!(read(&run.for_sequences_of(65)), LongFactors::Long, "a longer sequence decides");
        }
    }
    assert_eq!(read(&found(&name)), LongFactors::Short);
    assert_eq!(read(&found(&name).for_sequences_of(64)), LongFactors::Short);
    assert_eq!(read(&found(&name).for_sequences_of(65)), LongFactors::Long);
}
