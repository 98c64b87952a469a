//! x86-64: AVX2 with FMA (sixteen lanes are two registers) and AVX-512F (one register).
#![allow(clippy::wildcard_imports)]

use std::arch::x86_64::*;

use super::tile::{self, Fetch, Tile, run_tile};
use super::x86_token::{Avx2, Avx512};
use super::{Lanes, WIDTH, math, x86_tile};

#[derive(Clone, Copy)]
pub struct V2(__m256, __m256);

#[target_feature(enable = "avx2,fma")]
unsafe fn tile_avx2(l: Avx2, tile: &Tile<f32>, fetch: &mut Fetch<f32>) {
    // SAFETY: passed on from the caller.
    unsafe { run_tile::<_, 6, 1>(l, tile, fetch) }
}

#[target_feature(enable = "avx2,fma,avx512f")]
unsafe fn tile_avx512(l: Avx512, tile: &Tile<f32>, fetch: &mut Fetch<f32>) {
    // SAFETY: passed on from the caller.
    unsafe { run_tile::<_, 14, 2>(l, tile, fetch) }
}

/// The last steps of the summation tree: lane i + lane i+4, then +2, +1.
#[inline(always)]
unsafe fn sum8(v: __m256) -> f32 {
    // SAFETY: callers hold a token, which proves AVX2.
    unsafe {
        let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps::<1>(v, v)))
    }
}

#[inline(always)]
unsafe fn max8(v: __m256) -> f32 {
    // SAFETY: as above.
    unsafe {
        let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_max_ss(v, _mm_shuffle_ps::<1>(v, v)))
    }
}

#[inline(always)]
unsafe fn high_half(v: __m512) -> __m256 {
    // SAFETY: callers hold a token, which proves AVX-512F.
    unsafe { _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v))) }
}

macro_rules! lanewise2 {
    ($name:ident, $f:ident, $($arg:ident),+) => {
        #[inline(always)]
        fn $name(self, $($arg: V2),+) -> V2 {
            // SAFETY: the token proves AVX2 and FMA.
            unsafe { V2($f($($arg.0),+), $f($($arg.1),+)) }
        }
    };
}

impl Lanes for Avx2 {
    type E = f32;
    type V = V2;
    const TILE_ROWS: usize = 6;
    const TILE_VECTORS: usize = 1;

    #[inline(always)]
    fn splat(self, x: f32) -> V2 {
        // SAFETY: the token proves AVX2.
        let v = unsafe { _mm256_set1_ps(x) };
        V2(v, v)
    }
    #[inline(always)]
    fn load(self, from: &[f32; WIDTH]) -> V2 {
        // SAFETY: an array of sixteen is readable.
        unsafe { self.load_ptr(from.as_ptr()) }
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; WIDTH], v: V2) {
        // SAFETY: an array of sixteen is writable.
        unsafe { self.store_ptr(to.as_mut_ptr(), v) }
    }
    #[inline(always)]
    unsafe fn load_ptr(self, from: *const f32) -> V2 {
        // SAFETY: the caller vouches for sixteen readable elements; the token proves AVX2.
        unsafe { V2(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }
    #[inline(always)]
    unsafe fn store_ptr(self, to: *mut f32, v: V2) {
        // SAFETY: the caller vouches for sixteen writable elements; the token proves AVX2.
        unsafe {
            _mm256_storeu_ps(to, v.0);
            _mm256_storeu_ps(to.add(8), v.1);
        }
    }
    lanewise2!(add, _mm256_add_ps, a, b);
    lanewise2!(sub, _mm256_sub_ps, a, b);
    lanewise2!(mul, _mm256_mul_ps, a, b);
    lanewise2!(div, _mm256_div_ps, a, b);
    lanewise2!(sqrt, _mm256_sqrt_ps, a);
    lanewise2!(fma, _mm256_fmadd_ps, a, b, c);
    lanewise2!(max, _mm256_max_ps, a, b);
    lanewise2!(min, _mm256_min_ps, a, b);
    #[inline(always)]
    fn select_lt(self, a: V2, b: V2, yes: V2, no: V2) -> V2 {
        // SAFETY: the token proves AVX2.
        unsafe {
            V2(
                _mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_LT_OQ>(a.0, b.0)),
                _mm256_blendv_ps(no.1, yes.1, _mm256_cmp_ps::<_CMP_LT_OQ>(a.1, b.1)),
            )
        }
    }
    #[inline(always)]
    fn exp(self, a: V2) -> V2 {
        math::exp_f32(self, a)
    }
    #[inline(always)]
    unsafe fn tile_and_fetch(self, tile: &Tile<f32>, fetch: &mut Fetch<f32>) {
        // SAFETY: the token proves AVX2 and FMA; the rest is the caller's.
        unsafe { tile_avx2(self, tile, fetch) }
    }
    #[inline(always)]
    fn prefetch(self, at: *const f32) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[inline(always)]
    fn prefetch_far(self, at: *const f32) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
    }
    #[inline(always)]
    fn sum(self, v: V2) -> f32 {
        // SAFETY: the token proves AVX2.
        unsafe { sum8(_mm256_add_ps(v.0, v.1)) }
    }
    #[inline(always)]
    fn max_lane(self, v: V2) -> f32 {
        // SAFETY: the token proves AVX2.
        unsafe { max8(_mm256_max_ps(v.0, v.1)) }
    }
}

impl math::Scale2 for Avx2 {
    #[inline(always)]
    fn scale2(self, p: V2, shifted: V2) -> V2 {
        // SAFETY: the token proves AVX2.
        unsafe {
            let half = |p, s| {
                let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(s));
                _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent))
            };
            V2(half(p.0, shifted.0), half(p.1, shifted.1))
        }
    }
}

