//! Matrix products by cuBLASLt, every element one chain over depth: no split of the depth, so that a row's bits do not
//! depend on how many rows there are. Which tile is used may depend on their number; that the tiles agree is measured
//! (docs/numerics.md) and checked by every training run.

use std::collections::HashMap;
use std::fmt::Display;
use std::sync::Arc;

use cudarc::cublaslt::{result, sys};

use super::context::{Block, Cuda, lock};
use super::error::{self, Code, CudaError};
use super::kernels::ELEMENTWISE;
use super::memory::{Kind, Slice};

/// `c (+)= op(a) op(b)` in column-major order: op(a) `[m, k]`, op(b) `[k, n]`, c `[m, n]`; n counts tokens in forward and
/// in the input's gradient.
pub(crate) struct Product {
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
    /// The depth in so many equal parts, each product by itself: c is `[parts, m, n]` then.
    pub parts: usize,
}

/// What the columns of a product are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Columns {
    /// As many as there happen to be: the kernel is chosen for a round number of them.
    Tokens,
    /// A width of the model.
    Width,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    m: usize,
    n: usize,
    k: usize,
    transposed: (bool, bool),
    kinds: (Kind, Kind, Kind),
    has_bias: bool,
    adds: bool,
    parts: usize,
}

impl Shape {
    /// Fewer columns than this take the kernel of this many: below it the library's choice without a split is a slow one,
    /// and the sooner so the deeper the product is.
    fn fewest_columns(self) -> usize {
        if self.k > self.m { 128 } else { 64 }
    }

    /// Bytes that the addresses of a, b, c and d are multiples of: rows in the midst of a buffer start where a row starts.
    fn alignments(self) -> [u32; 4] {
        let leading = [
            (if self.transposed.0 { self.k } else { self.m }, self.kinds.0),
            (if self.transposed.1 { self.n } else { self.k }, self.kinds.1),
            (self.m, self.kinds.2),
            (self.m, self.kinds.2),
        ];
        leading.map(|(width, kind)| (1 << (width * kind.n_bytes()).trailing_zeros()).min(16))
    }
}

/// A product that was set up before.
struct Ready {
    description: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    /// `None` where the library has none for the shape.
    algorithm: Option<sys::cublasLtMatmulAlgo_t>,
}

#[derive(Default)]
pub(super) struct Blas {
    handle: Option<sys::cublasLtHandle_t>,
    workspace: Option<(u64, usize)>,
    /// Where products in parts lie before they are added up.
    parts: Option<(u64, usize)>,
    ready: HashMap<Shape, Ready>,
    /// By the number of columns rounded up.
    algorithms: HashMap<Shape, Option<sys::cublasLtMatmulAlgo_t>>,
}

const WORKSPACE_BYTES: usize = 32 << 20;
/// More at a time make better products, though fewer would stay in the L2 cache until they are read: 16 MiB cost 0.5 % of a
/// training step, 32 MiB 0.3 %.
pub(crate) const PARTS_BYTES: usize = 128 << 20;

impl Cuda {
    pub(crate) fn product(self: &Arc<Self>, p: &Product) {
        if p.m == 0 || p.n == 0 {
            return;
        }
        self.make_current();
        let shape = Shape {
            m: p.m,
            n: p.n,
            k: p.k,
            transposed: (p.transposed_a, p.transposed_b),
            kinds: (p.a.kind, p.b.kind, p.c.kind),
            has_bias: p.bias.is_some(),
            adds: p.adds,
            parts: p.parts,
        };
        let mut blas = lock(&self.blas);
        let workspace = blas.workspace(self);
        let handle = blas.handle();
        let ready = blas.prepare(shape, p.columns);
        let Some(algorithm) = &ready.algorithm else {
            self.plain_product(p);
            return;
        };
        if let Some(bias) = p.bias {
            set(
                ready.description,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                &bias.address,
            );
        }
        let (alpha, beta) = (1.0f32, if p.adds { 1.0f32 } else { 0.0 });
        let [a, b, c] = ready.layouts;
        // SAFETY: the layouts are those of the slices, whose lengths the op checked; the workspace is as long as said.
        let done = unsafe {
            result::matmul(
                handle,
                ready.description,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                p.a.address as *const _,
                a,
                p.b.address as *const _,
                b,
                p.c.address as *const _,
                c,
                p.c.address as *mut _,
                c,
                std::ptr::from_ref(algorithm),
                workspace as *mut _,
                WORKSPACE_BYTES,
                self.stream.cast(),
            )
        };
        done.unwrap_or_else(|error| refuse(format_args!("a product [{}, {}, {}]", p.m, p.n, p.k), error));
    }

    /// `len` numbers, at most [`PARTS_BYTES`], that hold until the next who asks.
    pub(crate) fn parts(self: &Arc<Self>, len: usize) -> Slice {
        assert!(4 * len <= PARTS_BYTES, "{len} numbers of parts");
        let (address, _) = *lock(&self.blas).parts.get_or_insert_with(|| kept(self, PARTS_BYTES));
        Slice { address, kind: Kind::F32, len, master: None, scales: None }
    }

    /// Odd widths, as only tiny models have them.
    fn plain_product(&self, p: &Product) {
        assert!(p.parts == 1, "a product in parts has widths that cuBLASLt takes");
        let name = format!("product_{}_{}", p.a.name(), p.c.name());
        let launch = self.kernel(&ELEMENTWISE, &name).arg(p.a).arg(p.b).arg(p.c).arg(p.bias);
        let launch = launch.arg(p.m).arg(p.n).arg(p.k);
        let switches = [p.transposed_a, p.transposed_b, p.adds];
        let launch = switches.into_iter().fold(launch, |launch, is_on| launch.arg(usize::from(is_on)));
        launch.run([(p.m * p.n).div_ceil(256), 1], 256, 0);
    }
}

