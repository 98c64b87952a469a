//! `stapo runs`

use crate::shared::discover::{is_run, runs_below};
use crate::shared::notes::{Notes, RunNote};
use crate::shared::run_folder;
use crate::shared::run_status::run_status;
use crate::shared::terminal::{COLUMNS, first_cell, wrapped};
use anyhow::{Context, Result};
use serde::Serialize;
use stapo_core::record::{Metrics, PretrainMetrics};
use stapo_core::settings;
use stapo_rl::learn::pretrain::{PretrainConfig, Start};
use stapo_rl::run::{Run, RunKind, plan_text};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Lists runs with their progress, those of experiments too; writes notes and tags.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    change: Option<Change>,

    /// The folder of the runs, an experiment's folder, or a run's.
    #[arg(default_value = "runs")]
    folder: PathBuf,

    /// One JSON array, accuracies from 0 to 1.
    #[arg(long)]
    json: bool,

    /// Lists archived runs too.
    #[arg(long)]
    all: bool,
}

/// What is written to notes.json next to the run folders.
#[derive(clap::Subcommand)]
enum Change {
    /// Writes a note on a run; without a text it removes the note.
    Note {
        /// The run folder.
        run: PathBuf,
        /// The note.
        text: Vec<String>,
    },
    /// Adds tags to a run.
    Tag {
        /// The run folder.
        run: PathBuf,
        /// The tags.
        #[arg(required = true)]
        tags: Vec<String>,
        /// Removes the tags instead.
        #[arg(long)]
        remove: bool,
    },
    /// Hides runs from lists; nothing is deleted.
    Archive {
        /// The run folders.
        #[arg(required = true)]
        runs: Vec<PathBuf>,
        /// Lists them again.
        #[arg(long)]
        undo: bool,
    },
}

fn write(change: &Change) -> Result<()> {
    match change {
        Change::Note { run, text } => Notes::change(run, |known| known.note = text.join(" ")),
        Change::Tag { run, tags, remove } => Notes::change(run, |known| {
            known.tags.retain(|tag| !tags.contains(tag));
            if !remove {
                known.tags.extend(tags.iter().cloned());
            }
        }),
        Change::Archive { runs, undo } => {
            runs.iter().try_for_each(|run| Notes::change(run, |known| known.is_archived = !undo))
        }
    }
}

/// A folder in the list.
#[derive(Serialize)]
struct ListedRun {
    /// The path from the folder that is listed, with `/` between its parts.
    run: String,
    path: PathBuf,
    /// `None` for a folder that holds no training run.
    #[serde(flatten)]
    progress: Option<RunProgress>,
    status: String,
    #[serde(flatten)]
    note: RunNote,
}

#[derive(Serialize)]
struct RunProgress {
    step: u64,
    steps: u64,
    accuracy: Option<f64>,
    eval_accuracy: Option<f64>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if let Some(change) = &args.change {
        write(change)?;
        return Ok(ExitCode::SUCCESS);
    }
    let entries = std::fs::read_dir(&args.folder).with_context(|| {
        format!(
            "folder {}\nhint: stapo train makes runs; name the folder that holds yours",
            args.folder.display()
        )
    })?;
    let mut folders: Vec<PathBuf> =
        entries.filter_map(|e| e.ok().map(|e| e.path())).filter(|p| is_listed(p)).collect();
    folders.sort();
    if is_run(&args.folder) {
        folders = vec![args.folder.clone()];
    }
    let mut runs: Vec<ListedRun> = folders.iter().flat_map(|folder| below(folder)).collect();
    let n_runs = runs.len();
    runs.retain(|run| args.all || !run.note.is_archived);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&runs)?);
        return Ok(ExitCode::SUCCESS);
    }
    if runs.is_empty() {
        eprintln!("note: no runs in {}; stapo train makes one", args.folder.display());
    }
    let width = name_width(&runs);
    println!("{:<width$} {:>9} {:>8} {:>8}  status", "run", "steps", "accuracy", "held-out");
    let n_archived = n_runs - runs.len();
    for run in runs {
        println!("{}", row(&run, width));
    }
    if let Some(text) = archived_note(n_archived) {
        eprintln!("{text}");
    }
    Ok(ExitCode::SUCCESS)
}

/// The widest column of names. A longer name has a line to itself.
const NAME_WIDTH: usize = 32;

fn name_width(runs: &[ListedRun]) -> usize {
    runs.iter().map(|run| run.run.chars().count()).max().unwrap_or(0).clamp(20, NAME_WIDTH)
}

fn archived_note(n_archived: usize) -> Option<String> {
    (n_archived > 0).then(|| format!("note: {n_archived} archived runs are left out; --all lists them"))
}

/// A folder whose name begins with a dot is one in the making.
fn is_listed(path: &Path) -> bool {
    path.is_dir() && !path.file_name().unwrap_or_default().to_string_lossy().starts_with('.')
}

