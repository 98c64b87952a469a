//! Experiments: a matrix of runs from one file, and the summary of the runs.
//!
//! Arms differ only by the settings that the file gives to them: for the same seed, all arms see the same problems in
//! the same order and sample with the same random numbers.

use crate::config::{Config, Plan};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use stapo_core::record::{Arm, Experiment, Extra, Metrics, SCHEMA};
use stapo_core::settings;
use stapo_core::stats::{
    Estimate, PairedComparison, Resampling, StatsError, area_under_curve, compare_by_seed, entropy_stability,
    mean_estimate,
};
use toml::{Table, Value};

/// An experiment as written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExperimentSpec {
    pub name: String,
    pub seeds: Vec<u64>,
    /// The name of the proposed arm, with which the others are compared; the first arm where absent.
    pub method: Option<String>,
    /// The training config that all arms share.
    #[serde(default)]
    pub config: Table,
    pub arms: Vec<ArmSpec>,
    /// Keys with a list of values each. Every arm runs with every combination of values.
    #[serde(default)]
    pub matrix: Table,
    /// `KEY=VALUE` each, for all arms; an arm's own settings are applied after these.
    #[serde(skip)]
    pub overrides: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArmSpec {
    pub name: String,
    /// `KEY=VALUE` each.
    #[serde(default)]
    pub set: Vec<String>,
}

impl ExperimentSpec {
    pub fn from_toml(text: &str) -> Result<Self> {
        let table = settings::parse(text).map_err(crate::config::PlanError::from)?;
        let spec: Self = settings::read("experiment", table).map_err(crate::config::PlanError::from)?;
        let refuse =
            |key, problem: &str, remedy| Err(Error::Misfit { key, problem: problem.to_string(), remedy });
        if spec.seeds.is_empty() || spec.arms.is_empty() {
            return refuse(
                "seeds, arms",
                "expected at least one of each",
                "seeds = [0, 1, 2], [[arms]] name = \"stapo\"",
            );
        }
        if let Some(method) = spec.method.as_ref().filter(|m| !spec.arms.iter().any(|arm| arm.name == **m)) {
            return refuse("method", &format!("{method} is no arm"), "name one of the arms, or leave it out");
        }
        Ok(spec)
    }

    /// The config that all arms share, as TOML.
    pub fn config_text(&self) -> String {
        self.config.to_string()
    }

    /// Every arm with every seed. The config of each is checked, so that a wrong value is found before the first run.
    pub fn expand(&self) -> Result<Experiment> {
        let mut arms = Vec::new();
        for arm in &self.arms {
            for combination in self.combinations()? {
                let name = [std::slice::from_ref(&arm.name), &combination[..]].concat().join(",");
                for &seed in &self.seeds {
                    let mut settings = [&self.overrides[..], &arm.set[..], &combination[..]].concat();
                    settings.extend([format!("seed={seed}"), format!("name={}", folder_name(&name))]);
                    let config = Config::from_toml(&self.config_text(), settings.iter().map(String::as_str));
                    Plan::resolve(config.map_err(crate::config::PlanError::from)?)?;
                    let run = format!("{}/seed-{seed}", folder_name(&name));
                    arms.push(Arm { name: name.clone(), seed, run, settings, error: None });
                }
            }
        }
        let method = self.method.clone();
        Ok(Experiment { schema: SCHEMA, name: self.name.clone(), method, arms, extra: Extra::new() })
    }

    fn combinations(&self) -> Result<Vec<Vec<String>>> {
        let mut all = vec![Vec::new()];
        for (key, values) in &self.matrix {
            let Value::Array(values) = values else {
                let problem = format!("{key} is not a list");
                return Err(Error::Misfit { key: "matrix", problem, remedy: "\"KEY\" = [VALUE, VALUE]" });
            };
            all = all
                .iter()
                .flat_map(|before| values.iter().map(move |value| (before, value)))
                .map(|(before, value)| [&before[..], &[format!("{key}={value}")]].concat())
                .collect();
        }
        Ok(all)
    }
}

fn folder_name(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    name.chars().map(plain).collect()
}

/// What one arm's runs say together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ArmSummary {
    pub name: String,
    /// Seeds whose run is complete.
    pub n_runs: usize,
    /// Last held-out accuracy, over seeds.
    pub accuracy: Estimate,
    /// Mean height of the held-out accuracy curve.
    pub area: Estimate,
    /// -max |dH| between steps, nats.
    pub entropy_stability: Estimate,
    pub entropy_last: Estimate,
    pub silenced_share: Estimate,
    /// Seeds whose entropy or accuracy broke down.
    pub n_collapsed: usize,
    /// The method minus this arm in last accuracy, paired by seed; absent for the method itself and below two seeds.
    pub against: Option<PairedComparison>,
    /// Its permutation p value, adjusted over arms (Holm).
    pub p_adjusted: Option<f64>,
}

