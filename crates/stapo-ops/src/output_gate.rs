//! The gate on attention's outputs, of families whose query projection is twice as wide: each head's query is followed by its gate,
//! and `out = attended * sigmoid(gate)`.

pub(crate) mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::device::Backend;
use crate::heads::Heads;
use crate::{Device, Float, View, ViewMut, check, pitch_of};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    pub tokens: usize,
    pub heads: Heads,
}

impl Dims {
    /// Columns of the projections: a query and a gate of each query head in turns, keys, values.
    pub fn projected_width(self) -> usize {
        self.heads.qkv_width() + self.heads.out_width()
    }

    #[track_caller]
    fn check(self, op: &str, [projected, qkv, gate]: [usize; 3]) {
        pitch_of(op, "projected", projected, self.tokens, self.projected_width());
        check(op, "qkv", qkv, self.tokens * self.heads.qkv_width());
        check(op, "gate", gate, self.tokens * self.heads.out_width());
    }
}

/// Divides rows of projections. Shapes: projected `[T, projected_width]`; qkv `[T, qkv_width]`; gate `[T, out_width]`.
pub fn divide<T: Float>(
    device: &Device,
    dims: Dims,
    projected: View<'_, T>,
    qkv: ViewMut<'_, T>,
    gate: ViewMut<'_, T>,
) {
    let op = "output_gate::divide";
    dims.check(op, [projected.len(), qkv.len(), gate.len()]);
    check(op, "projected", projected.len(), dims.tokens * dims.projected_width());
    match device.backend() {
        Backend::Cpu(cpu) => {
            T::output_gate_divide(cpu, dims, projected.host(), qkv.into_host(), gate.into_host());
        }
        Backend::Cuda(cuda) => cuda::divide(cuda, dims, projected.cuda(), qkv.cuda(), gate.cuda()),
    }
}

/// The inverse of [`divide`], for gradients. On a GPU rows of `projected` may have further columns after them.
pub fn join<T: Float>(
    device: &Device,
    dims: Dims,
    qkv: View<'_, T>,
    gate: View<'_, T>,
    projected: ViewMut<'_, T>,
) {
    dims.check("output_gate::join", [projected.len(), qkv.len(), gate.len()]);
    match device.backend() {
        Backend::Cpu(cpu) => {
            T::output_gate_join(cpu, dims, qkv.host(), gate.host(), projected.into_host());
        }
        Backend::Cuda(cuda) => cuda::join(cuda, dims, qkv.cuda(), gate.cuda(), projected.cuda()),
    }
}

/// `out = attended * sigmoid(gate)`. All have the shape `[T, out_width]`; on a GPU rows of `out` may have further columns after them.
pub fn forward<T: Float>(
    device: &Device,
    dims: Dims,
    attended: View<'_, T>,
    gate: View<'_, T>,
    out: ViewMut<'_, T>,
) {
    check("output_gate::forward", "gate", gate.len(), attended.len());
    pitch_of("output_gate::forward", "out", out.len(), dims.tokens, dims.heads.out_width());
    match device.backend() {
        Backend::Cpu(cpu) => T::output_gate_forward(cpu, attended.host(), gate.host(), out.into_host()),
        Backend::Cuda(cuda) => cuda::forward(cuda, dims, attended.cuda(), gate.cuda(), out.cuda()),
    }
}

/// Overwrites both gradients. All have the shape `[T, out_width]`.
pub fn backward<T: Float>(
    device: &Device,
    dims: Dims,
    (attended, gate): (View<'_, T>, View<'_, T>),
    d_out: View<'_, T>,
    d_attended: ViewMut<'_, T>,
    d_gate: ViewMut<'_, T>,
) {
    for (name, len) in [("gate", gate.len()), ("d_out", d_out.len()), ("d_attended", d_attended.len())] {
        check("output_gate::backward", name, len, attended.len());
    }
    match device.backend() {
        Backend::Cpu(cpu) => {
            let to = (d_attended.into_host(), d_gate.into_host());
            T::output_gate_backward(cpu, (attended.host(), gate.host()), d_out.host(), to);
        }
        Backend::Cuda(cuda) => {
            let to = (d_attended.cuda(), d_gate.cuda());
            cuda::backward(cuda, dims, (attended.cuda(), gate.cuda()), d_out.cuda(), to);
        }
    }
}
