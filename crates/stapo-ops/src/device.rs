//! The device that buffers live on and ops run on.

mod mark;
mod name;
mod region;
#[cfg(test)]
mod tests;

pub use mark::Mark;
pub use name::{DeviceName, DeviceNameError};
pub use region::{Region, Tenant};

use std::sync::Arc;

use crate::cpu::simd::{Simd, SimdError};
use crate::cpu::{CACHED_ROWS, Cpu};
use crate::cuda::{Cuda, CudaError, CudaOptions, Graph, KernelUse, Lender, Precision, Training};
use crate::heads::{MAX_GPU_DIM, MAX_NARROW_DIM};

/// A CPU or a GPU: buffers live on it, and ops run on it. Cheap to clone.
#[derive(Clone)]
pub struct Device {
    backend: Arc<Backend>,
    /// Where the memory of activations, gradients, keys and values comes from; by default the GPU itself.
    lender: Option<Lender>,
    /// Whether weights are for an optimizer or only read.
    trains: bool,
}

/// What an op runs on.
pub(crate) enum Backend {
    Cpu(Cpu),
    Cuda(Arc<Cuda>),
}

/// How the CPU is used. No setting changes a bit of any result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuOptions {
    pub threads: usize,
    pub simd: Simd,
}

/// An environment variable with a value that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    #[error("environment variable STAPO_SIMD: {0}")]
    Simd(#[from] SimdError),
    #[error("environment variable STAPO_THREADS: {0:?} is not a number of threads from 1 to {MAX_THREADS}")]
    Threads(String),
}

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenDeviceError {
    #[error(transparent)]
    Option(#[from] OptionError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

const MAX_THREADS: usize = 1024;

impl Default for CpuOptions {
    /// All cores, the fastest instruction set.
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
    /// Panics if this CPU does not support the level; [`Simd::parse`] and [`Simd::best`] give only supported levels.
    pub fn cpu(options: CpuOptions) -> Device {
        assert!(options.simd.is_supported(), "cpu: simd level {} is not supported here", options.simd.name());
        Self::new(Backend::Cpu(Cpu::new(options.threads.clamp(1, MAX_THREADS), options.simd)))
    }

    /// Opens a GPU: loads its libraries, and compiles its kernels or reads them from the cache.
    pub fn cuda(options: CudaOptions) -> Result<Device, CudaError> {
        Ok(Self::new(Backend::Cuda(Cuda::new(options)?)))
    }

    /// Opens a device by its name: a GPU for `training`, or the CPU with `threads` threads; without `threads`, the environment or
    /// the machine gives the number.
    pub fn open(
        name: DeviceName,
        threads: Option<usize>,
        training: Training,
    ) -> Result<Device, OpenDeviceError> {
        match name {
            DeviceName::Cpu => {
                let mut options = CpuOptions::from_env()?;
                options.threads = threads.unwrap_or(options.threads);
                Ok(Self::cpu(options))
            }
            DeviceName::Cuda { ordinal } => {
                Ok(Self::cuda(CudaOptions { ordinal, training, ..CudaOptions::default() })?)
            }
        }
    }

    fn new(backend: Backend) -> Device {
        Device { backend: Arc::new(backend), lender: None, trains: true }
    }

    /// The same device for a model that no optimizer updates: its weights have no exact masters.
    #[must_use]
    pub fn read_only(&self) -> Device {
        Device { trains: false, ..self.clone() }
    }

    /// Threads that share the work of an op on a CPU; 1 on a GPU.
    pub fn threads(&self) -> usize {
        match self.backend() {
            Backend::Cpu(cpu) => cpu.threads(),
            Backend::Cuda(_) => 1,
        }
    }

    /// The instruction set of a CPU. Panics on a GPU.
    pub fn simd(&self) -> Simd {
        self.as_cpu().simd
    }

    /// The device in words, for records and screens.
    pub fn name(&self) -> String {
        match self.backend() {
            Backend::Cpu(cpu) => format!("cpu ({}, {} threads)", cpu.simd.name(), cpu.threads()),
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

    /// The widest head that attention takes; `None` on a CPU, which takes any.
    pub fn max_head_dim(&self) -> Option<usize> {
        let Backend::Cuda(cuda) = self.backend() else { return None };
        Some(if cuda.is_hopper() { MAX_GPU_DIM } else { MAX_NARROW_DIM })
    }

    /// Whether linear layers continue their products over adapters (see `lora`): on Hopper in bf16, for adapters that
    /// `lora::joined_columns` gives columns.
    pub fn joins_adapters(&self) -> bool {
        match self.backend() {
            Backend::Cpu(_) => false,
            Backend::Cuda(cuda) => cuda.is_hopper() && cuda.options.precision == Precision::Bf16,
        }
    }

    /// Whether weights for training have exact masters in addition to what ops read.
    pub fn has_masters(&self) -> bool {
        match self.backend() {
            Backend::Cpu(_) => false,
            Backend::Cuda(cuda) => {
                let is_rounded = cuda.options.precision == Precision::Bf16;
                self.trains && is_rounded && cuda.options.training == Training::F32
            }
        }
    }

    /// Rows to take through several ops before the next rows: as many as stay in a CPU's cache; on a GPU, all.
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

    /// Makes the kernels of a model's parts ready, where a device has such.
    pub fn prepare(&self, parts: &[KernelUse]) {
        if let Backend::Cuda(cuda) = self.backend() {
            cuda.prepare(parts);
        }
    }

    /// Sources of a GPU's kernels, and the seconds in which the host waited for each to be compiled or read, and loaded.
    pub fn kernel_waits(&self) -> Vec<(&'static str, f64)> {
        match self.backend() {
            Backend::Cpu(_) => Vec::new(),
            Backend::Cuda(cuda) => cuda.kernel_waits(),
        }
    }

    /// Waits until all queued ops are done.
    pub fn synchronize(&self) {
        if let Backend::Cuda(cuda) = self.backend() {
            cuda.synchronize();
        }
    }

    /// Whether ops are queued and run asynchronously, so that the host can prepare the next ops meanwhile.
    pub fn is_async(&self) -> bool {
        matches!(self.backend(), Backend::Cuda(_))
    }

    /// Records the ops that `body` calls as a CUDA graph instead of running them; `None` on a CPU. Each op must have
    /// run before at the same sizes, so that its kernels are loaded, and may not allocate memory.
    pub fn record(&self, body: impl FnOnce()) -> Option<Recording> {
        match self.backend() {
            Backend::Cpu(_) => None,
            Backend::Cuda(cuda) => Some(Recording(cuda.record(body))),
        }
    }

    pub(crate) fn backend(&self) -> &Backend {
        &self.backend
    }

    pub(crate) fn lender(&self) -> Option<&Lender> {
        self.lender.as_ref()
    }

    #[track_caller]
    pub(crate) fn as_cpu(&self) -> &Cpu {
        match self.backend() {
            Backend::Cpu(cpu) => cpu,
            Backend::Cuda(_) => panic!("this is a matter of the CPU, and the device is a GPU"),
        }
    }
}

/// A CUDA graph: recorded ops with the addresses of their operands. The caller keeps every buffer of these ops alive as
/// long as the recording is replayed.
#[derive(Debug)]
pub struct Recording(Graph);

impl Recording {
    /// Queues the recorded ops.
    pub fn replay(&self) {
        self.0.replay();
    }
}
