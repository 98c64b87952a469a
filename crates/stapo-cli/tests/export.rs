//! `stapo export`: the names, types and shapes that other programs read, by default and with each flag.

use crate::common::{complaint, json, ok, root, stapo};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::process::Command;

/// The tensors of a safetensors file by name, each with its type and shape. The header is JSON after its length in 8 bytes.
fn tensors(path: &Path) -> Map<String, Value> {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
    tensors.map(|(name, tensor)| (name, json!([tensor["dtype"], tensor["shape"]]))).collect()
}

/// The built-in model as its config describes it, in the names of Hugging Face.
fn expected(dtype: &str) -> Map<String, Value> {
    let mut all = Map::new();
    let mut add = |name: String, shape: &[usize]| drop(all.insert(name, json!([dtype, shape])));
    add("model.embed_tokens.weight".into(), &[48, 128]);
    add("model.norm.weight".into(), &[128]);
    for layer in 0..4 {
        for (name, shape) in [
            ("self_attn.q_proj", &[128, 128][..]),
            ("self_attn.k_proj", &[64, 128]),
            ("self_attn.v_proj", &[64, 128]),
            ("self_attn.o_proj", &[128, 128]),
            ("self_attn.q_norm", &[32]),
            ("self_attn.k_norm", &[32]),
            ("mlp.gate_proj", &[384, 128]),
            ("mlp.up_proj", &[384, 128]),
            ("mlp.down_proj", &[128, 384]),
            ("input_layernorm", &[128]),
            ("post_attention_layernorm", &[128]),
        ] {
            add(format!("model.layers.{layer}.{name}.weight"), shape);
        }
    }
    all
}

#[test]
fn an_export_is_bf16_or_f32_whole_or_an_adapter_as_its_flags_say() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let base = root().join("models/base");
    let base = base.to_str().unwrap();
    let export = |args: &[&str]| {
        ok(&stapo(at, &[&["export"], args].concat()));
        at.join(args[2]).join("model.safetensors")
    };
    assert_eq!(tensors(&export(&[base, "--out", "half"])), expected("BF16"));
    assert_eq!(json(&at.join("half/config.json"))["dtype"], "bfloat16");
    assert_eq!(tensors(&export(&[base, "--out", "whole", "--f32"])), expected("F32"));

    let settings = [
        "steps=1",
        "model={kind=\"builtin\",lora={rank=2,targets=[\"q_proj\",\"down_proj\"]}}",
        "rollout.problems_per_step=2",
        "rollout.group_size=2",
        "update.problems_per_minibatch=2",
        "evaluation={problems=1,every_steps=0}",
    ];
    let settings: Vec<&str> = settings.into_iter().flat_map(|setting| ["--set", setting]).collect();
    ok(&stapo(at, &[&["train", "--out", "run"], &settings[..]].concat()));
    let adapter = |layer: usize, module: &str, factor: &str| {
        format!("base_model.model.model.layers.{layer}.{module}.lora_{factor}.weight")
    };
    let mut expected_adapter = Map::new();
    for layer in 0..4 {
        for (module, inputs) in [("self_attn.q_proj", 128), ("mlp.down_proj", 384)] {
            expected_adapter.insert(adapter(layer, module, "A"), json!(["F32", [2, inputs]]));
            expected_adapter.insert(adapter(layer, module, "B"), json!(["F32", [128, 2]]));
        }
    }
    for args in [&["run", "--out", "trained"][..], &[base, "--out", "again", "--adapter", "trained"]] {
        let whole = export(args);
        assert!(!whole.exists(), "an adapter alone");
        assert_eq!(tensors(&whole.with_file_name("adapter_model.safetensors")), expected_adapter);
        assert_eq!(json(&whole.with_file_name("adapter_config.json"))["r"], 2);
    }
    let [trained, again] =
        ["trained", "again"].map(|folder| at.join(folder).join("adapter_model.safetensors"));
    assert!(std::fs::read(trained).unwrap() == std::fs::read(again).unwrap(), "the same numbers");
    let said = complaint(at, &["export", base, "--out", "run"]);
    assert!(said.contains("run: exists and is not empty\nhint: "), "{said}");
    let said = complaint(at, &["export", base, "--out", "none", "--merge"]);
    assert!(said.contains("has no adapter\nhint: leave --merge out") && !at.join("none").exists(), "{said}");
    let merged = ["--adapter", "trained", "--merge"];
    assert_eq!(tensors(&export(&[&[base, "--out", "merged"], &merged[..]].concat())), expected("BF16"));
    // The checkpoint has the adapters and both moments of each, in f32.
    let mut state = tensors(&at.join("run/checkpoints/step-000001/weights.safetensors"));
    state.extend(tensors(&at.join("run/checkpoints/step-000001/moments.safetensors")));
    assert_eq!(state.len(), 3 * expected_adapter.len(), "{state:?}");
    for (name, tensor) in expected_adapter {
        let name = name.trim_start_matches("base_model.model.");
        assert!(
            state.iter().filter(|(key, value)| key.ends_with(name) && **value == tensor).count() == 3,
            "{name}"
        );
    }
}

