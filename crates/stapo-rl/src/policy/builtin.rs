//! The small models inside the program. `PROVENANCE.md` in the folder of each says how the model was made.

use crate::error::{Error, Result};
use tempfile::TempDir;

/// A model inside the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BuiltinModel {
    /// `builtin`: worked arithmetic.
    Base,
    /// `builtin-tools`: calls a calculator.
    Tools,
    /// `builtin-hybrid`: as the base model, with gated DeltaNet in three of four layers.
    Hybrid,
}

type File = (&'static str, &'static [u8]);

macro_rules! files {
    ($folder:literal) => {
        files!($folder: "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    };
    ($folder:literal: $($name:literal),+) => {
        [$(($name, include_bytes!(concat!("../../../../models/", $folder, "/", $name)))),+]
    };
}

const BASE: [File; 5] = files!("base");
const TOOLS: [File; 5] = files!("tools");
const HYBRID: [File; 5] = files!("hybrid");

impl BuiltinModel {
    pub const ALL: [Self; 3] = [Self::Base, Self::Tools, Self::Hybrid];

    /// The name in configs and on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Base => "builtin",
            Self::Tools => "builtin-tools",
            Self::Hybrid => "builtin-hybrid",
        }
    }

    /// The names and the bytes of the model's files.
    pub(crate) fn files(self) -> &'static [(&'static str, &'static [u8])] {
        match self {
            Self::Base => &BASE,
            Self::Tools => &TOOLS,
            Self::Hybrid => &HYBRID,
        }
    }

    /// Writes the model as a Hugging Face folder, which is temporary and removed when the value is dropped.
    pub fn unpack(self) -> Result<TempDir> {
        let folder = tempfile::tempdir().map_err(|e| Error::io(&std::env::temp_dir(), e))?;
        for (name, bytes) in self.files() {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).map_err(|e| Error::io(&path, e))?;
        }
        Ok(folder)
    }
}

/// [`BuiltinModel::unpack`] of the base model.
pub fn unpack() -> Result<TempDir> {
    BuiltinModel::Base.unpack()
}
