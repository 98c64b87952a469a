//! Faults at counted file operations, for tests. Programs built without debug assertions have none of this.
//!
//! `STAPO_DISK_FAULT=kill:17` ends the program at its 17th operation as `kill -9` would, `error:17` lets that operation
//! fail, `full:17` lets that operation and all after it fail as on a full disk. A write is cut in half first.
//! `STAPO_DISK_TRACE=FILE` adds a line per operation to the file.

use std::io;
use std::path::Path;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Create,
    Write,
    Sync,
    Rename,
    MakeFolder,
    Remove,
}

#[cfg(not(debug_assertions))]
pub(super) fn before(_: Operation, _: &Path) -> io::Result<()> {
    Ok(())
}

#[cfg(not(debug_assertions))]
pub(super) fn before_write(_: impl FnOnce(&[u8]) -> io::Result<()>, _: &[u8], _: &Path) -> io::Result<()> {
    Ok(())
}

#[cfg(debug_assertions)]
pub(super) use counted::{before, before_write};

#[cfg(debug_assertions)]
mod counted {
    use super::{Operation, Path, io};
    use std::fs::File;
    use std::io::Write;
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[derive(Debug, Clone, Copy)]
    enum Fault {
        Kill(u64),
        Error(u64),
        Full(u64),
    }

    static FAULT: LazyLock<Option<Fault>> = LazyLock::new(|| {
        let text = std::env::var("STAPO_DISK_FAULT").ok()?;
        let (kind, operation_number) = text.split_once(':').expect("STAPO_DISK_FAULT is KIND:NUMBER");
        let operation_number = operation_number.parse().expect("STAPO_DISK_FAULT is KIND:NUMBER");
        match kind {
            "kill" => Some(Fault::Kill(operation_number)),
            "error" => Some(Fault::Error(operation_number)),
            "full" => Some(Fault::Full(operation_number)),
            _ => panic!("STAPO_DISK_FAULT is kill, error or full, not {kind}"),
        }
    });
    static N_DONE: AtomicU64 = AtomicU64::new(0);

    pub(in super::super) fn before(operation: Operation, path: &Path) -> io::Result<()> {
        count(operation, path, || Ok(()))
    }

    pub(in super::super) fn before_write(
        write: impl FnOnce(&[u8]) -> io::Result<()>,
        bytes: &[u8],
        path: &Path,
    ) -> io::Result<()> {
        count(Operation::Write, path, || write(&bytes[..bytes.len() / 2]))
    }

    /// Counts an operation and brings down the fault that is due; `half` is what happens of the operation then.
    fn count(operation: Operation, path: &Path, half: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let operation_number = N_DONE.fetch_add(1, Ordering::SeqCst) + 1;
        trace(operation_number, operation, path);
        match *FAULT {
            Some(Fault::Kill(at)) if operation_number == at => {
                half()?;
                std::process::abort();
            }
            Some(Fault::Error(at)) if operation_number == at => {
                half()?;
                Err(io::Error::other(format!("injected at operation {operation_number}")))
            }
            Some(Fault::Full(from)) if operation_number >= from => {
                half()?;
                Err(io::Error::from(io::ErrorKind::StorageFull))
            }
            _ => Ok(()),
        }
    }

    fn trace(place: u64, operation: Operation, path: &Path) {
        let Ok(file) = std::env::var("STAPO_DISK_TRACE") else { return };
        let opened = File::options().create(true).append(true).open(&file);
        let line = format!("{place} {operation:?} {}\n", path.display());
        opened.and_then(|mut file| file.write_all(line.as_bytes())).expect("the trace can be written");
    }
}
