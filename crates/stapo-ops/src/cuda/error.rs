//! What can go wrong with a GPU, and what to do then.

use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUresult;

use super::probe::describe;

/// Why a GPU cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// Driver, library or GPU missing: see `Found::obstacle`.
    #[error("device cuda: {0}")]
    Unavailable(String),
    #[error(
        "device cuda:{ordinal}: the driver lists {n_gpus} GPUs, counted from 0\nhint: choose a lower number, or see CUDA_VISIBLE_DEVICES"
    )]
    NoSuchGpu { ordinal: usize, n_gpus: usize },
    #[error("kernels {source}: NVRTC does not compile them for {arch}\n{log}", source = .name)]
    Compile { name: String, arch: String, log: String },
    #[error("device cuda: {what} failed: {error}\nhint: {}", remedy(*.code))]
    Failed { what: String, error: String, code: Code },
}

/// The kinds of failure that ask for different remedies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    OutOfMemory,
    /// The GPU stopped in the middle of work; all its memory is lost.
    Lost,
    Other,
}

fn remedy(code: Code) -> &'static str {
    match code {
        Code::OutOfMemory => {
            "free the GPU's memory, or lower microbatch_tokens, kv memory, or keep less for backward (keep = \"layer_inputs\")"
        }
        Code::Lost => {
            "what was on the GPU is lost; start the command again: a run goes on from its last checkpoint. If it comes back, see nvidia-smi and the kernel log"
        }
        Code::Other => "see nvidia-smi; driver and libraries must fit each other (stapo doctor)",
    }
}

impl CudaError {
    pub(crate) fn failed(what: &str, error: DriverError) -> Self {
        let code = match error.0 {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => Code::OutOfMemory,
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED => Code::Lost,
            _ => Code::Other,
        };
        CudaError::Failed { what: what.to_owned(), error: describe(error), code }
    }
}

/// Ops have no room for an error: a GPU that fails in their midst ends the computation, with the remedy.
pub(crate) trait OrPanic<T> {
    fn or_panic(self, what: &str) -> T;
}

impl<T> OrPanic<T> for Result<T, DriverError> {
    #[track_caller]
    fn or_panic(self, what: &str) -> T {
        self.unwrap_or_else(|error| panic!("{}", CudaError::failed(what, error)))
    }
}
