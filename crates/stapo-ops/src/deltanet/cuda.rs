use std::sync::Arc;

use super::cuda_inputs::{CarriedSlices, Destination, Inputs, ROW_THREADS, takes_rows, uses_tile};
use super::{Dims, Heads, Out, Parameters, Sequences, cuda_chunks, cuda_rows};
use crate::cuda::kernels::{DELTANET_PLAIN, DELTANET_ROWS};
use crate::cuda::{Cuda, Slice};
use crate::{Float, pitch_of};

pub(super) fn forward<T: Float>(
    cuda: &Arc<Cuda>,
    d: Dims,
    parameters: Parameters<'_, T>,
    raw: Slice,
    sequences: Sequences<'_, T>,
    to: &Out<'_, T>,
) {
    let op = "deltanet::forward";
    let mixed = to.mixed.cuda();
    let mut inputs = Inputs::new(d, parameters, raw, mixed, sequences.offsets.cuda());
    inputs.carried = sequences.carried.map(|carried| CarriedSlices {
        contexts: carried.contexts.cuda(),
        slots: carried.slots.cuda(),
        recurrent: carried.states.recurrent.view_mut().cuda().f32(op),
        rows: carried.states.rows.view_mut().cuda().same(raw, op),
        chunk: carried
            .states
            .chunk
            .as_mut()
            .map(|kept| [&mut kept.rows, &mut kept.numbers].map(|buffer| buffer.view_mut().cuda())),
    });
    let outputs = mixed.part(d.tokens * d.heads.conv_width(), d.tokens * d.heads.value_width());
    let out = to.out.cuda().same(raw, op);
    let pitch = pitch_of(op, "out", out.len, d.tokens, d.heads.value_width());
    let to = Destination { outputs, inv_norms: to.inv_norms.cuda().f32(op), out, pitch };
    if takes_rows(cuda, d.heads, d.kernel) {
        return cuda_rows::forward(cuda, &inputs, to);
    }
    mix(cuda, &inputs, to);
    if uses_tile(cuda, d.heads) {
        cuda_chunks::forward(cuda, &inputs, to);
        cuda_chunks::decode(cuda, &inputs, to);
    } else {
        run_rows(cuda, &inputs, outputs);
    }
    norm(cuda, &inputs, to);
    if let Some(carried) = inputs.carried.filter(|_| d.kernel > 1) {
        let name = inputs.name("keep_rows");
        let launch = cuda.kernel(&DELTANET_ROWS, &name).arg(raw).arg(carried.rows).fields(&inputs.heads());
        let n_blocks = d.heads.conv_width().div_ceil(ROW_THREADS);
        launch.fields(&inputs.sequences()).run([n_blocks, d.sequences], ROW_THREADS, 0);
    }
}

/// From the input to what the recurrence takes in.
fn mix(cuda: &Cuda, inputs: &Inputs, to: Destination) {
    let name = inputs.name("mix");
    let launch = cuda.kernel(&DELTANET_ROWS, &name).fields(&inputs.conv_rows()).arg(inputs.mixed);
    launch.arg(to.inv_norms).run([inputs.d.tokens, 1], ROW_THREADS, 0);
}

/// From the outputs of the recurrence to those of the op.
fn norm(cuda: &Cuda, inputs: &Inputs, to: Destination) {
    let d = inputs.d;
    let name = inputs.name("norm");
    let launch = cuda.kernel(&DELTANET_ROWS, &name).arg(inputs.raw).arg(to.outputs).arg(inputs.norm);
    let launch = launch.arg(to.inv_norms).arg(to.out).arg(to.pitch).arg(d.eps as f32);
    let launch = launch.fields(&inputs.heads());
    launch.run([d.tokens, 1], ROW_THREADS, 0);
}

/// The recurrence row by row.
fn run_rows(cuda: &Cuda, inputs: &Inputs, outputs: Slice) {
    let Heads { value, key_dim, value_dim, .. } = inputs.d.heads;
    let name = inputs.name("plain");
    let launch = cuda.kernel(&DELTANET_PLAIN, &name).fields(&inputs.plain_rows());
    let launch = launch.arg(inputs.carried.map(|carried| carried.recurrent)).arg(outputs);
    let threads = value_dim.next_multiple_of(32).min(ROW_THREADS);
    launch.run([value, inputs.d.sequences], threads, 4 * key_dim * value_dim);
}
