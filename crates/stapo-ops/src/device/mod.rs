//! Where ops run.

mod name;
#[cfg(test)]
mod tests;

pub use name::{DeviceName, DeviceNameError};

use std::ops::Range;
use std::sync::Arc;

use crate::buffer::{LINE, zeroed_vec};
use crate::cuda::{Cuda, CudaError, CudaOptions, Graph, Precision};
use crate::pool::Pool;
use crate::simd::{Float, Kernel, Simd, SimdError};

/// The place buffers live and ops run. Cheap to clone.
#[derive(Clone)]
pub struct Device(Arc<Kind>);

enum Kind {
    Cpu(Cpu),
    Cuda(Arc<Cuda>),
}

/// What an op turns to.
pub(crate) enum Backend<'a> {
    Cpu(&'a Cpu),
    Cuda(&'a Arc<Cuda>),
}

/// How the CPU is used. Neither setting changes a bit of any result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuOptions {
    pub threads: usize,
    pub simd: Simd,
}

/// An environment variable that cannot be followed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    #[error("environment variable STAPO_SIMD: {0}")]
    Simd(#[from] SimdError),
    #[error("environment variable STAPO_THREADS: {0:?} is not a number of threads from 1 to {MAX_THREADS}")]
    Threads(String),
}

const MAX_THREADS: usize = 1024;

impl Default for CpuOptions {
    /// All cores, the best level.
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        CpuOptions { threads: threads.min(MAX_THREADS), simd: Simd::best() }
    }
}

impl CpuOptions {
    /// The default, changed by the environment variables `STAPO_SIMD` (scalar, avx2, avx512, neon) and
    /// `STAPO_THREADS`.
    pub fn from_env() -> Result<Self, OptionError> {
        let read = |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        Self::parse(read("STAPO_SIMD"), read("STAPO_THREADS"))
    }

    fn parse(simd: Option<String>, threads: Option<String>) -> Result<Self, OptionError> {
        let mut options = Self::default();
        if let Some(name) = simd {
            options.simd = Simd::parse(&name)?;
        }
        if let Some(threads) = threads {
            let parsed = threads.parse().ok().filter(|n| (1..=MAX_THREADS).contains(n));
            options.threads = parsed.ok_or(OptionError::Threads(threads))?;
        }
        Ok(options)
    }
}

impl Device {
    /// Panics if the level is not supported by this CPU; [`Simd::parse`] and [`Simd::best`] give only such levels.
    pub fn cpu(options: CpuOptions) -> Device {
        assert!(options.simd.is_supported(), "cpu: simd level {} is not supported here", options.simd.name());
        let pool = Pool::new(options.threads.clamp(1, MAX_THREADS));
        Device(Arc::new(Kind::Cpu(Cpu { pool, simd: options.simd })))
    }

    /// A GPU, its libraries loaded and its kernels compiled (or found in the cache).
    pub fn cuda(options: CudaOptions) -> Result<Device, CudaError> {
        Ok(Device(Arc::new(Kind::Cuda(Cuda::new(options)?))))
    }

    /// Threads that share an op's work on the CPU; on a GPU, 1.
    pub fn threads(&self) -> usize {
        match self.backend() {
            Backend::Cpu(cpu) => cpu.pool.threads(),
            Backend::Cuda(_) => 1,
        }
    }

    /// The level of a CPU.
    pub fn simd(&self) -> Simd {
        self.as_cpu().simd
    }

    /// The device in words: for records and screens.
    pub fn name(&self) -> String {
        match self.backend() {
            Backend::Cpu(cpu) => format!("cpu ({}, {} threads)", cpu.simd.name(), cpu.pool.threads()),
            Backend::Cuda(cuda) => cuda.gpu.name.clone(),
        }
    }

    /// Bytes of an element of `compute_zeros::<f32>`.
    pub fn compute_bytes(&self) -> usize {
        match self.backend() {
            Backend::Cuda(cuda) if cuda.options.precision == Precision::Bf16 => 2,
            _ => 4,
        }
    }

    /// Rows that are best taken through several ops before the next ones: those that stay in a CPU's cache; on a GPU, all.
    pub fn cached_rows(&self) -> usize {
        match self.backend() {
            Backend::Cpu(_) => CACHED_ROWS,
            Backend::Cuda(_) => usize::MAX,
        }
    }

    /// Free and total bytes of a GPU's memory; `None` on the CPU.
    pub fn memory(&self) -> Option<(usize, usize)> {
        match self.backend() {
            Backend::Cpu(_) => None,
            Backend::Cuda(cuda) => Some(cuda.memory()),
        }
    }