/// Numbers of one finished run.
struct RunNumbers {
    seed: u64,
    accuracy: f64,
    area: f64,
    stability: f64,
    entropy_last: f64,
    silenced_share: f64,
    is_collapsed: bool,
}

/// The summary of every arm; `runs` holds each arm's finished seeds with their metrics. The first arm is the method's
/// where none is named.
pub fn summarise(
    experiment: &Experiment,
    runs: &[(String, u64, Vec<Metrics>)],
) -> std::result::Result<Vec<ArmSummary>, StatsError> {
    let names = experiment.arm_names();
    let method = experiment.method.as_deref().or(names.first().copied()).unwrap_or_default();
    let numbers_of = |name: &str| -> std::result::Result<Vec<RunNumbers>, StatsError> {
        let own = runs.iter().filter(|(arm, _, metrics)| arm == name && !metrics.is_empty());
        own.map(|(_, seed, metrics)| numbers(*seed, metrics)).collect()
    };
    let best = numbers_of(method)?;
    let accuracies =
        |runs: &[RunNumbers]| runs.iter().map(|run| (run.seed, run.accuracy)).collect::<Vec<_>>();
    let (mut summaries, mut compared, mut results) = (Vec::<ArmSummary>::new(), Vec::new(), Vec::new());
    for name in names {
        let own = numbers_of(name)?;
        if own.is_empty() {
            continue;
        }
        let over = |of: &dyn Fn(&RunNumbers) -> f64| mean_estimate(&own.iter().map(of).collect::<Vec<_>>());
        summaries.push(ArmSummary {
            name: name.to_string(),
            n_runs: own.len(),
            accuracy: over(&|run| run.accuracy)?,
            area: over(&|run| run.area)?,
            entropy_stability: over(&|run| run.stability)?,
            entropy_last: over(&|run| run.entropy_last)?,
            silenced_share: over(&|run| run.silenced_share)?,
            n_collapsed: own.iter().filter(|run| run.is_collapsed).count(),
            against: None,
            p_adjusted: None,
        });
        if name != method {
            compared.push(summaries.len() - 1);
            results.push(accuracies(&own));
        }
    }
    let against = compare_by_seed(&accuracies(&best), &results, &Resampling::default())?;
    for (idx, against) in compared.into_iter().zip(against) {
        summaries[idx].p_adjusted = against.as_ref().map(|found| found.p_adjusted);
        summaries[idx].against = against.map(|found| found.paired);
    }
    Ok(summaries)
}

/// Accuracy below half its best, or entropy below a twentieth or above ten times its first: the run broke down.
const LOST_ACCURACY: f64 = 0.5;
const LOST_ENTROPY: f64 = 0.05;
const RUNAWAY_ENTROPY: f64 = 10.0;

fn numbers(seed: u64, metrics: &[Metrics]) -> std::result::Result<RunNumbers, StatsError> {
    let entropies: Vec<f64> = metrics.iter().map(|m| m.entropy_mean).collect();
    let before = metrics.first().and_then(|m| m.eval_accuracy_before).map(|accuracy| (0.0, accuracy));
    let measured = metrics.iter().filter_map(|m| m.eval_accuracy.map(|accuracy| (m.step as f64, accuracy)));
    let (steps, accuracies): (Vec<f64>, Vec<f64>) = before.into_iter().chain(measured).unzip();
    let accuracy = accuracies.last().copied().unwrap_or(f64::NAN);
    let best = accuracies.iter().copied().fold(0.0, f64::max);
    let span = steps.last().zip(steps.first()).map_or(0.0, |(last, first)| last - first);
    let area = if span > 0.0 { area_under_curve(&steps, &accuracies)? / span } else { accuracy };
    let (first, last) = (entropies[0], entropies[entropies.len() - 1]);
    let n_tokens: usize = metrics.iter().map(|m| m.n_tokens).sum();
    let n_silenced: usize = metrics.iter().map(|m| m.n_silenced).sum();
    Ok(RunNumbers {
        seed,
        accuracy,
        area,
        stability: if entropies.len() < 2 { 0.0 } else { entropy_stability(&entropies)? },
        entropy_last: last,
        silenced_share: n_silenced as f64 / n_tokens.max(1) as f64,
        is_collapsed: accuracy < LOST_ACCURACY * best
            || last < LOST_ENTROPY * first
            || last > RUNAWAY_ENTROPY * first,
    })
}

#[cfg(test)]
mod tests;
