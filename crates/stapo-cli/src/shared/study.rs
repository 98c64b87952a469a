//! The subject of a report: one run, several runs, or the runs of an experiment, by arm and seed.

pub mod benchmarks;
pub mod differences;
pub mod headline;
pub mod summary;
pub mod table;

use crate::shared::chart::{Dash, SERIES};
use crate::shared::run_folder;
use crate::shared::run_status::has_ended;
use anyhow::{Context, Result, bail};
use stapo_core::record::{
    self, BuildRecord, EvalRecord, Event, Experiment, Manifest, Metrics, ResponseRecord, TokenRecord,
};
use stapo_rl::Plan;
use stapo_rl::lab::experiment::{
    ArmRuns, ExperimentSummary, Measure, SeedRun, held_out, split_arm, summarise,
};
use stapo_rl::run::{Run, check_tree, part_files, plan_text, read_events, records, responses_of_file};
use std::path::{Component, Path, PathBuf};

/// Arms with their runs.
#[derive(Debug)]
pub struct Study {
    pub name: String,
    /// The folder of the run or the experiment; for several runs the current one.
    pub folder: PathBuf,
    pub kind: StudyKind,
    /// The arm that the others are baselines for; of an experiment with a matrix the first of its settings.
    pub method: Option<usize>,
    /// The name of the arm whose last accuracy costs are measured to.
    pub reach: Option<String>,
    pub arms: Vec<ArmData>,
    /// Runs without a result, each with its reason.
    pub failed: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StudyKind {
    Run,
    /// Runs that were named one by one.
    Runs,
    Experiment,
}

#[derive(Debug)]
pub struct ArmData {
    pub name: String,
    /// Number of the arm's colour: 0 for the method, the others in order.
    pub series: usize,
    pub runs: Vec<RunData>,
}

impl ArmData {
    /// The name for a figure: of the matrix's keys the last part, as in `stapo, learning_rate=0.0003`.
    pub fn label(&self) -> String {
        let (method, settings) = split_arm(&self.name);
        let short = |setting: &str| match setting.split_once('=') {
            Some((key, value)) => format!(", {}={value}", key.rsplit('.').next().unwrap_or(key)),
            None => format!(",{setting}"),
        };
        settings
            .split(',')
            .filter(|part| !part.is_empty())
            .fold(method.to_string(), |label, part| label + &short(part))
    }
}

/// What a report reads of a run folder; responses are read when they are needed.
#[derive(Debug)]
pub struct RunData {
    pub folder: PathBuf,
    pub seed: u64,
    pub settings: Vec<String>,
    pub plan: Plan,
    pub plan_text: String,
    pub metrics: Vec<Metrics>,
    pub silenced: Vec<TokenRecord>,
    pub explored: Vec<TokenRecord>,
    pub evals: Vec<EvalRecord>,
    pub manifest: Option<Manifest>,
    pub events: Vec<Event>,
    pub build: Option<BuildRecord>,
}

impl Study {
    /// The study of one folder, or of several on one page. Runs whose plans differ in nothing but seed and name are the
    /// seeds of one arm.
    pub fn open_all(folders: &[PathBuf]) -> Result<Self> {
        if let [folder] = folders {
            return Self::open(folder);
        }
        let mut arms: Vec<ArmData> = Vec::new();
        let mut failed = Vec::new();
        for (idx, folder) in folders.iter().enumerate() {
            if folders[..idx].contains(folder) {
                bail!("run {}: named twice\nhint: name each run once", folder.display());
            }
            let study = Self::open(folder)?;
            failed.extend(study.failed);
            for arm in study.arms {
                let is_lone = study.kind == StudyKind::Run;
                let twin = arms.iter_mut().find(|other| {
                    is_lone && differences::are_seeds(&other.runs[0].plan_text, &arm.runs[0].plan_text)
                });
                match twin {
                    Some(twin) => twin.runs.extend(arm.runs),
                    None if is_lone => arms.push(arm),
                    None => arms.push(ArmData { name: format!("{}/{}", study.name, arm.name), ..arm }),
                }
            }
        }
        for idx in 0..arms.len() {
            arms[idx].series = idx;
            arms[idx].name = arm_name(&arms, idx);
        }
        Ok(Study {
            name: format!("{} runs", arms.iter().map(|arm| arm.runs.len()).sum::<usize>()),
            folder: PathBuf::new(),
            kind: StudyKind::Runs,
            method: None,
            reach: None,
            arms,
            failed,
        })
    }

