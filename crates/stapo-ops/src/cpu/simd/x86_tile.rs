//! Sixteen steps of depth of the largest AVX-512 tile, instruction by instruction.
//!
//! The compiler broadcasts every element of A into a register: 44 operations for 28 multiply-adds. Where two hardware
//! threads share a core, one thread's half of the front end cannot issue so many in the time of the arithmetic. In this
//! code every second row is broadcast by the multiply-adds themselves, from an address without an index register, so
//! that load and arithmetic stay one operation: 37 operations for 28 multiply-adds.

use std::arch::asm;
use std::arch::x86_64::_mm512_setzero_ps;

use super::WIDTH;
use super::tile::{self, Fetch, Tile, fetch_all, load_c, store_c};
use super::x86_token::Avx512;

pub(super) const ROWS: usize = 14;
pub(super) const VECTORS: usize = 2;

/// The two multiply-adds of a row, with its element of A broadcast to a register first.
macro_rules! by_register {
    ($step:literal, $row:literal, $low:literal, $high:literal) => {
        concat!(
            "vbroadcastss {x}, dword ptr [{a} + {step}*",
            $step,
            " + {row}*",
            $row,
            "]\n",
            "vfmadd231ps {",
            $low,
            "}, {x}, {b0}\n",
            "vfmadd231ps {",
            $high,
            "}, {x}, {b1}\n",
        )
    };
}

/// The two multiply-adds of a row, which broadcast its element of A from memory themselves.
macro_rules! by_memory {
    ($step:literal, $row:literal, $low:literal, $high:literal) => {
        concat!(
            "vfmadd231ps {",
            $low,
            "}, {b0}, dword ptr [{a} + {step}*",
            $step,
            " + {row}*",
            $row,
            "]{{1to16}}\n",
            "vfmadd231ps {",
            $high,
            "}, {b1}, dword ptr [{a} + {step}*",
            $step,
            " + {row}*",
            $row,
            "]{{1to16}}\n",
        )
    };
}

/// One step of depth.
macro_rules! step {
    ($step:literal) => {
        concat!(
            "vmovups {b0}, zmmword ptr [{b}]\n",
            "vmovups {b1}, zmmword ptr [{b} + 64]\n",
            "add {b}, {b_step}\n",
            by_register!($step, 0, "c0", "d0"),
            by_memory!($step, 1, "c1", "d1"),
            by_register!($step, 2, "c2", "d2"),
            by_memory!($step, 3, "c3", "d3"),
            by_register!($step, 4, "c4", "d4"),
            by_memory!($step, 5, "c5", "d5"),
            by_register!($step, 6, "c6", "d6"),
            by_memory!($step, 7, "c7", "d7"),
            by_register!($step, 8, "c8", "d8"),
            by_memory!($step, 9, "c9", "d9"),
            by_register!($step, 10, "c10", "d10"),
            by_memory!($step, 11, "c11", "d11"),
            by_register!($step, 12, "c12", "d12"),
            by_memory!($step, 13, "c13", "d13"),
        )
    };
}

/// `tile::block` for 14 rows of 2 vectors.
///
/// # Safety
/// As for `tile::block`; and the CPU must have AVX-512F.
#[target_feature(enable = "avx2,fma,avx512f")]
pub(super) unsafe fn block<const AR: usize, const AD: usize>(
    l: Avx512,
    t: &Tile<f32>,
    mut a: *const f32,
    mut b: *const f32,
    c: *mut f32,
    fetch: &mut Fetch<f32>,
) {
    let mut acc = [[_mm512_setzero_ps(); VECTORS]; ROWS];
    // SAFETY: all addresses lie inside the blocks described by `Tile`; prefetched ones may lie anywhere. The
    // instructions read A and B and change nothing but their operands.
    unsafe {
        load_c(l, t, c, &mut acc);
        let mut next_c = c.wrapping_add(ROWS * t.c_stride);
        for _ in 0..t.depth / WIDTH {
            fetch_all(l, fetch, &mut next_c, t.c_stride);
            let [
                [c0, d0],
                [c1, d1],
                [c2, d2],
                [c3, d3],
                [c4, d4],
                [c5, d5],
                [c6, d6],
                [c7, d7],
                [c8, d8],
                [c9, d9],
                [c10, d10],
                [c11, d11],
                [c12, d12],
                [c13, d13],
            ] = &mut acc;
            asm!(
                "2:",
                step!(0),
                step!(1),
                step!(2),
                step!(3),
                "add {a}, {step} * 4",
                "dec {left}",
                "jnz 2b",
                a = inout(reg) a,
                b = inout(reg) b,
                left = inout(reg) WIDTH / 4 => _,
                b_step = in(reg) t.b_stride * size_of::<f32>(),
                row = const AR * size_of::<f32>(),
                step = const AD * size_of::<f32>(),
                c0 = inout(zmm_reg) *c0, d0 = inout(zmm_reg) *d0,
                c1 = inout(zmm_reg) *c1, d1 = inout(zmm_reg) *d1,
                c2 = inout(zmm_reg) *c2, d2 = inout(zmm_reg) *d2,
                c3 = inout(zmm_reg) *c3, d3 = inout(zmm_reg) *d3,
                c4 = inout(zmm_reg) *c4, d4 = inout(zmm_reg) *d4,
                c5 = inout(zmm_reg) *c5, d5 = inout(zmm_reg) *d5,
                c6 = inout(zmm_reg) *c6, d6 = inout(zmm_reg) *d6,
                c7 = inout(zmm_reg) *c7, d7 = inout(zmm_reg) *d7,
                c8 = inout(zmm_reg) *c8, d8 = inout(zmm_reg) *d8,
                c9 = inout(zmm_reg) *c9, d9 = inout(zmm_reg) *d9,
                c10 = inout(zmm_reg) *c10, d10 = inout(zmm_reg) *d10,
                c11 = inout(zmm_reg) *c11, d11 = inout(zmm_reg) *d11,
                c12 = inout(zmm_reg) *c12, d12 = inout(zmm_reg) *d12,
                c13 = inout(zmm_reg) *c13, d13 = inout(zmm_reg) *d13,
                b0 = out(zmm_reg) _,
                b1 = out(zmm_reg) _,
                x = out(zmm_reg) _,
                options(nostack, readonly),
            );
        }
        for _ in 0..t.depth % WIDTH {
            tile::step::<_, ROWS, VECTORS, AR>(l, &mut acc, a, b);
            (a, b) = (a.wrapping_add(AD), b.wrapping_add(t.b_stride));
        }
        store_c(l, t, c, &acc);
    }
}
