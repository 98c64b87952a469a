use std::sync::Arc;

use super::cuda::{Inputs, ROW_THREADS, TILE_THREADS, tile_bytes, uses_tile};
use super::{CHUNK, Dims, Heads, ParameterSums, Parameters, Saved};
use crate::cuda::kernels::{DELTANET_CHUNKS, DELTANET_PLAIN, DELTANET_ROWS};
use crate::cuda::{Cuda, ElementType, Memory, Slice, add_column_sums, parts_for};
use crate::{Float, pitch_of};

/// Rows between two states that are kept while backward runs row by row, see plain.cu.
const PLAIN_CHUNK: usize = 32;
/// Blocks that share the rows of the sums for the convolution's weight.
const MAX_CONV_PARTS: usize = 64;
/// Columns of one of these blocks.
const CONV_COLUMNS: usize = 128;

/// Where gradients go.
pub(super) struct Gradients<'a, T: Float> {
    pub d_mixed: Slice,
    pub d_raw: Slice,
    pub sums: Option<ParameterSums<'a, T>>,
}

/// What the way back through the recurrence leaves, besides the gradients of values.
struct RecurrenceGradients {
    /// `[2, T, value heads, key_dim]`: of queries and keys, by value head.
    keyed: Memory,
    /// `[T, 2, value heads]`: of b and of the log decays.
    gates: Memory,
}

pub(super) fn backward<T: Float>(
    cuda: &Arc<Cuda>,
    d: Dims,
    (parameters, saved): (Parameters<'_, T>, Saved<'_, T>),
    offsets: Slice,
    d_out: Slice,
    to: Gradients<'_, T>,
) {
    let op = "deltanet::backward";
    let (raw, mixed) = (saved.raw.cuda(), saved.mixed.cuda());
    let inputs = Inputs::new(d, parameters, raw, mixed, offsets);
    let inv_norms = saved.inv_norms.cuda().f32(op);
    let (n_mixed, n_out) = (d.tokens * d.heads.conv_width(), d.tokens * d.heads.value_width());
    let outputs = mixed.part(n_mixed, n_out);
    let (d_mixed, d_outputs) = (to.d_mixed.part(0, n_mixed), to.d_mixed.part(n_mixed, n_out));
    let d_raw = to.d_raw.same(raw, op);
    let pitch = pitch_of(op, "d_raw", d_raw.len, d.tokens, d.heads.input_width());

    let name = inputs.name("norm_backward");
    let launch = cuda.kernel(&DELTANET_ROWS, &name).arg(raw).arg(outputs).arg(inputs.norm).arg(inv_norms);
    let launch = launch.arg(d_out.same(raw, op)).arg(d_outputs.same(raw, op)).arg(d_raw).arg(pitch);
    launch.fields(&inputs.heads()).run([d.tokens, 1], ROW_THREADS, 0);
    let recurrence = recurrence_backward(cuda, &inputs, d_outputs, d_mixed);
    let gate_parts = gates_backward(cuda, &inputs, recurrence.gates.slice(), (d_raw, pitch));

    let name = inputs.name("mix_backward");
    let launch = cuda.kernel(&DELTANET_ROWS, &name).fields(&inputs.conv_rows()).arg(inv_norms);
    launch.arg(recurrence.keyed.slice()).arg(d_mixed).run([d.tokens, 1], ROW_THREADS, 0);
    let name = inputs.name("conv_backward");
    let launch = cuda.kernel(&DELTANET_ROWS, &name).arg(inputs.conv).arg(d_mixed).arg(d_raw).arg(pitch);
    let n_blocks = d.heads.conv_width().div_ceil(ROW_THREADS);
    let launch = launch.fields(&inputs.heads()).fields(&inputs.sequences());
    launch.run([d.tokens, n_blocks], ROW_THREADS, 0);

    if let Some(ParameterSums { d_conv, d_a_log, d_dt_bias, d_norm }) = to.sums {
        let n_parts = gate_parts[0].len() / d.heads.value;
        for (parts, sum) in gate_parts.iter().zip([d_a_log, d_dt_bias]) {
            add_column_sums(cuda, parts.slice(), n_parts, sum.cuda().f32(op));
        }
        add_norm_weight(cuda, &inputs, (outputs, inv_norms), d_out, d_norm.cuda().f32(op));
        add_conv_weight(cuda, &inputs, d_mixed, d_conv.cuda().f32(op));
    }
}

/// The gradients of what the recurrence took in; those of values go to `d_mixed`.
fn recurrence_backward(
    cuda: &Arc<Cuda>,
    inputs: &Inputs,
    d_outputs: Slice,
    d_mixed: Slice,
) -> RecurrenceGradients {
    let d = inputs.d;
    let n_keyed = 2 * d.tokens * d.heads.value * d.heads.key_dim;
    let keyed = Memory::scratch(cuda, n_keyed, inputs.raw.kind);
    let gates = Memory::scratch(cuda, 2 * d.tokens * d.heads.value, ElementType::F32);
    let gradients = RecurrenceGradients { keyed, gates };
    if uses_tile(cuda, d.heads) {
        chunks_backward(cuda, inputs, d_outputs, d_mixed, &gradients);
    } else {
        rows_backward(cuda, inputs, d_outputs, d_mixed, &gradients);
    }
    gradients
}

