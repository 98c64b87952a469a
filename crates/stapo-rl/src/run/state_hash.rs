//! The hash of a state: of the state on a device, and, without a device, of the state in a checkpoint's file.

use super::state::{Counters, LoopState, PARTS, SCALES, form};
use crate::ranks::RankError;
use crate::run::disk::{hex, sha256_hex};
use rayon::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::{Metadata, TensorInfo};
use sha2::{Digest as _, Sha256};
use stapo_model::decoder::{Policy, parameter_of};
use stapo_model::optimizer::Optimizer;
use stapo_model::{Digest, Form, LEAF};
use std::ops::Range;

/// What the hash of a state begins with. Another way to hash gets another number.
const STATE_HASH: &[u8] = b"stapo state 2";

/// What the hash of a file's header and leaves begins with.
const TREE_HASH: &[u8] = b"stapo tensors 1";

/// Bytes of a state file that are hashed at a time, by threads that share them while they are in memory.
const BLOCK: usize = 64 << 20;

/// One hash of weights, optimizer state, counters and loop state, on rank 0; `None` on the others. Weights and moments are a
/// tree of hashes: their leaves are hashed where they lie, each rank its own, and the hash is over the digests.
pub(crate) fn state_hash(
    counters: Counters,
    loop_state: &LoopState,
    policy: &Policy,
    optimizer: &Optimizer,
) -> Result<Option<String>, RankError> {
    let digests = optimizer.digests(policy)?;
    Ok(digests.map(|digests| combined(&digests, counters, loop_state)))
}

/// The digests of the leaves of lists of elements, in order.
pub(super) type Digests = Vec<Vec<Digest>>;

/// The hash over the digests of every parameter's weights, first and second moments, and what is no tensor.
fn combined<'a>(
    digests: impl IntoIterator<Item = &'a Vec<Digest>>,
    counters: Counters,
    loop_state: &LoopState,
) -> String {
    let mut hash = Sha256::new();
    hash.update(STATE_HASH);
    for leaves in digests {
        add_list(&mut hash, leaves);
    }
    for count in [counters.step, counters.position, counters.n_updates] {
        hash.update(count.to_le_bytes());
    }
    for text in loop_state.iter().flat_map(|(key, value)| [key, value]) {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    }
    hex(&hash.finalize())
}

fn add_list(hash: &mut Sha256, leaves: &[Digest]) {
    hash.update((leaves.len() as u64).to_le_bytes());
    for digest in leaves {
        hash.update(digest);
    }
}

/// As [`state_hash`], from the digests of the weights of every parameter and those of its two moments.
pub(super) fn hash_of_parts(
    weights: &Digests,
    moments: &Digests,
    counters: Counters,
    loop_state: &LoopState,
) -> Result<String, String> {
    if moments.len() != 2 * weights.len() {
        return Err(format!("{} lists of moments for {} of weights", moments.len(), weights.len()));
    }
    let lists = weights.iter().zip(moments.as_chunks::<2>().0).flat_map(|(weights, [a, b])| [weights, a, b]);
    Ok(combined(lists, counters, loop_state))
}

/// Digests as bytes: of each list the number, and then the digests.
pub(super) fn to_bytes(digests: &Digests) -> Vec<u8> {
    let mut bytes = Vec::new();
    for leaves in digests {
        bytes.extend((leaves.len() as u64).to_le_bytes());
        bytes.extend(leaves.iter().flatten());
    }
    bytes
}

/// The digests that [`to_bytes`] wrote; `None` for other bytes.
pub(super) fn from_bytes(mut bytes: &[u8]) -> Option<Digests> {
    let mut digests = Vec::new();
    while !bytes.is_empty() {
        let (n, rest) = bytes.split_first_chunk::<8>()?;
        let n_bytes = usize::try_from(u64::from_le_bytes(*n)).ok()?.checked_mul(size_of::<Digest>())?;
        let (leaves, rest) = rest.split_at_checked(n_bytes)?;
        digests.push(leaves.as_chunks().0.to_vec());
        bytes = rest;
    }
    Some(digests)
}

