//! A folder that appears as a whole: a new run, evaluation or experiment.

use super::disk::{create_folder, rename};
use super::lock::FolderLock;
use crate::error::{Error, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// A folder in the making, under a temporary name in the folder where it will appear.
pub struct NewFolder {
    final_path: PathBuf,
    temporary: PathBuf,
    pub lock: FolderLock,
}

/// Whether a new folder may appear at `path`: nothing is there, or an empty folder, or a link to one.
pub fn is_free(path: &Path) -> bool {
    let is_empty = || fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
    path.symlink_metadata().is_err() || is_empty()
}

impl NewFolder {
    /// Makes `.NAME.starting` next to `path` and locks it. A `path` that is not free is refused; an empty folder will be
    /// replaced. What an interrupted start left in `.NAME.starting` is written again.
    pub fn begin(path: &Path) -> Result<Self> {
        if !is_free(path) {
            return Err(Error::exists(path));
        }
        // A folder cannot be renamed to the name of a link.
        let final_path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let name = final_path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let temporary = final_path.with_file_name(format!(".{name}.starting"));
        create_folder(&temporary).map_err(|error| match error {
            Error::Io { source, .. } => Error::io(path, source),
            other => other,
        })?;
        let lock = FolderLock::take(&temporary)?;
        Ok(Self { final_path, temporary, lock })
    }

    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Gives the folder its name, as one rename.
    pub fn appear(mut self) -> Result<FolderLock> {
        if !is_free(&self.final_path) {
            return Err(Error::exists(&self.final_path));
        }
        rename(&self.temporary, &self.final_path)?;
        self.lock.moved_to(&self.final_path);
        Ok(self.lock)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_folder_appears_where_nothing_is_in_an_empty_folder_and_behind_a_link_to_one() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("empty")).unwrap();
        fs::create_dir(at("elsewhere")).unwrap();
        symlink("elsewhere", at("link")).unwrap();
        for name in ["new", "empty", "link"] {
            let new = NewFolder::begin(&at(name)).unwrap();
            fs::write(new.path().join("file"), name).unwrap();
            assert!(!at(name).join("file").exists(), "{name}");
            drop(new.appear().unwrap());
            assert_eq!(fs::read_to_string(at(name).join("file")).unwrap(), name);
        }
        assert_eq!(fs::read_link(at("link")).unwrap(), Path::new("elsewhere"));
        let hidden = fs::read_dir(folder.path())
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().ends_with(".starting"));
        assert_eq!(hidden.count(), 0);
    }

    #[test]
    fn what_holds_something_is_refused_before_and_after_the_start() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let refused = |result: Result<NewFolder>| matches!(result, Err(Error::Exists { .. }));
        fs::create_dir_all(at("full/part")).unwrap();
        fs::write(at("file"), "").unwrap();
        symlink("full", at("link")).unwrap();
        symlink("nowhere", at("dangling")).unwrap();
        for name in ["full", "file", "link", "dangling"] {
            assert!(refused(NewFolder::begin(&at(name))), "{name}");
        }
        let late = NewFolder::begin(&at("late")).unwrap();
        fs::create_dir_all(at("late/part")).unwrap();
        assert!(matches!(late.appear(), Err(Error::Exists { .. })));
    }
}
