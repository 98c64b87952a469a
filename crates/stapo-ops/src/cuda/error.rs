//! What can go wrong with a GPU, and the remedy.

use std::fmt::Display;
use std::panic::AssertUnwindSafe;
use std::sync::{Mutex, PoisonError};

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
            "free the GPU's memory, lower update.microbatch_tokens or rollout.kv_mib, or set update.recompute = \"layers\""
        }
        Code::Lost => {
            "the GPU's memory is lost; start the command again: a run continues from its last checkpoint. If the error returns, see nvidia-smi and the kernel log"
        }
        Code::Other => "see nvidia-smi; driver and libraries must fit each other (stapo doctor)",
    }
}

impl CudaError {
    /// A failure that a library describes in its own words.
    pub(crate) fn reported(what: impl Display, error: impl Display, code: Code) -> Self {
        CudaError::Failed { what: what.to_string(), error: error.to_string(), code }
    }

    pub(crate) fn failed(what: &str, error: DriverError) -> Self {
        let code = match error.0 {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => Code::OutOfMemory,
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED => Code::Lost,
            _ => Code::Other,
        };
        CudaError::Failed { what: what.to_owned(), error: describe(error), code }
    }
}

/// The failure that a panic of this process carries, until [`guard`] takes it.
static FAILURE: Mutex<Option<CudaError>> = Mutex::new(None);

/// Panics with the error, and [`guard`] turns the panic into that error. Ops return no errors, so a GPU that fails
/// during an op ends the computation this way.
#[track_caller]
pub(crate) fn fail(error: CudaError) -> ! {
    let text = error.to_string();
    *FAILURE.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    panic!("{text}")
}

/// Whether a GPU has failed and [`guard`] has not returned the failure yet: the panic under way is that failure.
pub fn is_failing() -> bool {
    FAILURE.lock().unwrap_or_else(PoisonError::into_inner).is_some()
}

/// The result of `body`, or the failure of a GPU during `body`. Any other panic continues.
pub fn guard<R>(body: impl FnOnce() -> R) -> Result<R, CudaError> {
    // The caller drops what the body was changing, so a half-finished change is never seen.
    std::panic::catch_unwind(AssertUnwindSafe(body)).map_err(|payload| {
        let failure = FAILURE.lock().unwrap_or_else(PoisonError::into_inner).take();
        failure.unwrap_or_else(|| std::panic::resume_unwind(payload))
    })
}

pub(crate) trait OrPanic<T> {
    fn or_panic(self, what: &str) -> T;
}

impl<T> OrPanic<T> for Result<T, DriverError> {
    #[track_caller]
    fn or_panic(self, what: &str) -> T {
        self.unwrap_or_else(|error| fail(CudaError::failed(what, error)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_fails_in_the_midst_of_work_is_an_error_and_other_panics_go_on() {
        let lost = || CudaError::reported("waiting for the GPU", "illegal address", Code::Lost);
        let caught = guard(|| fail(lost())).unwrap_err();
        assert_eq!(caught, lost());
        assert!(caught.to_string().contains("continues from its last checkpoint"), "{caught}");
        assert!(!is_failing());
        assert_eq!(guard(|| 3), Ok(3));
        let other = std::panic::catch_unwind(|| guard(|| panic!("a mistake"))).unwrap_err();
        assert_eq!(other.downcast_ref::<&str>(), Some(&"a mistake"));
    }
}
