//! Every change that this crate and the command line make to run folders: written, renamed, synced, made and removed
//! here and nowhere else, one counted operation at a time (`fault`), so that tests can end the program at each of them.

mod fault;

use crate::error::{Error, Result};
use fault::{Operation, before, before_write};
use sha2::{Digest, Sha256};
use stapo_core::record::FileHash;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ScopedJoinHandle;

/// Writes a temporary file next to `path`, syncs and renames the file: a reader sees the old or the new file, never a
/// part.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    write_whole_with(path, |file| file.write_all(bytes))
}

/// As `write_whole`, with contents that `write` produces piece by piece.
pub fn write_whole_with(
    path: &Path,
    write: impl FnOnce(&mut (dyn Write + Send)) -> io::Result<()>,
) -> Result<()> {
    replace(path, |temporary| create_synced(temporary, write))
}

/// Renames what `create` makes next to `path` to `path`.
fn replace(path: &Path, create: impl FnOnce(&Path) -> io::Result<()>) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let temporary = path.with_file_name(format!(".{name}.tmp"));
    if let Err(error) = create(&temporary) {
        // The disk may be full, so the partial file is removed. A failure of the removal is not reported: the caller
        // learns of the failed write.
        let _ = fs::remove_file(&temporary);
        return Err(Error::io(path, error));
    }
    rename(&temporary, path)
}

/// As `write_whole`, of bytes that several threads write at once where there are many: one thread does not fill a fast disk.
pub fn write_large(path: &Path, bytes: &[u8]) -> Result<()> {
    if cfg!(not(unix)) || bytes.len() as u64 <= FLUSHED_AT_ONCE {
        return write_whole(path, bytes);
    }
    replace(path, |temporary| create_synced_with(temporary, |file| write_pieces(file, path, bytes)))
}

