//! Rotary position embedding of queries and keys, in the rotate-half convention of Hugging Face, after an optional norm
//! per head (Qwen3) or per projection (OLMo). Values pass through.

pub(crate) mod cpu;
pub(crate) mod cuda;
mod table;
#[cfg(test)]
mod tests;

pub use table::{Frequencies, LongFactors, Scaling, Table};

use crate::device::Backend;
use crate::heads::Heads;
use crate::{Device, Float, View, ViewMut, check, pitch_of};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    pub tokens: usize,
    pub heads: Heads,
}

/// The norm of queries and keys, before the rotation.
#[derive(Clone, Copy)]
pub struct HeadNorm<'a, T: Float> {
    pub extent: NormExtent,
    /// `[head_dim]`, or of all query heads `[query heads * head_dim]`.
    pub query_weight: View<'a, T>,
    /// `[head_dim]`, or of all key heads `[kv heads * head_dim]`.
    pub key_weight: View<'a, T>,
    pub eps: f64,
}

/// What one mean of squares of a [`HeadNorm`] is taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormExtent {
    /// Each head alone.
    Head,
    /// All query heads together, and all key heads together.
    Projection,
}

/// What [`backward`] needs and adds to when there is a [`HeadNorm`].
pub struct HeadNormGrad<'a, T: Float> {
    pub norm: HeadNorm<'a, T>,
    /// The `raw` of [`forward`].
    pub raw: View<'a, T>,
    /// `[T, query heads + kv heads]`, from [`forward`].
    pub inv_rms: View<'a, T>,
    /// `None` if the norms are frozen.
    pub to: Option<HeadNormSums<'a, T>>,
}

/// The gradients of a [`HeadNorm`]'s weights, of the weights' lengths, added to: one chain over tokens, within a token over
/// heads that share a weight.
pub struct HeadNormSums<'a, T: Float> {
    pub d_query_weight: ViewMut<'a, T>,
    pub d_key_weight: ViewMut<'a, T>,
}

/// Shapes: raw, out `[T, qkv_width]`, each row the query heads, the key heads, the value heads; positions `[T]`, each
/// below the table's length. With a norm, its inv_rms `[T, query heads + kv heads]` is kept for backward.
pub fn forward<T: Float>(
    device: &Device,
    dims: Dims,
    table: &Table<T>,
    positions: View<'_, u32>,
    norm: Option<(HeadNorm<'_, T>, ViewMut<'_, T>)>,
    raw: View<'_, T>,
    out: ViewMut<'_, T>,
) {
    check_shapes(device, "rope::forward", dims, table, positions, raw.len(), out.len());
    if let Some((norm, inv_rms)) = &norm {
        check_norm("rope::forward", dims, *norm, inv_rms.len());
    }
    match device.backend() {
        Backend::Cpu(cpu) => {
            let norm = norm.map(|(norm, inv_rms)| (norm, inv_rms.into_host()));
            T::rope_forward(cpu, dims, table, positions.host(), norm, raw.host(), out.into_host());
        }
        Backend::Cuda(cuda) => {
            let norm = norm.as_ref().map(|(norm, inv_rms)| (*norm, inv_rms.cuda()));
            cuda::forward(cuda, dims, table, positions.cuda(), norm, raw.cuda(), out.cuda());
        }
    }
}

/// Shapes as in [`forward`]; d_raw is overwritten, on a GPU possibly with further columns after its rows.
pub fn backward<T: Float>(
    device: &Device,
    dims: Dims,
    table: &Table<T>,
    positions: View<'_, u32>,
    norm: Option<HeadNormGrad<'_, T>>,
    d_out: View<'_, T>,
    d_raw: ViewMut<'_, T>,
) {
    let width = dims.heads.qkv_width();
    let pitch = pitch_of("rope::backward", "d_raw", d_raw.len(), dims.tokens, width);
    let n_own = d_raw.len() - dims.tokens * (pitch - width);
    check_shapes(device, "rope::backward", dims, table, positions, d_out.len(), n_own);
    if let Some(grad) = &norm {
        check_norm("rope::backward", dims, grad.norm, grad.inv_rms.len());
        check("rope::backward", "raw", grad.raw.len(), d_out.len());
        if let Some(to) = &grad.to {
            check("rope::backward", "d_query_weight", to.d_query_weight.len(), grad.norm.query_weight.len());
            check("rope::backward", "d_key_weight", to.d_key_weight.len(), grad.norm.key_weight.len());
        }
    }
    match device.backend() {
        Backend::Cpu(cpu) => {
            T::rope_backward(cpu, dims, table, positions.host(), norm, d_out.host(), d_raw.into_host());
        }
        Backend::Cuda(cuda) => {
            cuda::backward(cuda, dims, table, positions.cuda(), norm, d_out.cuda(), d_raw.cuda());
        }
    }
}

#[track_caller]
fn check_shapes<T: Float>(
    device: &Device,
    op: &str,
    dims: Dims,
    table: &Table<T>,
    positions: View<'_, u32>,
    input: usize,
    output: usize,
) {
    assert!(table.head_dim() == dims.heads.dim, "{op}: table is for head_dim {}", table.head_dim());
    check(op, "positions", positions.len(), dims.tokens);
    check(op, "input", input, dims.tokens * dims.heads.qkv_width());
    check(op, "output", output, dims.tokens * dims.heads.qkv_width());
    // On a GPU the check would wait for the positions to be copied back.
    let Backend::Cpu(_) = device.backend() else { return };
    let top = positions.host().iter().max().map_or(0, |p| *p as usize + 1);
    assert!(top <= table.positions(), "{op}: position {} of a table of {}", top - 1, table.positions());
}

#[track_caller]
fn check_norm<T: Float>(op: &str, dims: Dims, norm: HeadNorm<'_, T>, inv_rms: usize) {
    let Heads { query, kv, dim } = dims.heads;
    let [n_query, n_key] = match norm.extent {
        NormExtent::Head => [dim, dim],
        NormExtent::Projection => [query * dim, kv * dim],
    };
    check(op, "query_weight", norm.query_weight.len(), n_query);
    check(op, "key_weight", norm.key_weight.len(), n_key);
    check(op, "inv_rms", inv_rms, dims.tokens * (dims.heads.query + dims.heads.kv));
}
