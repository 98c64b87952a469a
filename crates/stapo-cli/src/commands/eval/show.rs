//! The tables of `stapo eval` and `stapo compare` on a terminal.

use crate::shared::terminal::{COLUMNS, first_cell, wrapped};
use crate::shared::units::{grouped, p_value, percent};
use serde_json::Value;
use stapo_core::record::EvalRecord;
use stapo_core::stats::Estimate;
use stapo_rl::lab::evaluation::{
    Agreement, Compared, EvalPlan, EvalRow, SIX, average, is_disputed, second_verdict,
};
use stapo_rl::reward::VerifierSpec;
use stapo_rl::run::receipt::short_of;
use std::path::Path;

/// How the questions were asked.
pub fn prompting(plan: &EvalPlan) {
    let from = plan.prompting_of.as_ref().map_or(String::new(), |run| format!(" as in the run {run}"));
    println!("\n{}", wrapped(&format!("asked{from}: {}", prompting_text(plan)), 0, COLUMNS));
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

/// The columns of a benchmark's name.
const NAME_WIDTH: usize = 14;

/// Two tables per decoding, one row per benchmark: its scores, and what its responses are like.
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
        println!("{:<14} {:>3}  {:<19} {:<19} maj@k", "benchmark", "k", "avg@k", "pass@k");
        for row in &rows {
            println!(
                "{} {:>3}  {:<19} {:<19} {}",
                first_cell(&row.benchmark, NAME_WIDTH),
                row.n_samples,
                percent(&row.avg),
                passes(row),
                row.maj.as_ref().map_or("-".into(), percent),
            );
        }
        for line in remarks(&rows) {
            println!("{line}");
        }
        responses(&rows);
    }
}

/// What the scores of a decoding leave out: how programs ended, right answers that are not worked out, and the mean of six.
fn remarks(rows: &[&EvalRow]) -> Vec<String> {
    let mut lines = Vec::new();
    for row in rows {
        if let Some(ends) = &row.programs {
            let ends = ends.iter().map(|(end, n)| format!("{n} {}", end.label()));
            lines.push(format!("{}: of its programs {}", row.benchmark, ends.collect::<Vec<_>>().join(", ")));
        }
    }
    for row in rows.iter().filter(|row| row.n_left_to_grader > 0) {
        let text = format!(
            "{}: {} of {} right samples leave a calculation to the grader, as 60 + 180 does beside 240; \
             --verifier '{{kind=\"rule\", form=\"worked-out\"}}' says which",
            row.benchmark,
            row.n_left_to_grader,
            n_right(row)
        );
        lines.push(wrapped(&text, 0, COLUMNS));
    }
    if let Some(mean) = mean_of_six(rows) {
        lines.push(format!("{:<14} {:>3}  {}", "mean of six", "", percent(&mean)));
    }
    lines
}

/// The mean of the paper's six benchmarks, where all of them are there.
fn mean_of_six(rows: &[&EvalRow]) -> Option<Estimate> {
    let find = |name: &&str| rows.iter().find(|row| row.benchmark == *name).copied();
    let six: Option<Vec<&EvalRow>> = SIX.iter().map(find).collect();
    average(&six?)
}

