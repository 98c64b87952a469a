//! What the kernels of gated DeltaNet take, and which of them take heads of a shape.

use super::{Dims, Heads, Parameters};
use crate::cuda::{Cuda, Fields, Memory, Precision, Slice};
use crate::device::Backend;
use crate::{Device, Float};

/// Threads of a block that has one row.
pub(super) const ROW_THREADS: usize = 256;

/// Whether the device takes heads of these widths through the tile; otherwise the recurrence runs row by row.
pub(super) fn has_tile(device: &Device, heads: Heads) -> bool {
    matches!(device.backend(), Backend::Cuda(cuda) if uses_tile(cuda, heads))
}

pub(super) fn uses_tile(cuda: &Cuda, heads: Heads) -> bool {
    cuda.is_hopper() && cuda.options.precision == Precision::Bf16 && heads.fit_tile()
}

/// Columns of a thread of rows_tile.cu.
pub(super) const COLUMNS: usize = 8;
/// Rows that the convolution of rows_tile.cu reads.
pub(super) const TAPS: usize = 4;
/// Whether the kernels of rows_tile.cu take the rows: a matter of the shape alone, so that a row takes the same way in every call.
pub(super) fn takes_rows(cuda: &Cuda, heads: Heads, kernel: usize) -> bool {
    uses_tile(cuda, heads) && heads.fit_tile_rows(kernel)
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
    pub contexts: Slice,
    pub slots: Slice,
    pub recurrent: Slice,
    pub rows: Slice,
    pub chunk: Option<[Slice; 2]>,
}

/// What forward leaves.
#[derive(Clone, Copy)]
pub(super) struct Destination {
    /// `[T, value_width]`: the outputs of the recurrence.
    pub outputs: Slice,
    /// `[T, n_norms]`
    pub inv_norms: Slice,
    /// `[T, value_width]`, rows `pitch` apart.
    pub out: Slice,
    pub pitch: usize,
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
