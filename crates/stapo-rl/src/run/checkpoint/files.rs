//! The files of a checkpoint's state, mapped and checked.

use super::sealed::{SCHEMA_OF_ONE_FILE, Sealed, StateFile};
use super::{DIGESTS, MOMENTS, STATE, WEIGHTS};
use crate::run::disk::sha256_hex;
use crate::run::state::{self, PARTS};
use crate::run::state_hash::{Digests, HashedFile, from_bytes, hash_of_one_file, hash_of_parts};
use stapo_model::MappedFile;
use std::fs;
use std::path::Path;

/// What of a checkpoint is read, checked and kept open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Needed {
    Weights,
    /// Weights and moments.
    State,
    /// Weights, and moments where the checkpoint has kept them.
    Kept,
}

/// The state of a checkpoint; pages are read as they are touched.
#[derive(Debug)]
pub(super) enum StateFiles {
    /// The state is the model that the run started from, with moments of zero.
    Start,
    /// Weights and moments in one file, as programs wrote it up to schema 3.
    One { file: MappedFile, sha256: String },
    Two {
        weights: MappedFile,
        moments: Option<MappedFile>,
        /// One hash of all weights.
        weights_sha256: String,
        recorded: Vec<StateFile>,
    },
}

impl StateFiles {
    /// Maps the files, and checks that they hold the state that the checkpoint has recorded, and that every number is finite.
    pub fn open(checkpoint: &Path, sealed: &Sealed, needed: Needed) -> Result<Self, String> {
        if sealed.is_of_one_file() {
            return Self::open_one(checkpoint, sealed);
        }
        if sealed.files.is_empty() {
            return Ok(Self::Start);
        }
        let weights = map(checkpoint, WEIGHTS)?;
        let hashed = hash_leaves(&weights, sealed, WEIGHTS)?;
        let of_moments = kept_digests(checkpoint)?;
        let found = hash_of_parts(&hashed.digests, &of_moments, sealed.counters, &sealed.loop_state)?;
        if let Some(recorded) = sealed.recorded_states().into_iter().find(|recorded| *recorded != found) {
            return Err(damaged_or(&weights, sealed, WEIGHTS, &other_state(&recorded, &found)));
        }
        check_finite(&weights, WEIGHTS)?;
        let has_moments = checkpoint.join(MOMENTS).exists();
        let moments = match needed {
            Needed::Weights => None,
            Needed::Kept if !has_moments => None,
            Needed::State if !has_moments => return Err(NO_MOMENTS.to_string()),
            Needed::State | Needed::Kept => {
                let moments = map(checkpoint, MOMENTS)?;
                if hash_leaves(&moments, sealed, MOMENTS)?.digests != of_moments {
                    return Err(damaged_or(&moments, sealed, MOMENTS, OTHER_MOMENTS));
                }
                check_finite(&moments, MOMENTS)?;
                Some(moments)
            }
        };
        let recorded = sealed.files.clone();
        Ok(Self::Two { weights, moments, weights_sha256: hashed.tree(), recorded })
    }

    fn open_one(checkpoint: &Path, sealed: &Sealed) -> Result<Self, String> {
        let file = map(checkpoint, STATE)?;
        let (sha256, found) = hash_of_one_file(&file, sealed.counters, &sealed.loop_state);
        if sha256 != sealed.state_sha256 {
            return Err(format!("{STATE} is damaged: its hash is not the one recorded"));
        }
        let found = found.map_err(|problem| format!("{STATE}: {problem}"))?;
        if let Some(recorded) = sealed.recorded_states().into_iter().find(|recorded| *recorded != found) {
            let may_be_older = sealed.schema < SCHEMA_OF_ONE_FILE;
            let hint = "; if an earlier program wrote it, which hashed states in another way, use the one that build.json names";
            let hint = if may_be_older { hint } else { "" };
            return Err(format!("{STATE}: {}{hint}", other_state(&recorded, &found)));
        }
        check_finite(&file, STATE)?;
        Ok(Self::One { file, sha256 })
    }

    /// The file of the weights; none if the state is the model that the run started from.
    pub fn weights(&self) -> Option<&[u8]> {
        match self {
            Self::Start => None,
            Self::One { file, .. } => Some(file),
            Self::Two { weights, .. } => Some(weights),
        }
    }

