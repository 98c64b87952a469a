//! Choices of `[update]`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The order in which gradients are summed, on which their last bits depend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GradientSum {
    /// One chain over all tokens: the cuts between micro-batches change no bit. The CPU's default.
    Tokens,
    /// Each micro-batch from zero, then micro-batch after micro-batch: the number of processes that share them changes no
    /// bit. The only way on a GPU.
    Microbatches,
}

/// The optimizer's state for each weight.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum States {
    /// Two moments in f32, and on a GPU an f32 master copy of the bf16 weight.
    #[default]
    #[serde(rename = "f32")]
    F32,
    /// On a GPU only: two moments in 8 bits, and bf16 weights with stochastic rounding.
    #[serde(rename = "8bit")]
    EightBit,
}
