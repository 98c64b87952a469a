//! Checkpoints: safetensors, the plan and JSON, atomic, sealed with hashes, bounded in number.

use super::state::{self, Counters, LoopState};
use super::state_hash::StateFileHashes;
use super::tree::check_tree;
use crate::error::{Error, Result};
use crate::ranks::{RankError, Transport};
use crate::run::disk::{
    create_folder_of_part, remove_folder, rename, sha256_hex, write_whole, write_whole_with,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use stapo_core::record::{FileHash, Identity};
use stapo_model::MappedFile;
use stapo_model::decoder::Policy;
use stapo_model::optimizer::Optimizer;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A checkpoint whose hashes have been checked.
#[derive(Debug)]
pub struct Checkpoint {
    pub path: PathBuf,
    pub counters: Counters,
    pub loop_state: LoopState,
    /// `None` for a checkpoint of a program that did not record it.
    pub provenance: Option<Provenance>,
    /// The file of the weights and the optimizer state; pages are read as they are touched.
    state: MappedFile,
    state_sha256: String,
}

/// What a checkpoint says about the run that made it.
#[derive(Debug, Clone, PartialEq)]
pub struct Provenance {
    /// The hash of weights, optimizer state and counters.
    pub state_hash: String,
    /// The step's line of `metrics.jsonl` without its newline; `None` before the first step.
    pub metrics: Option<String>,
    /// The text of `plan.toml`, of which the checkpoint keeps a copy.
    pub plan: String,
    pub identity: Identity,
    /// `metrics.jsonl` and `records.jsonl` up to the step; empty for a checkpoint of a program that did not record them.
    pub records: Vec<FileHash>,
}

/// What a checkpoint is made of.
pub struct Snapshot<'a> {
    pub counters: Counters,
    pub loop_state: &'a LoopState,
    pub policy: &'a Policy,
    pub optimizer: &'a Optimizer,
    pub provenance: Provenance,
}

/// `checkpoint.json`. Schema 1 has only the first three keys and a seal of its own.
#[derive(Clone, Serialize, Deserialize)]
struct Sealed {
    schema: u32,
    counters: Counters,
    /// The hash of `state.safetensors`.
    state_sha256: String,
    #[serde(default)]
    loop_state: LoopState,
    #[serde(default)]
    state_hash: String,
    #[serde(default)]
    metrics: Option<String>,
    /// The hash of the checkpoint's copy of `plan.toml`.
    #[serde(default)]
    plan_sha256: String,
    #[serde(default)]
    identity: Identity,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    records: Vec<FileHash>,
    /// A hash of the other keys, so that a changed counter is found like a changed weight.
    seal: String,
}

/// The schema of `checkpoint.json` that this program writes, and the highest that this program reads.
const CHECKPOINT_SCHEMA: u32 = 3;
pub(super) const STATE: &str = "state.safetensors";
const PLAN: &str = "plan.toml";
const SEALED: &str = "checkpoint.json";

impl Sealed {
    /// The file of a checkpoint, with a seal that fits.
    fn read(checkpoint: &Path) -> Result<Self> {
        let refuse = |problem: String| Error::Checkpoint { path: checkpoint.to_owned(), problem };
        let bytes = fs::read(checkpoint.join(SEALED)).map_err(|e| refuse(format!("{SEALED}: {e}")))?;
        let sealed: Self =
            serde_json::from_slice(&bytes).map_err(|e| refuse(format!("{SEALED} is damaged: {e}")))?;
        if sealed.schema > CHECKPOINT_SCHEMA {
            return Err(refuse(format!(
                "schema {} is newer than this program's {CHECKPOINT_SCHEMA}",
                sealed.schema
            )));
        }
        if sealed.expected_seal() != sealed.seal {
            return Err(refuse(format!("{SEALED} is damaged: its seal does not fit")));
        }
        Ok(sealed)
    }

