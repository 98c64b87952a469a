//! 64-bit Arm: sixteen lanes are four registers.

use std::arch::aarch64::*;

use super::tile::{Fetch, Tile, run_tile};
use super::{Lanes, WIDTH, math};

/// NEON is part of the aarch64 baseline: the token needs no check.
#[derive(Clone, Copy)]
pub struct Neon;

#[derive(Clone, Copy)]
pub struct V([float32x4_t; 4]);

macro_rules! lanewise {
    ($name:ident, $f:ident, $($arg:ident),+) => {
        #[inline(always)]
        fn $name(self, $($arg: V),+) -> V {
            // SAFETY: NEON is part of the aarch64 baseline.
            V(std::array::from_fn(|i| unsafe { $f($($arg.0[i]),+) }))
        }
    };
}

impl Lanes for Neon {
    type E = f32;
    type V = V;
    const TILE_ROWS: usize = 6;
    const TILE_VECTORS: usize = 1;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        // SAFETY: NEON is part of the aarch64 baseline.
        V([unsafe { vdupq_n_f32(x) }; 4])
    }
    #[inline(always)]
    fn load(self, from: &[f32; WIDTH]) -> V {
        // SAFETY: an array of sixteen is readable.
        unsafe { self.load_ptr(from.as_ptr()) }
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; WIDTH], v: V) {
        // SAFETY: an array of sixteen is writable.
        unsafe { self.store_ptr(to.as_mut_ptr(), v) }
    }
    #[inline(always)]
    unsafe fn load_ptr(self, from: *const f32) -> V {
        // SAFETY: the caller vouches for sixteen readable elements.
        V(std::array::from_fn(|i| unsafe { vld1q_f32(from.add(4 * i)) }))
    }
    #[inline(always)]
    unsafe fn store_ptr(self, to: *mut f32, v: V) {
        for i in 0..4 {
            // SAFETY: the caller vouches for sixteen writable elements.
            unsafe { vst1q_f32(to.add(4 * i), v.0[i]) };
        }
    }
    lanewise!(add, vaddq_f32, a, b);
    lanewise!(sub, vsubq_f32, a, b);
    lanewise!(mul, vmulq_f32, a, b);
    lanewise!(div, vdivq_f32, a, b);
    lanewise!(sqrt, vsqrtq_f32, a);
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        // SAFETY: NEON is part of the aarch64 baseline.
        V(std::array::from_fn(|i| unsafe { vfmaq_f32(c.0[i], a.0[i], b.0[i]) }))
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        self.select_lt(b, a, a, b)
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        self.select_lt(a, b, a, b)
    }
    #[inline(always)]
    fn select_lt(self, a: V, b: V, yes: V, no: V) -> V {
        // SAFETY: NEON is part of the aarch64 baseline.
        V(std::array::from_fn(|i| unsafe { vbslq_f32(vcltq_f32(a.0[i], b.0[i]), yes.0[i], no.0[i]) }))
    }
    #[inline(always)]
    fn exp(self, a: V) -> V {
        math::exp_f32(self, a)
    }
    unsafe fn tile_and_fetch(self, tile: &Tile<f32>, fetch: &mut Fetch<f32>) {
        // SAFETY: passed on from the caller.
        unsafe { run_tile::<_, 6, 1>(self, tile, fetch) }
    }
}

impl math::Scale2 for Neon {
    #[inline(always)]
    fn scale2(self, p: V, shifted: V) -> V {
        // SAFETY: NEON is part of the aarch64 baseline.
        V(std::array::from_fn(|i| unsafe {
            let exponent = vshlq_n_s32::<23>(vreinterpretq_s32_f32(shifted.0[i]));
            vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p.0[i]), exponent))
        }))
    }
}
