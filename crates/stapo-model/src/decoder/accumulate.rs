//! Where backward leaves gradients.

use super::gradient::Gradient;
use super::weights::LayerWeights;
use stapo_ops::{Float, ViewMut, Write};

/// Takes the gradients of one micro-batch as backward computes them: of the head, of the final norm, of the layers from the
/// last to the first, and of the embedding. Each is added to what is given here, and then marked as complete.
pub trait Accumulate<T: Float> {
    /// What the gradient of the head overwrites or is added to; `None` for a frozen head.
    fn head(&mut self) -> Option<(ViewMut<'_, T>, Write)>;

    fn head_done(&mut self);

    /// What the gradient of the final norm is added to; `None` for a frozen one.
    fn final_norm(&mut self) -> Option<ViewMut<'_, T>>;

    fn layer(&mut self, index: usize) -> &mut LayerWeights<Option<Gradient<T>>>;

    fn layer_done(&mut self, index: usize);

    /// What the gradient of the embedding as a table of inputs is added to; `None` for a frozen embedding.
    fn lookup(&mut self) -> Option<Lookup<'_, T>>;

    /// The gradient of the embedding is complete, and with it all others.
    fn lookup_done(&mut self);
}

/// The destination of the embedding's gradient as a table of inputs.
pub struct Lookup<'a, T: Float> {
    /// `[vocabulary, D]`
    pub d_table: ViewMut<'a, T>,
    /// Memory of the same shape in which a micro-batch is summed from zero before `d_table` takes the sum in; `None` where
    /// sums continue from `d_table`.
    pub apart: Option<ViewMut<'a, T>>,
}
