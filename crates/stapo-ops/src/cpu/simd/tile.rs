//! The register tile under every matrix product: `C[rows, 16 v] (+)= A[rows, depth] B[depth, 16 v]`.
//!
//! Each element of C is one chain of fused multiply-adds over depth in increasing order, in one accumulator that
//! starts from 0 or from C. Cutting depth into blocks that continue from C therefore changes no bit.

use super::{Lanes, WIDTH};

/// Depth of a block. A panel of B of this depth and 32 columns takes 32 KiB, as much as a level-1 cache holds.
pub(crate) const DEPTH: usize = 256;
/// Distance of the rows of A in [`Layout::Rows`]: one cache line more than the depth of a block, so that rows do
/// not fall into the same cache set, and a constant, so that the tile's addresses need no registers.
pub(crate) const ROW_STRIDE: usize = DEPTH + WIDTH;
/// Distance between consecutive depths in [`Layout::Columns`].
pub(crate) const COLUMN_STRIDE: usize = WIDTH;

/// How a block of A lies in memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// `a[row * ROW_STRIDE + depth]`.
    Rows,
    /// Groups of `TILE_ROWS` rows, each `a[depth * COLUMN_STRIDE + row]`, `DEPTH * COLUMN_STRIDE` apart.
    Columns,
    /// `a[depth * ROW_STRIDE + row]`: the transpose of a block in [`Layout::Rows`].
    RowsTransposed,
}

/// What the accumulators start from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    Zero,
    /// The value in C.
    Continue,
}

/// The most cache lines prefetched per sixteen steps of depth: more would delay the arithmetic.
const MAX_RATE: usize = 8;

/// Rows of memory that a tile prefetches for a later tile, a few cache lines per sixteen steps of depth.
#[derive(Clone, Copy)]
pub struct Ahead<E> {
    at: *const E,
    /// Cache lines left in the current row.
    left: usize,
    /// Cache lines per row.
    lines: usize,
    /// From the end of a row to the start of the next.
    gap: usize,
    /// Rows left, the current one included.
    rows: usize,
    /// Cache lines per sixteen steps of depth.
    rate: usize,
}

impl<E> Ahead<E> {
    pub(crate) const NONE: Self = Ahead { at: std::ptr::null(), left: 0, lines: 0, gap: 0, rows: 0, rate: 0 };

    /// `rows` rows of `width` elements, `stride` apart, to be prefetched within `steps` times sixteen steps of depth.
    pub(crate) fn new(at: *const E, rows: usize, width: usize, stride: usize, steps: usize) -> Self {
        let lines = width.div_ceil(WIDTH);
        let rate = (rows * lines).div_ceil(steps.max(1)).min(MAX_RATE);
        Ahead { at, left: lines, lines, gap: stride.wrapping_sub(lines * WIDTH), rows, rate }
    }

    /// Prefetches the next lines. A prefetch never faults, wherever it points.
    #[inline(always)]
    fn fetch<L: Lanes<E = E>>(&mut self, l: L) {
        for _ in 0..self.rate {
            self.fetch_line(l);
        }
    }

    #[inline(always)]
    fn fetch_line<L: Lanes<E = E>>(&mut self, l: L) {
        if self.rows == 0 {
            return;
        }
        l.prefetch_far(self.at);
        self.at = self.at.wrapping_add(WIDTH);
        self.left -= 1;
        if self.left == 0 {
            self.at = self.at.wrapping_add(self.gap);
            self.left = self.lines;
            self.rows -= 1;
        }
    }
}

/// One call of the tile kernel.
///
/// # Safety of [`Lanes::tile`]
/// `a` holds `rows` rows of `depth <= DEPTH` elements in `layout`; `b` holds `depth` rows of `16 * vectors` elements,
/// `b_stride` apart; `c` is writable for `rows` rows of `16 * vectors` elements, `c_stride` apart, by this call alone.
#[derive(Clone, Copy)]
pub struct Tile<E> {
    pub(crate) rows: usize,
    pub(crate) depth: usize,
    pub(crate) vectors: usize,
    pub(crate) layout: Layout,
    pub(crate) a: *const E,
    pub(crate) b: *const E,
    pub(crate) b_stride: usize,
    pub(crate) c: *mut E,
    pub(crate) c_stride: usize,
    pub(crate) start: Start,
}

/// What the tile prefetches while it computes: the next block of A and the next panel of B.
pub(crate) type Fetch<E> = [Ahead<E>; 2];

/// # Safety
/// See [`Tile`].
#[inline(always)]
pub(super) unsafe fn run_tile<L: Lanes, const ROWS: usize, const VECTORS: usize>(
    l: L,
    tile: &Tile<L::E>,
    fetch: &mut Fetch<L::E>,
) {
    // SAFETY: passed on from the caller.
    unsafe {
        match tile.layout {
            Layout::Rows => all_rows::<L, ROWS, VECTORS, ROW_STRIDE, 1>(l, tile, ROWS * ROW_STRIDE, fetch),
            Layout::Columns => {
                all_rows::<L, ROWS, VECTORS, 1, COLUMN_STRIDE>(l, tile, DEPTH * COLUMN_STRIDE, fetch);
            }
            Layout::RowsTransposed => all_rows::<L, ROWS, VECTORS, 1, ROW_STRIDE>(l, tile, ROWS, fetch),
        }
    }
}

