//! What a run folder may hold: plain files and folders.

use crate::error::{Error, Result};
use std::fs::{self, FileType};
use std::io::ErrorKind;
use std::path::Path;

/// How many folders may lie inside each other.
const MAX_DEPTH: usize = 16;

/// Refuses a run folder with a symbolic link, a pipe, a socket or a device anywhere inside: a link leads reads, writes
/// and removals out of the folder, and a pipe blocks its reader. Every command calls this before it opens anything of
/// the folder. The folder itself may be reached by a link, and a folder that does not exist holds nothing to refuse.
pub fn check_tree(folder: &Path) -> Result<()> {
    let refuse = |inside: &Path, problem: &str| {
        let name = inside.strip_prefix(folder).unwrap_or(inside).to_string_lossy();
        Err(Error::NoRun {
            folder: folder.to_owned(),
            problem: format!("{name:?} is {problem}"),
            remedy: "only plain files and folders belong in a run folder: replace it by a copy of the file, or remove it"
                .into(),
        })
    };
    let mut open = vec![(folder.to_owned(), 0)];
    while let Some((inside, depth)) = open.pop() {
        let entries = match fs::read_dir(&inside) {
            Ok(entries) => entries,
            // A training run removes old checkpoints while other commands look at its folder.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) if error.kind() == ErrorKind::NotADirectory => {
                return Err(Error::no_run(folder, "is a file, not a folder".to_string()));
            }
            Err(error) => return Err(Error::io(&inside, error)),
        };
        for entry in entries {
            let entry = entry.map_err(|e| Error::io(&inside, e))?;
            let kind = match entry.file_type() {
                Ok(kind) => kind,
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(Error::io(&entry.path(), error)),
            };
            if kind.is_dir() && depth == MAX_DEPTH {
                return refuse(&entry.path(), "a folder too deep inside");
            } else if kind.is_dir() {
                open.push((entry.path(), depth + 1));
            } else if !kind.is_file() {
                return refuse(&entry.path(), name(kind));
            }
        }
    }
    Ok(())
}

fn name(kind: FileType) -> &'static str {
    if kind.is_symlink() { "a symbolic link" } else { "a pipe, a socket or a device" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_lie_inside_each_other_up_to_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let at_depth = |n: usize| folder.path().join(vec!["d"; n].join("/"));
        fs::create_dir_all(at_depth(MAX_DEPTH)).unwrap();
        fs::write(at_depth(MAX_DEPTH).join("file"), "").unwrap();
        assert!(check_tree(folder.path()).is_ok());
        fs::create_dir(at_depth(MAX_DEPTH + 1)).unwrap();
        let said = check_tree(folder.path()).unwrap_err().to_string();
        assert!(said.contains("a folder too deep inside"), "{said}");
        assert!(check_tree(&folder.path().join("absent")).is_ok(), "nothing to refuse");
    }
}
