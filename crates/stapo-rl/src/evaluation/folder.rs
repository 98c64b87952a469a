//! The folder of an evaluation: `eval.json` (the settings), `samples.jsonl` (the judged samples), `table.json` (the
//! results).

use super::{Done, place};
use crate::disk::{Lines, create_folder, write_whole};
use crate::error::{Error, Result};
use crate::run::check_tree;
use serde::{Deserialize, Serialize};
use stapo_core::record::{self, EvalRecord, FileHash, Record, SCHEMA};
use std::fs;
use std::path::{Path, PathBuf};

/// The settings of an evaluation: everything that a sample depends on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalPlan {
    pub schema: u32,
    /// The model as named on the command line.
    pub model: String,
    pub weights: Vec<FileHash>,
    pub benchmarks: Vec<String>,
    pub data: PathBuf,
    pub decodings: Vec<String>,
    /// Samples per question, instead of each benchmark's own number.
    pub n_samples: Option<usize>,
    /// Only this many questions of each benchmark, from the first on.
    pub limit: Option<usize>,
    pub max_tokens: usize,
    pub template: Option<String>,
    pub chat: bool,
    pub seed: u64,
    pub kv_mib: usize,
}

/// The open folder of an evaluation.
#[derive(Debug)]
pub struct EvalFolder {
    folder: PathBuf,
    samples: Lines,
}

impl EvalFolder {
    /// Creates the folder. A folder that exists is refused.
    pub fn create(folder: &Path, plan: &EvalPlan) -> Result<Self> {
        if folder.exists() {
            return Err(Error::RunExists { folder: folder.to_owned() });
        }
        create_folder(folder)?;
        let text = serde_json::to_string_pretty(plan).expect("a plan is JSON");
        write_whole(&folder.join("eval.json"), format!("{text}\n").as_bytes())?;
        Ok(Self { folder: folder.to_owned(), samples: open_samples(folder)? })
    }

    /// Opens the folder of an interrupted evaluation, and removes a torn last line.
    pub fn reopen(folder: &Path) -> Result<(Self, EvalPlan, Done)> {
        let plan = Self::read_plan(folder)?;
        let records = Self::read_samples(folder)?;
        let text: String = records.iter().map(Record::to_line).collect();
        write_whole(&folder.join("samples.jsonl"), text.as_bytes())?;
        let opened = Self { folder: folder.to_owned(), samples: open_samples(folder)? };
        Ok((opened, plan, records.iter().map(place).collect()))
    }

    pub fn read_plan(folder: &Path) -> Result<EvalPlan> {
        check_tree(folder)?;
        let path = folder.join("eval.json");
        let text = fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
        let refuse = |problem: String| Error::NoRun {
            folder: folder.to_owned(),
            problem,
            remedy: "an evaluation is a folder that `stapo eval` made",
        };
        let plan: EvalPlan = serde_json::from_str(&text).map_err(|e| refuse(format!("eval.json: {e}")))?;
        if plan.schema > SCHEMA {
            return Err(refuse(format!("eval.json has schema {}, this program reads {SCHEMA}", plan.schema)));
        }
        Ok(plan)
    }

    /// All samples so far, without a torn last line.
    pub fn read_samples(folder: &Path) -> Result<Vec<EvalRecord>> {
        let path = folder.join("samples.jsonl");
        let text = fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
        Ok(record::parse_lines(&text).map_err(|e| Error::record(&path, &e))?.records)
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn add(&mut self, sample: &EvalRecord) -> Result<()> {
        self.samples.add(&sample.to_line())
    }

    /// Writes the table as JSON.
    pub fn write_table(&self, rows: &[super::EvalRow]) -> Result<()> {
        let text = serde_json::to_string_pretty(rows).expect("numbers and names are JSON");
        write_whole(&self.folder.join("table.json"), format!("{text}\n").as_bytes())
    }
}

fn open_samples(folder: &Path) -> Result<Lines> {
    Lines::open(&folder.join("samples.jsonl"))
}
