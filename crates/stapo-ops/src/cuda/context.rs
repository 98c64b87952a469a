//! One GPU at work: its stream, its memory, its kernels.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::result::{self, DriverError, ctx, device, mem_pool, module, primary_ctx, stream};
use cudarc::driver::sys;

use super::blas::Blas;
use super::error::{CudaError, OrPanic, fail};
use super::kernels::{SOURCES, Scope, Source, compile_cached};
use super::launch::n_arguments;
use super::probe::{Gpu, gpu, probe};
use super::transfer::Pinned;
use crate::OutOfMemory;

/// How weights and activations are stored on the GPU. Sums, log-probabilities, gradients of weights and optimizer state
/// are f32 in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    Bf16,
    /// For tests: the same ops, comparable with the CPU to many digits.
    F32,
}

/// What an optimizer finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Training {
    /// Nothing: weights are only read.
    None,
    /// An f32 master beside the bf16 weights, f32 moments: 14 bytes a weight.
    F32,
    /// bf16 weights rounded at random, moments of 8 bits in blocks of 256: 4 bytes a weight.
    EightBit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaOptions {
    /// Which GPU, as the driver counts.
    pub ordinal: usize,
    pub precision: Precision,
    /// What weights and optimizer states are kept in for training.
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
    arch: String,
    functions: Mutex<HashMap<(String, usize), Function>>,
    pub(super) blas: Mutex<Blas>,
    pub(super) pinned: Mutex<Vec<Pinned>>,
}

#[derive(Clone, Copy)]
pub(super) struct Function {
    pub handle: sys::CUfunction,
    /// Arguments it takes: the driver reads as many, given or not.
    pub n_arguments: usize,
}

// SAFETY: handles of the driver, which it lets any thread use; what is ours is behind mutexes.
unsafe impl Send for Cuda {}
// SAFETY: as above.
unsafe impl Sync for Cuda {}
// SAFETY: as above.
unsafe impl Send for Function {}

/// Blocks to keep that are larger than this are asked of the driver one by one; smaller ones come from its pool, which is
/// fast.
const POOLED_BYTES: usize = 32 << 20;

impl Cuda {
    pub(crate) fn new(options: CudaOptions) -> Result<Arc<Cuda>, CudaError> {
        let found = probe();
        if let Some(obstacle) = found.obstacle() {
            return Err(CudaError::Unavailable(obstacle));
        }
        if options.ordinal >= found.gpus.len() {
            return Err(CudaError::NoSuchGpu { ordinal: options.ordinal, n_gpus: found.gpus.len() });
        }
        let made = Self::open(options);
        let cuda = made.map_err(|error| CudaError::failed("opening the GPU", error))?;
        cuda.warm_up()?;
        Ok(Arc::new(cuda))
    }

    fn open(options: CudaOptions) -> Result<Cuda, DriverError> {
        let device = device::get(options.ordinal as i32)?;
        let gpu = gpu(device)?;
        // SAFETY: the device is one the driver listed; the context is released when this is dropped.
        let context = unsafe { primary_ctx::retain(device) }?;
        // SAFETY: the context was just retained.
        unsafe { ctx::set_current(context) }?;
        // SAFETY: the pool is the device's own; the value is the 64 bits that the attribute takes.
        unsafe {
            let pool = device::get_default_mem_pool(device)?;
            let mut keep = u64::MAX;
            let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            mem_pool::set_attribute(pool, attribute, (&raw mut keep).cast())?;
        }
        let stream = stream::create(stream::StreamKind::NonBlocking)?;
        let (major, minor) = gpu.compute_capability;
        // The matrix instructions of Hopper and later stand under the architecture's own name.
        let arch = format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" });
        let (functions, blas, pinned) = (Mutex::default(), Mutex::default(), Mutex::default());
        Ok(Cuda { device, context, stream, options, gpu, arch, functions, blas, pinned })
    }

    /// Compiles, or fetches from the cache, all kernels that do not depend on the model, each on a thread of its own.
    fn warm_up(&self) -> Result<(), CudaError> {
        std::thread::scope(|scope| {
            let shared = SOURCES.iter().filter(|source| source.scope == Scope::Once);
            let threads: Vec<_> = shared.map(|source| scope.spawn(|| self.load(source, 0))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("compiling does not panic"))
        })
    }

    /// Makes every kernel of `source` callable.
    fn load(&self, source: &Source, head_dim: usize) -> Result<(), CudaError> {
        self.make_current();
        let failed = |error| CudaError::failed(&format!("loading kernels {}", source.name), error);
        let module = compile_cached(source, &self.arch, head_dim, |code| {
            // SAFETY: the code is a whole cubin, by its hash or fresh from the compiler.
            unsafe { module::load_data(code.as_ptr().cast()) }.map_err(failed)
        })?;
        let mut n_functions = 0;
        // SAFETY: the module is loaded and stays so; the driver fills as many handles as it says it has, and its names
        // live as long as the module.
        unsafe {
            sys::cuModuleGetFunctionCount(&raw mut n_functions, module).result().map_err(failed)?;
            let mut handles = vec![std::ptr::null_mut(); n_functions as usize];
            sys::cuModuleEnumerateFunctions(handles.as_mut_ptr(), n_functions, module)
                .result()
                .map_err(failed)?;
            for handle in handles {
                let mut name = std::ptr::null();
                sys::cuFuncGetName(&raw mut name, handle).result().map_err(failed)?;
                let name = std::ffi::CStr::from_ptr(name).to_string_lossy().into_owned();
                let function = Function { handle, n_arguments: n_arguments(handle) };
                lock(&self.functions).insert((name, head_dim), function);
            }
        }
        Ok(())
    }

