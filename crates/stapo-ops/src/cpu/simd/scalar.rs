//! Sixteen lanes as an array: the level that runs anywhere, and the f64 instantiation of every kernel.

use super::tile::{Fetch, Tile, run_tile};
use super::{Lanes, WIDTH, math};

/// f32 without vector instructions.
#[derive(Clone, Copy)]
pub struct Wide32;
/// f64: gradient checks.
#[derive(Clone, Copy)]
pub struct Wide64;

macro_rules! wide {
    ($name:ident, $t:ty, $exp:expr) => {
        impl Lanes for $name {
            type E = $t;
            type V = [$t; WIDTH];
            const TILE_ROWS: usize = 4;
            const TILE_VECTORS: usize = 1;

            #[inline(always)]
            fn splat(self, x: $t) -> Self::V {
                [x; WIDTH]
            }
            #[inline(always)]
            fn load(self, from: &[$t; WIDTH]) -> Self::V {
                *from
            }
            #[inline(always)]
            fn store(self, to: &mut [$t; WIDTH], v: Self::V) {
                *to = v;
            }
            #[inline(always)]
            unsafe fn load_ptr(self, from: *const $t) -> Self::V {
                // SAFETY: the caller vouches for sixteen readable elements.
                unsafe { from.cast::<[$t; WIDTH]>().read() }
            }
            #[inline(always)]
            unsafe fn store_ptr(self, to: *mut $t, v: Self::V) {
                // SAFETY: the caller vouches for sixteen writable elements.
                unsafe { to.cast::<[$t; WIDTH]>().write(v) }
            }
            #[inline(always)]
            fn add(self, a: Self::V, b: Self::V) -> Self::V {
                std::array::from_fn(|i| a[i] + b[i])
            }
            #[inline(always)]
            fn sub(self, a: Self::V, b: Self::V) -> Self::V {
                std::array::from_fn(|i| a[i] - b[i])
            }
            #[inline(always)]
            fn mul(self, a: Self::V, b: Self::V) -> Self::V {
                std::array::from_fn(|i| a[i] * b[i])
            }
            #[inline(always)]
            fn div(self, a: Self::V, b: Self::V) -> Self::V {
                std::array::from_fn(|i| a[i] / b[i])
            }
            #[inline(always)]
            fn sqrt(self, a: Self::V) -> Self::V {
                a.map(<$t>::sqrt)
            }
            #[inline(always)]
            fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
                std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
            }
            #[inline(always)]
            fn max(self, a: Self::V, b: Self::V) -> Self::V {
                std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
            }
            #[inline(always)]
            fn min(self, a: Self::V, b: Self::V) -> Self::V {
                std::array::from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
            }
            #[inline(always)]
            fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V {
                std::array::from_fn(|i| if a[i] < b[i] { yes[i] } else { no[i] })
            }
            #[inline(always)]
            fn exp(self, a: Self::V) -> Self::V {
                $exp(self, a)
            }
            unsafe fn tile_and_fetch(self, tile: &Tile<$t>, fetch: &mut Fetch<$t>) {
                // SAFETY: passed on from the caller.
                unsafe { run_tile::<_, 4, 1>(self, tile, fetch) }
            }
        }
    };
}
wide!(Wide32, f32, math::exp_f32);
wide!(Wide64, f64, |_, a: [f64; WIDTH]| a.map(f64::exp));

impl math::Scale2 for Wide32 {
    #[inline(always)]
    fn scale2(self, p: Self::V, shifted: Self::V) -> Self::V {
        std::array::from_fn(|i| math::scale2(p[i], shifted[i]))
    }
}