/// The runs in a folder: the folder itself, those of an experiment, or a line that says that it holds none.
fn below(folder: &Path) -> Vec<ListedRun> {
    let name = folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy().into_owned();
    let runs = runs_below(folder);
    if runs.is_empty() {
        return vec![read(name, folder)];
    }
    let listed = |id: &str| if id == "." { name.clone() } else { format!("{name}/{id}") };
    runs.iter().map(|(id, found)| read(listed(id), &found.folder)).collect()
}

fn read(run: String, folder: &Path) -> ListedRun {
    let path = folder.to_owned();
    let note = Notes::on_run(folder);
    if let Some((made_by, progress)) = supervised(folder) {
        let status = format!("{made_by}, {}", run_status(folder, progress.step, progress.steps));
        return ListedRun { run, path, progress: Some(progress), status, note };
    }
    let Ok(plan) = run_folder::plan(folder) else {
        return ListedRun { run, path, progress: None, status: "no training run".to_string(), note };
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
    ListedRun { run, path, progress: Some(progress), status, note }
}

/// The command that made a supervised run, and its progress; `None` for another folder.
fn supervised(folder: &Path) -> Option<(&'static str, RunProgress)> {
    let text = plan_text(folder).ok()?;
    if RunKind::of_plan(&settings::parse(&text).ok()?) == RunKind::Training {
        return None;
    }
    let plan = PretrainConfig::from_toml(&text, []).ok()?;
    let metrics: Vec<PretrainMetrics> = Run::read_metrics(folder).unwrap_or_default();
    let step = metrics.last().map_or(0, |m| m.step);
    let eval_accuracy = metrics.iter().rev().find_map(|m| m.eval_accuracy);
    let made_by = match plan.model {
        _ if plan.preference.is_some() => "prefer",
        _ if plan.reward_model.is_some() => "rm",
        Start::Fresh(_) => "pretrain",
        _ => "sft",
    };
    Some((made_by, RunProgress { step, steps: plan.steps, accuracy: None, eval_accuracy }))
}

fn row(run: &ListedRun, width: usize) -> String {
    let percent = |value: Option<f64>| value.map_or("-".to_string(), |v| format!("{:.1} %", 100.0 * v));
    let (steps, accuracy, held_out) = match &run.progress {
        Some(progress) => (
            format!("{}/{}", progress.step, progress.steps),
            percent(progress.accuracy),
            percent(progress.eval_accuracy),
        ),
        None => ("-".to_string(), "-".to_string(), "-".to_string()),
    };
    let numbers = format!(" {steps:>9} {accuracy:>8} {held_out:>8}  ");
    let indent = width + numbers.chars().count();
    let tags = run.note.tags.iter().fold(String::new(), |tags, tag| tags + " #" + tag);
    let note = Some(&run.note.note).filter(|note| !note.is_empty()).map(|note| format!("; {note}"));
    let status = format!("{}{tags}{}", run.status, note.unwrap_or_default());
    format!("{}{numbers}{}", first_cell(&run.run, width), wrapped(&status, indent, COLUMNS))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(name: &str, note: &str, tags: &[&str]) -> ListedRun {
        let progress = RunProgress { step: 7, steps: 20, accuracy: Some(0.625), eval_accuracy: None };
        let tags = tags.iter().map(ToString::to_string).collect();
        let note = RunNote { note: note.into(), tags, is_archived: false };
        ListedRun {
            run: name.into(),
            path: name.into(),
            progress: Some(progress),
            status: "done".into(),
            note,
        }
    }

    #[test]
    fn a_row_has_its_numbers_tags_and_note_below_their_columns() {
        let short = listed("runs/a", "", &[]);
        assert_eq!(row(&short, 20), format!("{:<20}{}", "runs/a", "      7/20   62.5 %        -  done"));
        let noted = listed("runs/a", "the one with the low learning rate that went on", &["paper", "b"]);
        let rows = row(&noted, 20);
        let lines: Vec<&str> = rows.lines().collect();
        let indent = " ".repeat(20 + 30);
        assert!(lines[0].ends_with("  done #paper #b; the one with"), "{rows}");
        assert!(lines[1].starts_with(&format!("{indent}the low learning rate")), "{rows}");
        assert!(lines.iter().all(|line| line.chars().count() <= COLUMNS), "{rows}");
    }

    #[test]
    fn names_widen_their_column_up_to_a_limit() {
        let width = |lengths: &[usize]| {
            let runs: Vec<ListedRun> = lengths.iter().map(|n| listed(&"é".repeat(*n), "", &[])).collect();
            name_width(&runs)
        };
        assert_eq!([width(&[]), width(&[4, 25, 9]), width(&[4, 99])], [20, 25, NAME_WIDTH]);
        assert_eq!(archived_note(0), None);
        assert!(archived_note(2).unwrap().starts_with("note: 2 archived runs"));
    }

    #[test]
    fn folders_in_the_making_and_files_are_not_listed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["a", ".a"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        std::fs::write(at("b"), "").unwrap();
        assert_eq!(["a", ".a", "b", "c"].map(|name| is_listed(&at(name))), [true, false, false, false]);
    }
}
