//! One GPU at work: its stream, its memory, its kernels.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::result::{
    self, DriverError, ctx, device, function, mem_pool, module, primary_ctx, stream,
};
use cudarc::driver::sys;

use super::blas::Blas;
use super::error::{CudaError, OrPanic, fail};
use super::kernels::{SOURCES, Scope, Source, compile_cached};
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
struct Function {
    handle: sys::CUfunction,
    /// Arguments it takes: the driver reads as many, given or not.
    n_arguments: usize,
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
    fn function(&self, source: &Source, name: &str, head_dim: usize) -> Function {
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

    /// Begins a launch of `name` in `source`.
    pub(crate) fn kernel<'a>(&'a self, source: &'static Source, name: &'a str) -> Launch<'a> {
        Launch { cuda: self, source, name, head_dim: 0, arguments: Vec::with_capacity(16) }
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

/// More arguments than any kernel has.
const MAX_ARGUMENTS: usize = 64;

/// How many arguments a loaded kernel takes.
fn n_arguments(function: sys::CUfunction) -> usize {
    let (mut offset, mut n_bytes) = (0, 0);
    // SAFETY: the function is loaded; both numbers are written to live integers. Past the last argument the driver says no.
    let is_there = |index: &usize| unsafe {
        sys::cuFuncGetParamInfo(function, *index, &raw mut offset, &raw mut n_bytes).result().is_ok()
    };
    (0..MAX_ARGUMENTS).take_while(is_there).count()
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A kernel with its arguments.
pub(crate) struct Launch<'a> {
    cuda: &'a Cuda,
    source: &'static Source,
    name: &'a str,
    head_dim: usize,
    arguments: Vec<u64>,
}

/// A kernel's argument as its bits; a kernel that takes fewer reads the low ones.
pub(crate) trait Argument {
    fn bits(self) -> u64;
}

impl Argument for usize {
    fn bits(self) -> u64 {
        self as u64
    }
}
impl Argument for u64 {
    fn bits(self) -> u64 {
        self
    }
}
impl Argument for f32 {
    fn bits(self) -> u64 {
        u64::from(self.to_bits())
    }
}
impl Argument for f64 {
    fn bits(self) -> u64 {
        self.to_bits()
    }
}

impl Launch<'_> {
    pub(crate) fn head_dim(mut self, head_dim: usize) -> Self {
        self.head_dim = head_dim;
        self
    }

    pub(crate) fn arg(mut self, argument: impl Argument) -> Self {
        self.arguments.push(argument.bits());
        self
    }

    /// Queues the kernel. A grid without blocks does nothing.
    pub(crate) fn run(mut self, grid: [usize; 2], threads: usize, shared_bytes: usize) {
        if grid.contains(&0) {
            return;
        }
        let cuda = self.cuda;
        cuda.make_current();
        let Function { handle, n_arguments } = cuda.function(self.source, self.name, self.head_dim);
        let n_given = self.arguments.len();
        assert!(n_given == n_arguments, "{}: {n_given} arguments, expected {n_arguments}", self.name);
        if shared_bytes > 48 << 10 {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded.
            unsafe { function::set_function_attribute(handle, attribute, shared_bytes as i32) }
                .or_panic(self.name);
        }
        let mut pointers: Vec<*mut c_void> =
            self.arguments.iter_mut().map(|bits| std::ptr::from_mut(bits).cast()).collect();
        let (grid, block) = ((grid[0] as u32, grid[1] as u32, 1), (threads as u32, 1, 1));
        // SAFETY: the op gives the arguments that the kernel is declared with, addresses of blocks that live until the
        // stream has passed this point; the driver copies the arguments before it returns.
        let launched = unsafe {
            result::launch_kernel(handle, grid, block, shared_bytes as u32, cuda.stream, &mut pointers)
        };
        launched.or_panic(self.name);
    }
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
