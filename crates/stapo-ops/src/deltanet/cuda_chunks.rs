//! The recurrence in chunks of 64 rows, see chunk.cu.

use std::sync::Arc;

use super::cuda_inputs::{Destination, Inputs, RecurrenceGradients, takes_rows};
use super::{CHUNK, Heads};
use crate::cuda::kernels::DELTANET_CHUNKS;
use crate::cuda::{Cuda, ElementType, Fields, Memory, Slice};

/// Rows of a block of the triangular system.
const BLOCK: usize = 16;
/// Rows of one value head that are kept between calls: `KEPT_ROWS` of chunk.cu.
pub(super) const KEPT_ROWS: usize = 2 * CHUNK + BLOCK;
/// Numbers of one value head that are kept between calls: `KEPT_NUMBERS` of chunk.cu.
pub(super) const KEPT_NUMBERS: usize = CHUNK + BLOCK * BLOCK;
/// Numbers of `Gates64` of chunk.cu.
const GATES: usize = 5 * CHUNK + BLOCK * BLOCK;
/// Bytes of a tile of `CHUNK` rows and columns in shared memory.
const SQUARE_BYTES: usize = 2 * CHUNK * (CHUNK + 8);
const PREPARE_THREADS: usize = 128;
/// The most threads of a block that load chunks, as in tile.cu.
const MAX_LOADERS: usize = 128;

/// Bytes of a tile of so many rows in shared memory.
fn tile_bytes(rows: usize, dim: usize) -> usize {
    2 * rows * (dim + 8)
}

/// `PrepareShared` of prepare.cu.
fn prepare_bytes(dim: usize) -> usize {
    tile_bytes(2 * CHUNK, dim) + 2 * SQUARE_BYTES + 4 * (CHUNK * BLOCK + GATES)
}

/// `STAGES` of tile.cu.
fn stages_bytes(dim: usize) -> usize {
    let n_stages = if dim > 64 { 3 } else { 2 };
    n_stages * (tile_bytes(3 * CHUNK, dim) + 2 * SQUARE_BYTES + 4 * GATES)
}

/// `DecodeShared` of decode.cu, rounded up.
fn decode_bytes(dim: usize) -> usize {
    let weights = 2 * (BLOCK + 2) * (CHUNK + 8);
    let numbers = BLOCK * BLOCK + 4 * CHUNK + BLOCK + 4;
    tile_bytes(2 * CHUNK + 2 * BLOCK, dim) + weights + 4 * numbers + 2 * (3 + 3 * 7) * dim
}

/// `RowsShared` of tile_backward.cu.
fn rows_bytes(dim: usize) -> usize {
    tile_bytes(5 * CHUNK, dim) + 2 * SQUARE_BYTES + 4 * (4 * CHUNK + 2 * dim / 16 * CHUNK)
}

impl Heads {
    /// Bytes of what is computed of one chunk in front of the recurrence.
    fn prepared_bytes(self) -> usize {
        self.value * (2 * 2 * CHUNK * CHUNK + 4 * GATES)
    }

    /// Bytes that a GPU in bf16 takes for a while to go back through `n_rows` rows: systems of chunks, states in front of them and
    /// gradients of those behind them, corrected values and their gradients, and gradients of queries and keys by value head. Sequences
    /// count as if they had a chunk each.
    pub fn backward_bytes(self, n_rows: usize) -> usize {
        let chunk = self.prepared_bytes() + 2 * 2 * self.state_len();
        let row = 2 * (2 * self.value_width() + 2 * self.value * self.key_dim) + 4 * 2 * self.value;
        2 * n_rows.div_ceil(CHUNK) * chunk + n_rows * row
    }
}

/// Memory of what is computed of all chunks in front of the recurrence.
struct Prepared {
    /// At least as many as there are.
    n_chunks: usize,
    squares: Memory,
    gates: Memory,
}

