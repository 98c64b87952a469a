//! `manifest.json` and `build.json`: the hashes and the build with which a third party can check a run.

use super::Extra;
use serde::{Deserialize, Serialize};

/// The hashes of a run's inputs and of the state after each step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub schema: u32,
    pub inputs: Vec<FileHash>,
    pub steps: Vec<StepHash>,
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

/// The program and the machine of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BuildRecord {
    pub schema: u32,
    pub version: String,
    pub target: String,
    pub features: Vec<String>,
    pub n_threads: usize,
    #[serde(flatten)]
    pub extra: Extra,
}