    /// The file of the moments, where it was needed and kept.
    pub fn moments(&self) -> Option<&[u8]> {
        match self {
            Self::Start => None,
            Self::One { file, .. } => Some(file),
            Self::Two { moments, .. } => moments.as_deref(),
        }
    }

    /// The recorded hash of a file that has been checked.
    pub fn checked(&self, name: &str) -> Option<String> {
        match self {
            Self::One { sha256, .. } if name == STATE => Some(sha256.clone()),
            Self::Two { recorded, moments, .. } => {
                let is_read = name == WEIGHTS || name == MOMENTS && moments.is_some();
                let file = recorded.iter().find(|file| file.name == name).filter(|_| is_read)?;
                Some(file.sha256.clone())
            }
            _ => None,
        }
    }
}

/// The hash of a file of a checkpoint's state, and what is wrong with the tensors in it. `known` is the hash of the state by the
/// run's manifest.
pub(super) fn check(
    checkpoint: &Path,
    name: &str,
    sealed: &Sealed,
    known: Option<&str>,
) -> Result<(String, Option<String>), String> {
    let file = map(checkpoint, name)?;
    let other = |found: &str| {
        let recorded = sealed.recorded_states().into_iter().chain(known.map(str::to_owned));
        recorded.into_iter().find(|hash| hash != found).map(|hash| other_state(&hash, found))
    };
    if name == STATE {
        let (sha256, found) = hash_of_one_file(&file, sealed.counters, &sealed.loop_state);
        return Ok((sha256, found.map_or_else(Some, |found| other(&found))));
    }
    let parts = parts_of(name);
    let hashed = match HashedFile::compute(&file, parts, true) {
        Ok(hashed) => hashed,
        Err(problem) => return Ok((sha256_hex(&file), Some(problem))),
    };
    let problem = kept_digests(checkpoint).and_then(|of_moments| {
        if name == MOMENTS {
            return Ok((hashed.digests != of_moments).then(|| OTHER_MOMENTS.to_string()));
        }
        Ok(other(&hash_of_parts(&hashed.digests, &of_moments, sealed.counters, &sealed.loop_state)?))
    });
    Ok((hashed.file.unwrap_or_default(), problem.unwrap_or_else(Some)))
}

pub(super) fn other_state(recorded: &str, found: &str) -> String {
    format!("its weights and optimizer state have the hash {found}, recorded {recorded}")
}

const OTHER_MOMENTS: &str = "its moments are not those of the recorded state";
const NO_MOMENTS: &str = "has weights but no optimizer state, so it can be evaluated and exported and not gone on from; record.optimizer = \"all\" keeps the optimizer state in every checkpoint, \"last\" in the newest only";

/// The parts of the state that a file holds.
pub(super) fn parts_of(name: &str) -> &'static [&'static str] {
    if name == WEIGHTS { &PARTS[..1] } else { &PARTS[1..] }
}

fn map(checkpoint: &Path, name: &str) -> Result<MappedFile, String> {
    MappedFile::open(&checkpoint.join(name)).map_err(|e| format!("{name}: {e}"))
}

fn kept_digests(checkpoint: &Path) -> Result<Digests, String> {
    let bytes = fs::read(checkpoint.join(DIGESTS)).map_err(|e| format!("{DIGESTS}: {e}"))?;
    from_bytes(&bytes).ok_or_else(|| format!("{DIGESTS} is damaged: it is no list of hashes"))
}

/// The digests of a file whose header is as recorded.
fn hash_leaves(file: &[u8], sealed: &Sealed, name: &str) -> Result<HashedFile, String> {
    let hashed = HashedFile::compute(file, parts_of(name), false).map_err(|e| format!("{name}: {e}"))?;
    match sealed.file(name) {
        Some(recorded) if recorded.head_sha256 == hashed.head => Ok(hashed),
        _ => Err(format!("{name} is damaged: the hash of its header is not the one recorded")),
    }
}

/// Tells a file that is not as it was written from one that was written with other tensors.
fn damaged_or(file: &[u8], sealed: &Sealed, name: &str, otherwise: &str) -> String {
    match sealed.file(name) {
        Some(recorded) if recorded.sha256 == sha256_hex(file) => format!("{name}: {otherwise}"),
        _ => format!("{name} is damaged: its hash is not the one recorded"),
    }
}

fn check_finite(file: &[u8], name: &str) -> Result<(), String> {
    state::first_not_finite_in(file).map_or(Ok(()), |problem| Err(format!("{name}: {problem}")))
}
