//! The parts of a multimodal checkpoint beside its language model. Nothing here computes them; an export writes them as they were
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
        let mut header = Map::new();
        header.insert("__metadata__".into(), serde_json::json!({"format": "pt"}));
        let mut start = 0;
        for name in &self.names {
            let (encoding, shape, bytes) = self.weights.stored(name)?;
            let end = start + bytes.len();
            let entry = serde_json::json!({
                "dtype": encoding.name(), "shape": shape, "data_offsets": [start, end],
            });
            header.insert(name.clone(), entry);
            start = end;
        }
        let mut text = Value::Object(header).to_string();
        text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
        let io = |e| Error::io(path, e);
        let mut file = BufWriter::new(File::create(path).map_err(io)?);
        file.write_all(&(text.len() as u64).to_le_bytes()).map_err(io)?;
        file.write_all(text.as_bytes()).map_err(io)?;
        for name in &self.names {
            file.write_all(self.weights.stored(name)?.2).map_err(io)?;
        }
        file.into_inner().map_err(|e| io(e.into_error()))?.sync_all().map_err(io)?;
        Ok(start as u64)
    }
}
