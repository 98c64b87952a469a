//! `--power`: the difference between two arms that the seeds and questions of an experiment can detect.

use anyhow::Result;
use stapo_core::stats::PairedDesign;
use stapo_rl::Config;
use stapo_rl::lab::evaluation::{Benchmark, KNOWN, OTHER_SAMPLES, expanded};
use stapo_rl::lab::experiment::ArmRuns;
use stapo_rl::reward::Programs;
use stapo_rl::tasks::Task;

/// Standard deviations, in points, that a difference between two arms of a seed may have beyond the chance of sampling.
const ASSUMED_SPREADS: [f64; 4] = [0.0, 1.0, 2.0, 4.0];

/// Prints what a paired t test over the seeds finds with a power of 80 % at the 5 % level: for assumed spreads of runs, and for
/// the spread of the runs that have ended.
pub fn print(config: &Config, n_seeds: usize, runs: &[ArmRuns], method: &str) -> Result<()> {
    for line in lines(&questions(config)?, n_seeds, measured_deviation(runs, method))? {
        println!("{line}");
    }
    Ok(())
}

fn lines(asked: &[Questions], n_seeds: usize, measured: Option<f64>) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    for Questions { name, n_problems, n_answers } in asked {
        let seeds = if n_seeds == 1 { "seed" } else { "seeds" };
        lines.push(format!(
            "{name}, {n_seeds} {seeds}, {n_problems} problems, {n_answers} answers in each evaluation"
        ));
        if n_seeds < 2 {
            continue;
        }
        lines.push(
            "detectable with a power of 80 % at the 5 % level, by a t test of the differences between two arms of one seed:"
                .to_string(),
        );
        lines.push(format!(
            "{:>34}  {:>29}",
            "standard deviation of runs, points", "detectable difference, points"
        ));
        for spread in ASSUMED_SPREADS {
            let note = if spread == 0.0 { "  (chance of sampling alone)" } else { "" };
            let found = detectable(spread / 100.0, n_seeds, chance(*n_answers))?;
            lines.push(format!("{spread:>34.1}  {found:>29.1}{note}"));
        }
    }
    if n_seeds < 2 {
        lines.push("one seed detects nothing: a paired test needs at least two".to_string());
    } else if let Some(measured) = measured {
        let found = detectable(measured, n_seeds, 0.0)?;
        lines.push(format!(
            "measured in the runs that have ended: differences of held-out accuracy deviate by {:.1} points, detectable {found:.1}",
            100.0 * measured
        ));
    }
    Ok(lines)
}

/// What an evaluation asks.
#[derive(Debug, PartialEq)]
struct Questions {
    name: String,
    n_problems: usize,
    n_answers: usize,
}

/// The held-out problems of the task, if it holds any out, and the benchmarks.
fn questions(config: &Config) -> Result<Vec<Questions>> {
    let evaluation = &config.evaluation;
    let mut found = Vec::new();
    if config.task.held_out_share() > 0.0 {
        let opened = Task::open_with(&config.task, Programs::Never);
        let n_problems = match opened {
            Ok(task) => task.held_out(evaluation.problems).len(),
            Err(error) => {
                eprintln!("note: {error}; all of evaluation.problems are taken as there");
                evaluation.problems
            }
        };
        let n_answers = n_problems * evaluation.samples;
        found.push(Questions { name: "held-out accuracy".into(), n_problems, n_answers });
    }
    for name in evaluation.benchmarks.iter().flat_map(|name| expanded(name)) {
        let known = KNOWN.iter().find(|known| known.name == name);
        let n_questions = match known {
            Some(known) => known.n_questions,
            None => Benchmark::n_questions(&name, &evaluation.benchmark_data)?,
        };
        let n_problems = n_questions.min(evaluation.benchmark_limit.unwrap_or(usize::MAX));
        let n_samples =
            evaluation.benchmark_samples.unwrap_or(known.map_or(OTHER_SAMPLES, |known| known.n_samples));
        found.push(Questions { name, n_problems, n_answers: n_problems * n_samples });
    }
    Ok(found)
}

/// The variance of an accuracy by sampling. Answers are taken as independent with an accuracy of one half, at which chance is
/// largest.
fn chance(n_answers: usize) -> f64 {
    0.25 / n_answers.max(1) as f64
}

/// In points.
fn detectable(spread: f64, n_seeds: usize, chance: f64) -> Result<f64> {
    Ok(100.0 * design(spread * spread, chance).minimum_detectable_effect(n_seeds as u64)?)
}

