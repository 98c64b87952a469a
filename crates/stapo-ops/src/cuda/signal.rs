//! Signals: numbers in device memory by which a kernel signals to the next one, which already runs, that something is ready.

/// Signals that are in use at one time at most: kernels of a chain of programmatic launches (see `Launch`) that wait at once.
const N_SIGNALS: usize = 1024;
/// A signal has a line of the L2 cache for itself.
const SIGNAL_BYTES: usize = 128;

/// The signals of a stream; their memory is allocated at the first use.
#[derive(Default)]
pub(super) struct Signals {
    address: Option<u64>,
    n_given: usize,
}

impl Signals {
    /// The address of the next signal. `allocate` gives cleared memory of that many bytes.
    pub(super) fn next(&mut self, allocate: impl FnOnce(usize) -> u64) -> u64 {
        let address = *self.address.get_or_insert_with(|| allocate(N_SIGNALS * SIGNAL_BYTES));
        self.n_given = (self.n_given + 1) % N_SIGNALS;
        address + (self.n_given * SIGNAL_BYTES) as u64
    }

    /// Frees the memory; called once, with the context current.
    pub(super) fn close(&mut self) {
        if let Some(address) = self.address.take() {
            // SAFETY: the allocation was leaked to this and is freed here once.
            let _ = unsafe { cudarc::driver::result::free_sync(address) };
        }
    }
}
