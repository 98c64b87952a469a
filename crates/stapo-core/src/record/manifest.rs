//! `manifest.json` and `build.json`: the hashes and the build with which a third party can check a run. The manifest is
//! derived from `metrics.jsonl` and the checkpoints.

use super::{Change, Extra};
use serde::{Deserialize, Serialize};

/// The hashes of a run's inputs and of the state after each step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub schema: u32,
    pub inputs: Vec<FileHash>,
    pub steps: Vec<StepHash>,
    /// Version and commit of the program that wrote the manifest.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub program: String,
    /// `cpu` or `cuda`, for runs whose plan does not say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub device: String,
    /// Changed inputs that `--accept-changes` let pass.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub accepted: Vec<AcceptedChange>,
    #[serde(flatten)]
    pub extra: Extra,
}

/// The hash of a file, or of a part of the program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileHash {
    pub name: String,
    pub n_bytes: u64,
    /// Lower-case hexadecimal.
    pub sha256: String,
}

/// Weights, optimizer state and counters after a step, as one hash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepHash {
    pub step: u64,
    pub sha256: String,
}

/// A change that was accepted when the run had made `step` steps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptedChange {
    pub step: u64,
    #[serde(flatten)]
    pub change: Change,
}

/// The program and the machine of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BuildRecord {
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
