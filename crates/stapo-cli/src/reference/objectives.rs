//! Objective presets with their formulas: each axis of a preset with the description that the schema has for its kind.

use super::{Entry, Page, Section};
use serde_json::Value;
use stapo_core::objective::{ObjectiveSpec, Preset, presets};
use stapo_rl::plan::config::schema;

const INTRO: &str = "\
An objective is one value with several axes; a preset has the published values. `stapo train --set objective.preset=NAME` \
trains with a preset, `--set objective.KEY=VALUE` changes one value of it, and `stapo objective --spec NAME --show` prints all \
values. [Objectives](../objectives.md) explains the axes, and [the config reference](config.md#objective) lists every kind.

In the formulas, `r` is the probability of a token under the policy divided by its probability when it was sampled, `A` is the \
advantage, and `logp` is the log-prob under the policy. The surrogate is maximised: the loss is minus its aggregate over the \
kept tokens. Axes that a preset does not use are left out.";

/// The axes in the order in which they act.
const AXES: [&str; 14] = [
    "advantage",
    "multiple_rewards",
    "whiten",
    "kl_in_reward",
    "distillation",
    "masks",
    "mask_signals",
    "ratio",
    "surrogate",
    "aggregate",
    "denominator",
    "kl",
    "entropy_bonus",
    "off_policy",
];

pub fn page() -> Page {
    let schema = schema::<ObjectiveSpec>();
    let sections = presets().into_iter().map(|preset| {
        let title = preset.name.to_string();
        Section { title, subject: Some(entry(&preset, &schema)), ..Section::default() }
    });
    Page { file: "objectives.md", title: "Objective presets", intro: INTRO, sections: sections.collect() }
}

fn entry(preset: &Preset, schema: &Value) -> Entry {
    let paper = match preset.paper {
        "" => String::new(),
        number => format!(" Paper: [arXiv {number}](https://arxiv.org/abs/{number})."),
    };
    let mut summary = preset.summary.to_string();
    summary[..1].make_ascii_uppercase();
    let mut entry = Entry::new("objective preset", preset.name, format!("{summary}.{paper}"));
    let spec = serde_json::to_value(&preset.objective).unwrap_or_default();
    for axis in AXES {
        let described = &schema["properties"][axis];
        let text = match &spec[axis] {
            Value::Array(items) => {
                let items = items.iter().filter_map(|item| kind_text(item, &described["items"]));
                items.collect::<Vec<_>>().join("; ")
            }
            Value::String(name) => format!("`{name}`: {}", choice_text(name, described)),
            value => kind_text(value, described).unwrap_or_default(),
        };
        let is_default = (axis == "multiple_rewards" && spec[axis] == "sum")
            || (axis == "mask_signals" && preset.objective.masks.is_empty());
        if !is_default {
            entry = entry.with_fact(axis, text);
        }
    }
    let rollout = preset.rollout;
    let sampling = if rollout.dynamic_sampling { ", dynamic sampling" } else { "" };
    let overlong = rollout.overlong.map_or(String::new(), |overlong| {
        format!(
            ", overlong shaping from {} to {} tokens",
            overlong.max_tokens - overlong.buffer_tokens,
            overlong.max_tokens
        )
    });
    entry.with_fact("rollout in the paper", format!("groups of {}{sampling}{overlong}", rollout.group_size))
}

/// A value that is tagged by its kind: the kind, its numbers, and what the schema says of it. `None` for the kind `none`.
fn kind_text(value: &Value, described: &Value) -> Option<String> {
    let kind = value["kind"].as_str().filter(|kind| *kind != "none")?;
    let variants = described["oneOf"].as_array()?;
    let variant = variants.iter().find(|variant| variant["properties"]["kind"]["const"] == kind)?;
    let about = variant["description"].as_str().unwrap_or_default();
    let numbers: Vec<String> = value
        .as_object()?
        .iter()
        .filter(|(key, _)| *key != "kind")
        .map(|(key, value)| format!("{key} = {}", super::keys::toml_text(value)))
        .collect();
    let choices = value.as_object()?.iter().filter_map(|(key, value)| {
        let text = choice_text(value.as_str()?, &variant["properties"][key]);
        (!text.is_empty()).then(|| format!(" `{key}`: {text}"))
    });
    let choices: String = choices.collect();
    let numbers = if numbers.is_empty() { String::new() } else { format!(" ({})", numbers.join(", ")) };
    Some(format!("`{kind}`{numbers}: {}{choices}", about.replace("\n\n", " ")))
}

/// What the description of a closed set says of one of its values.
fn choice_text(name: &str, described: &Value) -> String {
    let text = described["description"].as_str().unwrap_or_default();
    let start = format!("\"{name}\": ");
    text.split("\n\n").find_map(|part| part.strip_prefix(&start)).unwrap_or_default().to_string()
}
