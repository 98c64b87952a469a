//! Whole-buffer reductions, in an order that does not depend on threads.

mod cpu;
#[cfg(test)]
mod tests;

use crate::{Device, Float, View};

/// The sum of squares: blocks of 4096 elements by sixteen lanes and a fixed tree, the blocks' sums added in f64 in
/// order. The norm of several buffers is the root of their sums added in a fixed order.
pub fn sum_squares<T: Float>(device: &Device, x: View<'_, T>) -> f64 {
    cpu::sum_squares(device.as_cpu(), x.host())
}

/// The index of the first element that is NaN or infinite.
pub fn first_non_finite<T: Float>(device: &Device, x: View<'_, T>) -> Option<usize> {
    cpu::first_non_finite(device.as_cpu(), x.host())
}
