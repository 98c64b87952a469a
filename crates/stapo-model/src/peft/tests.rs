use super::*;
use crate::config::Family;
use crate::decoder::PolicySpec;
use crate::testing::tiny_config;
use stapo_ops::{CpuOptions, Device};

fn spec() -> LoraSpec {
    use LoraTarget::{Down, Query, Value};
    LoraSpec { rank: 3, alpha: 4.5, scale: LoraScale::RankStabilised, targets: vec![Query, Value, Down] }
}

fn policy(spec: &LoraSpec) -> Policy {
    let config = tiny_config(Family::Qwen3);
    let device = Device::cpu(CpuOptions::default());
    let mut policy =
        Policy::random(&device, PolicySpec { config: &config, lora: Some(spec) }, 1, 0.3).unwrap();
    policy.start_adapters(2);
    policy
}

fn factors(policy: &Policy) -> Vec<(String, Vec<f32>)> {
    policy.trained_tensors().map(|(spec, values)| (spec.name.clone(), values.to_vec())).collect()
}

/// A written adapter whose config has one more key, or another value of a key.
fn with(key: &str, value: Value) -> Result<PeftAdapter> {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("adapter");
    write(&out, &policy(&spec()), "base").unwrap();
    let mut keys = config_of(&spec(), &spec().tensors(&tiny_config(Family::Qwen3)), "base");
    keys.insert(key.to_string(), value);
    write_json(&out.join(CONFIG), &keys).unwrap();
    PeftAdapter::open(&out)
}

#[test]
fn a_written_adapter_is_read_back_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("adapter");
    let mut written = policy(&spec());
    let mut n = 0;
    let Ok(()) = written.try_fill_adapters(|_, values| {
        for value in values {
            n += 1;
            *value = n as f32 / 7.0;
        }
        Ok::<_, std::convert::Infallible>(())
    });
    let written_adapter = write(&out, &written, "Qwen/Qwen3-0.6B").unwrap();
    assert_eq!(written_adapter.n_tensors, 12);
    let adapter = PeftAdapter::open(&out).unwrap();
    assert_eq!((&adapter.spec, adapter.base.as_deref()), (&spec(), Some("Qwen/Qwen3-0.6B")));
    let mut read = policy(&spec());
    assert_ne!(factors(&read), factors(&written));
    adapter.read_into(&mut read).unwrap();
    assert_eq!(factors(&read), factors(&written));
}

#[test]
fn what_is_not_plain_lora_is_refused_by_name() {
    for (key, value) in [
        ("peft_type", json!("IA3")),
        ("use_dora", json!(true)),
        ("bias", json!("all")),
        ("lora_bias", json!(true)),
        ("modules_to_save", json!(["lm_head"])),
        ("layers_to_transform", json!([0])),
        ("rank_pattern", json!({"q_proj": 8})),
        ("rank_pattern", json!({"qkv_proj": 9})),
        ("alpha_pattern", json!({"qkv_proj": 9})),
        ("alpha_pattern", json!({"q_proj": 8})),
        ("fan_in_fan_out", json!(true)),
        ("init_lora_weights", json!("pissa")),
        ("trainable_token_indices", json!([1])),
        ("target_parameters", json!(["experts"])),
        ("use_qalora", json!(true)),
        ("a_key_of_tomorrow", json!(1)),
        ("target_modules", json!(["q_proj", "lm_head"])),
        ("target_modules", json!(".*_proj")),
        ("target_modules", json!([])),
        ("r", json!(0)),
        ("r", json!(1u64 << 60)),
        ("lora_alpha", json!("big")),
        ("use_rslora", json!("yes")),
    ] {
        let error = with(key, value.clone()).err().unwrap_or_else(|| panic!("{key} {value} was read"));
        assert!(error.to_string().contains(key), "{key} {value}: {error}");
    }
    assert_eq!(with("lora_dropout", json!(0.05)).unwrap().dropout, 0.05);
    assert_eq!(with("a_key_of_tomorrow", Value::Null).unwrap().spec, spec());
}

