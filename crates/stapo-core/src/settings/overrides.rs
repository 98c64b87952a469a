//! `key.path=value` overrides of settings.

use super::{EXCLUSIVE, SettingsError, shown};
use serde::Deserialize;
use toml::{Table, Value};

/// `key.path=value` from a command line. The value is TOML; a bare word is a string.
#[derive(Debug, Clone)]
pub struct Override {
    pub keys: Vec<String>,
    pub value: Value,
    /// As written.
    pub(super) text: String,
}

impl Override {
    pub fn parse(text: &str) -> Result<Self, SettingsError> {
        let refuse = |problem: &str| SettingsError::Override {
            text: text.to_string(),
            problem: problem.to_string(),
            remedy: "write KEY=VALUE, as in steps=20".to_string(),
        };
        let (path, value) = text.split_once('=').ok_or_else(|| refuse("has no `=`"))?;
        if path.split('.').any(|key| key.trim().is_empty()) {
            return Err(refuse("a key is empty"));
        }
        let keys = path.trim().split('.').map(str::to_string).collect();
        Ok(Self { keys, value: parse_value(value.trim()), text: text.to_string() })
    }

    /// Sorts overrides into the order in which none undoes another: shorter paths first, and `kind` before its neighbours.
    fn order(&self) -> (usize, bool) {
        (self.keys.len(), self.keys.last().is_none_or(|key| key != "kind"))
    }

    /// Sets the value. Another `kind` drops the keys of the previous kind. Absent tables on the way are made, and
    /// [`read`](super::read) refuses those that the type does not have.
    fn apply(self, root: &mut Table) -> Result<(), SettingsError> {
        let mut whole = Value::Table(std::mem::take(root));
        let outcome = set_value(&mut whole, &self.keys, self.value);
        if let Value::Table(table) = whole {
            *root = table;
        }
        outcome.map_err(|(problem, remedy)| SettingsError::Override { text: self.text, problem, remedy })
    }
}

/// Applies overrides. Their order matters only between two of the same key, of which the last counts: the value of a
/// whole table is set before the keys inside, and a `kind` before the keys of that kind.
pub fn set_all(root: &mut Table, overrides: impl IntoIterator<Item = Override>) -> Result<(), SettingsError> {
    let mut overrides: Vec<Override> = overrides.into_iter().collect();
    overrides.sort_by_key(Override::order);
    overrides.into_iter().try_for_each(|set| set.apply(root))
}

fn set_value(root: &mut Value, keys: &[String], value: Value) -> Result<(), (String, String)> {
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
            for (one, other) in EXCLUSIVE {
                table.retain(|key, _| !(last == one && key == other || last == other && key == one));
            }
            table.insert(last.clone(), value);
        }
        _ => *step(at, parents, last)? = value,
    }
    Ok(())
}

/// One step down from the path `here`, or (problem, remedy).
fn step<'a>(at: &'a mut Value, here: &[String], key: &str) -> Result<&'a mut Value, (String, String)> {
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
