//! NCCL between GPUs, for moving bytes only: whoever adds numbers does so elsewhere, in an order of its own. The library is
//! looked for at run time; nothing needs it at build time.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

use super::context::{Cuda, lock};
use super::error::{Code, CudaError};
use super::libraries::{SEARCH_VARIABLE, folders};
use super::slice::Slice;
use crate::device::Backend;
use crate::{Device, View, ViewMut};

const LIBRARY: &str = "libnccl.so.2";
/// Bytes are moved as bytes.
const UINT8: c_int = 1;
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;

/// What all GPUs of a communicator know; one of them makes it.
pub const ID_BYTES: usize = 128;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([c_char; ID_BYTES]);

type Comm = *mut c_void;
type Stream = *mut c_void;

/// The functions of the library that are used.
struct Functions {
    version: unsafe extern "C" fn(*mut c_int) -> c_int,
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init_rank: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> c_int,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Comm, Stream) -> c_int,
    receive: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    async_error: unsafe extern "C" fn(Comm, *mut c_int) -> c_int,
    abort: unsafe extern "C" fn(Comm) -> c_int,
    destroy: unsafe extern "C" fn(Comm) -> c_int,
    error_text: unsafe extern "C" fn(c_int) -> *const c_char,
}

/// The library; `None` where this machine has none.
fn functions() -> Option<&'static Functions> {
    static FOUND: OnceLock<Option<Functions>> = OnceLock::new();
    FOUND.get_or_init(find).as_ref()
}

fn find() -> Option<Functions> {
    let given = std::env::var_os(SEARCH_VARIABLE);
    let given: Vec<PathBuf> = given.iter().flat_map(std::env::split_paths).collect();
    let beside = folders().into_iter().flat_map(|folder| {
        // Python packages have a folder for each library.
        let package = folder.parent().and_then(std::path::Path::parent).map(|root| root.join("nccl/lib"));
        std::iter::once(folder).chain(package)
    });
    let paths = given.into_iter().map(|folder| folder.join(LIBRARY));
    let paths = paths.chain([PathBuf::from(LIBRARY)]).chain(beside.map(|folder| folder.join(LIBRARY)));
    paths.into_iter().find_map(|path| {
        let path = CString::new(path.as_os_str().as_encoded_bytes()).ok()?;
        // SAFETY: the path is a string that ends in 0; the handle is never closed.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() { None } else { load(handle) }
    })
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

impl Functions {
    fn check(&self, what: &str, code: c_int) -> Result<(), CudaError> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: the library returns a constant string for every code.
        let text = unsafe { CStr::from_ptr((self.error_text)(code)) }.to_string_lossy();
        Err(CudaError::told(what, format!("NCCL: {text}"), Code::Other))
    }
}