/// What the responses of each benchmark are like.
fn responses(rows: &[&EvalRow]) {
    println!(
        "\n{:<14} {:>9} {:>10} {:>10} {:>10} {:>12}",
        "responses", "questions", "truncated", "no answer", "unjudged", "mean tokens"
    );
    for row in rows {
        println!(
            "{} {:>9} {:>10} {:>10} {:>10} {:>12.0}",
            first_cell(&row.benchmark, NAME_WIDTH),
            row.n_questions,
            share(row.truncated_share),
            share(row.no_answer_share),
            share(row.unjudged_share),
            row.response_tokens_mean
        );
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
    let judge = VerifierSpec::named(verifier)
        .ok()
        .and_then(|spec| Some(format!("the judge {}", spec.judge()?.model)));
    let verifier = judge.unwrap_or_else(|| verifier.to_string());
    println!("\nthe benchmark's rule and {verifier}: samples that are right by");
    println!(
        "{:<12} {:<14} {:>8} {:>10} {:>12} {:>8} {:>10}",
        "benchmark", "decoding", "both", "rule alone", "second alone", "neither", "agree"
    );
    for row in rows {
        let Some(found) = row.agreement else { continue };
        println!(
            "{:<12} {:<14} {:>8} {:>10} {:>12} {:>8} {:>10}",
            row.benchmark,
            row.decoding,
            found.n_both,
            found.n_rule_alone,
            found.n_second_alone,
            found.n_neither,
            share(agreeing(found))
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

/// Share of samples with the same verdict of both verifiers.
fn agreeing(found: Agreement) -> f64 {
    1.0 - found.n_apart() as f64 / found.n_samples() as f64
}

/// What the difference B - A says.
fn reading(row: &Compared) -> &'static str {
    match (row.is_detectable(), row.paired.difference > 0.0) {
        (false, _) => "no detectable difference",
        (true, true) => "B is better",
        (true, false) => "A is better",
    }
}

/// One row per benchmark and decoding, with a reading of its difference.
pub fn comparison(a: &Path, b: &Path, compared: &[Compared]) {
    for (name, folder) in [("A", a), ("B", b)] {
        println!("{name} {}, receipt {}", folder.display(), short_of(folder));
    }
    println!("");
    let mut decoding = "";
    for row in compared {
        if row.decoding != decoding {
            decoding = &row.decoding;
            println!("{decoding}");
            println!(
                "{:<14} {:>6} {:>6} {:>6}  {:<21} {:>8} {:>8}",
                "benchmark", "n", "A %", "B %", "B - A, points", "p", "p Holm"
            );
        }
        println!("{}", compared_text(row));
    }
    println!(
        "\nn: questions in both. p: paired permutation of questions; Holm over {} rows.\ndetectable: the difference that these questions and samples find in 80 % of\nrepetitions.",
        compared.len()
    );
}

/// A row of a comparison with its reading below.
fn compared_text(row: &Compared) -> String {
    let paired = &row.paired;
    let reading = reading(row);
    let unshared = match row.n_unshared {
        0 => String::new(),
        n => format!("\n  {n} questions are in only one of the two and were left out"),
    };
    format!(
        "{} {:>6} {:>6.1} {:>6.1}  {:<21} {:>8} {:>8}\n  {reading}; detectable from {:.1} points{unshared}",
        first_cell(&row.benchmark, NAME_WIDTH),
        paired.n_questions,
        100.0 * row.a,
        100.0 * row.b,
        format!(
            "{:+.1} [{:+.1}, {:+.1}]",
            100.0 * paired.difference,
            100.0 * paired.interval.low,
            100.0 * paired.interval.high
        ),
        p_value(paired.p_permutation),
        p_value(row.p_adjusted),
        100.0 * paired.minimum_detectable_effect,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use stapo_core::ProgramEnd;
    use stapo_rl::lab::evaluation::compare;

    fn estimate(value: f64, n_samples: usize) -> Estimate {
        Estimate { value, standard_error: None, interval: None, n_questions: 3, n_samples }
    }

    fn row(n_samples: usize, passes: &[(usize, f64)]) -> EvalRow {
        EvalRow {
            benchmark: "a".into(),
            decoding: "sampled".into(),
            n_questions: 3,
            n_samples,
            avg: estimate(0.25, 3 * n_samples),
            pass: passes.iter().map(|&(k, value)| (k, estimate(value, 3 * n_samples))).collect(),
            maj: None,
            programs: None,
            truncated_share: 0.0,
            no_answer_share: 0.0,
            unjudged_share: 0.0,
            n_left_to_grader: 0,
            response_tokens_mean: 9.0,
            agreement: None,
        }
    }

    #[test]
    fn pass_at_4_and_at_the_most_samples_are_shown_without_pass_at_1() {
        let passes = [(1, 0.25), (2, 0.3), (4, 0.401), (8, 0.5), (16, 0.61)];
        assert_eq!(super::passes(&row(16, &passes)), "4: 40.1  16: 61.0");
        assert_eq!(super::passes(&row(2, &passes[..2])), "2: 30.0");
        assert_eq!(super::passes(&row(6, &passes[..3])), "4: 40.1");
        assert_eq!(super::passes(&row(3, &passes[..2])), "2: 30.0");
        assert_eq!(super::passes(&row(1, &passes[..1])), "-");
        assert_eq!(n_right(&row(16, &passes)), 12);
    }

    #[test]
    fn verifiers_agree_where_both_say_right_or_both_say_wrong() {
        let found = Agreement { n_both: 5, n_rule_alone: 1, n_second_alone: 0, n_neither: 2 };
        assert_eq!(share(agreeing(found)), "87.5 %");
    }

    #[test]
    fn the_better_evaluation_is_named_where_the_difference_is_detectable() {
        let record = |question: usize, is_right: bool| -> EvalRecord {
            let verdict = if is_right { "right" } else { "wrong" };
            let record = json!({"schema": 1, "benchmark": "b", "decoding": "d", "problem_id": question.to_string(),
                "sample_idx": 0, "text": "", "n_tokens": 3, "finish": {"kind": "length_limit"}, "answer": null,
                "verdict": verdict, "reason": ""});
            serde_json::from_value(record).unwrap()
        };
        let [bad, middle, good] =
            [0, 4, 8].map(|n_right| (0..8).map(|idx| record(idx, idx < n_right)).collect::<Vec<_>>());
        let read = |a: &[EvalRecord], b: &[EvalRecord]| reading(&compare(a, b).unwrap()[0]);
        assert_eq!([read(&bad, &good), read(&good, &bad)], ["B is better", "A is better"]);
        assert_eq!([read(&bad, &middle), read(&good, &good)], ["no detectable difference"; 2]);
        let text = |a: &[EvalRecord], b: &[EvalRecord]| compared_text(&compare(a, b).unwrap()[0]);
        let all = text(&bad, &good);
        let row = "b                   8    0.0  100.0  +100.0 [";
        assert!(all.starts_with(row) && all.contains("\n  B is better; detectable from "), "{all}");
        assert!(!all.contains("only one of the two"), "{all}");
        let some = text(&bad[..6], &good);
        assert!(
            some.ends_with(" points\n  2 questions are in only one of the two and were left out"),
            "{some}"
        );
    }

    #[test]
    fn the_mean_of_six_needs_all_six() {
        let row = |benchmark: &&str, value: f64| EvalRow {
            benchmark: (*benchmark).to_string(),
            avg: estimate(value, 3),
            ..row(1, &[])
        };
        let names = ["olympiad", "aime24", "minerva", "amc23", "other", "aime25", "math500"];
        let rows: Vec<EvalRow> =
            names.iter().zip([0.1, 0.2, 0.3, 0.4, 9.0, 0.5, 0.6]).map(|(n, v)| row(n, v)).collect();
        let all: Vec<&EvalRow> = rows.iter().collect();
        let mean = mean_of_six(&all).unwrap();
        assert!((mean.value - 0.35).abs() < 1e-12, "{mean:?}");
        assert!(mean_of_six(&all[1..]).is_none() && mean_of_six(&all[..6]).is_none());
        assert_eq!(remarks(&all), ["mean of six         35.0"]);
        let left = EvalRow {
            n_left_to_grader: 2,
            programs: Some([(ProgramEnd::FailedTest, 3)].into()),
            ..row(&"a", 1.0)
        };
        let lines = remarks(&[&left, &rows[0]]);
        assert_eq!((lines.len(), lines[0].as_str()), (2, "a: of its programs 3 failed a test"));
        assert!(
            lines[1].starts_with("a: 2 of 3 right samples leave a calculation to the grader"),
            "{lines:?}"
        );
    }
}
