//! Files that appear whole or not at all.

use crate::error::{Error, Result};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

/// Writes beside `path`, syncs, and renames: a reader sees the old file or the new one, never a part.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let io = |e| Error::io(path, e);
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let beside = path.with_file_name(format!(".{name}.tmp"));
    let written = File::create(&beside).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    if let Err(error) = written {
        // The disk may be full: leave no half file behind. A failure to clean up changes nothing for the caller.
        let _ = fs::remove_file(&beside);
        return Err(io(error));
    }
    fs::rename(&beside, path).map_err(io)?;
    sync_folder(path)
}

/// Makes a rename in the folder of `path` last.
pub(super) fn sync_folder(path: &Path) -> Result<()> {
    // The parent of a bare name is the empty path, which nothing opens.
    let folder = path.parent().filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(|e| Error::io(folder, e))
}

/// Lower-case hexadecimal.
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