    /// The hash of the state by the checkpoint and by its step's line of metrics; none where neither was recorded.
    fn recorded_states(&self) -> Vec<String> {
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

impl Checkpoint {
    /// Writes the state after `counters.step`. A state that is not finite is refused, and nothing is written.
    pub fn save(run: &Path, snapshot: &Snapshot) -> Result<PathBuf> {
        let Snapshot { counters, policy, optimizer, .. } = *snapshot;
        state::check_finite(counters.step, policy, optimizer)?;
        let folder = run.join("checkpoints");
        let path = folder.join(folder_name(counters.step));
        let temporary = temporary_folder(&folder, counters.step);
        let written = snapshot.write(&temporary).and_then(|()| put_in_place(&temporary, &path));
        if written.is_err() {
            let _ = fs::remove_dir_all(&temporary);
        }
        written?;
        Ok(path)
    }

    /// Removes all but the newest `n_kept` checkpoints up to `step` and that of step `spared`, and what interrupted
    /// writers left behind.
    pub fn prune(run: &Path, step: u64, n_kept: usize, spared: Option<u64>) -> Result<()> {
        let folder = run.join("checkpoints");
        let entries = fs::read_dir(&folder).map_err(|e| Error::io(&folder, e))?;
        for path in entries.filter_map(|entry| entry.ok().map(|entry| entry.path())) {
            let is_ours = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(".step-"));
            if is_ours && path.extension().is_some_and(|extension| extension == "tmp") {
                remove_folder(&path)?;
            }
        }
        let earlier = Self::numbered(run)?.into_iter().rev().filter(|(number, _)| *number <= step);
        for (number, old) in earlier.skip(n_kept).filter(|(number, _)| Some(*number) != spared) {
            // It leaves by one rename: whoever reads beside the trainer finds the whole folder or none.
            let leaving = temporary_folder(&folder, number);
            rename(&old, &leaving)?;
            remove_folder(&leaving)?;
        }
        Ok(())
    }

    /// The folders of a run's checkpoints, oldest first.
    pub fn list(run: &Path) -> Result<Vec<PathBuf>> {
        Ok(Self::numbered(run)?.into_iter().map(|(_, path)| path).collect())
    }

    /// The folders named `step-` and digits, by step.
    fn numbered(run: &Path) -> Result<Vec<(u64, PathBuf)>> {
        let folder = run.join("checkpoints");
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(Error::io(&folder, error)),
        };
        let step = |path: &Path| {
            let digits = path.file_name()?.to_str()?.strip_prefix("step-")?;
            digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
        };
        let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
        let mut found: Vec<(u64, PathBuf)> = paths.filter_map(|path| Some((step(&path)?, path))).collect();
        found.sort();
        Ok(found)
    }

    /// The newest good checkpoint, and the errors of newer checkpoints that were refused. Where a trainer removed a
    /// checkpoint while it was read, there are newer ones, and the search begins anew.
    pub fn newest(run: &Path) -> Result<(Option<Self>, Vec<Error>)> {
        check_tree(run)?;
        let mut refused = Vec::new();
        let mut paths = Self::list(run)?;
        while let Some(path) = paths.pop() {
            match Self::open(&path) {
                Ok(checkpoint) => return Ok((Some(checkpoint), refused)),
                Err(_) if !path.exists() => {
                    paths = Self::list(run)?;
                    refused.clear();
                }
                Err(error) => refused.push(error),
            }
        }
        Ok((None, refused))
    }

    /// The step and the state hash of a checkpoint whose seal fits; the state itself is not read.
    pub fn recorded_hash(path: &Path) -> Option<(u64, String)> {
        let sealed = Sealed::read(path).ok().filter(|sealed| sealed.schema > 1)?;
        Some((sealed.counters.step, sealed.state_hash))
    }

    /// The hash of the state file that a checkpoint whose seal fits has recorded; the file itself is not read.
    pub(super) fn recorded_state_file(path: &Path) -> Option<String> {
        Sealed::read(path).ok().map(|sealed| sealed.state_sha256)
    }

