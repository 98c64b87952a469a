//! Descriptors of matrices for the Tensor Memory Accelerator (TMA), Hopper's copy engine.

use std::mem::MaybeUninit;

use cudarc::driver::sys;

use super::error::OrPanic;
use super::slice::{ElementType, Slice};

/// Columns of a tile: 128 bytes of bf16, which the TMA swizzles as the matrix instructions read them.
pub(crate) const TILE_COLUMNS: usize = 64;

/// A TMA descriptor: where a matrix lies, and the tiles it is read in.
#[derive(Clone, Copy)]
pub(crate) struct TensorMap(sys::CUtensorMap);

impl TensorMap {
    /// Whether the TMA can read `matrix` in rows of `columns`.
    pub(crate) fn fits(matrix: Slice, columns: usize) -> bool {
        matrix.kind == ElementType::Bf16
            && matrix.address.is_multiple_of(16)
            && columns.is_multiple_of(TILE_COLUMNS)
    }

    /// Shape: matrix `[rows, columns]`. The TMA fills the rows of a tile beyond the last row with 0.
    pub(crate) fn new(matrix: Slice, rows: usize, columns: usize, tile_rows: usize) -> TensorMap {
        assert!(Self::fits(matrix, columns) && matrix.len == rows * columns, "a map of {rows} x {columns}");
        Self::of_columns(matrix, rows, (0, columns, columns), tile_rows)
    }

    /// `len` columns from `start` on of a matrix `[rows, of]`; the TMA reads rows and columns beyond their end as 0 and
    /// does not write them.
    pub(crate) fn of_columns(
        matrix: Slice,
        rows: usize,
        (start, len, of): (usize, usize, usize),
        tile_rows: usize,
    ) -> TensorMap {
        let is_aligned = of.is_multiple_of(8) && start.is_multiple_of(8) && matrix.address.is_multiple_of(16);
        let is_inside = start + len <= of && matrix.len == rows * of;
        let is_bf16 = matrix.kind == ElementType::Bf16;
        assert!(is_aligned && is_inside && is_bf16, "columns {start}..{} of {rows} x {of}", start + len);
        let address = matrix.address + 2 * start as u64;
        let sizes = [len as u64, rows as u64];
        let strides = [2 * of as u64];
        let tile = [TILE_COLUMNS as u32, tile_rows as u32];
        let element_strides = [1, 1];
        let mut map = MaybeUninit::uninit();
        // SAFETY: the arrays have two entries, `strides` one less; the map is written where the call succeeds.
        unsafe {
            let encoded = sys::cuTensorMapEncodeTiled(
                map.as_mut_ptr(),
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                2,
                address as *mut _,
                sizes.as_ptr(),
                strides.as_ptr(),
                tile.as_ptr(),
                element_strides.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            );
            encoded.result().or_panic("describing a matrix to the copy engine");
            TensorMap(map.assume_init())
        }
    }

    pub(super) fn words(&self) -> [u64; 16] {
        self.0.opaque
    }
}
