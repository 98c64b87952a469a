//! Compiled kernels, loaded into the driver.

use cudarc::driver::result::module;
use cudarc::driver::sys;

use super::error::CudaError;
use super::kernel_cache::Target;

/// A loaded kernel.
#[derive(Clone, Copy)]
pub(super) struct Function {
    pub handle: sys::CUfunction,
    /// Number of arguments that the kernel takes. A launch reads that many pointers, however many it was given.
    pub n_arguments: usize,
}

// SAFETY: the handle is the driver's, and the driver lets any thread use it.
unsafe impl Send for Function {}

/// Every kernel of a source with its name. The CUDA context must be current; the module stays loaded for good.
pub(super) fn load(target: &Target) -> Result<Vec<(String, Function)>, CudaError> {
    let failed = |error| CudaError::failed(&format!("loading kernels {}", target.source.name), error);
    let module = target.load(|code| {
        // SAFETY: the code is a whole cubin, by its hash or fresh from the compiler.
        unsafe { module::load_data(code.as_ptr().cast()) }.map_err(failed)
    })?;
    let mut n_functions = 0;
    // SAFETY: the module stays loaded; the driver fills as many handles as it says the module has, and the names live
    // as long as the module.
    unsafe {
        sys::cuModuleGetFunctionCount(&raw mut n_functions, module).result().map_err(failed)?;
        let mut handles = vec![std::ptr::null_mut(); n_functions as usize];
        sys::cuModuleEnumerateFunctions(handles.as_mut_ptr(), n_functions, module)
            .result()
            .map_err(failed)?;
        let named = handles.into_iter().map(|handle| {
            let mut name = std::ptr::null();
            sys::cuFuncGetName(&raw mut name, handle).result().map_err(failed)?;
            let name = std::ffi::CStr::from_ptr(name).to_string_lossy().into_owned();
            Ok((name, Function { handle, n_arguments: n_arguments(handle) }))
        });
        named.collect()
    }
}

/// More arguments than any kernel has.
const MAX_ARGUMENTS: usize = 64;

fn n_arguments(function: sys::CUfunction) -> usize {
    let mut offset = 0;
    let mut n_bytes = 0;
    // SAFETY: the function is loaded, and both numbers are written to live integers. The driver answers an index past
    // the last argument with an error.
    let exists = |index: &usize| unsafe {
        sys::cuFuncGetParamInfo(function, *index, &raw mut offset, &raw mut n_bytes).result().is_ok()
    };
    (0..MAX_ARGUMENTS).take_while(exists).count()
}
