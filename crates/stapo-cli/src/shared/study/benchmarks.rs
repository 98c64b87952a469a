//! Benchmarks from evaluation records: avg@k with intervals clustered by question.

use super::headline::Standings;
use super::table::{Table, slug, text};
use super::{RunData, Study};
use crate::shared::chart::{Bar, BarGroup, Bars, Figure, Ink};
use anyhow::Result;
use stapo_core::Verdict;
use stapo_core::record::EvalRecord;
use stapo_core::stats::{Estimate, QuestionCount, avg_at_k};
use std::collections::{BTreeMap, BTreeSet};

/// Results of one arm on one benchmark under one decoding.
#[derive(Debug)]
pub struct BenchmarkScore {
    pub arm: usize,
    pub decoding: String,
    pub benchmark: String,
    pub avg: Estimate,
    /// Samples per question in one run; the smallest number if questions differ.
    pub k: usize,
    pub truncated: f64,
    pub no_answer: f64,
    pub unparsable: f64,
    pub n_tokens_mean: f64,
}

/// The samples of an arm: the last evaluation of each run. A sample that is recorded twice, by an evaluation that was
/// resumed, counts once.
fn samples(runs: &[RunData]) -> BTreeMap<(usize, &str, &str, &str, usize), &EvalRecord> {
    let mut samples = BTreeMap::new();
    for (idx, run) in runs.iter().enumerate() {
        let mut newest: BTreeMap<(&str, &str), Option<u64>> = BTreeMap::new();
        for e in &run.evals {
            let step = newest.entry((&e.decoding, &e.benchmark)).or_default();
            *step = (*step).max(e.step);
        }
        for e in run.evals.iter().filter(|e| e.step == newest[&(e.decoding.as_str(), e.benchmark.as_str())]) {
            samples.insert(
                (idx, e.decoding.as_str(), e.benchmark.as_str(), e.problem_id.as_str(), e.sample_idx),
                e,
            );
        }
    }
    samples
}

/// One score per arm, decoding and benchmark. The seeds of an arm add samples to its questions; intervals are clustered
/// by question.
pub fn scores(study: &Study) -> Result<Vec<BenchmarkScore>> {
    let mut scores = Vec::new();
    for (arm_idx, arm) in study.arms.iter().enumerate() {
        let mut grouped: BTreeMap<(&str, &str), Vec<(usize, &EvalRecord)>> = BTreeMap::new();
        for ((run, decoding, benchmark, _, _), record) in samples(&arm.runs) {
            grouped.entry((decoding, benchmark)).or_default().push((run, record));
        }
        for ((decoding, benchmark), records) in grouped {
            scores.push(score(arm_idx, decoding, benchmark, &records)?);
        }
    }
    Ok(scores)
}

fn score(
    arm: usize,
    decoding: &str,
    benchmark: &str,
    samples: &[(usize, &EvalRecord)],
) -> Result<BenchmarkScore> {
    let mut questions: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    let mut of_run: BTreeMap<(usize, &str), usize> = BTreeMap::new();
    let records: Vec<&EvalRecord> = samples.iter().map(|(_, record)| *record).collect();
    for (run, record) in samples {
        *of_run.entry((*run, &record.problem_id)).or_default() += 1;
    }
    for record in &records {
        let (n, n_right) = questions.entry(&record.problem_id).or_default();
        *n += 1;
        *n_right += usize::from(record.verdict == Verdict::Right);
    }
    let counts: Vec<QuestionCount> =
        questions.values().map(|&(n, n_right)| QuestionCount::new(n, n_right)).collect::<Result<_, _>>()?;
    let share = |is: &dyn Fn(&EvalRecord) -> bool| {
        records.iter().filter(|r| is(r)).count() as f64 / records.len().max(1) as f64
    };
    Ok(BenchmarkScore {
        arm,
        decoding: decoding.to_string(),
        benchmark: benchmark.to_string(),
        avg: avg_at_k(&counts)?,
        k: of_run.values().copied().min().unwrap_or(0),
        truncated: share(&|r| r.is_truncated()),
        no_answer: share(&|r| r.verdict == Verdict::NoAnswer),
        unparsable: share(&|r| r.verdict == Verdict::Unparsable),
        n_tokens_mean: records.iter().map(|r| r.n_tokens as f64).sum::<f64>() / records.len().max(1) as f64,
    })
}

