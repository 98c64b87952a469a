use super::*;
use crate::Pretrained;
use crate::config::{Family, Heads};
use crate::testing::{tiny_config, tiny_layers};
use std::fs;
use std::path::PathBuf;

fn tiny() -> ModelConfig {
    ModelConfig {
        width: 8,
        layers: tiny_layers(Family::Qwen3, Heads { query: 2, kv: 1, dim: 6 }, 5, 2),
        vocabulary: 7,
        tied_embeddings: false,
        stops: vec![1, 2],
        ..tiny_config(Family::Qwen3)
    }
}

/// Numbers that differ everywhere and are exact in bf16 and f16.
#[allow(clippy::unnecessary_wraps, reason = "the shape that export asks for")]
fn fill(spec: &TensorSpec, out: &mut [f32]) -> Result<()> {
    let start = spec.name.len() as f32;
    for (i, x) in out.iter_mut().enumerate() {
        *x = start - (i % 32) as f32 * 0.5;
    }
    Ok(())
}

fn options(precision: Precision, max_shard_bytes: u64) -> ExportOptions {
    ExportOptions { precision, max_shard_bytes, existing: Existing::Refuse }
}

#[test]
fn what_is_exported_opens_again_in_every_precision_and_sharding() {
    for precision in [Precision::F32, Precision::F16, Precision::Bf16] {
        for (max_shard_bytes, n_shards) in [(u64::MAX, 1), (400, 6), (1, 25)] {
            let folder = tempfile::tempdir().unwrap();
            let out = folder.path().join("new/model");
            let written = export(&out, &tiny(), &[], &options(precision, max_shard_bytes), fill).unwrap();
            if precision != Precision::F32 {
                assert_eq!(written.n_shards, n_shards);
            }
            let model = Pretrained::open(&out).unwrap();
            assert_eq!(model.config, tiny());
            assert!(model.ignored.is_empty());
            for spec in tiny().tensors() {
                let mut ours = vec![0.0; spec.n_elements()];
                let mut expected = vec![0.0; spec.n_elements()];
                model.weights.read_f32(&spec.name, &spec.shape, &mut ours).unwrap();
                fill(&spec, &mut expected).unwrap();
                assert_eq!(ours, expected, "{}", spec.name);
                assert_eq!(model.weights.encoding(&spec.name), Some(precision.encoding()));
            }
        }
    }
}

#[test]
fn the_reference_crate_reads_what_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model");
    export(&out, &tiny(), &[], &options(Precision::F32, u64::MAX), fill).unwrap();
    let bytes = fs::read(out.join(SINGLE)).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.len(), tiny().tensors().len());
    assert_eq!(tensors.tensor("lm_head.weight").unwrap().shape(), [7, 8]);
    let (header, _) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert!((8 + header).is_multiple_of(8));
}

#[test]
fn a_folder_that_holds_something_is_kept_unless_told_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model");
    fs::create_dir(&out).unwrap();
    let plain = options(Precision::Bf16, u64::MAX);
    let replace = ExportOptions { existing: Existing::Replace, ..plain };
    export(&out, &tiny(), &[], &plain, fill).expect("an empty folder is as good as none");
    let message = export(&out, &tiny(), &[], &plain, fill).unwrap_err().to_string();
    assert!(message.contains("not empty"), "{message}");
    fs::write(out.join("tokenizer.json"), "stale").unwrap();
    export(&out, &tiny(), &[], &replace, fill).unwrap();
    assert!(!out.join("tokenizer.json").exists());
    let left: Vec<PathBuf> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(left, [out]);
}

