//! Weights by their Hugging Face names, stored in one safetensors file, in shards, or in GGUF.

mod blocks;
mod encoding;
pub(crate) mod safetensors;
#[cfg(test)]
mod tests;

pub use encoding::Encoding;
pub(crate) use encoding::decode;

use crate::config::{ModelConfig, TensorSpec};
use crate::error::{Error, Result};
use stapo_ops::dtype::append_bf16;
use stapo_ops::mapped::MappedFile;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// The tensors of a model in memory-mapped files; a tensor is read on request. Reading takes `&self`, so several
/// threads may read at once.
#[derive(Debug)]
pub struct Weights {
    /// The folder or file, for messages.
    location: String,
    files: Vec<Arc<MappedFile>>,
    tensors: BTreeMap<String, StoredTensor>,
}

/// Where and how a tensor is stored. Whoever creates the value checks that the range lies inside the file and has the
/// length that shape and encoding need.
#[derive(Debug, Clone)]
pub(crate) struct StoredTensor {
    pub file: usize,
    pub bytes: Range<usize>,
    pub shape: Vec<usize>,
    pub encoding: Encoding,
    pub rows: RowOrder,
    /// Added to every number: the weights of norms are stored less 1 by some families.
    pub offset: f32,
}

/// The order in which the rows of a matrix are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowOrder {
    AsNamed,
    /// GGUF's order for Llama's q and k: in each of `n_heads` heads, rows i and i + `head_dim` / 2 are neighbours.
    RotaryPairs {
        n_heads: usize,
    },
}

/// What the names of a language model begin with in multimodal checkpoints, and without the other parts.
pub(crate) const LANGUAGE_MODEL_PREFIXES: [(&str, &str); 3] = [
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
];

/// Whether a tensor is the weight of a norm.
pub(crate) fn is_norm(name: &str) -> bool {
    name.ends_with("norm.weight")
}

/// Whether a family that stores the weights of norms less 1 stores this tensor so. The norm inside DeltaNet is stored as it is.
pub(crate) fn is_norm_less_one(name: &str) -> bool {
    is_norm(name) && !name.ends_with("linear_attn.norm.weight")
}

impl StoredTensor {
    pub fn as_named(bytes: Range<usize>, shape: Vec<usize>, encoding: Encoding) -> Self {
        Self { file: 0, bytes, shape, encoding, rows: RowOrder::AsNamed, offset: 0.0 }
    }
}

impl Weights {
    /// Opens the safetensors of a Hugging Face folder, or one safetensors file. [`crate::Pretrained::open`] opens GGUF,
    /// whose names and row order depend on the config in the file.
    pub fn open(path: &Path) -> Result<Self> {
        safetensors::open(path)
    }

    pub(crate) fn new(
        location: String,
        files: Vec<Arc<MappedFile>>,
        tensors: BTreeMap<String, StoredTensor>,
    ) -> Self {
        Self { location, files, tensors }
    }

    pub(crate) fn location(&self) -> &str {
        &self.location
    }

    /// Keeps, under the name `keep`, whichever of the two tensors is stored in more bytes, and removes `other`.
    pub(crate) fn keep_finer(&mut self, keep: &str, other: &str) {
        if let Some(other) = self.tensors.remove(other)
            && self.tensors.get(keep).is_none_or(|kept| kept.bytes.len() < other.bytes.len())
        {
            self.tensors.insert(keep.to_owned(), other);
        }
    }

    /// Turns the names and forms of a family's safetensors into those that all families share: the language model of a
    /// multimodal checkpoint loses its prefix, joined projections are split, and weights of norms stored less 1 are marked.
    pub(crate) fn in_common_form(mut self, config: &ModelConfig) -> Result<Self> {
        for prefix in LANGUAGE_MODEL_PREFIXES {
            let renamed = std::mem::take(&mut self.tensors).into_iter().map(|(name, stored)| {
                let common = name.strip_prefix(prefix.0).map(|rest| format!("{}{rest}", prefix.1));
                (common.unwrap_or(name), stored)
            });
            self.tensors = renamed.collect();
        }
        if config.family.joins_projections() {
            self.split_projections(config)?;
        }
        if config.family.norms_less_one() {
            let norms = self.tensors.iter_mut().filter(|(name, _)| is_norm_less_one(name));
            norms.for_each(|(_, stored)| stored.offset = 1.0);
        }
        Ok(self)
    }

