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
    let mut unread = Vec::new();
    find_unread(&[], &given, &Value::Table(to_table(&value)), &mut unread);
    for Unread { path, known } in unread {
        // A field that is left out at its default does not survive either, but it refuses a value of another type.
        if T::deserialize(with_a_date(given.clone(), &path)).is_ok() {
            let key = path.last().map(String::as_str).unwrap_or_default();
            let known: Vec<&str> = known.iter().map(String::as_str).filter(|key| *key != "kind").collect();
            let suggestion = match known.as_slice() {
                [] => "leave it out, or choose another kind".to_string(),
                known => suggest(key, known),
            };
            let path =
                [root].into_iter().filter(|root| !root.is_empty()).chain(path.iter().map(String::as_str));
            let path = path.collect::<Vec<_>>().join(".");
            return Err(SettingsError::Unreadable {
                path,
                problem: "this kind has no such key".to_string(),
                suggestion,
            });
        }
    }
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

/// A given key that is not among the keys of the value that was read.
struct Unread {
    path: Vec<String>,
    known: Vec<String>,
}

fn find_unread(path: &[String], given: &Value, read: &Value, found: &mut Vec<Unread>) {
    let below = |key: &str| path.iter().cloned().chain([key.to_string()]).collect::<Vec<_>>();
    match (given, read) {
        (Value::Table(given), Value::Table(read)) => {
            for (key, value) in given {
                match read.get(key) {
                    Some(read) => find_unread(&below(key), value, read, found),
                    None => found.push(Unread { path: below(key), known: read.keys().cloned().collect() }),
                }
            }
        }
        (Value::Array(given), Value::Array(read)) => {
            for (idx, (given, read)) in given.iter().zip(read).enumerate() {
                find_unread(&below(&idx.to_string()), given, read, found);
            }
        }
        _ => {}
    }
}

/// The settings with a date instead of one value. No setting is a date.
fn with_a_date(mut settings: Value, path: &[String]) -> Value {
    let date = toml::value::Date { year: 2000, month: 1, day: 1 };
    let replaced = path.iter().try_fold(&mut settings, |value, key| match value {
        Value::Table(table) => table.get_mut(key),
        Value::Array(items) => items.get_mut(key.parse::<usize>().ok()?),
        _ => None,
    });
    if let Some(value) = replaced {
        *value = Value::Datetime(date.into());
    }
    settings
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
    // The lines after the first say where the value stands.
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(tag = "kind", rename_all = "snake_case")]
    enum Source {
        File {
            #[serde(default, skip_serializing_if = "is_zero")]
            share: f64,
        },
        Nothing,
    }

    #[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    fn is_zero(share: &f64) -> bool {
        *share == 0.0
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Config {
        sources: Vec<Source>,
    }

    #[test]
    fn a_key_at_its_default_is_known_and_a_key_of_another_kind_is_not() {
        let read = |text: &str| read::<Config>("config", parse(text).unwrap());
        let expected = Config { sources: vec![Source::File { share: 0.0 }] };
        assert_eq!(read("sources = [{ kind = \"file\", share = 0.0 }]"), Ok(expected));
        let error = read("sources = [{ kind = \"file\" }, { kind = \"nothing\", share = 0.0 }]").unwrap_err();
        assert!(
            error.to_string().starts_with("config.sources.1.share: this kind has no such key"),
            "{error}"
        );
        assert!(error.to_string().contains("leave it out, or choose another kind"), "{error}");
    }

    #[test]
    fn a_key_that_nothing_reads_is_compared_with_those_beside_it() {
        let error = read::<Config>(
            "config",
            parse("sources = [{ kind = \"file\", share = 0.5, shre = 0.1 }]").unwrap(),
        );
        let text = error.unwrap_err().to_string();
        assert!(text.starts_with("config.sources.0.shre: "), "{text}");
        assert!(text.ends_with("did you mean `share`?"), "{text}");
    }

    #[derive(Debug, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Outer {
        inner: Inner,
    }

    #[derive(Debug, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Inner {
        rate: f64,
    }

    #[test]
    fn an_unknown_key_is_looked_for_in_the_other_tables() {
        let refused = |text: &str| read::<Outer>("", parse(text).unwrap()).unwrap_err();
        let error = refused("rate = 1.0\n[inner]\nrate = 2.0");
        assert!(error.to_string().ends_with("did you mean `inner.rate`?"), "{error}");
        assert_eq!(error.key().as_deref(), Some("rate"));
        let error = refused("[inner]\nrate = 2.0\nrats = 1.0");
        assert!(error.to_string().ends_with("did you mean `rate`?"), "{error}");
        assert_eq!(error.key().as_deref(), Some("inner.rats"));
        let error = refused("[inner]");
        assert_eq!(error.key().as_deref(), Some("inner"), "{error}");
        assert_eq!(parse("= 1").unwrap_err().key(), None);
    }

    #[test]
    fn an_override_replaces_the_key_that_it_excludes() {
        let set = |text: &str, set: &str| {
            let mut table = parse(text).unwrap();
            set_all(&mut table, [Override::parse(set).unwrap()]).unwrap();
            table
        };
        assert_eq!(set("warmup_share = 0.1", "warmup_steps=5"), parse("warmup_steps = 5").unwrap());
        assert_eq!(set("warmup_steps = 5", "warmup_share=0.1"), parse("warmup_share = 0.1").unwrap());
        let rate = set("warmup_steps = 5", "rate=1");
        assert_eq!(rate, parse("warmup_steps = 5\nrate = 1").unwrap());
    }

    #[test]
    fn keys_that_exclude_each_other_replace_each_other() {
        let both = |below: &str, above: &str| overlay(parse(below).unwrap(), parse(above).unwrap());
        assert_eq!(both("warmup_steps = 5", "warmup_share = 0.1"), parse("warmup_share = 0.1").unwrap());
        assert_eq!(both("warmup_share = 0.1", "warmup_steps = 5"), parse("warmup_steps = 5").unwrap());
        let whole = "warmup_share = 0.1\nwarmup_steps = 5";
        assert_eq!(both("warmup_steps = 7", whole), parse(whole).unwrap());
        assert_eq!(both(whole, "rate = 1"), parse(&format!("{whole}\nrate = 1")).unwrap());
    }

    #[test]
    fn an_override_with_an_empty_key_is_refused() {
        for text in [".steps=1", "a..b=1", "a.=1", "=1", " =1", "steps"] {
            assert!(Override::parse(text).is_err(), "{text}");
        }
        assert_eq!(Override::parse("a.b = 1").unwrap().keys, ["a", "b"]);
    }
}
