//! Rows of a table by index: token embeddings, and any other gather of rows with its scatter.

pub(crate) mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::device::Backend;
use crate::{Device, Float, View, ViewMut, check};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    pub tokens: usize,
    /// Rows of the table; every id is smaller.
    pub vocab: usize,
    pub width: usize,
}

/// `out[t] = table[ids[t]]`. Shapes: ids `[T]`; table `[vocab, width]`; out `[T, width]`.
pub fn forward<T: Float>(
    device: &Device,
    dims: Dims,
    ids: View<'_, u32>,
    table: View<'_, T>,
    out: ViewMut<'_, T>,
) {
    check("embedding::forward", "ids", ids.len(), dims.tokens);
    check("embedding::forward", "table", table.len(), dims.vocab * dims.width);
    check("embedding::forward", "out", out.len(), dims.tokens * dims.width);
    match device.backend() {
        Backend::Cpu(cpu) => {
            cpu::check_ids(ids.host(), dims.vocab);
            T::embedding_forward(cpu, dims, ids.host(), table.host(), out.into_host());
        }
        Backend::Cuda(cuda) => cuda::forward(cuda, dims, ids.cuda(), table.cuda(), out.cuda()),
    }
}

/// `d_table[ids[t]] += d_out[t]`, in the order of the tokens. Shapes as in [`forward`].
pub fn backward<T: Float>(
    device: &Device,
    dims: Dims,
    ids: View<'_, u32>,
    d_out: View<'_, T>,
    d_table: ViewMut<'_, T>,
) {
    check("embedding::backward", "ids", ids.len(), dims.tokens);
    check("embedding::backward", "d_out", d_out.len(), dims.tokens * dims.width);
    check("embedding::backward", "d_table", d_table.len(), dims.vocab * dims.width);
    match device.backend() {
        Backend::Cpu(cpu) => {
            cpu::check_ids(ids.host(), dims.vocab);
            T::embedding_backward(cpu, dims, ids.host(), d_out.host(), d_table.into_host());
        }
        Backend::Cuda(cuda) => cuda::backward(cuda, dims, ids.cuda(), d_out.cuda(), d_table.cuda()),
    }
}

/// As [`backward`], with the rows of each id added from zero, in the order of the tokens, before `d_table` takes their sum
/// in. Of `apart`, of the shape of the table, the rows of the ids are overwritten.
pub fn backward_apart<T: Float>(
    device: &Device,
    dims: Dims,
    ids: View<'_, u32>,
    d_out: View<'_, T>,
    apart: ViewMut<'_, T>,
    d_table: ViewMut<'_, T>,
) {
    let op = "embedding::backward_apart";
    check(op, "ids", ids.len(), dims.tokens);
    check(op, "d_out", d_out.len(), dims.tokens * dims.width);
    check(op, "apart", apart.len(), dims.vocab * dims.width);
    check(op, "d_table", d_table.len(), dims.vocab * dims.width);
    match device.backend() {
        Backend::Cpu(cpu) => {
            cpu::check_ids(ids.host(), dims.vocab);
            cpu::backward_apart(cpu, dims, ids.host(), d_out.host(), apart.into_host(), d_table.into_host());
        }
        Backend::Cuda(cuda) => {
            cuda::backward_apart(cuda, dims, ids.cuda(), d_out.cuda(), (apart.cuda(), d_table.cuda()));
        }
    }
}
