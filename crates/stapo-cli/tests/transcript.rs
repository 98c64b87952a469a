//! The way of a new user with a model and data of their own, as one transcript.

use std::path::Path;
use std::process::Command;

#[test]
fn a_model_and_a_file_become_an_exported_policy() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = tempfile::tempdir().unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_stapo"));
    let path =
        format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap_or_default());
    let output = Command::new("bash")
        .arg(root.join("examples/first_hour/run.sh"))
        .arg(root.join("crates/stapo-model/tests/data/formats/llama-spm.gguf"))
        .arg(folder.path().join("work"))
        .args(["steps=2", "rollout.max_response_tokens=24", "evaluation.problems=4"])
        .env("PATH", path)
        .env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"))
        .output()
        .unwrap();
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{said}");
    assert!(output.status.success(), "{said}");
    for file in [
        "mine.toml",
        "run/metrics.jsonl",
        "report.html",
        "exported/model.safetensors",
        "exported/config.json",
    ] {
        assert!(folder.path().join("work").join(file).exists(), "{file} is missing:\n{said}");
    }
}
