//! Matrix products on the GPU, by cuBLASLt or, for widths that cuBLASLt does not take, by a plain kernel.

use std::sync::Arc;

use cudarc::cublaslt::result;

use super::allocation::Allocation;
use super::blas::{Columns, ProductShape, StridedBatch, WORKSPACE_BYTES, refuse, set_bias};
use super::context::{Cuda, lock};
use super::error::{self, Code, CudaError};
use super::kernels::ELEMENTWISE;
use super::slice::{ElementType, Slice};
use crate::memory::OutOfMemory;

/// `c (+)= alpha op(a) op(b)` in column-major order: op(a) `[m, k]`, op(b) `[k, n]`, c `[m, n]`. In forward and in the
/// input's gradient n is the number of tokens.
pub(crate) struct MatrixProduct {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Slice,
    pub transposed_a: bool,
    pub b: Slice,
    pub transposed_b: bool,
    pub c: Slice,
    pub adds: bool,
    /// `[m]`, added to every column.
    pub bias: Option<Slice>,
    pub columns: Columns,
    /// `None`: one product.
    pub batch: Option<StridedBatch>,
    pub alpha: f32,
    /// `None`: each operand is a separate matrix.
    pub placement: Option<Placement>,
}

/// Operands that are columns of wider matrices, each by its elements from one row to the next and by the first column.
#[derive(Clone, Copy)]
pub(crate) struct Placement {
    /// Of a, b and c.
    pub strides: [usize; 3],
    pub starts: [usize; 3],
}

impl MatrixProduct {
    /// Elements from one stored row to the next of a, b and c.
    fn strides(&self) -> [usize; 3] {
        let alone = [
            if self.transposed_a { self.k } else { self.m },
            if self.transposed_b { self.n } else { self.k },
            self.m,
        ];
        self.placement.map_or(alone, |placement| placement.strides)
    }

    /// The same product, with `stride` elements from one stored row to the next of a, b or c, by its number.
    pub(crate) fn with_stride(self, operand: usize, stride: usize) -> Self {
        let mut strides = self.strides();
        strides[operand] = stride;
        let starts = self.placement.map_or([0; 3], |placement| placement.starts);
        Self { placement: Some(Placement { strides, starts }), ..self }
    }

    /// The same product of operands that begin this many elements further on.
    pub(crate) fn with_starts(self, starts: [usize; 3]) -> Self {
        Self { placement: Some(Placement { strides: self.strides(), starts }), ..self }
    }

    /// The addresses of the first elements of a, b and c.
    fn addresses(&self) -> [u64; 3] {
        let starts = self.placement.map_or([0; 3], |placement| placement.starts);
        let operands = [self.a, self.b, self.c];
        std::array::from_fn(|i| operands[i].address + (starts[i] * operands[i].kind.n_bytes()) as u64)
    }

    /// The largest number of elements, up to 16, of which every row of an operand begins at a multiple.
    fn aligned(&self) -> [usize; 3] {
        let starts = self.placement.map_or([0; 3], |placement| placement.starts);
        let strides = self.strides();
        std::array::from_fn(|i| 1 << (strides[i] | starts[i] | 16).trailing_zeros())
    }
}

/// Bytes of the workspace that holds the partial sums of split-K. A larger workspace takes more rows at a time, which
/// makes faster products; a smaller one would stay in the L2 cache until it is read. 16 MiB cost 0.5 % of a training
/// step, 32 MiB 0.3 %.
pub(crate) const SPLIT_K_BYTES: usize = 128 << 20;

