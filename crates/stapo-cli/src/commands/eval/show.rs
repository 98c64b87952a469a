//! The tables of `stapo eval` and `stapo compare` on a terminal.

use crate::shared::units::{grouped, percent};
use serde_json::Value;
use stapo_core::record::EvalRecord;
use stapo_rl::lab::evaluation::{Compared, EvalPlan, EvalRow, SIX, average, is_disputed, second_verdict};
use stapo_rl::run::receipt::short_of;
use std::path::Path;

/// How the questions were asked.
pub fn prompting(plan: &EvalPlan) {
    let from = plan.prompting_of.as_ref().map_or(String::new(), |run| format!(" as in the run {run}"));
    println!("\nasked{from}: {}", prompting_text(plan));
}

fn prompting_text(plan: &EvalPlan) -> String {
    let mut parts = vec![if plan.chat { "chat template" } else { "plain text" }.to_string()];
    if !plan.chat_arguments.is_empty() {
        parts.push(format!("with {}", Value::Object(plan.chat_arguments.clone())));
    }
    parts.extend(plan.system.as_ref().map(|text| format!("system message {text:?}")));
    parts.extend(plan.template.as_ref().map(|text| format!("prompt {text:?}")));
    if !plan.stop.is_empty() {
        parts.push(format!("responses end at {}", Value::from(plan.stop.clone())));
    }
    parts.push(format!("up to {} tokens", grouped(plan.max_tokens as u64)));
    parts.join(", ")
}

/// One table per decoding, one row per benchmark.
pub fn table(rows: &[EvalRow]) {
    let mut decodings: Vec<&str> = Vec::new();
    for row in rows {
        if !decodings.contains(&row.decoding.as_str()) {
            decodings.push(&row.decoding);
        }
    }
    for decoding in decodings {
        let rows: Vec<&EvalRow> = rows.iter().filter(|row| row.decoding == decoding).collect();
        println!("\n{decoding}   (percent; 95 % intervals clustered by question)");
        println!(
            "{:<12} {:>9} {:>4}  {:<21} {:<22} {:<21} {:>9} {:>9} {:>8} {:>8}",
            "benchmark",
            "questions",
            "k",
            "avg@k",
            "pass@k",
            "maj@k",
            "truncated",
            "no answer",
            "unjudged",
            "tokens"
        );
        for row in &rows {
            println!(
                "{:<12} {:>9} {:>4}  {:<21} {:<22} {:<21} {:>9} {:>9} {:>8} {:>8.0}",
                row.benchmark,
                row.n_questions,
                row.n_samples,
                percent(&row.avg),
                passes(row),
                row.maj.as_ref().map_or("-".into(), percent),
                share(row.truncated_share),
                share(row.no_answer_share),
                share(row.unjudged_share),
                row.response_tokens_mean
            );
        }
        for row in &rows {
            if let Some(ends) = &row.programs {
                let ends = ends.iter().map(|(end, n)| format!("{n} {}", end.label()));
                println!("{}: of its programs {}", row.benchmark, ends.collect::<Vec<_>>().join(", "));
            }
        }
        for row in rows.iter().filter(|row| row.n_left_to_grader > 0) {
            println!(
                "{}: {} of {} right samples leave a calculation to the grader, as 60 + 180 does beside 240; \
                 --verifier '{{kind=\"rule\", form=\"worked-out\"}}' says which",
                row.benchmark,
                row.n_left_to_grader,
                n_right(row)
            );
        }
        let six: Vec<&EvalRow> =
            SIX.iter().filter_map(|name| rows.iter().find(|row| row.benchmark == *name).copied()).collect();
        if let Some(mean) = average(&six).filter(|_| six.len() == SIX.len()) {
            println!("{:<12} {:>9} {:>4}  {}", "mean of six", mean.n_questions, "", percent(&mean));
        }
    }
}

/// Samples of a row that are right.
fn n_right(row: &EvalRow) -> usize {
    (row.avg.value * row.avg.n_samples as f64).round() as usize
}

