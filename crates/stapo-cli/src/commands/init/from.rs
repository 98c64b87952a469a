//! `stapo init --from`: a config from what starts TRL, verl or OpenRLHF: a YAML file, a shell script or a Python file.

mod python;
mod shell;
mod sum;
mod translate;
mod yaml;

use crate::shared::terminal::{COLUMNS, wrapped};
use anyhow::{Context, Result, bail};
use stapo_rl::untrusted::read_text;
use stapo_rl::{Config, Plan};
use std::fmt::Write;
use std::path::Path;
use toml::Value;
use translate::{Peer, Translation};

/// A key of the new config.
struct Entry {
    key: String,
    value: Value,
    /// The setting that the value is from, as a comment.
    origin: String,
}

/// What replaces the file's model and data, and the device.
pub struct Changes<'a> {
    pub model: Option<&'a str>,
    pub data: Option<&'a Path>,
    pub device: String,
}

/// A translated file: the text of a config, and what has no translation.
pub struct Translated {
    pub program: &'static str,
    pub text: String,
    pub n_keys: usize,
    pub refused: Vec<String>,
    /// Settings that no table names.
    pub unnamed: Vec<String>,
}

/// Prompts that TRL takes at any length.
const MAX_PROMPT_TOKENS: i64 = 1024;

/// The settings of a file by their names, those first that come before others of the same name.
fn settings(file: &Path) -> Result<Vec<(String, Value)>> {
    let named = || format!("file {}", file.display());
    let text = read_text(file).with_context(named)?;
    let from_yaml = yaml::settings(&text);
    if let Ok(found) = &from_yaml
        && !found.is_empty()
    {
        return Ok(found.clone());
    }
    let is_python = text.contains("GRPOConfig(") || text.contains("GRPOTrainer(");
    let mut trainings = if is_python { python::trainings(&text) } else { shell::trainings(&text) };
    match trainings.len() {
        0 => {
            if file.extension().is_some_and(|ending| ending == "yaml" || ending == "yml") {
                from_yaml.with_context(named)?;
            }
            bail!(
                "{}: holds no settings\nhint: a YAML file with lines such as `num_generations: 8`, a shell script that starts TRL, verl or OpenRLHF, or a Python file with GRPOConfig(..)",
                named()
            )
        }
        1 => {}
        n => bail!("{}: starts {n} trainings\nhint: keep one of them in a copy of the file", named()),
    }
    let mut found = trainings.remove(0);
    // Flags come before what is in the file that `--config` names.
    if let Some(place) = found.iter().position(|(name, value)| name == "config" && value.is_str()) {
        let (_, config) = found.remove(place);
        let config = Path::new(config.as_str().unwrap_or_default());
        let from_script = file.parent().unwrap_or(Path::new("")).join(config);
        let config = if config.exists() { config } else { &from_script };
        let named = || format!("file {}, which {} names", config.display(), file.display());
        let text = read_text(config).with_context(named)?;
        found.extend(yaml::settings(&text).with_context(named)?);
    }
    Ok(found)
}

pub fn translated(file: &Path, changes: &Changes) -> Result<Translated> {
    let peer = Peer::new(&settings(file)?);
    let (mut entries, mut refused) = (Vec::new(), Vec::new());
    for (name, translation, is_default) in peer.translations() {
        match translation {
            Translation::Nothing => {}
            Translation::Refused(reason) if !is_default => refused.push(reason),
            Translation::Refused(_) => {}
            Translation::Keys(keys) => {
                let origin = if is_default { format!("default of {name}") } else { name.to_string() };
                for (key, value) in keys {
                    if !entries.iter().any(|entry: &Entry| entry.key == key) {
                        entries.push(Entry { key, value, origin: origin.clone() });
                    }
                }
            }
        }
    }
    add(&mut entries, changes, peer.program);
    name_after(&mut entries, file);
    entries.sort_by_key(order);
    drop_refused(&mut entries, &mut refused)?;
    for (key, flag) in [("model.path", "--model MODEL"), ("task.path", "--data FILE")] {
        if !entries.iter().any(|entry| entry.key == key) {
            refused.push(format!("{key} is not set, so that of the built-in run stays; {flag} names yours"));
        }
    }
    let text = written(file, peer.program, &entries, &refused, &peer.unnamed);
    Ok(Translated { program: peer.program, text, n_keys: entries.len(), refused, unnamed: peer.unnamed })
}