impl Prepared {
    fn new(cuda: &Arc<Cuda>, inputs: &Inputs) -> Self {
        let d = inputs.d;
        // A sequence that goes on may begin and end within a chunk; single rows of such sequences are decode's.
        let n_borders = match inputs.carried {
            None => d.sequences,
            Some(_) => 2 * d.sequences.min(d.tokens - d.sequences),
        };
        let n_chunks = d.tokens / CHUNK + n_borders;
        let n = n_chunks * d.heads.value;
        let squares = Memory::scratch(cuda, 2 * n * CHUNK * CHUNK, ElementType::Bf16);
        Self { n_chunks, squares, gates: Memory::scratch(cuda, n * GATES, ElementType::F32) }
    }
}

/// What goes out of the chunks: see `ChunkArgs` of chunk.cu.
#[derive(Default)]
struct ChunkOutputs {
    borders: Option<Slice>,
    corrected: Option<Slice>,
    out: Option<Slice>,
}

impl ChunkOutputs {
    fn rows(to: Destination) -> Self {
        Self { out: Some(to.outputs), ..Self::default() }
    }
}

/// `ChunkArgs` of chunk.cu.
fn chunk_args(cuda: &Cuda, inputs: &Inputs, prepared: Option<&Prepared>, to: &ChunkOutputs) -> Fields {
    let chunk = inputs.carried.and_then(|carried| carried.chunk);
    let fields = Fields::default().eight_bytes(inputs.raw).eight_bytes(inputs.mixed);
    let fields = fields.eight_bytes(inputs.a_log).eight_bytes(inputs.dt_bias);
    let fields = fields.eight_bytes(inputs.carried.map(|carried| carried.recurrent));
    let fields = fields.eight_bytes(chunk.map(|chunk| chunk[0])).eight_bytes(chunk.map(|chunk| chunk[1]));
    let fields = fields.eight_bytes(prepared.map(|prepared| prepared.squares.slice()));
    let fields = fields.eight_bytes(prepared.map(|prepared| prepared.gates.slice()));
    let fields = fields.eight_bytes(to.borders).eight_bytes(to.corrected).eight_bytes(to.out);
    fields.join(&inputs.heads()).four_bytes(n_slices(cuda, inputs)).join(&inputs.sequences())
}

/// Blocks that share the columns of a value head in kernels that take the chunks of a sequence in order. A warp has sixteen columns;
/// where each of two blocks finds a multiprocessor, the two share them. No bit depends on the choice.
fn n_slices(cuda: &Cuda, inputs: &Inputs) -> usize {
    let n_heads = inputs.d.heads.value * inputs.d.sequences;
    if 2 * n_heads <= cuda.gpu.multiprocessors as usize { 2 } else { 1 }
}

/// The grid and the threads of such kernels: of those that compute and of those that load, see tile.cu.
fn sequential_shape(cuda: &Cuda, inputs: &Inputs) -> ([usize; 2], usize) {
    let Heads { value, value_dim, .. } = inputs.d.heads;
    let n_slices = n_slices(cuda, inputs);
    let threads = 2 * value_dim / n_slices;
    ([value * n_slices, inputs.d.sequences], threads + threads.min(MAX_LOADERS))
}

fn run_prepared(cuda: &Arc<Cuda>, inputs: &Inputs, args: &Fields, n_chunks: usize) {
    let heads = inputs.d.heads;
    let dim = heads.key_dim;
    let launch = cuda.kernel(&DELTANET_CHUNKS, "deltanet_prepare").head_dim(dim).fields(args);
    launch.run([n_chunks, heads.key], PREPARE_THREADS, prepare_bytes(dim));
    let (grid, threads) = sequential_shape(cuda, inputs);
    let launch = cuda.kernel(&DELTANET_CHUNKS, "deltanet_chunks").head_dim(dim).fields(args);
    launch.run(grid, threads, stages_bytes(dim));
}

/// Whether a call has rows that [`decode`] does not take, which are the single rows of sequences that go on.
pub(super) fn has_chunks(inputs: &Inputs) -> bool {
    let d = inputs.d;
    let is_carried = inputs.carried.is_some();
    assert!(!is_carried || d.tokens >= d.sequences, "deltanet: a sequence that goes on has no row");
    !is_carried || d.tokens > d.sequences
}