#[test]
fn only_a_model_is_ever_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let replace = ExportOptions { existing: Existing::Replace, ..ExportOptions::default() };
    fs::write(folder.path().join("thesis.txt"), "x").unwrap();
    let message = export(folder.path(), &tiny(), &[], &replace, fill).unwrap_err().to_string();
    assert!(message.contains("not the folder of a model"), "{message}");
    fs::write(folder.path().join("config.json"), "{}").unwrap();
    let message = export(folder.path(), &tiny(), &[], &replace, fill).unwrap_err().to_string();
    assert!(message.contains("holds \"thesis.txt\""), "{message}");
    assert!(folder.path().join("thesis.txt").exists());
    let file = folder.path().join("thesis.txt");
    assert!(export(&file, &tiny(), &[], &replace, fill).unwrap_err().to_string().contains("not a folder"));
}

#[test]
fn a_failed_export_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model");
    let fail = |spec: &TensorSpec, out: &mut [f32]| {
        if spec.name == "lm_head.weight" { Err(Error::malformed("disk", "on fire")) } else { fill(spec, out) }
    };
    let message = export(&out, &tiny(), &[], &options(Precision::F32, 400), fail).unwrap_err().to_string();
    assert_eq!(message, "disk: on fire");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn what_a_killed_export_left_is_removed_and_what_is_written_or_the_only_copy_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let left = |name: &str| {
        let left = folder.path().join(name);
        fs::create_dir_all(left.join("model")).unwrap();
        fs::write(left.join("lock"), "").unwrap();
        left
    };
    let (killed, writing, replacing) = (left(".model.a.tmp"), left(".model.b.tmp"), left(".model.c.tmp"));
    let (other, starting, replaced) = (left(".model2.d.tmp"), left(".model.e.tmp"), left(".model.f.tmp"));
    let held = File::open(writing.join("lock")).unwrap();
    held.lock().unwrap();
    fs::create_dir(replacing.join("replaced")).unwrap();
    fs::remove_dir(starting.join("model")).unwrap();
    fs::rename(replaced.join("model"), replaced.join("replaced")).unwrap();
    export(&folder.path().join("model"), &tiny(), &[], &options(Precision::F32, 400), fill).unwrap();
    assert!(!killed.exists() && !replaced.exists());
    for kept in [writing, replacing, other, starting] {
        assert!(kept.join("lock").exists(), "{}", kept.display());
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 5, "the model and what was kept");
}

#[test]
fn numbers_beyond_f16_are_refused_by_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let big = |spec: &TensorSpec, out: &mut [f32]| {
        out.fill(if spec.name == "model.norm.weight" { 65520.0 } else { 65519.0 });
        Ok(())
    };
    let message =
        export(&folder.path().join("m"), &tiny(), &[], &options(Precision::F16, u64::MAX), big).unwrap_err();
    assert!(message.to_string().contains("tensor model.norm.weight: 65520 does not fit F16"), "{message}");
}

