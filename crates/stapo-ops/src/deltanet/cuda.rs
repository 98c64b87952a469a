use std::sync::Arc;

use super::{Dims, Heads, Out, Parameters, Sequences, cuda_chunks, cuda_rows};
use crate::cuda::kernels::{DELTANET_PLAIN, DELTANET_ROWS};
use crate::cuda::{Cuda, Fields, Memory, Precision, Slice};
use crate::device::Backend;
use crate::{Device, Float, pitch_of};

/// Threads of a block that has one row.
pub(super) const ROW_THREADS: usize = 256;

/// Whether the device takes heads of these widths through the tile; otherwise the recurrence runs row by row.
pub(super) fn has_tile(device: &Device, heads: Heads) -> bool {
    matches!(device.backend(), Backend::Cuda(cuda) if uses_tile(cuda, heads))
}

pub(super) fn uses_tile(cuda: &Cuda, heads: Heads) -> bool {
    cuda.is_hopper() && cuda.options.precision == Precision::Bf16 && heads.fit_tile()
}

/// What the kernels of a call read.
#[derive(Clone, Copy)]
pub(super) struct Inputs {
    pub d: Dims,
    pub raw: Slice,
    /// `[T, conv_width]`
    pub mixed: Slice,
    pub conv: Slice,
    pub a_log: Slice,
    pub dt_bias: Slice,
    pub norm: Slice,
    pub offsets: Slice,
    pub carried: Option<CarriedSlices>,
}

/// [`super::Carried`] on the GPU.
#[derive(Clone, Copy)]
pub(super) struct CarriedSlices {
    contexts: Slice,
    slots: Slice,
    pub recurrent: Slice,
    rows: Slice,
    pub chunk: Option<[Slice; 2]>,
}

/// What the way back through the recurrence leaves, besides the gradients of values.
pub(super) struct RecurrenceGradients {
    /// `[2, T, value heads, key_dim]`: of queries and keys, by value head.
    pub keyed: Memory,
    /// `[T, 2, value heads]`: of b and of the log decays.
    pub gates: Memory,
}

impl Inputs {
    pub fn new<T: Float>(
        d: Dims,
        parameters: Parameters<'_, T>,
        raw: Slice,
        mixed: Slice,
        offsets: Slice,
    ) -> Self {
        let op = "deltanet";
        Self {
            d,
            raw: raw.same(mixed, op),
            mixed: mixed.part(0, d.tokens * d.heads.conv_width()),
            conv: parameters.conv.cuda().same(raw, op),
            a_log: parameters.a_log.cuda().same(raw, op),
            dt_bias: parameters.dt_bias.cuda().same(raw, op),
            norm: parameters.norm.cuda().same(raw, op),
            offsets,
            carried: None,
        }
    }

    /// A kernel's name for the type of the rows.
    pub fn name(&self, kernel: &str) -> String {
        format!("deltanet_{kernel}_{}", self.raw.name())
    }

    /// `Heads` of heads.cu.
    pub fn heads(&self) -> Fields {
        let Heads { key, value, key_dim, value_dim } = self.d.heads;
        let fields = Fields::default().four_bytes(key).four_bytes(value).four_bytes(key_dim);
        fields.four_bytes(value_dim).four_bytes(self.d.kernel)
    }

    /// `Sequences` of heads.cu.
    pub fn sequences(&self) -> Fields {
        let fields = Fields::default().eight_bytes(self.offsets);
        let fields = fields.eight_bytes(self.carried.map(|carried| carried.contexts));
        fields.eight_bytes(self.carried.map(|carried| carried.slots)).four_bytes(self.d.sequences)
    }

    /// `ConvRows` of rows.cu.
    pub fn conv_rows(&self) -> Fields {
        let fields = Fields::default().eight_bytes(self.raw).eight_bytes(self.conv);
        let fields = fields.eight_bytes(self.carried.map(|carried| carried.rows));
        fields.join(&self.heads()).join(&self.sequences())
    }

    /// `PlainRows` of plain.cu.
    pub fn plain_rows(&self) -> Fields {
        let fields = Fields::default().eight_bytes(self.raw).eight_bytes(self.mixed);
        let fields = fields.eight_bytes(self.a_log).eight_bytes(self.dt_bias);
        fields.join(&self.heads()).join(&self.sequences())
    }
}

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
    let inv_norms = to.inv_norms.cuda().f32(op);
    mix(cuda, &inputs, inv_norms);
    let outputs = mixed.part(d.tokens * d.heads.conv_width(), d.tokens * d.heads.value_width());
    if uses_tile(cuda, d.heads) {
        cuda_chunks::forward(cuda, &inputs, outputs);
    } else {
        run_rows(cuda, &inputs, outputs);
    }
    let out = to.out.cuda().same(raw, op);
    let pitch = pitch_of(op, "out", out.len, d.tokens, d.heads.value_width());
    norm(cuda, &inputs, outputs, inv_norms, (out, pitch));
    if let Some(carried) = inputs.carried.filter(|_| d.kernel > 1) {
        let name = inputs.name("keep_rows");
        let launch = cuda.kernel(&DELTANET_ROWS, &name).arg(raw).arg(carried.rows).fields(&inputs.heads());
        let n_blocks = d.heads.conv_width().div_ceil(ROW_THREADS);
        launch.fields(&inputs.sequences()).run([n_blocks, d.sequences], ROW_THREADS, 0);
    }
}

/// From the input to what the recurrence takes in.
fn mix(cuda: &Cuda, inputs: &Inputs, inv_norms: Slice) {
    if cuda_rows::takes(cuda, inputs) {
        return cuda_rows::mix(cuda, inputs, inv_norms);
    }
    let name = inputs.name("mix");
    let launch = cuda.kernel(&DELTANET_ROWS, &name).fields(&inputs.conv_rows()).arg(inputs.mixed);
    launch.arg(inv_norms).run([inputs.d.tokens, 1], ROW_THREADS, 0);
}

/// From the outputs of the recurrence to rows of `out`, which are `pitch` apart.
fn norm(cuda: &Cuda, inputs: &Inputs, outputs: Slice, inv_norms: Slice, (out, pitch): (Slice, usize)) {
    if cuda_rows::takes(cuda, inputs) {
        return cuda_rows::norm(cuda, inputs, outputs, inv_norms, (out, pitch));
    }
    let d = inputs.d;
    let name = inputs.name("norm");
    let launch = cuda.kernel(&DELTANET_ROWS, &name).arg(inputs.raw).arg(outputs).arg(inputs.norm);
    let launch = launch.arg(inv_norms).arg(out).arg(pitch).arg(d.eps as f32).fields(&inputs.heads());
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
