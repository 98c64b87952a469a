//! The keys of config files, from their JSON Schemas: type, default, effect on the bits of a run, and description.

use super::{Entry, Page, Section};
use serde_json::{Map, Value};
use stapo_rl::Config;
use stapo_rl::lab::experiment::ExperimentSpec;
use stapo_rl::learn::pretrain::PretrainConfig;
use stapo_rl::plan::config::schema;
use stapo_rl::run::Freedom;
use std::collections::BTreeMap;

const INTRO: &str = "\
Configs are TOML. [The config of a training run](../config.md) explains how to name models, tasks and verifiers. A key of a \
table is written with dots, as in `--set update.learning_rate=1e-5`; `N` is the position in a list, from 0. Where a table has a \
`kind`, the column `kind` says which kinds have the key; other keys belong to all.

The column \"changes results\" says what another value does to a run:

- **yes**: the key is part of the identity of a run. Another value is another run.
- **on resume**: `stapo train --resume RUN --set KEY=VALUE` may change the key, and the run records the change. Of a path, the \
  content of the file is part of the identity and its location is not.
- **no**: no result depends on the key.";

/// Config files: their heading, what an entry of them is, and their schema.
fn files() -> [(&'static str, &'static str, Value); 3] {
    [
        ("Files of `stapo train`", "config key", schema::<Config>()),
        (
            "Files of `stapo sft`, `prefer`, `rm` and `pretrain`",
            "config key of sft, prefer, rm and pretrain",
            schema::<PretrainConfig>(),
        ),
        ("Files of `stapo experiment`", OF_EXPERIMENT, schema::<ExperimentSpec>()),
    ]
}

const OF_EXPERIMENT: &str = "config key of experiment";
const OF_RECORD: &str = "record key";

/// The order of the tables of a config: from what is trained to what is recorded. Other keys come in front.
const ORDER: [&str; 15] = [
    "model",
    "reference",
    "teacher",
    "task",
    "environment",
    "episode",
    "rollout",
    "reward",
    "rewards",
    "objective",
    "preference",
    "update",
    "evaluation",
    "record",
    "canaries",
];

pub fn page() -> Page {
    let mut seen = BTreeMap::new();
    let mut sections = Vec::new();
    for (title, kind, schema) in files() {
        let mut walk = Walk { seen, keys: Vec::new() };
        walk.table("", "", &schema, None);
        seen = walk.seen;
        sections.push(Section { title: title.to_string(), ..Section::default() });
        sections.extend(tables(&walk.keys, kind));
    }
    Page { file: "config.md", title: "Config keys", intro: INTRO, sections }
}

/// A section for each table, in the order of their first keys.
fn tables(keys: &[Key], kind: &'static str) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    for key in keys {
        let title = if key.table.is_empty() { "Top level".to_string() } else { format!("`{}`", key.table) };
        let row = key.entry(kind);
        match sections.iter_mut().find(|section| section.title == title) {
            Some(section) => section.rows.push(row),
            None => sections.push(Section { title, is_nested: true, rows: vec![row], ..Section::default() }),
        }
    }
    sections
}

/// The keys of a record as rows, those of its tables with their path.
pub fn record_rows(schema: &Value) -> Vec<Entry> {
    let mut walk = Walk { seen: BTreeMap::new(), keys: Vec::new() };
    walk.table("", "", schema, None);
    let mut keys = walk.keys;
    for key in &mut keys {
        key.default.clear();
    }
    keys.iter().map(|key| key.entry(OF_RECORD)).collect()
}

/// A key of a file.
#[derive(Debug, PartialEq)]
struct Key {
    table: String,
    path: String,
    /// The kinds of the table that have the key; empty if all have it.
    kinds: Vec<String>,
    type_text: String,
    default: String,
    about: String,
}

impl Key {
    fn entry(&self, kind: &'static str) -> Entry {
        let effect = match Freedom::of_key(&self.path) {
            _ if kind == OF_EXPERIMENT || kind == OF_RECORD => "",
            Freedom::Identity => "yes",
            Freedom::Recorded => "on resume",
            Freedom::Free => "no",
        };
        let default = if self.default.is_empty() { String::new() } else { format!("`{}`", self.default) };
        Entry::new(kind, &self.path, &self.about)
            .with_fact("kind", self.kinds.join(", "))
            .with_fact("type", &self.type_text)
            .with_fact("default", default)
            .with_fact("changes results", effect)
    }
}

/// A walk over a schema. A table that has the keys of an earlier one is named and not repeated.
struct Walk {
    /// The path of each table by its structure.
    seen: BTreeMap<String, String>,
    keys: Vec<Key>,
}

impl Walk {
    /// Adds the keys of a table, of which `kind` is the kind, or empty.
    fn table(&mut self, path: &str, kind: &str, schema: &Value, default: Option<&Value>) {
        let empty = Map::new();
        let properties = schema["properties"].as_object().unwrap_or(&empty);
        let is_required =
            |name: &str| schema["required"].as_array().is_some_and(|names| names.iter().any(|n| n == name));
        let mut properties: Vec<(&String, &Value)> = properties.iter().collect();
        if path.is_empty() {
            let rank = |name: &str| ORDER.iter().position(|known| *known == name);
            properties.sort_by_key(|(name, _)| rank(name));
        }
        for (name, key_schema) in properties {
            let key_path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            let default = key_schema.get("default").or_else(|| default?.get(name));
            let default_text = match default {
                _ if name == "kind" && !key_schema["const"].is_null() => String::new(),
                Some(value) => shown_default(value, key_schema),
                None if is_required(name) => "required".to_string(),
                None => String::new(),
            };
            let at = self.keys.len();
            self.push(Key {
                table: path.to_string(),
                path: key_path.clone(),
                kinds: if kind.is_empty() { Vec::new() } else { vec![kind.to_string()] },
                type_text: type_text(key_schema),
                default: default_text,
                about: key_schema["description"].as_str().unwrap_or_default().to_string(),
            });
            if let Some(earlier) = self.below(&key_path, key_schema, default)
                && let Some(key) = self.keys.get_mut(at)
            {
                key.about = format!("{}\n\nThe keys are those of `{earlier}`.", key.about);
            }
        }
    }