/// The hashes of a file with tensors of a state.
pub(super) struct HashedFile {
    /// Of the whole file, where it was asked for.
    pub file: Option<String>,
    /// Of the header, which says where the tensors lie.
    pub head: String,
    pub digests: Digests,
}

impl HashedFile {
    /// Hashes the leaves of these parts of the state by several threads at once. A hash of the whole file is the work of one
    /// thread, which goes through the file block by block; the others hash the leaves that end in the block.
    pub fn compute(file: &[u8], parts: &[&str], hashes_whole: bool) -> Result<Self, String> {
        let (n_head, lists) = lists(file, parts)?;
        let mut leaves: Vec<Leaf> =
            lists.iter().enumerate().flat_map(|(idx, list)| list.leaves(idx)).collect();
        leaves.sort_by_key(|leaf| leaf.end);
        let hash_leaves = |leaves: &mut [Leaf]| {
            leaves.par_iter_mut().for_each(|leaf| leaf.digest = lists[leaf.list].digest(file, leaf));
        };
        let mut whole = hashes_whole.then(Sha256::new);
        match &mut whole {
            None => hash_leaves(&mut leaves),
            Some(whole) => {
                let mut unhashed = leaves.as_mut_slice();
                for start in (0..file.len()).step_by(BLOCK) {
                    let end = (start + BLOCK).min(file.len());
                    let (due, later) =
                        unhashed.split_at_mut(unhashed.partition_point(|leaf| leaf.end <= end));
                    rayon::join(|| whole.update(&file[start..end]), || hash_leaves(due));
                    unhashed = later;
                }
            }
        }
        leaves.sort_by_key(|leaf| (leaf.list, leaf.idx));
        let mut digests = vec![Vec::new(); lists.len()];
        for leaf in leaves {
            digests[leaf.list].push(leaf.digest);
        }
        let file_hash = whole.map(|whole| hex(&whole.finalize()));
        Ok(Self { file: file_hash, head: sha256_hex(&file[..n_head]), digests })
    }

    /// One hash of the header and the leaves, which stands for the tensors of the file.
    pub fn tree(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(TREE_HASH);
        hash.update(&self.head);
        self.digests.iter().for_each(|leaves| add_list(&mut hash, leaves));
        hex(&hash.finalize())
    }
}

/// The hash of the state in a file of weights and moments together, which [`state_hash`] gave when the file was written, and the
/// hash of the file. The error says what is wrong with the file.
pub(super) fn hash_of_one_file(
    file: &[u8],
    counters: Counters,
    loop_state: &LoopState,
) -> (String, Result<String, String>) {
    match HashedFile::compute(file, &PARTS, true) {
        Err(problem) => (sha256_hex(file), Err(problem)),
        Ok(hashed) => {
            let state = combined(&hashed.digests, counters, loop_state);
            (hashed.file.unwrap_or_default(), Ok(state))
        }
    }
}

/// The weights or a moment of one parameter, as pieces of a state file in their order.
struct List {
    form: Form,
    elements: Vec<Range<usize>>,
    scales: Vec<Range<usize>>,
}

/// The elements of a leaf, or their scales.
struct Leaf {
    list: usize,
    /// The place among the digests of the list.
    idx: usize,
    is_scales: bool,
    /// The bytes of the list's elements or scales, as if they stood in one piece.
    range: Range<usize>,
    /// Where the last of these bytes ends in the file.
    end: usize,
    digest: Digest,
}

