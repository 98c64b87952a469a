//! The addition to the residual stream, where no norm follows (see `rmsnorm::forward_add`).

pub(crate) mod cuda;
#[cfg(test)]
mod tests;

use crate::cpu::{Cpu, Shared};
use crate::device::Backend;
use crate::{Device, Float, View, ViewMut, check};

/// `x += addend`. The gradient of the sum is the gradient of both.
pub fn add<T: Float>(device: &Device, x: ViewMut<'_, T>, addend: View<'_, T>) {
    check("residual::add", "addend", addend.len(), x.len());
    match device.backend() {
        Backend::Cpu(cpu) => T::residual_add(cpu, x.into_host(), addend.host()),
        Backend::Cuda(cuda) => cuda::add(cuda, x.cuda(), addend.cuda()),
    }
}

pub(crate) fn add_cpu<T: Float>(cpu: &Cpu, x: &mut [T], addend: &[T]) {
    let len = x.len();
    let x = Shared::new(x);
    cpu.rows(len, 1, |range| {
        // SAFETY: each task has its own range.
        let x = unsafe { x.range(range.clone()) };
        for (x, y) in x.iter_mut().zip(&addend[range]) {
            *x += *y;
        }
    });
}
