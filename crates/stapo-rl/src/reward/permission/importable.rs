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

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(folder: &Path) -> io::Result<String> {
        let mut all = Sha256::new();
        update(&mut all, &[folder.to_owned()])?;
        Ok(format!("{:x}", all.finalize()))
    }

    #[test]
    fn what_python_would_import_is_in_the_hash_and_nothing_else_is() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        for inside in ["package/deeper", ".venv", "__pycache__"] {
            fs::create_dir_all(at.join(inside)).unwrap();
        }
        let mut before = hash(at).unwrap();
        let mut changes = |file: &str, text: &str| {
            fs::write(at.join(file), text).unwrap();
            let after = hash(at).unwrap();
            std::mem::replace(&mut before, after.clone()) != after
        };
        for file in ["a.py", "a.so", "b.pyc", "package/c.py", "package/deeper/d.py"] {
            assert!(changes(file, "1") && changes(file, "2"), "{file}");
        }
        for file in ["data.json", "a.py.txt", ".venv/a.py", "__pycache__/a.pyc"] {
            assert!(!changes(file, "1"), "{file}");
        }
        fs::rename(at.join("a.py"), at.join("z.py")).unwrap();
        assert_ne!(hash(at).unwrap(), before, "a module of another name");
    }

    #[test]
    fn as_many_files_as_the_limit_may_be_beside_a_verifier() {
        let folder = tempfile::tempdir().unwrap();
        (0..MAX_FILES).for_each(|n| fs::write(folder.path().join(format!("m{n}.py")), "").unwrap());
        assert!(hash(folder.path()).is_ok());
        fs::write(folder.path().join("one_more.py"), "").unwrap();
        let error = hash(folder.path()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::QuotaExceeded);
        assert!(error.to_string().contains("more than 1000 files"), "{error}");
    }
}
