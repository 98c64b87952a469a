//! CUDA graphs: kernels recorded once and replayed as a whole, so that the driver starts hundreds of small kernels
//! without the host.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::context::Cuda;
use super::error::OrPanic;

/// A CUDA graph: kernels with their arguments. All addresses in it must stay valid as long as the graph is replayed.
pub(crate) struct Graph {
    cuda: Arc<Cuda>,
    handle: sys::CUgraphExec,
}

// SAFETY: a handle of the driver, used by one holder at a time.
unsafe impl Send for Graph {}

impl Cuda {
    /// Records what `body` queues. Nothing of it runs before the graph is replayed.
    pub(crate) fn record(self: &Arc<Self>, body: impl FnOnce()) -> Graph {
        self.make_current();
        // In relaxed mode the driver does not refuse calls that are unsafe during a capture. The body makes none: it
        // only queues kernels that ran before, so no module is loaded and no memory allocated.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive, and the capture ends below. If the body panics, the stream answers all later
        // work with an error.
        unsafe { result::stream::begin_capture(self.stream, mode) }.or_panic("recording work");
        body();
        // SAFETY: the capture began above; the graph is destroyed once, after it was instantiated.
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
    /// Queues the recorded kernels.
    pub(crate) fn replay(&self) {
        self.cuda.make_current();
        // SAFETY: graph and stream are alive; the caller of `record` keeps the addresses in the graph valid.
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
        // SAFETY: `record` made the handle, and it is destroyed once; the driver waits for replays under way. A failure
        // means that the device is lost, and the graph with it.
        unsafe {
            let _ = result::ctx::set_current(self.cuda.context);
            let _ = result::graph::exec_destroy(self.handle);
        }
    }
}