#[test]
fn tensors_that_do_not_fit_the_model_are_refused_by_name() {
    let mut read = policy(&spec());
    let more = with("target_modules", json!(["q_proj", "v_proj", "k_proj", "down_proj"])).unwrap();
    let mut with_keys = policy(&more.spec);
    let missing = more.read_into(&mut with_keys).unwrap_err().to_string();
    assert!(missing.contains("k_proj.lora_A"), "{missing}");
    let fewer = with("target_modules", json!(["q_proj", "v_proj"])).unwrap();
    let mut without = policy(&fewer.spec);
    let extra = fewer.read_into(&mut without).unwrap_err().to_string();
    assert!(extra.contains("down_proj.lora_"), "{extra}");
    let wider = with("r", json!(4)).unwrap();
    let mut of_rank_4 = policy(&wider.spec);
    let shape = wider.read_into(&mut of_rank_4).unwrap_err().to_string();
    assert!(shape.contains("shape"), "{shape}");
    let before = factors(&read);
    with("lora_alpha", json!(9)).unwrap().read_into(&mut read).unwrap();
    assert_eq!(factors(&read), before, "the written factors are those of the same seed");
}

/// The written and read adapter of a random policy of the family, and the folder of the first.
fn written(family: Family, spec: &LoraSpec) -> (tempfile::TempDir, Policy, PeftAdapter) {
    let config = tiny_config(family);
    let device = Device::cpu(CpuOptions::default());
    let mut policy =
        Policy::random(&device, PolicySpec { config: &config, lora: Some(spec) }, 1, 0.3).unwrap();
    let mut n = 0;
    let Ok(()) = policy.try_fill_adapters(|_, values| {
        for value in values {
            n += 1;
            *value = n as f32 / 7.0;
        }
        Ok::<_, std::convert::Infallible>(())
    });
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("adapter"), &policy, "base").unwrap();
    let adapter = PeftAdapter::open(&folder.path().join("adapter")).unwrap();
    (folder, policy, adapter)
}

/// Targets are written as far as the model has them, and a list of all modules of attention layers is read as all modules.
#[test]
fn adapters_of_every_family_are_written_and_read() {
    use LoraTarget::{Down, Query, Up, Value as Values};
    let all = LoraSpec { targets: LoraTarget::ALL.to_vec(), ..spec() };
    let some = LoraSpec { targets: vec![Query, Values, Up, Down], scale: LoraScale::Plain, ..spec() };
    for (family, spec) in Family::ALL.into_iter().flat_map(|family| [(family, &all), (family, &some)]) {
        let n_targets = match (family, spec == &all) {
            (Family::Qwen35, true) => 12,
            (Family::Phi3, true) => 4,
            (Family::Phi3, false) => 3,
            (_, true) => 7,
            (_, false) => 4,
        };
        let (folder, policy, adapter) = written(family, spec);
        let text = std::fs::read_to_string(folder.path().join("adapter").join(CONFIG)).unwrap();
        let keys: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(keys["target_modules"].as_array().unwrap().len(), n_targets, "{family:?}");
        assert_eq!(adapter.spec, *spec, "{family:?}");
        let of_spec = PolicySpec { config: policy.config(), lora: Some(spec) };
        let mut read = Policy::random(policy.device(), of_spec, 1, 0.3).unwrap();
        adapter.read_into(&mut read).unwrap();
        assert_eq!(factors(&read), factors(&policy), "{family:?}");
    }
}