/// Computes the states in front of all chunks again, and goes back through the chunks.
fn chunks_backward(
    cuda: &Arc<Cuda>,
    inputs: &Inputs,
    d_outputs: Slice,
    d_mixed: Slice,
    to: &RecurrenceGradients,
) {
    let d = inputs.d;
    let (dim, state_len) = (d.heads.key_dim, d.heads.state_len());
    let n_states = d.tokens / CHUNK + d.sequences;
    let states = Memory::scratch(cuda, n_states * state_len, ElementType::F32);
    let corrected = Memory::scratch(cuda, d.tokens * d.heads.value_width(), ElementType::Bf16);
    let args = inputs.chunks(Some(states.slice()), Some(corrected.slice()), None);
    let grid = [d.heads.value, d.sequences];
    let launch = cuda.kernel(&DELTANET_CHUNKS, "deltanet_chunks").head_dim(dim).fields(&args);
    launch.run(grid, TILE_THREADS, tile_bytes(dim));
    let d_states = Memory::scratch(cuda, d.sequences * state_len, ElementType::F32);
    let args = args.eight_bytes(d_outputs).eight_bytes(d_states.slice()).eight_bytes(to.keyed.slice());
    let args = args.eight_bytes(to.gates.slice()).eight_bytes(d_mixed).eight_bytes(d.tokens);
    // `BackwardShared` of tile_backward.cu.
    let further = 2 * ((2 * CHUNK + dim) * (dim + 8) + CHUNK * (CHUNK + 8)) + 4 * 2 * CHUNK;
    let launch = cuda.kernel(&DELTANET_CHUNKS, "deltanet_chunks_backward").head_dim(dim).fields(&args);
    launch.run(grid, TILE_THREADS, tile_bytes(dim) + further);
}

/// The way back row by row.
fn rows_backward(
    cuda: &Arc<Cuda>,
    inputs: &Inputs,
    d_outputs: Slice,
    d_mixed: Slice,
    to: &RecurrenceGradients,
) {
    let d = inputs.d;
    let Heads { value, key_dim, value_dim, .. } = d.heads;
    let n_borders = d.tokens / PLAIN_CHUNK + d.sequences * (PLAIN_CHUNK + 1);
    let borders = Memory::scratch(cuda, n_borders * d.heads.state_len(), ElementType::F32);
    let name = inputs.name("plain_backward");
    let launch = cuda.kernel(&DELTANET_PLAIN, &name).fields(&inputs.plain_rows()).arg(d_outputs);
    let launch = launch.arg(borders.slice()).arg(n_borders).arg(to.keyed.slice()).arg(to.gates.slice());
    let threads = key_dim.max(value_dim).next_multiple_of(32).min(ROW_THREADS);
    let shared_bytes = 4 * (key_dim * (value_dim + 1) + 3 * value_dim);
    launch.arg(d_mixed).arg(d.tokens).run([value, d.sequences], threads, shared_bytes);
}

/// The gradients of b and a. Gives parts `[blocks, value heads]` of the sums for a_log and dt_bias.
fn gates_backward(
    cuda: &Arc<Cuda>,
    inputs: &Inputs,
    d_gates: Slice,
    (d_raw, pitch): (Slice, usize),
) -> [Memory; 2] {
    let d = inputs.d;
    let n_parts = parts_for(cuda, d.tokens);
    let parts = [(); 2].map(|()| Memory::scratch(cuda, n_parts * d.heads.value, ElementType::F32));
    let name = inputs.name("gates_backward");
    let launch = cuda.kernel(&DELTANET_ROWS, &name).arg(inputs.raw).arg(inputs.a_log).arg(inputs.dt_bias);
    let launch = launch.arg(d_gates).arg(d_raw).arg(pitch).arg(parts[0].slice()).arg(parts[1].slice());
    let threads = d.heads.value.next_multiple_of(32).min(ROW_THREADS);
    launch.arg(d.tokens).fields(&inputs.heads()).run([n_parts, 1], threads, 0);
    parts
}

fn add_norm_weight(
    cuda: &Arc<Cuda>,
    inputs: &Inputs,
    (outputs, inv_norms): (Slice, Slice),
    d_out: Slice,
    to: Slice,
) {
    let d = inputs.d;
    let n_parts = parts_for(cuda, d.tokens);
    let parts = Memory::scratch(cuda, n_parts * d.heads.value_dim, ElementType::F32);
    let name = inputs.name("norm_weight");
    let launch = cuda.kernel(&DELTANET_ROWS, &name).arg(inputs.raw).arg(outputs).arg(inv_norms).arg(d_out);
    let threads = d.heads.value_dim.next_multiple_of(32).min(ROW_THREADS);
    let launch = launch.arg(parts.slice()).arg(d.tokens).fields(&inputs.heads());
    launch.run([n_parts, 1], threads, 0);
    add_column_sums(cuda, parts.slice(), n_parts, to);
}

fn add_conv_weight(cuda: &Arc<Cuda>, inputs: &Inputs, d_mixed: Slice, to: Slice) {
    let d = inputs.d;
    let n_parts = d.tokens.clamp(1, MAX_CONV_PARTS);
    let parts = Memory::scratch(cuda, n_parts * to.len, ElementType::F32);
    let name = inputs.name("conv_weight");
    let launch = cuda.kernel(&DELTANET_ROWS, &name).fields(&inputs.conv_rows()).arg(d_mixed);
    let n_blocks = d.heads.conv_width().div_ceil(CONV_COLUMNS);
    launch.arg(parts.slice()).arg(d.tokens).run([n_blocks, n_parts], CONV_COLUMNS, 0);
    add_column_sums(cuda, parts.slice(), n_parts, to);
}
