//! Specs from preset names, TOML and `key=value` overrides; what cannot be read is named, with the nearest thing that can.

use super::{Mask, ObjectiveSpec, preset, presets};
use serde::Deserialize;
use thiserror::Error;
use toml::{Table, Value};

/// Why a spec was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SpecError {
    #[error("objective: unknown preset `{name}`{}", hint(suggestion))]
    UnknownPreset { name: String, suggestion: String },
    #[error("objective: not TOML: {problem}")]
    Syntax { problem: String },
    #[error("objective {path}: {problem}{}", hint(suggestion))]
    Unreadable { path: String, problem: String, suggestion: String },
    #[error("objective {key}: {problem}{}", hint(remedy))]
    Refused { key: String, problem: String, remedy: String },
    #[error("override `{text}`: {problem}{}", hint(remedy))]
    Override { text: String, problem: String, remedy: String },
}

fn hint(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("\nhint: {text}") }
}

impl ObjectiveSpec {
    /// The preset of that name; `NAME+spurious` adds S2T to it.
    pub fn from_preset(name: &str) -> Result<Self, SpecError> {
        let (base, adds_s2t) = match name.strip_suffix("+spurious") {
            Some(base) => (base, true),
            None => (name, false),
        };
        let Some(found) = preset(base) else {
            let known: Vec<&str> = presets().iter().map(|preset| preset.name).collect();
            let suggestion = suggest(base, &known);
            return Err(SpecError::UnknownPreset { name: name.to_string(), suggestion });
        };
        let mut spec = found.objective;
        if adds_s2t {
            spec.masks.push(Mask::spurious());
        }
        Ok(spec)
    }

    /// A spec from TOML: the axes as keys, on top of `preset = "NAME"` where given. A file with an `[objective]` table is read from
    /// there, so a plan is a spec too.
    pub fn from_toml(text: &str) -> Result<Self, SpecError> {
        let syntax = |e: toml::de::Error| SpecError::Syntax { problem: e.to_string().trim_end().to_string() };
        let mut table: Table = toml::from_str(text).map_err(syntax)?;
        if let Some(Value::Table(inner)) = table.remove("objective") {
            table = inner;
        }
        Self::from_table(table)
    }

    fn from_table(mut table: Table) -> Result<Self, SpecError> {
        let base = match table.remove("preset") {
            Some(Value::String(name)) => Self::from_preset(&name)?.to_table(),
            Some(other) => return Err(wrong_type("preset", &other, "a preset name in quotes")),
            None => Table::new(),
        };
        let merged = table.into_iter().fold(base, |mut merged, (key, value)| {
            let value = match (merged.remove(&key), value) {
                (Some(Value::Table(below)), Value::Table(above)) => Value::Table(overlay(below, above)),
                (_, value) => value,
            };
            merged.insert(key, value);
            merged
        });
        Self::read(merged)
    }

    /// Applies `key.path=value` overrides in order. Values are TOML; a bare word is a string. Setting a `kind` drops the
    /// keys of the kind before.
    pub fn with_overrides<'a>(
        &self,
        overrides: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, SpecError> {
        let mut root = Value::Table(self.to_table());
        for text in overrides {
            set(&mut root, text)?;
        }
        match root {
            Value::Table(table) => Self::read(table),
            other => Err(wrong_type("", &other, "a table")),
        }
    }

    /// The whole spec as TOML.
    pub fn to_toml(&self) -> String {
        toml::to_string(&self.to_table()).expect("a table of tables and numbers is TOML")
    }

    fn to_table(&self) -> Table {
        Table::try_from(self).expect("a spec has only strings, numbers and tables")
    }

    fn read(table: Table) -> Result<Self, SpecError> {
        let given = Value::Table(table);
        let spec: Self = serde_path_to_error::deserialize(given.clone()).map_err(|error| {
            let path = error.path().to_string();
            unreadable(&path, &error.into_inner().to_string())
        })?;
        // serde lets variants without fields swallow any key; what does not come back was not understood.
        find_unread("", &given, &Value::Table(spec.to_table()))?;
        spec.check()?;
        Ok(spec)
    }
}

/// Merges an axis: the same kind key by key, another kind as a whole.
fn overlay(below: Table, above: Table) -> Table {
    let same_kind = above.get("kind").is_none_or(|kind| below.get("kind") == Some(kind));
    if !same_kind {
        return above;
    }
    let mut merged = below;
    merged.extend(above);
    merged
}

