//! Checkpoints: safetensors, the plan and JSON, atomic, sealed with hashes, bounded in number. Weights and moments are two files,
//! so that weights are read alone and moments can be removed.

mod files;
mod sealed;
mod writing;

pub use writing::{Snapshot, StateSource};

use super::hashes::hash_file;
use super::state::{self, Counters, LoopState};
use super::tree::check_tree;
use crate::error::{Error, Result};
use crate::plan::config::{Keeping, KeptOptimizer};
use crate::ranks::{RankError, Transport};
use crate::run::disk::{remove_file, remove_folder, rename, sha256_hex};
use files::{Needed, StateFiles, other_state};
use sealed::Sealed;
use stapo_core::record::{FileHash, Identity};
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
    state: StateFiles,
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

/// The files of a checkpoint: weights, moments, the digests of the moments, by which weights can be checked without them, and the
/// plan. Up to schema 3, [`STATE`] held weights and moments.
pub(super) const WEIGHTS: &str = "weights.safetensors";
pub(super) const MOMENTS: &str = "moments.safetensors";
/// By this file a rank recognises the folder in which rank 0 makes a checkpoint; it is gone when the checkpoint is whole.
pub(super) const TOKEN: &str = "ranks";
const DIGESTS: &str = "moments.digests";
const STATE: &str = "state.safetensors";
const PLAN: &str = "plan.toml";