    /// A folder with `experiment.json` is an experiment, every other one a run.
    pub fn open(folder: &Path) -> Result<Self> {
        if !folder.is_dir() {
            bail!("run {}: no such folder\nhint: `stapo runs` lists the runs here", folder.display());
        }
        check_tree(folder)?;
        let summary = folder.join("experiment.json");
        if summary.is_file() {
            let text =
                std::fs::read_to_string(&summary).with_context(|| format!("file {}", summary.display()))?;
            let experiment = record::parse(&text).with_context(|| format!("file {}", summary.display()))?;
            return Self::of_experiment(folder, &experiment);
        }
        let run = RunData::open(folder, Vec::new())?;
        let name =
            folder.file_name().map_or(run.plan.config.name.clone(), |n| n.to_string_lossy().into_owned());
        let arms = vec![ArmData { name: run.plan.config.name.clone(), series: 0, runs: vec![run] }];
        let folder = folder.to_owned();
        let kind = StudyKind::Run;
        Ok(Study { name, folder, kind, method: None, reach: None, arms, failed: Vec::new() })
    }

    fn of_experiment(folder: &Path, experiment: &Experiment) -> Result<Self> {
        let mut arms: Vec<ArmData> = Vec::new();
        let mut failed = Vec::new();
        for name in experiment.arm_names() {
            let mut runs = Vec::new();
            for arm in experiment.arms.iter().filter(|arm| arm.name == name) {
                let what = format!("{name}, seed {}", arm.seed);
                let below = Path::new(&arm.run);
                if !below.components().all(|part| matches!(part, Component::Normal(_))) {
                    bail!(
                        "experiment {}: {what}: run {:?} is not a folder below it",
                        folder.display(),
                        arm.run
                    );
                }
                if let Some(error) = &arm.error {
                    failed.push(format!("{what}: {error}"));
                    continue;
                }
                match RunData::open(&folder.join(below), arm.settings.clone()) {
                    Ok(run) if run.metrics.is_empty() => failed.push(format!("{what}: no step yet")),
                    Ok(run) => runs.push(RunData { seed: arm.seed, ..run }),
                    Err(error) => failed.push(format!("{what}: {error:#}")),
                }
            }
            if !runs.is_empty() {
                arms.push(ArmData { name: name.to_string(), series: 0, runs });
            }
        }
        if arms.is_empty() {
            bail!("experiment {}: no run has a result\n{}", folder.display(), failed.join("\n"));
        }
        let is_method = |arm: &ArmData| Some(split_arm(&arm.name).0) == experiment.method.as_deref();
        let method = arms.iter().position(is_method);
        let names: Vec<&str> = arms.iter().map(|arm| arm.name.as_str()).collect();
        for (arm, series) in series_of(&names, experiment.method.as_deref()).into_iter().enumerate() {
            arms[arm].series = series;
        }
        let (name, reach) = (experiment.name.clone(), experiment.reach.clone());
        let kind = StudyKind::Experiment;
        Ok(Study { name, folder: folder.to_owned(), kind, method, reach, arms, failed })
    }

    /// The run whose tokens are shown: the first of the method, else of the first arm.
    pub fn shown(&self) -> (&ArmData, &RunData) {
        let arm = &self.arms[self.method.unwrap_or(0)];
        (arm, &arm.runs[0])
    }

