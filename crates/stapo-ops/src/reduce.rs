//! Whole-buffer reductions, in an order that does not depend on threads.

pub(crate) mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::device::Backend;
use crate::{Device, Float, View};

/// The sum of squares of several buffers. A block of elements is summed by a fixed tree, the sums of the blocks are
/// added in f64 in order, and so are the sums of the buffers. On the CPU a block has 4096 elements and sixteen lanes.
pub fn sum_squares<'a, T: Float>(device: &Device, buffers: impl IntoIterator<Item = View<'a, T>>) -> f64 {
    match device.backend() {
        Backend::Cpu(cpu) => {
            buffers.into_iter().map(|x| T::square_parts(cpu, x.host()).iter().sum::<f64>()).sum()
        }
        Backend::Cuda(cuda) => {
            let slices: Vec<_> = buffers.into_iter().map(|x| x.cuda()).collect();
            cuda::sum_squares(cuda, &slices)
        }
    }
}

/// For each buffer the sums of squares of its blocks, which [`fold_squares`] adds. A range of a buffer that begins where a
/// block of the whole begins gives the sums of these blocks. Waits once for all buffers.
pub fn square_parts<'a, T: Float>(
    device: &Device,
    buffers: impl IntoIterator<Item = View<'a, T>>,
) -> Vec<Vec<f64>> {
    match device.backend() {
        Backend::Cpu(cpu) => buffers.into_iter().map(|x| T::square_parts(cpu, x.host())).collect(),
        Backend::Cuda(cuda) => {
            let slices: Vec<_> = buffers.into_iter().map(|x| x.cuda()).collect();
            cuda::square_parts(cuda, &slices)
        }
    }
}

/// The sum of squares of several buffers from the sums of their blocks, to the bits of [`sum_squares`].
pub fn fold_squares(device: &Device, parts: &[Vec<f64>]) -> f64 {
    match device.backend() {
        Backend::Cpu(_) => parts.iter().map(|parts| parts.iter().sum::<f64>()).sum(),
        Backend::Cuda(cuda) => cuda::fold_squares(cuda, &parts.concat()),
    }
}

/// True if every element is 0.
pub fn is_zero<T: Float>(device: &Device, x: View<'_, T>) -> bool {
    match device.backend() {
        Backend::Cpu(_) => x.host().iter().all(|x| *x == T::ZERO),
        Backend::Cuda(cuda) => cuda::is_zero(cuda, x.cuda()),
    }
}

/// A hash of all elements of several buffers, by which a change is found; 0 and -0 are the same. The values differ
/// between a CPU and a GPU.
pub fn fingerprint<'a, T: Float>(device: &Device, buffers: impl IntoIterator<Item = View<'a, T>>) -> u64 {
    let sums = match device.backend() {
        Backend::Cpu(cpu) => buffers.into_iter().flat_map(|x| cpu::fingerprints(cpu, x.host())).collect(),
        Backend::Cuda(cuda) => {
            let slices: Vec<_> = buffers.into_iter().map(|x| x.cuda()).collect();
            cuda::fingerprints(cuda, &slices)
        }
    };
    sums.into_iter()
        .fold(0, |hash: u64, sum| (hash ^ sum).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29))
}

/// The index of the first element that is NaN or infinite.
pub fn first_non_finite<T: Float>(device: &Device, x: View<'_, T>) -> Option<usize> {
    match device.backend() {
        Backend::Cpu(cpu) => T::first_non_finite(cpu, x.host()),
        Backend::Cuda(cuda) => cuda::first_non_finite(cuda, x.cuda()),
    }
}

/// True if no element of any buffer is NaN or infinite. Waits once for all buffers.
pub fn are_finite<'a, T: Float>(device: &Device, buffers: impl IntoIterator<Item = View<'a, T>>) -> bool {
    match device.backend() {
        Backend::Cpu(cpu) => buffers.into_iter().all(|x| T::first_non_finite(cpu, x.host()).is_none()),
        Backend::Cuda(cuda) => {
            let slices: Vec<_> = buffers.into_iter().map(|x| x.cuda()).collect();
            cuda::are_finite(cuda, &slices)
        }
    }
}
