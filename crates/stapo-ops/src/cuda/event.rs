//! Points in the work of a stream.

use std::sync::Arc;

use cudarc::driver::result::{event, stream};
use cudarc::driver::sys;

use super::context::Cuda;
use super::error::OrPanic;

/// A point in the work that was queued on a stream.
pub(crate) struct Event {
    cuda: Arc<Cuda>,
    handle: sys::CUevent,
}

// SAFETY: a handle of the driver, which lets any thread use it.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Cuda {
    /// Marks the end of what is queued now.
    pub(crate) fn mark(self: &Arc<Self>) -> Event {
        self.make_current();
        let handle = event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).or_panic("making an event");
        // SAFETY: the event was just made; the stream lives as long as the `Cuda`.
        unsafe { event::record(handle, self.stream) }.or_panic("marking a point of a stream");
        Event { cuda: Arc::clone(self), handle }
    }

    /// Work that is queued from here on begins after the event, whose stream may be another one of the same GPU.
    pub(crate) fn wait_for(&self, event: &Event) {
        self.make_current();
        // SAFETY: stream and event live.
        unsafe {
            stream::wait_event(self.stream, event.handle, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT)
        }
        .or_panic("waiting for a stream");
    }
}

impl Event {
    /// Seconds of the GPU between two events. Waits for both.
    pub(crate) fn seconds_until(&self, later: &Event) -> f64 {
        self.cuda.make_current();
        // SAFETY: both events were recorded with timing.
        let milliseconds = unsafe {
            event::synchronize(self.handle).or_panic("waiting for the GPU");
            event::synchronize(later.handle).or_panic("waiting for the GPU");
            event::elapsed(self.handle, later.handle).or_panic("reading the time of an event")
        };
        f64::from(milliseconds) / 1e3
    }
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Event")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: destroyed once; the driver keeps what queued work still needs. A failure means that the device is lost.
        unsafe {
            let _ = event::destroy(self.handle);
        }
    }
}
