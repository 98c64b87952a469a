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
