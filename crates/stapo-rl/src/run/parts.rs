//! What one rank writes of a checkpoint: the elements that it owns, at their all_ranges in files that rank 0 has made. A rank whose
//! host memory has room copies its elements first and writes during training; another reads them during the next rollout, which
//! changes none of them.

use super::checkpoint::{MOMENTS, TOKEN, WEIGHTS};
use super::disk::{open_part, sync_part, write_at};
use super::saving::{Spare, has_room_for};
use crate::error::{Error, Result};
use crate::ranks::{RankError, Transport};
use serde::{Deserialize, Serialize};
use stapo_model::decoder::Policy;
use stapo_model::optimizer::{FileRanges, Optimizer, OwnedPiece, PIECE_BYTES};
use stapo_model::{HostBuffer, Reader};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

/// What rank 0 sends to all ranks about a checkpoint that they write together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PartOrder {
    pub folder: PathBuf,
    /// Bytes before the first tensor, of the file of weights and of that of moments.
    pub n_head_bytes: [u64; 2],
    /// The content of [`TOKEN`].
    pub token: String,
    /// Whether the run continues only when the checkpoint is whole.
    pub is_waited_for: bool,
}

impl PartOrder {
    /// The order of rank 0, on every rank; the others have none.
    pub fn share(order: Option<Self>, ranks: &dyn Transport) -> Result<Self> {
        let sent = order.map(|order| serde_json::to_vec(&order).expect("texts and numbers are JSON"));
        let shared = ranks.broadcast(&sent.unwrap_or_default())?;
        let unreadable =
            |error| RankError { rank: 0, problem: format!("sent an order that cannot be read: {error}") };
        Ok(serde_json::from_slice(&shared).map_err(unreadable)?)
    }

    /// Opens the files of rank 0. Fails where this rank does not see rank 0's disk.
    pub fn open(&self) -> Result<PartFiles> {
        let path = self.folder.join(TOKEN);
        let found = fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
        if found != self.token {
            return Err(Error::Checkpoint { path, problem: "another folder than rank 0's".to_string() });
        }
        let [weights, moments] = [WEIGHTS, MOMENTS].map(|name| self.folder.join(name));
        let files = [open_part(&weights)?, open_part(&moments)?];
        Ok(PartFiles { paths: [weights, moments], files, n_head_bytes: self.n_head_bytes })
    }
}

/// The files of a checkpoint that all ranks write.
#[derive(Debug)]
pub(crate) struct PartFiles {
    paths: [PathBuf; 2],
    files: [File; 2],
    n_head_bytes: [u64; 2],
}

/// Threads that write what one rank owns.
const WRITERS: usize = if cfg!(unix) { 4 } else { 1 };

impl PartFiles {
    /// Writes what this rank owns, straight from the device. Nothing may change the state meanwhile.
    pub fn write_in_place(&self, policy: &Policy, optimizer: &Optimizer) -> Result<()> {
        let pieces = optimizer.owned_pieces(policy);
        let reader = || Reader::new(policy.device(), PIECE_BYTES);
        self.write_all(pieces.len(), reader, |reader, idx| {
            let OwnedPiece { ranges, elements } = &pieces[idx];
            self.write_piece(ranges, reader.read(elements))
        })
    }

    /// Writes pieces that lie one after another in memory.
    fn write_copied(&self, all_ranges: &[FileRanges], bytes: &[u8]) -> Result<()> {
        let ends = all_ranges.iter().scan(0, |end, ranges| {
            *end += ranges.n_bytes();
            Some(*end)
        });
        let ends: Vec<usize> = ends.collect();
        self.write_all(
            all_ranges.len(),
            || (),
            |(), idx| {
                self.write_piece(&all_ranges[idx], &bytes[ends[idx] - all_ranges[idx].n_bytes()..ends[idx]])
            },
        )
    }

    /// Calls `write` for every piece, in several threads, each with what `prepare` gives it; then all is on the disk.
    fn write_all<S>(
        &self,
        n_pieces: usize,
        prepare: impl Fn() -> S + Sync,
        write: impl Fn(&mut S, usize) -> Result<()> + Sync,
    ) -> Result<()> {
        let next = AtomicUsize::new(0);
        let work = || -> Result<()> {
            let mut prepared = prepare();
            loop {
                let idx = next.fetch_add(1, Ordering::Relaxed);
                if idx >= n_pieces {
                    return Ok(());
                }
                write(&mut prepared, idx)?;
            }
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..WRITERS.min(n_pieces)).map(|_| scope.spawn(work)).collect();
            let mut ended = threads.into_iter().map(thread::ScopedJoinHandle::join);
            ended.try_for_each(|end| end.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })?;
        self.files.iter().zip(&self.paths).try_for_each(|(file, path)| sync_part(file, path))
    }

    fn write_piece(&self, ranges: &FileRanges, bytes: &[u8]) -> Result<()> {
        let idx = usize::from(ranges.is_moment);
        let (elements, scales) = bytes.split_at(ranges.elements.len());
        for (part, start) in [(elements, ranges.elements.start), (scales, ranges.scales.start)] {
            if !part.is_empty() {
                let start = self.n_head_bytes[idx] + start as u64;
                write_at(&self.files[idx], &self.paths[idx], part, start)?;
            }
        }
        Ok(())
    }
}

/// This rank's part of the checkpoint that is being written, of which there is at most one.
#[derive(Debug, Default)]
pub(crate) struct Part {
    spare: Spare,
    writing: Writing,
}