/// The calls of the kernel that `stapo` makes to sync and to rename files; `None` where calls cannot be traced.
#[cfg(target_os = "linux")]
fn traced(at: &Path, args: &[&str]) -> Option<String> {
    let calls = at.join("calls");
    let mut strace = Command::new("strace");
    strace.args(["-f", "-y", "-s", "4096", "-e", "trace=fsync,rename,renameat,renameat2", "-o"]).arg(&calls);
    strace.arg(env!("CARGO_BIN_EXE_stapo")).args(args).env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"));
    let Ok(output) = strace.current_dir(at).output() else {
        println!("skipped: strace is not installed");
        return None;
    };
    let text = std::fs::read_to_string(&calls).unwrap_or_default();
    if text.is_empty() {
        println!("skipped: strace may not trace here: {}", String::from_utf8_lossy(&output.stderr));
        return None;
    }
    ok(&output);
    Some(text)
}

/// These are the calls of the kernel, unlike the operations that the program itself notes. What is renamed was synced under its name
/// before, and the folder of the new name is synced after it.
#[cfg(target_os = "linux")]
#[test]
fn what_is_renamed_is_on_disk_before_and_its_name_after() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().canonicalize().unwrap();
    let [base, half, run] = [root().join("models/base"), at.join("half"), at.join("run")];
    let [base, out, run] = [&base, &half, &run].map(|path| path.to_str().unwrap());
    let small = "steps=1 rollout.problems_per_step=2 rollout.group_size=2 update.problems_per_minibatch=2 evaluation.problems=1";
    let set: Vec<&str> = small.split(' ').flat_map(|setting| ["--set", setting]).collect();
    for args in [vec!["export", base, "--out", out], [&["train", "--out", run], &set[..]].concat()] {
        let Some(text) = traced(&at, &args) else { return };
        let path_of = |line| Some(Path::new(str::split_once(line, "fsync(")?.1.split(['<', '>']).nth(1)?));
        let synced: Vec<Option<&Path>> = text.lines().map(path_of).collect();
        let mut n_renames = 0;
        for (idx, line) in text.lines().enumerate() {
            // A call that another thread interrupts has a second line, without its arguments.
            if !line.contains(" rename") || !line.contains('"') || line.contains(" = -1 ") {
                continue;
            }
            n_renames += 1;
            let [from, to] = [1, 3].map(|part| Path::new(line.split('"').nth(part).unwrap()));
            let before = |path: &Path| synced[..idx].contains(&Some(path));
            assert!(before(from), "{} gets its name before it is on disk:\n{text}", to.display());
            let is_named = synced[idx..].contains(&to.parent());
            assert!(is_named, "the name {} is not on disk:\n{text}", to.display());
            if to == half {
                let names: Vec<_> = to.read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
                assert!(names.len() > 3, "{names:?}");
                let late: Vec<_> = names.iter().filter(|name| !before(&from.join(name))).collect();
                assert!(late.is_empty(), "{late:?} are not on disk before their folder has its name");
            }
        }
        assert!(n_renames > 0, "{text}");
    }
}
