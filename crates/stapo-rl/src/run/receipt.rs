//! The receipt of a folder: the SHA-256 of its `manifest.json`, which lists every file with its hash. A run, an evaluation
//! and an experiment get one when their work ends or is stopped; going on withdraws it.

mod sealed;

use super::checkpoint::Checkpoint;
use super::hashes::{hash_file, hash_or_length};
use super::lock::{describe, holder};
use super::reading::step_of;
use super::tree::check_tree;
use crate::error::{Error, Result};
use crate::run::disk::{remove_file, sha256_hex, write_whole};
use rayon::prelude::*;
use sealed::Sealed;
use stapo_core::record::{self, ABSENT, AcceptedChange, Change, FileHash, Manifest, Record, StepHash};
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
    /// The names of folders inside that have a separate receipt.
    sealed: Vec<String>,
    /// What a manifest does not list: pages, and files of writers that were killed.
    uncovered: Vec<String>,
}

/// Lists every file of the folder in its manifest and writes the manifest and its hash. Of the folders inside with a receipt
/// of their own those in `parts` are listed by their manifest, the others not at all. Refuses files that are not as they were
/// `written`. Returns the receipt.
pub fn seal(folder: &Path, manifest: &Manifest, parts: &[String], written: &[FileHash]) -> Result<String> {
    let contents = contents(folder)?;
    let parts = contents.sealed.iter().filter(|part| parts.contains(part));
    let mut names: Vec<String> = parts.map(|part| format!("{part}/{MANIFEST}")).collect();
    names.extend(contents.files);
    names.sort();
    let files = names.iter().map(|name| hash_of(folder, name)).collect::<Result<Vec<_>>>()?;
    let found: BTreeMap<&str, &FileHash> = files.iter().map(|file| (file.name.as_str(), file)).collect();
    if let Some(changed) = written.iter().find(|file| found.get(file.name.as_str()) != Some(file)) {
        return Err(Error::NoRun {
            folder: folder.to_owned(),
            problem: format!("{} is not as this process wrote it", changed.name),
            remedy: "another process changed or removed the file; --resume says what differs".into(),
        });
    }
    let text = Manifest { files: Some(files), ..manifest.clone() }.to_line();
    let receipt = sha256_hex(text.as_bytes());
    write_whole(&folder.join(MANIFEST), text.as_bytes())?;
    write_whole(&folder.join(RECEIPT), noted_as(&receipt).as_bytes())?;
    Ok(receipt)
}

/// The checkpoint and the name in it of a file with tensors of a state; `None` for any other file.
fn state_file<'a>(path: &'a Path, name: &str) -> Option<(&'a Path, &'a str)> {
    let file = path.file_name().and_then(|file| file.to_str())?;
    (is_of_checkpoint(name) && Checkpoint::is_state_file(file)).then_some((path.parent()?, file))
}

/// The hash of a file. That of a checkpoint's state was taken when the state was written, and is not taken again.
fn hash_of(folder: &Path, name: &str) -> Result<FileHash> {
    let path = folder.join(name);
    let recorded =
        state_file(&path, name).and_then(|(checkpoint, file)| Checkpoint::recorded_file(checkpoint, file));
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

/// The receipt of a folder; `None` if the work has not ended, or its hash does not fit. The files are not looked at.
pub fn of_folder(folder: &Path) -> Option<String> {
    let text = read_text(&folder.join(MANIFEST)).ok()?;
    let manifest: Manifest = record::parse(&text).ok()?;
    let receipt = sha256_hex(text.as_bytes());
    let is_noted = read_text(&folder.join(RECEIPT)).is_ok_and(|noted| noted == noted_as(&receipt));
    manifest.files.filter(|_| is_noted).map(|_| receipt)
}

/// The text of the file next to the manifest, in the form of `sha256sum`.
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

/// How a folder compares with its receipt.
#[derive(Debug)]
pub struct Verified {
    pub receipt: String,
    pub n_files: usize,
    pub n_bytes: u64,
    /// In order of names; empty for a folder that is as it was.
    pub differences: Vec<Difference>,
    /// Folders inside that were made later and have a separate receipt.
    pub later: Vec<String>,
    /// What no receipt covers: pages made from the records, and files of writers that were killed.
    pub uncovered: Vec<String>,
    /// Changes that `--accept-changes` let pass.
    pub accepted: Vec<AcceptedChange>,
}

/// A file that is not as the manifest has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Difference {
    Changed {
        name: String,
        before: String,
        after: String,
    },
    Missing {
        name: String,
    },
    Extra {
        name: String,
    },
    /// A state file that is as the manifest has it, but holds another state than the one recorded.
    State {
        name: String,
        problem: String,
    },
}

