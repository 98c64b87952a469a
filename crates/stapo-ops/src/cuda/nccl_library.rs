//! The functions of NCCL, looked up in the library at run time.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use super::libraries::Library;

pub(super) const SUCCESS: c_int = 0;

/// What all GPUs of a communicator know; one of them makes it.
pub const ID_BYTES: usize = 128;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub [c_char; ID_BYTES]);

pub(super) type Comm = *mut c_void;
pub(super) type Stream = *mut c_void;

/// The functions of the library that are used.
pub(super) struct Functions {
    pub version: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    pub init_rank: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> c_int,
    pub send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Comm, Stream) -> c_int,
    pub receive: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int,
    pub group_start: unsafe extern "C" fn() -> c_int,
    pub group_end: unsafe extern "C" fn() -> c_int,
    pub async_error: unsafe extern "C" fn(Comm, *mut c_int) -> c_int,
    pub abort: unsafe extern "C" fn(Comm) -> c_int,
    pub destroy: unsafe extern "C" fn(Comm) -> c_int,
    pub error_text: unsafe extern "C" fn(c_int) -> *const c_char,
}

/// The library; `None` if this machine has none.
pub(super) fn functions() -> Option<&'static Functions> {
    static FOUND: OnceLock<Option<Functions>> = OnceLock::new();
    FOUND.get_or_init(|| Library::Nccl.find().then(|| load(Library::Nccl.handle())).flatten()).as_ref()
}

/// The address of a function of an open library.
fn symbol(handle: *mut c_void, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the handle is open, the name ends in 0.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

#[allow(clippy::missing_transmute_annotations, reason = "each field says the type of its function")]
fn load(handle: *mut c_void) -> Option<Functions> {
    macro_rules! function {
        ($name:literal) => {
            // SAFETY: the library has this function with this signature since version 2.7 (nccl.h).
            unsafe { std::mem::transmute(symbol(handle, $name)?) }
        };
    }
    Some(Functions {
        version: function!(c"ncclGetVersion"),
        unique_id: function!(c"ncclGetUniqueId"),
        init_rank: function!(c"ncclCommInitRank"),
        send: function!(c"ncclSend"),
        receive: function!(c"ncclRecv"),
        group_start: function!(c"ncclGroupStart"),
        group_end: function!(c"ncclGroupEnd"),
        async_error: function!(c"ncclCommGetAsyncError"),
        abort: function!(c"ncclCommAbort"),
        destroy: function!(c"ncclCommDestroy"),
        error_text: function!(c"ncclGetErrorString"),
    })
}

/// The version of NCCL that this machine has, such as 2.28.9.
pub fn nccl_version() -> Option<String> {
    let functions = functions()?;
    let mut version = 0;
    // SAFETY: the function writes one number.
    let code = unsafe { (functions.version)(&raw mut version) };
    (code == SUCCESS).then(|| format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}
