//! One open GPU: its context, its stream, its kernels, and the state that transfers and products keep between calls.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::result::{self, DriverError, ctx, device, mem_pool, primary_ctx, stream};
use cudarc::driver::sys;

use super::blas::Blas;
use super::error::{CudaError, OrPanic, fail};
use super::kernels::{SOURCES, Scope, Source, compile_ahead};
use super::module::{self, Function};
use super::pinned::Pinned;
use super::probe::{Gpu, gpu, probe};
use super::signal::Signals;

/// How weights and activations are stored on the GPU. Sums, log-probabilities, gradients of weights and optimizer state
/// are f32 in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    Bf16,
    /// For tests: the same ops, which agree with the CPU to many digits.
    F32,
}

/// What is stored for an optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Training {
    /// Nothing: weights are only read.
    None,
    /// f32 master weights beside the bf16 weights, moments in f32: 14 bytes a weight.
    F32,
    /// bf16 weights with stochastic rounding, moments in 8 bits with a scale for each 256: 4 bytes a weight.
    EightBit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaOptions {
    /// The driver's number of the GPU.
    pub ordinal: usize,
    pub precision: Precision,
    pub training: Training,
}

impl Default for CudaOptions {
    fn default() -> Self {
        CudaOptions { ordinal: 0, precision: Precision::Bf16, training: Training::F32 }
    }
}

/// The width of a head that most models have.
const LIKELY_HEAD_DIM: usize = 128;

/// The kernels that were loaded together, before their first use.
#[derive(Default)]
struct PreparedKernels {
    /// Of heads of these dimensions.
    dims: HashSet<usize>,
    /// Whether those of adapters were.
    adapters: bool,
}

pub(crate) struct Cuda {
    device: sys::CUdevice,
    pub(super) context: sys::CUcontext,
    pub(super) stream: sys::CUstream,
    pub(crate) options: CudaOptions,
    pub(crate) gpu: Gpu,
    arch: String,
    /// Loaded kernels by the name of their source, their own name and the head dimension.
    functions: Mutex<HashMap<(&'static str, String, usize), Function>>,
    prepared: Mutex<PreparedKernels>,
    pub(super) blas: Mutex<Blas>,
    /// Pinned blocks that wait for their next use.
    pub(super) pinned: Mutex<Vec<Pinned>>,
    pub(super) signals: Mutex<Signals>,
    /// Whether the last kernel that was queued wrote weights, see `Launch::writes_weights`.
    pub(super) wrote_weights: AtomicBool,
}

// SAFETY: the handles are the driver's, and the driver lets any thread use them; what changes is behind mutexes.
unsafe impl Send for Cuda {}
// SAFETY: as above.
unsafe impl Sync for Cuda {}

impl Cuda {
    pub(crate) fn new(options: CudaOptions) -> Result<Arc<Cuda>, CudaError> {
        let found = probe();
        if let Some(obstacle) = found.obstacle() {
            return Err(CudaError::Unavailable(obstacle));
        }
        if options.ordinal >= found.gpus.len() {
            return Err(CudaError::NoSuchGpu { ordinal: options.ordinal, n_gpus: found.gpus.len() });
        }
        let opened = Self::open(options);
        let cuda = opened.map_err(|error| CudaError::failed("opening the GPU", error))?;
        cuda.warm_up()?;
        Ok(Arc::new(cuda))
    }

    /// The same GPU with a stream of its own. Its kernels are loaded when they are first used.
    pub(crate) fn second_stream(&self) -> Arc<Cuda> {
        Arc::new(Self::open(self.options).or_panic("opening a second stream of the GPU"))
    }

    fn open(options: CudaOptions) -> Result<Cuda, DriverError> {
        let device = device::get(options.ordinal as i32)?;
        let gpu = gpu(device)?;
        // SAFETY: the driver listed the device; the context is released when the `Cuda` is dropped.
        let context = unsafe { primary_ctx::retain(device) }?;
        // SAFETY: the context was just retained.
        unsafe { ctx::set_current(context) }?;
        // The pool keeps all memory that is freed to it.
        // SAFETY: the pool is the device's own; the attribute takes a value of 64 bits.
        unsafe {
            let pool = device::get_default_mem_pool(device)?;
            let mut keep = u64::MAX;
            let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            mem_pool::set_attribute(pool, attribute, (&raw mut keep).cast())?;
        }
        let stream = stream::create(stream::StreamKind::NonBlocking)?;
        let (major, minor) = gpu.compute_capability;
        // Hopper's matrix instructions (wgmma) exist only in the architecture-specific target `sm_90a`.
        let arch = format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" });
        Ok(Cuda {
            device,
            context,
            stream,
            options,
            gpu,
            arch,
            functions: Mutex::default(),
            prepared: Mutex::default(),
            blas: Mutex::default(),
            pinned: Mutex::default(),
            signals: Mutex::default(),
            wrote_weights: AtomicBool::new(false),
        })
    }

