//! Products of many rows (a large M), finished before they reach memory, by the kernels of large_m.cu: on Hopper, for bf16 and
//! whole steps of the depth.

use super::Dims;
use super::split_k::{SPLIT_K, uses_split_k};
use crate::cuda::kernels::{MATMUL_DEEP_LARGE_M, MATMUL_GATED_LARGE_M, MATMUL_HEADS_LARGE_M, Source};
use crate::cuda::{Cuda, ElementType, Fields, Slice, TILE_COLUMNS, TensorMap};
use crate::swiglu::Gate;

/// Fewer rows, as decode has them, are a few rounds of tiles, and the last round's results are finished while nothing is multiplied.
pub(crate) const LEAST_ROWS: usize = 1024;
/// Blocks of a cluster, as in large_m.cu.
const SHARING: usize = 2;

/// The width of heads that a kernel finishes.
const HEAD_DIM: usize = 128;

/// How a kernel divides its work, as in large_m.cu.
#[derive(Clone, Copy)]
struct Tiling {
    name: &'static str,
    source: &'static Source,
    /// Rows of a tile, 64 for each warpgroup that multiplies.
    rows: usize,
    /// Rows of the weight in a tile.
    columns: usize,
    stages: usize,
    /// Of eight parts of the multiprocessors' time, those that must be used: with fewer, other kernels are the faster ones.
    least_eighths: usize,
}

/// The larger tile is 1.5 % faster where both fill the multiprocessors equally well.
const GATED: [Tiling; 2] = [
    Tiling {
        name: "gated_large_m_192",
        source: &MATMUL_GATED_LARGE_M,
        rows: 192,
        columns: 192,
        stages: 3,
        least_eighths: 7,
    },
    Tiling {
        name: "gated_large_m_128",
        source: &MATMUL_GATED_LARGE_M,
        rows: 128,
        columns: 192,
        stages: 4,
        least_eighths: 7,
    },
];
const DEEP: Tiling = Tiling {
    name: "deep_large_m_128",
    source: &MATMUL_DEEP_LARGE_M,
    rows: 128,
    columns: 192,
    stages: 4,
    least_eighths: 6,
};
/// Two whole heads. With three warpgroups and one head, shared memory would give and take 149 bytes a cycle for 128.
const HEADS: Tiling = Tiling {
    name: "heads_large_m_128",
    source: &MATMUL_HEADS_LARGE_M,
    rows: 128,
    columns: 2 * HEAD_DIM,
    stages: 3,
    least_eighths: 7,
};

impl Tiling {
    fn threads(self) -> usize {
        2 * self.rows + 128
    }

    /// The stages' tiles, 16 mbarriers, results on their way to memory, and room to align the tiles to 1024 bytes.
    fn shared_bytes(self) -> usize {
        let Self { rows, columns, stages, .. } = self;
        2 * stages * (rows + columns) * TILE_COLUMNS + 8 * 16 + 2 * rows * (columns + 8) + 1024
    }

    /// Pairs of tiles, one for each block of a cluster.
    fn n_pairs(self, d: Dims) -> usize {
        d.tokens.div_ceil(SHARING * self.rows) * d.outputs.div_ceil(self.columns)
    }

    /// Results that `n_clusters` could compute in the same time: the last tiles of rows and columns and the last round of tiles leave
    /// a part of it unused.
    fn n_possible(self, d: Dims, n_clusters: usize) -> usize {
        let n_rounds = self.n_pairs(d).div_ceil(n_clusters.max(1));
        n_rounds * n_clusters * SHARING * self.rows * self.columns
    }

    fn fills(self, d: Dims, n_clusters: usize) -> bool {
        d.tokens >= LEAST_ROWS
            && 8 * d.tokens * d.outputs >= self.least_eighths * self.n_possible(d, n_clusters)
    }
}

/// What becomes of `x W^T`.
#[derive(Clone, Copy)]
pub(crate) enum Output<'a> {
    /// y `[T, outputs / 2]`: the gated product of gate and up, whose weights are stacked, and `[T, outputs]`, where gate and up are
    /// kept.
    Gated { gate: Gate, kept: Option<Slice> },
    /// y `[T, outputs]`: the sum of the chains of a deep product.
    Deep,
    /// y `[T, outputs]`: queries, keys and values, normed and rotated; or queries alone, where keys and values go elsewhere. The
    /// fields are those of `rope::cuda::head_fields`.
    Heads(&'a Fields),
}

impl Output<'_> {
    fn tiling(self, d: Dims, n_clusters: usize) -> Tiling {
        match self {
            Self::Gated { .. } => {
                let [large, small] = GATED;
                let [of_large, of_small] = GATED.map(|tiling| tiling.n_possible(d, n_clusters));
                if 200 * of_small < 197 * of_large { small } else { large }
            }
            Self::Deep => DEEP,
            Self::Heads(_) => HEADS,
        }
    }

    /// Columns of y.
    fn width(self, d: Dims) -> usize {
        match self {
            Self::Gated { .. } => d.outputs / 2,
            Self::Deep | Self::Heads(_) => d.outputs,
        }
    }

    fn n_chains(self) -> usize {
        match self {
            Self::Gated { .. } | Self::Heads(_) => 1,
            Self::Deep => SPLIT_K,
        }
    }

    /// Whether the results of a product are those of [`run`].
    fn is_sum_of(self, d: Dims, weight: Slice) -> bool {
        uses_split_k(d, weight) == matches!(self, Self::Deep)
    }
}

