//! The small base model inside the program. `models/base/PROVENANCE.md` says how the model was made.

use crate::disk::{create_folder, write_whole};
use crate::error::Result;
use std::path::Path;

const WEIGHTS: &[u8] = include_bytes!("../../../models/base/model.safetensors");

const FILES: [(&str, &[u8]); 5] = [
    ("config.json", include_bytes!("../../../models/base/config.json")),
    ("generation_config.json", include_bytes!("../../../models/base/generation_config.json")),
    ("model.safetensors", WEIGHTS),
    ("tokenizer.json", include_bytes!("../../../models/base/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../../models/base/tokenizer_config.json")),
];

/// Writes the model as a Hugging Face folder.
pub fn unpack(folder: &Path) -> Result<()> {
    create_folder(folder)?;
    FILES.iter().try_for_each(|(name, bytes)| write_whole(&folder.join(name), bytes))
}

/// The bytes of the model's safetensors file.
pub fn weights() -> &'static [u8] {
    WEIGHTS
}
