//! SHA-256 of what a device stores, in leaves, so that many threads hash at once and each rank hashes what it owns.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::device::Backend;
use crate::{Device, View};

/// The SHA-256 of a leaf.
pub type Digest = [u8; 32];

/// Elements of a leaf. A multiple of the elements that share a scale, so a leaf of an 8-bit form has whole scales.
pub const LEAF: usize = 16_384;

/// The digests of each view's leaves of [`LEAF`] elements, in order: of the bytes that `View::read_stored` gives, those of an
/// 8-bit form's scales as a separate digest after that of their elements. A view that begins where a leaf of the whole
/// begins gives the digests of these leaves. Waits once for all views.
pub fn leaves<'a>(device: &Device, views: impl IntoIterator<Item = View<'a, f32>>) -> Vec<Vec<Digest>> {
    match device.backend() {
        Backend::Cpu(cpu) => views.into_iter().map(|view| cpu::leaves(cpu, view.host())).collect(),
        Backend::Cuda(cuda) => {
            let slices: Vec<_> = views.into_iter().map(|view| view.cuda()).collect();
            cuda::leaves(cuda, &slices)
        }
    }
}