#[inline(always)]
unsafe fn all_rows<L: Lanes, const R: usize, const V: usize, const AR: usize, const AD: usize>(
    l: L,
    t: &Tile<L::E>,
    group: usize,
    fetch: &mut Fetch<L::E>,
) {
    let mut v = 0;
    while v < t.vectors {
        let wide = V == 2 && v + 2 <= t.vectors;
        let mut row = 0;
        while row < t.rows {
            // SAFETY: row and v stay inside the bounds the caller vouches for.
            unsafe {
                let a = t.a.add(row / R * group + row % R * AR);
                let b = t.b.add(v * WIDTH);
                let c = t.c.add(row * t.c_stride + v * WIDTH);
                let left = t.rows - row;
                row += if wide {
                    some_rows::<L, R, 2, AR, AD>(l, t, left, a, b, c, fetch)
                } else {
                    some_rows::<L, R, 1, AR, AD>(l, t, left, a, b, c, fetch)
                };
            }
        }
        v += if wide { 2 } else { 1 };
    }
}

/// Computes the largest tile that fits into `left` rows and returns its height.
#[inline(always)]
unsafe fn some_rows<L: Lanes, const R: usize, const V: usize, const AR: usize, const AD: usize>(
    l: L,
    t: &Tile<L::E>,
    left: usize,
    a: *const L::E,
    b: *const L::E,
    c: *mut L::E,
    fetch: &mut Fetch<L::E>,
) -> usize {
    // SAFETY: the height is at most `left`.
    unsafe {
        if left >= R {
            l.block::<R, V, AR, AD>(t, a, b, c, fetch);
            R
        } else if R > 8 && left >= 8 {
            block::<L, 8, V, AR, AD>(l, t, a, b, c, fetch);
            8
        } else if R > 4 && left >= 4 {
            block::<L, 4, V, AR, AD>(l, t, a, b, c, fetch);
            4
        } else if left >= 2 {
            block::<L, 2, V, AR, AD>(l, t, a, b, c, fetch);
            2
        } else {
            block::<L, 1, V, AR, AD>(l, t, a, b, c, fetch);
            1
        }
    }
}

/// Computes one register tile: the default of [`Lanes::block`].
///
/// # Safety
/// See [`Tile`]; `a`, `b` and `c` are where this tile starts.
#[inline(always)]
pub(super) unsafe fn block<L: Lanes, const R: usize, const V: usize, const AR: usize, const AD: usize>(
    l: L,
    t: &Tile<L::E>,
    mut a: *const L::E,
    mut b: *const L::E,
    c: *mut L::E,
    fetch: &mut Fetch<L::E>,
) {
    let mut acc = [[l.zero(); V]; R];
    // SAFETY: all addresses lie inside the blocks described by `Tile`; prefetched ones may lie anywhere.
    unsafe {
        load_c(l, t, c, &mut acc);
        let mut next_c = c.wrapping_add(R * t.c_stride);
        let mut depth = t.depth;
        while depth >= WIDTH {
            fetch_all(l, fetch, &mut next_c, t.c_stride);
            for _ in 0..WIDTH {
                step::<L, R, V, AR>(l, &mut acc, a, b);
                a = a.add(AD);
                b = b.add(t.b_stride);
            }
            depth -= WIDTH;
        }
        for _ in 0..depth {
            step::<L, R, V, AR>(l, &mut acc, a, b);
            a = a.wrapping_add(AD);
            b = b.wrapping_add(t.b_stride);
        }
        store_c(l, t, c, &acc);
    }
}

/// Prefetches, before sixteen steps of depth, some lines of the next A and B and a row of the next tile of C.
#[inline(always)]
pub(super) fn fetch_all<L: Lanes>(l: L, fetch: &mut Fetch<L::E>, next_c: &mut *mut L::E, c_stride: usize) {
    fetch[0].fetch(l);
    fetch[1].fetch(l);
    l.prefetch(*next_c);
    l.prefetch(next_c.wrapping_add(WIDTH));
    *next_c = next_c.wrapping_add(c_stride);
}

/// # Safety
/// `c` is readable for `R` rows of `V` vectors.
#[inline(always)]
pub(super) unsafe fn load_c<L: Lanes, const R: usize, const V: usize>(
    l: L,
    t: &Tile<L::E>,
    c: *const L::E,
    acc: &mut [[L::V; V]; R],
) {
    if t.start == Start::Zero {
        return;
    }
    for (r, row) in acc.iter_mut().enumerate() {
        for (v, x) in row.iter_mut().enumerate() {
            // SAFETY: passed on from the caller.
            *x = unsafe { l.load_ptr(c.add(r * t.c_stride + v * WIDTH)) };
        }
    }
}

/// # Safety
/// `c` is writable for `R` rows of `V` vectors.
#[inline(always)]
pub(super) unsafe fn store_c<L: Lanes, const R: usize, const V: usize>(
    l: L,
    t: &Tile<L::E>,
    c: *mut L::E,
    acc: &[[L::V; V]; R],
) {
    for (r, row) in acc.iter().enumerate() {
        for (v, x) in row.iter().enumerate() {
            // SAFETY: passed on from the caller.
            unsafe { l.store_ptr(c.add(r * t.c_stride + v * WIDTH), *x) };
        }
    }
}

#[inline(always)]
pub(super) unsafe fn step<L: Lanes, const R: usize, const V: usize, const AR: usize>(
    l: L,
    acc: &mut [[L::V; V]; R],
    a: *const L::E,
    b: *const L::E,
) {
    // SAFETY: the caller steps inside A and B.
    unsafe {
        let mut columns = [l.zero(); V];
        for (v, x) in columns.iter_mut().enumerate() {
            *x = l.load_ptr(b.add(v * WIDTH));
        }
        for (r, row) in acc.iter_mut().enumerate() {
            let x = l.splat(*a.add(r * AR));
            for (y, column) in row.iter_mut().zip(columns) {
                *y = l.fma(x, column, *y);
            }
        }
    }
}
