//! Blocked matrix product `C (+)= A B` on all cores: packs blocks of A and B and calls the register tile on each pair.
//!
//! Every element of C is one chain over the depth in increasing order (see `simd::tile`). Tasks divide C, never the
//! depth.

use std::ops::Range;

use crate::cpu::simd::tile::{Ahead, COLUMN_STRIDE, DEPTH, Fetch, Layout, ROW_STRIDE, Start, Tile};
use crate::cpu::simd::{Kernel, Lanes, Real, WIDTH};
use crate::cpu::{Cpu, Shared, with_scratch};

/// Columns of a panel of B.
pub(crate) const PANEL: usize = 2 * WIDTH;
/// Rows of C that share a packed block of A, which stays in the level-2 cache.
const MAX_BLOCK_ROWS: usize = 504;
/// The fewest rows of C for a separate task: with fewer, a panel of B is used too seldom for the cost of reading
/// it.
const MIN_BLOCK_ROWS: usize = 56;
/// Rows of the largest register tile; a task has a multiple of it.
const ROW_UNIT: usize = 14;
/// Multiply-adds below which a second thread is not worth waking.
const SMALL: usize = 64 * 1024;
/// The fewest multiply-adds of a task that make up for packing its rows.
const WORTHWHILE: usize = 2 << 20;
/// The fewest panels of B of a task that make up for packing its rows.
const MIN_PANELS: usize = 8;

#[derive(Clone, Copy)]
pub(crate) enum A<'a, E> {
    /// `[rows, depth]`.
    Rows(&'a [E]),
    /// `[depth, rows]`: the transpose of A.
    Columns(&'a [E]),
}

#[derive(Clone, Copy)]
pub(crate) enum B<'a, E> {
    /// `[columns / 32, depth, 32]`, the last panel padded with zeros: see [`pack_panels`].
    Panels(&'a [E]),
    /// `[depth, columns]`.
    Rows(&'a [E]),
}

pub(crate) struct Gemm<'a, E> {
    pub rows: usize,
    pub depth: usize,
    pub columns: usize,
    pub a: A<'a, E>,
    pub b: B<'a, E>,
    /// `[columns]`, added to every row after the chain.
    pub bias: Option<&'a [E]>,
    /// `[rows, columns]`.
    pub c: Shared<'a, E>,
    pub start: Start,
    pub strides: Strides,
}

/// Elements from one row to the next of each matrix as it is stored. A larger stride than the matrix has columns leaves
/// out the other columns of a wider matrix. `b` has no meaning for panels.
#[derive(Clone, Copy)]
pub(crate) struct Strides {
    pub a: usize,
    pub b: usize,
    pub c: usize,
}

impl<E: Real> Gemm<'_, E> {
    pub(crate) fn run(&self, cpu: &Cpu) {
        if self.rows == 0 || self.columns == 0 {
            return;
        }
        let (n_row, n_column) = self.grid(cpu.threads());
        let row_units = self.rows.div_ceil(ROW_UNIT);
        let first_row = |i: usize| (i * row_units / n_row * ROW_UNIT).min(self.rows);
        let n_panels = self.columns.div_ceil(PANEL);
        let panel_step = n_panels.div_ceil(n_column);
        cpu.tasks(n_row * n_column, |task| {
            let i = task / n_column;
            let j = task % n_column;
            let rows = first_row(i)..first_row(i + 1);
            let panels = j * panel_step..((j + 1) * panel_step).min(n_panels);
            if rows.is_empty() || panels.is_empty() {
                return;
            }
            let block = rows.len().div_ceil(rows.len().div_ceil(MAX_BLOCK_ROWS)).next_multiple_of(ROW_UNIT);
            let a_len = match self.a {
                A::Rows(_) => block * ROW_STRIDE,
                A::Columns(_) => block.div_ceil(4) * DEPTH * COLUMN_STRIDE,
            };
            let b_len = DEPTH * PANEL;
            with_scratch(a_len + b_len + block * PANEL, |scratch| {
                let (a, scratch) = scratch.split_at_mut(a_len);
                let (b, edge) = scratch.split_at_mut(b_len);
                cpu.dispatch(GemmTask { gemm: self, all_rows: rows, block, rows: 0..0, panels, a, b, edge });
            });
        });
    }

    /// The number of parts that rows and columns are divided into.
    fn grid(&self, threads: usize) -> (usize, usize) {
        let n_blocks = self.rows.div_ceil(MAX_BLOCK_ROWS);
        let n_blocks = if self.rows >= threads * MIN_BLOCK_ROWS { n_blocks.max(threads) } else { n_blocks };
        let n_panels = self.columns.div_ceil(PANEL);
        let work = self.rows * self.columns * self.depth;
        if work < SMALL || threads == 1 {
            (1, 1)
        } else if n_blocks >= threads {
            let n_blocks = n_blocks.next_multiple_of(threads);
            // Cores are not equally fast at all times, and more tasks than threads let a fast core take some of a slow
            // one's. Columns are divided rather than rows, because rows of A are packed more cheaply than panels of B.
            let worth = (work / WORTHWHILE).min(4 * threads) / n_blocks;
            let n_column =
                if matches!(self.a, A::Rows(_)) { worth.min(n_panels / MIN_PANELS).max(1) } else { 1 };
            (n_blocks, n_column)
        } else {
            (n_blocks, threads.div_ceil(n_blocks).min(n_panels))
        }
    }
}

