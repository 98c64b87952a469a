//! Prefill over a paged cache on the GPU: the kernel for many query tokens gives the bits of packed attention. Without a GPU these
//! tests print that they are skipped, and pass.

use super::parity::{compute, empty, gpu, numbers, ruled_attention_case, sinks};
use crate::attention::cuda::LONG_TOKENS;
use crate::attention::paged::{self, Prefill};
use crate::attention::{Heads, Inputs, ScoreRule};
use crate::cuda::Precision;
use crate::testing::{bits, upload};
use crate::{Buffer, Device};

/// Tokens of a sequence that are in the cache, and tokens that are new.
type Parts = (usize, usize);

/// The outputs of the new tokens. The slots behind a sequence's last token, to the end of its last block, hold NaN.
fn prefill_case(
    device: &Device,
    (heads, rule, has_sinks): (Heads, ScoreRule, bool),
    sequences: &[Parts],
    block_size: usize,
    prefill: Option<Prefill>,
) -> Vec<f32> {
    let width = heads.qkv_width();
    let lens: Vec<usize> = sequences.iter().map(|(before, new)| before + new).collect();
    let all = numbers(1, lens.iter().sum::<usize>() * width);
    let table_width = lens.iter().map(|len| len.div_ceil(block_size)).max().unwrap();
    // The blocks of different sequences alternate in the cache.
    let block = |s: usize, i: usize| ((table_width - 1 - i) * sequences.len() + s) as u32;
    let n_blocks = table_width * sequences.len();
    let dims = paged::CacheDims { blocks: n_blocks, block_size, kv_heads: heads.kv, head_dim: heads.dim };
    let mut cache = paged::Cache::zeros(device, dims).unwrap();
    let mut store = |rows: &[f32], slots: &[u32]| {
        if slots.is_empty() {
            return;
        }
        let (rows, slots) = (compute(device, rows), upload(device, slots));
        paged::store(device, slots.len(), heads, rows.view(), slots.view(), &mut cache);
    };
    let (mut rows, mut slots, mut offsets, mut contexts, mut tables) =
        (Vec::new(), Vec::new(), vec![0], Vec::new(), Vec::new());
    let mut start = 0;
    for (s, &(before, new)) in sequences.iter().enumerate() {
        let slot = |p: usize| block(s, p / block_size) * block_size as u32 + (p % block_size) as u32;
        let of_tokens = |from: usize, end: usize| &all[(start + from) * width..(start + end) * width];
        let rest = before + new..(before + new).next_multiple_of(block_size);
        store(&vec![f32::NAN; rest.len() * width], &rest.map(slot).collect::<Vec<_>>());
        store(of_tokens(0, before), &(0..before).map(slot).collect::<Vec<_>>());
        rows.extend_from_slice(of_tokens(before, before + new));
        slots.extend((before..before + new).map(slot));
        offsets.push(offsets[s] + new as u32);
        contexts.push((before + new) as u32);
        tables.extend((0..table_width).map(|i| block(s, i)));
        start += before + new;
    }
    let n_tokens = slots.len();
    let qkv = compute(device, &rows);
    let sinks = has_sinks.then(|| sinks(device, heads));
    let [slots, offsets, contexts, tables] =
        [&slots, &offsets, &contexts, &tables].map(|x| upload(device, x));
    let lists = paged::Sequences {
        offsets: offsets.view(),
        contexts: contexts.view(),
        tables: tables.view(),
        groups: None,
        prefill,
    };
    let call = paged::Dims { tokens: n_tokens, sequences: sequences.len(), heads, rule, table_width };
    let inputs = Inputs { qkv: qkv.view(), sinks: sinks.as_ref().map(Buffer::view) };
    let mut out = empty(device, n_tokens * heads.out_width());
    paged::forward(device, call, inputs, slots.view(), &mut cache, lists, out.view_mut());
    out.view().to_vec()
}

