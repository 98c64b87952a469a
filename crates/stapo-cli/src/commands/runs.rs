//! `stapo runs`

use crate::shared::run_folder;
use anyhow::{Context, Result};
use stapo_core::record::{EventKind, Metrics, StopReason};
use stapo_rl::run::{Run, describe_writer, holder, read_events};
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
    let status = status(folder, done, plan.config.steps);
    let percent = |value: Option<f64>| value.map_or("-".to_string(), |v| format!("{:.1} %", 100.0 * v));
    let held_out = metrics.iter().rev().find_map(|m| m.eval_accuracy);
    format!(
        "{name:<40} {:>11} {:>9} {:>9}  {status}",
        format!("{done}/{}", plan.config.steps),
        percent(metrics.last().map(|m| m.accuracy)),
        percent(held_out)
    )
}

/// Who is writing the run, or how it ended. A process that was killed left no word, and its lock is free.
fn status(folder: &Path, done: u64, steps: u64) -> String {
    if let Some(writer) = holder(folder) {
        return format!("running, {}", describe_writer(&writer));
    }
    let events = read_events(folder).unwrap_or_default();
    let last = events
        .iter()
        .rfind(|event| matches!(event.event, EventKind::Start | EventKind::Resume | EventKind::Stop));
    let first_line = |text: &str| text.lines().next().unwrap_or_default().to_string();
    match last.map(|event| (event.event, event.reason, first_line(&event.text))) {
        None if done >= steps => "done".to_string(),
        Some((EventKind::Stop, Some(StopReason::Done), _)) => "done".to_string(),
        Some((EventKind::Stop, Some(StopReason::TargetReached), _)) => "done, target reached".to_string(),
        Some((EventKind::Stop, Some(StopReason::Signal), by)) => format!("resumable, stopped by {by}"),
        Some((EventKind::Stop, Some(StopReason::Error), why)) => format!("died: {why}"),
        Some((EventKind::Start | EventKind::Resume, _, _)) => {
            "died: killed, or the machine stopped".to_string()
        }
        _ => "resumable".to_string(),
    }
}
