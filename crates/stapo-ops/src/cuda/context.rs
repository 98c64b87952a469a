//! One open GPU: its context, its stream, its kernels, and the state that transfers and products keep between calls.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use cudarc::driver::result::{self, DriverError, ctx, device, mem_pool, primary_ctx, stream};
use cudarc::driver::sys;

use super::blas::Blas;
use super::error::{CudaError, OrPanic, fail};
use super::kernel_cache::{Target, compile_ahead};
use super::kernel_set::{KernelSet, KernelUse, LIKELY_HEAD_DIM};
use super::kernels::{ELEMENTWISE, Source};
use super::libraries::Library;
use super::module::{self, Function};
use super::pinned::Pinned;
use super::probe::{Gpu, gpu, gpus, probe};
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
    /// f32 master weights in addition to the bf16 weights, moments in f32: 14 bytes a weight.
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

pub(crate) struct Cuda {
    device: sys::CUdevice,
    pub(super) context: sys::CUcontext,
    pub(super) stream: sys::CUstream,
    pub(crate) options: CudaOptions,
    pub(crate) gpu: Gpu,
    kernels: KernelSet,
    /// Loaded kernels by the name of their source, their own name and the head dimension.
    functions: Mutex<HashMap<(&'static str, String, usize), Function>>,
    /// Uses whose kernels are compiled ahead.
    prepared: Mutex<HashSet<KernelUse>>,
    /// Threads that compile ahead.
    compilers: Mutex<Vec<JoinHandle<()>>>,
    /// Seconds in which the host waited for the kernels of each source.
    kernel_waits: Mutex<Vec<(&'static str, f64)>>,
    pub(super) blas: Mutex<Blas>,
    /// Pinned blocks that wait for their next use.
    pub(super) pinned: Mutex<Vec<Pinned>>,
    pub(super) signals: Mutex<Signals>,
    /// Whether the last kernel that was queued wrote weights, see `Launch::writes_weights`.
    pub(super) wrote_weights: AtomicBool,
}

// SAFETY: the handles are the driver's, and the driver lets any thread use them; mutexes guard what changes.
unsafe impl Send for Cuda {}
// SAFETY: as above.
unsafe impl Sync for Cuda {}

impl Cuda {
    pub(crate) fn new(options: CudaOptions) -> Result<Arc<Cuda>, CudaError> {
        // Compiling begins before cuBLASLt, a large library, is read from disk and before the context is there.
        let compilers = Self::compile_likely(options);
        let found = probe();
        if let Some(obstacle) = found.obstacle() {
            return Err(CudaError::Unavailable(obstacle));
        }
        if options.ordinal >= found.gpus.len() {
            return Err(CudaError::NoSuchGpu { ordinal: options.ordinal, n_gpus: found.gpus.len() });
        }
        let opened = Self::open(options);
        let cuda = opened.map_err(|error| CudaError::failed("opening the GPU", error))?;
        lock(&cuda.compilers).extend(compilers);
        // The first kernels show whether this GPU can be used; others are loaded when they are first used.
        std::thread::scope(|scope| {
            // cuBLASLt is a large library.
            scope.spawn(|| {
                cuda.make_current();
                lock(&cuda.blas).handle();
            });
            cuda.load(&ELEMENTWISE, 0)
        })?;
        Ok(Arc::new(cuda))
    }

    /// Starts threads that compile what most models use; none where the GPU or the compiler is not found, which [`probe`] reports.
    fn compile_likely(options: CudaOptions) -> Vec<JoinHandle<()>> {
        let gpus = if Library::Driver.find() && Library::Nvrtc.find() {
            gpus().unwrap_or_default()
        } else {
            Vec::new()
        };
        let Some(gpu) = gpus.get(options.ordinal) else { return Vec::new() };
        let kernels = KernelSet::new(gpu.compute_capability, options.precision == Precision::F32);
        let likely = kernels.used_by(KernelUse::Attention { head_dim: LIKELY_HEAD_DIM, is_ruled: false });
        let likely = likely.filter(|_| kernels.is_hopper);
        compile_ahead(kernels.common().chain(likely).collect())
    }

    /// The same GPU with a separate stream. Its kernels are loaded when they are first used.
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
        let kernels = KernelSet::new(gpu.compute_capability, options.precision == Precision::F32);
        Ok(Cuda {
            device,
            context,
            stream,
            options,
            gpu,
            kernels,
            functions: Mutex::default(),
            prepared: Mutex::default(),
            compilers: Mutex::default(),
            kernel_waits: Mutex::default(),
            blas: Mutex::default(),
            pinned: Mutex::default(),
            signals: Mutex::default(),
            wrote_weights: AtomicBool::new(false),
        })
    }

    /// Compiles the kernels of the parts of a model ahead of their use, unless the cache has them.
    pub(crate) fn prepare(&self, parts: &[KernelUse]) {
        let mut prepared = lock(&self.prepared);
        let new: Vec<KernelUse> = parts.iter().copied().filter(|part| prepared.insert(*part)).collect();
        let used = new.iter().flat_map(|part| self.kernels.used_by(*part));
        lock(&self.compilers).extend(compile_ahead(used.collect()));
    }

    /// Sources of kernels in the order of their first use, and the seconds in which the host waited for each to be compiled, or
    /// read from the cache, and loaded.
    pub(crate) fn kernel_waits(&self) -> Vec<(&'static str, f64)> {
        lock(&self.kernel_waits).clone()
    }

    /// Makes every kernel of `source` callable.
    fn load(&self, source: &'static Source, head_dim: usize) -> Result<(), CudaError> {
        let start = Instant::now();
        self.make_current();
        let loaded = module::load(&Target { source, arch: self.kernels.arch.clone(), head_dim })?;
        let keyed = loaded.into_iter().map(|(name, function)| ((source.name, name, head_dim), function));
        lock(&self.functions).extend(keyed);
        lock(&self.kernel_waits).push((source.name, start.elapsed().as_secs_f64()));
        Ok(())
    }

    /// A kernel by its name. `head_dim` matters only to sources that are compiled for each head dimension.
    pub(super) fn function(&self, source: &'static Source, name: &str, head_dim: usize) -> Function {
        let head_dim = source.width(head_dim);
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
        self.kernels.is_hopper
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
        // so all of them are freed. A failure cannot be reported to anyone.
        unsafe {
            let _ = ctx::set_current(self.context);
            let _ = stream::synchronize(self.stream);
            // At the end of the process the compiler is unloaded.
            lock(&self.compilers).drain(..).for_each(|compiler| drop(compiler.join()));
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
