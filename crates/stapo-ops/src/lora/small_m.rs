//! Products of few rows with adapters, by the kernels of small_m.cu: one kernel computes x A^T beside the product and adds
//! the term.

use std::sync::Arc;

use super::Adapter;
use super::cuda::{MODULES, PARTS, map_a, maps_of_b, modules, split};
use crate::Float;
use crate::cuda::kernels::LORA_SMALL_M;
use crate::cuda::{Cuda, Fields, Slice, TensorMap};
use crate::matmul::Dims;
pub(crate) use crate::matmul::small_m::MAX_ROWS;
use crate::matmul::small_m::{self, Output};

/// Columns of x A^T that one matrix instruction computes, as in small_m.cu, and the most of them.
const HIDDEN_COLUMNS: usize = 32;
const MAX_PITCH: usize = 96;
/// The highest rank, as in small_m.cu.
const MAX_RANK: usize = 32;
/// Threads of a block: those of `matmul::small_m` and two warps that fetch x A^T, as in small_m.cu.
const THREADS: usize = small_m::THREADS + 64;
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
        && adapter.pitch() <= MAX_PITCH
        && adapter.modules.iter().all(|module| module.outputs.len >= MIN_OUTPUTS)
        && (output != Output::Swiglu || are_gate_and_up)
}

/// As `matmul::small_m::run`, with the terms added; with split-K, y is `[n_splits + 1, T, outputs]`, the term last.
pub(crate) fn run<T: Float>(
    output: Output,
    cuda: &Arc<Cuda>,
    d: Dims,
    (x, weight): (Slice, Slice),
    adapter: &Adapter<'_, T>,
    y: Slice,
) {
    let tiling = output.tiling(cuda, d).expect("lora::small_m::run: a product that fits");
    let width = output.width(d);
    let n_columns = width.div_ceil(tiling.columns);
    let name = match output {
        Output::Product => format!("lora_small_m_{}", tiling.columns),
        Output::SplitK { .. } => "lora_small_m_split_k".to_string(),
        Output::Swiglu => format!("lora_swiglu_small_m_{}", tiling.columns),
    };
    let (parts, counters) = cuda.lora_workspace(PARTS * MAX_ROWS * MAX_PITCH);
    let adapters = Fields::default().eight_bytes(parts).eight_bytes(counters);
    let adapters = adapters.four_bytes(adapter.scale() as f32).four_bytes(split(d.inputs));
    let launch = cuda.kernel(&LORA_SMALL_M, &name);
    let launch = launch.tensor_map(&TensorMap::new(x, d.tokens, d.inputs, d.tokens.next_multiple_of(8)));
    let launch = launch.tensor_map(&TensorMap::new(weight, d.outputs, d.inputs, tiling.columns));
    let launch = launch
        .tensor_map(&map_a(adapter, HIDDEN_COLUMNS))
        .tensor_maps::<MODULES>(&maps_of_b(adapter, tiling.columns));
    let launch = launch.fields(&modules(adapter, adapters)).arg(y).arg(d.tokens).arg(width).arg(d.inputs);
    let (launch, n_splits) = match output {
        Output::SplitK { n_splits } => (launch.arg(n_splits), n_splits),
        Output::Product | Output::Swiglu => (launch, 1),
    };
    // Two tiles of second factors, one of x A^T, and their mbarriers.
    let shared = tiling.shared_bytes() + 2 * 64 * (2 * tiling.columns + MAX_ROWS) + 16;
    launch.programmatic_launch(true).run([PARTS + n_columns * n_splits, 1], THREADS, shared);
}
