//! Settings from TOML and `key=value` overrides. An error names the key that cannot be read and the nearest known one.

mod origin;
mod overrides;
mod peers;
mod words;

pub use overrides::{Override, set_all};
pub use peers::{PeerSetting, peer_settings};

use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;
use toml::{Table, Value};

/// Why settings were refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SettingsError {
    #[error("line {line}, column {column}: not TOML: {problem}")]
    Syntax { line: usize, column: usize, problem: String },
    #[error("{path}: {problem}{}", hint(suggestion))]
    Unreadable { path: String, problem: String, suggestion: String },
    #[error("--set {text}: {problem}{}", hint(remedy))]
    Override { text: String, problem: String, remedy: String },
}

impl SettingsError {
    /// The path of the key that the error is about.
    pub fn key(&self) -> Option<String> {
        let SettingsError::Unreadable { path, problem, .. } = self else { return None };
        let unknown = problem.strip_prefix("unknown key `").and_then(|rest| rest.split('`').next());
        match unknown {
            Some(name) if path.rsplit('.').next() != Some(name) => Some(format!("{path}.{name}")),
            _ => Some(path.clone()),
        }
    }
}

/// The remedy as the last line of a message.
pub fn hint(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("\nhint: {text}") }
}

/// A config as given: the tables of a file, and overrides of its keys. It knows where each key was given.
#[derive(Clone)]
pub struct RawConfig {
    pub table: Table,
    pub overrides: Vec<Override>,
    text: String,
}

impl RawConfig {
    pub fn new<'a>(text: &str, overrides: impl IntoIterator<Item = &'a str>) -> Result<Self, SettingsError> {
        let overrides = overrides.into_iter().map(Override::parse).collect::<Result<_, _>>()?;
        Ok(Self { table: parse(text)?, overrides, text: text.trim_start_matches('\u{feff}').to_string() })
    }
}

/// The tables and values of a text. A byte-order mark at its start is skipped.
pub fn parse(text: &str) -> Result<Table, SettingsError> {
    let text = text.trim_start_matches('\u{feff}');
    toml::from_str(text).map_err(|error| {
        let (line, column) = origin::position(text, error.span().map_or(text.len(), |span| span.start));
        SettingsError::Syntax { line, column, problem: error.message().to_string() }
    })
}

/// A value from its table. `root` begins every path in messages. Keys that the type does not have are refused.
pub fn read<T: Serialize + DeserializeOwned>(root: &str, table: Table) -> Result<T, SettingsError> {
    let given = Value::Table(table);
    let value: T = serde_path_to_error::deserialize(given.clone()).map_err(|error| {
        let path = error.path().to_string();
        unreadable(root, &path, &error.into_inner().to_string(), &given)
    })?;
    // serde accepts any key inside a variant without fields, so keys that do not survive the round trip are refused.
    find_unread(root, &given, &Value::Table(to_table(&value)))?;
    Ok(value)
}

/// The table of a value.
///
/// # Panics
/// When the value is not made of strings, numbers, lists and tables.
pub fn to_table<T: Serialize>(value: &T) -> Table {
    Table::try_from(value).expect("settings have only strings, numbers, lists and tables")
}

/// Keys of which a table has one at most: giving one replaces the other.
const EXCLUSIVE: [(&str, &str); 1] = [("warmup_steps", "warmup_share")];

/// Lays `above` over `below`: tables of one kind key by key, everything else as a whole.
pub fn overlay(mut below: Table, above: Table) -> Table {
    let same_kind = above.get("kind").is_none_or(|kind| below.get("kind") == Some(kind));
    if !same_kind {
        return above;
    }
    for (one, other) in EXCLUSIVE.into_iter().flat_map(|(one, other)| [(one, other), (other, one)]) {
        if above.contains_key(one) && !above.contains_key(other) {
            below.remove(other);
        }
    }
    for (key, value) in above {
        let value = match (below.remove(&key), value) {
            (Some(Value::Table(old)), Value::Table(new)) => Value::Table(overlay(old, new)),
            (_, value) => value,
        };
        below.insert(key, value);
    }
    below
}

fn find_unread(path: &str, given: &Value, read: &Value) -> Result<(), SettingsError> {
    let below = |key: &str| if path.is_empty() { key.to_string() } else { format!("{path}.{key}") };
    match (given, read) {
        (Value::Table(given), Value::Table(read)) => {
            given.iter().try_for_each(|(key, value)| match read.get(key) {
                Some(read) => find_unread(&below(key), value, read),
                None => Err(SettingsError::Unreadable {
                    path: below(key),
                    problem: "this kind has no such key".to_string(),
                    suggestion: match read.keys().filter(|key| *key != "kind").collect::<Vec<_>>().as_slice()
                    {
                        [] => "leave it out, or choose another kind".to_string(),
                        known => suggest(key, &known.iter().map(|key| key.as_str()).collect::<Vec<_>>()),
                    },
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

/// The complaint about a value of the wrong type.
pub fn wrong_type(path: &str, got: &Value, expected: &str) -> SettingsError {
    let problem = format!("must be {expected}, not {}", shown(got));
    SettingsError::Unreadable { path: path.to_string(), problem, suggestion: String::new() }
}

/// A value in a message: short values as written, lists and tables by their kind.
fn shown(value: &Value) -> String {
    match value {
        Value::Array(_) => "a list".to_string(),
        Value::Table(_) => "a table".to_string(),
        value => value.to_string(),
    }
}

/// serde's message in plain words with the key's path. For an unknown key the hint is the path at which a key of that name
/// exists, else the nearest of the names that serde says it expected.
fn unreadable(root: &str, path: &str, message: &str, given: &Value) -> SettingsError {
    // The lines behind the first say where the value stands.
    let quoted: Vec<&str> =
        message.lines().take(1).flat_map(|line| line.split('`').skip(1).step_by(2)).collect();
    let below = if path == "." { String::new() } else { path.replace('[', ".").replace(']', "") };
    let suggestion = match quoted.split_first() {
        Some((unknown, known)) if message.starts_with("unknown field") => {
            let mut elsewhere = Vec::new();
            find_keys(given, "", unknown, &mut elsewhere);
            // The path of an unknown key ends with the key or with the table around it.
            let given_at = [below.clone(), format!("{below}.{unknown}").trim_start_matches('.').to_string()];
            elsewhere.retain(|found| !given_at.contains(found));
            let of_peer = || {
                let last = format!("{below}.{unknown}");
                let path = if below.ends_with(unknown) { &below } else { last.trim_start_matches('.') };
                peers::hint(path, path.split('.').try_fold(given, |value, key| value.get(key)))
            };
            match elsewhere.as_slice() {
                [] => of_peer().unwrap_or_else(|| suggest(unknown, known)),
                paths => format!("did you mean `{}`?", paths.join("` or `")),
            }
        }
        Some((unknown, known)) if message.starts_with("unknown variant") => suggest(unknown, known),
        Some((missing, _)) if message.starts_with("missing field") => {
            format!("give {} too", format!("{below}.{missing}").trim_start_matches('.'))
        }
        _ => String::new(),
    };
    let path = [root, &below].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(".");
    SettingsError::Unreadable { path, problem: words::problem(message), suggestion }
}

/// The paths of all keys of that name in tables inside each other.
fn find_keys(value: &Value, path: &str, name: &str, found: &mut Vec<String>) {
    let Value::Table(table) = value else { return };
    for (key, value) in table {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        if key == name {
            found.push(path.clone());
        }
        find_keys(value, &path, name, found);
    }
}

/// The nearest of the known names as a question, or all of them.
pub fn suggest(name: &str, known: &[&str]) -> String {
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
