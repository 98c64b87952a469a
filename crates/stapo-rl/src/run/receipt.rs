//! The receipt of a folder: the SHA-256 of its `manifest.json`, which lists every file with its hash. A run, an evaluation
//! and an experiment get one when their work ends or is stopped; going on withdraws it.

use super::checkpoint::{Checkpoint, STATE};
use super::hashes::hash_file;
use super::lock::{describe, holder};
use super::tree::check_tree;
use crate::error::{Error, Result};
use crate::run::disk::{remove_file, sha256_hex, write_whole};
use stapo_core::record::{self, FileHash, Manifest, Record};
use stapo_model::files::read_text;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// The manifest in canonical form, its hash in the form of `sha256sum`, and a signature of the manifest.
const MANIFEST: &str = "manifest.json";
const RECEIPT: &str = "manifest.sha256";
pub const SIGNATURE: &str = "manifest.sig";

/// Files of a folder's own that the manifest cannot list: itself, and who writes.
const UNLISTED: [&str; 4] = [MANIFEST, RECEIPT, SIGNATURE, "lock"];

/// What a folder holds.
struct Contents {
    /// The names of its files, folders separated by `/`, in order.
    files: Vec<String>,
    /// The names of folders inside that have a receipt of their own.
    sealed: Vec<String>,
}

/// Lists every file of the folder in its manifest and writes the manifest and its hash. Of the folders inside with a receipt
/// of their own those in `parts` are listed by their manifest, the others not at all. Returns the receipt.
pub fn seal(folder: &Path, manifest: &Manifest, parts: &[String]) -> Result<String> {
    let contents = contents(folder)?;
    let parts = contents.sealed.iter().filter(|part| parts.contains(part));
    let mut names: Vec<String> = parts.map(|part| format!("{part}/{MANIFEST}")).collect();
    names.extend(contents.files);
    names.sort();
    let files = names.iter().map(|name| hash_of(folder, name)).collect::<Result<Vec<_>>>()?;
    let text = Manifest { files: Some(files), ..manifest.clone() }.to_line();
    let receipt = sha256_hex(text.as_bytes());
    write_whole(&folder.join(MANIFEST), text.as_bytes())?;
    write_whole(&folder.join(RECEIPT), noted_as(&receipt).as_bytes())?;
    Ok(receipt)
}

/// The hash of a file. That of a checkpoint's state was taken when the state was written, and is not taken again.
fn hash_of(folder: &Path, name: &str) -> Result<FileHash> {
    let path = folder.join(name);
    let recorded = match (path.parent(), path.file_name()) {
        (Some(checkpoint), Some(file)) if file == STATE => Checkpoint::recorded_state_file(checkpoint),
        _ => None,
    };
    match recorded {
        Some(sha256) => {
            let n_bytes = fs::metadata(&path).map_err(|e| Error::io(&path, e))?.len();
            Ok(FileHash { name: name.to_string(), n_bytes, sha256 })
        }
        None => hash_file(name, &path),
    }
}

/// Removes the receipt of a folder that is written again. Its manifest is the caller's to replace.
pub fn withdraw(folder: &Path) -> Result<()> {
    for name in [SIGNATURE, RECEIPT] {
        let path = folder.join(name);
        if path.exists() {
            remove_file(&path)?;
        }
    }
    Ok(())
}

/// As [`withdraw`], for a folder whose manifest is nothing but the list of its files.
pub fn withdraw_with_manifest(folder: &Path) -> Result<()> {
    withdraw(folder)?;
    let path = folder.join(MANIFEST);
    if path.exists() { remove_file(&path) } else { Ok(()) }
}

/// The receipt of a folder; `None` where the work has not ended, or its hash does not fit. The files are not looked at.
pub fn of_folder(folder: &Path) -> Option<String> {
    let text = read_text(&folder.join(MANIFEST)).ok()?;
    let manifest: Manifest = record::parse(&text).ok()?;
    let receipt = sha256_hex(text.as_bytes());
    let is_noted = read_text(&folder.join(RECEIPT)).is_ok_and(|noted| noted == noted_as(&receipt));
    manifest.files.filter(|_| is_noted).map(|_| receipt)
}

/// The text of the file beside the manifest, in the form of `sha256sum`.
fn noted_as(receipt: &str) -> String {
    format!("{receipt}  {MANIFEST}\n")
}

/// The digits of a receipt that tables show.
pub fn short(receipt: &str) -> &str {
    receipt.get(..12).unwrap_or(receipt)
}

/// The first digits of a folder's receipt, for tables; `-` where there is none.
pub fn short_of(folder: &Path) -> String {
    of_folder(folder).map_or("-".to_string(), |receipt| short(&receipt).to_string())
}

/// The manifest that a signature is made of.
pub fn signed_bytes(folder: &Path) -> Result<Vec<u8>> {
    let path = folder.join(MANIFEST);
    fs::read(&path).map_err(|e| Error::io(&path, e))
}

