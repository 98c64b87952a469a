//! Evaluations on benchmarks during training.

use super::{
    Benchmark, Decoding, Done, EvalEvent, EvalSampling, Evaluation, QuestionStyle, SIX, rows, sample_key,
};
use crate::error::{Error, Result};
use crate::plan::config::{HELD_OUT, Plan};
use crate::ranks::{RankError, Transport};
use crate::reward::Programs;
use crate::rollout::Sampler;
use stapo_core::record::{self, BenchmarkScore, EvalRecord, Metrics, Record};
use std::collections::BTreeMap;

/// Warnings about benchmarks whose questions are not those of the run's last evaluation on them.
pub(crate) fn changed_questions(benchmarks: &[Benchmark], history: &[Metrics]) -> Vec<String> {
    let changed = benchmarks.iter().filter_map(|benchmark| {
        let scored = history.iter().rev().find_map(|m| Some((m.step, m.benchmarks.get(&benchmark.name)?)));
        let (step, score) = scored?;
        let is_same = score.sha256.as_ref() == benchmark.input.as_ref().map(|input| &input.sha256);
        (!is_same).then(|| format!("benchmark {}: its questions changed after step {step}", benchmark.name))
    });
    changed.collect()
}

/// One evaluation of a policy during training.
#[derive(Debug, Clone, PartialEq)]
pub struct Evaluated {
    /// Share of right answers on held-out problems of the task; `None` if it has none.
    pub held_out: Option<f64>,
    /// By the name of the benchmark.
    pub benchmarks: BTreeMap<String, BenchmarkScore>,
}

/// Opens the benchmarks of a plan. A file that is missing is an error that names the command that fetches it.
pub fn open_benchmarks(plan: &Plan, programs: Programs) -> Result<Vec<Benchmark>> {
    let evaluation = &plan.config.evaluation;
    let names: Vec<String> = evaluation.benchmarks.iter().flat_map(|name| expanded(name)).collect();
    let template = evaluation.benchmark_template.as_deref();
    let style = QuestionStyle { template, chat: plan.style.chat, ..QuestionStyle::default() };
    let mut benchmarks = Benchmark::open_all(&names, &evaluation.benchmark_data, style)?;
    for benchmark in &mut benchmarks {
        benchmark.limit(evaluation.benchmark_limit, evaluation.benchmark_samples)?;
        // Tools serve every problem; another environment plays the problems of its task alone.
        let tools = plan.config.environment.as_ref().filter(|environment| !environment.judges());
        benchmark.equip(None, tools, programs)?;
    }
    let best = &evaluation.best;
    let is_there = [HELD_OUT, "none"].contains(&best.as_str()) || benchmarks.iter().any(|b| b.name == *best);
    if !is_there {
        return Err(Error::Benchmark {
            name: best.clone(),
            problem: "named by evaluation.best, and not one of evaluation.benchmarks".into(),
            remedy: "add it there, or set evaluation.best=held_out".into(),
        });
    }
    Ok(benchmarks)
}

/// The benchmarks that a name stands for: `all` stands for the six of the paper.
pub fn expanded(name: &str) -> Vec<String> {
    if name == "all" { SIX.map(String::from).to_vec() } else { vec![name.to_string()] }
}

/// Evaluates the policy after `step` training steps as training samples: at the temperature and up to the length of
/// rollouts. Two evaluations of a run differ by the policy alone. Returns the scores and all samples, in an order that
/// depends on their names alone.
pub(crate) fn evaluate_benchmarks(
    sampler: &mut Sampler,
    benchmarks: &[Benchmark],
    step: u64,
) -> Result<(BTreeMap<String, BenchmarkScore>, Vec<EvalRecord>)> {
    if benchmarks.is_empty() {
        return Ok((BTreeMap::new(), Vec::new()));
    }
    let Sampler { model, memory, plan, ranks, meter, abandon, .. } = sampler;
    let rollout = &plan.config.rollout;
    let sampling = EvalSampling {
        seed: plan.config.seed,
        max_tokens: rollout.max_response_tokens,
        style: &plan.style,
        kv_bytes: memory.kv_bytes,
        step_rows: memory.step_rows,
        share: (ranks.rank(), ranks.world()),
        step: Some(step),
        episode: &plan.episode(),
    };
    let decodings = &[Decoding::drawn(rollout.temperature, 1.0)];
    let mut samples = Vec::new();
    let evaluation = Evaluation { model, benchmarks, decodings, sampling, done: &Done::new() };
    evaluation.run(&mut memory.engine, |event| {
        match event {
            EvalEvent::Asked | EvalEvent::Waits => {}
            EvalEvent::Token => meter.add(0, 1),
            EvalEvent::Finished(sample) => {
                meter.add(1, 0);
                samples.push(*sample);
            }
        }
        Ok(abandon.signal().is_none())
    })?;
    abandon.agree(*ranks)?;
    if ranks.world() > 1 {
        samples = all_samples(*ranks, &samples)?;
    }
    samples.sort_by_cached_key(sample_key);
    let unusable = |problem: String| Error::Benchmark {
        name: "of evaluation.benchmarks".into(),
        problem,
        remedy: "look at the samples in benchmarks/ of the run".into(),
    };
    let table = rows(&samples).map_err(|error| unusable(error.to_string()))?;
    let scores = table.into_iter().map(|row| {
        let input = benchmarks.iter().find(|benchmark| benchmark.name == row.benchmark);
        let score = BenchmarkScore {
            accuracy: row.avg.value,
            standard_error: row.avg.standard_error,
            n_questions: row.n_questions,
            n_samples: row.n_samples,
            sha256: input.and_then(|benchmark| Some(benchmark.input.as_ref()?.sha256.clone())),
        };
        (row.benchmark, score)
    });
    Ok((scores.collect(), samples))
}

