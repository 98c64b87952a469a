//! Sixteen virtual lanes: one source of every kernel, one instantiation per instruction set.
//!
//! A kernel is written once over [`Lanes`] and run through [`Real::dispatch`]. Every level executes the same IEEE
//! operations (add, sub, mul, div, fused multiply-add, sqrt, compare) on the same sixteen lanes, so all levels give
//! the same bits. The same source is instantiated for f64, which gradient checks use.

mod level;
mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(test)]
mod tests;
pub(crate) mod tile;
#[cfg(target_arch = "x86_64")]
mod x86;
#[cfg(target_arch = "x86_64")]
mod x86_tile;
#[cfg(target_arch = "x86_64")]
mod x86_token;

pub use level::{Simd, SimdError};
pub(crate) use math::{gelu_parts, ln_f32, silu_parts, tanh};

use tile::{Ahead, Fetch, Tile};

/// Lanes of every virtual vector, whatever the instruction set.
pub(crate) const WIDTH: usize = 16;

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// The numbers that kernels compute with: `f32` and `f64`.
pub trait Real:
    crate::element::Element
    + sealed::Sealed
    + PartialOrd
    + std::fmt::Debug
    + std::fmt::Display
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::Neg<Output = Self>
    + std::ops::AddAssign
{
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;
    fn from_f64(x: f64) -> Self;
    fn to_f64(self) -> f64;
    #[must_use]
    fn mul_add(self, a: Self, b: Self) -> Self;
    #[must_use]
    fn sqrt(self) -> Self;
    fn is_finite(self) -> bool;
    /// Natural logarithm, in f32 by the polynomial of `math.rs`, in f64 by std.
    #[must_use]
    fn ln(self) -> Self;
    #[doc(hidden)]
    fn dispatch<K: Kernel<Self>>(simd: Simd, kernel: K);
    #[doc(hidden)]
    fn scratch() -> &'static std::thread::LocalKey<std::cell::RefCell<Vec<Vec<Self>>>>;
}

/// A kernel, written once for all levels. `run` and every function that it calls must be `#[inline(always)]`, so that
/// they are compiled with the level's instructions.
#[doc(hidden)]
pub trait Kernel<E: Real> {
    fn run<L: Lanes<E = E>>(self, l: L);
}