/// A part of C, computed in blocks of rows and of depth.
struct GemmTask<'a, 'g, E> {
    gemm: &'a Gemm<'g, E>,
    /// The rows of the task.
    all_rows: Range<usize>,
    /// Rows per block.
    block: usize,
    /// The rows of the current block.
    rows: Range<usize>,
    panels: Range<usize>,
    /// The packed block of A.
    a: &'a mut [E],
    /// The packed panel of B.
    b: &'a mut [E],
    /// `[block, PANEL]`: the block of C in a last panel with fewer columns.
    edge: &'a mut [E],
}

impl<E: Real> Kernel<E> for GemmTask<'_, '_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(mut self, l: L) {
        for start in self.all_rows.clone().step_by(self.block) {
            self.rows = start..(start + self.block).min(self.all_rows.end);
            let mut k = 0;
            loop {
                let depth = DEPTH.min(self.gemm.depth - k);
                self.depth_block(l, k, depth);
                k += depth;
                if k >= self.gemm.depth {
                    break;
                }
            }
            self.add_bias();
        }
    }
}

impl<E: Real> GemmTask<'_, '_, E> {
    #[inline(always)]
    fn depth_block<L: Lanes<E = E>>(&mut self, l: L, k: usize, depth: usize) {
        let g = self.gemm;
        self.pack_a(l, k, depth);
        // Steps that a panel takes, sixteen depths each.
        let steps = self.rows.len().div_ceil(L::TILE_ROWS) * (depth / WIDTH);
        let mut fetch = [self.next_a(k + depth, steps * self.panels.len()), Ahead::NONE];
        for p in self.panels.clone() {
            let b = match g.b {
                B::Panels(b) => b[(p * g.depth + k) * PANEL..][..depth * PANEL].as_ptr(),
                B::Rows(b) => self.pack_b(l, b, p, k, depth),
            };
            if p + 1 < self.panels.end {
                fetch[1] = match g.b {
                    B::Panels(_) => Ahead::new(b.wrapping_add(g.depth * PANEL), 1, depth * PANEL, 0, steps),
                    B::Rows(b) => Ahead::new(
                        b[k * g.strides.b + (p + 1) * PANEL..].as_ptr(),
                        depth,
                        PANEL,
                        g.strides.b,
                        steps,
                    ),
                };
            }
            let start = if k == 0 { g.start } else { Start::Continue };
            self.panel(l, p, depth, b, start, &mut fetch);
        }
    }

