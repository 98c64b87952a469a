//! NCCL between GPUs, for moving bytes only: numbers are added elsewhere, in a fixed order. The library is
//! looked for at run time; nothing needs it at build time.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, Mutex};

use super::context::{Cuda, lock};
use super::error::{Code, CudaError};
use super::libraries::{Library, SEARCH_VARIABLE};
use super::nccl_library::{Comm, Functions, ID_BYTES, SUCCESS, Stream, UniqueId, functions};
use super::slice::Slice;
use crate::device::Backend;
use crate::{Device, View, ViewMut};

/// Bytes are moved as bytes.
const UINT8: c_int = 1;
const IN_PROGRESS: c_int = 7;

impl Functions {
    fn check(&self, what: &str, code: c_int) -> Result<(), CudaError> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: the library returns a constant string for every code.
        let text = unsafe { CStr::from_ptr((self.error_text)(code)) }.to_string_lossy();
        Err(CudaError::reported(what, format!("NCCL: {text}"), Code::Other))
    }
}

fn missing() -> CudaError {
    let (name, package) = (Library::Nccl.name(), Library::Nccl.package().unwrap_or_default());
    CudaError::Unavailable(format!(
        "{name} was not found\nhint: pip install {package}, or name its folder in {SEARCH_VARIABLE}"
    ))
}

/// A new id, made by one rank and sent to all.
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

    /// Queues all sends and receives as one group on the stream of `device`, which is this GPU. Between two ranks views
    /// are taken in order. Of weights only the elements that ops read are moved, never their masters.
    pub fn exchange(
        &self,
        device: &Device,
        sends: &[(usize, View<'_, f32>)],
        receives: &[(usize, ViewMut<'_, f32>)],
    ) -> Result<(), CudaError> {
        let Self { functions, comm, .. } = self;
        let Backend::Cuda(cuda) = device.backend() else { panic!("exchange: views of a CPU") };
        let what = "moving numbers between GPUs";
        if *lock(&self.is_aborted) {
            return Err(CudaError::reported(what, "a rank has failed", Code::Other));
        }
        cuda.make_current();
        let stream: Stream = cuda.stream.cast();
        // SAFETY: the group is closed below.
        functions.check(what, unsafe { (functions.group_start)() })?;
        let mut queued = Ok(());
        for (peer, view) in sends {
            let (address, n_bytes) = bytes_of(view.cuda());
            // SAFETY: the view is memory of this GPU that outlives the stream's work: it is freed in the order of the
            // ops, which wait for the exchange before.
            let code = unsafe {
                (functions.send)(address as *const c_void, n_bytes, UINT8, *peer as c_int, *comm, stream)
            };
            queued = queued.and(functions.check(what, code));
        }
        for (peer, view) in receives {
            let (address, n_bytes) = bytes_of(view.cuda());
            // SAFETY: as above, and nothing else writes the view meanwhile.
            let code = unsafe {
                (functions.receive)(address as *mut c_void, n_bytes, UINT8, *peer as c_int, *comm, stream)
            };
            queued = queued.and(functions.check(what, code));
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

    /// Ends all exchanges that are under way, from any thread, so that no rank waits for a lost one.
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

/// The address and the number of bytes of a view's elements.
fn bytes_of(slice: Slice) -> (u64, usize) {
    (slice.address, slice.len * slice.kind.n_bytes())
}