impl List {
    fn leaves(&self, list: usize) -> impl Iterator<Item = Leaf> {
        let n_bytes = |pieces: &[Range<usize>]| pieces.iter().map(Range::len).sum::<usize>();
        let in_leaf = [LEAF * self.form.n_bytes(), 4 * self.form.n_scales(LEAF)];
        let n_leaves = n_bytes(&self.elements).div_ceil(in_leaf[0]);
        let kinds = if in_leaf[1] > 0 { 2 } else { 1 };
        (0..n_leaves).flat_map(move |leaf| {
            (0..kinds).map(move |kind| {
                let pieces = if kind == 0 { &self.elements } else { &self.scales };
                let range = leaf * in_leaf[kind]..((leaf + 1) * in_leaf[kind]).min(n_bytes(pieces));
                let end = parts(pieces, &range).map(|part| part.end).max().unwrap_or_default();
                let idx = leaf * kinds + kind;
                Leaf { list, idx, is_scales: kind == 1, range, end, digest: Digest::default() }
            })
        })
    }

    fn digest(&self, file: &[u8], leaf: &Leaf) -> Digest {
        let mut hash = Sha256::new();
        let pieces = if leaf.is_scales { &self.scales } else { &self.elements };
        parts(pieces, &leaf.range).for_each(|part| hash.update(&file[part]));
        hash.finalize().into()
    }
}

/// The parts of the file that hold a range of the bytes of these pieces.
fn parts<'a>(pieces: &'a [Range<usize>], range: &'a Range<usize>) -> impl Iterator<Item = Range<usize>> + 'a {
    let mut before = 0;
    pieces.iter().filter_map(move |piece| {
        let first = before;
        before += piece.len();
        let start = range.start.max(first);
        let end = range.end.min(before);
        (start < end).then(|| piece.start + start - first..piece.start + end - first)
    })
}

/// The bytes before the tensors of a file, and these parts of every parameter, in this order.
fn lists(file: &[u8], parts: &[&str]) -> Result<(usize, Vec<List>), String> {
    let (n_header, metadata) = SafeTensors::read_metadata(file).map_err(|error| error.to_string())?;
    let first = 8 + n_header;
    let names = metadata.offset_keys();
    let tensors = names.iter().filter_map(|name| name.strip_prefix(parts[0])?.strip_prefix('.'));
    let tensors: Vec<&str> =
        tensors.filter(|name| name.strip_suffix(SCALES).is_none_or(|name| !name.ends_with('.'))).collect();
    let mut lists = Vec::new();
    for tensors in tensors.chunk_by(|a, b| parameter_of(a) == parameter_of(b)) {
        for part in parts {
            lists.push(list(&metadata, first, part, tensors)?);
        }
    }
    Ok((first, lists))
}

