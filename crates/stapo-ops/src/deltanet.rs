//! Gated DeltaNet (Yang et al., 2025), the mixer of Qwen3.5's linear layers, from the rows of its input projections to the rows of
//! its output projection:
//!
//! ```text
//! [q | k | v] = silu(convolution([q | k | v])), q and k normed to length 1, q divided by sqrt(key_dim)
//! beta = sigmoid(b), g = -exp(a_log) softplus(a + dt_bias)
//! S = exp(g) S + k^T beta (v - exp(g) k S), o = q S
//! out = norm(o) * silu(z)
//! ```
//!
//! The state S `[key_dim, value_dim]` of each value head starts at 0, as do the rows in front of a sequence. Training and generation
//! run the same recurrence row by row, or on a GPU the same tile of 64 rows, so the rows of a call may start after a [`States`]
//! that an earlier call left.

pub(crate) mod cpu;
pub(crate) mod cpu_backward;
mod cuda;
mod cuda_backward;
mod cuda_chunks;
mod cuda_inputs;
mod cuda_rows;
pub(crate) mod recurrence;
mod states;
#[cfg(test)]
pub(crate) mod tests;

pub use states::States;

use crate::device::Backend;
use crate::{Device, Float, View, ViewMut, check, pitch_of};

/// Rows of a chunk: the tile of a GPU takes as many at a time, and backward on the CPU keeps a state for each chunk.
const CHUNK: usize = 64;

/// Head counts; value head `h` reads key head `h / (value / key)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    pub key: usize,
    pub value: usize,
    pub key_dim: usize,
    pub value_dim: usize,
}

impl Heads {
    /// Columns of all keys, and of all queries.
    pub fn key_width(self) -> usize {
        self.key * self.key_dim
    }

    /// Columns of all values, of their gates z and of the output.
    pub fn value_width(self) -> usize {
        self.value * self.value_dim
    }

    /// Columns that the convolution runs over: queries, keys, values.
    pub fn conv_width(self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// Columns of the input: queries, keys, values, z, and b and a of each value head.
    pub fn input_width(self) -> usize {
        self.mixed_width() + self.value_width()
    }

    /// Columns of what the recurrence takes in: queries, keys, values, and beta and decay of each value head.
    fn mixed_width(self) -> usize {
        self.conv_width() + 2 * self.value
    }

    /// Norms of a row: of each query head, each key head and each output head.
    pub fn n_norms(self) -> usize {
        2 * self.key + self.value
    }

    /// Value heads per key head.
    pub fn group(self) -> usize {
        self.value / self.key
    }

    /// Numbers of the states of all value heads.
    pub fn state_len(self) -> usize {
        self.value * self.key_dim * self.value_dim
    }

    /// Whether a GPU with the tile of 64 rows takes heads of these widths through it.
    fn fit_tile(self) -> bool {
        self.key_dim == self.value_dim && [64, 128].contains(&self.key_dim)
    }

    /// Whether such a GPU also takes the rows in front of the tile and behind it eight columns at a time, see rows_tile.cu.
    fn fit_tile_rows(self, kernel: usize) -> bool {
        let is_aligned = self.input_width().is_multiple_of(8);
        self.fit_tile() && kernel == 4 && is_aligned && self.value_width() <= 8 * 1024
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dims {
    pub tokens: usize,
    pub sequences: usize,
    pub heads: Heads,
    /// Rows that the convolution reads, the row itself included.
    pub kernel: usize,
    /// Of the norm of outputs.
    pub eps: f64,
}

/// Weights. Shapes: conv `[conv_width, kernel]`; a_log, dt_bias `[value heads]`; norm `[value_dim]`.
#[derive(Debug, Clone, Copy)]
pub struct Parameters<'a, T: Float> {
    pub conv: View<'a, T>,
    pub a_log: View<'a, T>,
    pub dt_bias: View<'a, T>,
    pub norm: View<'a, T>,
}

/// Sums to which backward adds. Shapes as in [`Parameters`].
#[derive(Debug)]
pub struct ParameterSums<'a, T: Float> {
    pub d_conv: ViewMut<'a, T>,
    pub d_a_log: ViewMut<'a, T>,
    pub d_dt_bias: ViewMut<'a, T>,
    pub d_norm: ViewMut<'a, T>,
}

/// The rows of a call: sequence s has the rows `offsets[s]..offsets[s + 1]`.
pub struct Sequences<'a, T: Float> {
    /// `[sequences + 1]`
    pub offsets: View<'a, u32>,
    /// Where earlier calls left the sequences; `None` if all rows of every sequence are in the call.
    pub carried: Option<Carried<'a, T>>,
}

