//! A raw config as one table: defaults, file, presets and overrides, each laid over the one before.

use super::{Config, PlanError, lora, sources};
use crate::tasks::{TaskSpec, file_kind};
use stapo_core::ObjectiveSpec;
use stapo_core::settings::{self, Override, RawConfig, wrong_type};
use toml::{Table, Value};

/// The preset of a config that names none.
pub(super) const DEFAULT_PRESET: &str = "stapo";

/// A config in the parts that are read one by one: serde loses the key of an error inside an enum.
pub(super) struct Merged {
    pub task: Table,
    pub preset: Option<String>,
    /// With the values of the preset.
    pub objective: Table,
    /// The other keys.
    pub rest: Table,
}

/// Overrides of whole tables, of kinds and of presets are applied first. What they choose is then written out, so that
/// the other overrides find every key that they may change, as `objective.masks.0.tau_p` of a preset.
pub(super) fn merged(raw: &RawConfig) -> Result<Merged, PlanError> {
    let mut given = raw.table.clone();
    if let Some(objective) = given.get_mut("objective") {
        name_preset(objective);
    }
    let mut table = settings::overlay(defaults(), sources::spelled_out(given));
    let preset = |mut set: Override| {
        if set.keys == ["objective"] {
            name_preset(&mut set.value);
        }
        set
    };
    let overrides = raw.overrides.iter().cloned().map(sources::renamed).map(lora::renamed).map(preset);
    let (choices, keys): (Vec<Override>, Vec<Override>) = overrides.partition(|set| set.keys.len() <= 2);
    infer_task_kind(&mut table, raw, &choices);
    settings::set_all(&mut table, choices)?;
    let mut table = sources::spelled_out(table);
    let mut objective = take(&mut table, "objective")?;
    let preset = objective.get("preset").and_then(Value::as_str).map(str::to_string);
    objective = ObjectiveSpec::without_preset(objective)?;
    table.insert("objective".to_string(), Value::Table(objective));
    if keys.iter().any(|set| set.keys.starts_with(&["task".to_string(), "verifier".to_string()])) {
        write_out_verifier(&mut table);
    }
    settings::set_all(&mut table, keys)?;
    let (task, objective) = (take(&mut table, "task")?, take(&mut table, "objective")?);
    Ok(Merged { task, preset, objective, rest: table })
}

/// The defaults, with the names of a task and a preset instead of their values, which depend on other keys.
fn defaults() -> Table {
    let named =
        |key: &str, name: &str| Table::from_iter([(key.to_string(), Value::String(name.to_string()))]);
    let mut table = settings::to_table(&Config::default());
    table.insert("task".to_string(), Value::Table(named("kind", "arithmetic")));
    table.insert("objective".to_string(), Value::Table(named("preset", DEFAULT_PRESET)));
    table
}

fn take(table: &mut Table, key: &str) -> Result<Table, PlanError> {
    match table.remove(key) {
        Some(Value::Table(inner)) => Ok(inner),
        Some(other) => Err(wrong_type(&format!("config.{key}"), &other, "a table").into()),
        None => Ok(Table::new()),
    }
}

/// `objective = "gspo"` is `objective = { preset = "gspo" }`.
fn name_preset(objective: &mut Value) {
    if objective.is_str() {
        *objective = Value::Table(Table::from_iter([("preset".to_string(), objective.clone())]));
    }
}

/// A task that is given by its path alone is of the kind that the file's name says.
fn infer_task_kind(table: &mut Table, raw: &RawConfig, choices: &[Override]) {
    let Some(Value::Table(task)) = table.get_mut("task") else { return };
    let is_chosen = |key: &str| choices.iter().any(|set| set.keys == ["task", key]);
    let has_kind = raw.table.get("task").and_then(|task| task.get("kind")).is_some() || is_chosen("kind");
    let path = choices.iter().rev().find(|set| set.keys == ["task", "path"]).map(|set| &set.value);
    if let Some(path) = path.or(task.get("path")).filter(|_| !has_kind) {
        let kind = file_kind(path.as_str());
        task.insert("kind".to_string(), Value::from(kind));
    }
}

/// Writes out the verifier that the task brings, for overrides such as `task.verifier.mode=exact`.
fn write_out_verifier(table: &mut Table) {
    let Some(Value::Table(task)) = table.get_mut("task") else { return };
    let kind = task.get("kind").and_then(Value::as_str).unwrap_or_default();
    let verifier = settings::to_table(&TaskSpec::default_verifier(kind));
    task.entry("verifier").or_insert(Value::Table(verifier));
}
