//! GGUF: one file with metadata, tokenizer and weights. Opening parses only the header; strings and arrays stay in the
//! mapped file until they are read, so that false lengths in a file cannot cost memory.

mod bytes;
mod config;
mod families;
mod field;
mod metadata;
mod tensors;
#[cfg(test)]
mod tests;
mod tokenizer;

use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::weights::{Encoding, StoredTensor, Weights};
use bytes::Bytes;
use field::Field;
use stapo_ops::mapped::MappedFile;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const MAGIC: &[u8; 4] = b"GGUF";
/// Most dimensions of a tensor.
const MAX_DIMS: u32 = 4;

/// An opened file: its metadata by key, its tensors under their GGUF names.
#[derive(Debug)]
pub struct Gguf {
    location: String,
    file: Arc<MappedFile>,
    fields: BTreeMap<String, Field>,
    tensors: BTreeMap<String, StoredTensor>,
}

impl Gguf {
    pub fn open(path: &Path) -> Result<Self> {
        crate::files::check(path).map_err(|e| Error::io(path, e))?;
        let file = MappedFile::open(path).map_err(|e| Error::io(path, e))?;
        let location = path.display().to_string();
        let mut bytes = Bytes::new(&location, &file);
        let (n_tensors, n_fields) = read_preamble(&location, &mut bytes)?;
        let fields = read_fields(&location, &mut bytes, n_fields)?;
        let alignment = alignment(&location, &file, &fields)?;
        let mut tensors = read_tensors(&location, &mut bytes, n_tensors)?;
        let start = bytes.position().next_multiple_of(alignment);
        place_tensors(&location, &mut tensors, start, alignment, file.len())?;
        Ok(Self { location, file: Arc::new(file), fields, tensors })
    }

    /// Whether the file begins with the magic bytes of GGUF.
    pub fn is_magic(path: &Path) -> bool {
        use std::io::Read;
        let mut magic = [0; 4];
        crate::files::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && &magic == MAGIC
    }

    /// The weights under their Hugging Face names; `config` is the result of [`Gguf::config`].
    pub fn weights(&self, config: &ModelConfig) -> Result<Weights> {
        let tensors = tensors::renamed(&self.location, &self.tensors, config)?;
        let mut weights = Weights::new(self.location.clone(), vec![Arc::clone(&self.file)], tensors);
        if config.family.joins_projections() {
            weights.split_projections(config)?;
        }
        Ok(weights)
    }

    pub(crate) fn location(&self) -> &str {
        &self.location
    }
}

/// Checks magic and version; returns how many tensors and metadata fields follow.
fn read_preamble(location: &str, bytes: &mut Bytes) -> Result<(u64, u64)> {
    if bytes.take(4, "magic")? != MAGIC {
        return Err(Error::malformed(location, "does not begin with GGUF"));
    }
    match bytes.u32("version")? {
        2 | 3 => {}
        version if version.swap_bytes() <= 3 => {
            return Err(Error::unsupported(location, "is big-endian GGUF", "expected little-endian"));
        }
        version => {
            let hint = "supported: 2 and 3; convert the model again with a current llama.cpp";
            return Err(Error::unsupported(location, format!("GGUF version {version}"), hint));
        }
    }
    Ok((bytes.u64("tensor count")?, bytes.u64("field count")?))
}

fn read_fields(location: &str, bytes: &mut Bytes, n_fields: u64) -> Result<BTreeMap<String, Field>> {
    let mut fields = BTreeMap::new();
    for _ in 0..n_fields {
        let key = bytes.string("metadata key")?.to_owned();
        let field = bytes.field(&key)?;
        if fields.insert(key.clone(), field).is_some() {
            return Err(Error::malformed(location, format!("metadata key {key:?} appears twice")));
        }
    }
    Ok(fields)
}

fn alignment(location: &str, file: &[u8], fields: &BTreeMap<String, Field>) -> Result<usize> {
    let Some(field) = fields.get("general.alignment") else { return Ok(32) };
    let value = field.unsigned(file).unwrap_or(0) as usize;
    if value.is_power_of_two() && value.is_multiple_of(8) && value <= 1 << 20 {
        return Ok(value);
    }
    Err(Error::malformed(
        format!("{location}: general.alignment"),
        format!("is {value}, expected a power of two from 8"),
    ))
}

