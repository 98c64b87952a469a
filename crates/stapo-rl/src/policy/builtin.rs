//! The small base model inside the program. `models/base/PROVENANCE.md` says how the model was made.

use crate::error::{Error, Result};
use tempfile::TempDir;

const FILES: [(&str, &[u8]); 5] = [
    ("config.json", include_bytes!("../../../../models/base/config.json")),
    ("generation_config.json", include_bytes!("../../../../models/base/generation_config.json")),
    ("model.safetensors", include_bytes!("../../../../models/base/model.safetensors")),
    ("tokenizer.json", include_bytes!("../../../../models/base/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../../../models/base/tokenizer_config.json")),
];

/// Writes the model as a Hugging Face folder, which is temporary and removed when the value is dropped.
pub fn unpack() -> Result<TempDir> {
    let folder = tempfile::tempdir().map_err(|e| Error::io(&std::env::temp_dir(), e))?;
    for (name, bytes) in FILES {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).map_err(|e| Error::io(&path, e))?;
    }
    Ok(folder)
}

/// The names and the bytes of the model's files.
pub(crate) fn files() -> &'static [(&'static str, &'static [u8])] {
    &FILES
}