    /// Adds what is below a key; the path of an earlier table with the same keys where there is one.
    fn below(&mut self, path: &str, schema: &Value, default: Option<&Value>) -> Option<String> {
        let (path, schema) = match schema.get("items") {
            Some(items) if items.is_object() => (format!("{path}.N"), items),
            _ => (path.to_string(), schema),
        };
        let variants = ["oneOf", "anyOf"].iter().filter_map(|word| schema[word].as_array()).flatten();
        let variants: Vec<&Value> = variants.filter(|variant| variant["properties"].is_object()).collect();
        if variants.is_empty() && !schema["properties"].is_object() {
            return None;
        }
        let structure = structure(schema);
        if let Some(earlier) = self.seen.get(&structure) {
            return Some(earlier.clone()).filter(|earlier| *earlier != path);
        }
        self.seen.insert(structure, path.clone());
        if variants.is_empty() {
            self.table(&path, "", schema, default);
        }
        for variant in variants {
            let kind = &variant["properties"]["kind"]["const"];
            let default = default.filter(|default| default["kind"] == *kind);
            self.table(&path, kind.as_str().unwrap_or_default(), variant, default);
        }
        None
    }

    /// Adds a key; one that differs in its kind alone joins the earlier one.
    fn push(&mut self, key: Key) {
        let same = |other: &&mut Key| {
            (&other.path, &other.type_text, &other.default, &other.about)
                == (&key.path, &key.type_text, &key.default, &key.about)
        };
        match self.keys.iter_mut().find(same) {
            Some(other) => other.kinds.extend(key.kinds.into_iter().filter(|kind| !kind.is_empty())),
            None => self.keys.push(key),
        }
    }
}

/// What makes two tables have the same keys, as a text: their schema without defaults, what they require and descriptions
/// of the whole.
fn structure(schema: &Value) -> String {
    fn strip(value: &mut Value) {
        match value {
            Value::Object(object) => {
                object.remove("default");
                object.remove("required");
                object.values_mut().for_each(strip);
            }
            Value::Array(items) => items.iter_mut().for_each(strip),
            _ => {}
        }
    }
    let parts: Vec<&Value> = ["properties", "oneOf", "anyOf"].iter().map(|word| &schema[word]).collect();
    let mut parts = serde_json::json!(parts);
    strip(&mut parts);
    parts.to_string()
}

fn type_text(schema: &Value) -> String {
    if let Some(value) = schema.get("const") {
        return format!("`{}`", toml_text(value));
    }
    if let Some(values) = schema["enum"].as_array() {
        return values.iter().map(|value| format!("`{}`", toml_text(value))).collect::<Vec<_>>().join(", ");
    }
    let variants = ["oneOf", "anyOf"].iter().filter_map(|word| schema[word].as_array()).flatten();
    let mut names: Vec<String> = Vec::new();
    for variant in variants {
        let is_kind = !variant["properties"]["kind"]["const"].is_null();
        let name = if is_kind { "table by `kind`".to_string() } else { type_text(variant) };
        if !names.contains(&name) {
            names.push(name);
        }
    }
    if !names.is_empty() {
        return names.join(" or ");
    }
    match &schema["type"] {
        Value::Array(several) => {
            let several = several.iter().map(|name| type_text(&serde_json::json!({ "type": name })));
            several.collect::<Vec<_>>().join(" or ")
        }
        Value::String(name) => match name.as_str() {
            "integer" => "whole number".to_string(),
            "string" => "text".to_string(),
            "boolean" => "true or false".to_string(),
            "array" => format!("list of {}", type_text(&schema["items"])),
            "object" => "table".to_string(),
            other => other.to_string(),
        },
        _ => "any".to_string(),
    }
}

/// A default as a reader writes it. Of a table, its keys have the defaults; of a table with kinds, the kind.
fn shown_default(value: &Value, schema: &Value) -> String {
    match value {
        Value::Object(object) if object.is_empty() => "{}".to_string(),
        Value::Object(_) if schema["properties"].is_object() => String::new(),
        Value::Object(object) => {
            object.get("kind").map_or(String::new(), |kind| format!("kind = {}", toml_text(kind)))
        }
        Value::Null => String::new(),
        value => toml_text(value),
    }
}

/// A value as TOML. Tables in lists are cut after their kind.
pub fn toml_text(value: &Value) -> String {
    let list = |items: &Vec<Value>| items.iter().map(toml_text).collect::<Vec<_>>().join(", ");
    match value {
        Value::Array(items) => format!("[{}]", list(items)),
        Value::Object(object) => match object.get("kind") {
            Some(kind) if object.len() > 1 => format!("{{ kind = {}, .. }}", toml_text(kind)),
            _ => {
                let keys = object.iter().map(|(key, value)| format!("{key} = {}", toml_text(value)));
                format!("{{ {} }}", keys.collect::<Vec<_>>().join(", "))
            }
        },
        other => other.to_string(),
    }
}
