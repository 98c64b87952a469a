//! Checkpoints: safetensors and JSON, atomic, sealed with hashes, bounded in number.

use super::tree::check_tree;
use crate::disk::{create_folder, hex, remove_folder, rename, sha256_hex, write_whole};
use crate::error::{Error, Result};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use stapo_core::record::SCHEMA;
use stapo_model::decoder::Policy;
use stapo_model::optimizer::Optimizer;
use std::fs;
use std::path::{Path, PathBuf};

/// The progress of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Training steps made.
    pub step: u64,
    /// Problems drawn.
    pub position: u64,
    /// Optimizer steps made.
    pub n_updates: u64,
}

/// A checkpoint whose hashes have been checked.
#[derive(Debug)]
pub struct Checkpoint {
    pub path: PathBuf,
    pub counters: Counters,
    state: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
struct Sealed {
    schema: u32,
    counters: Counters,
    state_sha256: String,
    /// A hash of the other fields, so that a changed counter is found like a changed weight.
    seal: String,
}

const STATE: &str = "state.safetensors";
const SEALED: &str = "checkpoint.json";
/// Prefixes of tensor names: the weights and the optimizer's two moments.
const PARTS: [&str; 3] = ["weight", "moment1", "moment2"];

impl Checkpoint {
    /// Writes the state after `counters.step` and removes all but the newest `n_kept` checkpoints.
    pub fn save(
        run: &Path,
        counters: Counters,
        policy: &Policy,
        optimizer: &Optimizer,
        n_kept: usize,
    ) -> Result<PathBuf> {
        let folder = run.join("checkpoints");
        let path = folder.join(format!("step-{:06}", counters.step));
        let beside = folder.join(format!(".step-{:06}.tmp", counters.step));
        let written = (|| {
            if beside.exists() {
                remove_folder(&beside)?;
            }
            create_folder(&beside)?;
            let state = serialize(policy, optimizer);
            let state_sha256 = sha256_hex(&state);
            write_whole(&beside.join(STATE), &state)?;
            let seal = seal(counters, &state_sha256);
            let sealed = Sealed { schema: SCHEMA, counters, state_sha256, seal };
            let text = serde_json::to_string_pretty(&sealed).expect("numbers and strings are JSON");
            write_whole(&beside.join(SEALED), text.as_bytes())?;
            if path.exists() {
                remove_folder(&path)?;
            }
            rename(&beside, &path)
        })();
        if written.is_err() {
            let _ = fs::remove_dir_all(&beside);
        }
        written?;
        for old in Self::list(run)?.into_iter().rev().skip(n_kept) {
            remove_folder(&old)?;
        }
        Ok(path)
    }

    /// The folders of a run's checkpoints, oldest first.
    pub fn list(run: &Path) -> Result<Vec<PathBuf>> {
        let folder = run.join("checkpoints");
        let entries = fs::read_dir(&folder).map_err(|e| Error::io(&folder, e))?;
        let named =
            |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("step-"));
        let mut found: Vec<PathBuf> =
            entries.filter_map(|e| e.ok().map(|e| e.path())).filter(named).collect();
        found.sort();
        Ok(found)
    }

    /// The newest good checkpoint, and the errors of newer checkpoints that were refused.
    pub fn newest(run: &Path) -> Result<(Option<Self>, Vec<Error>)> {
        check_tree(run)?;
        let mut refused = Vec::new();
        for path in Self::list(run)?.into_iter().rev() {
            match Self::open(&path) {
                Ok(checkpoint) => return Ok((Some(checkpoint), refused)),
                Err(error) => refused.push(error),
            }
        }
        Ok((None, refused))
    }

