//! Names that keys had in earlier programs, and kinds that follow from the other keys.

use crate::tasks::file_kind;
use stapo_core::settings::{Override, SettingsError};
use toml::{Table, Value};

/// Earlier names of keys, and the names they have.
const EARLIER: [(&str, &str); 13] = [
    ("start", "model"),
    ("texts", "data"),
    ("batch_tokens", "update.batch_tokens"),
    ("microbatch_tokens", "update.microbatch_tokens"),
    ("learning_rate", "update.learning_rate"),
    ("schedule", "update.schedule"),
    ("weight_decay", "update.weight_decay"),
    ("beta1", "update.beta1"),
    ("beta2", "update.beta2"),
    ("max_gradient_norm", "update.max_gradient_norm"),
    ("evaluation_every_steps", "evaluation.every_steps"),
    ("evaluation_problems", "evaluation.problems"),
    ("checkpoint_every_steps", "record.checkpoint_every_steps"),
];

/// An override with the key's name of today.
pub(super) fn modern_override(mut set: Override) -> Override {
    let name = modern(&set.keys[0]);
    if name != set.keys[0] {
        let name: Vec<String> = name.split('.').map(str::to_string).collect();
        set.keys.splice(..1, name);
    }
    set
}

fn modern(key: &str) -> &str {
    EARLIER.iter().find(|(earlier, _)| *earlier == key).map_or(key, |(_, name)| name)
}

/// Adds the keys of `given` to `table` under their names of today; a key that is given under two names is refused.
pub(super) fn set_all(table: &mut Table, given: Table) -> Result<(), SettingsError> {
    let (today, earlier): (Vec<_>, Vec<_>) =
        given.into_iter().partition(|(key, _)| modern(key) == key.as_str());
    table.extend(today);
    for (key, value) in earlier {
        let name = modern(&key);
        let refuse = |problem: String, suggestion: String| SettingsError::Unreadable {
            path: format!("config.{key}"),
            problem,
            suggestion,
        };
        let (inside, last) = match name.split_once('.') {
            Some((section, last)) => {
                let section_value = table.entry(section).or_insert_with(|| Value::Table(Table::new()));
                let Value::Table(inside) = section_value else {
                    return Err(refuse(format!("{section} is no table"), format!("write [{section}]")));
                };
                (inside, last)
            }
            None => (&mut *table, name),
        };
        if inside.insert(last.to_string(), value).is_some() {
            let suggestion = format!("leave {key} out");
            return Err(refuse(format!("an earlier name of {name}, which is given too"), suggestion));
        }
    }
    infer_kinds(table);
    Ok(())
}

/// Adds the `kind` of a model and of data that are given by their path alone.
fn infer_kinds(table: &mut Table) {
    if let Some(Value::Table(model)) = table.get_mut("model")
        && model.contains_key("path")
    {
        model.entry("kind").or_insert_with(|| Value::from("path"));
    }
    if let Some(Value::Table(data)) = table.get_mut("data")
        && let Some(path) = data.get("path").cloned()
    {
        data.entry("kind").or_insert_with(|| Value::from(file_kind(path.as_str())));
    }
}
