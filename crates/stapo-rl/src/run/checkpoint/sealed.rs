//! `checkpoint.json`: what a checkpoint is of, with a seal.

use crate::error::{Error, Result};
use crate::run::disk::sha256_hex;
use crate::run::state::{Counters, LoopState};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use stapo_core::record::{FileHash, Identity};
use std::fs;
use std::path::Path;

/// `checkpoint.json`. Schema 1 has only the first three keys and another seal.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Sealed {
    pub schema: u32,
    pub counters: Counters,
    /// The hash of `state.safetensors`, the one file that held weights and moments up to schema 3.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub state_sha256: String,
    #[serde(default)]
    pub loop_state: LoopState,
    #[serde(default)]
    pub state_hash: String,
    #[serde(default)]
    pub metrics: Option<String>,
    /// The hash of the checkpoint's copy of `plan.toml`.
    #[serde(default)]
    pub plan_sha256: String,
    #[serde(default)]
    pub identity: Identity,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub records: Vec<FileHash>,
    /// The files of weights and moments; none for a state that is the model that the run started from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<StateFile>,
    /// A hash of the other keys, so that a changed counter is found like a changed weight.
    pub seal: String,
}

/// A file with tensors of the state.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct StateFile {
    pub name: String,
    pub sha256: String,
    /// Of the header alone. The tensors are covered by the hash of the state.
    pub head_sha256: String,
}

/// The schema of `checkpoint.json` that this program writes, and the highest that this program reads.
pub(super) const SCHEMA: u32 = 4;
/// The last schema with one file for weights and moments.
pub(super) const SCHEMA_OF_ONE_FILE: u32 = 3;
pub(super) const SEALED: &str = "checkpoint.json";

impl Sealed {
    /// The file of a checkpoint, with a seal that fits.
    pub fn read(checkpoint: &Path) -> Result<Self> {
        let refuse = |problem: String| Error::Checkpoint { path: checkpoint.to_owned(), problem };
        let bytes = fs::read(checkpoint.join(SEALED)).map_err(|e| refuse(format!("{SEALED}: {e}")))?;
        let sealed: Self =
            serde_json::from_slice(&bytes).map_err(|e| refuse(format!("{SEALED} is damaged: {e}")))?;
        if sealed.schema > SCHEMA {
            return Err(refuse(format!("schema {} is newer than this program's {SCHEMA}", sealed.schema)));
        }
        if sealed.expected_seal() != sealed.seal {
            return Err(refuse(format!("{SEALED} is damaged: its seal does not fit")));
        }
        Ok(sealed)
    }

    /// What this program writes as the file.
    pub fn to_text(&self) -> String {
        let sealed = Sealed { seal: self.expected_seal(), ..self.clone() };
        serde_json::to_string_pretty(&sealed).expect("numbers and strings are JSON")
    }

    /// Whether one file holds weights and moments.
    pub fn is_of_one_file(&self) -> bool {
        self.schema <= SCHEMA_OF_ONE_FILE
    }

    pub fn file(&self, name: &str) -> Option<&StateFile> {
        self.files.iter().find(|file| file.name == name)
    }

    /// The hash of the state by the checkpoint and by its step's line of metrics; none if neither was recorded.
    pub fn recorded_states(&self) -> Vec<String> {
        let line = self.metrics.as_ref().and_then(|line| serde_json::from_str::<Value>(line).ok());
        let in_metrics = line.and_then(|line| line["state_sha256"].as_str().map(str::to_owned));
        let recorded = Some(self.state_hash.clone()).filter(|hash| !hash.is_empty());
        recorded.into_iter().chain(in_metrics).collect()
    }

    fn expected_seal(&self) -> String {
        if self.schema == 1 {
            let Counters { step, position, n_updates } = self.counters;
            return sha256_hex(format!("{step} {position} {n_updates} {}", self.state_sha256).as_bytes());
        }
        let unsealed = Sealed { seal: String::new(), ..self.clone() };
        sha256_hex(serde_json::to_string(&unsealed).expect("numbers and strings are JSON").as_bytes())
    }
}