impl Cuda {
    pub(crate) fn product(self: &Arc<Self>, p: &MatrixProduct) {
        if p.m == 0 || p.n == 0 {
            return;
        }
        self.make_current();
        let shape = ProductShape {
            m: p.m,
            n: p.n,
            k: p.k,
            transposed: (p.transposed_a, p.transposed_b),
            kinds: (p.a.kind, p.b.kind, p.c.kind),
            has_bias: p.bias.is_some(),
            adds: p.adds,
            batch: p.batch,
            strides: p.strides(),
            aligned: p.aligned(),
        };
        let mut blas = lock(&self.blas);
        let workspace = *blas.workspace.get_or_insert_with(|| allocate_workspace(self, WORKSPACE_BYTES));
        let handle = blas.handle();
        let prepared = blas.prepare(shape, p.columns);
        let Some(algorithm) = &prepared.algorithm else {
            self.plain_product(p);
            return;
        };
        if let Some(bias) = p.bias {
            set_bias(prepared.description, bias.address);
        }
        let alpha = p.alpha;
        let beta = if p.adds { 1.0f32 } else { 0.0 };
        let [a, b, c] = prepared.layouts;
        let [a_address, b_address, c_address] = p.addresses();
        // SAFETY: the layouts are those of the slices, whose lengths the op checked; the workspace has the given length.
        let done = unsafe {
            result::matmul(
                handle,
                prepared.description,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                a_address as *const _,
                a,
                b_address as *const _,
                b,
                c_address as *const _,
                c,
                c_address as *mut _,
                c,
                std::ptr::from_ref(algorithm),
                workspace as *mut _,
                WORKSPACE_BYTES,
                self.stream.cast(),
            )
        };
        done.unwrap_or_else(|error| refuse(format_args!("a product [{}, {}, {}]", p.m, p.n, p.k), error));
    }

    /// `len` elements in f32 for the partial sums of split-K, at most [`SPLIT_K_BYTES`]. The next call returns the same
    /// memory.
    pub(crate) fn split_k_workspace(self: &Arc<Self>, len: usize) -> Slice {
        assert!(4 * len <= SPLIT_K_BYTES, "{len} numbers of parts");
        let mut blas = lock(&self.blas);
        let address = *blas.split_k_workspace.get_or_insert_with(|| allocate_workspace(self, SPLIT_K_BYTES));
        Slice::plain(address, ElementType::F32, len)
    }

    /// The address of 32 numbers of 32 bits, all 0: signals, each with a count of those that have seen it. The kernels that are
    /// given them leave all at 0. The same signals are given again only after many others.
    pub(crate) fn signal(self: &Arc<Self>) -> u64 {
        lock(&self.signals).next(|n_bytes| or_fail(Allocation::zeros(self, None, n_bytes)).leak())
    }

    /// Products of odd widths, which only tiny models have.
    fn plain_product(&self, p: &MatrixProduct) {
        assert!(p.batch.is_none(), "products of a batch have widths that cuBLASLt takes");
        let name = format!("product_{}_{}", p.a.name(), p.c.name());
        let [a, b, c] = p.addresses();
        let launch = self.kernel(&ELEMENTWISE, &name).arg(a).arg(b).arg(c).arg(p.bias);
        let launch = launch.arg(p.m).arg(p.n).arg(p.k);
        let [a_stride, b_stride, c_stride] = p.strides();
        let launch = launch.arg(a_stride).arg(b_stride).arg(c_stride);
        let switches = [p.transposed_a, p.transposed_b, p.adds];
        let launch = switches.into_iter().fold(launch, |launch, is_on| launch.arg(usize::from(is_on)));
        launch.arg(p.alpha).run([(p.m * p.n).div_ceil(256), 1], 256, 0);
    }
}

/// The address of memory that lives as long as the context, which frees it. An `Allocation` inside of the context would
/// hold a reference to the context and keep it alive for ever.
fn allocate_workspace(cuda: &Arc<Cuda>, n_bytes: usize) -> u64 {
    or_fail(Allocation::new(cuda, n_bytes)).leak()
}

fn or_fail(memory: Result<Allocation, OutOfMemory>) -> Allocation {
    memory.unwrap_or_else(|error| {
        error::fail(CudaError::reported("workspace of products", error, Code::OutOfMemory))
    })
}