/// Adds what the command line gives, and what both programs do without a setting for it.
fn add(entries: &mut Vec<Entry>, changes: &Changes, program: &str) {
    let mut set = |key: &str, value: Value, origin: &str| {
        entries.retain(|entry| entry.key != key);
        entries.push(Entry { key: key.to_string(), value, origin: origin.to_string() });
    };
    set("device", changes.device.as_str().into(), "");
    if let Some(model) = changes.model {
        set("model.path", model.into(), "--model");
    }
    if let Some(data) = changes.data {
        set("task.path", data.display().to_string().into(), "--data");
        set("task.template", "{{ problem }}".into(), "prompts as they are");
    }
    set("reward.wrong", 0.0.into(), "rewards are 1 and 0 there, 1 and -1 here");
    if program == "verl" {
        set("rollout.chat", true.into(), "verl renders every prompt with the chat template");
    } else if program == "TRL" && !entries.iter().any(|entry| entry.key == "rollout.max_prompt_tokens") {
        let origin = "TRL has no limit".to_string();
        let key = "rollout.max_prompt_tokens".to_string();
        entries.push(Entry { key, value: MAX_PROMPT_TOKENS.into(), origin });
    }
}

fn name_after(entries: &mut Vec<Entry>, file: &Path) {
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let name: String = stem.chars().map(|c| if is_plain(c) { c } else { '-' }).collect();
    entries.push(Entry { key: "name".to_string(), value: name.into(), origin: String::new() });
}

/// Takes out keys that a run would refuse, one by one, and lists why. Where a default does not fit what is left, it is made to fit.
fn drop_refused(entries: &mut Vec<Entry>, refused: &mut Vec<String>) -> Result<()> {
    let mut fitted: Vec<String> = Vec::new();
    loop {
        let config = Config::from_toml(&lines(entries), []).and_then(Plan::resolve);
        let Err(error) = config else { return Ok(()) };
        let key = error.key().unwrap_or_default();
        let place_of = |key: &str| entries.iter().rposition(|entry| is_about(key, &entry.key));
        // What does not fit a default of the same small table, such as objective.surrogate, is at fault.
        let table = key.rsplit_once('.').map(|(table, _)| table).filter(|table| table.contains('.'));
        if let Some(idx) = place_of(&key).or_else(|| table.and_then(place_of)) {
            let entry = entries.remove(idx);
            let problem = error.to_string().lines().next().unwrap_or_default().to_string();
            refused.push(format!("`{}` = {}: {problem}", entry.origin, entry.value));
        } else if let Some(entry) = fitting(entries, &key).filter(|_| !fitted.contains(&key)) {
            entries.push(entry);
            entries.sort_by_key(order);
            fitted.push(key);
        } else {
            return Err(error)
                .context("the translated config does not fit, which is a fault of this program");
        }
    }
}

/// The preset comes first, since other keys change it.
fn order(entry: &Entry) -> (bool, String) {
    (!entry.key.ends_with(".preset"), entry.key.clone())
}

/// The value of a key whose default does not fit the other keys.
fn fitting(entries: &[Entry], key: &str) -> Option<Entry> {
    let number = |key: &str, default: i64| {
        let given = entries.iter().find(|entry| entry.key == key);
        given.and_then(|entry| entry.value.as_integer()).unwrap_or(default)
    };
    let rollout = Config::default().rollout;
    let (prompt, response) = (rollout.max_prompt_tokens as i64, rollout.max_response_tokens as i64);
    let (value, origin) = match key {
        "update.problems_per_minibatch" => {
            (number("rollout.problems_per_step", rollout.problems_per_step as i64), "a rollout batch at most")
        }
        "update.microbatch_tokens" => (
            number("rollout.max_prompt_tokens", prompt) + number("rollout.max_response_tokens", response),
            "holds the longest sequence",
        ),
        _ => return None,
    };
    Some(Entry { key: key.to_string(), value: value.into(), origin: origin.to_string() })
}

/// Whether one of two keys is the other, or lies in its table.
fn is_about(a: &str, b: &str) -> bool {
    let below = |long: &str, short: &str| long == short || long.starts_with(&format!("{short}."));
    below(a, b) || below(b, a)
}

/// The keys as TOML, table by table.
fn lines(entries: &[Entry]) -> String {
    let table_of =
        |entry: &Entry| entry.key.split_once('.').map_or(String::new(), |(table, _)| table.to_string());
    let mut tables: Vec<String> = entries.iter().map(table_of).collect();
    tables.sort_unstable();
    tables.dedup();
    let mut text = String::new();
    for table in tables {
        if !table.is_empty() {
            let _ = writeln!(text, "\n[{table}]");
        }
        for entry in entries.iter().filter(|entry| table_of(entry) == table) {
            let key = entry.key.strip_prefix(&format!("{table}.")).unwrap_or(&entry.key);
            let comment =
                if entry.origin.is_empty() { String::new() } else { format!("  # {}", entry.origin) };
            let _ = writeln!(text, "{key} = {}{comment}", shown(&entry.value));
        }
    }
    text
}

