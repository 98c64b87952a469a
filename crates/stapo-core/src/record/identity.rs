//! What the bits of a run depend on besides its plan, and what changed between two such lists.

use super::FileHash;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The program and the input files of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Identity {
    /// Version and commit. Another program is reported, not refused.
    pub program: String,
    /// `cpu` or `cuda`, for runs whose plan does not say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub device: String,
    /// Every file that the run reads, by a name: `data`, `weights`, `tokenizer`, `reference weights`, ...
    pub inputs: Vec<FileHash>,
}

/// One thing that changed, with both values as a reader sees them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Change {
    pub name: String,
    pub before: String,
    pub after: String,
}

/// What the name of a change begins with where a file of the folder itself changed, which is no input.
const FILE: &str = "file ";

impl Change {
    /// A file of a run or an evaluation that is not as it was recorded, with both hashes.
    pub fn of_file(name: &str, before: impl Into<String>, after: impl Into<String>) -> Self {
        Self { name: format!("{FILE}{name}"), before: before.into(), after: after.into() }
    }

    /// The file of the folder that changed; `None` for an input or a key of the plan.
    pub fn file(&self) -> Option<&str> {
        self.name.strip_prefix(FILE)
    }
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: was {}, is {}", self.name, self.before, self.after)
    }
}

/// The value of a thing that is not there.
pub const ABSENT: &str = "absent";

/// The inputs that differ by name or content, in the order of `before`.
pub fn changed_inputs(before: &[FileHash], after: &[FileHash]) -> Vec<Change> {
    let hash_of = |inputs: &[FileHash], name: &str| {
        let found: Vec<&str> =
            inputs.iter().filter(|input| input.name == name).map(|input| input.sha256.as_str()).collect();
        if found.is_empty() { ABSENT.to_string() } else { found.join(" ") }
    };
    let mut seen = BTreeSet::new();
    let names = before.iter().chain(after).map(|input| &input.name).filter(|name| seen.insert(*name));
    let changes = names.map(|name| Change {
        name: name.clone(),
        before: hash_of(before, name),
        after: hash_of(after, name),
    });
    changes.filter(|change| change.before != change.after).collect()
}