/// From the rows that the recurrence takes in to its outputs.
pub(super) fn forward(cuda: &Arc<Cuda>, inputs: &Inputs, to: Destination) {
    if !has_chunks(inputs) {
        return;
    }
    let d = inputs.d;
    let prepared = Prepared::new(cuda, inputs);
    let args = chunk_args(cuda, inputs, Some(&prepared), &ChunkOutputs::rows(to));
    run_prepared(cuda, inputs, &args, prepared.n_chunks);
    if inputs.carried.is_some() {
        let launch = cuda.kernel(&DELTANET_CHUNKS, "deltanet_keep_chunk").head_dim(d.heads.key_dim);
        launch.fields(&args).run([d.heads.value, d.sequences], PREPARE_THREADS, 0);
    }
}

/// The same for single rows of sequences that go on. Where rows_tile.cu takes the rows, all of its work besides: from the input to the
/// output.
pub(super) fn decode(cuda: &Arc<Cuda>, inputs: &Inputs, to: Destination) {
    let Some(carried) = inputs.carried else { return };
    let d = inputs.d;
    let dim = d.heads.key_dim;
    let is_whole = takes_rows(cuda, d.heads, d.kernel);
    let of_rows = |slice| is_whole.then_some(slice);
    let args = chunk_args(cuda, inputs, None, &ChunkOutputs::rows(to)).eight_bytes(of_rows(inputs.conv));
    let args = args.eight_bytes(of_rows(inputs.norm)).eight_bytes(of_rows(carried.rows));
    let args = args.eight_bytes(to.out).four_bytes(to.pitch).four_bytes(d.eps as f32);
    let launch = cuda.kernel(&DELTANET_CHUNKS, "deltanet_decode").head_dim(dim).fields(&args);
    // In a call with chunks, other kernels of this call write what the kernel reads first.
    launch.programmatic_launch(!has_chunks(inputs)).run([d.heads.value, d.sequences], dim, decode_bytes(dim));
}

/// Computes the states in front of all chunks again, goes back through the chunks of each sequence, and then through the rows of all
/// chunks at once.
pub(super) fn backward(
    cuda: &Arc<Cuda>,
    inputs: &Inputs,
    d_outputs: Slice,
    d_mixed: Slice,
    to: &RecurrenceGradients,
) {
    let d = inputs.d;
    let (dim, n_values) = (d.heads.key_dim, d.tokens * d.heads.value_width());
    let prepared = Prepared::new(cuda, inputs);
    let n_states = prepared.n_chunks * d.heads.state_len();
    let [borders, d_borders] = [(); 2].map(|()| Memory::scratch(cuda, n_states, ElementType::Bf16));
    let [corrected, y] = [(); 2].map(|()| Memory::scratch(cuda, n_values, ElementType::Bf16));
    let outputs =
        ChunkOutputs { borders: Some(borders.slice()), corrected: Some(corrected.slice()), out: None };
    let args = chunk_args(cuda, inputs, Some(&prepared), &outputs);
    run_prepared(cuda, inputs, &args, prepared.n_chunks);
    let args = args.eight_bytes(d_outputs).eight_bytes(y.slice()).eight_bytes(d_borders.slice());
    let args = args.eight_bytes(to.keyed.slice()).eight_bytes(to.gates.slice());
    let args = args.eight_bytes(d_mixed).eight_bytes(d.tokens);
    let (grid, threads) = sequential_shape(cuda, inputs);
    let launch = cuda.kernel(&DELTANET_CHUNKS, "deltanet_states_backward").head_dim(dim).fields(&args);
    launch.run(grid, threads, stages_bytes(dim));
    let launch = cuda.kernel(&DELTANET_CHUNKS, "deltanet_rows_backward").head_dim(dim).fields(&args);
    launch.run([prepared.n_chunks, d.heads.value], 2 * dim, rows_bytes(dim));
}
