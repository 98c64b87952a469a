//! What happens to each row in front of the recurrence in chunks and behind it, see rows_tile.cu.

use std::sync::Arc;

use super::cuda_chunks;
use super::cuda_inputs::{COLUMNS, Destination, Inputs, RecurrenceGradients, TAPS};
use crate::cuda::kernels::DELTANET_TILE_ROWS;
use crate::cuda::{Cuda, ElementType, Launch, Memory, Slice, parts_for};

/// Threads of a block that runs the convolution, as in rows_tile.cu.
const CONV_THREADS: usize = 128;
/// Consecutive rows of a thread, where there are enough of them to fill the GPU.
const ROWS_AT_ONCE: usize = 32;
/// The most blocks that share the rows of the sums for the convolution's weight.
const MAX_CONV_PARTS: usize = 256;

/// From the rows of the input to those of the output.
pub(super) fn forward(cuda: &Arc<Cuda>, inputs: &Inputs, to: Destination) {
    if cuda_chunks::has_chunks(inputs) {
        mix(cuda, inputs, to.inv_norms);
        cuda_chunks::forward(cuda, inputs, to);
        norm(cuda, inputs, to);
        if let Some(carried) = inputs.carried {
            let launch = kernel(cuda, inputs, "deltanet_keep_rows").arg(inputs.raw).arg(carried.rows);
            let launch = launch.fields(&inputs.heads()).fields(&inputs.sequences());
            launch.run([conv_grid(inputs, 1)[1], inputs.d.sequences], CONV_THREADS, 0);
        }
    }
    // Decode goes from input to output by itself, over what the norm left in its rows.
    cuda_chunks::decode(cuda, inputs, to);
}

fn kernel<'a>(cuda: &'a Cuda, inputs: &Inputs, name: &'a str) -> Launch<'a> {
    cuda.kernel(&DELTANET_TILE_ROWS, name).head_dim(inputs.d.heads.key_dim)
}

fn conv_grid(inputs: &Inputs, per_block: usize) -> [usize; 2] {
    let n_blocks = inputs.d.heads.conv_width().div_ceil(COLUMNS * CONV_THREADS);
    [inputs.d.tokens.div_ceil(per_block), n_blocks]
}

/// From the input to what the recurrence takes in.
fn mix(cuda: &Cuda, inputs: &Inputs, inv_norms: Slice) {
    let n_rows = inputs.d.tokens;
    let per_block = if n_rows < ROWS_AT_ONCE * 64 { 1 } else { ROWS_AT_ONCE };
    let launch = kernel(cuda, inputs, "deltanet_mix").fields(&inputs.conv_rows()).arg(inputs.mixed);
    let launch = launch.arg(inv_norms).arg(n_rows).arg(per_block);
    launch.run(conv_grid(inputs, per_block), CONV_THREADS, 0);
}

/// From the outputs of the recurrence to those of the op.
fn norm(cuda: &Cuda, inputs: &Inputs, to: Destination) {
    let d = inputs.d;
    let launch = kernel(cuda, inputs, "deltanet_norm").arg(inputs.raw).arg(to.outputs).arg(inputs.norm);
    let launch = launch.arg(to.inv_norms).arg(to.out).arg(to.pitch).arg(d.eps as f32);
    launch.fields(&inputs.heads()).run([d.tokens, 1], d.heads.value_width() / COLUMNS, 0);
}

/// The gradients of z and of the outputs of the recurrence. Gives parts `[blocks, value_dim]` of the sums for the norm's weight.
pub(super) fn norm_backward(
    cuda: &Arc<Cuda>,
    inputs: &Inputs,
    (outputs, inv_norms): (Slice, Slice),
    (d_out, d_outputs): (Slice, Slice),
    (d_raw, pitch): (Slice, usize),
) -> Memory {
    let d = inputs.d;
    let n_parts = parts_for(cuda, d.tokens);
    let parts = Memory::scratch(cuda, n_parts * d.heads.value_dim, ElementType::F32);
    let launch = kernel(cuda, inputs, "deltanet_norm_backward").arg(inputs.raw).arg(outputs);
    let launch = launch.arg(inputs.norm).arg(inv_norms).arg(d_out).arg(d_outputs).arg(d_raw).arg(pitch);
    let launch = launch.arg(parts.slice()).arg(d.tokens).fields(&inputs.heads());
    let width = d.heads.value_width();
    launch.run([n_parts, 1], width / COLUMNS, 4 * width);
    parts
}

/// The gradient of queries, keys and values. Gives parts `[blocks, conv_width, kernel]` of the sums for the convolution's weight.
pub(super) fn mix_backward(
    cuda: &Arc<Cuda>,
    inputs: &Inputs,
    inv_norms: Slice,
    (recurrence, d_mixed): (&RecurrenceGradients, Slice),
    (d_raw, pitch): (Slice, usize),
) -> Memory {
    let n_rows = inputs.d.tokens;
    let per_block = n_rows.div_ceil(MAX_CONV_PARTS).max(ROWS_AT_ONCE);
    let grid = conv_grid(inputs, per_block);
    let n_weights = inputs.d.heads.conv_width() * TAPS;
    let parts = Memory::scratch(cuda, grid[0] * n_weights, ElementType::F32);
    let launch = kernel(cuda, inputs, "deltanet_mix_backward").fields(&inputs.conv_rows()).arg(inv_norms);
    let launch = launch.arg(recurrence.keyed.slice()).arg(d_mixed).arg(d_raw).arg(pitch);
    launch.arg(parts.slice()).arg(n_rows).arg(per_block).run(grid, CONV_THREADS, 0);
    parts
}
