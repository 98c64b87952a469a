//! Products of few rows with joined adapters, by the kernels of small_m.cu.

use super::Adapter;
use super::cuda::{MODULES, PARTS, Placed, map_hidden, maps_of_b, modules};
use crate::cuda::kernels::LORA_SMALL_M;
use crate::cuda::{Cuda, Slice, TensorMap};
use crate::matmul::Dims;
pub(crate) use crate::matmul::small_m::MAX_ROWS;
use crate::matmul::small_m::{self, Output, THREADS};
use crate::{Float, Weight};

/// The highest rank, as in small_m.cu.
const MAX_RANK: usize = 64;
/// A block's columns, at most 64, belong to two modules or fewer where each module has as many.
const MIN_OUTPUTS: usize = 64;

/// A layer with adapters at work on few rows. Shapes: x `[T, inputs]`, whose rows may have further columns behind them; hidden
/// `[T, pitch]`, from `lora::project`.
pub(crate) struct Layer<'a, T: Float> {
    pub d: Dims,
    pub x: Slice,
    pub weight: &'a Weight<T>,
    pub adapter: &'a Adapter<'a, T>,
    pub hidden: Placed,
}

impl<T: Float> Layer<'_, T> {
    /// Whether [`Layer::run`] may be called with the same arguments.
    pub(crate) fn fits(&self, output: Output, cuda: &Cuda, y: Slice) -> bool {
        let Layer { d, x, weight, adapter, .. } = self;
        if !(1..=MAX_ROWS).contains(&d.tokens) {
            return false;
        }
        let (x, w) = (x.part(0, d.tokens * d.inputs), weight.view().cuda().part(0, d.outputs * d.inputs));
        let are_gate_and_up = adapter.modules.len() == 2
            && adapter.modules.iter().all(|module| module.outputs.len == output.width(*d));
        small_m::fits(output, cuda, *d, x, w, y)
            && super::cuda::fits(cuda, adapter)
            && adapter.rank() <= MAX_RANK
            && adapter.modules.iter().all(|module| module.outputs.len >= MIN_OUTPUTS)
            && weight.is_joined()
            && (output != Output::Swiglu || are_gate_and_up)
    }

    /// As `matmul::small_m::run`, with adapters. Rows of a SwiGLU's y may have further columns behind them.
    pub(crate) fn run(&self, output: Output, cuda: &Cuda, y: Slice) {
        let d = self.d;
        let tiling = output.tiling(cuda, d).expect("lora::small_m: a product that fits");
        let width = output.width(d);
        let (name, n_splits) = match output {
            Output::Product => (format!("lora_small_m_{}", tiling.columns), 1),
            Output::SplitK { n_splits } => ("lora_small_m_split_k".to_string(), n_splits),
            Output::Swiglu => (format!("lora_swiglu_small_m_{}", tiling.columns), 1),
        };
        let depth = d.inputs / n_splits;
        let weight = self.weight.view().cuda();
        let (x_pitch, w_pitch) = (self.x.len / d.tokens, weight.len / d.outputs);
        let x = |start| {
            let columns = (start, depth, x_pitch);
            TensorMap::of_columns(self.x, d.tokens, columns, d.tokens.next_multiple_of(8))
        };
        let w = |start| TensorMap::of_columns(weight, d.outputs, (start, depth, w_pitch), tiling.columns);
        let launch = cuda.kernel(&LORA_SMALL_M, &name);
        let launch = match output {
            Output::SplitK { .. } => {
                let x: Vec<_> = (0..n_splits).map(|i| x(i * depth)).collect();
                let w: Vec<_> = (0..n_splits).map(|i| w(i * (w_pitch / n_splits))).collect();
                launch.tensor_maps::<PARTS>(&x).tensor_maps::<PARTS>(&w)
            }
            Output::Product | Output::Swiglu => launch.tensor_map(&x(0)).tensor_map(&w(0)),
        };
        let launch = launch.tensor_map(&map_hidden(self.adapter, d.tokens, self.hidden));
        let launch = launch.tensor_maps::<MODULES>(&maps_of_b(self.adapter, tiling.columns));
        let launch = launch.fields(&modules(self.adapter)).arg(y).arg(d.tokens).arg(width).arg(depth);
        let launch = match output {
            Output::Swiglu => launch.arg(y.len / d.tokens),
            Output::Product | Output::SplitK { .. } => launch,
        };
        // Two tiles each of second factors and of x A^T, and two mbarriers.
        let shared = tiling.shared_bytes() + 2 * 2 * 64 * (tiling.columns + MAX_ROWS) + 16;
        launch.programmatic_launch(true).run([width.div_ceil(tiling.columns), n_splits], THREADS, shared);
    }
}