/// The version of NCCL that this machine has, such as 2.28.9.
pub fn nccl_version() -> Option<String> {
    let functions = functions()?;
    let mut version = 0;
    // SAFETY: the function writes one number.
    let code = unsafe { (functions.version)(&raw mut version) };
    (code == SUCCESS).then(|| format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}

fn missing() -> CudaError {
    CudaError::Unavailable(format!(
        "{LIBRARY} was not found\nhint: pip install nvidia-nccl-cu13, or name its folder in {SEARCH_VARIABLE}"
    ))
}

/// A new id, made by one rank and told to all.
pub fn unique_id() -> Result<[u8; ID_BYTES], CudaError> {
    let functions = functions().ok_or_else(missing)?;
    let mut id = UniqueId([0; ID_BYTES]);
    // SAFETY: the function fills the id.
    functions.check("making an id for ranks", unsafe { (functions.unique_id)(&raw mut id) })?;
    Ok(id.0.map(|byte| byte as u8))
}

/// The GPUs of several processes, as one of them sees the others.
pub struct Communicator {
    functions: &'static Functions,
    cuda: Arc<Cuda>,
    comm: Comm,
    /// Held while NCCL is asked for errors, since an abort frees what is asked.
    is_aborted: Mutex<bool>,
}

// SAFETY: NCCL lets any thread abort a communicator and ask for its errors; all else happens on one thread at a time,
// because the transport above makes one call after another.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Joins the GPUs of `world` processes that know the id; returns when all have called. `None` on a CPU.
    pub fn join(
        device: &Device,
        id: &[u8; ID_BYTES],
        rank: usize,
        world: usize,
    ) -> Result<Option<Self>, CudaError> {
        let Backend::Cuda(cuda) = device.backend() else { return Ok(None) };
        let functions = functions().ok_or_else(missing)?;
        cuda.make_current();
        let id = UniqueId(id.map(|byte| byte as c_char));
        let mut comm: Comm = std::ptr::null_mut();
        // SAFETY: the context of the GPU is current; the communicator is destroyed or aborted once.
        let code = unsafe { (functions.init_rank)(&raw mut comm, world as c_int, id, rank as c_int) };
        functions.check("joining the GPUs of all ranks", code)?;
        Ok(Some(Self { functions, cuda: Arc::clone(cuda), comm, is_aborted: Mutex::new(false) }))
    }

    /// Queues all sends and receives as one group on the stream of the ops. Between two ranks views are taken in order.
    pub fn exchange(
        &self,
        sends: &[(usize, View<'_, f32>)],
        receives: &[(usize, ViewMut<'_, f32>)],
    ) -> Result<(), CudaError> {
        let Self { functions, cuda, comm, .. } = self;
        let what = "moving numbers between GPUs";
        if *lock(&self.is_aborted) {
            return Err(CudaError::told(what, "a rank has failed", Code::Other));
        }
        cuda.make_current();
        let stream: Stream = cuda.stream.cast();
        // SAFETY: the group is closed below.
        functions.check(what, unsafe { (functions.group_start)() })?;
        let mut queued = Ok(());
        for (peer, view) in sends {
            for (address, n_bytes) in pieces(view.cuda()) {
                // SAFETY: the view is memory of this GPU that outlives the stream's work, since it is freed on the stream.
                let code = unsafe {
                    (functions.send)(address as *const c_void, n_bytes, UINT8, *peer as c_int, *comm, stream)
                };
                queued = queued.and(functions.check(what, code));
            }
        }
        for (peer, view) in receives {
            for (address, n_bytes) in pieces(view.cuda()) {
                // SAFETY: as above, and nothing else writes the view meanwhile.
                let code = unsafe {
                    (functions.receive)(address as *mut c_void, n_bytes, UINT8, *peer as c_int, *comm, stream)
                };
                queued = queued.and(functions.check(what, code));
            }
        }
        // SAFETY: closes the group that was opened above.
        queued.and(functions.check(what, unsafe { (functions.group_end)() }))
    }

    /// What went wrong since the last call, as far as NCCL has noticed.
    pub fn check(&self) -> Result<(), CudaError> {
        let is_aborted = lock(&self.is_aborted);
        if *is_aborted {
            return Ok(());
        }
        let mut code = SUCCESS;
        // SAFETY: the communicator lives, since it is not aborted, and the function writes one number.
        let asked = unsafe { (self.functions.async_error)(self.comm, &raw mut code) };
        self.functions.check("asking NCCL for errors", asked)?;
        if code == IN_PROGRESS { Ok(()) } else { self.functions.check("moving numbers between GPUs", code) }
    }

    /// Ends all exchanges that are under way, from any thread, so that nobody waits for a rank that is gone.
    pub fn abort(&self) {
        if !std::mem::replace(&mut *lock(&self.is_aborted), true) {
            // SAFETY: called once; the communicator is not used for exchanges afterwards.
            unsafe { (self.functions.abort)(self.comm) };
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if !std::mem::replace(&mut *lock(&self.is_aborted), true) {
            self.cuda.make_current();
            // SAFETY: called once, and nothing uses the communicator afterwards.
            unsafe { (self.functions.destroy)(self.comm) };
        }
    }
}

/// The memory of a view: its elements, and the f32 master of weights that have one.
fn pieces(slice: Slice) -> Vec<(u64, usize)> {
    let own = (slice.address, slice.len * slice.kind.n_bytes());
    std::iter::once(own).chain(slice.master.map(|address| (address, 4 * slice.len))).collect()
}
