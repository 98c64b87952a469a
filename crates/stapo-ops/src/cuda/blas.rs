//! cuBLASLt: which of its algorithms computes a product.
//!
//! The library may not split the depth by itself, so an element is one chain over the depth and a row's bits do not
//! depend on the number of rows. The library may choose another tile for another number of rows; that all tiles give
//! the same bits is measured (docs/numerics.md) and checked by every training run.

use std::collections::HashMap;
use std::fmt::Display;

use cudarc::cublaslt::{result, sys};

use super::error::{self, Code, CudaError};
use super::slice::ElementType;

/// What the columns of a product are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Columns {
    /// Tokens, in any number: the algorithm is chosen for their number rounded up, so that there are few choices.
    Tokens,
    /// A width of the model.
    Width,
}

/// Several products of one shape.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct StridedBatch {
    pub n: usize,
    /// Elements from one product to the next of a, b and c.
    pub apart: [usize; 3],
}

/// What the algorithm of a product depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ProductShape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Of a and b.
    pub transposed: (bool, bool),
    /// Of a, b and c.
    pub kinds: (ElementType, ElementType, ElementType),
    pub has_bias: bool,
    pub adds: bool,
    pub batch: Option<StridedBatch>,
    /// Elements from one stored row to the next of a, b and c.
    pub strides: [usize; 3],
    /// Elements of which every row of a, b and c begins at a multiple.
    pub aligned: [usize; 3],
}

impl ProductShape {
    /// A product of fewer columns takes the algorithm of this many: without a split of the depth the library's choice
    /// for fewer columns is slow, the more so the deeper the product is.
    fn fewest_columns(self) -> usize {
        let depth = self.k * self.batch.map_or(1, |batch| batch.n);
        if depth > self.m { 128 } else { 64 }
    }

    /// Bytes that the addresses of a, b, c and d are multiples of. An operand may begin at any row of a buffer, so its
    /// alignment is that of a row.
    fn alignments(self) -> [u32; 4] {
        let [a, b, c] = self.aligned;
        let operands = [(a, self.kinds.0), (b, self.kinds.1), (c, self.kinds.2), (c, self.kinds.2)];
        operands.map(|(elements, kind)| ((elements * kind.n_bytes()) as u32).min(16))
    }
}

/// A product as cuBLASLt takes it.
pub(super) struct Prepared {
    pub description: sys::cublasLtMatmulDesc_t,
    /// Of a, b and c.
    pub layouts: [sys::cublasLtMatrixLayout_t; 3],
    /// `None` if the library has no algorithm for the shape.
    pub algorithm: Option<sys::cublasLtMatmulAlgo_t>,
}

/// The library's handle, the products prepared so far, and the addresses of their workspaces.
#[derive(Default)]
pub(super) struct Blas {
    handle: Option<sys::cublasLtHandle_t>,
    /// [`WORKSPACE_BYTES`] for the library.
    pub workspace: Option<u64>,
    /// Memory for the partial sums of split-K.
    pub split_k_workspace: Option<u64>,
    prepared: HashMap<ProductShape, Prepared>,
    /// By the shape with the number of columns rounded up.
    algorithms: HashMap<ProductShape, Option<sys::cublasLtMatmulAlgo_t>>,
}

pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// Products that stay prepared. Micro-batches have ever new numbers of tokens, so without a bound a long run would collect
/// descriptions without end.
const MAX_PREPARED: usize = 4096;

impl Blas {
    pub(super) fn handle(&mut self) -> sys::cublasLtHandle_t {
        *self.handle.get_or_insert_with(|| {
            result::create_handle().unwrap_or_else(|error| refuse("opening cuBLASLt", error))
        })
    }

    pub(super) fn prepare(&mut self, shape: ProductShape, columns: Columns) -> &Prepared {
        if !self.prepared.contains_key(&shape) {
            if self.prepared.len() >= MAX_PREPARED {
                self.prepared.drain().for_each(|(_, prepared)| prepared.destroy());
            }
            let n = match columns {
                Columns::Tokens => shape.n.next_power_of_two().max(shape.fewest_columns()),
                Columns::Width => shape.n,
            };
            let rounded = ProductShape { n, ..shape };
            let handle = self.handle();
            let algorithm = *self.algorithms.entry(rounded).or_insert_with(|| {
                let prepared = Prepared::describe(rounded);
                let algorithm = prepared.choose(handle, rounded);
                prepared.destroy();
                algorithm
            });
            let mut prepared = Prepared::describe(shape);
            prepared.algorithm = algorithm.filter(|algorithm| prepared.accepts(handle, algorithm));
            if prepared.algorithm.is_none() {
                prepared.algorithm = prepared.choose(handle, shape);
            }
            self.prepared.insert(shape, prepared);
        }
        &self.prepared[&shape]
    }

    /// Frees everything; called once, with the context current.
    pub(super) fn close(&mut self) {
        for (_, prepared) in self.prepared.drain() {
            prepared.destroy();
        }
        if let Some(handle) = self.handle.take() {
            // SAFETY: nothing uses the handle any more.
            let _ = unsafe { result::destroy_handle(handle) };
        }
        for address in self.workspace.take().into_iter().chain(self.split_k_workspace.take()) {
            // SAFETY: the allocation was leaked to this and is freed here once.
            let _ = unsafe { cudarc::driver::result::free_sync(address) };
        }
    }
}

