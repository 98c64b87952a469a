use std::sync::Arc;

use super::{Digest, LEAF};
use crate::Form;
use crate::cuda::kernels::SHA256;
use crate::cuda::{Cuda, ElementType, Memory, Slice};

/// Threads of a block, each with a separate piece.
const THREADS: usize = 128;

/// Waits once for all slices.
pub(super) fn leaves(cuda: &Arc<Cuda>, slices: &[Slice]) -> Vec<Vec<Digest>> {
    let pieces: Vec<Vec<(u64, usize)>> = slices.iter().map(|slice| pieces(*slice)).collect();
    let mut digests = of_pieces(cuda, &pieces.concat()).into_iter();
    pieces.iter().map(|pieces| digests.by_ref().take(pieces.len()).collect()).collect()
}

/// The address and the bytes of what is hashed of a slice.
fn pieces(slice: Slice) -> Vec<(u64, usize)> {
    let exact = slice.exact_master();
    assert!(exact.masters.is_none(), "sha256: other ranks have masters of these {} elements", slice.len);
    let mut pieces = Vec::with_capacity(exact.len.div_ceil(LEAF));
    for start in (0..exact.len).step_by(LEAF) {
        let part = exact.part(start, LEAF.min(exact.len - start));
        pieces.push((part.address, part.len * part.kind.n_bytes()));
        pieces.extend(part.scales.map(|address| (address, 4 * part.len.div_ceil(Form::SCALED))));
    }
    pieces
}

/// The SHA-256 of pieces of the GPU's memory, each by its address, a multiple of 16, and its number of bytes.
fn of_pieces(cuda: &Arc<Cuda>, pieces: &[(u64, usize)]) -> Vec<Digest> {
    let halves = |x: u64| [x as u32, (x >> 32) as u32];
    let words: Vec<u32> =
        pieces.iter().flat_map(|&(address, n_bytes)| [address, n_bytes as u64]).flat_map(halves).collect();
    let table = Memory::scratch(cuda, words.len(), ElementType::U32);
    let digests = Memory::scratch(cuda, 8 * pieces.len(), ElementType::U32);
    cuda.write(&words, table.slice());
    let launch = cuda.kernel(&SHA256, "sha256_pieces").arg(table.slice()).arg(digests.slice());
    launch.arg(pieces.len()).run([pieces.len().div_ceil(THREADS), 1], THREADS, 0);
    let mut states = vec![0u32; 8 * pieces.len()];
    cuda.read(digests.slice(), &mut states);
    let digest = |state: &[u32]| std::array::from_fn(|byte| state[byte / 4].to_be_bytes()[byte % 4]);
    states.chunks_exact(8).map(digest).collect()
}
