//! The files that a config names: one, a pattern, or several.

use super::super::TaskError;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};

/// The kind of a file's task or texts in configs, by its name; `None` for several files.
pub fn file_kind(path: Option<&str>) -> &'static str {
    let Some(path) = path else { return "file" };
    match Path::new(path).extension().and_then(|extension| extension.to_str()) {
        Some("parquet") => "parquet",
        Some("jsonl") | None => "jsonl",
        Some(_) => "file",
    }
}

/// Whether a name has the ending of a file of rows.
pub(crate) fn is_data_file(name: &str) -> bool {
    let ends = [".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz", ".zst"];
    ends.iter().any(|end| name.to_ascii_lowercase().ends_with(end))
}

/// The name of a file without its ending, and without that of a compression.
pub(crate) fn bare_name(file: &str) -> String {
    let bare = [".gz", ".zst"].iter().find_map(|end| file.strip_suffix(end)).unwrap_or(file);
    Path::new(bare).file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// A file, a pattern such as `data/*.parquet`, or a list of these.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DataPath(Vec<PathBuf>);

/// A file and the position of its entry in the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataFile {
    pub path: PathBuf,
    pub entry_idx: usize,
}

impl DataPath {
    /// The paths and patterns, as given.
    pub fn entries(&self) -> &[PathBuf] {
        &self.0
    }

    /// The files, those of a pattern in the order of their names. A file whose name has the form of a pattern is a file.
    pub fn files(&self) -> Result<Vec<DataFile>, TaskError> {
        let mut files = Vec::new();
        for (entry_idx, entry) in self.0.iter().enumerate() {
            let named = |path| DataFile { path, entry_idx };
            match entry.to_str().filter(|text| text.contains(['*', '?', '[']) && !entry.exists()) {
                None => files.push(named(entry.clone())),
                Some(pattern) => files.extend(matching(entry, pattern)?.into_iter().map(named)),
            }
        }
        Ok(files)
    }
}

fn matching(entry: &Path, pattern: &str) -> Result<Vec<PathBuf>, TaskError> {
    let refuse = |problem: String| {
        TaskError::File {
        path: entry.to_path_buf(),
        problem,
        remedy: "* and ? match parts of a name, ** matches any folders; a path begins at the folder in which the program was started".into(),
    }
    };
    let found = glob::glob(pattern).map_err(|error| refuse(error.to_string()))?;
    let found: Vec<PathBuf> = found.collect::<Result<_, _>>().map_err(|error| refuse(error.to_string()))?;
    let files: Vec<PathBuf> = found.into_iter().filter(|path| path.is_file()).collect();
    if files.is_empty() { Err(refuse("no file has a name of this pattern".into())) } else { Ok(files) }
}

impl fmt::Display for DataPath {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        let entries: Vec<String> = self.0.iter().map(|entry| entry.display().to_string()).collect();
        formatter.write_str(&entries.join(", "))
    }
}

impl<P: Into<PathBuf>> From<P> for DataPath {
    fn from(path: P) -> Self {
        Self(vec![path.into()])
    }
}

impl FromIterator<PathBuf> for DataPath {
    fn from_iter<I: IntoIterator<Item = PathBuf>>(entries: I) -> Self {
        Self(entries.into_iter().collect())
    }
}

impl Serialize for DataPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0[..] {
            [one] => one.serialize(serializer),
            several => several.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for DataPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Entries)
    }
}

struct Entries;

impl<'de> Visitor<'de> for Entries {
    type Value = DataPath;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a path, a pattern, or a list of these")
    }

    fn visit_str<E>(self, path: &str) -> Result<DataPath, E> {
        Ok(DataPath::from(path))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<DataPath, A::Error> {
        let mut paths = Vec::new();
        while let Some(path) = entries.next_element()? {
            paths.push(path);
        }
        if paths.is_empty() {
            return Err(serde::de::Error::custom("an empty list of paths, expected at least one"));
        }
        Ok(DataPath(paths))
    }
}

impl JsonSchema for DataPath {
    fn schema_name() -> Cow<'static, str> {
        "DataPath".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "anyOf": [{ "type": "string" }, { "type": "array", "items": { "type": "string" }, "minItems": 1 }]
        })
    }
}