    /// The block of A that follows depth `k` of the current rows: the next depths of the same rows, or the next rows.
    #[inline(always)]
    fn next_a(&self, k: usize, steps: usize) -> Ahead<E> {
        let g = self.gemm;
        let (row, k) = if k < g.depth { (self.rows.start, k) } else { (self.rows.end, 0) };
        let rows = self.block.min(self.all_rows.end - row);
        let depth = DEPTH.min(g.depth - k);
        match g.a {
            _ if rows == 0 => Ahead::NONE,
            A::Rows(a) => Ahead::new(a[row * g.strides.a + k..].as_ptr(), rows, depth, g.strides.a, steps),
            A::Columns(a) => Ahead::new(a[k * g.strides.a + row..].as_ptr(), depth, rows, g.strides.a, steps),
        }
    }

    #[inline(always)]
    fn pack_a<L: Lanes<E = E>>(&mut self, l: L, k: usize, depth: usize) {
        let g = self.gemm;
        match g.a {
            A::Rows(a) => {
                for (row, to) in self.rows.clone().zip(self.a.chunks_exact_mut(ROW_STRIDE)) {
                    to[..depth].copy_from_slice(&a[row * g.strides.a + k..][..depth]);
                }
            }
            A::Columns(a) => {
                // Sixteen depths at a time, so that what is read and what is written both stay in the level-1 cache.
                for d0 in (0..depth).step_by(WIDTH) {
                    let groups = self.a.chunks_exact_mut(DEPTH * COLUMN_STRIDE);
                    for (row, group) in self.rows.clone().step_by(L::TILE_ROWS).zip(groups) {
                        for d in d0..(d0 + WIDTH).min(depth) {
                            // The tile reads TILE_ROWS of the sixteen elements that are written.
                            let from = l.get(a, (k + d) * g.strides.a + row, E::ZERO);
                            l.put(group, d * COLUMN_STRIDE, from);
                        }
                    }
                }
            }
        }
    }

    /// Copies `depth` rows of panel `p` of a row-major B, padding the last panel with zeros.
    #[inline(always)]
    fn pack_b<L: Lanes<E = E>>(&mut self, l: L, b: &[E], p: usize, k: usize, depth: usize) -> *const E {
        let columns = self.gemm.columns;
        let width = PANEL.min(columns - p * PANEL);
        for (d, to) in self.b.chunks_exact_mut(PANEL).take(depth).enumerate() {
            let from = &b[(k + d) * self.gemm.strides.b + p * PANEL..][..width];
            if let (Some(from), (to, [])) = (from.first_chunk::<PANEL>(), to.as_chunks_mut::<WIDTH>()) {
                let (from, _) = from.as_chunks::<WIDTH>();
                l.store(&mut to[0], l.load(&from[0]));
                l.store(&mut to[1], l.load(&from[1]));
            } else {
                to[..width].copy_from_slice(from);
                to[width..].fill(E::ZERO);
            }
        }
        self.b.as_ptr()
    }

    #[inline(always)]
    fn panel<L: Lanes<E = E>>(
        &mut self,
        l: L,
        p: usize,
        depth: usize,
        b: *const E,
        start: Start,
        fetch: &mut Fetch<E>,
    ) {
        let g = self.gemm;
        let layout = if matches!(g.a, A::Rows(_)) { Layout::Rows } else { Layout::Columns };
        let width = PANEL.min(g.columns - p * PANEL);
        let c = g.c.at(self.rows.start * g.strides.c + p * PANEL);
        let a = self.a.as_ptr();
        let rows = self.rows.len();
        let mut tile =
            Tile { rows, depth, vectors: 2, layout, a, b, b_stride: PANEL, c, c_stride: g.strides.c, start };
        if width == PANEL {
            // SAFETY: A and B were packed for this block; the block of C belongs to this task and is PANEL columns
            // wide.
            unsafe { l.tile_and_fetch(&tile, fetch) };
            return;
        }
        // The last panel has fewer columns than the tile writes, so the tile works on a padded copy of the block of C.
        if start == Start::Continue {
            self.move_edge(p, width, |edge, c| edge.copy_from_slice(c));
        }
        tile.c = self.edge.as_mut_ptr();
        tile.c_stride = PANEL;
        // SAFETY: as above; `edge` holds `rows` rows of PANEL columns.
        unsafe { l.tile_and_fetch(&tile, fetch) };
        self.move_edge(p, width, |edge, c| c.copy_from_slice(edge));
    }