    pub fn runs(&self) -> impl Iterator<Item = (&ArmData, &RunData)> {
        self.arms.iter().flat_map(|arm| arm.runs.iter().map(move |run| (arm, run)))
    }

    /// The runs of a comparison that have not come to their end, with the steps that they are compared by.
    pub fn unfinished(&self) -> Option<String> {
        let runs = self.runs().filter(|(_, run)| self.kind != StudyKind::Run && !run.has_ended());
        let texts: Vec<String> = runs
            .map(|(arm, run)| {
                let (n_steps, steps) = (run.metrics.len(), run.plan.config.steps);
                format!("{}, seed {} ({n_steps} of {steps} steps)", arm.name, run.seed)
            })
            .collect();
        (!texts.is_empty())
            .then(|| format!("Unfinished, and compared by what is there: {}", texts.join("; ")))
    }

    /// The accuracy that the runs are compared by.
    pub fn measure(&self) -> Measure {
        Measure::of_runs(self.runs().map(|(_, run)| run.metrics.as_slice()))
    }

    /// What the arms say together. Only a method that the experiment names is compared with the others.
    pub fn summary(&self) -> Result<ExperimentSummary> {
        let arms: Vec<ArmRuns> = self.arms.iter().map(ArmData::of_seeds).collect();
        Ok(summarise(&arms, self.method_name(), self.reach.as_deref())?)
    }

    /// The name of the method, without the setting of a matrix.
    pub fn method_name(&self) -> Option<&str> {
        self.method.map(|method| split_arm(&self.arms[method].name).0)
    }

    /// The largest number of seeds of any arm.
    pub fn n_seeds(&self) -> usize {
        self.arms.iter().map(|arm| arm.runs.len()).max().unwrap_or(0)
    }
}

/// The name of an arm among others: that of its run's folder, or what the names of its runs' folders begin with.
fn arm_name(arms: &[ArmData], idx: usize) -> String {
    let arm = &arms[idx];
    let folder =
        |run: &RunData| run.folder.file_name().map_or(String::new(), |n| n.to_string_lossy().into_owned());
    if arm.name.contains('/') {
        return arm.name.clone();
    }
    let names: Vec<String> = arm.runs.iter().map(folder).collect();
    let is_shared = |n: &usize| names.iter().all(|name| name.chars().take(*n).eq(names[0].chars().take(*n)));
    let n_shared = (0..=names[0].chars().count()).rev().find(is_shared).unwrap_or(0);
    let shared: String = names[0].chars().take(n_shared).collect();
    let name = if names.len() > 1 { shared.trim_end_matches(['-', '_', '.']).to_string() } else { shared };
    let name = if name.is_empty() { arm.name.clone() } else { name };
    if arms[..idx].iter().any(|other| other.name == name) { format!("{name} ({})", idx + 1) } else { name }
}

impl ArmData {
    fn of_seeds(&self) -> ArmRuns<'_> {
        ArmRuns { name: &self.name, runs: self.runs.iter().map(RunData::of_seed).collect() }
    }
}

impl RunData {
    /// Whether the run came to its end.
    pub fn has_ended(&self) -> bool {
        let last = self.metrics.last().map_or(0, |metrics| metrics.step);
        has_ended(&self.events, last, self.plan.config.steps)
    }

    fn open(folder: &Path, settings: Vec<String>) -> Result<Self> {
        let plan_text = plan_text(folder)?;
        let plan = run_folder::plan(folder)
            .with_context(|| format!("run {}: is it a training run?", folder.display()))?;
        let metrics: Vec<Metrics> =
            if folder.join("metrics.jsonl").exists() { Run::read_metrics(folder)? } else { Vec::new() };
        let build = folder.join("build.json");
        let build = std::fs::read_to_string(build).ok().and_then(|text| record::parse(&text).ok());
        Ok(RunData {
            folder: folder.to_owned(),
            seed: plan.config.seed,
            settings,
            plan,
            plan_text,
            metrics,
            silenced: records(folder, "tokens")?,
            explored: records(folder, "explored")?,
            evals: evals(folder)?,
            manifest: Run::read_manifest(folder).ok(),
            events: read_events(folder)?,
            build,
        })
    }

