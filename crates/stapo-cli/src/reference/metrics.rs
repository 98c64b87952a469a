//! The numbers of a training step, from the catalogue of `stapo-core`, and the other keys of `metrics.jsonl`.

use super::keys::record_rows;
use super::{Entry, Page, Section};
use stapo_core::record::Metrics;
use stapo_core::record::catalogue::{ALL, DERIVED};
use stapo_rl::plan::config::schema;

const INTRO: &str = "\
`metrics.jsonl` in a run folder has one JSON object per training step. New versions of the program only add keys; a key \
without a value is left out. Seconds, rates, `decoding` and `memory_bytes` differ from run to run. All other numbers have the \
same bits in every run of the same plan.

[Watching a run](../watching.md) says where you see these numbers.";

pub fn page() -> Page {
    let numbers = ALL.iter().filter(|metric| !DERIVED.contains(&metric.key)).map(|metric| {
        Entry::new("metric", metric.key, format!("{}: {}.", metric.label, metric.about))
            .with_fact("unit", metric.unit.name())
            .with_fact("better", metric.better.name())
            .with_fact("TensorBoard", metric.tag.map_or(String::new(), |tag| format!("`{tag}`")))
    });
    let numbers: Vec<Entry> = numbers.collect();
    let is_number = |row: &Entry| ALL.iter().any(|metric| metric.key.split('.').next() == Some(&row.name));
    let others = record_rows(&schema::<Metrics>())
        .into_iter()
        .filter(|row| !row.name.contains('.') && (!is_number(row) || row.name == "reuse"));
    let others = others.collect();
    let section = |title: &str, rows| Section { title: title.to_string(), rows, ..Section::default() };
    Page {
        file: "metrics.md",
        title: "Metrics",
        intro: INTRO,
        sections: vec![section("Numbers of a step", numbers), section("Other keys of a step", others)],
    }
}
