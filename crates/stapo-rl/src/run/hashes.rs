//! Hashes of input files.

use crate::error::{Error, Result};
use crate::run::disk::{hex, sha256_hex};
use sha2::{Digest, Sha256};
use stapo_core::record::FileHash;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

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

/// Bytes of a file above which a difference is reported by the length: a stranger's file may be as long as the stranger likes.
const MAX_HASHED: u64 = 1 << 30;

/// As [`hash_file`], of a file that need not be hashed to know that it differs. A large file has its length instead of its hash.
pub fn hash_or_length(name: &str, path: &Path) -> Result<FileHash> {
    let n_bytes = fs::metadata(path).map_err(|e| Error::io(path, e))?.len();
    if n_bytes <= MAX_HASHED {
        return hash_file(name, path);
    }
    Ok(FileHash { name: name.to_string(), n_bytes, sha256: format!("{n_bytes} bytes") })
}

/// The length and the SHA-256 of bytes.
pub fn hash_bytes(name: &str, bytes: &[u8]) -> FileHash {
    FileHash { name: name.to_string(), n_bytes: bytes.len() as u64, sha256: sha256_hex(bytes) }
}