    /// The run as summaries of an experiment take it.
    pub fn of_seed(&self) -> SeedRun<'_> {
        SeedRun { seed: self.seed, metrics: &self.metrics, canaries: &self.plan.config.canaries }
    }

    /// Recorded responses of all steps.
    pub fn responses(&self) -> Result<Vec<ResponseRecord>> {
        let files = part_files(&self.folder, "rollouts")?;
        let mut responses = Vec::new();
        for path in files {
            responses.extend(responses_of_file(&path, &self.plan.objective)?);
        }
        Ok(responses)
    }

    /// Held-out accuracies by step; step 0 is before training.
    pub fn held_out(&self) -> Vec<(f64, f64)> {
        held_out(&self.metrics)
    }

    pub fn n_silenced(&self) -> usize {
        self.metrics.iter().map(|m| m.n_silenced).sum()
    }

    pub fn n_candidates(&self) -> usize {
        self.metrics.iter().map(|m| m.n_candidates).sum()
    }

    pub fn n_tokens(&self) -> usize {
        self.metrics.iter().map(|m| m.n_tokens).sum()
    }
}

/// Samples of `stapo eval --out RUN/eval` and of `--out RUN/eval/NAME`.
pub fn evals(run: &Path) -> Result<Vec<EvalRecord>> {
    let mut found = records(run, "eval")?;
    let folder = run.join("eval");
    let Ok(entries) = std::fs::read_dir(&folder) else { return Ok(found) };
    let mut names: Vec<_> = entries
        .filter_map(std::result::Result::ok)
        .filter(|e| e.path().is_dir())
        .map(|e| e.file_name())
        .collect();
    names.sort();
    for name in names {
        found.extend(records(&folder, &name.to_string_lossy())?);
    }
    Ok(found)
}

