//! The gate on attention's outputs, of families whose query projection is twice as wide: each head's query is followed by its gate,
//! and `out = attended * sigmoid(gate)`.

pub(crate) mod cpu;
#[cfg(test)]
mod tests;

use crate::device::Backend;
use crate::heads::Heads;
use crate::{Device, Float, View, ViewMut, check};

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
        check(op, "projected", projected, self.tokens * self.projected_width());
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
    dims.check("output_gate::divide", [projected.len(), qkv.len(), gate.len()]);
    match device.backend() {
        Backend::Cpu(cpu) => {
            T::output_gate_divide(cpu, dims, projected.host(), qkv.into_host(), gate.into_host());
        }
        Backend::Cuda(_) => refuse("output_gate::divide"),
    }
}

/// The inverse of [`divide`], for gradients.
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
        Backend::Cuda(_) => refuse("output_gate::join"),
    }
}

/// `out = attended * sigmoid(gate)`. All have the same shape.
pub fn forward<T: Float>(device: &Device, attended: View<'_, T>, gate: View<'_, T>, out: ViewMut<'_, T>) {
    check("output_gate::forward", "gate", gate.len(), attended.len());
    check("output_gate::forward", "out", out.len(), attended.len());
    match device.backend() {
        Backend::Cpu(cpu) => T::output_gate_forward(cpu, attended.host(), gate.host(), out.into_host()),
        Backend::Cuda(_) => refuse("output_gate::forward"),
    }
}

/// Overwrites both gradients. All have the same shape.
pub fn backward<T: Float>(
    device: &Device,
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
        Backend::Cuda(_) => refuse("output_gate::backward"),
    }
}

fn refuse(op: &str) -> ! {
    panic!("{op}: a GPU does not compute this op; `ModelConfig::check_device` refuses such models")
}
