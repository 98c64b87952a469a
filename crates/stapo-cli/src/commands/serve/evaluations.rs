//! The evaluations of a run: results with intervals by step, and each question over the steps.

use serde::Serialize;
use stapo_core::Verdict;
use stapo_core::record::EvalRecord;
use stapo_rl::lab::evaluation::{EvalRow, rows};
use std::collections::{BTreeMap, BTreeSet};

/// Questions of a benchmark that are listed.
const MAX_QUESTIONS: usize = 2000;

#[derive(Debug, Serialize)]
pub struct Evaluations {
    run: String,
    benchmarks: Vec<Benchmark>,
}

/// One benchmark under one decoding.
#[derive(Debug, Serialize)]
struct Benchmark {
    #[serde(rename = "benchmark")]
    name: String,
    decoding: String,
    /// Steps of the run that were evaluated; absent for a model without steps.
    steps: Vec<Option<u64>>,
    /// One row per step.
    results: Vec<EvalRow>,
    questions: Vec<Question>,
}

/// The share of right samples of one question, by step.
#[derive(Debug, Serialize)]
struct Question {
    id: String,
    reference: String,
    shares: Vec<Option<f64>>,
}

pub fn of_run(run: &str, records: &[EvalRecord]) -> anyhow::Result<Evaluations> {
    let mut groups: BTreeMap<(&str, &str), Vec<&EvalRecord>> = BTreeMap::new();
    for record in records {
        groups.entry((&record.benchmark, &record.decoding)).or_default().push(record);
    }
    let benchmarks =
        groups.into_iter().map(|((name, decoding), records)| benchmark(name, decoding, &records));
    Ok(Evaluations { run: run.to_string(), benchmarks: benchmarks.collect::<anyhow::Result<_>>()? })
}

fn benchmark(name: &str, decoding: &str, records: &[&EvalRecord]) -> anyhow::Result<Benchmark> {
    let steps: BTreeSet<Option<u64>> = records.iter().map(|record| record.step).collect();
    let mut results = Vec::new();
    let mut questions: BTreeMap<&str, Question> = BTreeMap::new();
    for (idx, step) in steps.iter().enumerate() {
        // A sample that is recorded twice, by an evaluation that was resumed, counts once.
        let of_step = records.iter().filter(|record| record.step == *step);
        let samples: BTreeMap<(&str, usize), &EvalRecord> =
            of_step.map(|record| ((record.problem_id.as_str(), record.sample_idx), *record)).collect();
        let mut counts: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
        for record in samples.values() {
            let (n, n_right) = counts.entry(&record.problem_id).or_default();
            *n += 1;
            *n_right += usize::from(record.verdict == Verdict::Right);
            questions.entry(&record.problem_id).or_insert_with(|| Question {
                id: record.problem_id.clone(),
                reference: record.reference.clone(),
                shares: vec![None; steps.len()],
            });
        }
        for (id, (n, n_right)) in counts {
            if let Some(question) = questions.get_mut(id) {
                question.shares[idx] = Some(n_right as f64 / n as f64);
            }
        }
        let samples: Vec<EvalRecord> = samples.into_values().cloned().collect();
        results.extend(rows(&samples)?);
    }
    Ok(Benchmark {
        name: name.to_string(),
        decoding: decoding.to_string(),
        steps: steps.into_iter().collect(),
        results,
        questions: questions.into_values().take(MAX_QUESTIONS).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn record(step: u64, id: &str, sample: usize, is_right: bool) -> EvalRecord {
        serde_json::from_value(json!({"schema": 1, "benchmark": "b", "decoding": "d", "step": step, "problem_id": id,
            "sample_idx": sample, "text": "", "n_tokens": 3, "finish": {"kind": "length_limit"}, "answer": null,
            "verdict": if is_right { "right" } else { "wrong" }, "reason": ""}))
        .unwrap()
    }

    /// An evaluation that was resumed may have recorded a sample before and after.
    #[test]
    fn a_sample_that_is_recorded_twice_counts_once() {
        let records = [record(5, "x", 0, false), record(5, "x", 1, true), record(5, "x", 1, true)];
        let found = of_run("r", &records).unwrap();
        let benchmark = &found.benchmarks[0];
        assert_eq!((benchmark.results[0].avg.value, &benchmark.questions[0].shares), (0.5, &vec![Some(0.5)]));
    }

    #[test]
    fn questions_have_a_share_for_every_step_that_asked_them() {
        let records = [
            record(5, "x", 0, false),
            record(5, "x", 1, true),
            record(5, "y", 0, true),
            record(5, "y", 1, true),
            record(10, "x", 0, true),
            record(10, "x", 1, true),
        ];
        let found = of_run("r", &records).unwrap();
        let benchmark = &found.benchmarks[0];
        assert_eq!(benchmark.steps, [Some(5), Some(10)]);
        assert_eq!(benchmark.results.iter().map(|row| row.avg.value).collect::<Vec<_>>(), [0.75, 1.0]);
        let shares: Vec<_> = benchmark.questions.iter().map(|q| q.shares.clone()).collect();
        assert_eq!(shares, [vec![Some(0.5), Some(1.0)], vec![Some(1.0), None]]);
    }
}
