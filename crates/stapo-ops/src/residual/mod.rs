//! The residual stream's addition, where it is not fused into a norm (see `rmsnorm::forward_add`).

#[cfg(test)]
mod tests;

use crate::device::Shared;
use crate::{Device, Float, View, ViewMut, check};

/// `x += delta`. Its gradient is the identity for both.
pub fn add<T: Float>(device: &Device, x: ViewMut<'_, T>, delta: View<'_, T>) {
    check("residual::add", "delta", delta.len(), x.len());
    let (delta, len) = (delta.host(), x.len());
    let x = Shared::new(x.into_host());
    device.as_cpu().rows(len, 1, |range| {
        // SAFETY: each task has its own range.
        let x = unsafe { x.range(range.clone()) };
        for (x, d) in x.iter_mut().zip(&delta[range]) {
            *x += *d;
        }
    });
}
