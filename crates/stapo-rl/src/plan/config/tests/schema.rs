//! The JSON Schema of configs: complete, described, and right about files.

use crate::lab::experiment::ExperimentSpec;
use crate::learn::pretrain::PretrainConfig;
use crate::plan::config::{Config, schema};
use serde_json::{Map, Value, json};
use stapo_core::settings;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Why a value does not fit a schema of the subset that [`schema`] emits; `root` is what references lead into.
fn misfit(root: &Value, schema: &Value, value: &Value, path: &str) -> Option<String> {
    if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
        let target = root.pointer(reference.trim_start_matches('#')).unwrap();
        return misfit(root, target, value, path);
    }
    let refuse = |problem: &str| Some(format!("{path}: {problem}: {value}"));
    if let Some(Value::String(name)) = schema.get("type") {
        let fits = match name.as_str() {
            "object" => value.is_object(),
            "array" => value.is_array(),
            "string" => value.is_string(),
            "boolean" => value.is_boolean(),
            "integer" => value.is_i64() || value.is_u64(),
            "number" => value.is_number(),
            other => panic!("{path}: type {other}"),
        };
        if !fits {
            return refuse(name);
        }
    }
    if schema.get("const").is_some_and(|only| only != value) {
        return refuse("const");
    }
    if schema.get("enum").is_some_and(|values| !values.as_array().unwrap().contains(value)) {
        return refuse("enum");
    }
    let limit = |key: &str| schema.get(key).and_then(Value::as_f64).zip(value.as_f64());
    if limit("minimum").is_some_and(|(min, found)| found < min)
        || limit("maximum").is_some_and(|(max, found)| found > max)
    {
        return refuse("out of bounds");
    }
    for (word, n_allowed) in [("oneOf", 1..2), ("anyOf", 1..usize::MAX)] {
        if let Some(Value::Array(options)) = schema.get(word) {
            let misfits: Vec<_> =
                options.iter().filter_map(|option| misfit(root, option, value, path)).collect();
            if !n_allowed.contains(&(options.len() - misfits.len())) {
                return refuse(&format!("{word}: {misfits:?}"));
            }
        }
    }
    if let (Some(items), Value::Array(values)) = (schema.get("items"), value) {
        return values.iter().find_map(|value| misfit(root, items, value, &format!("{path}[]")));
    }
    let Value::Object(table) = value else { return None };
    let required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
    if let Some(missing) = required.map(|key| key.as_str().unwrap()).find(|key| !table.contains_key(*key)) {
        return refuse(&format!("{missing} is missing"));
    }
    let keys = schema.get("properties").and_then(Value::as_object);
    table.iter().find_map(|(key, value)| match keys.and_then(|keys| keys.get(key)) {
        Some(inner) => misfit(root, inner, value, &format!("{path}.{key}")),
        None if schema.get("additionalProperties") == Some(&json!(false)) => {
            Some(format!("{path}: unknown key {key}"))
        }
        None => None,
    })
}

fn misfit_of_text(schema: &Value, text: &str) -> Option<String> {
    misfit(schema, schema, &serde_json::to_value(settings::parse(text).unwrap()).unwrap(), "")
}

/// Calls `look` with every table of keys in a schema.
fn each_table(schema: &Value, path: &str, look: &mut impl FnMut(&str, &Map<String, Value>, &Value)) {
    match schema {
        Value::Array(items) => items.iter().for_each(|item| each_table(item, path, look)),
        Value::Object(object) => {
            if let Some(Value::Object(keys)) = object.get("properties") {
                look(path, keys, schema);
                keys.iter().for_each(|(key, inner)| each_table(inner, &format!("{path}.{key}"), look));
            }
            for (word, inner) in
                object.iter().filter(|(word, _)| !["properties", "default"].contains(&word.as_str()))
            {
                each_table(inner, &format!("{path}/{word}"), look);
            }
        }
        _ => {}
    }
}

#[test]
fn every_key_has_a_description_for_people_and_no_table_takes_unknown_keys() {
    for (schema, least) in
        [(schema::<Config>(), 150), (schema::<PretrainConfig>(), 60), (schema::<ExperimentSpec>(), 150)]
    {
        let mut n_keys = 0;
        each_table(&schema, "", &mut |path, keys, table| {
            assert_eq!(table.get("additionalProperties"), Some(&json!(false)), "{path}: {table}");
            for (key, inner) in keys {
                n_keys += 1;
                let text = inner.get("description").and_then(Value::as_str).unwrap_or_default();
                assert!(
                    text.len() > 5 && text.ends_with(['.', ')']),
                    "{path}.{key} has no sentence: {inner}"
                );
                assert!(text.replace("\n\n", "").lines().count() == 1, "{path}.{key}: {text}");
                assert!(!text.contains("[`") && !text.contains("crate::"), "{path}.{key}: {text}");
            }
        });
        assert!(n_keys > least, "{n_keys}");
    }
}

