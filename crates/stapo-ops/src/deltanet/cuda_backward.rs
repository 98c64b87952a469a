use std::sync::Arc;

use super::cuda_inputs::{Inputs, ROW_THREADS, RecurrenceGradients, takes_rows, uses_tile};
use super::{Dims, Heads, ParameterSums, Parameters, Saved, cuda_chunks, cuda_rows};
use crate::cuda::kernels::{DELTANET_PLAIN, DELTANET_ROWS};
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

    let forward = (outputs, inv_norms);
    let gradients = (d_out.same(raw, op), d_outputs.same(raw, op));
    let norm_parts = norm_backward(cuda, &inputs, forward, gradients, (d_raw, pitch));
    let recurrence = recurrence_backward(cuda, &inputs, d_outputs, d_mixed);
    let gate_parts = gates_backward(cuda, &inputs, recurrence.gates.slice(), (d_raw, pitch));

    let conv_parts = mix_backward(cuda, &inputs, inv_norms, (&recurrence, d_mixed), (d_raw, pitch));
    if let Some(ParameterSums { d_conv, d_a_log, d_dt_bias, d_norm }) = to.sums {
        let [of_a_log, of_dt_bias] = &gate_parts;
        let sums =
            [(of_a_log, d_a_log), (of_dt_bias, d_dt_bias), (&norm_parts, d_norm), (&conv_parts, d_conv)];
        for (parts, sum) in sums {
            let sum = sum.cuda().f32(op);
            add_column_sums(cuda, parts.slice(), parts.len() / sum.len, sum);
        }
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
        cuda_chunks::backward(cuda, inputs, d_outputs, d_mixed, &gradients);
    } else {
        rows_backward(cuda, inputs, d_outputs, d_mixed, &gradients);
    }
    gradients
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

/// The gradients of z and of the outputs of the recurrence. Gives parts `[blocks, value_dim]` of the sums for the norm's weight.
fn norm_backward(
    cuda: &Arc<Cuda>,
    inputs: &Inputs,
    (outputs, inv_norms): (Slice, Slice),
    (d_out, d_outputs): (Slice, Slice),
    (d_raw, pitch): (Slice, usize),
) -> Memory {
    if takes_rows(cuda, inputs.d.heads, inputs.d.kernel) {
        let (forward, gradients) = ((outputs, inv_norms), (d_out, d_outputs));
        return cuda_rows::norm_backward(cuda, inputs, forward, gradients, (d_raw, pitch));
    }
    let d = inputs.d;
    let name = inputs.name("norm_backward");
    let launch = cuda.kernel(&DELTANET_ROWS, &name).arg(inputs.raw).arg(outputs).arg(inputs.norm);
    let launch = launch.arg(inv_norms).arg(d_out).arg(d_outputs).arg(d_raw).arg(pitch);
    launch.fields(&inputs.heads()).run([d.tokens, 1], ROW_THREADS, 0);
    let n_parts = parts_for(cuda, d.tokens);
    let parts = Memory::scratch(cuda, n_parts * d.heads.value_dim, ElementType::F32);
    let name = inputs.name("norm_weight");
    let launch = cuda.kernel(&DELTANET_ROWS, &name).arg(inputs.raw).arg(outputs).arg(inv_norms).arg(d_out);
    let threads = d.heads.value_dim.next_multiple_of(32).min(ROW_THREADS);
    let launch = launch.arg(parts.slice()).arg(d.tokens).fields(&inputs.heads());
    launch.run([n_parts, 1], threads, 0);
    parts
}

/// The gradient of queries, keys and values. Gives parts `[blocks, conv_width, kernel]` of the sums for the convolution's weight.
fn mix_backward(
    cuda: &Arc<Cuda>,
    inputs: &Inputs,
    inv_norms: Slice,
    (recurrence, d_mixed): (&RecurrenceGradients, Slice),
    (d_raw, pitch): (Slice, usize),
) -> Memory {
    if takes_rows(cuda, inputs.d.heads, inputs.d.kernel) {
        return cuda_rows::mix_backward(cuda, inputs, inv_norms, (recurrence, d_mixed), (d_raw, pitch));
    }
    let d = inputs.d;
    let name = inputs.name("mix_backward");
    let launch = cuda.kernel(&DELTANET_ROWS, &name).fields(&inputs.conv_rows()).arg(inv_norms);
    launch.arg(recurrence.keyed.slice()).arg(d_mixed).run([d.tokens, 1], ROW_THREADS, 0);
    let name = inputs.name("conv_backward");
    let launch = cuda.kernel(&DELTANET_ROWS, &name).arg(inputs.conv).arg(d_mixed).arg(d_raw).arg(pitch);
    let n_blocks = d.heads.conv_width().div_ceil(ROW_THREADS);
    let launch = launch.fields(&inputs.heads()).fields(&inputs.sequences());
    launch.run([d.tokens, n_blocks], ROW_THREADS, 0);
    let n_parts = d.tokens.clamp(1, MAX_CONV_PARTS);
    let n_weights = d.heads.conv_width() * d.kernel;
    let parts = Memory::scratch(cuda, n_parts * n_weights, ElementType::F32);
    let name = inputs.name("conv_weight");
    let launch = cuda.kernel(&DELTANET_ROWS, &name).fields(&inputs.conv_rows()).arg(d_mixed);
    let n_blocks = d.heads.conv_width().div_ceil(CONV_COLUMNS);
    launch.arg(parts.slice()).arg(d.tokens).run([n_blocks, n_parts], CONV_COLUMNS, 0);
    parts
}
