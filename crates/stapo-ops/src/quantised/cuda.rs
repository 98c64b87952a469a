use super::{Encoding, ModuleRows, padded};
use crate::cuda::kernels::QUANTISED;
use crate::cuda::{Cuda, ElementType, Fields, Slice};

/// Numbers of a tile, tiles of a block of threads, and threads, as in unpack.cu.
const TILE: usize = 2048;
const TILES: usize = 4;
const UNPACKERS: usize = 256;
/// Most modules of a linear layer, as in unpack.cu.
pub(super) const MODULES: usize = 3;

/// How a row of the unpacked weight lies: `columns` for factors of adapters after each of `n_parts` equal parts.
#[derive(Clone, Copy)]
pub(crate) struct RowParts {
    pub n_parts: usize,
    pub columns: usize,
}

/// The factors of adapters that are joined to a weight.
pub(crate) struct UnpackFactors {
    pub rank: usize,
    /// Columns, or rows, of a module: the rank with what fills it up.
    pub apart: usize,
    /// The second factors `[outputs of the module, rank]`, each with the first of its outputs and their number.
    pub b: Vec<(Slice, usize, usize)>,
    /// The first factors `[n rank, inputs]`, where they lie below the weight.
    pub a: Option<Slice>,
}

impl Encoding {
    /// As in unpack.cu.
    fn number(self) -> usize {
        self as usize
    }
}

pub(super) fn unpack(
    cuda: &Cuda,
    (inputs, modules): (usize, &[ModuleRows]),
    blocks: Slice,
    RowParts { n_parts, columns }: RowParts,
    factors: Option<&UnpackFactors>,
    to: Slice,
) {
    assert!(to.kind == ElementType::Bf16, "quantised: weights are unpacked to bf16, not to {:?}", to.kind);
    let (mut n_blocks, mut first_row, mut address) = (0, 0, blocks.address);
    let mut most_bytes = 0;
    let mut fields = Fields::default();
    for idx in 0..MODULES {
        let none = ModuleRows { n_rows: 0, encoding: Encoding::Bf16 };
        let module = modules.get(idx).copied().unwrap_or(none);
        let ModuleRows { n_rows, encoding } = module;
        let n = n_rows * inputs;
        let n_bytes = padded(module.n_bytes(inputs));
        let row = Fields::default().eight_bytes(address).four_bytes(n).four_bytes(n_bytes / 16);
        fields = fields.join(&row.four_bytes(encoding.number()).four_bytes(first_row).four_bytes(n_blocks));
        if n > 0 {
            let (numbers, bytes) = encoding.block();
            most_bytes = most_bytes.max(TILES * (TILE / numbers * bytes));
        }
        n_blocks += n.div_ceil(TILES * TILE);
        first_row += n_rows;
        address += n_bytes as u64;
    }
    let outputs = first_row;
    let n_below = if factors.is_some_and(|factors| factors.a.is_some()) { columns * inputs } else { 0 };
    let n_factors = if factors.is_some() { outputs * n_parts * columns + n_below } else { 0 };
    let fields = fields.eight_bytes(to).four_bytes(outputs).four_bytes(inputs).four_bytes(n_parts);
    let fields = fields.four_bytes(columns).four_bytes(inputs + n_parts * columns);
    let fields = fields.four_bytes(modules.len()).four_bytes(n_blocks);
    let fields = with_factors(fields, factors);
    n_blocks += n_factors.div_ceil(8 * TILES * UNPACKERS);
    let launch = cuda.kernel(&QUANTISED, "unpack_quantised").fields(&fields);
    launch.programmatic_launch(cuda.is_hopper()).writes_weights().run([n_blocks, 1], UNPACKERS, most_bytes);
}

/// The fields of `Unpacked` from b on.
fn with_factors(fields: Fields, factors: Option<&UnpackFactors>) -> Fields {
    let b = |idx: usize| factors.and_then(|factors| factors.b.get(idx));
    let modules = 0..MODULES;
    let fields = modules.clone().fold(fields, |fields, i| fields.eight_bytes(b(i).map(|b| b.0)));
    let fields = fields.eight_bytes(factors.and_then(|factors| factors.a));
    let fields = modules.clone().fold(fields, |fields, i| fields.four_bytes(b(i).map_or(0, |b| b.1)));
    let fields = modules.fold(fields, |fields, i| fields.four_bytes(b(i).map_or(0, |b| b.2)));
    let (n, rank, apart) =
        factors.map_or((0, 0, 1), |factors| (factors.b.len(), factors.rank, factors.apart));
    fields.four_bytes(n).four_bytes(rank).four_bytes(apart)
}
