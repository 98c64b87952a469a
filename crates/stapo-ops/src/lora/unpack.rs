//! Adapters joined to quantised weights.

use super::Adapter;
use super::cuda::module_columns;
use crate::device::Backend;
use crate::quantised::UnpackFactors;
use crate::{Device, Float, Weight};

/// Unpacks a quantised weight for the op that follows, with the factors of the adapters that are joined to it. Nothing for
/// other weights.
pub fn unpack<T: Float>(device: &Device, weight: &Weight<T>, adapter: Option<&Adapter<'_, T>>) {
    if let Backend::Cuda(_) = device.backend()
        && weight.is_quantised()
    {
        let factors = adapter.filter(|_| weight.is_joined()).map(|adapter| UnpackFactors {
            rank: adapter.rank(),
            apart: module_columns(adapter),
            b: adapter
                .modules
                .iter()
                .zip(&adapter.b)
                .map(|(module, b)| (b.view().cuda(), module.outputs.start, module.outputs.len))
                .collect(),
            a: weight.joins_gradients().then(|| adapter.a.view().cuda()),
        });
        weight.unpack(device, factors.as_ref());
    }
}