/// The number by which each arm is drawn. The arm named `method` is the first. In a matrix a method has one colour and a setting one
/// dash, as far as there are enough of both.
pub fn series_of(names: &[&str], method: Option<&str>) -> Vec<usize> {
    let split: Vec<(&str, &str)> = names.iter().map(|name| split_arm(name)).collect();
    let mut methods: Vec<&str> = method.into_iter().collect();
    let mut settings: Vec<&str> = Vec::new();
    for (method, setting) in &split {
        if !methods.contains(method) {
            methods.push(method);
        }
        if !settings.contains(setting) {
            settings.push(setting);
        }
    }
    let is_matrix = settings.len() > 1 && settings.len() <= Dash::ALL.len() && methods.len() <= SERIES.len();
    let first = split.iter().position(|(name, _)| Some(*name) == method);
    let position = |all: &[&str], one: &str| all.iter().position(|other| *other == one).unwrap_or(0);
    let number = |(arm, (method, setting)): (usize, &(&str, &str))| match first {
        _ if is_matrix => position(&methods, method) + SERIES.len() * position(&settings, setting),
        Some(first) if arm == first => 0,
        Some(first) if arm < first => arm + 1,
        _ => arm,
    };
    split.iter().enumerate().map(number).collect()
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use serde_json::{Value, json};
    use stapo_rl::Config;

    /// The metrics of a step with these keys, and numbers that mean nothing for the others.
    pub fn metrics(step: u64, keys: &Value) -> Metrics {
        let mut all = json!({
            "schema": 1, "step": step, "reward_mean": 0.0, "accuracy": 0.5, "response_tokens_mean": 30.0,
            "truncated_share": 0.0, "entropy_mean": 0.3,
            "entropy_quantiles": {"q05": 0.0, "q25": 0.0, "q50": 0.0, "q75": 0.0, "q95": 1.0}, "n_tokens": 1000,
            "n_kept": 999, "n_candidates": 2, "n_silenced": 1, "tau_h": null, "clip_fraction": 0.0, "ratio_min": 1.0,
            "ratio_max": 1.0, "loss": 0.0, "learning_rate": 1e-4, "gradient_norm": 1.0, "silenced_gradient_share": 0.0,
            "quadrants": [], "exactness_max_abs": 0.0, "tokens_per_second": {"rollout": 1.0, "update": 1.0},
        });
        all.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        serde_json::from_value(all).unwrap()
    }

    /// A run with these settings and metrics, of which no file exists.
    pub fn run(folder: &str, settings: &[&str], metrics: Vec<Metrics>) -> RunData {
        let plan = Plan::resolve(Config::from_toml("", settings.iter().copied()).unwrap()).unwrap();
        RunData {
            folder: folder.into(),
            seed: plan.config.seed,
            settings: Vec::new(),
            plan_text: plan.to_toml(),
            plan,
            metrics,
            silenced: Vec::new(),
            explored: Vec::new(),
            evals: Vec::new(),
            manifest: None,
            events: Vec::new(),
            build: None,
        }
    }

    /// Arms of runs, each with its name.
    pub fn study(kind: StudyKind, arms: Vec<(&str, Vec<RunData>)>) -> Study {
        let arms = arms.into_iter().enumerate();
        let arm = |(series, (name, runs)): (usize, (&str, _))| ArmData { name: name.into(), series, runs };
        let (name, folder) = ("s".to_string(), PathBuf::from("s"));
        Study {
            name,
            folder,
            kind,
            method: None,
            reach: None,
            arms: arms.map(arm).collect(),
            failed: Vec::new(),
        }
    }

    #[test]
    fn a_figure_names_an_arm_without_the_tables_of_its_keys() {
        let label = |name: &str| ArmData { name: name.into(), series: 0, runs: Vec::new() }.label();
        assert_eq!(label("stapo,update.learning_rate=0.0003"), "stapo, learning_rate=0.0003");
        assert_eq!(label("a,b.c=1.5,model=\"x/y.z\""), "a, c=1.5, model=\"x/y.z\"");
        assert_eq!(label("no settings, but a comma"), "no settings, but a comma");
    }

    #[test]
    fn a_method_has_one_colour_and_a_setting_one_dash() {
        let names = ["justrl,lr=1", "justrl,lr=2", "stapo,lr=1", "stapo,lr=2", "stapo,lr=3"];
        assert_eq!(series_of(&names, Some("stapo")), [1, 7, 0, 6, 12]);
        assert_eq!(series_of(&names, None), [0, 6, 1, 7, 13]);
        // As many methods as colours and as many settings as dashes are a matrix.
        let all =
            (0..SERIES.len()).flat_map(|method| (0..Dash::ALL.len()).map(move |setting| (method, setting)));
        let names: Vec<String> =
            all.clone().map(|(method, setting)| format!("m{method},n={setting}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let expected = all.map(|(method, setting)| method + SERIES.len() * setting);
        assert_eq!(series_of(&names, None), expected.collect::<Vec<_>>());
    }

    #[test]
    fn arms_without_a_matrix_are_numbered_after_the_method() {
        assert_eq!(series_of(&["a", "b", "stapo", "c"], Some("stapo")), [1, 2, 0, 3]);
        assert_eq!(series_of(&["a", "b"], None), [0, 1]);
        assert_eq!(series_of(&["a", "b"], Some("a method that has no result")), [0, 1]);
        let many: Vec<String> = (0..5).flat_map(|n| ["a", "b"].map(|arm| format!("{arm},n={n}"))).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(series_of(&many, Some("b")), [1, 0, 2, 3, 4, 5, 6, 7, 8, 9]);
    }
}