/// How a folder stands beside its receipt.
#[derive(Debug)]
pub struct Verified {
    pub receipt: String,
    pub n_files: usize,
    pub n_bytes: u64,
    /// In order of names; empty for a folder that is as it was.
    pub differences: Vec<Difference>,
    /// Folders inside that were made later and have a receipt of their own.
    pub later: Vec<String>,
}

/// A file that is not as the manifest has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Difference {
    Changed { name: String, before: String, after: String },
    Missing { name: String },
    Extra { name: String },
}

impl Difference {
    pub fn name(&self) -> &str {
        match self {
            Self::Changed { name, .. } | Self::Missing { name } | Self::Extra { name } => name,
        }
    }

    /// Whether a checkpoint is missing, as in a copy that left the large files out.
    pub fn is_absent_checkpoint(&self) -> bool {
        let is_checkpoint = |name: &str| name.split('/').any(|part| part == "checkpoints");
        matches!(self, Self::Missing { name } if is_checkpoint(name))
    }
}

/// A name without line breaks: what a stranger named a file begins no line of its own.
fn one_line(name: &str) -> String {
    name.replace('\n', "\\n")
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Changed { name, before, after } => {
                write!(f, "{}: DIFFERENT, recorded {before}, found {after}", one_line(name))
            }
            Self::Missing { name } => write!(f, "{}: MISSING", one_line(name)),
            Self::Extra { name } => write!(f, "{}: EXTRA, not in the manifest", one_line(name)),
        }
    }
}

/// Compares every file of a folder with the manifest, and those of its parts with theirs. A folder that is being written,
/// has not ended or holds a manifest that no `seal` made is refused. No name of the manifest is opened: the folder is
/// walked, and names are compared.
pub fn verify(folder: &Path) -> Result<Verified> {
    check_is_work(folder)?;
    check_tree(folder)?;
    if let Some(writer) = holder(folder) {
        return Err(Error::Locked { folder: folder.to_owned(), by: describe(&writer) });
    }
    let (receipt, recorded) = read_sealed(folder)?;
    let contents = contents(folder)?;
    let part_of = |name: &str| contents.sealed.iter().find(|part| name == format!("{part}/{MANIFEST}"));
    let mut found: Vec<String> = contents.files.clone();
    let listed_parts: Vec<&String> = recorded.keys().filter_map(|name| part_of(name)).collect();
    found.extend(listed_parts.iter().map(|part| format!("{part}/{MANIFEST}")));
    let mut verified =
        Verified { receipt, n_files: 0, n_bytes: 0, differences: Vec::new(), later: Vec::new() };
    for name in &found {
        match recorded.get(name) {
            None => verified.differences.push(Difference::Extra { name: name.clone() }),
            Some(before) => verified.compare(folder, before)?,
        }
    }
    let present: BTreeSet<&String> = found.iter().collect();
    let missing = recorded.keys().filter(|name| !present.contains(name));
    verified.differences.extend(missing.map(|name| Difference::Missing { name: name.clone() }));
    // Where the work put files of its own, nothing was made later: a receipt is easily made.
    let first = |name: &str| name.split('/').next().unwrap_or_default().to_string();
    let own_folders: BTreeSet<String> =
        recorded.keys().filter(|name| name.contains('/')).map(|name| first(name)).collect();
    for part in &contents.sealed {
        let is_later = !listed_parts.contains(&part);
        if is_later && own_folders.contains(&first(part)) {
            verified.differences.push(Difference::Extra { name: part.clone() });
            continue;
        }
        verified.take_in(part, verify(&folder.join(part))?);
        if is_later {
            verified.later.push(part.clone());
        }
    }
    verified.differences.sort_by(|a, b| a.name().cmp(b.name()));
    Ok(verified)
}

impl Verified {
    fn compare(&mut self, folder: &Path, before: &FileHash) -> Result<()> {
        let path = folder.join(&before.name);
        let n_bytes = fs::metadata(&path).map_err(|e| Error::io(&path, e))?.len();
        self.n_files += 1;
        self.n_bytes += n_bytes;
        // A file of another length differs, and is not read: it may be as long as a stranger likes.
        let after = if n_bytes == before.n_bytes {
            hash_file(&before.name, &path)?.sha256
        } else {
            format!("{n_bytes} bytes")
        };
        if after != before.sha256 {
            let (name, recorded) = (before.name.clone(), before.sha256.clone());
            let before =
                if n_bytes == before.n_bytes { recorded } else { format!("{} bytes", before.n_bytes) };
            self.differences.push(Difference::Changed { name, before, after });
        }
        Ok(())
    }

    /// Adds what was found in a folder inside.
    fn take_in(&mut self, part: &str, inside: Verified) {
        let named = |name: String| format!("{part}/{name}");
        self.n_files += inside.n_files;
        self.n_bytes += inside.n_bytes;
        self.later.extend(inside.later.into_iter().map(named));
        self.differences.extend(inside.differences.into_iter().map(|difference| match difference {
            Difference::Changed { name, before, after } => {
                Difference::Changed { name: named(name), before, after }
            }
            Difference::Missing { name } => Difference::Missing { name: named(name) },
            Difference::Extra { name } => Difference::Extra { name: named(name) },
        }));
    }
}