macro_rules! lanewise {
    ($name:ident, $f:ident, $($arg:ident),+) => {
        #[inline(always)]
        fn $name(self, $($arg: __m512),+) -> __m512 {
            // SAFETY: the token proves AVX-512F.
            unsafe { $f($($arg),+) }
        }
    };
}

impl Lanes for Avx512 {
    type E = f32;
    type V = __m512;
    const TILE_ROWS: usize = 14;
    const TILE_VECTORS: usize = 2;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: the token proves AVX-512F.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn load(self, from: &[f32; WIDTH]) -> __m512 {
        // SAFETY: an array of sixteen is readable.
        unsafe { self.load_ptr(from.as_ptr()) }
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; WIDTH], v: __m512) {
        // SAFETY: an array of sixteen is writable.
        unsafe { self.store_ptr(to.as_mut_ptr(), v) }
    }
    #[inline(always)]
    unsafe fn load_ptr(self, from: *const f32) -> __m512 {
        // SAFETY: the caller vouches for sixteen readable elements; the token proves AVX-512F.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store_ptr(self, to: *mut f32, v: __m512) {
        // SAFETY: the caller vouches for sixteen writable elements; the token proves AVX-512F.
        unsafe { _mm512_storeu_ps(to, v) }
    }
    lanewise!(add, _mm512_add_ps, a, b);
    lanewise!(sub, _mm512_sub_ps, a, b);
    lanewise!(mul, _mm512_mul_ps, a, b);
    lanewise!(div, _mm512_div_ps, a, b);
    lanewise!(sqrt, _mm512_sqrt_ps, a);
    lanewise!(fma, _mm512_fmadd_ps, a, b, c);
    lanewise!(max, _mm512_max_ps, a, b);
    lanewise!(min, _mm512_min_ps, a, b);
    #[inline(always)]
    fn select_lt(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        // SAFETY: the token proves AVX-512F.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes) }
    }
    #[inline(always)]
    fn exp(self, a: __m512) -> __m512 {
        math::exp_f32(self, a)
    }
    #[inline(always)]
    unsafe fn tile_and_fetch(self, tile: &Tile<f32>, fetch: &mut Fetch<f32>) {
        // SAFETY: the token proves AVX-512F; the rest is the caller's.
        unsafe { tile_avx512(self, tile, fetch) }
    }
    #[inline(always)]
    unsafe fn block<const R: usize, const V: usize, const AR: usize, const AD: usize>(
        self,
        tile: &Tile<f32>,
        a: *const f32,
        b: *const f32,
        c: *mut f32,
        fetch: &mut Fetch<f32>,
    ) {
        // SAFETY: the token proves AVX-512F; the rest is the caller's.
        unsafe {
            if (R, V) == (x86_tile::ROWS, x86_tile::VECTORS) {
                x86_tile::block::<AR, AD>(self, tile, a, b, c, fetch);
            } else {
                tile::block::<Self, R, V, AR, AD>(self, tile, a, b, c, fetch);
            }
        }
    }
    #[inline(always)]
    fn prefetch(self, at: *const f32) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[inline(always)]
    fn prefetch_far(self, at: *const f32) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
    }
    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        // SAFETY: the token proves AVX-512F, and with it AVX2.
        unsafe { sum8(_mm256_add_ps(_mm512_castps512_ps256(v), high_half(v))) }
    }
    #[inline(always)]
    fn max_lane(self, v: __m512) -> f32 {
        // SAFETY: as above.
        unsafe { max8(_mm256_max_ps(_mm512_castps512_ps256(v), high_half(v))) }
    }
    #[inline(always)]
    fn transpose(self, r: [__m512; WIDTH]) -> [__m512; WIDTH] {
        // Interleaves pairs of rows, then pairs of pairs, within 128-bit quarters; then exchanges the quarters.
        let mut x = r;
        // SAFETY: the token proves AVX-512F.
        unsafe {
            for i in (0..16).step_by(2) {
                x[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
                x[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
            }
            let mut y = x;
            for i in (0..16).step_by(4) {
                let (a, b) = (_mm512_castps_pd(x[i]), _mm512_castps_pd(x[i + 1]));
                let (c, d) = (_mm512_castps_pd(x[i + 2]), _mm512_castps_pd(x[i + 3]));
                y[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
                y[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
                y[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
                y[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
            }
            let mut z = y;
            for i in 0..4 {
                let (a, b) = (y[i], y[i + 4]);
                let (c, d) = (y[i + 8], y[i + 12]);
                let (ab_even, ab_odd) =
                    (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
                let (cd_even, cd_odd) =
                    (_mm512_shuffle_f32x4::<0x88>(c, d), _mm512_shuffle_f32x4::<0xdd>(c, d));
                z[i] = _mm512_shuffle_f32x4::<0x88>(ab_even, cd_even);
                z[i + 4] = _mm512_shuffle_f32x4::<0x88>(ab_odd, cd_odd);
                z[i + 8] = _mm512_shuffle_f32x4::<0xdd>(ab_even, cd_even);
                z[i + 12] = _mm512_shuffle_f32x4::<0xdd>(ab_odd, cd_odd);
            }
            z
        }
    }
}

impl math::Scale2 for Avx512 {
    #[inline(always)]
    fn scale2(self, p: __m512, shifted: __m512) -> __m512 {
        // SAFETY: the token proves AVX-512F.
        unsafe {
            let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted));
            _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), exponent))
        }
    }
}