fn find_unread(path: &str, given: &Value, read: &Value) -> Result<(), SpecError> {
    let below = |key: &str| if path.is_empty() { key.to_string() } else { format!("{path}.{key}") };
    match (given, read) {
        (Value::Table(given), Value::Table(read)) => {
            given.iter().try_for_each(|(key, value)| match read.get(key) {
                Some(read) => find_unread(&below(key), value, read),
                None => Err(SpecError::Unreadable {
                    path: below(key),
                    problem: "this kind has no such key".to_string(),
                    suggestion: String::new(),
                }),
            })
        }
        (Value::Array(given), Value::Array(read)) => {
            let pairs = given.iter().zip(read).enumerate();
            pairs
                .into_iter()
                .try_for_each(|(idx, (given, read))| find_unread(&below(&idx.to_string()), given, read))
        }
        _ => Ok(()),
    }
}

fn set(root: &mut Value, text: &str) -> Result<(), SpecError> {
    let refuse =
        |problem: String, remedy: String| SpecError::Override { text: text.to_string(), problem, remedy };
    let Some((path, value)) = text.split_once('=') else {
        return Err(refuse("has no `=`".to_string(), "write it as masks.0.tau_p=0.001".to_string()));
    };
    let (path, value) = (path.trim(), parse_value(value.trim()));
    let keys: Vec<&str> = path.split('.').collect();
    let (last, parents) = keys.split_last().expect("split gives at least one part");
    let mut at = root;
    for (depth, key) in parents.iter().enumerate() {
        let here = keys[..depth].join(".");
        at = step(at, key)
            .map_err(|(problem, remedy)| refuse(format!("{here} {problem}").trim().to_string(), remedy))?;
    }
    match at {
        Value::Table(table) if *last == "kind" && !parents.is_empty() => {
            *table = Table::from_iter([("kind".to_string(), value)]);
        }
        Value::Table(table) => {
            table.insert((*last).to_string(), value);
        }
        Value::Array(_) => {
            *step(at, last).map_err(|(problem, remedy)| refuse(problem, remedy))? = value;
        }
        other => {
            let problem = format!("{} is {}, it has no keys", parents.join("."), other.type_str());
            return Err(refuse(problem, String::new()));
        }
    }
    Ok(())
}

/// One step down a path, or (problem, remedy).
fn step<'a>(at: &'a mut Value, key: &str) -> Result<&'a mut Value, (String, String)> {
    match at {
        Value::Table(table) => {
            let known: Vec<String> = table.keys().cloned().collect();
            let known: Vec<&str> = known.iter().map(String::as_str).collect();
            table.get_mut(key).ok_or_else(|| (format!("has no key `{key}`"), suggest(key, &known)))
        }
        Value::Array(items) => {
            let n = items.len();
            let found = key.parse::<usize>().ok().and_then(|idx| items.get_mut(idx));
            let remedy = "add S2T with --spec NAME+spurious or --set 'masks=[{kind=\"spurious\"}]'";
            found.ok_or_else(|| (format!("has no entry `{key}`; it has {n}"), remedy.to_string()))
        }
        other => Err((format!("is {}, it has no keys", other.type_str()), String::new())),
    }
}

fn parse_value(text: &str) -> Value {
    #[derive(Deserialize)]
    struct Holder {
        value: Value,
    }
    toml::from_str::<Holder>(&format!("value = {text}"))
        .map_or_else(|_| Value::String(text.to_string()), |holder| holder.value)
}

fn wrong_type(path: &str, got: &Value, expected: &str) -> SpecError {
    let problem = format!("is {}, expected {expected}", got.type_str());
    SpecError::Unreadable { path: path.to_string(), problem, suggestion: String::new() }
}

/// serde's message with our path, and the nearest of the names it says it expected.
fn unreadable(path: &str, message: &str) -> SpecError {
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let is_unknown = message.starts_with("unknown field") || message.starts_with("unknown variant");
    let suggestion = match quoted.split_first() {
        Some((unknown, known)) if is_unknown => suggest(unknown, known),
        _ => String::new(),
    };
    let path = if path == "." { String::new() } else { path.replace('[', ".").replace(']', "") };
    let problem =
        message.trim_end().replace("unknown field", "unknown key").replace("unknown variant", "unknown kind");
    SpecError::Unreadable { path, problem, suggestion }
}

fn suggest(name: &str, known: &[&str]) -> String {
    let similarity = |candidate: &str| strsim::jaro_winkler(name, candidate);
    let nearest = known
        .iter()
        .map(|candidate| (strsim::damerau_levenshtein(name, candidate), *candidate))
        .filter(|(distance, candidate)| *distance <= candidate.len().max(3) / 2)
        .min_by(|a, b| a.0.cmp(&b.0).then(similarity(b.1).total_cmp(&similarity(a.1))));
    match nearest {
        Some((_, candidate)) => format!("did you mean `{candidate}`?"),
        None => format!("known: {}", known.join(", ")),
    }
}
