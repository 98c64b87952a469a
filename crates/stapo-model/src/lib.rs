//! Decoder language models, laid out in ARCHITECTURE.md: files in and out (configuration, weights, tokenizer, chat
//! template; Hugging Face folders and GGUF), the decoder forward and backward, generation, and the optimizer.
//!
//! Every file read here is untrusted: sizes are checked before memory is asked for, nothing is executed but the
//! sandboxed chat template, and every refusal names the file and the thing in it.

pub mod chat;
pub mod config;
pub mod decoder;
pub mod error;
pub mod export;
pub mod files;
pub mod generate;
pub mod gguf;
mod json;
pub mod optimizer;
pub mod peft;
mod pretrained;
pub mod ranks;
pub mod template;
#[cfg(test)]
mod testing;
mod tokenizer;
pub mod untrusted;
pub mod weights;

#[cfg(test)]
use config::{FeedForward, LongFactors};

pub use chat::{ChatTemplate, Message, Segment, plain_continuation};
pub use config::{
    DeltaNetHeads, DeltaNetSpec, EmbeddingScale, Family, Heads, LayerSpec, LogitRule, Mixer, ModelConfig,
    Rope, RopeScaling, SCORE, ScoreHead, TensorSpec,
};
pub use error::{Error, Result};
pub use pretrained::Pretrained;
pub use stapo_ops::cuda;
pub use stapo_ops::dtype::read_f32;
pub use stapo_ops::lm_head::gpu_logit_rows;
pub use stapo_ops::mapped::MappedFile;
pub use stapo_ops::sha256::{Digest, LEAF};
pub use stapo_ops::{
    CpuOptions, Device, DeviceName, DeviceNameError, Form, HostBuffer, Mark, OptionError, OutOfMemory,
    Reader, Region, Simd, Stored, Tenant, View, ViewMut,
};
pub use tokenizer::{TokenStream, Tokenizer};
pub use weights::{Encoding, Weights};