/// The tensor table. Ranges are relative to the start of the numbers and unchecked until [`place_tensors`].
fn read_tensors(location: &str, bytes: &mut Bytes, n_tensors: u64) -> Result<BTreeMap<String, StoredTensor>> {
    let mut tensors = BTreeMap::new();
    for _ in 0..n_tensors {
        let name = bytes.string("tensor name")?.to_owned();
        let location = format!("{location}: tensor {name}");
        let n_dims = bytes.u32("dimension count")?;
        if n_dims == 0 || n_dims > MAX_DIMS {
            return Err(Error::malformed(location, format!("{n_dims} dimensions, expected 1 to {MAX_DIMS}")));
        }
        let mut shape = Vec::new();
        for _ in 0..n_dims {
            let dim = bytes.u64("dimension")?;
            shape.push(
                usize::try_from(dim).map_err(|_| Error::malformed(&location, format!("dimension {dim}")))?,
            );
        }
        // GGUF lists dimensions from the innermost to the outermost.
        shape.reverse();
        let encoding = encoding(&location, bytes.u32("tensor type")?)?;
        let offset = bytes.u64("tensor offset")?;
        let range = usize::try_from(offset).ok().and_then(|start| {
            let end = start.checked_add(encoding.n_bytes(&shape)?)?;
            Some(start..end)
        });
        let Some(range) = range else {
            let problem = format!("shape {shape:?} as {} at offset {offset} is impossible", encoding.name());
            return Err(Error::malformed(location, problem));
        };
        let stored = StoredTensor::as_named(range, shape, encoding);
        if tensors.insert(name, stored).is_some() {
            return Err(Error::malformed(location, "appears twice"));
        }
    }
    Ok(tensors)
}

/// Makes the ranges absolute; refuses ranges that leave the file, overlap, or are not aligned.
fn place_tensors(
    location: &str,
    tensors: &mut BTreeMap<String, StoredTensor>,
    start: usize,
    alignment: usize,
    file_len: usize,
) -> Result<()> {
    let mut order: Vec<_> = tensors.iter_mut().collect();
    order.sort_by_key(|(_, stored)| (stored.bytes.start, stored.bytes.end));
    let mut previous_end = 0;
    for (name, stored) in order {
        let malformed = |problem: String| Error::malformed(format!("{location}: tensor {name}"), problem);
        if !stored.bytes.start.is_multiple_of(alignment) {
            return Err(malformed(format!("offset {} is not a multiple of {alignment}", stored.bytes.start)));
        }
        if stored.bytes.start < previous_end {
            return Err(malformed(format!("overlaps the tensor before it at offset {}", stored.bytes.start)));
        }
        previous_end = stored.bytes.end;
        let end = stored.bytes.end.checked_add(start).filter(|&end| end <= file_len).ok_or_else(|| {
            malformed(format!(
                "ends at {previous_end} of the numbers, beyond the end of the file: truncated?"
            ))
        })?;
        stored.bytes = stored.bytes.start + start..end;
    }
    Ok(())
}

/// The encoding that GGUF numbers `number`.
fn encoding(location: &str, number: u32) -> Result<Encoding> {
    let encoding = match number {
        0 => Encoding::F32,
        1 => Encoding::F16,
        2 => Encoding::Q4_0,
        3 => Encoding::Q4_1,
        6 => Encoding::Q5_0,
        7 => Encoding::Q5_1,
        8 => Encoding::Q8_0,
        12 => Encoding::Q4_K,
        13 => Encoding::Q5_K,
        14 => Encoding::Q6_K,
        30 => Encoding::Bf16,
        other => {
            let known = match other {
                9 => "Q8_1",
                10 => "Q2_K",
                11 => "Q3_K",
                15 => "Q8_K",
                16..=23 | 29 => "an IQ type",
                24..=28 => "integers or F64",
                _ => "unknown",
            };
            let supported = Encoding::ALL.map(Encoding::name).join(", ");
            let problem = format!("type {other} ({known}) is not read");
            return Err(Error::unsupported(location, problem, format!("supported: {supported}")));
        }
    };
    Ok(encoding)
}