/// pass@k for k = 4 and the largest k, as `4: 40.1  32: 61.0`; pass@1 equals avg@k and is left out.
fn passes(row: &EvalRow) -> String {
    let listed = row.pass.iter().filter(|(k, _)| *k > 1);
    let chosen: Vec<_> = listed.clone().filter(|(k, _)| *k == 4 || *k == row.n_samples.max(2)).collect();
    let shown = if chosen.is_empty() { listed.collect() } else { chosen };
    let text: Vec<String> = shown.iter().map(|(k, pass)| format!("{k}: {:.1}", 100.0 * pass.value)).collect();
    if text.is_empty() { "-".into() } else { text.join("  ") }
}

fn share(value: f64) -> String {
    format!("{:.1} %", 100.0 * value)
}

/// Disputed samples that are shown; all are in `samples.jsonl`.
const MAX_DISPUTED: usize = 5;

/// Where the rule and a second verifier agree and where they do not; nothing for an evaluation with one verifier.
pub fn agreement(verifier: Option<&str>, rows: &[EvalRow], samples: &[EvalRecord]) {
    let Some(verifier) = verifier else { return };
    println!("\nthe benchmark's rule beside {verifier}: samples that are right by");
    println!(
        "{:<12} {:<14} {:>8} {:>10} {:>12} {:>8} {:>10}",
        "benchmark", "decoding", "both", "rule alone", "second alone", "neither", "agree"
    );
    for row in rows {
        let Some(found) = row.agreement else { continue };
        let agree = 1.0 - found.n_apart() as f64 / found.n_samples() as f64;
        println!(
            "{:<12} {:<14} {:>8} {:>10} {:>12} {:>8} {:>10}",
            row.benchmark,
            row.decoding,
            found.n_both,
            found.n_rule_alone,
            found.n_second_alone,
            found.n_neither,
            share(agree)
        );
    }
    let disputed: Vec<&EvalRecord> = samples.iter().filter(|sample| is_disputed(sample)).collect();
    for sample in disputed.iter().take(MAX_DISPUTED) {
        let second = second_verdict(sample)
            .map_or(String::new(), |second| format!("{:?} ({})", second.verdict, second.reason));
        println!(
            "{} {:?}, sample {}: rule {:?} ({}), second {second}",
            sample.benchmark, sample.problem_id, sample.sample_idx, sample.verdict, sample.reason
        );
    }
    println!("{} samples are disputed; samples.jsonl has both verdicts of each sample", disputed.len());
}

/// One row per benchmark and decoding, with a reading of its difference.
pub fn comparison(a: &Path, b: &Path, compared: &[Compared]) {
    for (name, folder) in [("A", a), ("B", b)] {
        println!("{name} {}, receipt {}", folder.display(), short_of(folder));
    }
    println!("");
    println!(
        "{:<12} {:<14} {:>9} {:>7} {:>7}  {:<22} {:>8} {:>8} {:>10}  ",
        "benchmark", "decoding", "questions", "A %", "B %", "B - A, points", "p", "p Holm", "detectable"
    );
    for row in compared {
        let paired = &row.paired;
        let verdict = if !row.is_detectable() {
            "no detectable difference"
        } else if paired.difference > 0.0 {
            "B is better"
        } else {
            "A is better"
        };
        println!(
            "{:<12} {:<14} {:>9} {:>7.1} {:>7.1}  {:<22} {:>8.4} {:>8.4} {:>10}  {verdict}",
            row.benchmark,
            row.decoding,
            paired.n_questions,
            100.0 * row.a,
            100.0 * row.b,
            format!(
                "{:+.1} [{:+.1}, {:+.1}]",
                100.0 * paired.difference,
                100.0 * paired.interval.low,
                100.0 * paired.interval.high
            ),
            paired.p_permutation,
            row.p_adjusted,
            format!("{:.1}", 100.0 * paired.minimum_detectable_effect),
        );
        if row.n_unshared > 0 {
            println!("{:<12} {} questions are in only one of the two and were left out", "", row.n_unshared);
        }
    }
    println!(
        "\np: paired permutation of questions; Holm over {} rows. detectable: the difference, in points, these questions and samples\nfind in 80 % of repetitions.",
        compared.len()
    );
}
