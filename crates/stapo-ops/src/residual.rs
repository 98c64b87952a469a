//! The addition to the residual stream where no norm follows (see `rmsnorm::forward_add`), and constant factors.

pub(crate) mod cuda;
#[cfg(test)]
mod tests;

use crate::cpu::{Cpu, Shared};
use crate::device::Backend;
use crate::{Device, Float, View, ViewMut, check, pitch_of};

/// `x += addend`. The gradient of the sum is the gradient of both.
pub fn add<T: Float>(device: &Device, x: ViewMut<'_, T>, addend: View<'_, T>) {
    check("residual::add", "addend", addend.len(), x.len());
    match device.backend() {
        Backend::Cpu(cpu) => T::residual_add(cpu, x.into_host(), addend.host()),
        Backend::Cuda(cuda) => cuda::add(cuda, x.cuda(), addend.cuda()),
    }
}

/// `x *= factor`. The gradient of the product is the gradient of x times the factor.
pub fn scale<T: Float>(device: &Device, x: ViewMut<'_, T>, factor: f64) {
    match device.backend() {
        Backend::Cpu(cpu) => T::residual_scale(cpu, x.into_host(), factor),
        Backend::Cuda(cuda) => cuda::scale(cuda, x.cuda(), factor),
    }
}

/// Copies rows. Shapes: x `[T, D]`; out `[T, D]`, on a GPU possibly with further columns after each row, which are left as
/// they are.
pub fn copy_rows<T: Float>(device: &Device, tokens: usize, x: View<'_, T>, mut out: ViewMut<'_, T>) {
    let width = x.len() / tokens.max(1);
    let pitch = pitch_of("residual::copy_rows", "out", out.len(), tokens, width);
    match device.backend() {
        Backend::Cuda(cuda) if pitch != width => cuda::copy_rows(cuda, width, x.cuda(), out.cuda(), pitch),
        _ => out.copy_from(x),
    }
}

pub(crate) fn scale_cpu<T: Float>(cpu: &Cpu, x: &mut [T], factor: f64) {
    let (len, factor) = (x.len(), T::from_f64(factor));
    let x = Shared::new(x);
    cpu.rows(len, 1, |range| {
        // SAFETY: each task has its own range.
        unsafe { x.range(range) }.iter_mut().for_each(|x| *x = *x * factor);
    });
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