/// Compares the outputs of the new tokens with those of whole packed sequences; the first `n_single` sequences are decoded.
fn check_prefill(device: &Device, rule: (Heads, ScoreRule, bool), sequences: &[Parts], n_single: usize) {
    let out_width = rule.0.out_width();
    let lens: Vec<usize> = sequences.iter().map(|(before, new)| before + new).collect();
    let packed = &ruled_attention_case(device, rule, &lens)[0];
    let mut expected = Vec::new();
    let mut start = 0;
    for (before, new) in sequences {
        expected.extend_from_slice(&packed[(start + before) * out_width..(start + before + new) * out_width]);
        start += before + new;
    }
    let n_tokens_before = sequences[..n_single].iter().map(|(_, new)| new).sum();
    let prefills = [LONG_TOKENS - 1, LONG_TOKENS]
        .map(|mean_keys| Some(Prefill { n_sequences_before: n_single, n_tokens_before, mean_keys }));
    // Every block size with the plain rule and heads of 128, and the one that engines choose with the others.
    let is_plain = rule.1 == ScoreRule::plain(rule.0.dim) && !rule.2;
    let block_sizes = match rule.0.dim {
        128 if is_plain => &[16, 32, 64, 128][..],
        96 if is_plain => &[64],
        256 if is_plain => &[16],
        _ => &[32],
    };
    for (&block_size, prefill) in block_sizes.iter().flat_map(|size| prefills.map(|prefill| (size, prefill)))
    {
        let got = prefill_case(device, rule, sequences, block_size, prefill);
        let differs =
            |(row, (got, expected)): (usize, (&[f32], &[f32]))| (bits(got) != bits(expected)).then_some(row);
        let rows = got.chunks(out_width).zip(expected.chunks(out_width)).enumerate();
        let differ: Vec<usize> = rows.filter_map(differs).collect();
        assert!(differ.is_empty(), "{rule:?}, blocks of {block_size}, {prefill:?}: rows {differ:?} differ");
    }
}

/// The plain rule and two others, each by its number.
fn check_heads(heads: Heads, others: [usize; 2]) {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    // Whole prompts and chunks, which begin and end anywhere among steps of 64 keys and splits of 1024.
    let whole = [1, 63, 64, 65, 500, 1023, 1025, 3000].map(|n| (0, n));
    let chunks = [(1, 130), (63, 1), (64, 64), (65, 200), (960, 70), (1000, 500), (1024, 130), (2500, 3)];
    let plain = ScoreRule::plain(heads.dim);
    let windows = [100, 650].map(|window| ScoreRule { window: Some(window), ..plain });
    let capped = ScoreRule { softcap: Some(2.0), ..windows[1] };
    let rules = [(plain, true), (windows[0], false), (windows[1], true), (capped, false)];
    for rule in [(plain, false), rules[others[0]], rules[others[1]]] {
        let rule = (heads, rule.0, rule.1);
        check_prefill(device, rule, &whole, 0);
        check_prefill(device, rule, &[&[(700, 1), (29, 1), (1024, 3)], &chunks[..]].concat(), 3);
    }
}

#[test]
fn prefill_on_cuda_gives_the_bits_of_packed_attention() {
    check_heads(Heads { query: 4, kv: 2, dim: 128 }, [1, 2]);
}

#[test]
fn prefill_of_heads_of_64_on_cuda_gives_the_bits_of_packed_attention() {
    check_heads(Heads { query: 8, kv: 1, dim: 64 }, [0, 2]);
}

#[test]
fn prefill_of_heads_of_96_on_cuda_gives_the_bits_of_packed_attention() {
    check_heads(Heads { query: 3, kv: 1, dim: 96 }, [2, 3]);
}

#[test]
fn prefill_of_wide_heads_on_cuda_gives_the_bits_of_packed_attention() {
    check_heads(Heads { query: 4, kv: 2, dim: 256 }, [1, 3]);
}