    /// Waits until everything asked of the device is done.
    pub fn synchronize(&self) {
        if let Backend::Cuda(cuda) = self.backend() {
            cuda.synchronize();
        }
    }

    /// Whether ops are queued and done later: the caller may think ahead.
    pub fn works_alone(&self) -> bool {
        matches!(self.backend(), Backend::Cuda(_))
    }

    /// Records the ops that `body` asks for instead of doing them, on a device that works alone; `None` on others, which
    /// have nothing to gain. Each op must have run before at the same sizes, and none may need memory of its own.
    pub fn record(&self, body: impl FnOnce()) -> Option<Recording> {
        match self.backend() {
            Backend::Cpu(_) => None,
            Backend::Cuda(cuda) => Some(Recording(cuda.record(body))),
        }
    }

    pub(crate) fn backend(&self) -> Backend<'_> {
        match &*self.0 {
            Kind::Cpu(cpu) => Backend::Cpu(cpu),
            Kind::Cuda(cuda) => Backend::Cuda(cuda),
        }
    }

    #[track_caller]
    pub(crate) fn as_cpu(&self) -> &Cpu {
        match self.backend() {
            Backend::Cpu(cpu) => cpu,
            Backend::Cuda(_) => panic!("this is a matter of the CPU, and the device is a GPU"),
        }
    }
}

/// Ops with their operands, to be done again and again. Whoever repeats it keeps every buffer in it alive and in place.
#[derive(Debug)]
pub struct Recording(Graph);

impl Recording {
    pub fn replay(&self) {
        self.0.replay();
    }
}

/// The CPU backend's context: threads and instruction set.
pub(crate) struct Cpu {
    pool: Pool,
    simd: Simd,
}

/// Rows of a feed-forward that a CPU's cache holds.
const CACHED_ROWS: usize = 504;
/// Elements an elementwise op must touch before a second thread pays for its waking.
const GRAIN: usize = 16 * 1024;

impl Cpu {
    pub(crate) fn threads(&self) -> usize {
        self.pool.threads()
    }

    pub(crate) fn dispatch<T: Float, K: Kernel<T>>(&self, kernel: K) {
        T::dispatch(self.simd, kernel);
    }

    pub(crate) fn tasks(&self, n_tasks: usize, body: impl Fn(usize) + Sync) {
        self.pool.run(n_tasks, &body);
    }

    /// Cuts `0..rows` into ranges, one call each; `row_cost` is the number of elements a row touches.
    pub(crate) fn rows(&self, rows: usize, row_cost: usize, body: impl Fn(Range<usize>) + Sync) {
        let worth = (rows * row_cost.max(1)).div_ceil(GRAIN);
        let n_tasks = worth.min(4 * self.threads()).min(rows).max(1);
        let per_task = rows.div_ceil(n_tasks);
        self.tasks(n_tasks, |task| {
            let range = task * per_task..((task + 1) * per_task).min(rows);
            if !range.is_empty() {
                body(range);
            }
        });
    }
}

/// Lends `len` elements of scratch memory of this thread, aligned to a cache line, holding anything.
pub(crate) fn with_scratch<T: Float, R>(len: usize, body: impl FnOnce(&mut [T]) -> R) -> R {
    let padded = len + LINE / size_of::<T>();
    let mut memory = T::scratch().with_borrow_mut(Vec::pop).unwrap_or_default();
    if memory.len() < padded {
        memory =
            zeroed_vec(padded).unwrap_or_else(|| panic!("scratch: {padded} elements could not be allocated"));
    }
    let start = memory.as_ptr().align_offset(LINE);
    let result = body(&mut memory[start..start + len]);
    T::scratch().with_borrow_mut(|pool| pool.push(memory));
    result
}

/// A slice that tasks write in disjoint parts.
#[derive(Clone, Copy)]
pub(crate) struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: tasks reach the elements only through the unsafe methods, whose callers keep them disjoint.
unsafe impl<T: Send> Sync for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Shared { start: slice.as_mut_ptr(), len: slice.len(), lifetime: std::marker::PhantomData }
    }

    /// # Safety
    /// No other task may hold an overlapping range at the same time.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn range(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "task range {range:?} of {}", self.len);
        // SAFETY: inside the slice by the assertion; alone by the caller's word.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// The address of element `idx`, for matrix kernels that write strided blocks.
    pub(crate) fn at(&self, idx: usize) -> *mut T {
        assert!(idx <= self.len, "task address {idx} of {}", self.len);
        self.start.wrapping_add(idx)
    }
}