/// A number between the blocks of two parts belongs to no adapter of one part.
#[test]
fn an_adapter_that_mixes_the_parts_of_a_joined_matrix_is_refused() {
    let (folder, mut policy, _) = written(Family::Phi3, &spec());
    let path = folder.path().join("adapter").join(WEIGHTS);
    let bytes = std::fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let name = "base_model.model.model.layers.1.self_attn.qkv_proj.lora_B.weight";
    let mut mixed = file.tensor(name).unwrap().data().to_vec();
    let last = mixed.len() - 9 * 4;
    // The last row belongs to v, the first columns to q.
    mixed[last..last + 4].copy_from_slice(&1f32.to_le_bytes());
    let tensors = file.tensors().into_iter().map(|(other, view)| {
        let data = if other == name { mixed.clone() } else { view.data().to_vec() };
        (other, (view.shape().to_vec(), data))
    });
    let tensors: Vec<_> = tensors.collect();
    let views = tensors.iter().map(|(name, (shape, data))| {
        (name, safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), data).unwrap())
    });
    std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    let adapter = PeftAdapter::open(&folder.path().join("adapter")).unwrap();
    let refused = adapter.read_into(&mut policy).unwrap_err().to_string();
    assert!(refused.contains("layers.1.self_attn.qkv_proj.lora_B.weight has numbers between"), "{refused}");
}

#[test]
fn what_is_no_regular_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let missing = PeftAdapter::open(folder.path()).unwrap_err().to_string();
    assert!(missing.contains(CONFIG), "{missing}");
    write_json(
        &folder.path().join(CONFIG),
        &config_of(&spec(), &spec().tensors(&tiny_config(Family::Qwen3)), "base"),
    )
    .unwrap();
    std::fs::create_dir(folder.path().join(WEIGHTS)).unwrap();
    assert!(PeftAdapter::open(folder.path()).is_err());
}

/// The keys as PEFT writes them: a whole alpha is a whole number.
#[test]
fn the_config_of_an_adapter_has_what_peft_reads() {
    let keys = |spec: &LoraSpec| config_of(spec, &spec.tensors(&tiny_config(Family::Qwen3)), "o/base");
    let stabilised = keys(&spec());
    assert_eq!((&stabilised["lora_alpha"], &stabilised["use_rslora"]), (&json!(4.5), &json!(true)));
    let plain = keys(&LoraSpec { rank: 8, alpha: 16.0, scale: LoraScale::Plain, ..spec() });
    for (key, value) in [
        ("lora_alpha", json!(16)),
        ("r", json!(8)),
        ("use_rslora", json!(false)),
        ("target_modules", json!(["q_proj", "v_proj", "down_proj"])),
        ("peft_type", json!("LORA")),
        ("task_type", json!("CAUSAL_LM")),
        ("bias", json!("none")),
        ("base_model_name_or_path", json!("o/base")),
        ("fan_in_fan_out", json!(false)),
        ("use_dora", json!(false)),
        ("lora_dropout", json!(0.0)),
    ] {
        assert_eq!(plain[key], value, "{key}");
    }
}

/// Hu et al. divide by the rank, Kalajdzievski by its root.
#[test]
fn an_adapter_is_scaled_by_its_rank_or_by_the_root_of_it() {
    let factor = |scale| LoraSpec { rank: 16, alpha: 32.0, scale, ..spec() }.factor();
    assert_eq!([factor(LoraScale::Plain), factor(LoraScale::RankStabilised)], [2.0, 8.0]);
}

#[test]
fn ways_to_start_that_leave_the_base_as_it_is_are_read() {
    for start in
        [json!(true), json!(false), json!("gaussian"), json!("orthogonal"), json!("eva"), Value::Null]
    {
        assert_eq!(with("init_lora_weights", start.clone()).unwrap().spec, spec(), "{start}");
    }
    for start in ["olora", "loftq", "corda", "pissa_niter_4"] {
        let error =
            with("init_lora_weights", json!(start)).err().unwrap_or_else(|| panic!("{start} was read"));
        assert!(error.to_string().contains("changes the base weights"), "{start}: {error}");
    }
    assert_eq!(with("r", json!(MAX_RANK)).unwrap().spec.rank, MAX_RANK);
    assert!(with("r", json!(MAX_RANK + 1)).is_err());
    assert_eq!(with("use_rslora", Value::Null).unwrap().spec.scale, LoraScale::Plain);
    assert_eq!(with("target_modules", json!("all-linear")).unwrap().spec.targets, LoraTarget::ALL);
    let whole = json!(["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]);
    assert_eq!(with("target_modules", whole).unwrap().spec.targets, [LoraTarget::Query]);
}
