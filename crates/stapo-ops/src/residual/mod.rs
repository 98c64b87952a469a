//! The residual stream's addition, where it is not fused into a norm (see `rmsnorm::forward_add`).

pub(crate) mod cuda;
#[cfg(test)]
mod tests;

use crate::cpu::{Cpu, Shared};
use crate::device::Backend;
use crate::{Device, Float, View, ViewMut, check};

/// `x += delta`. Its gradient is the identity for both.
pub fn add<T: Float>(device: &Device, x: ViewMut<'_, T>, delta: View<'_, T>) {
    check("residual::add", "delta", delta.len(), x.len());
    match device.backend() {
        Backend::Cpu(cpu) => add_cpu(cpu, x.into_host(), delta.host()),
        Backend::Cuda(cuda) => cuda::add(cuda, x.cuda(), delta.cuda()),
    }
}

fn add_cpu<T: Float>(cpu: &Cpu, x: &mut [T], delta: &[T]) {
    let (len, x) = (x.len(), Shared::new(x));
    cpu.rows(len, 1, |range| {
        // SAFETY: each task has its own range.
        let x = unsafe { x.range(range.clone()) };
        for (x, d) in x.iter_mut().zip(&delta[range]) {
            *x += *d;
        }
    });
}