/// Writes pieces of [`FLUSHED_AT_ONCE`] bytes, each at its place.
#[cfg(unix)]
fn write_pieces(file: &File, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let next = AtomicUsize::new(0);
    let write = || {
        let size = FLUSHED_AT_ONCE as usize;
        while let Some(piece) = bytes.chunks(size).nth(next.fetch_add(1, Ordering::Relaxed)) {
            let start = (piece.as_ptr() as usize - bytes.as_ptr() as usize) as u64;
            before_write(|half| write_all_at(file, half, start), piece, path)?;
            write_all_at(file, piece, start)?;
            begin_to_flush(file, start, piece.len() as u64);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..WRITERS).map(|_| scope.spawn(write)).collect();
        let mut ended = threads.into_iter().map(ScopedJoinHandle::join);
        ended.try_for_each(|end| end.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

#[cfg(not(unix))]
fn write_pieces(mut file: &File, _: &Path, bytes: &[u8]) -> io::Result<()> {
    file.write_all(bytes)
}

/// Threads that write one file.
const WRITERS: usize = 4;

fn create_synced(
    path: &Path,
    write: impl FnOnce(&mut (dyn Write + Send)) -> io::Result<()>,
) -> io::Result<()> {
    create_synced_with(path, |file| write(&mut Counted { file, path, n_bytes: 0, n_flushed: 0 }))
}

fn create_synced_with(path: &Path, write: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
    before(Operation::Create, path)?;
    let file = File::create(path)?;
    write(&file)?;
    before(Operation::Sync, path)?;
    file.sync_all()
}

/// A file of which every write is a counted operation.
struct Counted<'a> {
    file: &'a File,
    path: &'a Path,
    n_bytes: u64,
    /// Bytes that are on their way to the disk.
    n_flushed: u64,
}

/// Bytes of a file after which the system is asked to begin to write them to the disk. Without that the system keeps
/// gigabytes in memory, and the sync at the end waits for all of them.
const FLUSHED_AT_ONCE: u64 = 64 << 20;

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let bytes = &bytes[..bytes.len().min(FLUSHED_AT_ONCE as usize)];
        before_write(|half| self.file.write_all(half), bytes, self.path)?;
        let n = self.file.write(bytes)?;
        self.n_bytes += n as u64;
        if self.n_bytes - self.n_flushed >= FLUSHED_AT_ONCE {
            begin_to_flush(self.file, self.n_flushed, self.n_bytes - self.n_flushed);
            self.n_flushed = self.n_bytes;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Lets the system begin to write a range of a file to the disk, and does not wait. On Linux the advice that the range will
/// not be needed does so; a failure is none, since the sync at the end waits for everything.
#[cfg(target_os = "linux")]
fn begin_to_flush(file: &File, start: u64, n_bytes: u64) {
    let n_bytes = std::num::NonZeroU64::new(n_bytes);
    let _ = rustix::fs::fadvise(file, start, n_bytes, rustix::fs::Advice::DontNeed);
}

#[cfg(not(target_os = "linux"))]
fn begin_to_flush(_: &File, _: u64, _: u64) {}

/// Makes the folder and those above it.
pub fn create_folder(path: &Path) -> Result<()> {
    before(Operation::MakeFolder, path)
        .and_then(|()| fs::create_dir_all(path))
        .map_err(|e| Error::io(path, e))
}

/// Makes a folder of a part of a run, and the part's folder where it is missing, but not the run's: work whose folder was renamed
/// or removed makes no other in its place.
pub fn create_folder_of_part(path: &Path) -> Result<()> {
    let part = path.parent().filter(|part| !part.exists());
    before(Operation::MakeFolder, path)
        .and_then(|()| part.map_or(Ok(()), fs::create_dir))
        .and_then(|()| fs::create_dir(path))
        .map_err(|e| Error::io(path, e))
}

/// Renames a file or folder and syncs the folder that holds the new name, so that the rename survives a crash.
pub fn rename(from: &Path, to: &Path) -> Result<()> {
    before(Operation::Rename, to).and_then(|()| fs::rename(from, to)).map_err(|e| Error::io(to, e))?;
    sync_folder_of(to)
}

/// Syncs the folder that holds `path`.
fn sync_folder_of(path: &Path) -> Result<()> {
    // The parent of a bare file name is the empty path, which cannot be opened.
    let folder = path.parent().filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new("."));
    before(Operation::Sync, folder)
        .and_then(|()| File::open(folder)?.sync_all())
        .map_err(|e| Error::io(folder, e))
}

/// Removes a folder with all it holds, in order of names. A symbolic link is removed, never followed.
pub fn remove_folder(path: &Path) -> Result<()> {
    let io = |e| Error::io(path, e);
    let mut entries: Vec<PathBuf> = fs::read_dir(path)
        .map_err(io)?
        .map(|e| e.map(|e| e.path()))
        .collect::<io::Result<_>>()
        .map_err(io)?;
    entries.sort();
    for entry in entries {
        if fs::symlink_metadata(&entry).map_err(io)?.is_dir() {
            remove_folder(&entry)?;
        } else {
            before(Operation::Remove, &entry).and_then(|()| fs::remove_file(&entry)).map_err(io)?;
        }
    }
    before(Operation::Remove, path).and_then(|()| fs::remove_dir(path)).map_err(io)
}

/// Removes a file.
pub fn remove_file(path: &Path) -> Result<()> {
    before(Operation::Remove, path).and_then(|()| fs::remove_file(path)).map_err(|e| Error::io(path, e))
}

/// Opens a file to be written in place, and makes the file if there is none.
pub fn open_in_place(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    before(Operation::Create, path).and_then(|()| options.open(path)).map_err(|e| Error::io(path, e))
}

/// Makes a file of a known length that begins with `head`; its parts are written by [`write_at`].
pub fn create_sized(path: &Path, head: &[u8], n_bytes: u64) -> Result<()> {
    let created = (|| {
        before(Operation::Create, path)?;
        let mut file = File::create(path)?;
        file.set_len(n_bytes)?;
        before_write(|half| file.write_all(half), head, path)?;
        file.write_all(head)
    })();
    created.map_err(|e| Error::io(path, e))
}

/// Opens a file that [`create_sized`] made.
pub fn open_part(path: &Path) -> Result<File> {
    OpenOptions::new().write(true).open(path).map_err(|e| Error::io(path, e))
}

/// Writes bytes at their place in a file, and lets the system begin to write them to the disk.
pub fn write_at(file: &File, path: &Path, bytes: &[u8], start: u64) -> Result<()> {
    let written = before_write(|half| write_all_at(file, half, start), bytes, path)
        .and_then(|()| write_all_at(file, bytes, start));
    begin_to_flush(file, start, bytes.len() as u64);
    written.map_err(|e| Error::io(path, e))
}

#[cfg(unix)]
fn write_all_at(file: &File, bytes: &[u8], start: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, start)
}

#[cfg(not(unix))]
fn write_all_at(mut file: &File, bytes: &[u8], start: u64) -> io::Result<()> {
    file.seek(io::SeekFrom::Start(start))?;
    file.write_all(bytes)
}

/// Returns when all that was written to the file is on the disk.
pub fn sync_part(file: &File, path: &Path) -> Result<()> {
    before(Operation::Sync, path).and_then(|()| file.sync_all()).map_err(|e| Error::io(path, e))
}

/// Replaces the content of an open file, not atomically.
pub fn overwrite(file: &mut File, path: &Path, bytes: &[u8]) -> Result<()> {
    let written = (|| {
        before(Operation::Write, path)?;
        file.set_len(0)?;
        file.rewind()?;
        before_write(|half| file.write_all(half), bytes, path)?;
        file.write_all(bytes)
    })();
    written.map_err(|e| Error::io(path, e))
}

/// A file that grows by whole records, such as lines.
#[derive(Debug)]
pub struct Appended {
    path: PathBuf,
    file: File,
    /// Bytes of whole records.
    len: u64,
    /// Of these bytes, as this process wrote or first found them.
    hash: Sha256,
}

impl Appended {
    /// Opens the file to add records, and makes the file if there is none.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |e| Error::io(path, e);
        before(Operation::Create, path).map_err(io)?;
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(io)?;
        let mut hash = Sha256::new();
        let len = io::copy(&mut File::open(path).map_err(io)?, &mut hash).map_err(io)?;
        Ok(Self { path: path.to_owned(), file, len, hash })
    }

    /// The file as this process wrote it; another process may have changed it since.
    pub fn written(&self) -> FileHash {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        FileHash { name, n_bytes: self.len, sha256: hex(&self.hash.clone().finalize()) }
    }

    /// Adds a record as one write. Of a record that could not be written whole nothing remains, so that the next one does
    /// not follow half of one.
    pub fn add(&mut self, record: &[u8]) -> Result<()> {
        let written = before_write(|half| self.file.write_all(half), record, &self.path)
            .and_then(|()| self.file.write_all(record));
        match written {
            Ok(()) => {
                self.len += record.len() as u64;
                self.hash.update(record);
            }
            // A failure of the removal is not reported: the caller learns of the failed write.
            Err(_) => self.file.set_len(self.len).unwrap_or_default(),
        }
        written.map_err(|e| Error::io(&self.path, e))
    }

    /// Returns when all records so far are on disk.
    pub fn sync(&mut self) -> Result<()> {
        before(Operation::Sync, &self.path)
            .and_then(|()| self.file.sync_data())
            .map_err(|e| Error::io(&self.path, e))
    }
}

