//! Writing a checkpoint: into a temporary folder, which gets its name when all of it is on the disk.

use super::files::parts_of;
use super::sealed::{SCHEMA, SEALED, Sealed, StateFile};
use super::{DIGESTS, MOMENTS, PLAN, Provenance, TOKEN, WEIGHTS, folder_name, temporary_folder};
use crate::error::{Error, Result};
use crate::run::disk::{
    create_folder_of_part, create_sized, remove_file, remove_folder, rename, sha256_hex, write_large,
    write_whole, write_whole_with,
};
use crate::run::image::Image;
use crate::run::state::{self, Counters, LoopState};
use crate::run::state_hash::{Digests, HashedFile, hash_of_parts, to_bytes};
use stapo_model::MappedFile;
use stapo_model::decoder::Policy;
use stapo_model::optimizer::Optimizer;
use std::fs;
use std::path::{Path, PathBuf};

/// What a checkpoint says besides weights and moments.
#[derive(Debug)]
pub struct Snapshot {
    pub counters: Counters,
    pub loop_state: LoopState,
    /// An empty hash is that of a state that no step has hashed.
    pub provenance: Provenance,
}

/// Where the weights and moments of a checkpoint come from.
pub enum StateSource<'a> {
    /// They are those of the model that the run started from, and are not written again.
    Start,
    /// They have been copied to host memory.
    Copied(&'a Image),
    /// All ranks have written them to files of [`Snapshot::make_files`].
    Written,
    /// They are read tensor by tensor from all ranks, while the trainer waits.
    Streamed(&'a Policy, &'a Optimizer),
}

impl Snapshot {
    /// Writes the checkpoint. Returns the hash of its state.
    pub fn write(mut self, run: &Path, state: &StateSource) -> Result<String> {
        let folder = run.join("checkpoints");
        let path = folder.join(folder_name(self.counters.step));
        let temporary = temporary_folder(&folder, self.counters.step);
        let written = self.write_files(&temporary, state).and_then(|()| put_in_place(&temporary, &path));
        if written.is_err() {
            let _ = fs::remove_dir_all(&temporary);
        }
        written?;
        Ok(self.provenance.state_hash)
    }

    /// Makes the temporary folder and in it the files of the state, for all ranks to write. Returns the folder and the bytes
    /// before the first tensor of each file.
    pub fn make_files(
        &self,
        run: &Path,
        policy: &Policy,
        optimizer: &Optimizer,
    ) -> Result<(PathBuf, [u64; 2])> {
        let folder = temporary_folder(&run.join("checkpoints"), self.counters.step);
        make_anew(&folder)?;
        let (n_weights, n_moments) = optimizer.n_stored_bytes(policy);
        let parts = [(WEIGHTS, state::Part::Weights, n_weights), (MOMENTS, state::Part::Moments, n_moments)];
        let mut n_head_bytes = [0; 2];
        for (n_head_bytes, (name, part, n_bytes)) in n_head_bytes.iter_mut().zip(parts) {
            let head = state::head(policy, optimizer, part);
            create_sized(&folder.join(name), &head, (head.len() + n_bytes) as u64)?;
            *n_head_bytes = head.len() as u64;
        }
        Ok((folder, n_head_bytes))
    }