    /// Splits the joined projections of all layers.
    pub(crate) fn split_projections(&mut self, config: &ModelConfig) -> Result<()> {
        config.joined_tensors().iter().try_for_each(|(joined, parts)| self.split_rows(joined, parts))
    }

    /// Replaces a matrix by the matrices of its rows, one below the other.
    fn split_rows(&mut self, joined: &TensorSpec, parts: &[TensorSpec]) -> Result<()> {
        let stored = self.find(&joined.name, &joined.shape)?.clone();
        self.tensors.remove(&joined.name);
        let row_bytes = stored.bytes.len() / joined.shape[0];
        let mut start = stored.bytes.start;
        for part in parts {
            let end = start + part.shape[0] * row_bytes;
            let stored = StoredTensor { bytes: start..end, shape: part.shape.clone(), ..stored.clone() };
            self.tensors.insert(part.name.clone(), stored);
            start = end;
        }
        Ok(())
    }

    /// Every tensor in the files, sorted by name.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// How a tensor is stored; `None` if there is no tensor of that name.
    pub fn encoding(&self, name: &str) -> Option<Encoding> {
        self.tensors.get(name).map(|stored| stored.encoding)
    }

    /// A tensor as its file has it: encoding, shape and bytes.
    pub(crate) fn stored(&self, name: &str) -> Result<(Encoding, &[usize], &[u8])> {
        let problem =
            || Error::missing(&self.location, format!("no tensor {name}"), "was the file replaced?");
        let stored = self.tensors.get(name).ok_or_else(problem)?;
        Ok((stored.encoding, &stored.shape, &self.files[stored.file][stored.bytes.clone()]))
    }

    /// Bytes that a tensor takes in its file.
    pub fn stored_bytes(&self, name: &str) -> Option<usize> {
        self.tensors.get(name).map(|stored| stored.bytes.len())
    }

    /// Decodes the tensor into `out`, row-major, in the Hugging Face layout. Every encoding is decoded by f32
    /// operations in a fixed order, so the result is the same bits everywhere. Refuses a missing name and a shape other
    /// than `shape`.
    ///
    /// # Panics
    /// If `out` is not as long as `shape` says.
    pub fn read_f32(&self, name: &str, shape: &[usize], out: &mut [f32]) -> Result<()> {
        let stored = self.find(name, shape)?;
        assert_eq!(
            out.len(),
            shape.iter().product::<usize>(),
            "read_f32 {name}: length of out against {shape:?}"
        );
        let bytes = &self.files[stored.file][stored.bytes.clone()];
        match stored.rows {
            RowOrder::AsNamed => decode(stored.encoding, bytes, out),
            RowOrder::RotaryPairs { n_heads } => decode_rotary_pairs(stored, n_heads, bytes, out),
        }
        if stored.offset != 0.0 {
            for number in out {
                *number += stored.offset;
            }
        }
        Ok(())
    }

