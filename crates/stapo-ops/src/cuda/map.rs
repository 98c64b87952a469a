//! Matrices as Hopper's copy engine takes them.

use std::mem::MaybeUninit;

use cudarc::driver::sys;

use super::error::OrPanic;
use super::memory::{Kind, Slice};

/// Columns of a tile: 128 bytes, whose pieces are swizzled as the matrix instructions read them.
pub(crate) const TILE_COLUMNS: usize = 64;

/// Where a matrix lies, and how it is cut into tiles.
#[derive(Clone, Copy)]
pub(crate) struct Map(sys::CUtensorMap);

impl Map {
    /// Whether the copy engine takes `matrix` in rows of `columns`.
    pub(crate) fn takes(matrix: Slice, columns: usize) -> bool {
        matrix.kind == Kind::Bf16 && matrix.address.is_multiple_of(16) && columns.is_multiple_of(TILE_COLUMNS)
    }

    /// Shape: matrix `[rows, columns]`. What a tile has beyond the last row is 0.
    pub(crate) fn new(matrix: Slice, rows: usize, columns: usize, tile_rows: usize) -> Map {
        assert!(Self::takes(matrix, columns) && matrix.len == rows * columns, "a map of {rows} x {columns}");
        let (sizes, strides) = ([columns as u64, rows as u64], [2 * columns as u64]);
        let (tile, every) = ([TILE_COLUMNS as u32, tile_rows as u32], [1, 1]);
        let mut map = MaybeUninit::uninit();
        // SAFETY: the arrays have two entries, strides one less; the map is written where the call succeeds.
        unsafe {
            let made = sys::cuTensorMapEncodeTiled(
                map.as_mut_ptr(),
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                2,
                matrix.address as *mut _,
                sizes.as_ptr(),
                strides.as_ptr(),
                tile.as_ptr(),
                every.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            );
            made.result().or_panic("describing a matrix to the copy engine");
            Map(map.assume_init())
        }
    }

    pub(super) fn words(&self) -> [u64; 16] {
        self.0.opaque
    }
}
