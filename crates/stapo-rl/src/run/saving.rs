//! A checkpoint that is written while the run continues: at most one at a time.

use super::checkpoint::{Snapshot, StateSource};
use super::image::Image;
use crate::error::{Error, Result};
use crate::plan::config::Keeping;
use crate::plan::host::HostMemory;
use stapo_core::record::Best;
use stapo_model::{Device, HostBuffer};
use std::fmt;
use std::path::Path;
use std::thread::{Builder, JoinHandle};

/// A checkpoint in flight. It is written to its end when this value is dropped.
pub(super) struct InFlight {
    pub step: u64,
    pub keeping: Keeping,
    /// The best evaluation when the checkpoint was begun.
    pub best: Option<Best>,
    writing: Option<JoinHandle<Landed>>,
}

/// The hash of the state that was written, and the memory that it was written from.
type Landed = (Result<String>, Option<HostBuffer>);

/// What a checkpoint is made from during training.
pub(super) enum Source {
    Image(Image),
    /// The files of the state, which all ranks have written.
    Written,
}

impl InFlight {
    /// Begins to write, in a separate thread.
    pub fn begin(
        run: &Path,
        snapshot: Snapshot,
        source: Source,
        keeping: Keeping,
        best: Option<Best>,
    ) -> Result<Self> {
        let (step, folder) = (snapshot.counters.step, run.to_owned());
        let write = move || match source {
            Source::Image(image) => {
                let written = snapshot.write(&folder, &StateSource::Copied(&image));
                (written, Some(image.into_buffer()))
            }
            Source::Written => (snapshot.write(&folder, &StateSource::Written), None),
        };
        let thread = Builder::new().name("checkpoint".to_string()).spawn(write);
        Ok(Self { step, keeping, best, writing: Some(thread.map_err(|e| Error::io(run, e))?) })
    }

    /// Whether nothing is left to wait for.
    pub fn has_landed(&self) -> bool {
        self.writing.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the checkpoint is whole or has failed.
    pub fn land(&mut self) -> Option<Landed> {
        let landed = self.writing.take().map(JoinHandle::join);
        landed.map(|landed| landed.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        // Whoever drops the value has another error to report.
        let _ = self.writing.take().map(JoinHandle::join);
    }
}

/// Host memory for the next checkpoint.
#[derive(Debug, Default)]
pub(super) enum Spare {
    #[default]
    None,
    Ready(HostBuffer),
    /// Pages are being locked, which takes longer than a copy to them.
    InTheMaking(JoinHandle<HostBuffer>),
}

/// Whether host memory has room for a copy of so many bytes. Programs with debug assertions, which tests run, find none where
/// `STAPO_NO_ROOM` is set.
pub(crate) fn has_room_for(n_bytes: usize) -> bool {
    if cfg!(debug_assertions) && std::env::var_os("STAPO_NO_ROOM").is_some() {
        return false;
    }
    HostMemory::find().is_none_or(|memory| memory.has_room_for(n_bytes as u64))
}

impl Spare {
    /// Begins to make a buffer, in a separate thread. Where there is no thread, a checkpoint makes its buffer itself.
    pub fn begin(device: &Device, n_bytes: usize) -> Self {
        let device = device.clone();
        let make = move || HostBuffer::new(&device, n_bytes);
        Builder::new().name("buffer".to_string()).spawn(make).map_or(Spare::None, Spare::InTheMaking)
    }

    pub fn take(&mut self) -> Option<HostBuffer> {
        match std::mem::take(self) {
            Spare::None => None,
            Spare::Ready(buffer) => Some(buffer),
            Spare::InTheMaking(thread) => {
                Some(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            }
        }
    }
}

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight").field("step", &self.step).finish_non_exhaustive()
    }
}
