//! Settings from TOML and `key=value` overrides. An error names the key that cannot be read and the nearest known one.

mod place;
mod words;

pub use place::place;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
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

/// The tables and values of a text. A byte-order mark at its start is no part of it.
pub fn parse(text: &str) -> Result<Table, SettingsError> {
    let text = text.trim_start_matches('\u{feff}');
    toml::from_str(text).map_err(|error| {
        let (line, column) = place::position(text, error.span().map_or(text.len(), |span| span.start));
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

/// Lays `above` over `below`: tables of one kind key by key, everything else as a whole.
pub fn overlay(mut below: Table, above: Table) -> Table {
    let same_kind = above.get("kind").is_none_or(|kind| below.get("kind") == Some(kind));
    if !same_kind {
        return above;
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

/// Applies `key.path=value` overrides. Their order matters only between two of the same key, of which the last stands:
/// the value of a whole table is set before the keys inside, and a `kind` before the keys of that kind.
pub fn set_all<'a>(
    root: &mut Table,
    overrides: impl IntoIterator<Item = &'a str>,
) -> Result<(), SettingsError> {
    let mut overrides: Vec<&str> = overrides.into_iter().collect();
    overrides.sort_by_key(|text| application_order(text));
    overrides.into_iter().try_for_each(|text| set(root, text))
}

/// Sorts overrides into the order in which none undoes another: shorter paths first, and `kind` before its neighbours.
pub fn application_order(text: &str) -> (usize, bool) {
    let path = text.split('=').next().unwrap_or(text).trim();
    (path.split('.').count(), path.rsplit('.').next() != Some("kind"))
}

/// Applies one `key.path=value`. Values are TOML; a bare word is a string. Setting another `kind` drops the keys of the
/// previous kind. Absent tables on the way are made, and [`read`] refuses those that the type does not have.
pub fn set(root: &mut Table, text: &str) -> Result<(), SettingsError> {
    let refuse =
        |problem: String, remedy: String| SettingsError::Override { text: text.to_string(), problem, remedy };
    let Some((path, value)) = text.split_once('=') else {
        return Err(refuse("has no `=`".to_string(), "write KEY=VALUE, as in steps=20".to_string()));
    };
    if path.split('.').any(|key| key.trim().is_empty()) {
        return Err(refuse("a key is empty".to_string(), "write KEY=VALUE, as in steps=20".to_string()));
    }
    let value = parse_value(value.trim());
    let keys: Vec<&str> = path.trim().split('.').collect();
    let mut whole = Value::Table(std::mem::take(root));
    let outcome = set_value(&mut whole, &keys, value).map_err(|(problem, remedy)| refuse(problem, remedy));
    if let Value::Table(table) = whole {
        *root = table;
    }
    outcome
}

fn set_value(root: &mut Value, keys: &[&str], value: Value) -> Result<(), (String, String)> {
    let (last, parents) = keys.split_last().expect("split gives at least one part");
    let mut at = root;
    for (depth, key) in parents.iter().enumerate() {
        at = step(at, &keys[..depth], key)?;
    }
    match at {
        Value::Table(table)
            if *last == "kind" && !parents.is_empty() && table.get("kind") != Some(&value) =>
        {
            *table = Table::from_iter([("kind".to_string(), value)]);
        }
        Value::Table(table) => {
            table.insert((*last).to_string(), value);
        }
        _ => *step(at, parents, last)? = value,
    }
    Ok(())
}

/// One step down from the path `here`, or (problem, remedy).
fn step<'a>(at: &'a mut Value, here: &[&str], key: &str) -> Result<&'a mut Value, (String, String)> {
    let here = if here.is_empty() { "the config".to_string() } else { here.join(".") };
    match at {
        Value::Table(table) => {
            // A table that is absent is made. Where the type has none of that name, `read` refuses it.
            Ok(table.entry(key).or_insert_with(|| Value::Table(Table::new())))
        }
        Value::Array(items) => {
            let n = items.len();
            let found = key.parse::<usize>().ok().and_then(|idx| items.get_mut(idx));
            let remedy = match (here.ends_with("masks"), n) {
                (true, _) => format!("add S2T with --set '{here}=[{{kind=\"spurious\"}}]'"),
                (false, 0) => format!("set the whole list, as in --set '{here}=[..]'"),
                (false, _) => format!("its entries are numbered from 0 to {}", n - 1),
            };
            found.ok_or_else(|| (format!("{here} has no entry `{key}`; it has {n}"), remedy))
        }
        other => Err((format!("{here} is {}, which has no keys", shown(other)), String::new())),
    }
}

fn parse_value(text: &str) -> Value {
    #[derive(Deserialize)]
    struct Holder {
        value: Value,
    }
    // TOML has no numbers like `.2`, which command lines do.
    let digits = text.trim_start_matches(['+', '-']);
    let number = digits.starts_with('.').then(|| text.parse().ok()).flatten();
    toml::from_str::<Holder>(&format!("value = {text}")).map_or_else(
        |_| number.map_or_else(|| Value::String(text.to_string()), Value::Float),
        |holder| holder.value,
    )
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

/// serde's message in plain words with the key's path. For an unknown key the hint is the place where a key of that name
/// belongs, else the nearest of the names that serde says it expected.
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
            let own = [below.clone(), format!("{below}.{unknown}").trim_start_matches('.').to_string()];
            elsewhere.retain(|found| !own.contains(found));
            match elsewhere.as_slice() {
                [] => suggest(unknown, known),
                places => format!("did you mean `{}`?", places.join("` or `")),
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