/// Fails with cuBLASLt's error. After the device was lost every call ends here.
pub(super) fn refuse<T>(what: impl Display, error: result::CublasError) -> T {
    error::fail(CudaError::reported(what, format_args!("cuBLASLt: {error}"), Code::Other))
}

fn fail<T>(error: result::CublasError) -> T {
    refuse("describing a product", error)
}

fn data_type(kind: ElementType) -> sys::cudaDataType {
    match kind {
        ElementType::Bf16 => sys::cudaDataType::CUDA_R_16BF,
        ElementType::F32 => sys::cudaDataType::CUDA_R_32F,
        _ => panic!("matrix products are of bf16 and f32"),
    }
}

/// Sets the address of the bias of one call; other calls of the same shape have another.
pub(super) fn set_bias(description: sys::cublasLtMatmulDesc_t, address: u64) {
    let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
    set(description, attribute, &address);
}

fn set<T>(description: sys::cublasLtMatmulDesc_t, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) {
    // SAFETY: the description lives; cuBLASLt gets the size of the value and copies it.
    let done = unsafe {
        result::set_matmul_desc_attribute(
            description,
            attribute,
            std::ptr::from_ref(value).cast(),
            size_of::<T>(),
        )
    };
    done.unwrap_or_else(fail);
}

impl Prepared {
    fn describe(shape: ProductShape) -> Prepared {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        use sys::cublasLtMatrixLayoutAttribute_t as Layout;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let description =
            result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F).unwrap_or_else(fail);
        let operation = |transposed: bool| i32::from(transposed);
        set(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(shape.transposed.0));
        set(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(shape.transposed.1));
        if shape.has_bias {
            set(
                description,
                Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE,
                &sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            );
            set(description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &data_type(shape.kinds.2));
        }
        // A column-major matrix [rows, columns] with `stride` elements from column to column.
        let layout = |operand: usize, kind, columns: usize, rows: usize| {
            let stride = shape.strides[operand];
            let layout =
                result::create_matrix_layout(data_type(kind), rows as u64, columns as u64, stride as i64)
                    .unwrap_or_else(fail);
            let set = |attribute, value: *const std::ffi::c_void, n_bytes| {
                // SAFETY: the layout lives; the value has the given size and is copied.
                unsafe { result::set_matrix_layout_attribute(layout, attribute, value, n_bytes) }
                    .unwrap_or_else(fail);
            };
            if let Some(StridedBatch { n, apart }) = shape.batch {
                let (n, apart) = (n as i32, apart[operand] as i64);
                set(Layout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (&raw const n).cast(), 4);
                set(Layout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, (&raw const apart).cast(), 8);
            }
            layout
        };
        let ProductShape { m, n, k, .. } = shape;
        let layouts = [
            if shape.transposed.0 { layout(0, shape.kinds.0, m, k) } else { layout(0, shape.kinds.0, k, m) },
            if shape.transposed.1 { layout(1, shape.kinds.1, k, n) } else { layout(1, shape.kinds.1, n, k) },
            layout(2, shape.kinds.2, n, m),
        ];
        Prepared { description, layouts, algorithm: None }
    }

    /// The library's choice among the algorithms that do not split the depth.
    fn choose(
        &self,
        handle: sys::cublasLtHandle_t,
        shape: ProductShape,
    ) -> Option<sys::cublasLtMatmulAlgo_t> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = result::create_matmul_pref().unwrap_or_else(fail);
        let set = |attribute, value: *const std::ffi::c_void, n_bytes| {
            // SAFETY: the preference lives; the value has the given size and is copied.
            unsafe { result::set_matmul_pref_attribute(preference, attribute, value, n_bytes) }
                .unwrap_or_else(fail);
        };
        let workspace = WORKSPACE_BYTES as u64;
        set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (&raw const workspace).cast(), 8);
        let no_split = 0u32;
        set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (&raw const no_split).cast(), 4);
        let attributes = [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        for (attribute, alignment) in attributes.into_iter().zip(shape.alignments()) {
            set(attribute, (&raw const alignment).cast(), 4);
        }
        let [a, b, c] = self.layouts;
        // SAFETY: all handles live.
        let found =
            unsafe { result::get_matmul_algo_heuristic(handle, self.description, a, b, c, c, preference) };
        // SAFETY: the preference was made above and is destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(preference) };
        found.ok().map(|found| found.algo)
    }

    fn accepts(&self, handle: sys::cublasLtHandle_t, algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
        let [a, b, c] = self.layouts;
        let mut found = std::mem::MaybeUninit::uninit();
        // SAFETY: all handles live; the result is read only where the call succeeded.
        unsafe {
            let status = sys::cublasLtMatmulAlgoCheck(
                handle,
                self.description,
                a,
                b,
                c,
                c,
                algorithm,
                found.as_mut_ptr(),
            );
            status.result().is_ok() && found.assume_init().workspaceSize <= WORKSPACE_BYTES
        }
    }

    fn destroy(self) {
        // SAFETY: `describe` made each of them, and each is destroyed here once.
        unsafe {
            for layout in self.layouts {
                let _ = result::destroy_matrix_layout(layout);
            }
            let _ = result::destroy_matmul_desc(self.description);
        }
    }
}
