//! Writes a folder that appears whole or not at all.

use crate::error::{Error, Result};
use crate::weights::safetensors::INDEX;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Files of `transformers` that do not depend on the weights; export copies them from a folder unchanged. The last four are
/// those of the image and video processors of multimodal models.
pub(super) const TAKEN_OVER: [&str; 13] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
];

/// What to do if the folder exists and is not empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    Refuse,
    /// Replace the folder, provided that it is a model's folder: a `config.json`, and nothing that export does not write.
    Replace,
}

/// A folder that is being written is `.NAME.RANDOM.tmp`, and holds these.
const SUFFIX: &str = ".tmp";
const LOCK: &str = "lock";
const WRITTEN: &str = "model";
const REPLACED: &str = "replaced";

/// Lets `fill` write into a new folder next to `out`, then renames the new folder to `out`. After an error nothing is
/// left behind; what a killed program left is removed by the next that writes to `out`.
pub(crate) fn write_whole<T>(
    out: &Path,
    existing: Existing,
    fill: impl FnOnce(&Path) -> Result<T>,
) -> Result<T> {
    // `a/b/` and `a/b` are the same folder; a path like `..` has no name to rename to.
    let name = out.file_name().ok_or_else(|| {
        Error::unsupported(
            out.display(),
            "does not end in a name",
            "give the folder to create, such as ./model",
        )
    })?;
    check_target(out, existing)?;
    let parent = match out.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    fs::create_dir_all(parent).map_err(|e| Error::io(parent, e))?;
    let prefix = format!(".{}.", name.to_string_lossy());
    remove_abandoned(parent, &prefix);
    let temporary = tempfile::Builder::new().prefix(&prefix).suffix(SUFFIX).tempdir_in(parent);
    let temporary = temporary.map_err(|e| Error::io(parent, e))?;
    // Held until this program ends, however it ends, and taken before the folder holds anything that could be removed.
    let lock = temporary.path().join(LOCK);
    let held = File::create(&lock).map_err(|e| Error::io(&lock, e))?;
    // A file system without locks has no folders removed, since no lock can be taken there.
    let _ = held.try_lock();
    let written = temporary.path().join(WRITTEN);
    fs::create_dir(&written).map_err(|e| Error::io(&written, e))?;
    let result = fill(&written)?;
    sync(&written)?;
    let replaced = temporary.path().join(REPLACED);
    if out.exists() {
        check_target(out, existing)?;
        fs::rename(out, &replaced).map_err(|e| Error::io(out, e))?;
    }
    if let Err(error) = fs::rename(&written, out) {
        // The old folder is put back; the first error is the one to report.
        let _ = fs::rename(&replaced, out);
        return Err(Error::io(out, error));
    }
    sync(parent)?;
    Ok(result)
}

/// Removes what killed programs left next to a folder. A failure is ignored: the next export removes it.
fn remove_abandoned(parent: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for folder in entries.filter_map(|entry| entry.ok().map(|entry| entry.path())) {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(prefix) && name.ends_with(SUFFIX) && is_abandoned(&folder) {
            let _ = fs::remove_dir_all(&folder);
        }
    }
}

/// Whether no process writes a folder any more. It then holds a part of a model, or the model that a whole one has replaced; one with
/// both was left between two renames, and the model that was to be replaced may be the only copy.
fn is_abandoned(folder: &Path) -> bool {
    let has_one = folder.join(WRITTEN).is_dir() != folder.join(REPLACED).is_dir();
    has_one && File::open(folder.join(LOCK)).is_ok_and(|lock| lock.try_lock().is_ok())
}

/// Writes and syncs a file.
pub(super) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    write_synced(path, |file| file.write_all(bytes))
}

/// Copies a file and syncs the copy, which has the permissions of a new file.
pub(super) fn copy_file(from: &Path, to: &Path) -> Result<()> {
    let mut source = File::open(from).map_err(|e| Error::io(from, e))?;
    write_synced(to, |file| io::copy(&mut source, file).map(drop))
}

fn write_synced(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> Result<()> {
    let created = File::create(path);
    let written = created.and_then(|mut file| write(&mut file).and_then(|()| file.sync_all()));
    written.map_err(|e| Error::io(path, e))
}

fn check_target(out: &Path, existing: Existing) -> Result<()> {
    let Ok(metadata) = fs::symlink_metadata(out) else { return Ok(()) };
    let refuse = |problem: &str, hint: &str| Err(Error::unsupported(out.display(), problem, hint));
    if !metadata.is_dir() {
        return refuse("exists and is not a folder", "give the folder to create");
    }
    let entries: Vec<PathBuf> = fs::read_dir(out)
        .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.path())).collect())
        .map_err(|e| Error::io(out, e))?;
    if entries.is_empty() {
        return Ok(());
    }
    match existing {
        Existing::Refuse => Err(Error::Exists { location: out.display().to_string() }),
        Existing::Replace if !out.join("config.json").is_file() => {
            refuse("is not the folder of a model and is not replaced", "choose another folder")
        }
        Existing::Replace => match entries.iter().find(|path| !is_exported(path)) {
            Some(other) => {
                let name = other.file_name().unwrap_or_default().to_string_lossy();
                let problem = format!("holds {name:?}, which export does not write, and is not replaced");
                refuse(&problem, "move that away, or choose another folder")
            }
            None => Ok(()),
        },
    }
}

/// Whether a path is a plain file with a name that export gives.
fn is_exported(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_plain = fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_file());
    let is_weights = name.starts_with("model") && name.ends_with(".safetensors");
    is_plain && (is_weights || name == INDEX || name == "config.json" || TAKEN_OVER.contains(&&*name))
}

/// Makes the names in a folder durable. Windows cannot open folders and needs no such step.
fn sync(folder: &Path) -> Result<()> {
    if cfg!(unix) {
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(|e| Error::io(folder, e))?;
    }
    Ok(())
}