    /// Compiles, or reads from the cache, all kernels that do not depend on the model. On Hopper, those for [`LIKELY_HEAD_DIM`] are
    /// compiled at the same time, so that a first start does not compile twice in a row.
    fn warm_up(&self) -> Result<(), CudaError> {
        let is_hopper = self.is_hopper() && self.options.precision == Precision::Bf16;
        let is_likely = |source: &&&'static Source| {
            is_hopper && self.is_used(source, LIKELY_HEAD_DIM) && !source.is_of_adapters()
        };
        std::thread::scope(|scope| {
            for source in SOURCES.iter().filter(is_likely) {
                let head_dim = if source.scope.has_width() { LIKELY_HEAD_DIM } else { 0 };
                scope.spawn(move || compile_ahead(source, &self.arch, head_dim));
            }
            self.load_all(SOURCES.iter().filter(|source| source.scope == Scope::Once), 0)
        })
    }

    /// Whether a model with heads of this dimension uses the kernels, adapters aside, from its first step on.
    fn is_used(&self, source: &Source, head_dim: usize) -> bool {
        let is_plain = self.options.precision == Precision::F32;
        let has_hopper_form = self.is_hopper() && !is_plain && source.hopper_dims().contains(&head_dim);
        match source.scope {
            Scope::Once | Scope::HeadDimOnDemand | Scope::HopperOnDemand => false,
            Scope::Hopper | Scope::HopperOnce => has_hopper_form,
            Scope::HeadDim => {
                source.is_of_precision(is_plain) && !(has_hopper_form && source.has_hopper_form())
            }
        }
    }

    /// As [`Cuda::warm_up`], for the kernels that a model with heads of this dimension uses, and its adapters, so that its first step
    /// does not compile them one after the other. A kernel that fails to compile is told of where it is used.
    pub(crate) fn prepare(&self, head_dim: usize, has_adapters: bool) {
        let (of_heads, of_adapters) = {
            let mut prepared = lock(&self.prepared);
            let of_adapters = has_adapters && !prepared.adapters;
            prepared.adapters |= has_adapters;
            (prepared.dims.insert(head_dim), of_adapters)
        };
        let is_hopper = self.is_hopper() && self.options.precision == Precision::Bf16;
        let is_used = |source: &&&'static Source| {
            if source.is_of_adapters() {
                return of_adapters && is_hopper;
            }
            of_heads && self.is_used(source, head_dim)
        };
        let _ = self.load_all(SOURCES.iter().filter(is_used), head_dim);
    }

    /// Loads sources, each on a thread of its own.
    fn load_all<'a>(
        &self,
        sources: impl Iterator<Item = &'a &'static Source>,
        head_dim: usize,
    ) -> Result<(), CudaError> {
        let width = |source: &Source| if source.scope.has_width() { head_dim } else { 0 };
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                sources.map(|source| scope.spawn(move || self.load(source, width(source)))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("compiling does not panic"))
        })
    }

    /// Makes every kernel of `source` callable.
    fn load(&self, source: &Source, head_dim: usize) -> Result<(), CudaError> {
        self.make_current();
        let loaded = module::load(source, &self.arch, head_dim)?;
        let keyed = loaded.into_iter().map(|(name, function)| ((source.name, name, head_dim), function));
        lock(&self.functions).extend(keyed);
        Ok(())
    }

    /// A kernel by its name. `head_dim` matters only to sources that are compiled for each head dimension.
    pub(super) fn function(&self, source: &Source, name: &str, head_dim: usize) -> Function {
        let head_dim = if source.scope.has_width() { head_dim } else { 0 };
        let key = (source.name, name.to_owned(), head_dim);
        if let Some(function) = lock(&self.functions).get(&key) {
            return *function;
        }
        self.load(source, head_dim).unwrap_or_else(|error| fail(error));
        let found = lock(&self.functions).get(&key).copied();
        found.unwrap_or_else(|| panic!("kernels {}: no {name}", source.name))
    }

    /// Whether the GPU has Hopper's matrix instructions (wgmma) and copy engine (TMA).
    pub(crate) fn is_hopper(&self) -> bool {
        self.arch == "sm_90a"
    }

    pub(crate) fn make_current(&self) {
        // SAFETY: the context lives as long as the `Cuda`.
        unsafe { ctx::set_current(self.context) }.or_panic("choosing the GPU");
    }

    /// As [`Cuda::make_current`], where a failure changes nothing.
    pub(super) fn try_make_current(&self) {
        // SAFETY: the context lives as long as the `Cuda`.
        let _ = unsafe { ctx::set_current(self.context) };
    }

    /// Waits until all queued work is done.
    pub(crate) fn synchronize(&self) {
        self.make_current();
        // SAFETY: the stream lives as long as the `Cuda`.
        unsafe { stream::synchronize(self.stream) }.or_panic("waiting for the GPU");
    }

    /// Free and total bytes of the GPU's memory.
    pub(crate) fn memory(&self) -> (usize, usize) {
        self.make_current();
        result::mem_get_info().or_panic("asking for the GPU's memory")
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // SAFETY: nothing uses the stream or the context afterwards. Each allocation holds a reference to the `Cuda`,
        // so all of them are freed. There is nobody to report a failure to.
        unsafe {
            let _ = ctx::set_current(self.context);
            let _ = stream::synchronize(self.stream);
            lock(&self.blas).close();
            lock(&self.signals).close();
            lock(&self.pinned).drain(..).for_each(|pinned| pinned.release());
            let _ = stream::destroy(self.stream);
            let _ = primary_ctx::release(self.device);
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
