//! Tables of structs in GPU memory, for kernels that work on many buffers in one launch.

use std::sync::Arc;

use super::arguments::Fields;
use super::context::Cuda;
use super::memory::Memory;
use super::slice::ElementType;

/// The structs, one after another; each takes whole words of 8 bytes. The memory may be dropped as soon as the kernel
/// that reads it is queued.
pub(crate) fn upload_table(cuda: &Arc<Cuda>, rows: &[Fields]) -> Memory {
    let words: Vec<u64> = rows.iter().flat_map(Fields::words).copied().collect();
    let memory = Memory::scratch(cuda, words.len(), ElementType::F64);
    cuda.make_current();
    cuda.upload(&words, memory.slice().address);
    memory
}
