//! Products of few rows with adapters, by the kernels of small_m.cu, which add the terms before they write.

use super::Adapter;
use super::cuda::{MODULES, map_hidden, maps_of_b, modules};
use crate::Float;
use crate::cuda::kernels::LORA_SMALL_M;
use crate::cuda::{Cuda, Slice, TensorMap};
use crate::matmul::Dims;
pub(crate) use crate::matmul::small_m::MAX_ROWS;
use crate::matmul::small_m::{self, Output, THREADS};

/// The highest rank, as in small_m.cu.
const MAX_RANK: usize = 64;
/// A block's columns, at most 64, belong to two modules or fewer where each module has as many.
const MIN_OUTPUTS: usize = 64;

/// Whether [`run`] may be called with the same arguments.
pub(crate) fn fits<T: Float>(
    output: Output,
    cuda: &Cuda,
    d: Dims,
    (x, weight): (Slice, Slice),
    adapter: &Adapter<'_, T>,
    y: Slice,
) -> bool {
    let are_gate_and_up = adapter.modules.len() == 2
        && adapter.modules.iter().all(|module| module.outputs.len == output.width(d));
    small_m::fits(output, cuda, d, x, weight, y)
        && super::cuda::fits(cuda, adapter)
        && adapter.rank() <= MAX_RANK
        && adapter.modules.iter().all(|module| module.outputs.len >= MIN_OUTPUTS)
        && (output != Output::Swiglu || are_gate_and_up)
}

/// As `matmul::small_m::run`, with the terms added to the product; with split-K, y is `[n_splits + 1, T, outputs]`, the
/// terms last. Shape: hidden `[T, pitch]`, from `lora::project`.
pub(crate) fn run<T: Float>(
    output: Output,
    cuda: &Cuda,
    d: Dims,
    (x, weight): (Slice, Slice),
    (adapter, hidden): (&Adapter<'_, T>, Slice),
    y: Slice,
) {
    let tiling = output.tiling(cuda, d).expect("lora::small_m::run: a product that fits");
    let width = output.width(d);
    let (name, n_splits) = match output {
        Output::Product => (format!("lora_small_m_{}", tiling.columns), 1),
        Output::SplitK { n_splits } => ("lora_small_m_split_k".to_string(), n_splits),
        Output::Swiglu => (format!("lora_swiglu_small_m_{}", tiling.columns), 1),
    };
    let launch = cuda.kernel(&LORA_SMALL_M, &name);
    let launch = launch.tensor_map(&TensorMap::new(x, d.tokens, d.inputs, d.tokens.next_multiple_of(8)));
    let launch = launch.tensor_map(&TensorMap::new(weight, d.outputs, d.inputs, tiling.columns));
    let launch = launch.tensor_map(&map_hidden(adapter, d.tokens, hidden));
    let launch = launch.tensor_maps::<MODULES>(&maps_of_b(adapter, tiling.columns));
    let launch = launch.fields(&modules(adapter)).arg(y).arg(d.tokens).arg(width).arg(d.inputs);
    // Two tiles each of second factors and of x A^T, and two mbarriers.
    let shared = tiling.shared_bytes() + 2 * 2 * 64 * (tiling.columns + MAX_ROWS) + 16;
    launch.programmatic_launch(true).run([width.div_ceil(tiling.columns), n_splits], THREADS, shared);
}
