//! `rope::forward`, then `attention::paged::forward`: decode rotates its queries and keys in the attention kernel, and rope's kernel,
//! or that of the product in front of it, stores the keys and values of prompts in the cache.

use crate::attention::cuda_decode::{self, InFront, Rotation};
use crate::attention::cuda_paged::PagedCall;
use crate::attention::paged::{self, Cache, Dims, Sequences};
use crate::cuda::{Cuda, Slice};
use crate::device::Backend;
use crate::matmul::large_m;
use crate::{Device, Float, View, ViewMut, Weight, attention, check, matmul, rope};

/// With fewer rows a product of this op is always a kernel of its own.
pub const LEAST_ROWS: usize = large_m::LEAST_ROWS;

/// What is rotated.
pub enum Raw<'a, T: Float> {
    /// `[T, qkv_width]`
    Rows(View<'a, T>),
    /// `x W^T`. Shapes: x `[T, D]`; weight `[qkv_width, D]`; rows as above, scratch that is left holding anything.
    Product { x: View<'a, T>, weight: &'a Weight<T>, rows: ViewMut<'a, T> },
}

/// Queries, keys and values before the rotation: see [`rope::forward`].
pub struct Unrotated<'a, T: Float> {
    pub table: &'a rope::Table<T>,
    pub positions: View<'a, u32>,
    pub norm: Option<rope::HeadNorm<'a, T>>,
    pub raw: Raw<'a, T>,
    /// As in [`attention::Inputs`].
    pub sinks: Option<View<'a, T>>,
    /// `[T, qkv_width]`, scratch that is left holding anything.
    pub qkv: ViewMut<'a, T>,
    /// With a norm `[T, query heads + kv heads]`, scratch that is left holding anything.
    pub inv_rms: ViewMut<'a, T>,
}

/// Shapes: slots, cache, sequences and out as in [`paged::forward`].
pub fn forward<T: Float>(
    device: &Device,
    dims: Dims,
    unrotated: Unrotated<'_, T>,
    slots: View<'_, u32>,
    cache: &mut Cache<T>,
    sequences: Sequences<'_>,
    out: ViewMut<'_, T>,
) {
    let op = "fused::rope_paged_attention";
    let Unrotated { table, positions, norm, raw, sinks, mut qkv, inv_rms } = unrotated;
    let checked_call = |rows: View<'_, T>, cache: &Cache<T>| {
        paged::check_shapes(op, dims, cache, &attention::Inputs { qkv: rows, sinks }, sequences, &out);
        check(op, "positions", positions.len(), dims.tokens);
        check(op, "slots", slots.len(), dims.tokens);
        PagedCall::new(dims, sinks, slots, cache, sequences, &out)
    };
    let raw = match raw {
        Raw::Rows(rows) => rows,
        Raw::Product { x, weight, mut rows } => {
            check(op, "weight", weight.shape().outputs, dims.heads.qkv_width());
            if let Backend::Cuda(cuda) = device.backend() {
                let call = checked_call(rows.view(), cache);
                if multiply(cuda, &call, (x, weight), (table, positions), norm, qkv.cuda()) {
                    return call.attend(cuda, qkv.cuda());
                }
            }
            matmul::forward(device, dims.tokens, x, weight, None, rows.reborrow());
            rows.into_view()
        }
    };
    if let Backend::Cuda(cuda) = device.backend() {
        let call = checked_call(raw, cache);
        // The kernel stores a key while it attends, which is too late for another sequence that reads it.
        let is_decode = fits(cuda, &call, raw.cuda());
        if is_decode && !call.reads_new_keys() {
            if rotates_heads(table, norm) {
                return run(cuda, &call, raw.cuda(), Some(&rotation(table, positions, norm)));
            }
            let rope_dims = rope::Dims { tokens: dims.tokens, heads: dims.heads };
            let norm = norm.map(|norm| (norm, inv_rms));
            rope::forward(device, rope_dims, table, positions, norm, raw, qkv.reborrow());
            return run(cuda, &call, qkv.cuda(), None);
        }
        if !is_decode && rotates_heads(table, norm) {
            let norm = norm.map(|norm| (norm, inv_rms.cuda()));
            let (rows, rope_dims) =
                ((raw.cuda(), qkv.cuda()), rope::Dims { tokens: dims.tokens, heads: dims.heads });
            rope::cuda::forward_heads(
                cuda,
                rope_dims,
                (table, positions.cuda()),
                norm,
                rows,
                Some(&call.stored()),
            );
            return call.attend(cuda, qkv.cuda());
        }
    }
    let rope_dims = rope::Dims { tokens: dims.tokens, heads: dims.heads };
    let norm = norm.map(|norm| (norm, inv_rms));
    rope::forward(device, rope_dims, table, positions, norm, raw, qkv.reborrow());
    let inputs = attention::Inputs { qkv: qkv.into_view(), sinks };
    paged::forward(device, dims, inputs, slots, cache, sequences, out);
}

/// Queries to `qkv`, keys and values to the cache, all by the kernel of the product; `false` where other kernels are to do it.
fn multiply<T: Float>(
    cuda: &Cuda,
    call: &PagedCall,
    (x, weight): (View<'_, T>, &Weight<T>),
    (table, positions): (&rope::Table<T>, View<'_, u32>),
    norm: Option<rope::HeadNorm<'_, T>>,
    qkv: Slice,
) -> bool {
    if fits(cuda, call, qkv) || !rotates_heads(table, norm) {
        return false;
    }
    let stored = call.stored();
    let rotation = (table, positions.cuda());
    let Some(fields) = rope::cuda::head_fields(call.dims.heads, rotation, norm, Some(&stored)) else {
        return false;
    };
    let matmul::Shape { outputs, inputs } = weight.shape();
    let d = matmul::Dims { tokens: call.dims.tokens, inputs, outputs };
    let operands = large_m::Operands { d, x: x.cuda(), weight: weight.view().cuda(), n_further: 0 };
    let output = large_m::Output::Heads(&fields);
    let pays = large_m::pays(output, cuda, &operands, qkv);
    if pays {
        large_m::run(output, cuda, &operands, qkv);
    }
    pays
}

/// Whether the kernel's rotation is that of the table and the norm: of whole heads, each normed alone.
fn rotates_heads<T: Float>(table: &rope::Table<T>, norm: Option<rope::HeadNorm<'_, T>>) -> bool {
    let is_per_head = norm.is_none_or(|norm| norm.extent == rope::NormExtent::Head);
    is_per_head && table.rotary_dim() == table.head_dim()
}

fn fits(cuda: &Cuda, call: &PagedCall, raw: Slice) -> bool {
    cuda_decode::fits(cuda, call, raw)
}

/// Behind a product or a rotation of rows.
fn run(cuda: &Cuda, call: &PagedCall, rows: Slice, rotation: Option<&Rotation>) {
    cuda_decode::run(cuda, call, rows, rotation, InFront::Rows);
}

fn rotation<T: Float>(
    table: &rope::Table<T>,
    positions: View<'_, u32>,
    norm: Option<rope::HeadNorm<'_, T>>,
) -> Rotation {
    Rotation {
        positions: positions.cuda(),
        cos: table.cos.view().cuda(),
        sin: table.sin.view().cuda(),
        norm: norm.map(|norm| (norm.query_weight.cuda(), norm.key_weight.cuda(), norm.eps as f32)),
    }
}