    /// Reads the state file of a checkpoint once and returns its hash, and what is wrong with the state in it. `known` is the
    /// hash of that state by the run's manifest.
    pub(super) fn check_state(path: &Path, known: Option<&str>) -> Result<(String, Option<String>)> {
        let state = path.join(STATE);
        let mapped = MappedFile::open(&state).map_err(|e| Error::io(&state, e))?;
        let sealed = match Sealed::read(path) {
            Ok(sealed) => sealed,
            Err(error) => return Ok((sha256_hex(&mapped), Some(error.to_string()))),
        };
        let hashes = StateFileHashes::compute(&mapped, sealed.counters, &sealed.loop_state);
        let problem = match &hashes.state {
            Err(problem) => Some(problem.clone()),
            Ok(found) => {
                let recorded = sealed.recorded_states().into_iter().chain(known.map(str::to_owned));
                recorded.into_iter().find(|hash| hash != found).map(|hash| other_state(&hash, found))
            }
        };
        Ok((hashes.file, problem))
    }

    /// As [`Checkpoint::check_state`], of a checkpoint that has been read; `None` where it recorded no state.
    pub(super) fn checked_state(&self, known: Option<&str>) -> Option<(String, Option<String>)> {
        let found = &self.provenance.as_ref()?.state_hash;
        let other = known.filter(|known| known != found).map(|known| other_state(known, found));
        Some((self.state_sha256.clone(), other))
    }

    /// Reads a checkpoint, and checks the hashes of the file and of the state in it, and that every number is finite.
    pub fn open(path: &Path) -> Result<Self> {
        let refuse = |problem: String| Error::Checkpoint { path: path.to_owned(), problem };
        let read = |name: &str| fs::read(path.join(name)).map_err(|e| refuse(format!("{name}: {e}")));
        let sealed = Sealed::read(path)?;
        let named = path.file_name().and_then(|name| name.to_str());
        if named.is_some_and(|name| name.starts_with("step-") && name != folder_name(sealed.counters.step)) {
            return Err(refuse(format!("is a copy of the checkpoint of step {}", sealed.counters.step)));
        }
        let state = MappedFile::open(&path.join(STATE)).map_err(|e| refuse(format!("{STATE}: {e}")))?;
        let hashes = StateFileHashes::compute(&state, sealed.counters, &sealed.loop_state);
        if hashes.file != sealed.state_sha256 {
            return Err(refuse(format!("{STATE} is damaged: its hash is not the one recorded")));
        }
        let found = hashes.state.map_err(|problem| refuse(format!("{STATE}: {problem}")))?;
        if let Some(recorded) = sealed.recorded_states().into_iter().find(|recorded| *recorded != found) {
            let may_be_older = sealed.schema < CHECKPOINT_SCHEMA;
            let hint = "; if an earlier program wrote it, which hashed states in another way, use the one that build.json names";
            let hint = if may_be_older { hint } else { "" };
            return Err(refuse(format!("{STATE}: {}{hint}", other_state(&recorded, &found))));
        }
        if let Some(problem) = state::first_not_finite_in(&state) {
            return Err(refuse(format!("{STATE}: {problem}")));
        }
        let plan = if sealed.schema == 1 { None } else { Some(read(PLAN)?) };
        if plan.as_ref().is_some_and(|plan| sha256_hex(plan) != sealed.plan_sha256) {
            return Err(refuse(format!("{PLAN} is damaged: its hash is not the one recorded")));
        }
        let provenance = plan.map(|plan| Provenance {
            state_hash: sealed.state_hash,
            metrics: sealed.metrics,
            plan: String::from_utf8_lossy(&plan).into_owned(),
            identity: sealed.identity,
            records: sealed.records,
        });
        let Sealed { counters, loop_state, state_sha256, .. } = sealed;
        Ok(Self { path: path.to_owned(), counters, loop_state, provenance, state, state_sha256 })
    }

    /// The hash of the file that holds the weights, under the name that weights have among the inputs of a run.
    pub(crate) fn state_file(&self) -> FileHash {
        let n_bytes = self.state.len() as u64;
        FileHash { name: "weights".to_string(), n_bytes, sha256: self.state_sha256.clone() }
    }

