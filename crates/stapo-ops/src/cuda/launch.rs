//! A kernel and its arguments on their way to the GPU.

use std::ffi::c_void;

use cudarc::driver::result::function;
use cudarc::driver::sys;

use super::context::{Cuda, Function};
use super::error::OrPanic;
use super::fields::Fields;
use super::kernels::Source;
use super::map::Map;

/// More arguments than any kernel has.
const MAX_ARGUMENTS: usize = 64;

/// How many arguments a loaded kernel takes.
pub(super) fn n_arguments(function: sys::CUfunction) -> usize {
    let (mut offset, mut n_bytes) = (0, 0);
    // SAFETY: the function is loaded; both numbers are written to live integers. Past the last argument the driver says no.
    let is_there = |index: &usize| unsafe {
        sys::cuFuncGetParamInfo(function, *index, &raw mut offset, &raw mut n_bytes).result().is_ok()
    };
    (0..MAX_ARGUMENTS).take_while(is_there).count()
}

/// A kernel with its arguments.
pub(crate) struct Launch<'a> {
    cuda: &'a Cuda,
    source: &'static Source,
    name: &'a str,
    head_dim: usize,
    /// All arguments, one after another, and where each begins.
    words: Vec<u64>,
    starts: Vec<usize>,
    is_early: bool,
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

impl Cuda {
    /// Begins a launch of `name` in `source`.
    pub(crate) fn kernel<'a>(&'a self, source: &'static Source, name: &'a str) -> Launch<'a> {
        let (words, starts) = (Vec::with_capacity(48), Vec::with_capacity(24));
        Launch { cuda: self, source, name, head_dim: 0, words, starts, is_early: false }
    }
}

impl Launch<'_> {
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

    pub(crate) fn map(mut self, map: &Map) -> Self {
        self.starts.push(self.words.len());
        self.words.extend(map.words());
        self
    }

    /// With `is_on` the kernel may begin once all blocks of the one in front of it have said `let_next_begin`. Until it says
    /// `after_previous` it must write nothing, and read only what no early kernel, nor the one in front of the first of
    /// them, writes: weights, and what a step was given.
    pub(crate) fn early(mut self, is_on: bool) -> Self {
        self.is_early = is_on;
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
        let words = &mut self.words;
        let mut pointers: Vec<*mut c_void> =
            self.starts.iter().map(|start| words[*start..].as_mut_ptr().cast()).collect();
        let mut early = sys::CUlaunchAttribute {
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
            attrs: &raw mut early,
            numAttrs: u32::from(self.is_early),
        };
        // SAFETY: the op gives the arguments that the kernel is declared with, addresses of blocks that live until the
        // stream has passed this point; the driver copies arguments and attributes before it returns.
        let launched = unsafe {
            sys::cuLaunchKernelEx(&raw const config, handle, pointers.as_mut_ptr(), std::ptr::null_mut())
                .result()
        };
        launched.or_panic(self.name);
    }
}
