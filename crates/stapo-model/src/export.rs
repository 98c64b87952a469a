//! Writes a model as a Hugging Face folder that `transformers` loads.

mod companions;
mod folder;
mod other_parts;
#[cfg(test)]
mod tests;

pub use companions::Companion;
pub use folder::Existing;
pub(crate) use folder::write_whole as write_folder;

use crate::config::{ModelConfig, TensorSpec};
use crate::error::{Error, Result};
use crate::weights::safetensors::{INDEX, SINGLE};
use crate::weights::{Encoding, is_norm_less_one};
use half::f16;
use other_parts::OtherParts;
use serde_json::{Map, Value, json};
use stapo_ops::dtype::{append_bf16, append_f32};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// The type of exported weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    F32,
    F16,
    Bf16,
}

/// What to write, and how.
#[derive(Debug, Clone, Copy)]
pub struct ExportOptions {
    pub precision: Precision,
    /// Largest size of a file; only a file with a single tensor may be larger.
    pub max_shard_bytes: u64,
    pub existing: Existing,
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    pub n_tensors: usize,
    pub n_parameters: u64,
    pub n_shards: usize,
    /// Bytes of weights.
    pub bytes: u64,
}

impl Default for ExportOptions {
    fn default() -> Self {
        Self { precision: Precision::Bf16, max_shard_bytes: 5_000_000_000, existing: Existing::Refuse }
    }
}

/// Writes `config.json`, the weights and the companions (tokenizer and the like, see
/// [`crate::Pretrained::companions`]) to the folder `out`. `read` fills in one tensor at a time, row-major.
/// The folder appears whole or not at all: everything is written to a folder next to `out`, which is renamed at the end.
pub fn export(
    out: &Path,
    config: &ModelConfig,
    companions: &[Companion],
    options: &ExportOptions,
    read: impl FnMut(&TensorSpec, &mut [f32]) -> Result<()>,
) -> Result<Exported> {
    config.validate("exported model")?;
    folder::write_whole(out, options.existing, |folder| {
        let mut keys = config.to_hugging_face(options.precision.torch_name())?;
        keys.insert("torch_dtype".into(), json!(options.precision.torch_name()));
        let other_parts = companions.iter().find_map(Companion::other_parts);
        let keys = other_parts.map_or(keys.clone(), |parts| parts.config(keys));
        write_json(&folder.join("config.json"), &keys)?;
        for companion in companions {
            companion.write(folder)?;
        }
        write_weights(folder, config, options, other_parts, read)
    })
}

impl Precision {
    pub fn encoding(self) -> Encoding {
        match self {
            Self::F32 => Encoding::F32,
            Self::F16 => Encoding::F16,
            Self::Bf16 => Encoding::Bf16,
        }
    }

    fn torch_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
        }
    }

    fn n_bytes(self, spec: &TensorSpec) -> u64 {
        spec.n_elements() as u64 * self.encoding().block().1 as u64
    }

    /// Rounds to nearest, ties to even. A finite number beyond 65504, the largest of F16, is returned as the problem.
    fn write(self, numbers: &[f32], out: &mut impl Write) -> std::io::Result<Option<f32>> {
        let mut bytes = Vec::with_capacity(CHUNK * 4);
        for chunk in numbers.chunks(CHUNK) {
            bytes.clear();
            match self {
                Self::F32 => append_f32(chunk, &mut bytes),
                Self::Bf16 => append_bf16(chunk, &mut bytes),
                Self::F16 => {
                    if let Some(&beyond) =
                        chunk.iter().find(|x| x.is_finite() && f16::from_f32(**x).is_infinite())
                    {
                        return Ok(Some(beyond));
                    }
                    bytes.extend(chunk.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()));
                }
            }
            out.write_all(&bytes)?;
        }
        Ok(None)
    }
}

/// Numbers that are encoded at a time.
const CHUNK: usize = 1 << 16;