#[test]
fn the_schema_has_every_key_that_serde_knows() {
    let schema = schema::<Config>();
    let unknown = |table: &str| {
        let text = format!("{table}xyzzy = 1");
        let error = toml::from_str::<Config>(&text).unwrap_err();
        let line = error.message().to_string();
        assert!(line.starts_with("unknown field"), "{text}: {line}");
        line.split('`').skip(3).step_by(2).map(str::to_string).collect::<BTreeSet<_>>()
    };
    let keys = |pointer: &str| {
        let found = schema.pointer(pointer).and_then(Value::as_object).unwrap_or_else(|| panic!("{pointer}"));
        found.keys().cloned().collect::<BTreeSet<_>>()
    };
    let mut top = unknown("");
    assert!(top.remove("model.lora"));
    assert_eq!(keys("/properties"), top);
    for table in [
        "rollout",
        "rollout.overlong",
        "rollout.lengths",
        "reward",
        "update",
        "update.schedule",
        "update.reuse",
        "evaluation",
        "record",
        "canaries",
    ] {
        let pointer = format!("/properties/{}/properties", table.replace('.', "/properties/"));
        assert_eq!(keys(&pointer), unknown(&format!("[{table}]\n")), "{table}");
    }
    let mut axes = unknown("[objective]\n");
    axes.insert("preset".to_string());
    assert_eq!(keys("/properties/objective/properties"), axes);
    for (union, sugar) in
        [("model", "lora"), ("task", "level"), ("objective.surrogate", ""), ("objective.kl", "")]
    {
        let pointer = format!("/properties/{}/oneOf", union.replace('.', "/properties/"));
        for kind in schema.pointer(&pointer).unwrap().as_array().unwrap() {
            let Some(name) = kind.pointer("/properties/kind/const").and_then(Value::as_str) else { continue };
            let mut found: BTreeSet<String> =
                kind["properties"].as_object().unwrap().keys().cloned().collect();
            found.remove("kind");
            found.remove(sugar);
            // serde takes any key in a kind without keys, and `settings::read` refuses them.
            if !found.is_empty() {
                assert_eq!(found, unknown(&format!("[{union}]\nkind = \"{name}\"\n")), "{union} {name}");
            }
        }
    }
}

#[test]
fn defaults_in_the_schema_are_those_of_the_config() {
    let schema = schema::<Config>();
    let defaults = serde_json::to_value(settings::to_table(&Config::default())).unwrap();
    for (key, inner) in schema["properties"].as_object().unwrap() {
        assert_eq!(inner.get("default"), defaults.get(key), "{key}");
    }
    for (key, value) in defaults["rollout"].as_object().unwrap() {
        assert_eq!(schema["properties"]["rollout"]["properties"][key].get("default"), Some(value), "{key}");
    }
}

#[test]
fn shipped_files_fit_their_schema_and_mistakes_do_not() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (training, supervised, experiment) =
        (schema::<Config>(), schema::<PretrainConfig>(), schema::<ExperimentSpec>());
    let mut n_files = 0;
    for folder in ["configs", "experiments"] {
        for path in std::fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path()) {
            if path.extension().is_none_or(|extension| extension != "toml") {
                continue;
            }
            let is_base = path.file_name().unwrap().to_string_lossy().starts_with("base");
            let schema = if folder == "experiments" {
                &experiment
            } else if is_base {
                &supervised
            } else {
                &training
            };
            let misfit = misfit_of_text(schema, &std::fs::read_to_string(&path).unwrap());
            assert_eq!(misfit, None, "{}", path.display());
            n_files += 1;
        }
    }
    assert!(n_files > 25, "{n_files}");
    for text in [
        "model = \"Qwen/Qwen3-0.6B\"",
        "[model]\npath = \"x\"\n[model.lora]\nrank = 8",
        "[task]\nlevel = 2",
        "[task.verifier]\nkind = \"python\"\nfile = \"reward.py\"\nmemory_mib = 0",
        "[objective]\npreset = \"dapo+spurious\"",
        "[update.schedule]\nwarmup_steps = 3",
        "[rollout]\nkv_mib = 512\nchat_arguments = { enable_thinking = false }",
    ] {
        assert_eq!(misfit_of_text(&training, text), None, "{text}");
        Config::from_toml(text, []).unwrap();
    }
    for (text, problem) in [
        ("stepz = 3", "unknown key stepz"),
        ("[rollout]\ngroup_sise = 3", ".rollout: unknown key group_sise"),
        ("steps = \"many\"", ".steps: integer"),
        ("[model]\nkind = \"path\"", ".model: oneOf"),
        ("[model]\nkind = \"builtin\"\npath = \"x\"", ".model: oneOf"),
        ("[task]\nkind = \"arithmetics\"", ".task: oneOf"),
        ("[task]\nlevel = 9", ".task: oneOf"),
        ("[task.verifier]\nkind = \"command\"\nprogram = \"x\"\nmemry_mib = 0", ".task: oneOf"),
        ("[objective]\npreset = \"stpo\"", ".objective.preset: enum"),
        ("[rollout]\ntruncated = \"cut\"", ".rollout.truncated: enum"),
        ("[rollout]\nkv_mib = \"all\"", ".rollout.kv_mib: oneOf"),
    ] {
        let misfit = misfit_of_text(&training, text).unwrap_or_default();
        assert!(misfit.contains(problem), "{text}: {misfit:?}");
        assert!(Config::from_toml(text, []).is_err(), "{text}");
    }
}
