//! Host memory that a device copies to at the speed of its bus.

use crate::cuda::PinnedPieces;
use crate::device::{Backend, Device};
use std::ops::{Deref, DerefMut};

/// The system locks whole pages.
const PAGE: usize = 4096;

/// Threads that let the system make pages.
const PAGE_MAKERS: usize = 8;

/// Bytes of host memory, to be used again and again: for a GPU the pages are locked, which takes longer than a copy to them.
pub struct HostBuffer {
    // Declared before the memory: the pages are unlocked before the memory is given back.
    _pinned: Option<PinnedPieces>,
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl HostBuffer {
    /// Zeros. Pages that cannot be locked are copied to more slowly.
    pub fn new(device: &Device, len: usize) -> Self {
        let mut memory = vec![0; len.next_multiple_of(PAGE) + PAGE];
        if let Backend::Cuda(_) = device.backend() {
            make_pages(&mut memory);
        }
        let start = memory.as_ptr().align_offset(PAGE);
        let pages = &memory[start..start + len.next_multiple_of(PAGE)];
        let pinned = match device.backend() {
            Backend::Cuda(cuda) => Some(PinnedPieces::lock(cuda, pages)),
            Backend::Cpu(_) => None,
        };
        Self { _pinned: pinned, memory, start, len }
    }
}

/// Lets the system make the pages of unwritten memory, by several threads. Otherwise the driver would let the system
/// make them one by one while it locks them, and the driver queues no kernel meanwhile.
fn make_pages(memory: &mut [u8]) {
    std::thread::scope(|scope| {
        for part in memory.chunks_mut(memory.len().div_ceil(PAGE_MAKERS)) {
            scope.spawn(|| part.iter_mut().step_by(PAGE).for_each(|byte| *std::hint::black_box(byte) = 0));
        }
    });
}

impl std::fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostBuffer").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Deref for HostBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }
}

impl DerefMut for HostBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CpuOptions;

    #[test]
    fn a_buffer_begins_on_a_page_and_has_its_length() {
        let mut buffer = HostBuffer::new(&Device::cpu(CpuOptions::default()), 5000);
        assert_eq!((buffer.len(), buffer.as_ptr().align_offset(PAGE)), (5000, 0));
        buffer[4999] = 1;
        assert_eq!(buffer.iter().map(|&byte| usize::from(byte)).sum::<usize>(), 1);
    }
}