/// The seeds are the questions of the design: each gives one difference.
fn design(effect_variance: f64, within: f64) -> PairedDesign {
    PairedDesign {
        effect_variance,
        within_a: within,
        within_b: within,
        samples_a: 1.0,
        samples_b: 1.0,
        alpha: PairedDesign::ALPHA,
        power: PairedDesign::POWER,
    }
}

/// The standard deviation of last held-out accuracies between the method and another arm of the same seed, pooled over the arms
/// that share at least two seeds with the method.
fn measured_deviation(runs: &[ArmRuns], method: &str) -> Option<f64> {
    let last = |arm: &ArmRuns, seed: u64| {
        let run = arm.runs.iter().find(|run| run.seed == seed)?;
        run.metrics.iter().rev().find_map(|metrics| metrics.eval_accuracy)
    };
    let method = runs.iter().find(|arm| arm.name == method)?;
    let (mut squares, mut freedom) = (0.0, 0);
    for arm in runs.iter().filter(|arm| arm.name != method.name) {
        let seeds = method.runs.iter().map(|run| run.seed);
        let differences: Vec<f64> =
            seeds.filter_map(|seed| Some(last(method, seed)? - last(arm, seed)?)).collect();
        let mean = differences.iter().sum::<f64>() / differences.len().max(1) as f64;
        squares += differences.iter().map(|difference| (difference - mean).powi(2)).sum::<f64>();
        freedom += differences.len().saturating_sub(1);
    }
    (freedom > 0).then(|| (squares / freedom as f64).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use stapo_core::record::Metrics;
    use stapo_rl::lab::experiment::SeedRun;
    use stapo_rl::plan::config::CanaryConfig;

    #[test]
    fn benchmarks_count_with_their_questions_and_a_task_without_held_out_problems_does_not() {
        let config = |settings: &[&str]| Config::from_toml("", settings.iter().copied()).unwrap();
        let asked = |settings: &[&str]| questions(&config(settings)).unwrap();
        let expected =
            |name: &str, n_problems, n_answers| Questions { name: name.into(), n_problems, n_answers };
        let few = ["evaluation.problems=64", "evaluation.samples=2"];
        assert_eq!(asked(&few), [expected("held-out accuracy", 64, 128)]);
        let benchmarks = ["evaluation.benchmarks=[\"gsm8k\",\"mbpp\"]", "evaluation.benchmark_samples=2"];
        let only =
            [&benchmarks[..], &["evaluation.benchmark_limit=1000", "task.held_out_share=0.0"]].concat();
        assert_eq!(asked(&only), [expected("gsm8k", 1000, 2000), expected("mbpp", 500, 1000)]);
    }

    /// With five seeds a paired t test has a power of 80 % at 1.6820 standard deviations (SciPy 1.17.1, non-central t).
    #[test]
    fn the_detectable_difference_is_that_of_a_paired_t_test() {
        let exact = detectable(0.01, 5, 0.0).unwrap();
        assert!((exact - 1.6820).abs() < 0.015, "{exact}");
        // 256 answers at one half deviate by 3.125 points in each arm.
        let by_chance = detectable(0.0, 5, chance(256)).unwrap();
        assert!((by_chance / exact - 3.125 * 2f64.sqrt()).abs() < 1e-9, "{by_chance}");
    }

    /// Two seeds are enough for a test, and one is not.
    #[test]
    fn spreads_are_listed_for_two_seeds_and_more() {
        let asked = [Questions { name: "a".into(), n_problems: 64, n_answers: 256 }];
        let shown = |n_seeds, measured| lines(&asked, n_seeds, measured).unwrap();
        let one = shown(1, Some(0.1));
        assert!(one.len() == 2 && one[0].starts_with("a, 1 seed, 64 problems"), "{one:?}");
        assert!(one[1].starts_with("one seed detects nothing"), "{one:?}");
        assert_eq!((shown(2, None).len(), shown(2, Some(0.1)).len()), (7, 8));
        let five = shown(5, Some(0.01));
        let numbers: Vec<f64> =
            five[3..7].iter().map(|line| line.split_whitespace().nth(1).unwrap().parse().unwrap()).collect();
        // 1.68 deviations of the square root of two chances of 3.125 points and of the spread.
        let expected =
            ASSUMED_SPREADS.map(|spread| 1.682 * (2.0 * 3.125f64.powi(2) + spread * spread).sqrt());
        assert!(numbers.iter().zip(expected).all(|(a, b)| (a - b).abs() < 0.15), "{numbers:?} {expected:?}");
        assert!(five[7].contains("deviate by 1.0 points, detectable 1.7"), "{}", five[7]);
    }

    /// The last accuracy of each run counts. Differences of 0.1, 0.2 and 0.3 deviate by 0.1, and those of 0 and 0.2 have the
    /// squares 0.01 + 0.01: (0.02 + 0.02) / 3 together. One shared seed says nothing.
    #[test]
    fn the_measured_deviation_pools_the_arms_that_share_seeds_with_the_method() {
        let metrics = |step: u64, accuracy: Option<f64>| -> Metrics {
            serde_json::from_value(json!({
                "schema": 1, "step": step, "reward_mean": 0.0, "accuracy": 0.5, "eval_accuracy": accuracy,
                "response_tokens_mean": 30.0, "truncated_share": 0.0, "entropy_mean": 0.3,
                "entropy_quantiles": {"q05": 0.0, "q25": 0.0, "q50": 0.0, "q75": 0.0, "q95": 1.0}, "n_tokens": 1000,
                "n_kept": 999, "n_candidates": 2, "n_silenced": 1, "tau_h": null, "clip_fraction": 0.0,
                "ratio_min": 1.0, "ratio_max": 1.0, "loss": 0.0, "learning_rate": 1e-4, "gradient_norm": 1.0,
                "silenced_gradient_share": 0.0, "quadrants": [], "exactness_max_abs": 0.0,
                "tokens_per_second": {"rollout": 1.0, "update": 1.0}
            }))
            .unwrap()
        };
        let run = |last: f64| vec![metrics(1, Some(0.9)), metrics(2, Some(last)), metrics(3, None)];
        let accuracies: [(&str, &[f64]); 4] =
            [("a", &[0.5, 0.6, 0.7]), ("b", &[0.4, 0.4, 0.4]), ("c", &[0.5, 0.4]), ("d", &[0.1])];
        let arms =
            accuracies.map(|(name, last)| (name, last.iter().map(|last| run(*last)).collect::<Vec<_>>()));
        let canaries = CanaryConfig::default();
        let arms = arms.each_ref().map(|(name, runs)| {
            let runs = (0..).zip(runs).map(|(seed, metrics)| SeedRun { seed, metrics, canaries: &canaries });
            ArmRuns { name, runs: runs.collect() }
        });
        let found = measured_deviation(&arms, "a").unwrap();
        assert!((found - (0.04f64 / 3.0).sqrt()).abs() < 1e-12, "{found}");
        assert!(measured_deviation(&arms, "d").is_none(), "one shared seed has no spread");
        assert!(measured_deviation(&arms, "e").is_none());
    }

    /// The paper has 32 samples of a question of AIME and 4 of others; a benchmark of one's own has 4 too.
    #[test]
    fn a_benchmark_has_its_samples_unless_the_config_says_otherwise() {
        let folder = tempfile::tempdir().unwrap();
        let rows = (0..5).map(|n| json!({"problem": n.to_string(), "answer": "1"}).to_string());
        std::fs::write(folder.path().join("mine.jsonl"), rows.collect::<Vec<_>>().join("\n")).unwrap();
        let data = format!("evaluation.benchmark_data={:?}", folder.path());
        let mine = folder.path().join("mine.jsonl").display().to_string();
        let asked = |benchmarks: &str, more: &[&str]| {
            let benchmarks = format!("evaluation.benchmarks={benchmarks}");
            let settings = [&[benchmarks.as_str(), &data, "task.held_out_share=0.0"], more].concat();
            let config = Config::from_toml("", settings).unwrap();
            let found = questions(&config).unwrap().into_iter();
            found.map(|asked| (asked.n_problems, asked.n_answers)).collect::<Vec<_>>()
        };
        assert_eq!(asked("[\"aime24\", \"math500\"]", &[]), [(30, 960), (500, 2000)]);
        assert_eq!(asked(&format!("[{mine:?}]"), &[]), [(5, 20)]);
        assert_eq!(asked("[\"aime24\"]", &["evaluation.benchmark_limit=7"]), [(7, 224)]);
        let all = asked("[\"all\"]", &["evaluation.benchmark_samples=1"]);
        assert_eq!(all.iter().map(|(_, n)| n).sum::<usize>(), 30 + 30 + 40 + 500 + 272 + 674);
    }
}
