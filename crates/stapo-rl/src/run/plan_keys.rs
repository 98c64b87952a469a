//! The keys of a plan: which of them a resume may change, and what differs between two plans.

use stapo_core::record::{ABSENT, Change};
use stapo_core::settings::{self, SettingsError};
use std::collections::BTreeMap;
use toml::{Table, Value};

/// What a change of a key means to a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freedom {
    /// The bits of the run depend on the key.
    Identity,
    /// `--resume RUN --set KEY=VALUE` changes the key, and the change is recorded.
    Recorded,
    /// No bit depends on the key.
    Free,
}

/// Keys, or tables with all their keys, of training and pretraining plans that `--resume RUN --set` may change.
const RECORDED: [&str; 5] = ["steps", "evaluation", "record", "canaries", "update.schedule.total_steps"];

/// Tables in which `path` may change, as the place of an adapter may: the content of the file is part of the identity, its place is not.
const WITH_PATHS: [&str; 6] = ["model", "reference", "teacher", "task", "data", "rollout"];

const FREE: [&str; 8] = [
    "name",
    "rollout.kv_mib",
    "rollout.speculate",
    "rollout.draft",
    "update.recompute",
    "model.lora.base",
    "episode.workers",
    "episode.resume",
];

impl Freedom {
    /// The freedom of a key by its path, as in `evaluation.every_steps`. A key that no list names is identity.
    pub fn of_key(key: &str) -> Self {
        let (table, rest) = key.split_once('.').unwrap_or((key, ""));
        let last = rest.rsplit('.').next();
        let is_place = WITH_PATHS.contains(&table) && (last == Some("path") || key == "model.lora.adapter");
        // Where the weights of a judge wait changes no verdict.
        if FREE.contains(&key) || key.ends_with("verifier.keep") {
            Freedom::Free
        } else if RECORDED.contains(&table) || RECORDED.contains(&key) || is_place {
            Freedom::Recorded
        } else {
            Freedom::Identity
        }
    }
}

/// The freedom of a change: another number of the same kind of device changes no bit.
pub fn freedom(change: &Change) -> Freedom {
    let kind = |device: &str| device.trim_matches('"').split(':').next().unwrap_or_default().to_string();
    if change.name == "device" && kind(&change.before) == kind(&change.after) {
        return Freedom::Free;
    }
    Freedom::of_key(&change.name)
}

/// What differs between two plans, key by key. `complete` is `before` with every key that this program knows: a key
/// that `before` does not have may be in `after` with the value it has there.
pub fn differences(before: &str, complete: &str, after: &str) -> Result<Vec<Change>, SettingsError> {
    let [before, complete, after] =
        [flat(&settings::parse(before)?), flat(&settings::parse(complete)?), flat(&settings::parse(after)?)];
    let shown = |value: Option<&Value>| value.map_or(ABSENT.to_string(), |value| visible(&value.to_string()));
    let change = |key: &String, before: Option<&Value>| Change {
        name: key.clone(),
        before: shown(before),
        after: shown(after.get(key)),
    };
    let known = before.iter().filter(|(key, value)| after.get(*key) != Some(value));
    let added =
        after.iter().filter(|(key, value)| !before.contains_key(*key) && complete.get(*key) != Some(value));
    let mut changes: Vec<Change> = known.map(|(key, value)| change(key, Some(value))).collect();
    changes.extend(added.map(|(key, _)| change(key, complete.get(key))));
    Ok(changes)
}

/// Every value of a plan by its path, as a reader sees the value; nothing for a text that is no plan.
pub fn plan_values(plan: &str) -> Vec<(String, String)> {
    let table = settings::parse(plan).unwrap_or_default();
    flat(&table).into_iter().map(|(key, value)| (key, visible(&value.to_string()))).collect()
}

/// A text on one line, without characters that steer a terminal.
fn visible(text: &str) -> String {
    let is_quote = |c: char| matches!(c, '"' | '\'' | '\\');
    text.chars().map(|c| if is_quote(c) { c.to_string() } else { c.escape_debug().to_string() }).collect()
}

/// Every value by its path; lists of tables are numbered.
fn flat(table: &Table) -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    for (key, value) in table {
        gather(key, value, &mut found);
    }
    found
}

fn gather(path: &str, value: &Value, found: &mut BTreeMap<String, Value>) {
    match value {
        Value::Table(table) if !table.is_empty() => {
            for (key, value) in table {
                gather(&format!("{path}.{key}"), value, found);
            }
        }
        Value::Array(items) if items.iter().any(Value::is_table) => {
            for (idx, value) in items.iter().enumerate() {
                gather(&format!("{path}.{idx}"), value, found);
            }
        }
        _ => {
            found.insert(path.to_string(), value.clone());
        }
    }
}

#[cfg(test)]
mod tests;