/// The sequences of a call that continue where earlier calls ended.
pub struct Carried<'a, T: Float> {
    /// `[sequences]`: rows of each sequence, those of this call included, of which each has at least one.
    pub contexts: View<'a, u32>,
    /// `[sequences]`: where the state of each sequence lies. A sequence whose first row is in the call reads nothing there.
    pub slots: View<'a, u32>,
    pub states: &'a mut States<T>,
}

/// What forward leaves for backward and for the output projection.
#[derive(Debug)]
pub struct Out<'a, T: Float> {
    /// `T` times [`Heads::input_width`] numbers: the rows that the recurrence takes in, then its outputs. On a GPU these rows have no
    /// columns for beta and decay, and the last numbers are not used.
    pub mixed: ViewMut<'a, T>,
    /// `[T, n_norms]`
    pub inv_norms: ViewMut<'a, T>,
    /// `[T, value_width]`, on a GPU possibly with further columns after each row.
    pub out: ViewMut<'a, T>,
}

/// What forward left.
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a, T: Float> {
    pub raw: View<'a, T>,
    pub mixed: View<'a, T>,
    pub inv_norms: View<'a, T>,
}

/// Shape: raw `[T, input_width]`.
pub fn forward<T: Float>(
    device: &Device,
    dims: Dims,
    parameters: Parameters<'_, T>,
    raw: View<'_, T>,
    sequences: Sequences<'_, T>,
    to: Out<'_, T>,
) {
    let op = "deltanet::forward";
    dims.check(op, &parameters);
    check(op, "raw", raw.len(), dims.tokens * dims.heads.input_width());
    check(op, "mixed", to.mixed.len(), dims.tokens * dims.heads.input_width());
    check(op, "inv_norms", to.inv_norms.len(), dims.tokens * dims.heads.n_norms());
    pitch_of(op, "out", to.out.len(), dims.tokens, dims.heads.value_width());
    check(op, "offsets", sequences.offsets.len(), dims.sequences + 1);
    match device.backend() {
        Backend::Cpu(cpu) => {
            T::deltanet_forward(cpu, dims, parameters, raw.host(), sequences.into_host(), to);
        }
        Backend::Cuda(cuda) => cuda::forward(cuda, dims, parameters, raw.cuda(), sequences, &to),
    }
}

/// The gradient of raw, which is overwritten. Shapes: d_out `[T, value_width]`; d_mixed as `mixed` of [`Out`], left holding
/// anything; d_raw `[T, input_width]`, on a GPU possibly with further columns after each row. Rows of sequences start at their first
/// token.
pub fn backward<T: Float>(
    device: &Device,
    dims: Dims,
    (parameters, saved): (Parameters<'_, T>, Saved<'_, T>),
    offsets: View<'_, u32>,
    d_out: View<'_, T>,
    (d_mixed, d_raw): (ViewMut<'_, T>, ViewMut<'_, T>),
    sums: Option<ParameterSums<'_, T>>,
) {
    let op = "deltanet::backward";
    dims.check(op, &parameters);
    check(op, "d_mixed", d_mixed.len(), dims.tokens * dims.heads.input_width());
    pitch_of(op, "d_raw", d_raw.len(), dims.tokens, dims.heads.input_width());
    check(op, "d_out", d_out.len(), dims.tokens * dims.heads.value_width());
    match device.backend() {
        Backend::Cpu(cpu) => {
            let to = cpu_backward::Gradients { d_mixed: d_mixed.into_host(), d_raw: d_raw.into_host(), sums };
            T::deltanet_backward(cpu, dims, (parameters, saved), offsets.host(), d_out.host(), to);
        }
        Backend::Cuda(cuda) => {
            let to = cuda_backward::Gradients { d_mixed: d_mixed.cuda(), d_raw: d_raw.cuda(), sums };
            cuda_backward::backward(cuda, dims, (parameters, saved), offsets.cuda(), d_out.cuda(), to);
        }
    }
}

impl Dims {
    #[track_caller]
    fn check<T: Float>(self, op: &str, parameters: &Parameters<'_, T>) {
        let Heads { key, value, value_dim, .. } = self.heads;
        assert!(
            key > 0 && value.is_multiple_of(key),
            "{op}: {value} value heads cannot share {key} key heads"
        );
        assert!(self.kernel > 0, "{op}: a convolution over 0 rows");
        check(op, "conv", parameters.conv.len(), self.heads.conv_width() * self.kernel);
        check(op, "a_log", parameters.a_log.len(), value);
        check(op, "dt_bias", parameters.dt_bias.len(), value);
        check(op, "norm", parameters.norm.len(), value_dim);
    }
}