    /// Copies between `edge` and the block of C in panel `p`, which has `width` columns.
    #[inline(always)]
    fn move_edge(&mut self, p: usize, width: usize, copy: impl Fn(&mut [E], &mut [E])) {
        let g = self.gemm;
        for (row, edge) in self.rows.clone().zip(self.edge.chunks_exact_mut(PANEL)) {
            let at = row * g.strides.c + p * PANEL;
            // SAFETY: rows and panel belong to this task.
            copy(&mut edge[..width], unsafe { g.c.range(at..at + width) });
        }
    }

    #[inline(always)]
    fn add_bias(&mut self) {
        let g = self.gemm;
        let Some(bias) = g.bias else { return };
        let columns = self.panels.start * PANEL..(self.panels.end * PANEL).min(g.columns);
        for row in self.rows.clone() {
            // SAFETY: rows and columns belong to this task.
            let c = unsafe { g.c.range(row * g.strides.c + columns.start..row * g.strides.c + columns.end) };
            for (c, b) in c.iter_mut().zip(&bias[columns.clone()]) {
                *c += *b;
            }
        }
    }
}

/// Elements of the panel form of a `[columns, depth]` matrix.
pub(crate) fn panels_len(columns: usize, depth: usize) -> usize {
    columns.div_ceil(PANEL) * PANEL * depth
}

/// Packs the transpose of `w` `[columns, depth]` into panels `[columns / 32, depth, 32]`, padded with zeros.
pub(crate) fn pack_panels<E: Real>(cpu: &Cpu, w: &[E], columns: usize, depth: usize, panels: &mut [E]) {
    let shared = Shared::new(panels);
    cpu.rows(columns.div_ceil(PANEL), PANEL * depth, |range| {
        for p in range {
            // SAFETY: panel `p` belongs to this task.
            let panel = unsafe { shared.range(p * PANEL * depth..(p + 1) * PANEL * depth) };
            let width = PANEL.min(columns - p * PANEL);
            cpu.dispatch(PackPanel { rows: &w[p * PANEL * depth..][..width * depth], stride: depth, panel });
        }
    });
}

struct PackPanel<'a, E> {
    rows: &'a [E],
    stride: usize,
    panel: &'a mut [E],
}

impl<E: Real> Kernel<E> for PackPanel<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        transpose(l, self.rows, self.stride, 0..self.stride, self.panel);
    }
}

/// Packs one panel: `panel[d, j] = rows[j, columns.start + d]` for up to 32 rows, `stride` apart; 0 for missing rows.
#[inline(always)]
pub(crate) fn transpose<L: Lanes>(
    l: L,
    rows: &[L::E],
    stride: usize,
    columns: Range<usize>,
    panel: &mut [L::E],
) {
    for d in (0..columns.len()).step_by(WIDTH) {
        let part = columns.start + d..columns.end.min(columns.start + d + WIDTH);
        for half in 0..2 {
            let mut block = [l.zero(); WIDTH];
            for (row, x) in rows.chunks(stride).skip(half * WIDTH).zip(&mut block) {
                *x = l.get(&row[part.clone()], 0, L::E::ZERO);
            }
            for (i, column) in l.transpose(block).into_iter().take(part.len()).enumerate() {
                l.put(&mut panel[(d + i) * PANEL + half * WIDTH..][..WIDTH], 0, column);
            }
        }
    }
}