impl Checkpoint {
    /// Removes all but the newest `keeping.checkpoints` checkpoints up to `step` and that of step `spared`, what interrupted
    /// writers left behind, and the moments of all but the newest where these are not kept.
    pub fn prune(run: &Path, step: u64, keeping: Keeping, spared: Option<u64>) -> Result<()> {
        let folder = run.join("checkpoints");
        let entries = fs::read_dir(&folder).map_err(|e| Error::io(&folder, e))?;
        for path in entries.filter_map(|entry| entry.ok().map(|entry| entry.path())) {
            let is_ours = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(".step-"));
            if is_ours && path.extension().is_some_and(|extension| extension == "tmp") {
                remove_folder(&path)?;
            }
        }
        let mut kept: Vec<_> =
            Self::numbered(run)?.into_iter().rev().filter(|(number, _)| *number <= step).collect();
        let mut earlier = kept.split_off(keeping.checkpoints.min(kept.len()));
        kept.extend(earlier.extract_if(.., |(number, _)| Some(*number) == spared));
        for (number, old) in earlier {
            // It leaves by one rename: a process that reads during training finds the whole folder or none.
            let leaving = temporary_folder(&folder, number);
            rename(&old, &leaving)?;
            remove_folder(&leaving)?;
        }
        for (_, old) in
            kept.iter().filter(|(number, _)| keeping.optimizer == KeptOptimizer::Last && *number < step)
        {
            // One removal: a checkpoint has its moments or has none.
            let moments = old.join(MOMENTS);
            if moments.exists() {
                remove_file(&moments)?;
            }
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
    /// checkpoint while it was read, there are newer ones, and the search begins again.
    pub fn newest(run: &Path) -> Result<(Option<Self>, Vec<Error>)> {
        Self::newest_with(run, Needed::State)
    }

    /// As [`Checkpoint::newest`], of which only the weights are read and checked.
    pub fn newest_weights(run: &Path) -> Result<(Option<Self>, Vec<Error>)> {
        Self::newest_with(run, Needed::Weights)
    }

    fn newest_with(run: &Path, needed: Needed) -> Result<(Option<Self>, Vec<Error>)> {
        check_tree(run)?;
        let mut refused = Vec::new();
        let mut paths = Self::list(run)?;
        while let Some(path) = paths.pop() {
            match Self::open_with(&path, needed) {
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

    /// Whether a file of that name holds tensors of a checkpoint's state.
    pub(super) fn is_state_file(name: &str) -> bool {
        [WEIGHTS, MOMENTS, STATE].contains(&name)
    }

    /// The hash of a file of the state that a checkpoint whose seal fits has recorded; the file itself is not read.
    pub(super) fn recorded_file(path: &Path, name: &str) -> Option<String> {
        let sealed = Sealed::read(path).ok()?;
        match name {
            STATE => Some(sealed.state_sha256).filter(|hash| !hash.is_empty()),
            _ => sealed.file(name).map(|file| file.sha256.clone()),
        }
    }

    /// Reads a file of a checkpoint's state once and returns its hash, and what is wrong with the state in it. `known` is the
    /// hash of that state by the run's manifest.
    pub(super) fn check_file(
        path: &Path,
        name: &str,
        known: Option<&str>,
    ) -> Result<(String, Option<String>)> {
        let refuse = |problem: String| Error::Checkpoint { path: path.to_owned(), problem };
        match Sealed::read(path) {
            Ok(sealed) => files::check(path, name, &sealed, known).map_err(refuse),
            Err(error) => Ok((hash_file(name, &path.join(name))?.sha256, Some(error.to_string()))),
        }
    }

    /// As [`Checkpoint::check_file`], of a file of this checkpoint that has been read; `None` of one that has not been, and where
    /// the checkpoint recorded no state.
    pub(super) fn checked_file(&self, name: &str, known: Option<&str>) -> Option<(String, Option<String>)> {
        let found = &self.provenance.as_ref()?.state_hash;
        let other = known.filter(|known| known != found).map(|known| other_state(known, found));
        Some((self.state.checked(name)?, other))
    }

    /// Reads a checkpoint, and checks the hashes of the files and of the state in them, and that every number is finite. One without
    /// moments is refused.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_with(path, Needed::State)
    }

    /// As [`Checkpoint::open`], of which only the weights are read and checked.
    pub fn open_weights(path: &Path) -> Result<Self> {
        Self::open_with(path, Needed::Weights)
    }

    /// As [`Checkpoint::open`]; one without moments is not refused.
    pub fn open_kept(path: &Path) -> Result<Self> {
        Self::open_with(path, Needed::Kept)
    }

    fn open_with(path: &Path, needed: Needed) -> Result<Self> {
        let refuse = |problem: String| Error::Checkpoint { path: path.to_owned(), problem };
        let sealed = Sealed::read(path)?;
        let named = path.file_name().and_then(|name| name.to_str());
        if named.is_some_and(|name| name.starts_with("step-") && name != folder_name(sealed.counters.step)) {
            return Err(refuse(format!("is a copy of the checkpoint of step {}", sealed.counters.step)));
        }
        let state = StateFiles::open(path, &sealed, needed).map_err(refuse)?;
        let plan = match sealed.schema {
            1 => None,
            _ => Some(fs::read(path.join(PLAN)).map_err(|e| refuse(format!("{PLAN}: {e}")))?),
        };
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
        let Sealed { counters, loop_state, .. } = sealed;
        Ok(Self { path: path.to_owned(), counters, loop_state, provenance, state })
    }

    /// Whether the state is the model that the run started from, of which the checkpoint has no copy.
    pub fn is_start(&self) -> bool {
        matches!(self.state, StateFiles::Start)
    }

    /// The hash of the weights, under the name that weights have among the inputs of a run: of a checkpoint of one file that of the
    /// file, else one over the hashes of the tensors' leaves.
    pub(crate) fn weights_hash(&self) -> Option<FileHash> {
        let sha256 = match &self.state {
            StateFiles::Start => return None,
            StateFiles::One { sha256, .. } => sha256,
            StateFiles::Two { weights_sha256, .. } => weights_sha256,
        };
        let n_bytes = self.state.weights()?.len() as u64;
        Some(FileHash { name: "weights".to_string(), n_bytes, sha256: sha256.clone() })
    }

    /// Copies the weights of a run without adapters to a policy of the same shape, with adapters or without.
    pub fn restore_base(&self, policy: &mut Policy) -> Result<()> {
        let restored = self.weights().and_then(|weights| state::restore_base(weights, policy));
        restored.map_err(|problem| self.refusal(problem))
    }

    /// Copies the weights that the run trained to a policy of the same shape.
    pub fn restore_weights(&self, policy: &mut Policy) -> Result<()> {
        let restored = self.weights().and_then(|weights| state::restore_weights(weights, policy));
        restored.map_err(|problem| self.refusal(problem))
    }

    fn weights(&self) -> std::result::Result<&[u8], String> {
        self.state.weights().ok_or_else(|| "has no weights besides those of the run's model".to_string())
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
    let carried = checkpoint.map(|checkpoint| {
        let Checkpoint { counters, loop_state, .. } = checkpoint;
        (*counters, loop_state.clone(), checkpoint.is_start())
    });
    let text =
        carried.as_ref().map(|carried| serde_json::to_string(carried).expect("numbers and texts are JSON"));
    let shared = ranks.broadcast(text.unwrap_or_default().as_bytes())?;
    let (counters, loop_state, is_start): (Counters, LoopState, bool) =
        serde_json::from_slice(&shared).map_err(|error| refuse(error.to_string()))?;
    if is_start {
        // The policy and the optimizer are new: the model has been loaded, and the moments are zero.
        return Ok((counters, loop_state));
    }
    let files = checkpoint.map(|checkpoint| {
        let missing = || refuse("has been opened without its optimizer state".to_string());
        let (weights, moments) =
            checkpoint.state.weights().zip(checkpoint.state.moments()).ok_or_else(missing)?;
        Ok::<_, Error>([weights, moments])
    });
    state::restore(files.transpose()?, ranks, counters.n_updates, state).map_err(refuse)?;
    Ok((counters, loop_state))
}

/// A folder that is being written or removed.
fn temporary_folder(checkpoints: &Path, step: u64) -> PathBuf {
    checkpoints.join(format!(".{}.tmp", folder_name(step)))
}

fn folder_name(step: u64) -> String {
    format!("step-{step:06}")
}
