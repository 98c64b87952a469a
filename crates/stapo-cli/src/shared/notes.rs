//! What people write about runs: a note, tags, and whether a run is archived. They are in `notes.json` next to the run
//! folders and never inside them or inside an experiment, so that receipts stay as they are.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use stapo_rl::run::disk::write_whole;
use stapo_rl::untrusted::read_text;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The file of a folder of runs.
pub const FILE: &str = "notes.json";

/// How far above a run its experiment may lie.
const MAX_DEPTH: usize = 4;

/// What is known about one run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunNote {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_archived: bool,
}

/// The notes on the runs of one folder, by the paths of their folders.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notes {
    #[serde(default)]
    pub runs: BTreeMap<String, RunNote>,
}

impl Notes {
    /// The notes next to the runs of `folder`; none if there is no file.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(FILE);
        if !path.exists() {
            return Ok(Self::default());
        }
        let named = || format!("file {}", path.display());
        serde_json::from_str(&read_text(&path).with_context(named)?).with_context(named)
    }

    /// The note on a run; an empty one if there is none or the file cannot be read.
    pub fn on_run(folder: &Path) -> RunNote {
        let Ok((parent, name)) = folder_and_name(folder) else { return RunNote::default() };
        Self::read(&parent).unwrap_or_default().runs.remove(&name).unwrap_or_default()
    }

    /// Changes the note on a run and writes the file.
    pub fn change(run: &Path, change: impl FnOnce(&mut RunNote)) -> Result<()> {
        if !crate::shared::discover::is_run(run) {
            bail!("run {}: no run folder\nhint: `stapo runs` lists the runs here", run.display());
        }
        let (parent, name) = folder_and_name(run)?;
        let mut notes = Self::read(&parent)?;
        change(notes.runs.entry(name).or_default());
        notes.runs.retain(|_, note| *note != RunNote::default());
        let text = serde_json::to_string_pretty(&notes)? + "\n";
        Ok(write_whole(&parent.join(FILE), text.as_bytes())?)
    }
}

/// The folder with the notes on a run, and the run's name there.
fn folder_and_name(run: &Path) -> Result<(PathBuf, String)> {
    let run = run.canonicalize().with_context(|| format!("run {}", run.display()))?;
    let above = run.ancestors().skip(1).take(MAX_DEPTH);
    let experiment = above.filter(|folder| folder.join("experiment.json").is_file()).last();
    home(&run, experiment).context("a run lies in a folder")
}

/// The folder with the notes on a run, and the run's name there. Those on the runs of an experiment are next to the
/// experiment, whose receipt is about every file inside.
pub fn home(run: &Path, experiment: Option<&Path>) -> Option<(PathBuf, String)> {
    let folder = experiment.unwrap_or(run).parent()?;
    let parts = run.strip_prefix(folder).ok()?.iter().map(|part| part.to_string_lossy().into_owned());
    Some((folder.to_owned(), parts.collect::<Vec<_>>().join("/")))
}