fn names(scores: &[BenchmarkScore], name: fn(&BenchmarkScore) -> &str) -> Vec<String> {
    let names: BTreeSet<&str> = scores.iter().map(name).collect();
    names.into_iter().map(String::from).collect()
}

/// One figure of bars per decoding.
pub fn figures(study: &Study, scores: &[BenchmarkScore]) -> Vec<Figure> {
    let benchmarks = names(scores, |s| &s.benchmark);
    let figure = |decoding: String| {
        let arms: Vec<usize> = (0..study.arms.len())
            .filter(|arm| scores.iter().any(|s| s.arm == *arm && s.decoding == decoding))
            .collect();
        let bar = |benchmark: &str, arm: usize| {
            let found =
                scores.iter().find(|s| s.arm == arm && s.decoding == decoding && s.benchmark == benchmark)?;
            let percent = |value: f64| 100.0 * value;
            let hover = format!(
                "{}, {benchmark}\navg@{} {:.1} %, {} questions\n{}",
                study.arms[arm].name,
                found.k,
                percent(found.avg.value),
                found.avg.n_questions,
                found.avg.interval.map_or("one question has no interval".to_string(), |i| format!(
                    "95 %: {:.1} to {:.1}",
                    percent(i.low),
                    percent(i.high)
                ))
            );
            let interval = found.avg.interval.map(|i| (percent(i.low), percent(i.high)));
            Some(Bar { value: percent(found.avg.value), interval, hover })
        };
        let group = |benchmark: &String| BarGroup {
            label: benchmark.clone(),
            bars: arms.iter().map(|&arm| bar(benchmark, arm)).collect(),
        };
        let series = arms
            .iter()
            .map(|&arm| (study.arms[arm].name.clone(), Ink::Series(study.arms[arm].series)))
            .collect();
        Figure {
            name: format!("benchmarks-{}", slug(&decoding)),
            title: format!("Benchmarks, {decoding}"),
            note: "avg@k, % · 95 % interval clustered by question".into(),
            scene: Bars { series, groups: benchmarks.iter().map(group).collect() }.draw(),
        }
    };
    names(scores, |s| &s.decoding).into_iter().map(figure).collect()
}

pub fn table(study: &Study, scores: &[BenchmarkScore]) -> Table {
    let titles = [
        "benchmark",
        "arm",
        "#avg@k, % (95 % interval)",
        "#k",
        "#questions",
        "decoding",
        "#truncated, %",
        "#no answer, %",
        "#unparsable, %",
        "#response tokens",
    ];
    let mut table = Table::new("benchmarks", &titles);
    for s in scores {
        let percent = |share: f64| text(format!("{:.1}", 100.0 * share));
        let interval = s
            .avg
            .interval
            .map_or(String::new(), |i| format!(" ({:.1} to {:.1})", 100.0 * i.low, 100.0 * i.high));
        table.push(vec![
            text(&s.benchmark),
            text(&study.arms[s.arm].name),
            text(format!("{:.1}{interval}", 100.0 * s.avg.value)),
            text(s.k.to_string()),
            text(s.avg.n_questions.to_string()),
            text(&s.decoding),
            percent(s.truncated),
            percent(s.no_answer),
            percent(s.unparsable),
            text(format!("{:.0}", s.n_tokens_mean)),
        ]);
    }
    table
}

