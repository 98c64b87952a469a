//! `stapo model` from the outside.

use crate::common::ok;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn stapo(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_stapo")).arg("model").args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A tiny GGUF model from the tests of `stapo-model`.
fn tiny(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../stapo-model/tests/data/formats").join(name);
    path.display().to_string()
}

/// A tiny model of a family, from the tests of `stapo-model`.
fn golden(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../stapo-model/tests/goldens").join(name);
    path.display().to_string()
}

fn check_refused(args: &[&str], words: &[&str]) {
    let output = stapo(args);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
    assert!(text(&output.stdout).is_empty());
    for word in words {
        assert!(message.contains(word), "{args:?}: {message:?} does not say {word:?}");
    }
}

#[test]
fn info_tells_family_sizes_and_memory_in_units() {
    let out = ok(&stapo(&["info", &tiny("llama-spm.gguf")]));
    assert!(!out.contains("ignored"), "{out}");
    for line in [
        "family       llama (LlamaForCausalLM)",
        "layers       2 of width 64, feed-forward 96",
        "attention    4 heads on 2 key-value heads of 16",
        "vocabulary   480, head tied to embedding",
        "positions    4,096, rope llama3 theta 500000",
        "stop tokens  2",
        "KV cache     512 B a token in f32, 256 B in bf16",
    ] {
        assert!(out.lines().any(|l| l == line), "{line:?} is not in\n{out}");
    }
    assert!(
        out.contains("parameters   92,480 (92.5k)") && out.contains("training     1.4 MiB in f32"),
        "{out}"
    );
}

#[test]
fn info_lists_the_parts_of_a_family() {
    for (name, parts) in [
        ("llama3-untied-gqa1", &[][..]),
        ("smollm3-biased", &["biases on all attention projections", "biases on the feed-forward"]),
        ("phi3-longrope", &["joined projections", "rope on 6 dimensions of a head", "LongRoPE"]),
        (
            "gemma3-windows",
            &[
                "norm of each query and key head",
                "norms before and after attention and feed-forward",
                "norms stored less 1",
                "window of 9 keys in 2 layers",
                "scale of attention scores",
                "another rope in layers with a window",
                "tanh-GELU",
                "scaled embeddings",
            ],
        ),
    ] {
        let out = ok(&stapo(&["info", &golden(name)]));
        let listed = if parts.is_empty() { "those of Llama".into() } else { parts.join(", ") };
        let line = format!("parts        {listed}");
        assert!(out.lines().any(|l| l == line), "{line:?} is not in\n{out}");
        let out = ok(&stapo(&["info", &golden(name), "--json"]));
        let json: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert_eq!(json["parts"], serde_json::json!(parts), "{name}");
    }
}

#[test]
fn info_as_json_adds_up() {
    let out = ok(&stapo(&["info", &tiny("qwen2-bpe.gguf"), "--json"]));
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["family"], "qwen2");
    assert_eq!(json["qkv_bias"], true);
    assert_eq!(json["tied_embeddings"], false);
    let n = json["parameters"].as_u64().unwrap();
    assert_eq!(n, 2 * 432 * 64 + 64 * (2 * 64 + 2 * 32 + 3 * 64) + 64 + 2 * 32 + 3 * 64);
    assert_eq!(json["bytes"]["weights_f32"], 4 * n);
    assert_eq!(json["bytes"]["training_f32"], 16 * n);
    assert_eq!(json["bytes"]["kv_per_token_f32"], 4 * 2 * 32);
    let stored: u64 = json["stored_bytes"].as_object().unwrap().values().map(|v| v.as_u64().unwrap()).sum();
    assert_eq!(stored, 432 * 64 / 32 * (34 + 22) + 64 * 384 / 32 * 34 + 4 * (64 + 2 * 32 + 3 * 64));
}

#[test]
fn convert_writes_a_folder_that_info_reads_as_the_same_model() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model");
    let path = out.to_str().unwrap();
    let said =
        ok(&stapo(&["convert", &tiny("qwen2-bpe.gguf"), path, "--dtype", "f16", "--max-shard", "64KiB"]));
    assert!(said.contains("15 tensors, 80,192 parameters, 156.6 KiB of F16 in 3 files"), "{said}");
    let json: serde_json::Value = serde_json::from_str(&ok(&stapo(&["info", path, "--json"]))).unwrap();
    assert_eq!(json["parameters"], 80192);
    assert_eq!(json["stored_bytes"]["F16"], 2 * 80192);
    let expected =
        ["config.json", "generation_config.json", "model-00001-of-00003.safetensors", "tokenizer.json"];
    for file in expected {
        assert!(out.join(file).is_file(), "{file}");
    }
}

#[test]
fn convert_writes_over_a_model_only_when_told() {
    let folder = tempfile::tempdir().unwrap();
    let out: PathBuf = folder.path().join("model");
    let path = out.to_str().unwrap();
    let input = tiny("llama-spm.gguf");
    ok(&stapo(&["convert", &input, path]));
    check_refused(&["convert", &input, path], &["not empty", "hint: --replace"]);
    ok(&stapo(&["convert", &input, path, "--replace"]));
    check_refused(&["convert", path, path, "--replace"], &["is the model being read"]);
    check_refused(
        &["convert", &input, folder.path().to_str().unwrap(), "--replace"],
        &["not the folder of a model"],
    );
}

#[test]
fn tying_embeddings_that_differ_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model");
    let args = ["convert", &tiny("qwen2-bpe.gguf"), out.to_str().unwrap(), "--tie-embeddings"];
    check_refused(&args, &["differ", "hint: "]);
    ok(&stapo(&["convert", &tiny("llama-spm.gguf"), out.to_str().unwrap(), "--tie-embeddings"]));
}

#[test]
fn what_is_not_a_model_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.gguf");
    std::fs::write(&file, b"GGUF").unwrap();
    check_refused(&["info", file.to_str().unwrap()], &["x.gguf", "truncated?"]);
    check_refused(&["info", folder.path().join("absent").to_str().unwrap()], &["absent"]);
    check_refused(&["convert", &tiny("llama-spm.gguf"), "out", "--max-shard", "5XB"], &["--max-shard", "xb"]);
    check_refused(&["convert", &tiny("llama-spm.gguf"), "out", "--max-shard", "0"], &["above 0"]);
}
