//! One writer per folder: an advisory lock on the file `lock`, which the operating system releases when the process
//! ends in any way.

use super::clock::utc;
use crate::error::{Error, Result};
use crate::run::disk::{open_in_place, overwrite};
use stapo_core::record::{self, LockRecord, Record, SCHEMA, Writer};
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

const LOCK: &str = "lock";
/// A reader that asks who holds the lock holds it for an instant. So many tries, `PAUSE` apart, outlast that.
const TRIES: usize = 5;
const PAUSE: Duration = Duration::from_millis(20);

/// The right to write a folder, for as long as the value lives.
#[derive(Debug)]
pub struct FolderLock {
    path: PathBuf,
    file: File,
    /// Why the file system has no locks, where that is so.
    missing: Option<String>,
}

impl FolderLock {
    /// Takes the lock. A folder that another process writes is refused with the name of that process.
    pub fn take(folder: &Path) -> Result<Self> {
        let path = folder.join(LOCK);
        let file = open_in_place(&path)?;
        for _ in 0..TRIES {
            match file.try_lock() {
                Ok(()) => return Ok(Self { path, file, missing: None }),
                Err(TryLockError::WouldBlock) => std::thread::sleep(PAUSE),
                Err(TryLockError::Error(error)) => {
                    return Ok(Self { path, file, missing: Some(error.to_string()) });
                }
            }
        }
        Err(Error::Locked { folder: folder.to_owned(), by: describe(&read(folder).unwrap_or_default()) })
    }

    /// What to tell the user about a file system without locks.
    pub fn warning(&self) -> Option<String> {
        let error = self.missing.as_ref()?;
        let path = self.path.display();
        Some(format!(
            "{path}: this file system has no locks ({error}); start no second process on this folder"
        ))
    }

    /// Writes down who holds the lock.
    pub fn sign(&mut self, writer: &Writer) -> Result<()> {
        let line = LockRecord { schema: SCHEMA, writer: writer.clone() }.to_line();
        overwrite(&mut self.file, &self.path, line.as_bytes())
    }

    /// Follows the folder to its new name.
    pub(super) fn moved_to(&mut self, folder: &Path) {
        self.path = folder.join(LOCK);
    }
}

/// The process that writes a folder; `None` if no process holds the lock.
pub fn holder(folder: &Path) -> Option<Writer> {
    let file = File::open(folder.join(LOCK)).ok()?;
    match file.try_lock_shared() {
        Err(TryLockError::WouldBlock) => Some(read(folder).unwrap_or_default()),
        Ok(()) | Err(TryLockError::Error(_)) => None,
    }
}

/// `process 4711 on host`.
pub fn describe(writer: &Writer) -> String {
    match writer.pid {
        0 => "another process".to_string(),
        pid => format!("process {pid} on {}", writer.host),
    }
}

/// This process, as a lock and events name it.
pub fn this_process(program: &str, device: &str) -> Writer {
    let arguments = std::env::args_os().map(|argument| argument.to_string_lossy().into_owned());
    Writer {
        pid: std::process::id(),
        host: host(),
        command: arguments.collect::<Vec<_>>().join(" "),
        started: utc(SystemTime::now()),
        program: program.to_string(),
        device: device.to_string(),
        world: 1,
    }
}

fn read(folder: &Path) -> Option<Writer> {
    let text = fs::read_to_string(folder.join(LOCK)).ok()?;
    record::parse::<LockRecord>(&text).ok().map(|lock| lock.writer)
}

#[cfg(unix)]
fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(not(unix))]
fn host() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_else(|_| "this host".to_string())
}