/// What is multiplied. Shapes: x `[T, inputs + n_further]`; weight `[outputs, inputs]`, where adapters are joined with `n_further`
/// columns behind each chain's inputs.
#[derive(Clone, Copy)]
pub(crate) struct Operands {
    pub d: Dims,
    pub x: Slice,
    pub weight: Slice,
    pub n_further: usize,
}

impl Operands {
    /// Elements from one row to the next of x and of the weight.
    fn pitches(&self, output: Output<'_>) -> [usize; 2] {
        [1, output.n_chains()].map(|n| self.d.inputs + n * self.n_further)
    }
}

fn n_clusters(cuda: &Cuda) -> usize {
    cuda.gpu.multiprocessors as usize / SHARING
}

/// Whether [`run`] may be called with the same arguments, and is faster than separate products.
pub(crate) fn pays(output: Output<'_>, cuda: &Cuda, of: &Operands, y: Slice) -> bool {
    let n_clusters = n_clusters(cuda);
    output.tiling(of.d, n_clusters).fills(of.d, n_clusters) && fits(output, cuda, of, y)
}

/// Whether [`run`] may be called with the same arguments.
pub(crate) fn fits(output: Output<'_>, cuda: &Cuda, of: &Operands, y: Slice) -> bool {
    let Operands { d, x, weight, n_further } = *of;
    let (width, [x_pitch, w_pitch]) = (output.width(d), of.pitches(output));
    let is_whole = d.inputs.is_multiple_of(output.n_chains() * TILE_COLUMNS)
        && n_further.is_multiple_of(TILE_COLUMNS)
        && width.is_multiple_of(8)
        && y.len.is_multiple_of(8 * d.tokens.max(1))
        && y.len >= d.tokens * width
        && y.address.is_multiple_of(16)
        && x.len == d.tokens * x_pitch
        && weight.len == d.outputs * w_pitch;
    cuda.is_hopper()
        && d.tokens > 0
        && is_whole
        && y.kind == ElementType::Bf16
        && output.is_sum_of(d, weight)
        && TensorMap::fits(x, x_pitch)
        && TensorMap::fits(weight, w_pitch)
}

/// Shapes: y as [`Output`] says, overwritten, possibly with further columns behind each row.
pub(crate) fn run(output: Output<'_>, cuda: &Cuda, of: &Operands, y: Slice) {
    let Operands { d, x, weight, n_further } = *of;
    let (kept, gate, heads) = match output {
        Output::Gated { gate, kept } => (kept, gate, None),
        Output::Deep => (None, Gate::Silu, None),
        Output::Heads(fields) => (None, Gate::Silu, Some(fields)),
    };
    let (tiling, n_chains) = (output.tiling(d, n_clusters(cuda)), output.n_chains());
    let [x_pitch, w_pitch] = of.pitches(output);
    let n_inputs = d.inputs / n_chains / TILE_COLUMNS;
    let product = Fields::default().eight_bytes(y).eight_bytes(kept);
    let product = product.four_bytes(d.tokens).four_bytes(output.width(d)).four_bytes(y.len / d.tokens);
    let product = product.four_bytes(n_chains).four_bytes(n_inputs + n_further / TILE_COLUMNS);
    let product = product.four_bytes(n_inputs).four_bytes(usize::from(gate == Gate::GeluTanh));
    let product = product.join(heads.unwrap_or(&Fields::default()));
    let launch = cuda.kernel(tiling.source, tiling.name).head_dim(HEAD_DIM);
    let launch = launch.tensor_map(&TensorMap::new(x, d.tokens, x_pitch, tiling.rows));
    let launch = launch.tensor_map(&TensorMap::new(weight, d.outputs, w_pitch, tiling.columns / SHARING));
    let n_blocks = SHARING * n_clusters(cuda).min(tiling.n_pairs(d));
    launch.fields(&product).run([n_blocks, 1], tiling.threads(), tiling.shared_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The products of Qwen3-1.7B, on 132 multiprocessors.
    #[test]
    fn many_rows_fill_the_multiprocessors() {
        let output = Output::Gated { gate: Gate::Silu, kept: None };
        let gated = |tokens| {
            let d = Dims { tokens, inputs: 2048, outputs: 12288 };
            output.tiling(d, 66).fills(d, 66)
        };
        let rows = |tokens| output.tiling(Dims { tokens, inputs: 2048, outputs: 12288 }, 66).rows;
        assert_eq!([8192, 16384].map(rows), [128, 192]);
        let deep = |tokens| DEEP.fills(Dims { tokens, inputs: 6144, outputs: 2048 }, 66);
        assert!([1024, 3072, 4096, 8192, 16384].into_iter().all(gated));
        assert!([3072, 4096, 8192, 16384].into_iter().all(deep));
        assert!(![64, 256, 512].into_iter().any(|tokens| gated(tokens) || deep(tokens)));
        assert!(!deep(2048), "two rounds for one and a third");
        let heads = |tokens| HEADS.fills(Dims { tokens, inputs: 2048, outputs: 4096 }, 66);
        assert!([1024, 2048, 3072, 4096, 8192, 16384].into_iter().all(heads));
        assert!(![64, 256, 512, 1500].into_iter().any(heads), "few rows, or two rounds for one and a half");
        assert!(GATED.into_iter().chain([DEEP, HEADS]).all(|tiling| tiling.shared_bytes() <= 232_448));
    }
}
