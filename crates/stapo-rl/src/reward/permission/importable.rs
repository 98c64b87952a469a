//! The files that Python would import from a folder.

use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// The most importable files, their bytes, and the entries of folders that are looked at for one verifier.
const MAX_FILES: usize = 1000;
const MAX_BYTES: u64 = 64_000_000;
const MAX_ENTRIES: usize = 50_000;

/// Adds the names and contents of all importable files in these folders and the packages inside them to a hash.
pub(super) fn update(all: &mut Sha256, folders: &[PathBuf]) -> io::Result<()> {
    let mut found = Found::default();
    for folder in folders {
        found.walk(folder)?;
    }
    // The order of names does not depend on the file system.
    found.files.sort();
    for path in &found.files {
        let name = path.as_os_str().as_encoded_bytes();
        all.update((name.len() as u64).to_le_bytes());
        all.update(name);
        let mut content = Sha256::new();
        io::copy(&mut File::open(path)?, &mut content)?;
        all.update(content.finalize());
    }
    Ok(())
}

#[derive(Default)]
struct Found {
    files: Vec<PathBuf>,
    n_bytes: u64,
    n_entries: usize,
    /// Folders by their canonical paths, so that a circle of links ends.
    seen: BTreeSet<PathBuf>,
}

impl Found {
    fn walk(&mut self, folder: &Path) -> io::Result<()> {
        let mut open = vec![folder.to_owned()];
        while let Some(inside) = open.pop() {
            if !self.seen.insert(inside.canonicalize()?) {
                continue;
            }
            for entry in fs::read_dir(&inside)? {
                let path = entry?.path();
                self.n_entries += 1;
                // A link that leads nowhere holds no code.
                let Ok(metadata) = fs::metadata(&path) else { continue };
                if metadata.is_dir() && may_be_package(&path) {
                    open.push(path);
                } else if metadata.is_file() && is_importable(&path) {
                    self.n_bytes += metadata.len();
                    self.files.push(path);
                }
                self.check_bounds(folder)?;
            }
        }
        Ok(())
    }

    fn check_bounds(&self, folder: &Path) -> io::Result<()> {
        let is_within =
            self.files.len() <= MAX_FILES && self.n_bytes <= MAX_BYTES && self.n_entries <= MAX_ENTRIES;
        if is_within {
            return Ok(());
        }
        let folder = folder.display();
        let problem = format!(
            "folder {folder}: more than {MAX_FILES} files that Python could import, or more than 64 MB of them, are next to the verifier"
        );
        Err(io::Error::new(io::ErrorKind::QuotaExceeded, problem))
    }
}

/// A module's name has no dot, so `.venv` and `.git` are no packages. Caches of bytecode are not read.
fn may_be_package(folder: &Path) -> bool {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    !name.contains('.') && name != "__pycache__"
}

/// Source, bytecode and extension modules.
fn is_importable(file: &Path) -> bool {
    let ending = file.extension().unwrap_or_default();
    ["py", "pyc", "so", "pyd", "pyw", "dylib"].iter().any(|importable| ending == *importable)
}
