//! The run directory: the interface between the trainer and every other command.
//!
//! `config.toml` as written · `plan.toml` resolved · `build.json` · `metrics.jsonl` · `rollouts/` · `tokens/`
//! (silenced) · `explored/` (kept candidates) · `checkpoints/` · `manifest.json`. Every file but `metrics.jsonl` is
//! written atomically (temporary file, fsync, rename). A line of `metrics.jsonl` is one write, and a resume removes a
//! torn last line.

mod checkpoint;
mod tree;

pub(crate) use checkpoint::state_hash;
pub use checkpoint::{Checkpoint, Counters};
pub use tree::check_tree;

use crate::disk::{Lines, create_folder, write_whole};
use crate::error::{Error, Result};
use stapo_core::record::{self, Manifest, Record, ResponseRecord, SCHEMA, StepHash, Stepped, TokenRecord};
use stapo_model::Simd;
use std::fs;
use std::path::{Path, PathBuf};

/// An open run directory.
#[derive(Debug)]
pub struct Run {
    folder: PathBuf,
    metrics: Lines,
    manifest: Manifest,
}

impl Run {
    /// Creates the folder of a new run. A folder that exists is refused.
    pub fn create(folder: &Path, config_text: &str, plan_text: &str, manifest: Manifest) -> Result<Self> {
        if folder.exists() {
            return Err(Error::RunExists { folder: folder.to_owned() });
        }
        for part in ["rollouts", "tokens", "explored", "checkpoints"] {
            create_folder(&folder.join(part))?;
        }
        write_whole(&folder.join("config.toml"), config_text.as_bytes())?;
        write_whole(&folder.join("plan.toml"), plan_text.as_bytes())?;
        let build = record::BuildRecord {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION").to_string(),
            target: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
            features: Simd::available().into_iter().map(|level| level.name().to_string()).collect(),
            n_threads: std::thread::available_parallelism().map_or(1, usize::from),
            extra: record::Extra::new(),
        };
        write_whole(&folder.join("build.json"), build.to_line().as_bytes())?;
        let run = Self { folder: folder.to_owned(), metrics: open_metrics(folder)?, manifest };
        run.write_manifest()?;
        Ok(run)
    }

    /// Opens a run to continue after `step`; metrics and hashes of later steps are removed.
    pub fn reopen<M: Stepped>(folder: &Path, step: u64) -> Result<Self> {
        check_tree(folder)?;
        let mut kept: Vec<M> = Self::read_metrics(folder)?;
        kept.retain(|metrics| metrics.step() <= step);
        let text: String = kept.iter().map(Record::to_line).collect();
        write_whole(&folder.join("metrics.jsonl"), text.as_bytes())?;
        let mut manifest = Self::read_manifest(folder)?;
        manifest.steps.retain(|hash| hash.step <= step);
        let run = Self { folder: folder.to_owned(), metrics: open_metrics(folder)?, manifest };
        run.write_manifest()?;
        Ok(run)
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The metrics of all steps so far, without a torn last line.
    pub fn read_metrics<M: Stepped>(folder: &Path) -> Result<Vec<M>> {
        let path = folder.join("metrics.jsonl");
        let text = fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
        Ok(record::parse_lines(&text).map_err(|e| Error::record(&path, &e))?.records)
    }

    pub fn read_manifest(folder: &Path) -> Result<Manifest> {
        let path = folder.join("manifest.json");
        let text = fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
        record::parse(&text).map_err(|e| Error::record(&path, &e))
    }

    /// Adds the metrics of a step. The line is on disk when the function returns.
    pub fn add_metrics(&mut self, metrics: &impl Stepped) -> Result<()> {
        self.metrics.add(&metrics.to_line())?;
        self.metrics.sync()
    }

    /// Adds the hash of the state after `step`.
    pub fn add_state_hash(&mut self, step: u64, sha256: String) {
        self.manifest.steps.push(StepHash { step, sha256 });
    }

    pub fn write_manifest(&self) -> Result<()> {
        write_whole(&self.folder.join("manifest.json"), self.manifest.to_line().as_bytes())
    }

    pub fn write_responses(&self, step: u64, responses: &[ResponseRecord]) -> Result<()> {
        self.write_lines("rollouts", step, responses)
    }

    pub fn write_silenced(&self, step: u64, tokens: &[TokenRecord]) -> Result<()> {
        self.write_lines("tokens", step, tokens)
    }

    pub fn write_explored(&self, step: u64, tokens: &[TokenRecord]) -> Result<()> {
        self.write_lines("explored", step, tokens)
    }

    fn write_lines(&self, part: &str, step: u64, records: &[impl Record]) -> Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        let text: String = records.iter().map(Record::to_line).collect();
        write_whole(&self.folder.join(part).join(format!("step-{step:06}.jsonl")), text.as_bytes())
    }
}

fn open_metrics(folder: &Path) -> Result<Lines> {
    Lines::open(&folder.join("metrics.jsonl"))
}

/// True in every `every`-th step; never where `every` is 0.
pub(crate) fn is_due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}
