//! `stapo runs`

use crate::shared::run_folder;
use crate::shared::run_status::run_status;
use anyhow::{Context, Result};
use stapo_core::record::Metrics;
use stapo_rl::run::Run;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Lists runs with their progress.
#[derive(clap::Args)]
pub struct Args {
    /// The folder that holds them.
    #[arg(default_value = "runs")]
    folder: PathBuf,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let entries =
        std::fs::read_dir(&args.folder).with_context(|| format!("folder {}", args.folder.display()))?;
    let mut folders: Vec<PathBuf> =
        entries.filter_map(|e| e.ok().map(|e| e.path())).filter(|p| is_listed(p)).collect();
    folders.sort();
    println!("{:<40} {:>11} {:>9} {:>9}  status", "run", "steps", "accuracy", "held-out");
    for folder in folders {
        println!("{}", row(&folder));
    }
    Ok(ExitCode::SUCCESS)
}

/// A folder whose name begins with a dot is one in the making.
fn is_listed(path: &Path) -> bool {
    path.is_dir() && !path.file_name().unwrap_or_default().to_string_lossy().starts_with('.')
}

fn row(folder: &Path) -> String {
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let plan = run_folder::plan(folder).ok();
    let Some(plan) = plan else {
        return format!("{name:<40} {:>11} {:>9} {:>9}  no training run", "-", "-", "-");
    };
    let metrics: Vec<Metrics> = Run::read_metrics(folder).unwrap_or_default();
    let done = metrics.last().map_or(0, |m| m.step);
    let status = run_status(folder, done, plan.config.steps);
    let percent = |value: Option<f64>| value.map_or("-".to_string(), |v| format!("{:.1} %", 100.0 * v));
    let held_out = metrics.iter().rev().find_map(|m| m.eval_accuracy);
    format!(
        "{name:<40} {:>11} {:>9} {:>9}  {status}",
        format!("{done}/{}", plan.config.steps),
        percent(metrics.last().map(|m| m.accuracy)),
        percent(held_out)
    )
}
