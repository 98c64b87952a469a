//! `manifest.json` and `build.json`: the hashes and the build with which a third party can check a folder. The manifest
//! of a run is derived from `metrics.jsonl`, the checkpoints and, once the run has ended, all other files.

use super::{Change, Extra, Record};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The hashes of the inputs of a run, an evaluation or an experiment, of the state after each step, and, in a folder whose
/// work has ended, of every file. Its hash is the receipt of the folder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Manifest {
    /// Version of the format.
    pub schema: u32,
    pub inputs: Vec<FileHash>,
    pub steps: Vec<StepHash>,
    /// Version and commit of the program that wrote the manifest.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub program: String,
    /// `cpu` or `cuda`, for runs whose plan does not say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub device: String,
    /// Changed inputs, and changed files of the folder itself, that `--accept-changes` let pass.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub accepted: Vec<AcceptedChange>,
    /// Every file of the folder by its name in it, in order of names. Absent until the work ends. For a folder inside
    /// that has a receipt, the list has its `manifest.json`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<Vec<FileHash>>,
    #[serde(flatten)]
    pub extra: Extra,
}

impl Record for Manifest {
    /// The canonical form: one line, keys sorted, no blanks.
    fn to_line(&self) -> String {
        // A `serde_json::Value` has its keys in order.
        let value = serde_json::to_value(self).expect("records hold only what JSON can");
        format!("{value}\n")
    }
}

/// The hash of a file, or of a part of the program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FileHash {
    pub name: String,
    pub n_bytes: u64,
    /// Lower-case hexadecimal.
    pub sha256: String,
}

/// A line of `records.jsonl`: the files that a step wrote, or that a resume found. A later line counts before an earlier one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StepFiles {
    /// Version of the format.
    pub schema: u32,
    pub step: u64,
    pub files: Vec<FileHash>,
    #[serde(flatten)]
    pub extra: Extra,
}

/// Weights, optimizer state and counters after a step, as one hash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StepHash {
    pub step: u64,
    pub sha256: String,
}

/// A change that was accepted when the run had made `step` steps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AcceptedChange {
    pub step: u64,
    #[serde(flatten)]
    pub change: Change,
}

/// The program and the machine of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BuildRecord {
    /// Version of the format.
    pub schema: u32,
    pub version: String,
    /// Version and commit.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub program: String,
    pub target: String,
    pub features: Vec<String>,
    pub n_threads: usize,
    #[serde(flatten)]
    pub extra: Extra,
}
