//! Atomic writes: a file appears as a whole or not at all.

use crate::error::{Error, Result};
use sha2::{Digest, Sha256};
use stapo_core::record::FileHash;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;

/// Writes a temporary file beside `path`, syncs and renames the file: a reader sees the old or the new file, never a
/// part.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let io = |e| Error::io(path, e);
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let beside = path.with_file_name(format!(".{name}.tmp"));
    let written = File::create(&beside).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    if let Err(error) = written {
        // The disk may be full, so the partial file is removed. A failure of the removal is not reported: the caller
        // learns of the failed write.
        let _ = fs::remove_file(&beside);
        return Err(io(error));
    }
    fs::rename(&beside, path).map_err(io)?;
    sync_folder(path)
}

/// Syncs the folder of `path`, so that a rename in the folder survives a crash.
pub(super) fn sync_folder(path: &Path) -> Result<()> {
    // The parent of a bare file name is the empty path, which cannot be opened.
    let folder = path.parent().filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(|e| Error::io(folder, e))
}

/// The SHA-256 of the bytes in lower-case hexadecimal.
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Bytes of a file that are in memory at a time.
const HASHED_AT_ONCE: usize = 1 << 20;

/// The length and the SHA-256 of a file, read piece by piece. Anything but a regular file is refused.
pub fn hash_file(name: &str, path: &Path) -> Result<FileHash> {
    let io = |e| Error::io(path, e);
    if !fs::metadata(path).map_err(io)?.is_file() {
        return Err(io(std::io::Error::other(format!("{name}: is not a file"))));
    }
    let mut file = File::open(path).map_err(io)?;
    let mut hash = Sha256::new();
    let mut piece = vec![0; HASHED_AT_ONCE];
    let mut n_bytes = 0;
    loop {
        let n = file.read(&mut piece).map_err(io)?;
        if n == 0 {
            return Ok(FileHash { name: name.to_string(), n_bytes, sha256: hex(&hash.finalize()) });
        }
        hash.update(&piece[..n]);
        n_bytes += n as u64;
    }
}

/// The length and the SHA-256 of bytes.
pub fn hash_bytes(name: &str, bytes: &[u8]) -> FileHash {
    FileHash { name: name.to_string(), n_bytes: bytes.len() as u64, sha256: sha256_hex(bytes) }
}

/// Lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