#[derive(Debug, Default)]
enum Writing {
    #[default]
    None,
    /// To be written from the device, during a rollout.
    Due(PartFiles),
    /// Being written from a copy.
    Beside(JoinHandle<(Result<()>, HostBuffer)>),
    Ended(Result<()>),
}

impl Part {
    /// Begins to make the memory that copies will take, where a copy to prepared memory is faster.
    pub fn prepare(&mut self, policy: &Policy, optimizer: &Optimizer) {
        let n_bytes = n_owned_bytes(policy, optimizer);
        if policy.device().is_async() && has_room_for(n_bytes) {
            self.spare = Spare::begin(policy.device(), n_bytes);
        }
    }

    /// Begins to write. Where memory has no room for a copy, the elements are written when [`Part::take_due`] is asked.
    pub fn begin(&mut self, files: PartFiles, policy: &Policy, optimizer: &Optimizer) -> Result<()> {
        let n_bytes = n_owned_bytes(policy, optimizer);
        let buffer = self.spare.take().filter(|buffer| buffer.len() == n_bytes);
        let buffer =
            buffer.or_else(|| has_room_for(n_bytes).then(|| HostBuffer::new(policy.device(), n_bytes)));
        self.writing = if let Some(buffer) = buffer {
            Writing::Beside(write_beside(files, policy, optimizer, buffer)?)
        } else {
            policy.device().synchronize();
            Writing::Due(files)
        };
        Ok(())
    }

    /// Whether a part is to be landed.
    pub fn is_under_way(&self) -> bool {
        !matches!(self.writing, Writing::None)
    }

    /// Whether nothing is left to wait for.
    pub fn is_written(&self) -> bool {
        match &self.writing {
            Writing::Beside(thread) => thread.is_finished(),
            Writing::Due(_) => false,
            Writing::None | Writing::Ended(_) => true,
        }
    }

    /// The files of a part that waits for a rollout; [`Part::ended`] takes how their writing ended.
    pub fn take_due(&mut self) -> Option<PartFiles> {
        match std::mem::take(&mut self.writing) {
            Writing::Due(files) => Some(files),
            other => {
                self.writing = other;
                None
            }
        }
    }

    pub fn ended(&mut self, result: Result<()>) {
        self.writing = Writing::Ended(result);
    }

    /// Waits until the part is on the disk or has failed.
    pub fn land(&mut self, policy: &Policy, optimizer: &Optimizer) -> Result<()> {
        match std::mem::take(&mut self.writing) {
            Writing::None => Ok(()),
            Writing::Due(files) => files.write_in_place(policy, optimizer),
            Writing::Beside(thread) => {
                let (written, buffer) =
                    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                self.spare = Spare::Ready(buffer);
                written
            }
            Writing::Ended(result) => result,
        }
    }
}

fn n_owned_bytes(policy: &Policy, optimizer: &Optimizer) -> usize {
    optimizer.owned_pieces(policy).iter().map(|piece| piece.ranges.n_bytes()).sum()
}

/// Copies what this rank owns, and begins to write the copy.
fn write_beside(
    files: PartFiles,
    policy: &Policy,
    optimizer: &Optimizer,
    mut buffer: HostBuffer,
) -> Result<JoinHandle<(Result<()>, HostBuffer)>> {
    let mut rest = &mut buffer[..];
    let mut all_ranges = Vec::new();
    for OwnedPiece { ranges, elements } in optimizer.owned_pieces(policy) {
        let (now, later) = rest.split_at_mut(ranges.n_bytes());
        let (to_elements, to_scales) = now.split_at_mut(ranges.elements.len());
        elements.copy_stored(to_elements, to_scales);
        rest = later;
        all_ranges.push(ranges);
    }
    let path = files.paths[0].clone();
    let write = move || (files.write_copied(&all_ranges, &buffer), buffer);
    thread::Builder::new().name("checkpoint".to_string()).spawn(write).map_err(|e| Error::io(&path, e))
}

/// A text that no other folder has.
pub(super) fn fresh_token() -> String {
    use std::hash::{BuildHasher, Hasher};
    format!("{:016x}", std::hash::RandomState::new().build_hasher().finish())
}

/// The path as other processes find it.
pub(super) fn absolute(folder: &Path) -> Result<PathBuf> {
    std::path::absolute(folder).map_err(|e| Error::io(folder, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Another machine may have a folder of that path too, such as one of an earlier run.
    #[test]
    fn a_folder_without_the_word_of_rank_0_is_another_folder() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        let (token, n_head_bytes) = ("0123".to_string(), [8, 16]);
        let order = PartOrder { folder: at.to_owned(), n_head_bytes, token, is_waited_for: false };
        for name in [WEIGHTS, MOMENTS] {
            fs::write(at.join(name), "").unwrap();
        }
        assert!(order.open().is_err(), "without a word");
        fs::write(at.join(TOKEN), "0124").unwrap();
        let said = order.open().unwrap_err().to_string();
        assert!(said.contains("another folder than rank 0's"), "{said}");
        fs::write(at.join(TOKEN), "0123").unwrap();
        let files = order.open().unwrap();
        assert_eq!(files.n_head_bytes, [8, 16]);
        assert!(files.paths[0].ends_with(WEIGHTS) && files.paths[1].ends_with(MOMENTS));
        assert_ne!(fresh_token(), fresh_token());
    }
}
