//! What an op needs to run on the CPU: threads, an instruction set, scratch memory, outputs that tasks share.

use std::ops::Range;

use super::pool::Pool;
use super::simd::{Kernel, Real, Simd};
use crate::memory::{LINE, zeroed_vec};

/// The threads and the instruction set that ops use.
pub(crate) struct Cpu {
    pool: Pool,
    pub(crate) simd: Simd,
}

/// Rows of a feed-forward whose activations stay in the cache.
pub(crate) const CACHED_ROWS: usize = 504;
/// Elements that an elementwise op must touch before a second thread is worth waking.
const GRAIN: usize = 16 * 1024;

impl Cpu {
    pub(crate) fn new(threads: usize, simd: Simd) -> Cpu {
        Cpu { pool: Pool::new(threads), simd }
    }

    pub(crate) fn threads(&self) -> usize {
        self.pool.threads()
    }

    pub(crate) fn dispatch<T: Real, K: Kernel<T>>(&self, kernel: K) {
        T::dispatch(self.simd, kernel);
    }

    pub(crate) fn tasks(&self, n_tasks: usize, body: impl Fn(usize) + Sync) {
        self.pool.run(n_tasks, &body);
    }

    /// Divides `0..rows` into ranges and calls `body` once for each; `row_cost` is the number of elements that a row
    /// touches.
    pub(crate) fn rows(&self, rows: usize, row_cost: usize, body: impl Fn(Range<usize>) + Sync) {
        let worth = (rows * row_cost.max(1)).div_ceil(GRAIN);
        let n_tasks = worth.min(4 * self.threads()).min(rows).max(1);
        let per_task = rows.div_ceil(n_tasks);
        self.tasks(n_tasks, |task| {
            let range = task * per_task..((task + 1) * per_task).min(rows);
            if !range.is_empty() {
                body(range);
            }
        });
    }
}

/// Calls `body` with `len` elements of this thread's scratch memory, aligned to a cache line and holding anything.
pub(crate) fn with_scratch<T: Real, R>(len: usize, body: impl FnOnce(&mut [T]) -> R) -> R {
    let padded = len + LINE / size_of::<T>();
    let mut memory = T::scratch().with_borrow_mut(Vec::pop).unwrap_or_default();
    if memory.len() < padded {
        memory =
            zeroed_vec(padded).unwrap_or_else(|| panic!("scratch: {padded} elements could not be allocated"));
    }
    let start = memory.as_ptr().align_offset(LINE);
    let result = body(&mut memory[start..start + len]);
    T::scratch().with_borrow_mut(|pool| pool.push(memory));
    result
}

/// A slice that several tasks write at once, each its own disjoint part.
#[derive(Clone, Copy)]
pub(crate) struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: tasks reach the elements only through `range` and `at`, whose callers keep the parts disjoint.
unsafe impl<T: Send> Sync for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Shared { start: slice.as_mut_ptr(), len: slice.len(), lifetime: std::marker::PhantomData }
    }

    /// # Safety
    /// No other task may hold an overlapping range at the same time.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn range(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "task range {range:?} of {}", self.len);
        // SAFETY: the range lies inside the slice by the assertion, and no other task holds it by the caller's word.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// The address of element `idx`, for matrix kernels that write strided blocks.
    pub(crate) fn at(&self, idx: usize) -> *mut T {
        assert!(idx <= self.len, "task address {idx} of {}", self.len);
        self.start.wrapping_add(idx)
    }
}