/// The SHA-256 of the bytes in lower-case hexadecimal.
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_bytes_are_written_by_several_threads_and_are_all_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("large");
        let n_bytes = 2 * FLUSHED_AT_ONCE as usize + 5;
        let bytes: Vec<u8> = (0..n_bytes).map(|idx| (idx % 251) as u8).collect();
        write_large(&path, &bytes).unwrap();
        assert!(fs::read(&path).unwrap() == bytes);
        write_large(&path, &bytes[..7]).unwrap();
        assert_eq!(fs::read(&path).unwrap(), bytes[..7]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file stays");
    }

    #[test]
    #[cfg(unix)]
    fn what_a_link_in_a_removed_folder_leads_to_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (removed, kept) = (folder.path().join("removed"), folder.path().join("kept"));
        fs::create_dir_all(removed.join("inside")).unwrap();
        fs::create_dir(&kept).unwrap();
        fs::write(kept.join("file"), "text").unwrap();
        std::os::unix::fs::symlink(&kept, removed.join("inside/link")).unwrap();
        remove_folder(&removed).unwrap();
        assert!(!removed.exists());
        assert_eq!(fs::read_to_string(kept.join("file")).unwrap(), "text");
    }

    /// A folder of a run that was renamed is not made anew by what is still being written.
    #[test]
    fn a_part_is_made_with_its_folder_and_never_with_the_runs() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let checkpoint = run.join("checkpoints/step-000001");
        assert!(create_folder_of_part(&checkpoint).is_err() && !run.exists());
        fs::create_dir(&run).unwrap();
        create_folder_of_part(&checkpoint).unwrap();
        assert!(checkpoint.is_dir());
        assert!(create_folder_of_part(&checkpoint).is_err(), "it is there");
    }
}
