//! Products with joined adapters that compute `x A^T` on the way: of few rows (`small_m`) and of some hundred (`middle_m`,
//! `deep_m`).

use std::sync::Arc;

use super::cuda::Layer;
use super::{deep_m, middle_m, small_m};
use crate::Float;
use crate::cuda::{Cuda, Slice};
use crate::matmul::small_m::{Output, fits_tiles};

impl<T: Float> Layer<'_, T> {
    /// Whether [`Layer::run`] may be called with the same arguments.
    pub(crate) fn fits(&self, output: Output, cuda: &Cuda, y: Slice) -> bool {
        let Layer { d, x, weight, adapter } = self;
        if d.tokens == 0 || !weight.is_joined() {
            return false;
        }
        let (x, w) = (x.part(0, d.tokens * d.inputs), weight.view().cuda().part(0, d.outputs * d.inputs));
        fits_tiles(output, cuda, *d, x, w, y)
            && super::cuda::fits(cuda, adapter)
            && (small_m::fits(self, output, cuda)
                || deep_m::fits(self, output)
                || (output == Output::Product && middle_m::fits(self)))
    }

    /// `lora::project`, and the product as `matmul::small_m::run` with adapters. Rows of a SwiGLU's y may have further columns
    /// after them.
    pub(crate) fn run(&self, output: Output, cuda: &Arc<Cuda>, y: Slice) {
        if small_m::fits(self, output, cuda) {
            small_m::run(self, output, cuda, y);
        } else if deep_m::fits(self, output) {
            deep_m::run(self, cuda, y);
        } else {
            middle_m::run(self, cuda, y);
        }
    }
}