    fn write_files(&mut self, folder: &Path, state: &StateSource) -> Result<()> {
        if !matches!(state, StateSource::Written) {
            make_anew(folder)?;
        }
        let files = match state {
            StateSource::Start => Vec::new(),
            StateSource::Copied(image) => {
                let (written, hashed) = std::thread::scope(|scope| {
                    let hashing = scope.spawn(|| hash(image.weights(), image.moments()));
                    let written = write_large(&folder.join(WEIGHTS), image.weights())
                        .and_then(|()| write_large(&folder.join(MOMENTS), image.moments()));
                    (written, hashing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                });
                written?;
                self.hashed_state(folder, hashed)?
            }
            StateSource::Streamed(policy, optimizer) => {
                for (name, part) in [(WEIGHTS, state::Part::Weights), (MOMENTS, state::Part::Moments)] {
                    write_whole_with(&folder.join(name), |file| {
                        state::stream(policy, optimizer, part, file)
                    })?;
                }
                self.hashed_files(folder)?
            }
            StateSource::Written => {
                remove_file(&folder.join(TOKEN))?;
                self.hashed_files(folder)?
            }
        };
        let Provenance { state_hash, metrics, plan, identity, records } = &self.provenance;
        write_whole(&folder.join(PLAN), plan.as_bytes())?;
        let sealed = Sealed {
            schema: SCHEMA,
            counters: self.counters,
            state_sha256: String::new(),
            loop_state: self.loop_state.clone(),
            state_hash: state_hash.clone(),
            metrics: metrics.clone(),
            plan_sha256: sha256_hex(plan.as_bytes()),
            identity: identity.clone(),
            records: records.clone(),
            files,
            seal: String::new(),
        };
        write_whole(&folder.join(SEALED), sealed.to_text().as_bytes())
    }

    /// As [`Snapshot::hashed_state`], of files that are on the disk.
    fn hashed_files(&mut self, folder: &Path) -> Result<Vec<StateFile>> {
        let map =
            |name: &str| MappedFile::open(&folder.join(name)).map_err(|e| Error::io(&folder.join(name), e));
        self.hashed_state(folder, hash(&map(WEIGHTS)?, &map(MOMENTS)?))
    }

    /// Takes the hash of the state from the hashes of its files, and writes the digests of the moments. Refuses another state
    /// than the one that its step has hashed.
    fn hashed_state(
        &mut self,
        folder: &Path,
        hashed: std::result::Result<HashedState, String>,
    ) -> Result<Vec<StateFile>> {
        let refuse = |problem: String| Error::Checkpoint { path: folder.to_owned(), problem };
        let HashedState { files, weights, moments } = hashed.map_err(refuse)?;
        let found = hash_of_parts(&weights, &moments, self.counters, &self.loop_state).map_err(refuse)?;
        let recorded = &mut self.provenance.state_hash;
        if recorded.is_empty() {
            recorded.clone_from(&found);
        } else if *recorded != found {
            return Err(refuse(format!(
                "the state to write has the hash {found}, its step hashed {recorded}"
            )));
        }
        write_whole(&folder.join(DIGESTS), &to_bytes(&moments))?;
        Ok(files)
    }
}

/// The hashes of the files of a state.
struct HashedState {
    files: Vec<StateFile>,
    weights: Digests,
    moments: Digests,
}

/// Hashes both files, each by a separate thread and the threads that share their leaves.
fn hash(weights: &[u8], moments: &[u8]) -> std::result::Result<HashedState, String> {
    let of_file = |name: &str, bytes: &[u8]| HashedFile::compute(bytes, parts_of(name), true);
    let (weights, moments) = rayon::join(|| of_file(WEIGHTS, weights), || of_file(MOMENTS, moments));
    let (weights, moments) = (weights?, moments?);
    let file = |name: &str, hashed: &HashedFile| StateFile {
        name: name.to_string(),
        sha256: hashed.file.clone().unwrap_or_default(),
        head_sha256: hashed.head.clone(),
    };
    let files = vec![file(WEIGHTS, &weights), file(MOMENTS, &moments)];
    Ok(HashedState { files, weights: weights.digests, moments: moments.digests })
}

/// Makes an empty folder, instead of what an interrupted checkpoint left there.
fn make_anew(folder: &Path) -> Result<()> {
    if folder.exists() {
        remove_folder(folder)?;
    }
    create_folder_of_part(folder)
}

/// Moves a written checkpoint to its name. What has that name was refused or is the same state, since a run continues
/// from its newest good checkpoint.
fn put_in_place(temporary: &Path, path: &Path) -> Result<()> {
    if path.exists() {
        remove_folder(path)?;
    }
    rename(temporary, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::config::ModelSource;
    use crate::policy::loaded::LoadedModel;
    use crate::run::Checkpoint;
    use stapo_core::record::Identity;
    use stapo_model::optimizer::AdamWSettings;
    use stapo_model::{CpuOptions, Device};

    fn snapshot(state_hash: &str) -> Snapshot {
        let provenance = Provenance {
            state_hash: state_hash.to_string(),
            metrics: None,
            plan: String::new(),
            identity: Identity::default(),
            records: Vec::new(),
        };
        let counters = Counters { step: 3, position: 2, n_updates: 1 };
        Snapshot { counters, loop_state: LoopState::new(), provenance }
    }

    #[test]
    fn a_state_that_is_copied_first_gives_the_bytes_of_one_that_is_read_while_it_is_written() {
        let device = Device::cpu(CpuOptions { threads: 1, ..CpuOptions::default() });
        let model = LoadedModel::open(&ModelSource::Builtin, &device).unwrap();
        let optimizer = Optimizer::new(&model.policy, AdamWSettings::default()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let image = Image::copy(&model.policy, &optimizer, None);
        assert_eq!(
            image.weights().len() + image.moments().len(),
            Image::n_bytes(&model.policy, &optimizer),
            "the size is known before the copy"
        );
        let sources = [
            ("copied", StateSource::Copied(&image)),
            ("streamed", StateSource::Streamed(&model.policy, &optimizer)),
        ];
        let written = sources.map(|(name, state)| {
            let run = folder.path().join(name);
            fs::create_dir(&run).unwrap();
            let hash = snapshot("").write(&run, &state).unwrap();
            let checkpoint = run.join("checkpoints/step-000003");
            Checkpoint::open(&checkpoint).unwrap();
            let bytes =
                [WEIGHTS, MOMENTS, DIGESTS, SEALED].map(|name| fs::read(checkpoint.join(name)).unwrap());
            (hash, bytes)
        });
        assert!(written[0] == written[1]);
        // The hash that the step recorded is the hash of what is written.
        let (run, hash) = (folder.path().join("copied"), &written[0].0);
        assert_eq!(snapshot(hash).write(&run, &StateSource::Copied(&image)).unwrap(), *hash);
        let refused = snapshot("other").write(&run, &StateSource::Copied(&image)).unwrap_err().to_string();
        assert!(refused.contains("its step hashed other"), "{refused}");
        Checkpoint::open(&run.join("checkpoints/step-000003")).unwrap();
        // The memory of one copy serves the next.
        let start = image.weights().as_ptr();
        let again = Image::copy(&model.policy, &optimizer, Some(image.into_buffer()));
        assert_eq!(again.weights().as_ptr(), start);
    }
}
