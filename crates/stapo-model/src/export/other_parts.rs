//! The parts of a multimodal checkpoint besides its language model. Nothing here computes them; an export writes them as they were
//! read, so that the folder is again a multimodal model.

use crate::config::is_multimodal;
use crate::error::{Error, Result};
use crate::json;
use crate::weights::{LANGUAGE_MODEL_PREFIXES, Weights};
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

/// Longest `config.json` that is read.
const MAX_CONFIG: u64 = 16 << 20;

#[derive(Debug, Clone)]
pub(super) struct OtherParts {
    config: Map<String, Value>,
    /// Beginnings of the language model's names in the files, and in this program.
    prefixes: Vec<(&'static str, &'static str)>,
    weights: Arc<Weights>,
    /// The tensors that do not belong to the language model.
    names: Vec<String>,
}

impl OtherParts {
    /// `None` for the folder of a language model alone.
    pub fn find(folder: &Path) -> Result<Option<Self>> {
        let config = json::read_object(&folder.join("config.json"), MAX_CONFIG)?;
        if !is_multimodal(&config) {
            return Ok(None);
        }
        let weights = Weights::open(folder)?;
        let is_language = |name: &str| LANGUAGE_MODEL_PREFIXES.iter().any(|(file, _)| name.starts_with(file));
        let is_used = |(file, _): &(&str, &str)| weights.names().any(|name| name.starts_with(file));
        let prefixes = LANGUAGE_MODEL_PREFIXES.into_iter().filter(is_used).collect();
        let is_other = |name: &&str| !is_language(name) && !name.starts_with("lm_head.");
        let names = weights.names().filter(is_other).map(str::to_owned).collect();
        Ok(Some(Self { config, prefixes, weights: Arc::new(weights), names }))
    }

    /// The keys of the whole model, from those of its language model.
    pub fn config(&self, mut text: Map<String, Value>) -> Map<String, Value> {
        text.remove("architectures");
        let mut keys = self.config.clone();
        for name in ["dtype", "torch_dtype"] {
            if let Some(dtype) = text.get("dtype").filter(|_| keys.contains_key(name)) {
                keys.insert(name.into(), dtype.clone());
            }
        }
        keys.insert("text_config".into(), Value::Object(text));
        keys
    }

    /// The name that a tensor of the language model has in the files.
    pub fn file_name(&self, name: &str) -> String {
        let found = self
            .prefixes
            .iter()
            .find_map(|(file, common)| name.strip_prefix(common).map(|rest| format!("{file}{rest}")));
        found.unwrap_or_else(|| name.to_owned())
    }

    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Writes the other parts as a safetensors file, with the bytes of their files. Returns the bytes of numbers.
    pub fn write(&self, path: &Path) -> Result<u64> {
        let tensors = self.names.iter().map(|name| self.weights.stored(name)).collect::<Result<Vec<_>>>()?;
        let entries =
            self.names.iter().zip(&tensors).map(|(name, (encoding, shape, bytes))| {
                (name.clone(), *encoding, *shape, bytes.len() as u64)
            });
        let io = |e| Error::io(path, e);
        let mut file = BufWriter::new(File::create(path).map_err(io)?);
        super::write_header(&mut file, entries).map_err(io)?;
        tensors.iter().try_for_each(|(_, _, bytes)| file.write_all(bytes)).map_err(io)?;
        file.into_inner().map_err(|e| io(e.into_error()))?.sync_all().map_err(io)?;
        Ok(tensors.iter().map(|(_, _, bytes)| bytes.len() as u64).sum())
    }
}
