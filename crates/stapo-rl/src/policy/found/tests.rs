use super::*;
use std::fs;

/// A run folder without checkpoints.
fn run(folder: &Path, name: &str, plan: &str) -> String {
    let path = folder.join(name);
    fs::create_dir_all(path.join("checkpoints")).unwrap();
    fs::write(path.join("plan.toml"), plan).unwrap();
    path.display().to_string()
}

fn refusal(name: &str) -> String {
    ModelSource::named(name).find().map(|found| found.pinned.to_string()).unwrap_err().to_string()
}

#[test]
fn a_step_of_a_run_is_a_number_or_the_best() {
    let folder = tempfile::tempdir().unwrap();
    let path = run(folder.path(), "run", "steps = 3\n");
    assert!(refusal(&format!("{path}@best")).contains("no best.json"));
    assert!(refusal(&format!("{path}@last")).contains("\"last\" is no step"));
    for step in [2, 10] {
        fs::create_dir(Path::new(&path).join(format!("checkpoints/step-{step:06}"))).unwrap();
    }
    let said = refusal(&format!("{path}@3"));
    assert!(said.contains("no checkpoint of step 3, only of 2, 10"), "{said}");
    let best = r#"{"schema": 1, "step": 7, "metric": "held_out", "value": 0.5}"#;
    fs::write(Path::new(&path).join("best.json"), best).unwrap();
    assert!(refusal(&format!("{path}@best")).contains("no checkpoint of step 7"));
    // A checkpoint's folder is that step of its run.
    let at = checkpoint_of(&Path::new(&path).join("checkpoints/step-000010")).map(|(_, step)| step);
    assert_eq!(at, Some(10));
    assert!(checkpoint_of(&folder.path().join("checkpoints/step-000010")).is_none(), "no run around it");
}

#[test]
fn runs_that_lead_to_each_other_in_a_circle_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run").display().to_string();
    run(folder.path(), "run", &format!("model = {{ kind = \"path\", path = {path:?} }}\n"));
    let said = ModelSource::named(&path).shape().unwrap_err().to_string();
    assert!(said.contains("more than 64 runs, each trained from the one before"), "{said}");
}

#[test]
fn of_a_supervised_run_only_the_finished_model_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let plan = "steps = 3\ndata = { kind = \"jsonl\", path = \"rows.jsonl\" }\n";
    let path = run(folder.path(), "sft", plan);
    let said = ModelSource::named(&path).shape().unwrap_err().to_string();
    assert!(said.contains("is a pretraining run, of which only the finished model can be used"), "{said}");
    let exported = Path::new(&path).join("model");
    fs::create_dir(&exported).unwrap();
    fs::write(exported.join("config.json"), "{}").unwrap();
    let found = ModelSource::named(&path).find().unwrap();
    assert_eq!(found.base, BaseModel::Files(exported.clone()));
    assert_eq!(found.pinned, ModelSource::named(&exported.display().to_string()));
    // In a training run a folder of that name is somebody's export of some step.
    let trained = run(folder.path(), "rl", "steps = 3\n");
    fs::create_dir(Path::new(&trained).join("model")).unwrap();
    fs::write(Path::new(&trained).join("model/config.json"), "{}").unwrap();
    assert!(refusal(&trained).contains("no checkpoint"));
}

#[test]
fn an_adapter_is_no_model_and_names_its_base() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().display().to_string();
    let config = folder.path().join("adapter_config.json");
    for (text, base) in
        [("{\"base_model_name_or_path\": \"Qwen/Q\"}", "Qwen/Q"), ("{}", "BASE"), ("[", "BASE")]
    {
        fs::write(&config, text).unwrap();
        let said = refusal(&path);
        assert!(said.contains(&format!("adapter in PEFT's format, whose base model is {base}")), "{said}");
    }
    fs::write(folder.path().join("config.json"), "{}").unwrap();
    assert!(ModelSource::named(&path).find().is_ok(), "a model with an adapter beside it");
}

/// A random model has the weights of its shape and the tokenizer of the built-in one.
#[test]
fn a_random_model_has_its_shape_and_names_the_known_ones() {
    let random = |shape: &str| ModelSource::Random { shape: shape.to_string(), seed: 3 };
    let shape = random("qwen3-0.6b").shape().unwrap();
    assert_eq!(shape.n_parameters(), 596_049_920);
    assert_eq!(shape.stops, ModelSource::Builtin.shape().unwrap().stops);
    let said = random("qwen9").shape().unwrap_err().to_string();
    assert!(said.contains("qwen9") && said.contains("qwen3-0.6b, "), "{said}");
    assert_eq!(random("qwen9").find().unwrap().base_name(), "random qwen9");
}
