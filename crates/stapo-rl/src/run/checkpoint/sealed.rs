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

#[cfg(test)]
mod tests {
    use super::*;

    /// A sealed file of a schema, as a program of that schema writes it.
    fn written(folder: &Path, schema: u32, change: impl Fn(&mut Value)) -> Result<Sealed> {
        let counters = Counters { step: 7, position: 30, n_updates: 14 };
        let (state_sha256, state_hash) = (String::new(), "ab".to_string());
        let (metrics, plan_sha256, seal) = (None, "cd".to_string(), String::new());
        let (loop_state, identity) = (LoopState::new(), Identity::default());
        let (records, files) = (Vec::new(), Vec::new());
        let sealed = Sealed {
            schema,
            counters,
            state_sha256,
            loop_state,
            state_hash,
            metrics,
            plan_sha256,
            identity,
            records,
            files,
            seal,
        };
        let mut value: Value = serde_json::from_str(&sealed.to_text()).unwrap();
        change(&mut value);
        fs::write(folder.join(SEALED), value.to_string()).unwrap();
        Sealed::read(folder)
    }

    #[test]
    fn a_seal_fits_what_was_written_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        assert_eq!(written(at, SCHEMA, |_| ()).unwrap().counters.position, 30);
        let said = |schema, change: fn(&mut Value)| written(at, schema, change).err().unwrap().to_string();
        let newer = said(SCHEMA + 1, |_| ());
        assert!(newer.contains("schema 5 is newer than this program's 4"), "{newer}");
        let changes: [fn(&mut Value); 6] = [
            |v| v["counters"]["step"] = 8.into(),
            |v| v["counters"]["position"] = 31.into(),
            |v| v["counters"]["n_updates"] = 15.into(),
            |v| v["loop_state"]["controls"] = "x".into(),
            |v| v["state_hash"] = "ba".into(),
            |v| v["plan_sha256"] = "dc".into(),
        ];
        for (idx, change) in changes.into_iter().enumerate() {
            let damaged = said(SCHEMA, change);
            assert!(damaged.contains("its seal does not fit"), "change {idx}: {damaged}");
        }
        // The first schema seals its counters and the state in another way.
        assert!(written(at, 1, |_| ()).is_ok());
        assert!(said(1, |v| v["counters"]["n_updates"] = 15.into()).contains("its seal does not fit"));
    }

    #[test]
    fn the_hash_of_a_state_is_that_of_the_checkpoint_and_of_its_line_of_metrics() {
        let folder = tempfile::tempdir().unwrap();
        let mut sealed = written(folder.path(), SCHEMA, |_| ()).unwrap();
        sealed.metrics = Some(r#"{"step": 7, "state_sha256": "ef"}"#.to_string());
        assert_eq!(sealed.recorded_states(), ["ab", "ef"]);
        sealed.state_hash = String::new();
        assert_eq!(sealed.recorded_states(), ["ef"]);
    }
}
