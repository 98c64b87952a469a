//! Copies from a device to the host while the device computes something else.

use crate::buffer::View;
use crate::cuda::Cuda;
use crate::device::{Backend, Device};
use crate::host::HostBuffer;
use std::sync::Arc;

/// Host memory that elements are copied to during the device's other work: on a GPU the copies have a separate stream.
/// Nothing may write the elements meanwhile, and what wrote them must be done ([`Device::synchronize`]).
pub struct Reader {
    stream: Option<Arc<Cuda>>,
    buffer: HostBuffer,
}

impl Reader {
    /// A reader of at most `n_bytes` at once.
    pub fn new(device: &Device, n_bytes: usize) -> Self {
        let stream = match device.backend() {
            Backend::Cuda(cuda) => Some(cuda.second_stream()),
            Backend::Cpu(_) => None,
        };
        Self { stream, buffer: HostBuffer::new(device, n_bytes) }
    }

    /// The elements as they are stored, and after them their scales, as [`View::copy_stored`] gives them.
    ///
    /// # Panics
    /// If they are more bytes than the reader takes at once.
    pub fn read(&mut self, view: &View<'_, f32>) -> &[u8] {
        let (n_elements, n_scales) = view.n_stored_bytes();
        let to = &mut self.buffer[..n_elements + n_scales];
        let (elements, scales) = to.split_at_mut(n_elements);
        view.copy_stored_on(self.stream.as_deref(), elements, scales);
        to
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CpuOptions;

    #[test]
    fn a_reader_gives_the_bytes_of_a_part() {
        let device = Device::cpu(CpuOptions::default());
        let mut buffer = device.zeros::<f32>(3).unwrap();
        buffer.view_mut().write(&[1.0, 2.5, -3.0]);
        let mut reader = Reader::new(&device, 8);
        let bytes: Vec<u8> = [2.5f32, -3.0].into_iter().flat_map(f32::to_le_bytes).collect();
        assert_eq!(reader.read(&buffer.view().range(1..3)), bytes);
    }
}