/// Refuses a folder that is not there, or that no command of this program has written.
fn check_is_work(folder: &Path) -> Result<()> {
    let names = [MANIFEST, "plan.toml", "eval.json", "experiment.json"];
    let problem = if !folder.is_dir() {
        "no such folder"
    } else if names.iter().any(|name| folder.join(name).exists()) {
        return Ok(());
    } else {
        "holds no run, no evaluation and no experiment"
    };
    let remedy = "name the folder of a run, an evaluation or an experiment; stapo runs lists the runs here";
    Err(Error::NoRun { folder: folder.to_owned(), problem: problem.into(), remedy: remedy.into() })
}

/// The receipt of a folder and the files of its manifest by name, where both are as `seal` writes them.
fn read_sealed(folder: &Path) -> Result<(String, BTreeMap<String, FileHash>)> {
    let refuse = |problem: String, remedy: &str| Error::NoRun {
        folder: folder.to_owned(),
        problem,
        remedy: remedy.to_string(),
    };
    let unended = "a run goes on with stapo train --resume, an evaluation with stapo eval --resume, an experiment with the command that began it; each writes a receipt when it ends";
    let path = folder.join(MANIFEST);
    if !path.exists() {
        let problem = format!("no {MANIFEST}: its work has not ended, or an earlier program made it");
        return Err(refuse(problem, unended));
    }
    let text = read_text(&path).map_err(|e| Error::io(&path, e))?;
    let manifest: Manifest = record::parse(&text).map_err(|e| Error::record(&path, &e))?;
    let back = "put back the copy that the work wrote";
    let Some(files) = &manifest.files else {
        let problem = "no receipt: its work was killed or has not ended, or an earlier program made it";
        return Err(refuse(problem.to_string(), unended));
    };
    if manifest.to_line() != text {
        return Err(refuse(format!("{MANIFEST} was changed: it is not in canonical form"), back));
    }
    let receipt = sha256_hex(text.as_bytes());
    if !folder.join(RECEIPT).exists() {
        return Err(refuse(format!("no receipt: {RECEIPT} is missing"), unended));
    }
    let noted = read_text(&folder.join(RECEIPT)).unwrap_or_default();
    if noted != noted_as(&receipt) {
        let problem = format!("{MANIFEST} or {RECEIPT} was changed: the first has the hash {receipt}");
        return Err(refuse(problem, back));
    }
    let mut by_name = BTreeMap::new();
    for file in files {
        let is_inside = file.name.split('/').all(|part| !["", ".", ".."].contains(&part));
        if !is_inside || file.name.contains('\\') {
            let problem = format!("{MANIFEST} names {:?}, which is no file of this folder", file.name);
            return Err(refuse(problem, back));
        }
        if by_name.insert(file.name.clone(), file.clone()).is_some() {
            return Err(refuse(format!("{MANIFEST} names {:?} twice", file.name), back));
        }
    }
    Ok((receipt, by_name))
}

/// Walks a folder. Pages, which other commands make from the records at any time, are left out, and so are files of
/// writers that were killed.
fn contents(folder: &Path) -> Result<Contents> {
    let mut contents = Contents { files: Vec::new(), sealed: Vec::new() };
    let mut open = vec![(folder.to_owned(), String::new())];
    while let Some((inside, prefix)) = open.pop() {
        let entries = fs::read_dir(&inside).map_err(|e| Error::io(&inside, e))?;
        let mut paths: Vec<PathBuf> = Vec::new();
        for entry in entries {
            paths.push(entry.map_err(|e| Error::io(&inside, e))?.path());
        }
        for path in paths {
            let file_name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let is_top = prefix.is_empty();
            let name = format!("{prefix}{file_name}");
            if is_top && (UNLISTED.contains(&file_name.as_str()) || is_page(&file_name))
                || is_temporary(&file_name)
            {
                continue;
            }
            if !path.is_dir() {
                contents.files.push(name);
            } else if of_folder(&path).is_some() {
                contents.sealed.push(name);
            } else {
                open.push((path, format!("{name}/")));
            }
        }
    }
    contents.files.sort();
    contents.sealed.sort();
    Ok(contents)
}

/// Whether something at the top of a folder is made from its records: a report, a figure, a table, TensorBoard's events.
fn is_page(name: &str) -> bool {
    let ending = Path::new(name).extension().unwrap_or_default();
    name == "tensorboard" || ["html", "png", "csv"].iter().any(|page| ending == *page)
}

/// Whether a name is one under which files are written before they get their own.
fn is_temporary(name: &str) -> bool {
    let ending = Path::new(name).extension().unwrap_or_default();
    name.starts_with('.') && (ending == "tmp" || ending == "starting")
}

/// The manifest of a folder that has no steps: an evaluation or an experiment.
pub fn plain_manifest(inputs: Vec<FileHash>, program: &str, device: &str) -> Manifest {
    Manifest {
        schema: record::SCHEMA,
        inputs,
        steps: Vec::new(),
        program: program.to_string(),
        device: device.to_string(),
        accepted: Vec::new(),
        files: None,
        extra: record::Extra::new(),
    }
}
