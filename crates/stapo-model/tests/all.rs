//! The tests of this crate from the outside, in one executable, but for `cuda_lost.rs`: after it nothing works on the GPU of
//! its process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::print_stdout, reason = "tests print what they tried and why they skip")]

mod bitwise;
mod cuda;
mod cuda_prefill;
mod formats;
mod formats_real;
mod formats_shared;
mod generate;
mod gguf_file;
mod goldens;
mod hostile_templates;
mod hostile_tokenizers;
mod inside;
mod quantised;
mod real_model;
mod resumed;
mod reward_models;
mod shared_prompts;
mod speculation;
#[path = "../src/testing.rs"]
mod testing;
mod truncated;
mod turns;

use stapo_model::config::{FeedForward, LongFactors};
use stapo_model::{
    DeltaNetHeads, DeltaNetSpec, EmbeddingScale, Family, Heads, LayerSpec, LogitRule, Mixer, ModelConfig,
    Rope, RopeScaling,
};