fn list(metadata: &Metadata, first: usize, part: &str, tensors: &[&str]) -> Result<List, String> {
    let find = |name: String| metadata.info(&name).ok_or(format!("{name}: no such tensor"));
    let bytes = |info: &TensorInfo| first + info.data_offsets.0..first + info.data_offsets.1;
    let mut found = List { form: Form::F32, elements: Vec::new(), scales: Vec::new() };
    for tensor in tensors {
        let name = format!("{part}.{tensor}");
        let info = find(name.clone())?;
        found.form = form(part, info.dtype)
            .ok_or_else(|| format!("{name}: {:?} is no type of such a tensor", info.dtype))?;
        found.elements.push(bytes(info));
        if found.form.n_scales(1) > 0 {
            found.scales.push(bytes(find(format!("{name}.{SCALES}"))?));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Map, json};

    /// A file of tensors, in order: name, type, and content.
    fn state_file(tensors: &[(String, &str, Vec<u8>)]) -> Vec<u8> {
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (name, dtype, bytes) in tensors {
            let n = if dtype.ends_with("32") { bytes.len() / 4 } else { bytes.len() };
            let offsets = [data.len(), data.len() + bytes.len()];
            header.insert(name.clone(), json!({"dtype": dtype, "shape": [n], "data_offsets": offsets}));
            data.extend(bytes);
        }
        let mut header = serde_json::Value::Object(header).to_string();
        header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
    }

    /// Three stacked tensors of which the first ends inside a leaf, and a single one, with moments of 8 bits: as a GPU
    /// hashes them, by the definition of leaves.
    #[test]
    fn stacked_tensors_and_scales_are_hashed_as_a_device_hashes_them() {
        let bytes =
            |seed: usize, n: usize| -> Vec<u8> { (0..n).map(|i| ((i * 7 + seed) % 251) as u8).collect() };
        let lengths = [("q_proj", 20_480), ("k_proj", 256), ("v_proj", 512)]
            .map(|(name, n)| (format!("model.layers.0.self_attn.{name}.weight"), n));
        let alone = ("model.norm.weight".to_string(), 300);
        let parameters = [lengths.to_vec(), vec![alone]];
        let mut tensors = Vec::new();
        for (idx, (name, n)) in parameters.iter().flatten().enumerate() {
            tensors.push((format!("weight.{name}"), "F32", bytes(idx, 4 * n)));
        }
        for (idx, (name, n)) in parameters.iter().flatten().enumerate() {
            for (part, dtype, seed) in [("moment1", "I8", 40), ("moment2", "U8", 80)] {
                tensors.push((format!("{part}.{name}"), dtype, bytes(seed + idx, *n)));
                let scales = bytes(seed + 20 + idx, 4 * n.div_ceil(Form::SCALED));
                tensors.push((format!("{part}.{name}.scales"), "F32", scales));
            }
        }
        let content = |name: &str| {
            tensors.iter().find(|(found, ..)| found == name).map_or(Vec::new(), |(_, _, bytes)| bytes.clone())
        };
        let mut expected = Vec::new();
        for parameter in &parameters {
            for (part, n_bytes) in [("weight", 4), ("moment1", 1), ("moment2", 1)] {
                let joined = |ending: &str| -> Vec<u8> {
                    parameter
                        .iter()
                        .flat_map(|(name, _)| content(&format!("{part}.{name}{ending}")))
                        .collect()
                };
                let (elements, scales) = (joined(""), joined(".scales"));
                let mut scales = scales.chunks(4 * LEAF / Form::SCALED);
                let mut digests: Vec<Digest> = Vec::new();
                for leaf in elements.chunks(LEAF * n_bytes) {
                    digests.push(Sha256::digest(leaf).into());
                    digests.extend(scales.next().map(|scales| Digest::from(Sha256::digest(scales))));
                }
                expected.push(digests);
            }
        }
        let counters = Counters { step: 3, position: 2, n_updates: 1 };
        let loop_state = LoopState::from([("key".to_string(), "value".to_string())]);
        let file = state_file(&tensors);
        let expected_hash = combined(&expected, counters, &loop_state);
        let (file_hash, state) = hash_of_one_file(&file, counters, &loop_state);
        assert_eq!((file_hash, state), (sha256_hex(&file), Ok(expected_hash.clone())));
        assert!(hash_of_one_file(&file[..file.len() - 1], counters, &loop_state).1.is_err());
        // The same state in two files.
        let split = |prefix: &str| {
            let chosen: Vec<_> =
                tensors.iter().filter(|(name, ..)| name.starts_with(prefix)).cloned().collect();
            state_file(&chosen)
        };
        let weights = HashedFile::compute(&split("weight"), &PARTS[..1], false).unwrap();
        let moments = HashedFile::compute(&split("moment"), &PARTS[1..], true).unwrap();
        assert_eq!(moments.file, Some(sha256_hex(&split("moment"))));
        let kept = from_bytes(&to_bytes(&moments.digests)).unwrap();
        let found = hash_of_parts(&weights.digests, &kept, counters, &loop_state);
        assert_eq!(found, Ok(expected_hash));
        assert!(from_bytes(&to_bytes(&kept)[1..]).is_none());
        assert!(hash_of_parts(&weights.digests, &kept[1..].to_vec(), counters, &loop_state).is_err());
    }
}