/// Averages over benchmarks by decoding; `None` unless the study has a method and every arm has every benchmark.
pub fn standings(study: &Study, scores: &[BenchmarkScore]) -> Option<Standings> {
    let method = study.method?;
    let benchmarks = names(scores, |s| &s.benchmark);
    let average = |decoding: &str, arm: usize| {
        let of_arm = scores.iter().filter(|s| s.arm == arm && s.decoding == decoding);
        let values: Vec<f64> = of_arm.map(|s| 100.0 * s.avg.value).collect();
        (values.len() == benchmarks.len()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    let rows: Option<Vec<(String, Vec<f64>)>> = names(scores, |s| &s.decoding)
        .into_iter()
        .map(|decoding| {
            let averages: Option<Vec<f64>> =
                (0..study.arms.len()).map(|arm| average(&decoding, arm)).collect();
            averages.map(|averages| (decoding, averages))
        })
        .collect();
    let methods = study.arms.iter().map(|arm| arm.name.clone()).collect();
    rows.filter(|rows| !rows.is_empty() && study.arms.len() > 1).map(|rows| Standings {
        methods,
        method,
        rows,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn sample(question: &str, idx: usize, verdict: &str, n_tokens: usize, is_cut: bool) -> EvalRecord {
        let finish =
            if is_cut { json!({"kind": "length_limit"}) } else { json!({"kind": "stop", "token": 2}) };
        serde_json::from_value(json!({
            "schema": 1, "benchmark": "b", "decoding": "d", "problem_id": question, "sample_idx": idx, "text": "x",
            "n_tokens": n_tokens, "finish": finish, "answer": null, "verdict": verdict, "reason": "made up",
        }))
        .unwrap()
    }

    #[test]
    fn a_score_counts_right_samples_by_question_and_how_responses_ended() {
        let records = [
            sample("q", 0, "right", 10, false),
            sample("q", 1, "right", 20, false),
            sample("r", 0, "no_answer", 30, true),
            sample("r", 1, "unparsable", 60, false),
            sample("r", 2, "no_answer", 80, false),
        ];
        let samples: Vec<(usize, &EvalRecord)> = records.iter().map(|record| (0, record)).collect();
        let found = score(3, "d", "b", &samples).unwrap();
        assert_eq!((found.arm, found.k, found.n_tokens_mean), (3, 2, 40.0));
        assert_eq!([found.truncated, found.no_answer, found.unparsable], [0.2, 0.4, 0.2]);
        // A prompt without room for a response is not asked, which is no cut response.
        let refused = sample("s", 0, "no_answer", 0, true);
        let with_refused: Vec<_> = samples.iter().copied().chain([(0, &refused)]).collect();
        assert_eq!(score(3, "d", "b", &with_refused).unwrap().truncated, 1.0 / 6.0);
        assert_eq!((found.avg.value, found.avg.n_questions), (0.5, 2));
    }

    /// Each benchmark has its last evaluation; a sample that was recorded twice counts as it was recorded last.
    #[test]
    fn the_last_evaluation_of_each_benchmark_counts_and_a_sample_once() {
        let at = |step: u64, benchmark: &str, verdict: &str| {
            let record = EvalRecord { step: Some(step), ..sample("q", 0, verdict, 5, false) };
            EvalRecord { benchmark: benchmark.into(), ..record }
        };
        let mut run = crate::shared::study::tests::run("s/a", &[], Vec::new());
        run.evals =
            vec![at(10, "b", "wrong"), at(10, "b", "right"), at(5, "c", "right"), at(5, "b", "wrong")];
        let kind = crate::shared::study::StudyKind::Run;
        let study = crate::shared::study::tests::study(kind, vec![("a", vec![run])]);
        let found = scores(&study).unwrap();
        let shown: Vec<_> =
            found.iter().map(|s| (s.benchmark.as_str(), s.avg.value, s.avg.n_samples)).collect();
        assert_eq!(shown, [("b", 1.0, 1), ("c", 1.0, 1)]);
    }
}