/// Sixteen lanes of `E`. A value of an implementing type proves that the CPU has the instructions that its methods use.
#[doc(hidden)]
pub trait Lanes: Copy + Send + Sync + 'static {
    type E: Real;
    type V: Copy;
    /// Rows of the register tile of the matrix kernels.
    const TILE_ROWS: usize;
    /// Vectors across the register tile of the matrix kernels: 1 or 2.
    const TILE_VECTORS: usize;

    fn splat(self, x: Self::E) -> Self::V;
    fn load(self, from: &[Self::E; WIDTH]) -> Self::V;
    fn store(self, to: &mut [Self::E; WIDTH], v: Self::V);
    /// # Safety
    /// `from` must be valid for reading sixteen elements.
    unsafe fn load_ptr(self, from: *const Self::E) -> Self::V;
    /// # Safety
    /// `to` must be valid for writing sixteen elements.
    unsafe fn store_ptr(self, to: *mut Self::E, v: Self::V);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    fn sqrt(self, a: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a > b ? a : b`, which is `b` if either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a < b ? a : b`, which is `b` if either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a < b ? yes : no`, lane by lane.
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    fn exp(self, a: Self::V) -> Self::V;
    /// # Safety
    /// See [`Tile`].
    unsafe fn tile_and_fetch(self, tile: &Tile<Self::E>, fetch: &mut Fetch<Self::E>);

    /// A register tile of the full height.
    ///
    /// # Safety
    /// See [`Tile`].
    #[inline(always)]
    unsafe fn block<const R: usize, const V: usize, const AR: usize, const AD: usize>(
        self,
        tile: &Tile<Self::E>,
        a: *const Self::E,
        b: *const Self::E,
        c: *mut Self::E,
        fetch: &mut Fetch<Self::E>,
    ) {
        // SAFETY: passed on from the caller.
        unsafe { tile::block::<Self, R, V, AR, AD>(self, tile, a, b, c, fetch) }
    }

    /// # Safety
    /// See [`Tile`].
    #[inline(always)]
    unsafe fn tile(self, tile: &Tile<Self::E>) {
        // SAFETY: passed on from the caller.
        unsafe { self.tile_and_fetch(tile, &mut [Ahead::NONE; 2]) }
    }

    /// Prefetches the cache line at `at` into the level-1 cache. Never faults.
    #[inline(always)]
    fn prefetch(self, _at: *const Self::E) {}
    /// Prefetches the cache line at `at` into the level-2 cache. Never faults.
    #[inline(always)]
    fn prefetch_far(self, _at: *const Self::E) {}
    /// The first `n` lanes of `v`, then `fill`.
    #[inline(always)]
    fn first(self, v: Self::V, n: usize, fill: Self::E) -> Self::V {
        let lanes: [Self::E; WIDTH] = std::array::from_fn(|i| Self::E::from_f64(i as f64));
        self.select_lt(self.load(&lanes), self.splat(Self::E::from_f64(n as f64)), v, self.splat(fill))
    }

    #[inline(always)]
    fn zero(self) -> Self::V {
        self.splat(Self::E::ZERO)
    }
    #[inline(always)]
    fn to_array(self, v: Self::V) -> [Self::E; WIDTH] {
        let mut a = [Self::E::ZERO; WIDTH];
        self.store(&mut a, v);
        a
    }
    /// The sixteen elements from `at` on; past the end, `fill`.
    #[inline(always)]
    fn get(self, from: &[Self::E], at: usize, fill: Self::E) -> Self::V {
        let from = &from[at..];
        if let Some(whole) = from.first_chunk() {
            return self.load(whole);
        }
        let mut a = [fill; WIDTH];
        a[..from.len()].copy_from_slice(from);
        self.load(&a)
    }
    /// Writes the sixteen elements from `at` on, as far as the slice reaches.
    #[inline(always)]
    fn put(self, to: &mut [Self::E], at: usize, v: Self::V) {
        let to = &mut to[at..];
        if let Some(whole) = to.first_chunk_mut() {
            self.store(whole, v);
        } else {
            let a = self.to_array(v);
            to.copy_from_slice(&a[..to.len()]);
        }
    }
    /// Sixteen rows become sixteen columns.
    #[inline(always)]
    fn transpose(self, rows: [Self::V; WIDTH]) -> [Self::V; WIDTH] {
        let rows = rows.map(|row| self.to_array(row));
        std::array::from_fn(|i| self.load(&std::array::from_fn(|j| rows[j][i])))
    }
    /// Fixed tree: lane i + lane i+8, then +4, +2, +1.
    #[inline(always)]
    fn sum(self, v: Self::V) -> Self::E {
        let mut a = self.to_array(v);
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                a[i] += a[i + half];
            }
        }
        a[0]
    }
    #[inline(always)]
    fn max_lane(self, v: Self::V) -> Self::E {
        let mut a = self.to_array(v);
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                a[i] = if a[i] > a[i + half] { a[i] } else { a[i + half] };
            }
        }
        a[0]
    }
}

macro_rules! real {
    ($t:ty, $ln:expr, $dispatch:item) => {
        impl Real for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = <$t>::NEG_INFINITY;
            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                x as $t
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            #[inline(always)]
            fn mul_add(self, a: Self, b: Self) -> Self {
                <$t>::mul_add(self, a, b)
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                <$t>::sqrt(self)
            }
            #[inline(always)]
            fn is_finite(self) -> bool {
                <$t>::is_finite(self)
            }
            #[inline(always)]
            fn ln(self) -> Self {
                $ln(self)
            }
            $dispatch
            fn scratch() -> &'static std::thread::LocalKey<std::cell::RefCell<Vec<Vec<Self>>>> {
                thread_local!(static POOL: std::cell::RefCell<Vec<Vec<$t>>> = const { std::cell::RefCell::new(Vec::new()) });
                &POOL
            }
        }
    };
}
real!(
    f32,
    ln_f32,
    #[inline]
    fn dispatch<K: Kernel<f32>>(simd: Simd, kernel: K) {
        level::run(simd, kernel);
    }
);
real!(
    f64,
    f64::ln,
    #[inline]
    fn dispatch<K: Kernel<f64>>(_: Simd, kernel: K) {
        kernel.run(scalar::Wide64);
    }
);
