//! Products of few rows with joined adapters, by the kernels of small_m.cu.

use std::sync::Arc;

use super::cuda::{Layer, Placed, Signals, project};
use crate::Float;
use crate::cuda::kernels::LORA_SMALL_M;
use crate::cuda::{Cuda, Slice, TensorMap};
use crate::matmul::small_m::{MAX_ROWS, Output, THREADS};

/// Whether [`run`] may be called with the same arguments; the layer fits tiles.
pub(super) fn fits<T: Float>(layer: &Layer<'_, T>, output: Output, cuda: &Cuda) -> bool {
    layer.d.tokens <= MAX_ROWS && output.tiling(cuda, layer.d).is_some()
}

/// `lora::project`, and the product as `matmul::small_m::run` with adapters. Rows of a SwiGLU's y may have further columns
/// after them.
pub(super) fn run<T: Float>(layer: &Layer<'_, T>, output: Output, cuda: &Arc<Cuda>, y: Slice) {
    let Layer { d, x, weight, adapter } = layer;
    let tiling = output.tiling(cuda, *d).expect("lora::small_m: a product that fits");
    let width = output.width(*d);
    let (name, n_splits) = match output {
        Output::Product => (format!("lora_small_m_{}", tiling.columns), 1),
        Output::SplitK { n_splits } => ("lora_small_m_split_k".to_string(), n_splits),
        Output::Gated(_) => (format!("lora_swiglu_small_m_{}", tiling.columns), 1),
    };
    let grid = [width.div_ceil(tiling.columns), n_splits];
    let n_multiplying = grid[0] * grid[1];
    let signals = Signals { counts: cuda.signal(), n_multiplying };
    let hidden = Placed::new(*x, d.tokens, d.inputs);
    let signals = project(cuda, d.tokens, *x, adapter, hidden, Some(signals));
    let flat = weight.view().cuda();
    let (x_pitch, w_pitch) = (x.len / d.tokens, flat.len / d.outputs);
    let map_x = TensorMap::of_columns(*x, d.tokens, (0, x_pitch, x_pitch), d.tokens.next_multiple_of(8));
    let map_w = TensorMap::of_columns(flat, d.outputs, (0, w_pitch, w_pitch), tiling.columns);
    let launch = cuda.kernel(&LORA_SMALL_M, &name).tensor_map(&map_x).tensor_map(&map_w);
    let launch = launch.arg(y).arg(d.tokens).arg(width).arg(d.inputs).arg(adapter.pitch()).fields(&signals);
    let launch = match output {
        Output::Gated(_) => launch.arg(y.len / d.tokens),
        Output::Product | Output::SplitK { .. } => launch,
    };
    launch.programmatic_launch(true).run(grid, THREADS, tiling.shared_bytes());
}
