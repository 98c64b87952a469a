use super::*;
use clap::CommandFactory;

fn all() -> Vec<Entry> {
    entries(&crate::help::with_groups(crate::Cli::command()))
}

fn names(word: &str) -> Vec<String> {
    find(&all(), word).iter().map(|entry| format!("{}: {}", entry.kind, entry.name)).collect()
}

#[test]
fn a_word_finds_what_it_names() {
    for (word, expected) in [
        ("update.learning_rate", "config key: update.learning_rate"),
        ("learning_rate", "metric: learning_rate"),
        ("learning_rate", "config key: update.learning_rate"),
        ("Tau-P", "config key: objective.masks.N.tau_p"),
        ("objective.masks.0.tau_p", "config key: objective.masks.N.tau_p"),
        ("tau_p", "word: tau_p"),
        ("stapo train", "command: stapo train"),
        ("fetch model", "command: stapo fetch model"),
        ("grpo", "objective preset: grpo"),
        ("tokens_per_second.rollout", "metric: tokens_per_second.rollout"),
        ("STAPO_THREADS", "environment variable: STAPO_THREADS"),
        ("is_candidate", "record key: tokens.is_candidate"),
        ("plan.toml", "file: plan.toml"),
    ] {
        let found = names(word);
        assert!(found.iter().any(|name| name == expected), "{word}: {found:?}");
    }
    assert_eq!(names("no_such_thing"), [""; 0]);
}

#[test]
fn an_option_that_commands_share_is_one_entry() {
    let found = names("--accept-changes");
    assert!(found.iter().any(|name| name.contains("stapo sft --accept-changes, stapo prefer ")), "{found:?}");
}

#[test]
fn a_misspelled_word_names_the_nearest() {
    let entries = all();
    assert_eq!(nearest(&entries, "learning_rat")[0], "learning_rate");
    assert!(nearest(&entries, "group_sise").contains(&"group_size".to_string()));
    assert_eq!(nearest(&entries, "§§§"), [""; 0]);
}

#[test]
fn keys_have_their_type_default_and_effect() {
    let entries = all();
    let fact = |word: &str, label: &str| {
        let found = find(&entries, word).into_iter().find(|entry| entry.kind == "config key").unwrap();
        found.facts.into_iter().find(|(known, _)| *known == label).map(|(_, value)| value).unwrap_or_default()
    };
    assert_eq!(fact("rollout.group_size", "type"), "whole number");
    assert_eq!(fact("rollout.group_size", "default"), "`8`");
    assert_eq!(fact("rollout.group_size", "changes results"), "yes");
    assert_eq!(fact("evaluation.every_steps", "changes results"), "on resume");
    assert_eq!(fact("rollout.kv_mib", "changes results"), "no");
    assert_eq!(fact("update.schedule.warmup_steps", "default"), "`5`");
    assert_eq!(fact("rollout.truncated", "type"), "`\"keep\"`, `\"drop\"`");
}

#[test]
fn every_preset_has_the_formula_of_its_surrogate() {
    let entries = all();
    let presets: Vec<&Entry> = entries.iter().filter(|entry| entry.kind == "objective preset").collect();
    assert_eq!(presets.len(), stapo_core::objective::presets().len());
    for preset in presets {
        let surrogate = preset.facts.iter().find(|(axis, _)| *axis == "surrogate");
        let text = surrogate.map(|(_, text)| text.as_str()).unwrap_or_default();
        // The kind and the formula are in backticks.
        assert!(text.matches('`').count() >= 4 && text.contains('A'), "{}: {text}", preset.name);
    }
}

#[test]
fn every_entry_has_a_text() {
    let silent: Vec<String> = all()
        .iter()
        .filter(|entry| entry.text.is_empty() && entry.kind != "record key")
        .map(|entry| format!("{} {}", entry.kind, entry.name))
        .collect();
    assert!(silent.is_empty(), "without a description:\n{}", silent.join("\n"));
}
