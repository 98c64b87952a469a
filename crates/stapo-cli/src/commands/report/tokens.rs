//! Tables of tokens: most silenced, kept although improbable, and single cases with their context.

use crate::shared::chart::{number, significant};
use crate::shared::study::Study;
use crate::shared::study::table::{Cell, Table, text, token};
use stapo_core::record::TokenRecord;
use std::collections::BTreeMap;

const MAX_KINDS: usize = 20;
const MAX_CASES: usize = 40;

/// Tokens grouped by text, most frequent first, with mean probability, entropy and gradient norm, and the preferred
/// token.
pub fn by_text(
    name: &'static str,
    study: &Study,
    select: impl Fn(&Study) -> Vec<&TokenRecord>,
) -> Option<Table> {
    let records = select(study);
    let mut kinds: BTreeMap<&str, Vec<&TokenRecord>> = BTreeMap::new();
    for record in &records {
        kinds.entry(&record.text).or_default().push(record);
    }
    let mut kinds: Vec<_> = kinds.into_iter().collect();
    kinds.sort_by_key(|(text, list)| (std::cmp::Reverse(list.len()), *text));
    let titles = [
        "token",
        "#times",
        "#share of these, %",
        "#mean probability, %",
        "#mean entropy, nats",
        "#mean gradient norm",
        "most often preferred",
    ];
    let mut table = Table::new(name, &titles);
    for (kind, list) in kinds.iter().take(MAX_KINDS) {
        let mean =
            |value: fn(&TokenRecord) -> f64| list.iter().map(|r| value(r)).sum::<f64>() / list.len() as f64;
        table.push(vec![
            token(kind),
            text(list.len().to_string()),
            text(format!("{:.1}", 100.0 * list.len() as f64 / records.len() as f64)),
            text(number(100.0 * mean(|r| r.logp.exp()))),
            text(number(mean(|r| r.entropy))),
            text(number(mean(|r| r.gradient_norm))),
            preferred(list),
        ]);
    }
    (!table.rows.is_empty()).then_some(table)
}

/// The most frequent first alternative.
fn preferred(list: &[&TokenRecord]) -> Cell {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for first in list.iter().filter_map(|record| record.alternatives.first()) {
        *counts.entry(&first.text).or_default() += 1;
    }
    let most = counts.into_iter().max_by_key(|&(text, n)| (n, std::cmp::Reverse(text)));
    most.map_or(text("–"), |(first, n)| {
        Cell::Tokens(vec![(first.to_string(), format!("{n} of {}", list.len()))])
    })
}

pub fn silenced(study: &Study) -> Vec<&TokenRecord> {
    study.runs().flat_map(|(_, run)| &run.silenced).collect()
}

pub fn explored(study: &Study) -> Vec<&TokenRecord> {
    study.runs().flat_map(|(_, run)| &run.explored).collect()
}

/// Single silenced tokens, least likely first, with the columns of the paper's table and more.
pub fn spurious(study: &Study) -> Option<Table> {
    let mut records = silenced(study);
    records.sort_by(|a, b| a.logp.total_cmp(&b.logp));
    let titles = [
        "token",
        "#probability, %",
        "#advantage",
        "preferred alternatives",
        "context",
        "#entropy, nats",
        "#gradient norm",
        "#step",
        "problem",
    ];
    let mut table = Table::new("spurious", &titles);
    for record in records.iter().take(MAX_CASES) {
        let share = |logp: f64| format!("{} %", significant(100.0 * logp.exp(), 4));
        let likelier = record.alternatives.iter().filter(|a| a.logp > record.logp).take(3);
        table.push(vec![
            token(&record.text),
            text(significant(100.0 * record.logp.exp(), 3)),
            text(format!("{:.4}", record.advantage)),
            Cell::Tokens(likelier.map(|a| (a.text.clone(), share(a.logp))).collect()),
            Cell::Context(record.context_before.clone(), record.text.clone(), record.context_after.clone()),
            text(number(record.entropy)),
            text(number(record.gradient_norm)),
            text(record.step.to_string()),
            text(format!("{} #{}", record.problem_id, record.sample_idx)),
        ]);
    }
    (!table.rows.is_empty()).then_some(table)
}