    /// The blocks of a quantised tensor, or the bf16 numbers that a plain one is rounded to, row by row in the Hugging Face
    /// order. Refuses a missing name and a shape other than `shape`.
    pub(crate) fn read_blocks(&self, name: &str, shape: &[usize]) -> Result<Cow<'_, [u8]>> {
        let stored = self.find(name, shape)?;
        let bytes = &self.files[stored.file][stored.bytes.clone()];
        if !stored.encoding.is_quantised() {
            let mut values = vec![0.0; shape.iter().product()];
            self.read_f32(name, shape, &mut values)?;
            let mut rounded = Vec::new();
            append_bf16(&values, &mut rounded);
            return Ok(rounded.into());
        }
        let RowOrder::RotaryPairs { n_heads } = stored.rows else { return Ok(Cow::Borrowed(bytes)) };
        let row_bytes = bytes.len() / shape[0];
        let mut rows = vec![0; bytes.len()];
        for (idx, row) in bytes.chunks_exact(row_bytes).enumerate() {
            let named = rotary_row(idx, shape[0] / n_heads);
            rows[named * row_bytes..][..row_bytes].copy_from_slice(row);
        }
        Ok(Cow::Owned(rows))
    }

    /// Checks, without reading a weight, that every tensor of `config` is present in its shape. Returns the names of
    /// tensors that the model does not use and that are safe to ignore. A tensor inside `model.` that the config does
    /// not know (a bias, a further layer) is refused: a model without that tensor would be another model.
    pub fn check(&self, config: &ModelConfig) -> Result<Vec<String>> {
        let specs = config.tensors();
        for spec in &specs {
            self.find(&spec.name, &spec.shape)?;
        }
        let known: std::collections::BTreeSet<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
        let mut ignored = Vec::new();
        for name in self.names().filter(|name| !known.contains(name)) {
            if (name.starts_with("model.") || name.starts_with("blk."))
                && !name.ends_with("rotary_emb.inv_freq")
                && !is_of_other_modality(name)
            {
                let problem =
                    format!("tensor {name} is not part of a {} of this config", config.family.architecture());
                let hint = format!(
                    "the config describes {} layers, and no layer has this tensor",
                    config.layers.len()
                );
                return Err(Error::mismatch(&self.location, problem, hint));
            }
            ignored.push(name.to_owned());
        }
        Ok(ignored)
    }

    /// Refuses a missing name and a shape other than `shape`.
    pub(crate) fn check_shape(&self, name: &str, shape: &[usize]) -> Result<()> {
        self.find(name, shape).map(|_| ())
    }

    fn find(&self, name: &str, shape: &[usize]) -> Result<&StoredTensor> {
        let stored = self.tensors.get(name).ok_or_else(|| {
            let hint = format!(
                "the files hold {} tensors; is the config that of another model?",
                self.tensors.len()
            );
            Error::missing(&self.location, format!("no tensor {name}"), hint)
        })?;
        if stored.shape != shape {
            let problem = format!("tensor {name} has shape {:?}, expected {shape:?}", stored.shape);
            return Err(Error::mismatch(
                &self.location,
                problem,
                "is the config that of another size of the model?",
            ));
        }
        Ok(stored)
    }
}

/// Whether a tensor belongs to the vision part of a multimodal checkpoint.
fn is_of_other_modality(name: &str) -> bool {
    ["model.vision_tower.", "model.multi_modal_projector.", "model.visual."]
        .iter()
        .any(|prefix| name.starts_with(prefix))
}

/// Decodes rows stored as (0, h/2, 1, h/2 + 1, ..) within each head of h rows into the order 0, 1, .., h - 1.
fn decode_rotary_pairs(stored: &StoredTensor, n_heads: usize, bytes: &[u8], out: &mut [f32]) {
    let n_rows = stored.shape[0];
    let head_rows = n_rows / n_heads;
    let row_len = out.len() / n_rows;
    let row_bytes = bytes.len() / n_rows;
    for (stored_row, row) in bytes.chunks_exact(row_bytes).enumerate() {
        let named_row = rotary_row(stored_row, head_rows);
        decode(stored.encoding, row, &mut out[named_row * row_len..][..row_len]);
    }
}

/// The row in the order 0, 1, .. that is stored as row `stored` of heads of `head_rows` rows.
fn rotary_row(stored: usize, head_rows: usize) -> usize {
    let (head, within) = (stored / head_rows, stored % head_rows);
    head * head_rows + (within % 2) * (head_rows / 2) + within / 2
}