impl Difference {
    pub fn name(&self) -> &str {
        match self {
            Self::Changed { name, .. }
            | Self::Missing { name }
            | Self::Extra { name }
            | Self::State { name, .. } => name,
        }
    }

    fn name_mut(&mut self) -> &mut String {
        match self {
            Self::Changed { name, .. }
            | Self::Missing { name }
            | Self::Extra { name }
            | Self::State { name, .. } => name,
        }
    }

    /// The difference as a change that a resume refuses or records, with both hashes.
    fn to_change(&self, folder: &Path, sealed: &Sealed) -> Result<Change> {
        let name = self.name();
        let path = folder.join(name);
        let before = sealed.files.get(name).map_or(ABSENT, |file| &file.sha256);
        let after = match self {
            Self::State { problem, .. } => problem.clone(),
            _ if path.is_file() => hash_or_length(name, &path)?.sha256,
            _ if path.exists() => "a folder".to_string(),
            _ => ABSENT.to_string(),
        };
        Ok(Change::of_file(name, before, after))
    }

    /// Whether a checkpoint is missing, as in a copy that left the large files out.
    pub fn is_absent_checkpoint(&self) -> bool {
        matches!(self, Self::Missing { name } if is_of_checkpoint(name))
    }
}

/// Whether a file belongs to a checkpoint of a run, or of a run inside an experiment.
pub fn is_of_checkpoint(name: &str) -> bool {
    name.split('/').any(|part| part == "checkpoints")
}

