//! The manifest of a folder whose work has ended, and its hash.

use super::{MANIFEST, RECEIPT, noted_as};
use crate::error::{Error, Result};
use crate::run::disk::sha256_hex;
use stapo_core::record::{self, AcceptedChange, FileHash, Manifest, Record, StepHash};
use stapo_model::files::read_text;
use std::collections::BTreeMap;
use std::path::Path;

/// A manifest as `seal` writes it.
pub(super) struct Sealed {
    pub receipt: String,
    /// By name.
    pub files: BTreeMap<String, FileHash>,
    pub steps: Vec<StepHash>,
    pub accepted: Vec<AcceptedChange>,
}

impl Sealed {
    /// The manifest and the receipt of a folder, where both are as `seal` writes them.
    pub fn read(folder: &Path) -> Result<Self> {
        let refuse = |problem: String, remedy: &str| Error::NoRun {
            folder: folder.to_owned(),
            problem,
            remedy: remedy.to_string(),
        };
        let unended = "continue a run with stapo train --resume, an evaluation with stapo eval --resume, an experiment with the command that began it; each writes a receipt when it ends";
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
        Ok(Self { receipt, files: by_name, steps: manifest.steps, accepted: manifest.accepted })
    }
}
