//! How rows are divided among the blocks of a grid.

use super::context::Cuda;
use super::kernels::ELEMENTWISE;
use super::slice::Slice;

/// Multiprocessors of the GPU that work is cut for where the cut determines bits. Another number costs speed, and cuts that changed
/// with the GPU would change bits.
pub(crate) const MULTIPROCESSORS: usize = 132;

/// Number of blocks that rows are divided among when each block keeps a partial sum: enough to fill the GPU.
pub(crate) fn parts_for(cuda: &Cuda, rows: usize) -> usize {
    (4 * cuda.gpu.multiprocessors as usize).min(rows).max(1)
}

/// `to[j] +=` the sum over rows of parts `[rows, columns]`, in order.
pub(crate) fn add_column_sums(cuda: &Cuda, parts: Slice, rows: usize, to: Slice) {
    let launch = cuda.kernel(&ELEMENTWISE, "column_sums_add").arg(parts).arg(to).arg(rows).arg(to.len);
    launch.run([to.len.div_ceil(32), 1], 256, 0);
}

/// Bytes of a block of [`copy_blocks`] for each block of threads.
const COPIED_BYTES: usize = 1 << 16;

/// Copies each pair's first block over its second. Shape: pairs `[n, 2]`; `blocks` are `n_blocks` of equal length.
pub(crate) fn copy_blocks(cuda: &Cuda, pairs: Slice, blocks: Slice, n_blocks: usize) {
    let n_bytes = blocks.len / n_blocks.max(1) * blocks.kind.n_bytes();
    let launch = cuda.kernel(&ELEMENTWISE, "copy_blocks").arg(pairs).arg(blocks).arg(n_bytes).arg(n_blocks);
    launch.run([pairs.len / 2, n_bytes.div_ceil(COPIED_BYTES)], 256, 0);
}

/// The most blocks in the second dimension of a grid.
const MAX_GRID_ROWS: usize = 65535;

/// Calls `body(first row, number of rows)` for as many rows at a time as a grid takes.
pub(crate) fn for_rows(rows: usize, mut body: impl FnMut(usize, usize)) {
    for start in (0..rows).step_by(MAX_GRID_ROWS) {
        body(start, MAX_GRID_ROWS.min(rows - start));
    }
}
