//! `stapo runs`

use crate::shared::run_folder;
use crate::shared::run_status::run_status;
use anyhow::{Context, Result};
use serde::Serialize;
use stapo_core::record::{Metrics, PretrainMetrics};
use stapo_core::settings;
use stapo_rl::pretrain::{PretrainConfig, Start};
use stapo_rl::run::{Run, RunKind, plan_text};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Lists runs with their progress.
#[derive(clap::Args)]
pub struct Args {
    /// The folder that holds them.
    #[arg(default_value = "runs")]
    folder: PathBuf,

    /// One JSON array, accuracies from 0 to 1.
    #[arg(long)]
    json: bool,
}

/// A folder in the list.
#[derive(Serialize)]
struct ListedRun {
    run: String,
    path: PathBuf,
    /// `None` for a folder that holds no training run.
    #[serde(flatten)]
    progress: Option<RunProgress>,
    status: String,
}

#[derive(Serialize)]
struct RunProgress {
    step: u64,
    steps: u64,
    accuracy: Option<f64>,
    eval_accuracy: Option<f64>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let entries = std::fs::read_dir(&args.folder).with_context(|| {
        format!(
            "folder {}\nhint: stapo train makes runs; name the folder that holds yours",
            args.folder.display()
        )
    })?;
    let mut folders: Vec<PathBuf> =
        entries.filter_map(|e| e.ok().map(|e| e.path())).filter(|p| is_listed(p)).collect();
    folders.sort();
    let runs: Vec<ListedRun> = folders.iter().map(|folder| read(folder)).collect();
    if args.json {
        println!("{}", serde_json::to_string_pretty(&runs)?);
        return Ok(ExitCode::SUCCESS);
    }
    if runs.is_empty() {
        eprintln!("note: no runs in {}; stapo train makes one", args.folder.display());
    }
    println!("{:<32} {:>9} {:>9} {:>9}  status", "run", "steps", "accuracy", "held-out");
    for run in runs {
        println!("{}", row(&run));
    }
    Ok(ExitCode::SUCCESS)
}

/// A folder whose name begins with a dot is one in the making.
fn is_listed(path: &Path) -> bool {
    path.is_dir() && !path.file_name().unwrap_or_default().to_string_lossy().starts_with('.')
}

fn read(folder: &Path) -> ListedRun {
    let run = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let path = folder.to_owned();
    if let Some(listed) = supervised(folder) {
        return listed;
    }
    let Ok(plan) = run_folder::plan(folder) else {
        return ListedRun { run, path, progress: None, status: "no training run".to_string() };
    };
    let metrics: Vec<Metrics> = Run::read_metrics(folder).unwrap_or_default();
    let step = metrics.last().map_or(0, |m| m.step);
    let progress = RunProgress {
        step,
        steps: plan.config.steps,
        accuracy: metrics.last().map(|m| m.accuracy),
        eval_accuracy: metrics.iter().rev().find_map(|m| m.eval_accuracy),
    };
    let status = run_status(folder, step, plan.config.steps);
    ListedRun { run, path, progress: Some(progress), status }
}

/// A run of `stapo sft` or `stapo pretrain`; `None` for another folder.
fn supervised(folder: &Path) -> Option<ListedRun> {
    let text = plan_text(folder).ok()?;
    if RunKind::of(&settings::parse(&text).ok()?) == RunKind::Training {
        return None;
    }
    let plan = PretrainConfig::from_toml(&text, []).ok()?;
    let metrics: Vec<PretrainMetrics> = Run::read_metrics(folder).unwrap_or_default();
    let step = metrics.last().map_or(0, |m| m.step);
    let eval_accuracy = metrics.iter().rev().find_map(|m| m.eval_accuracy);
    let made_by = if matches!(plan.model, Start::Fresh(_)) { "pretrain" } else { "sft" };
    Some(ListedRun {
        run: folder.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        path: folder.to_owned(),
        progress: Some(RunProgress { step, steps: plan.steps, accuracy: None, eval_accuracy }),
        status: format!("{made_by}, {}", run_status(folder, step, plan.steps)),
    })
}

fn row(run: &ListedRun) -> String {
    let percent = |value: Option<f64>| value.map_or("-".to_string(), |v| format!("{:.1} %", 100.0 * v));
    let (steps, accuracy, held_out) = match &run.progress {
        Some(progress) => (
            format!("{}/{}", progress.step, progress.steps),
            percent(progress.accuracy),
            percent(progress.eval_accuracy),
        ),
        None => ("-".to_string(), "-".to_string(), "-".to_string()),
    };
    format!("{:<32} {steps:>9} {accuracy:>9} {held_out:>9}  {}", run.run, run.status)
}
