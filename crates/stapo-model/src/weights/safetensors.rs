//! The safetensors format: 8 bytes of header length, a JSON header, the numbers. The project reads and writes the
//! format itself and not through the `safetensors` crate, so that every refusal names the tensor, a name given twice is
//! refused, and a shard is written while its tensors are computed.

use super::{Encoding, StoredTensor, Weights};
use crate::error::{Error, Result};
use crate::files;
use crate::json;
use serde_json::{Map, Value};
use stapo_ops::mapped::MappedFile;
use std::collections::BTreeMap;
use std::path::{Component, Path};
use std::sync::Arc;

pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Longest header accepted, the same as the reference implementation's.
const MAX_HEADER: u64 = 100_000_000;
const MAX_INDEX: u64 = 64 << 20;
const MAX_SHARDS: usize = 4096;

/// A safetensors file, or a folder with `model.safetensors` or an index of shards.
pub(crate) fn open(path: &Path) -> Result<Weights> {
    let location = path.display().to_string();
    if !path.is_dir() {
        return open_shards(location, &[(path.to_owned(), None)]);
    }
    let index = path.join(INDEX);
    if index.exists() {
        return open_shards(location, &indexed_shards(path, &index)?);
    }
    let single = path.join(SINGLE);
    if !single.exists() {
        let hint = "expected a Hugging Face folder in safetensors, or a GGUF file; pickled .bin checkpoints are not read";
        return Err(Error::missing(location, format!("no {SINGLE} and no {INDEX}"), hint));
    }
    open_shards(location, &[(single, None)])
}

/// A file and, where an index lists them, the tensors that the file must hold.
type Shard = (std::path::PathBuf, Option<Vec<String>>);

/// The shards that an index names, each with the tensors that the shard must hold.
fn indexed_shards(folder: &Path, index: &Path) -> Result<Vec<Shard>> {
    let keys = json::read_object(index, MAX_INDEX)?;
    let location = format!("{}: weight_map", index.display());
    let Some(Value::Object(map)) = keys.get("weight_map") else {
        return Err(Error::malformed(location, "is missing, expected an object from tensor to file"));
    };
    let mut shards: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (tensor, file) in map {
        let file = file.as_str().filter(|file| is_plain_name(file)).ok_or_else(|| {
            let problem = format!("{tensor} is in {file}, expected the name of a file in the same folder");
            Error::malformed(&location, problem)
        })?;
        shards.entry(file).or_default().push(tensor.clone());
    }
    if shards.is_empty() || shards.len() > MAX_SHARDS {
        return Err(Error::malformed(
            location,
            format!("names {} files, expected 1 to {MAX_SHARDS}", shards.len()),
        ));
    }
    Ok(shards.into_iter().map(|(file, tensors)| (folder.join(file), Some(tensors))).collect())
}

/// Whether `file` is one plain file name: no folder, no `..`, no absolute path, no drive.
fn is_plain_name(file: &str) -> bool {
    let mut components = Path::new(file).components();
    matches!(components.next(), Some(Component::Normal(name)) if name == file)
        && components.next().is_none()
        && !file.contains(['/', '\\', ':', '\0'])
}

fn open_shards(location: String, shards: &[Shard]) -> Result<Weights> {
    let mut files = Vec::new();
    let mut tensors = BTreeMap::new();
    for (path, expected) in shards {
        files::check(path).map_err(|e| Error::io(path, e))?;
        let file = MappedFile::open(path).map_err(|e| Error::io(path, e))?;
        let shard = path.display().to_string();
        let mut found = parse(&shard, &file, files.len())?;
        for name in expected.iter().flatten() {
            let stored = found.remove(name).ok_or_else(|| {
                Error::missing(
                    &shard,
                    format!("no tensor {name}, which the index says is here"),
                    "download it again",
                )
            })?;
            tensors.insert(name.clone(), stored);
        }
        if expected.is_none() {
            tensors = found;
        }
        files.push(Arc::new(file));
    }
    Ok(Weights::new(location, files, tensors))
}

/// The table of one file. The ranges are in bounds, in order, without gap or overlap.
fn parse(location: &str, file: &[u8], file_idx: usize) -> Result<BTreeMap<String, StoredTensor>> {
    let malformed = |problem: String| Error::malformed(location, problem);
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(malformed(format!("{} bytes, too short for a safetensors file", file.len())));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER || length > rest.len() as u64 {
        let problem = format!(
            "declares a header of {length} bytes in a file of {}: truncated, or no safetensors",
            file.len()
        );
        return Err(malformed(problem));
    }
    let (header, numbers) = rest.split_at(length as usize);
    let header = json::parse_object(&format!("{location}: header"), header)?;
    let mut found = Vec::new();
    for (name, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        found.push((name, entry_of(&format!("{location}: tensor {name}"), entry)?));
    }
    found.sort_by_key(|(_, entry)| (entry.bytes.start, entry.bytes.end));
    let mut end = 0;
    for (name, entry) in &found {
        if entry.bytes.start != end {
            let what = if entry.bytes.start < end {
                "overlaps the tensor before it"
            } else {
                "leaves a gap before it"
            };
            return Err(malformed(format!(
                "tensor {name} {what}: starts at {}, expected {end}",
                entry.bytes.start
            )));
        }
        end = entry.bytes.end;
    }
    if end != numbers.len() {
        return Err(malformed(format!(
            "holds {} bytes of numbers, its header declares {end}",
            numbers.len()
        )));
    }
    let start = file.len() - numbers.len();
    let placed = |entry: StoredTensor| StoredTensor {
        file: file_idx,
        bytes: entry.bytes.start + start..entry.bytes.end + start,
        ..entry
    };
    Ok(found.into_iter().map(|(name, entry)| (name.clone(), placed(entry))).collect())
}

/// One tensor of the header. Its range is relative to the start of the numbers and fits its shape.
fn entry_of(location: &str, entry: &Value) -> Result<StoredTensor> {
    let malformed = |problem: String| Error::malformed(location, problem);
    let empty = Map::new();
    let keys = entry.as_object().unwrap_or(&empty);
    let list = |key: &str| -> Result<Vec<usize>> {
        let read = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok());
        let list = keys.get(key).and_then(Value::as_array).and_then(|list| list.iter().map(read).collect());
        list.ok_or_else(|| malformed(format!("{key} is missing or not a list of whole numbers")))
    };
    let encoding = match keys.get("dtype").and_then(Value::as_str) {
        Some("F32") => Encoding::F32,
        Some("F16") => Encoding::F16,
        Some("BF16") => Encoding::Bf16,
        Some(other) => {
            return Err(Error::unsupported(
                location,
                format!("dtype {other} is not read"),
                "supported: F32, F16, BF16",
            ));
        }
        None => return Err(malformed("dtype is missing".into())),
    };
    let shape = list("shape")?;
    let offsets = list("data_offsets")?;
    let &[start, end] = offsets.as_slice() else {
        return Err(malformed(format!("data_offsets has {} numbers, expected 2", offsets.len())));
    };
    let n_bytes = encoding.n_bytes(&shape);
    if start > end || n_bytes != Some(end - start) {
        return Err(malformed(format!(
            "shape {shape:?} as {encoding:?} does not fill bytes {start} to {end}"
        )));
    }
    Ok(StoredTensor::as_named(start..end, shape, encoding))
}
