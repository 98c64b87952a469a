//! Kernel launches.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use cudarc::driver::result::function;
use cudarc::driver::sys;

use super::arguments::{Argument, Fields};
use super::context::Cuda;
use super::error::OrPanic;
use super::kernels::Source;
use super::module::Function;
use super::tensor_map::TensorMap;

/// The most rows of kernels so short that their start counts, as decode has them.
const SHORT_KERNEL_ROWS: usize = 512;

/// A kernel with its arguments.
pub(crate) struct Launch<'a> {
    cuda: &'a Cuda,
    source: &'static Source,
    name: &'a str,
    head_dim: usize,
    /// All arguments, one after another.
    words: Vec<u64>,
    /// The first word of each argument.
    starts: Vec<usize>,
    is_programmatic: bool,
    wants_most_shared: bool,
    writes_weights: bool,
}

impl Cuda {
    /// Begins a launch of `name` in `source`.
    pub(crate) fn kernel<'a>(&'a self, source: &'static Source, name: &'a str) -> Launch<'a> {
        let words = Vec::with_capacity(48);
        let starts = Vec::with_capacity(24);
        Launch {
            cuda: self,
            source,
            name,
            head_dim: 0,
            words,
            starts,
            is_programmatic: false,
            wants_most_shared: false,
            writes_weights: false,
        }
    }

    /// Whether a kernel for so many rows, which waits for the previous kernel, is a programmatic launch.
    pub(crate) fn launches_ahead(&self, rows: usize) -> bool {
        self.is_hopper() && rows <= SHORT_KERNEL_ROWS
    }
}

impl Launch<'_> {
    /// The head dimension, for sources that are compiled for each.
    pub(crate) fn head_dim(mut self, head_dim: usize) -> Self {
        self.head_dim = head_dim;
        self
    }

    pub(crate) fn arg(mut self, argument: impl Argument) -> Self {
        self.starts.push(self.words.len());
        self.words.push(argument.bits());
        self
    }

    /// A struct that the kernel takes by value.
    pub(crate) fn fields(mut self, fields: &Fields) -> Self {
        self.starts.push(self.words.len());
        self.words.extend(fields.words());
        self
    }

    pub(crate) fn tensor_map(mut self, tensor_map: &TensorMap) -> Self {
        self.starts.push(self.words.len());
        self.words.extend(tensor_map.words());
        self
    }

    /// A struct of as many descriptors as the kernel has room for; a kernel reads those that are given.
    pub(crate) fn tensor_maps<const N: usize>(mut self, maps: &[TensorMap]) -> Self {
        self.starts.push(self.words.len());
        for place in 0..N {
            self.words.extend(maps[place.min(maps.len() - 1)].words());
        }
        self
    }

    /// Programmatic dependent launch: with `is_on` the GPU may start the kernel before the previous kernel of the
    /// stream has ended, as soon as every block of that one has called `launch_dependents` or ended. The start of the
    /// kernel then overlaps with the end of the previous one.
    ///
    /// In return the kernel must call `wait_for_previous_kernel` before its first write, and before it reads anything
    /// that a kernel of the chain of programmatic launches writes, or the kernel in front of that chain. Before that
    /// call the kernel may read weights and the inputs of a step.
    pub(crate) fn programmatic_launch(mut self, is_on: bool) -> Self {
        self.is_programmatic = is_on;
        self
    }

    /// Asks that multiprocessors give shared memory all that the L1 cache can spare, though this kernel needs less: blocks of
    /// another kernel that need more then find room next to this kernel's.
    pub(crate) fn most_shared_memory(mut self) -> Self {
        self.wants_most_shared = true;
        self
    }

    /// Says that the kernel writes what the next ones take for weights. Programmatic launches read weights before the kernel
    /// in front of them has ended, so the next launch is none: it, and all that follow, start when this kernel has ended.
    pub(crate) fn writes_weights(mut self) -> Self {
        self.writes_weights = true;
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
        let n_given = self.starts.len();
        assert!(n_given == n_arguments, "{}: {n_given} arguments, expected {n_arguments}", self.name);
        if shared_bytes > 48 << 10 {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded.
            unsafe { function::set_function_attribute(handle, attribute, shared_bytes as i32) }
                .or_panic(self.name);
        }
        if self.wants_most_shared {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
            // SAFETY: the function is loaded; the value is a percentage.
            unsafe { function::set_function_attribute(handle, attribute, 100) }.or_panic(self.name);
        }
        let follows_weights = cuda.wrote_weights.swap(self.writes_weights, Ordering::Relaxed);
        let is_programmatic = self.is_programmatic && !follows_weights;
        let words = &mut self.words;
        let mut pointers: Vec<*mut c_void> =
            self.starts.iter().map(|start| words[*start..].as_mut_ptr().cast()).collect();
        let mut programmatic = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0] as u32,
            gridDimY: grid[1] as u32,
            gridDimZ: 1,
            blockDimX: threads as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes as u32,
            hStream: cuda.stream,
            attrs: &raw mut programmatic,
            numAttrs: u32::from(is_programmatic),
        };
        // SAFETY: the op gives the arguments that the kernel is declared with; the memory they point to lives until the
        // stream has passed this point; the driver copies arguments and attributes before it returns.
        let launched = unsafe {
            sys::cuLaunchKernelEx(&raw const config, handle, pointers.as_mut_ptr(), std::ptr::null_mut())
                .result()
        };
        launched.or_panic(self.name);
    }
}
