//! Work recorded once and repeated as a whole: the driver then starts hundreds of small kernels without the host.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::context::Cuda;
use super::error::OrPanic;

/// Queued work with all its addresses, which must stay valid as long as it is repeated.
pub(crate) struct Graph {
    cuda: Arc<Cuda>,
    handle: sys::CUgraphExec,
}

// SAFETY: a handle of the driver, used by one holder at a time.
unsafe impl Send for Graph {}

impl Cuda {
    /// Records what `body` queues; nothing of it is done yet.
    pub(crate) fn record(self: &Arc<Self>, body: impl FnOnce()) -> Graph {
        self.make_current();
        // Nothing but this stream is watched: the body only queues kernels that ran before.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive; capture ends below. A body that panics leaves a stream that refuses work, with an
        // error each time.
        unsafe { result::stream::begin_capture(self.stream, mode) }.or_panic("recording work");
        body();
        // SAFETY: capture began above; the graph is destroyed once, after it was made ready to run.
        let handle = unsafe {
            let graph = result::stream::end_capture(self.stream).or_panic("recording work");
            let handle = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            handle.or_panic("preparing recorded work")
        };
        Graph { cuda: Arc::clone(self), handle }
    }
}

impl Graph {
    /// Queues the recorded work once more.
    pub(crate) fn replay(&self) {
        self.cuda.make_current();
        // SAFETY: graph and stream are alive; whoever recorded keeps the addresses in it valid.
        unsafe { result::graph::launch(self.handle, self.cuda.stream) }.or_panic("repeating recorded work");
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Graph")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `record`, destroyed once; the driver waits for runs under way. A failure means that the device is
        // lost, and the graph with it.
        unsafe {
            let _ = result::ctx::set_current(self.cuda.context);
            let _ = result::graph::exec_destroy(self.handle);
        }
    }
}