/// A name without line breaks: what a stranger named a file does not begin a new line.
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
            Self::State { name, problem } => write!(f, "{}: DIFFERENT, {problem}", one_line(name)),
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
    let sealed = Sealed::read(folder)?;
    let contents = contents(folder)?;
    let mut verified = Verified::compare_files(folder, &sealed, &contents, None)?;
    // If the work put files there itself, nothing was made later: a receipt is easily made.
    let first = |name: &str| name.split('/').next().unwrap_or_default().to_string();
    let own_folders: BTreeSet<String> =
        sealed.files.keys().filter(|name| name.contains('/')).map(|name| first(name)).collect();
    for part in &contents.sealed {
        let is_later = !sealed.files.contains_key(&format!("{part}/{MANIFEST}"));
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

/// How a folder that is about to be written again compares with its receipt.
#[derive(Default)]
pub(crate) struct Reviewed {
    /// What differs.
    pub changes: Vec<Change>,
    /// The files that do not, by name.
    pub same: BTreeMap<String, FileHash>,
}

/// Compares a folder with its receipt, for the process that has the folder's lock. Where there is no receipt, nothing is compared: the work
/// was killed, or going on was interrupted after the receipt was withdrawn. The state file of the checkpoint that is `opened`
/// has been read.
pub(crate) fn review(folder: &Path, opened: Option<&Checkpoint>) -> Result<Reviewed> {
    let Ok(noted) = read_text(&folder.join(RECEIPT)) else { return Ok(Reviewed::default()) };
    let bytes = fs::read(folder.join(MANIFEST)).ok();
    let manifest = bytes.as_ref().and_then(|bytes| std::str::from_utf8(bytes).ok());
    let manifest = manifest.and_then(|text| record::parse::<Manifest>(text).ok());
    if manifest.is_some_and(|manifest| manifest.files.is_none()) {
        return Ok(Reviewed::default());
    }
    let found = bytes.map_or(ABSENT.to_string(), |bytes| sha256_hex(&bytes));
    if noted != noted_as(&found) {
        let before = noted.split_whitespace().next().unwrap_or("a receipt that cannot be read");
        let changes = vec![Change::of_file(MANIFEST, before, found)];
        return Ok(Reviewed { changes, ..Reviewed::default() });
    }
    let mut sealed = Sealed::read(folder)?;
    let verified = Verified::compare_files(folder, &sealed, &contents(folder)?, opened)?;
    let differences = verified.differences.iter();
    let changes =
        differences.map(|difference| difference.to_change(folder, &sealed)).collect::<Result<_>>()?;
    for difference in &verified.differences {
        sealed.files.remove(difference.name());
    }
    Ok(Reviewed { changes, same: sealed.files })
}

impl Verified {
    /// Compares the files of a folder itself, of which parts are represented by their manifests.
    fn compare_files(
        folder: &Path,
        sealed: &Sealed,
        contents: &Contents,
        opened: Option<&Checkpoint>,
    ) -> Result<Self> {
        let parts = contents.sealed.iter().map(|part| format!("{part}/{MANIFEST}"));
        let mut found: Vec<String> = parts.filter(|name| sealed.files.contains_key(name)).collect();
        found.extend(contents.files.iter().cloned());
        // Files are hashed at once, and the differences come in the order of names.
        let compared = found.par_iter().map(|name| match sealed.files.get(name) {
            None => Ok((0, 0, vec![Difference::Extra { name: name.clone() }])),
            Some(before) => {
                compare(folder, before, &sealed.steps, opened).map(|(n_bytes, found)| (1, n_bytes, found))
            }
        });
        let mut verified = Self {
            receipt: sealed.receipt.clone(),
            n_files: 0,
            n_bytes: 0,
            differences: Vec::new(),
            later: Vec::new(),
            uncovered: contents.uncovered.clone(),
            accepted: sealed.accepted.clone(),
        };
        for (n_files, n_bytes, differences) in compared.collect::<Result<Vec<_>>>()? {
            verified.n_files += n_files;
            verified.n_bytes += n_bytes;
            verified.differences.extend(differences);
        }
        let present: BTreeSet<&String> = found.iter().collect();
        let missing = sealed.files.keys().filter(|name| !present.contains(name));
        verified.differences.extend(missing.map(|name| Difference::Missing { name: name.clone() }));
        Ok(verified)
    }

    /// Adds what was found in a folder inside.
    fn take_in(&mut self, part: &str, inside: Verified) {
        let named = |name: String| format!("{part}/{name}");
        self.n_files += inside.n_files;
        self.n_bytes += inside.n_bytes;
        self.later.extend(inside.later.into_iter().map(named));
        self.uncovered.extend(inside.uncovered.into_iter().map(named));
        self.differences.extend(inside.differences.into_iter().map(|mut difference| {
            let name = difference.name_mut();
            *name = named(std::mem::take(name));
            difference
        }));
        self.accepted.extend(inside.accepted.into_iter().map(|mut accepted| {
            let Change { name, before, after } = accepted.change.clone();
            accepted.change = match accepted.change.file() {
                Some(file) => Change::of_file(&format!("{part}/{file}"), before, after),
                None => Change { name: format!("{part}: {name}"), before, after },
            };
            accepted
        }));
    }
}

/// The length of a file, and how it differs. A state file is read once for its hash and for that of the state in it.
fn compare(
    folder: &Path,
    before: &FileHash,
    steps: &[StepHash],
    opened: Option<&Checkpoint>,
) -> Result<(u64, Vec<Difference>)> {
    let FileHash { name, sha256, .. } = before;
    let path = folder.join(name);
    let n_bytes = fs::metadata(&path).map_err(|e| Error::io(&path, e))?.len();
    let changed = |before: String, after: String| {
        (n_bytes, vec![Difference::Changed { name: name.clone(), before, after }])
    };
    // A file of another length differs, and is not read: it may be as long as a stranger likes.
    if n_bytes != before.n_bytes {
        return Ok(changed(format!("{} bytes", before.n_bytes), format!("{n_bytes} bytes")));
    }
    let (after, problem) = match state_file(&path, name) {
        Some((checkpoint, file)) => {
            let step = step_of(checkpoint);
            let known = steps.iter().find(|hash| Some(hash.step) == step).map(|hash| hash.sha256.as_str());
            let opened = opened.filter(|opened| opened.path == checkpoint);
            match opened.and_then(|opened| opened.checked_file(file, known)) {
                Some(checked) => checked,
                None => Checkpoint::check_file(checkpoint, file, known)?,
            }
        }
        None => (hash_file(name, &path)?.sha256, None),
    };
    if after != *sha256 {
        return Ok(changed(sha256.clone(), after));
    }
    Ok((
        n_bytes,
        problem.map(|problem| Difference::State { name: name.clone(), problem }).into_iter().collect(),
    ))
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

/// Walks a folder. Pages, which other commands make from the records at any time, are left out, and so are files of
/// writers that were killed.
fn contents(folder: &Path) -> Result<Contents> {
    let mut contents = Contents { files: Vec::new(), sealed: Vec::new(), uncovered: Vec::new() };
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
            if is_top && UNLISTED.contains(&file_name.as_str()) {
                continue;
            }
            if is_top && is_page(&file_name) || is_temporary(&file_name) {
                contents.uncovered.push(name);
            } else if !path.is_dir() {
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
    contents.uncovered.sort();
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