/// The samples of all ranks.
fn all_samples(ranks: &dyn Transport, own: &[EvalRecord]) -> Result<Vec<EvalRecord>> {
    let lines: String = own.iter().map(Record::to_line).collect();
    let mut all = Vec::new();
    for (rank, bytes) in ranks.all_gather(lines.as_bytes())?.iter().enumerate() {
        let unreadable = |problem: String| RankError { rank, problem };
        let text = std::str::from_utf8(bytes).map_err(|error| unreadable(error.to_string()))?;
        let samples =
            record::parse_lines::<EvalRecord>(text).map_err(|error| unreadable(error.to_string()))?;
        all.extend(samples.records);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::config::Config;
    use crate::testing::metrics;
    use stapo_core::record::FileHash;

    #[test]
    fn the_benchmark_of_the_best_evaluation_is_one_that_is_evaluated() {
        let folder = tempfile::tempdir().unwrap();
        for name in SIX {
            let row = "{\"problem\": \"1+1=\", \"answer\": \"2\"}\n";
            std::fs::write(folder.path().join(format!("{name}.jsonl")), row).unwrap();
        }
        let open = |best: &str| {
            let data = format!("evaluation.benchmark_data={:?}", folder.path());
            let set = ["evaluation.benchmarks=[\"all\"]", &data, &format!("evaluation.best={best}")];
            let plan = Plan::resolve(Config::from_toml("", set).unwrap()).unwrap();
            open_benchmarks(&plan, Programs::Never)
        };
        for best in ["held_out", "none", "minerva"] {
            let names: Vec<String> =
                open(best).unwrap().into_iter().map(|benchmark| benchmark.name).collect();
            assert_eq!(names, SIX, "{best}");
        }
        let said = open("gsm8k").err().unwrap().to_string();
        assert!(said.contains("gsm8k: named by evaluation.best"), "{said}");
    }

    #[test]
    fn questions_are_compared_with_those_of_the_last_evaluation_on_them() {
        let mut benchmark =
            Benchmark::open("arithmetic", std::path::Path::new("nowhere"), QuestionStyle::default()).unwrap();
        benchmark.input = Some(FileHash { name: "b".into(), n_bytes: 1, sha256: "b".into() });
        let step = |step, sha256: Option<&str>| {
            let mut metrics = metrics(step, 0.5, 0.3);
            let score = BenchmarkScore {
                accuracy: 0.5,
                standard_error: None,
                n_questions: 1,
                n_samples: 1,
                sha256: sha256.map(str::to_string),
            };
            metrics.benchmarks.insert("arithmetic".into(), score);
            metrics
        };
        let said = |history: &[Metrics]| changed_questions(std::slice::from_ref(&benchmark), history);
        let unevaluated = metrics(3, 0.5, 0.3);
        assert!(said(&[]).is_empty() && said(std::slice::from_ref(&unevaluated)).is_empty());
        assert!(said(&[step(1, Some("a")), step(2, Some("b")), unevaluated.clone()]).is_empty());
        let expected = ["benchmark arithmetic: its questions changed after step 2"];
        assert_eq!(said(&[step(1, Some("b")), step(2, Some("a")), unevaluated]), expected);
        assert_eq!(said(&[step(2, None)]), expected, "questions that were generated");
    }
}