    /// Copies the weights of a run without adapters to a policy of the same shape, with adapters or without.
    pub fn restore_base(&self, policy: &mut Policy) -> Result<()> {
        state::restore_base(&self.state, policy).map_err(|problem| self.refusal(problem))
    }

    /// Copies the weights that the run trained to a policy of the same shape.
    pub fn restore_weights(&self, policy: &mut Policy) -> Result<()> {
        state::restore_weights(&self.state, policy).map_err(|problem| self.refusal(problem))
    }

    fn refusal(&self, problem: String) -> Error {
        Error::Checkpoint { path: self.path.clone(), problem }
    }
}

/// Copies the state of the checkpoint that rank 0 has to the policy and the optimizer of every rank. Returns the counters
/// and the loop state.
pub(crate) fn restore(
    checkpoint: Option<&Checkpoint>,
    ranks: &dyn Transport,
    state: (&mut Policy, &mut Optimizer),
) -> Result<(Counters, LoopState)> {
    let refuse = |problem: String| match checkpoint {
        Some(checkpoint) => checkpoint.refusal(problem),
        None => Error::Rank(RankError { rank: 0, problem }),
    };
    let carried = checkpoint.map(|checkpoint| (checkpoint.counters, checkpoint.loop_state.clone()));
    let text =
        carried.as_ref().map(|carried| serde_json::to_string(carried).expect("numbers and texts are JSON"));
    let shared = ranks.broadcast(text.unwrap_or_default().as_bytes())?;
    let (counters, loop_state): (Counters, LoopState) =
        serde_json::from_slice(&shared).map_err(|error| refuse(error.to_string()))?;
    let file = checkpoint.map(|checkpoint| &*checkpoint.state);
    state::restore(file, ranks, counters.n_updates, state).map_err(refuse)?;
    Ok((counters, loop_state))
}

impl Snapshot<'_> {
    fn write(&self, folder: &Path) -> Result<()> {
        if folder.exists() {
            remove_folder(folder)?;
        }
        create_folder_of_part(folder)?;
        let state_sha256 = self.write_state(&folder.join(STATE))?;
        let Provenance { state_hash, metrics, plan, identity, records } = &self.provenance;
        write_whole(&folder.join(PLAN), plan.as_bytes())?;
        let mut sealed = Sealed {
            schema: CHECKPOINT_SCHEMA,
            counters: self.counters,
            state_sha256,
            loop_state: self.loop_state.clone(),
            state_hash: state_hash.clone(),
            metrics: metrics.clone(),
            plan_sha256: sha256_hex(plan.as_bytes()),
            identity: identity.clone(),
            records: records.clone(),
            seal: String::new(),
        };
        sealed.seal = sealed.expected_seal();
        let text = serde_json::to_string_pretty(&sealed).expect("numbers and strings are JSON");
        write_whole(&folder.join(SEALED), text.as_bytes())
    }

    /// Writes weights and optimizer state, tensor by tensor, and returns the hash of the file.
    fn write_state(&self, path: &Path) -> Result<String> {
        let mut hash = String::new();
        write_whole_with(path, |file| {
            hash = state::write(self.policy, self.optimizer, file)?;
            Ok(())
        })?;
        Ok(hash)
    }
}

fn other_state(recorded: &str, found: &str) -> String {
    format!("its weights and optimizer state have the hash {found}, recorded {recorded}")
}

/// Moves a written checkpoint to its name. What has that name was refused or is the same state, since a run goes on
/// from its newest good checkpoint.
fn put_in_place(temporary: &Path, path: &Path) -> Result<()> {
    if path.exists() {
        remove_folder(path)?;
    }
    rename(temporary, path)
}

/// A folder that is being written or removed.
fn temporary_folder(checkpoints: &Path, step: u64) -> PathBuf {
    checkpoints.join(format!(".{}.tmp", folder_name(step)))
}

fn folder_name(step: u64) -> String {
    format!("step-{step:06}")
}