impl Blas {
    fn handle(&mut self) -> sys::cublasLtHandle_t {
        *self.handle.get_or_insert_with(|| {
            result::create_handle().unwrap_or_else(|error| refuse("opening cuBLASLt", error))
        })
    }

    fn workspace(&mut self, cuda: &Arc<Cuda>) -> u64 {
        self.workspace.get_or_insert_with(|| kept(cuda, WORKSPACE_BYTES)).0
    }

    fn prepare(&mut self, shape: Shape, columns: Columns) -> &Ready {
        if !self.ready.contains_key(&shape) {
            let n = match columns {
                Columns::Tokens => shape.n.next_power_of_two().max(shape.fewest_columns()),
                Columns::Width => shape.n,
            };
            let rounded = Shape { n, ..shape };
            let handle = self.handle();
            let algorithm = *self.algorithms.entry(rounded).or_insert_with(|| {
                let ready = Ready::describe(rounded);
                let algorithm = ready.choose(handle, rounded);
                ready.destroy();
                algorithm
            });
            let mut ready = Ready::describe(shape);
            ready.algorithm = algorithm.filter(|algorithm| ready.takes(handle, algorithm));
            if ready.algorithm.is_none() {
                ready.algorithm = ready.choose(handle, shape);
            }
            self.ready.insert(shape, ready);
        }
        &self.ready[&shape]
    }

    /// Gives everything back; called once, with the context current.
    pub(super) fn close(&mut self) {
        for (_, ready) in self.ready.drain() {
            ready.destroy();
        }
        if let Some(handle) = self.handle.take() {
            // SAFETY: nothing uses the handle any more.
            let _ = unsafe { result::destroy_handle(handle) };
        }
        for (address, _) in self.workspace.take().into_iter().chain(self.parts.take()) {
            // SAFETY: the block was leaked by `kept` and is freed here once.
            let _ = unsafe { cudarc::driver::result::free_sync(address) };
        }
    }
}

/// Memory that lives as long as the context, which cannot hold what holds the context.
fn kept(cuda: &Arc<Cuda>, n_bytes: usize) -> (u64, usize) {
    let block = Block::new(cuda, n_bytes);
    let block = block.unwrap_or_else(|error| {
        error::fail(CudaError::told("workspace of products", error, Code::OutOfMemory))
    });
    let address = block.address;
    block.leak();
    (address, n_bytes)
}

/// What cuBLASLt does not do: after a lost device, anything.
fn refuse<T>(what: impl Display, error: result::CublasError) -> T {
    error::fail(CudaError::told(what, format_args!("cuBLASLt: {error}"), Code::Other))
}

fn fail<T>(error: result::CublasError) -> T {
    refuse("describing a product", error)
}

fn data_type(kind: Kind) -> sys::cudaDataType {
    match kind {
        Kind::Bf16 => sys::cudaDataType::CUDA_R_16BF,
        Kind::F32 => sys::cudaDataType::CUDA_R_32F,
        _ => panic!("matrix products are of bf16 and f32"),
    }
}

fn set<T>(description: sys::cublasLtMatmulDesc_t, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) {
    // SAFETY: the description lives; cuBLASLt copies the value, whose size it is told.
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

impl Ready {
    fn describe(shape: Shape) -> Ready {
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
        // A matrix [rows, columns], of which a part has `taken` rows and lies `apart` from the one before.
        let layout = |kind, rows: usize, columns: usize, taken: usize, apart: usize| {
            let layout =
                result::create_matrix_layout(data_type(kind), taken as u64, columns as u64, rows as i64)
                    .unwrap_or_else(fail);
            let set = |attribute, value: *const std::ffi::c_void, n_bytes| {
                // SAFETY: the layout lives; the value has the size said, and is copied.
                unsafe { result::set_matrix_layout_attribute(layout, attribute, value, n_bytes) }
                    .unwrap_or_else(fail);
            };
            let (n_parts, apart) = (shape.parts as i32, apart as i64);
            if n_parts > 1 {
                set(Layout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (&raw const n_parts).cast(), 4);
                set(Layout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, (&raw const apart).cast(), 8);
            }
            layout
        };
        let Shape { m, n, k, .. } = shape;
        let part = k / shape.parts;
        let layouts = [
            if shape.transposed.0 {
                layout(shape.kinds.0, k, m, part, part)
            } else {
                layout(shape.kinds.0, m, part, m, m * part)
            },
            if shape.transposed.1 {
                layout(shape.kinds.1, n, part, n, n * part)
            } else {
                layout(shape.kinds.1, k, n, part, part)
            },
            layout(shape.kinds.2, m, n, m, m * n),
        ];
        Ready { description, layouts, algorithm: None }
    }

    /// The library's choice among the algorithms that do not split the depth.
    fn choose(&self, handle: sys::cublasLtHandle_t, shape: Shape) -> Option<sys::cublasLtMatmulAlgo_t> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = result::create_matmul_pref().unwrap_or_else(fail);
        let set = |attribute, value: *const std::ffi::c_void, n_bytes| {
            // SAFETY: the preference lives; the value has the size said, and is copied.
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
        // SAFETY: made above, destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(preference) };
        found.ok().map(|found| found.algo)
    }

    fn takes(&self, handle: sys::cublasLtHandle_t, algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
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
        // SAFETY: each was made by `describe` and is destroyed here once.
        unsafe {
            for layout in self.layouts {
                let _ = result::destroy_matrix_layout(layout);
            }
            let _ = result::destroy_matmul_desc(self.description);
        }
    }
}