/// A value as people write it: `1e-6`, not `0.000001`.
fn shown(value: &Value) -> String {
    match value {
        Value::Float(number) if *number != 0.0 && number.abs() < 1e-3 => format!("{number:e}"),
        value => value.to_string(),
    }
}

/// The file: what it is from, the keys, and what has no translation.
fn written(file: &Path, program: &str, entries: &[Entry], refused: &[String], unnamed: &[String]) -> String {
    let mut text = format!(
        "# Written by stapo init from {program}'s {}. A comment names the setting that a value is from.\n",
        file.display()
    );
    text.push_str(&lines(entries));
    let comment = |text: &str| wrapped(text, 2, 118).replace("\n  ", "\n#   ");
    if !refused.is_empty() {
        text.push_str("\n# Not translated:\n");
        for reason in refused {
            let _ = writeln!(text, "# - {}", comment(reason));
        }
    }
    if !unnamed.is_empty() {
        text.push_str("\n# Without a counterpart in the table of the docs:\n");
        let _ = writeln!(text, "#   {}", comment(&unnamed.join(", ")));
    }
    text
}

/// Names that are printed of those that no table names; the config has all.
const MAX_UNNAMED: usize = 12;

/// Says what was translated and what was not.
pub fn print(found: &Translated, out: &Path) {
    for line in summary_lines(found, out) {
        println!("{line}");
    }
}

fn summary_lines(found: &Translated, out: &Path) -> Vec<String> {
    let Translated { program, n_keys, refused, unnamed, .. } = found;
    let mut lines = vec![format!("{program}: {n_keys} keys written to {}", out.display())];
    if !refused.is_empty() {
        lines.push("not translated:".to_string());
    }
    lines.extend(refused.iter().map(|reason| format!("  {}", wrapped(reason, 2, COLUMNS))));
    if !unnamed.is_empty() {
        let rest = unnamed.len().saturating_sub(MAX_UNNAMED);
        let more = if rest > 0 { format!(" and {rest} more, which the config lists") } else { String::new() };
        let names = unnamed[..unnamed.len().min(MAX_UNNAMED)].join(", ");
        lines.push(format!("without a counterpart:\n  {}", wrapped(&format!("{names}{more}"), 2, COLUMNS)));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_translated_is_told_and_nothing_else() {
        let lines_of = |refused: &[&str], n_unnamed: usize| {
            let names = |n: usize| (0..n).map(|n| format!("k{n}")).collect::<Vec<_>>();
            let refused = refused.iter().map(ToString::to_string).collect();
            let unnamed = names(n_unnamed);
            let found = Translated { program: "TRL", text: String::new(), n_keys: 3, refused, unnamed };
            summary_lines(&found, Path::new("a.toml"))
        };
        assert_eq!(lines_of(&[], 0), ["TRL: 3 keys written to a.toml"]);
        assert_eq!(lines_of(&["b", "c"], 0)[1..], ["not translated:", "  b", "  c"]);
        let all: Vec<String> = (0..12).map(|n| format!("k{n}")).collect();
        assert_eq!(lines_of(&[], 12)[1], format!("without a counterpart:\n  {}", all.join(", ")));
        assert!(
            lines_of(&[], 14)[1].replace("\n  ", " ").ends_with("k11 and 2 more, which the config lists")
        );
    }

    #[test]
    fn a_refused_key_is_that_of_its_table_too() {
        let about = [("a.b", "a"), ("a", "a.b"), ("a", "a"), ("ab", "a"), ("a.b", "a.c")];
        assert_eq!(about.map(|(a, b)| is_about(a, b)), [true, true, true, false, false]);
    }

    #[test]
    fn a_model_or_data_that_the_file_does_not_name_are_told() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("peer.yaml");
        std::fs::write(&file, "learning_rate: 1.0e-5\nnum_generations: 4\n").unwrap();
        let missing = |model: Option<&str>, data: Option<&Path>| {
            let translated = translated(&file, &Changes { model, data, device: "cpu".into() }).unwrap();
            let missing: Vec<String> = translated
                .refused
                .into_iter()
                .filter(|reason| reason.contains(" is not set, so that"))
                .collect();
            assert_eq!(
                translated.text.contains("# Not translated:\n"),
                !missing.is_empty(),
                "{}",
                translated.text
            );
            missing.iter().map(|reason| reason.split(' ').next().unwrap().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(missing(None, None), ["model.path", "task.path"]);
        assert_eq!(missing(Some("m"), None), ["task.path"]);
        assert_eq!(missing(None, Some(Path::new("rows.jsonl"))), ["model.path"]);
    }
}
