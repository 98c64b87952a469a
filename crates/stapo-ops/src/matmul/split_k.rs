//! Which products use split-K on a GPU.

use super::Dims;
use crate::cuda::{ElementType, Slice};

/// Parts that split-K divides the depth of a product into. An element is the sum of its partial sums, added up in
/// order.
pub(crate) const SPLIT_K: usize = 4;

/// A product with many inputs and few outputs leaves most of a GPU idle when its rows are few, so such a product uses
/// split-K. The choice depends on the shape of the weight alone, never on the number of rows: a row has the same bits
/// in every batch. Logits, in f32, and products with a bias never use split-K.
pub(crate) fn uses_split_k(d: Dims, weight: Slice) -> bool {
    is_deep(d) && weight.kind == ElementType::Bf16
}

/// Whether a product of this shape uses split-K in bf16.
pub(super) fn is_deep(d: Dims) -> bool {
    let is_whole = d.inputs.is_multiple_of(128 * SPLIT_K) && d.outputs.is_multiple_of(8);
    is_whole && d.inputs >= 2048 && d.inputs >= 2 * d.outputs
}
