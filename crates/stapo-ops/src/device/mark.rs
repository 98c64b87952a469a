//! The order of work on two streams of one GPU, and the time between points in it.

use std::sync::Arc;
use std::time::Instant;

use super::{Backend, Device};
use crate::cuda::Event;

/// A point in the work of a device.
#[derive(Debug)]
pub struct Mark(MarkPoint);

#[derive(Debug)]
enum MarkPoint {
    Cpu(Instant),
    Cuda(Event),
}

impl Mark {
    /// Seconds between two points of one device. Waits for both.
    ///
    /// # Panics
    /// If one is of a CPU and the other of a GPU.
    pub fn seconds_until(&self, later: &Mark) -> f64 {
        match (&self.0, &later.0) {
            (MarkPoint::Cpu(from), MarkPoint::Cpu(to)) => to.duration_since(*from).as_secs_f64(),
            (MarkPoint::Cuda(from), MarkPoint::Cuda(to)) => from.seconds_until(to),
            _ => panic!("seconds_until: marks of different devices"),
        }
    }
}

impl Device {
    /// The same device with a separate queue: a GPU runs its work at the same time as that of this one, and only
    /// [`Device::wait_for`] orders the two. A CPU runs what is called when it is called.
    #[must_use]
    pub fn second_stream(&self) -> Device {
        match self.backend() {
            Backend::Cpu(_) => self.clone(),
            Backend::Cuda(cuda) => {
                Device { backend: Arc::new(Backend::Cuda(cuda.second_stream())), ..self.clone() }
            }
        }
    }

    /// The end of what is queued now.
    pub fn mark(&self) -> Mark {
        Mark(match self.backend() {
            Backend::Cpu(_) => MarkPoint::Cpu(Instant::now()),
            Backend::Cuda(cuda) => MarkPoint::Cuda(cuda.mark()),
        })
    }

    /// What is queued from here on begins after `mark`. The host does not wait.
    pub fn wait_for(&self, mark: &Mark) {
        if let (Backend::Cuda(cuda), MarkPoint::Cuda(event)) = (self.backend(), &mark.0) {
            cuda.wait_for(event);
        }
    }
}
