//! TensorBoard event files of whole runs.

use crate::shared::study::table::slug;
use crate::shared::study::{RunData, Study};
use crate::shared::tensorboard::{FILE, events};
use anyhow::{Context, Result};
use std::path::Path;
use std::time::UNIX_EPOCH;

/// One folder per run, so that TensorBoard shows each as a separate run.
pub fn write(folder: &Path, study: &Study) -> Result<()> {
    for (arm, run) in study.runs() {
        let run_folder = folder.join(format!("{}-seed{}", slug(&arm.name), run.seed));
        std::fs::create_dir_all(&run_folder).with_context(|| format!("folder {}", run_folder.display()))?;
        let path = run_folder.join(FILE);
        let bytes = events(&run.metrics, end_of(run));
        std::fs::write(&path, bytes).with_context(|| format!("file {}", path.display()))?;
    }
    Ok(())
}

/// When `metrics.jsonl` was last written, in seconds since 1970.
fn end_of(run: &RunData) -> f64 {
    let modified = std::fs::metadata(run.folder.join("metrics.jsonl")).and_then(|m| m.modified());
    let since = modified.ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    since.map_or(0.0, |time| time.as_secs_f64().floor())
}