#[test]
fn numbers_that_are_not_finite_are_refused_by_tensor() {
    for bad in [f32::NAN, f32::INFINITY] {
        let folder = tempfile::tempdir().unwrap();
        let broken = |spec: &TensorSpec, out: &mut [f32]| {
            fill(spec, out)?;
            if spec.name == "model.norm.weight" {
                out[1] = bad;
            }
            Ok(())
        };
        let options = options(Precision::F32, u64::MAX);
        let said = export(&folder.path().join("m"), &tiny(), &[], &options, broken).unwrap_err().to_string();
        assert_eq!(said, "tensor model.norm.weight: element 1 is not a finite number");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_path_without_a_name_is_refused() {
    for path in ["..", "/", "."] {
        let result = export(Path::new(path), &tiny(), &[], &ExportOptions::default(), fill);
        assert!(result.is_err(), "{path}");
    }
}

#[test]
fn a_shard_is_filled_up_to_the_limit() {
    let spec = |n: usize| TensorSpec { name: n.to_string(), shape: vec![n] };
    let specs = [spec(2), spec(3), spec(5), spec(1)];
    let lengths = |precision, max_shard_bytes| {
        let options = options(precision, max_shard_bytes);
        in_shards(&specs, &options).into_iter().map(<[TensorSpec]>::len).collect::<Vec<_>>()
    };
    assert_eq!(lengths(Precision::Bf16, 10), [2, 1, 1]);
    assert_eq!(lengths(Precision::Bf16, 9), [1, 1, 1, 1]);
    assert_eq!(lengths(Precision::Bf16, 12), [2, 2]);
    assert_eq!(lengths(Precision::F32, 20), [2, 1, 1]);
    assert_eq!(lengths(Precision::F32, 44), [4]);
    assert_eq!(lengths(Precision::F16, 0), [1; 4], "a tensor beyond the limit has a file to itself");
}

#[test]
fn an_index_names_the_file_of_every_tensor_and_the_bytes_of_all() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model");
    let written = export(&out, &tiny(), &[], &options(Precision::F16, 400), fill).unwrap();
    let index: Value = serde_json::from_slice(&fs::read(out.join(INDEX)).unwrap()).unwrap();
    let n_bytes: u64 = tiny().tensors().iter().map(|spec| 2 * spec.n_elements() as u64).sum();
    assert_eq!((&index["metadata"]["total_size"], written.bytes), (&json!(n_bytes), n_bytes));
    assert_eq!((written.n_tensors, written.n_parameters), (tiny().tensors().len(), n_bytes / 2));
    let map = index["weight_map"].as_object().unwrap();
    assert_eq!(map.len(), tiny().tensors().len());
    for (name, file) in map {
        let bytes = fs::read(out.join(file.as_str().unwrap())).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert!(tensors.tensor(name).is_ok(), "{name} is not in {file}");
    }
    let config: Value = serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
    assert_eq!((&config["dtype"], &config["torch_dtype"]), (&json!("float16"), &json!("float16")));
}

/// What transformers needs besides the weights is taken over, and nothing else of the folder.
#[test]
fn every_file_of_a_tokenizer_is_taken_over_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("from"), folder.path().join("to"));
    export(&from, &tiny(), &[], &options(Precision::F32, u64::MAX), fill).unwrap();
    let texts = ["merges.txt", "tokenizer.model", "chat_template.jinja"];
    let objects = [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "generation_config.json",
    ];
    for name in texts.iter().chain(&objects) {
        fs::write(from.join(name), format!("{{\"of\": \"{name}\"}}")).unwrap();
    }
    for name in ["notes.txt", "optimizer.pt", "modeling.py"] {
        fs::write(from.join(name), "x").unwrap();
    }
    let mut companions = Pretrained::open(&from).unwrap().companions().unwrap();
    for companion in &mut companions {
        companion.load().unwrap();
    }
    fs::remove_dir_all(&from).unwrap();
    export(&to, &tiny(), &companions, &options(Precision::F32, u64::MAX), fill).unwrap();
    for name in texts.iter().chain(&objects) {
        assert_eq!(fs::read_to_string(to.join(name)).unwrap(), format!("{{\"of\": \"{name}\"}}"));
    }
    let n_files = fs::read_dir(&to).unwrap().count();
    assert_eq!(n_files, texts.len() + objects.len() + 2, "config.json and the weights are new");
}

/// A GGUF file has no such files: they are made of its metadata.
#[test]
fn the_files_of_a_tokenizer_are_made_of_the_metadata_of_gguf() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/formats/llama-spm.gguf");
    let model = Pretrained::open(&path).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let written = |name: &str| -> Value {
        for companion in model.companions().unwrap() {
            companion.write(folder.path()).unwrap();
        }
        serde_json::from_slice(&fs::read(folder.path().join(name)).unwrap()).unwrap()
    };
    let generation = written("generation_config.json");
    assert_eq!((&generation["bos_token_id"], &generation["eos_token_id"]), (&json!(1), &json!([2])));
    let keys = written("tokenizer_config.json");
    assert_eq!(keys["model_max_length"], model.config.max_positions);
    assert_eq!((&keys["bos_token"], &keys["eos_token"]), (&json!("<s>"), &json!("</s>")));
    assert_eq!(keys["tokenizer_class"], "PreTrainedTokenizerFast");
    assert_eq!(keys["clean_up_tokenization_spaces"], false);
}
