//! Decoder language models. This side of the crate is files: configuration, weights, tokenizer, chat template,
//! in from Hugging Face folders and GGUF, out to Hugging Face folders. Laid out in ARCHITECTURE.md.
//!
//! Every file read here is untrusted: sizes are checked before memory is asked for, nothing is executed but the
//! sandboxed chat template, and every refusal names the file and the thing in it.

pub mod config;
pub mod error;
pub mod generate;
mod json;
pub mod weights;

pub use config::{Family, ModelConfig, Rope, RopeKind, TensorSpec};
pub use error::{Error, Result};
pub use weights::{Encoding, Weights};