    /// A kernel by its name; `head_dim` is 0 where it does not depend on it.
    pub(super) fn function(&self, source: &Source, name: &str, head_dim: usize) -> Function {
        let head_dim = if source.scope.has_width() { head_dim } else { 0 };
        let key = (name.to_owned(), head_dim);
        if let Some(function) = lock(&self.functions).get(&key) {
            return *function;
        }
        self.load(source, head_dim).unwrap_or_else(|error| fail(error));
        let found = lock(&self.functions).get(&key).copied();
        found.unwrap_or_else(|| panic!("kernels {}: no {name}", source.name))
    }

    /// Whether the matrix instructions of Hopper are there.
    pub(crate) fn is_hopper(&self) -> bool {
        self.arch == "sm_90a"
    }

    pub(crate) fn make_current(&self) {
        // SAFETY: the context lives as long as this.
        unsafe { ctx::set_current(self.context) }.or_panic("choosing the GPU");
    }

    /// Waits until all work is done.
    pub(crate) fn synchronize(&self) {
        self.make_current();
        // SAFETY: the stream lives as long as this.
        unsafe { stream::synchronize(self.stream) }.or_panic("waiting for the GPU");
    }

    /// (free, total) bytes.
    pub(crate) fn memory(&self) -> (usize, usize) {
        self.make_current();
        result::mem_get_info().or_panic("asking for the GPU's memory")
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // SAFETY: nothing uses the stream or the context after this; all memory was given back, for each block holds a
        // reference to this. Failures have nobody to tell.
        unsafe {
            let _ = ctx::set_current(self.context);
            let _ = stream::synchronize(self.stream);
            lock(&self.blas).close();
            self.release_pinned();
            let _ = stream::destroy(self.stream);
            let _ = primary_ctx::release(self.device);
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes on the GPU, given back when dropped.
pub(crate) struct Block {
    pub(crate) cuda: Arc<Cuda>,
    pub(crate) address: u64,
    n_bytes: usize,
    is_pooled: bool,
}

impl std::fmt::Debug for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Block({} bytes)", self.n_bytes)
    }
}

impl Block {
    /// Memory holding anything, to be kept.
    pub(crate) fn new(cuda: &Arc<Cuda>, n_bytes: usize) -> Result<Block, OutOfMemory> {
        Self::ask(cuda, n_bytes, n_bytes <= POOLED_BYTES)
    }

    /// Memory holding anything, soon given back: the pool keeps it for the next who asks.
    pub(crate) fn scratch(cuda: &Arc<Cuda>, n_bytes: usize) -> Result<Block, OutOfMemory> {
        Self::ask(cuda, n_bytes, true)
    }

    fn ask(cuda: &Arc<Cuda>, n_bytes: usize, is_pooled: bool) -> Result<Block, OutOfMemory> {
        let block = |address| Block { cuda: Arc::clone(cuda), address, n_bytes, is_pooled };
        if n_bytes == 0 {
            return Ok(block(0));
        }
        cuda.make_current();
        // SAFETY: the memory is used on this stream only and freed once, by this block's drop.
        let asked = unsafe {
            if is_pooled { result::malloc_async(cuda.stream, n_bytes) } else { result::malloc_sync(n_bytes) }
        };
        match asked {
            Ok(address) => Ok(block(address)),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                Err(OutOfMemory { bytes: n_bytes as u128, device: "the GPU" })
            }
            Err(error) => fail(CudaError::failed("asking for memory", error)),
        }
    }

    /// Leaves the memory to whoever knows its address.
    pub(super) fn leak(mut self) {
        self.address = 0;
    }

    pub(crate) fn zeros(cuda: &Arc<Cuda>, n_bytes: usize) -> Result<Block, OutOfMemory> {
        let block = Block::new(cuda, n_bytes)?;
        if n_bytes > 0 {
            // SAFETY: the block is as long as said.
            unsafe { result::memset_d8_async(block.address, 0, n_bytes, cuda.stream) }
                .or_panic("clearing memory");
        }
        Ok(block)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.address == 0 {
            return;
        }
        // SAFETY: the address is this block's own; freeing in the stream's order, or after the whole stream, lets
        // queued kernels finish first. A failure means that the device is lost: its memory is gone with it.
        unsafe {
            let _ = ctx::set_current(self.cuda.context);
            let _ = if self.is_pooled {
                result::free_async(self.address, self.cuda.stream)
            } else {
                result::free_sync(self.address)
            };
        }
    }
}