    /// Reads a checkpoint and checks the hashes.
    pub fn open(path: &Path) -> Result<Self> {
        let refuse = |problem: String| Error::Checkpoint { path: path.to_owned(), problem };
        let read = |name: &str| fs::read(path.join(name)).map_err(|e| refuse(format!("{name}: {e}")));
        let sealed: Sealed = serde_json::from_slice(&read(SEALED)?)
            .map_err(|e| refuse(format!("{SEALED} is damaged: {e}")))?;
        if sealed.schema > SCHEMA {
            return Err(refuse(format!("schema {} is newer than this program's {SCHEMA}", sealed.schema)));
        }
        if seal(sealed.counters, &sealed.state_sha256) != sealed.seal {
            return Err(refuse(format!("{SEALED} is damaged: its seal does not fit")));
        }
        let state = read(STATE)?;
        if sha256_hex(&state) != sealed.state_sha256 {
            return Err(refuse(format!("{STATE} is damaged: its hash is not the one recorded")));
        }
        Ok(Self { path: path.to_owned(), counters: sealed.counters, state })
    }

    /// Copies the state to a policy and an optimizer of the same shape.
    pub fn restore(&self, policy: &mut Policy, optimizer: &mut Optimizer) -> Result<()> {
        self.restore_weights(policy)?;
        let tensors = self.tensors()?;
        optimizer.restore(policy, self.counters.n_updates, |spec, m, v| {
            self.read(&tensors, PARTS[1], &spec.name, m)?;
            self.read(&tensors, PARTS[2], &spec.name, v)
        })
    }

    /// Copies the weights alone to a policy of the same shape.
    pub fn restore_weights(&self, policy: &mut Policy) -> Result<()> {
        let tensors = self.tensors()?;
        let mut outcome = Ok(());
        policy.fill(|spec, values| {
            if outcome.is_ok() {
                outcome = self.read(&tensors, PARTS[0], &spec.name, values);
            }
        });
        outcome
    }

    fn tensors(&self) -> Result<SafeTensors<'_>> {
        SafeTensors::deserialize(&self.state).map_err(|e| self.refusal(e.to_string()))
    }

    fn read(&self, tensors: &SafeTensors<'_>, part: &str, name: &str, values: &mut [f32]) -> Result<()> {
        let tensor =
            tensors.tensor(&format!("{part}.{name}")).map_err(|e| self.refusal(format!("{name}: {e}")))?;
        let bytes = tensor.data();
        if bytes.len() != 4 * values.len() {
            return Err(self.refusal(format!(
                "{name}: {} bytes, expected {}",
                bytes.len(),
                4 * values.len()
            )));
        }
        for (value, bytes) in values.iter_mut().zip(bytes.chunks_exact(4)) {
            *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        Ok(())
    }

    fn refusal(&self, problem: String) -> Error {
        Error::Checkpoint { path: self.path.clone(), problem }
    }
}

/// One hash of weights, optimizer state and counters.
pub(crate) fn state_hash(counters: Counters, policy: &Policy, optimizer: &Optimizer) -> String {
    let mut hash = Sha256::new();
    let mut add = |values: &[f32]| hash.update(bytes_of(values));
    for (_, values) in policy.tensors() {
        add(&values.to_vec());
    }
    for (_, m, v) in optimizer.state(policy) {
        add(&m.to_vec());
        add(&v.to_vec());
    }
    for count in [counters.step, counters.position, counters.n_updates] {
        hash.update(count.to_le_bytes());
    }
    hex(&hash.finalize())
}

fn seal(counters: Counters, state_sha256: &str) -> String {
    let Counters { step, position, n_updates } = counters;
    sha256_hex(format!("{step} {position} {n_updates} {state_sha256}").as_bytes())
}

fn serialize(policy: &Policy, optimizer: &Optimizer) -> Vec<u8> {
    let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    for (spec, values) in policy.tensors() {
        tensors.push((format!("{}.{}", PARTS[0], spec.name), spec.shape.clone(), bytes_of(&values.to_vec())));
    }
    for (spec, m, v) in optimizer.state(policy) {
        tensors.push((format!("{}.{}", PARTS[1], spec.name), spec.shape.clone(), bytes_of(&m.to_vec())));
        tensors.push((format!("{}.{}", PARTS[2], spec.name), spec.shape.clone(), bytes_of(&v.to_vec())));
    }
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view =
            TensorView::new(Dtype::F32, shape.clone(), bytes).expect("as many bytes as the shape says");
        (name, view)
    });
    safetensors::serialize(views, None).expect("f32 tensors of distinct names")
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