fn write_weights(
    folder: &Path,
    config: &ModelConfig,
    options: &ExportOptions,
    other_parts: Option<&OtherParts>,
    mut read: impl FnMut(&TensorSpec, &mut [f32]) -> Result<()>,
) -> Result<Exported> {
    let joined: BTreeMap<String, Vec<TensorSpec>> = if config.family.joins_projections() {
        config.joined_tensors().into_iter().map(|(spec, parts)| (spec.name, parts)).collect()
    } else {
        BTreeMap::new()
    };
    let mut read = |spec: &TensorSpec, numbers: &mut [f32]| -> Result<()> {
        match joined.get(&spec.name) {
            None => read(spec, numbers)?,
            Some(parts) => {
                let mut rest = &mut *numbers;
                for part in parts {
                    let (rows, below) = rest.split_at_mut(part.n_elements());
                    read(part, rows)?;
                    rest = below;
                }
            }
        }
        if config.family.norms_less_one() && is_norm_less_one(&spec.name) {
            for number in numbers {
                *number -= 1.0;
            }
        }
        Ok(())
    };
    let specs = file_tensors(config);
    let shards = in_shards(&specs, options);
    let n_shards = shards.len() + usize::from(other_parts.is_some());
    let shard_name = |shard_idx: usize| match n_shards {
        1 => SINGLE.to_owned(),
        n => format!("model-{:05}-of-{n:05}.safetensors", shard_idx + 1),
    };
    let file_name = |name: &str| other_parts.map_or_else(|| name.to_owned(), |parts| parts.file_name(name));
    let mut weight_map = Map::new();
    for (shard_idx, shard) in shards.iter().enumerate() {
        let name = shard_name(shard_idx);
        write_shard(&folder.join(&name), shard, options.precision, &file_name, &mut read)?;
        weight_map.extend(shard.iter().map(|spec| (file_name(&spec.name), json!(name))));
    }
    let mut bytes = specs.iter().map(|spec| options.precision.n_bytes(spec)).sum();
    if let Some(parts) = other_parts {
        let name = shard_name(shards.len());
        bytes += parts.write(&folder.join(&name))?;
        weight_map.extend(parts.names().iter().map(|tensor| (tensor.clone(), json!(name))));
    }
    if n_shards > 1 {
        let Value::Object(index) = json!({"metadata": {"total_size": bytes}, "weight_map": weight_map})
        else {
            unreachable!("json! was given an object")
        };
        write_json(&folder.join(INDEX), &index)?;
    }
    Ok(Exported { n_tensors: specs.len(), n_parameters: config.n_parameters(), n_shards, bytes })
}

/// The tensors as the family's files have them, in the order of the forward pass.
fn file_tensors(config: &ModelConfig) -> Vec<TensorSpec> {
    let mut specs = config.tensors();
    if config.family.joins_projections() {
        for (joined, parts) in config.joined_tensors() {
            let first = specs.iter().position(|spec| *spec == parts[0]);
            specs.retain(|spec| !parts.contains(spec));
            specs.insert(first.unwrap_or(specs.len()), joined);
        }
    }
    specs
}

/// The tensors in order, cut where the next tensor would exceed the limit.
fn in_shards<'a>(specs: &'a [TensorSpec], options: &ExportOptions) -> Vec<&'a [TensorSpec]> {
    let mut shards = Vec::new();
    let mut start = 0;
    let mut size = 0;
    for (i, spec) in specs.iter().enumerate() {
        let n_bytes = options.precision.n_bytes(spec);
        if i > start && size + n_bytes > options.max_shard_bytes {
            shards.push(&specs[start..i]);
            start = i;
            size = 0;
        }
        size += n_bytes;
    }
    shards.push(&specs[start..]);
    shards
}

/// Writes one safetensors file. `read` fills in one tensor at a time; `file_name` gives the names of tensors there.
pub(crate) fn write_shard(
    path: &Path,
    specs: &[TensorSpec],
    precision: Precision,
    file_name: &dyn Fn(&str) -> String,
    read: &mut impl FnMut(&TensorSpec, &mut [f32]) -> Result<()>,
) -> Result<()> {
    let io = |e| Error::io(path, e);
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path).map_err(io)?);
    let encoding = precision.encoding();
    let entries =
        specs.iter().map(|spec| (file_name(&spec.name), encoding, &spec.shape[..], precision.n_bytes(spec)));
    write_header(&mut file, entries).map_err(io)?;
    let mut numbers = Vec::new();
    for spec in specs {
        numbers.resize(spec.n_elements(), 0.0);
        read(spec, &mut numbers)?;
        if let Some(element) = numbers.iter().position(|number| !number.is_finite()) {
            let problem = format!("element {element} is not a finite number");
            return Err(Error::malformed(format!("tensor {}", spec.name), problem));
        }
        if let Some(beyond) = precision.write(&numbers, &mut file).map_err(io)? {
            let problem = format!("{beyond} does not fit F16, which ends at 65504");
            return Err(Error::unsupported(
                format!("tensor {}", spec.name),
                problem,
                "export as bf16 or f32",
            ));
        }
    }
    file.into_inner().map_err(|e| io(e.into_error()))?.sync_all().map_err(io)
}

/// A tensor of a safetensors file: its name there, encoding, shape and bytes.
type HeaderEntry<'a> = (String, Encoding, &'a [usize], u64);

/// Begins a safetensors file: the length of the header and the JSON header, filled up with spaces so that the numbers begin at a
/// multiple of 8. The tensors follow each other in the order given.
fn write_header<'a>(
    out: &mut impl Write,
    entries: impl Iterator<Item = HeaderEntry<'a>>,
) -> std::io::Result<()> {
    let mut keys = Map::new();
    keys.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut start = 0;
    for (name, encoding, shape, n_bytes) in entries {
        let end = start + n_bytes;
        keys.insert(name, json!({"dtype": encoding.name(), "shape": shape, "data_offsets": [start, end]}));
        start = end;
    }
    let mut text = Value::Object(keys).to_string();
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    out.write_all(&(text.len() as u64).to_le_bytes())?;
    out.write_all(text.as_bytes())
}

/// Pretty-printed, synced to disk.
pub(crate) fn write_json(path: &Path, keys: &Map<String, Value>) -> Result<()> {
    let text = format!("{:#}\n", Value::Object(keys.clone()));
    folder::write_file(path, text.as_bytes())
}
