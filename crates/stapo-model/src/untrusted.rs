//! A place to run third-party code on untrusted input.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::Builder;

/// The name of the threads that `on_deep_stack` starts. A panic on such a thread becomes an error of its caller, so the
/// program's panic hook may stay silent about it.
pub const THREAD_NAME: &str = "untrusted";

/// Bytes of stack. The memory is only reserved; the system provides the pages that are touched.
const STACK_BYTES: usize = 256 << 20;

/// Why untrusted work has no result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failed {
    /// The code panicked.
    Panicked,
    /// The system gave no thread for the work; the text is the system's reason.
    NoThread(String),
}

/// Runs `work` on a thread with a stack of 256 MiB. A panic of `work` is an error. An overflow of the stack is not
/// caught: callers bound the depth of their input.
pub fn on_deep_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, Failed> {
    std::thread::scope(|scope| {
        let thread = Builder::new().name(THREAD_NAME.into()).stack_size(STACK_BYTES);
        let running = thread.spawn_scoped(scope, work).map_err(|e| Failed::NoThread(e.to_string()))?;
        running.join().map_err(|_| Failed::Panicked)
    })
}

/// Runs `work` on this thread. A panic of `work` is an error. `work` must leave nothing half-changed that is
/// used after a panic.
pub(crate) fn caught<T>(work: impl FnOnce() -> T) -> Result<T, Failed> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|_| Failed::Panicked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_of_the_caller() {
        assert_eq!(on_deep_stack(|| -> u8 { panic!("on purpose") }), Err(Failed::Panicked));
        assert_eq!(caught(|| -> u8 { panic!("on purpose") }), Err(Failed::Panicked));
        assert_eq!(on_deep_stack(|| 7), Ok(7));
    }

    #[test]
    fn the_stack_is_deep() {
        fn depth(n: u64) -> u64 {
            let frame = std::hint::black_box([n; 128]);
            if n == 0 { frame[0] } else { depth(n - 1) + frame[1] - frame[0] + 1 }
        }
        assert_eq!(on_deep_stack(|| depth(100_000)), Ok(100_000));
    }
}
