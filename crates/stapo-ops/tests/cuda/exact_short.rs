//! Packed attention of short sequences on the GPU, whose kernel takes two heads at a time, gives the bits of one long sequence, whose
//! kernel takes one. Without a GPU these tests print that they are skipped, and pass.

use super::parity::{compute, empty, gpu, numbers, sinks};
use crate::attention::cuda::SHORT_TOKENS;
use crate::attention::{self, Heads, Inputs, ScoreRule};
use crate::cuda::Precision;
use crate::testing::{bits, upload};
use crate::{Buffer, Device};

type Ruled = (Heads, ScoreRule, bool);

/// out and lse of sequences that are the first `lens` rows of `whole`.
fn forward(device: &Device, (heads, rule, has_sinks): Ruled, whole: &[f32], lens: &[usize]) -> [Vec<f32>; 2] {
    let rows: Vec<f32> = lens.iter().flat_map(|len| &whole[..len * heads.qkv_width()]).copied().collect();
    let tokens = lens.iter().sum();
    let mut offsets = vec![0];
    offsets.extend(lens.iter().scan(0, |end, len| {
        *end += *len as u32;
        Some(*end)
    }));
    let (qkv, offsets) = (compute(device, &rows), upload(device, &offsets));
    let sinks = has_sinks.then(|| sinks(device, heads));
    let inputs = Inputs { qkv: qkv.view(), sinks: sinks.as_ref().map(Buffer::view) };
    let mut out = empty(device, tokens * heads.out_width());
    let mut lse = upload(device, &vec![f32::NAN; tokens * heads.query]);
    let dims = attention::Dims { tokens, sequences: lens.len(), heads, rule };
    attention::forward(device, dims, inputs, offsets.view(), out.view_mut(), lse.view_mut());
    [out.view().to_vec(), lse.view().to_vec()]
}

/// A row depends on the rows before it in its sequence alone, so a short sequence has the first rows of a long one.
fn check(device: &Device, ruled: Ruled, lens: &[usize]) {
    let heads = ruled.0;
    let n = 2 * SHORT_TOKENS;
    assert!(lens.iter().sum::<usize>() < SHORT_TOKENS * lens.len() && lens.iter().all(|len| *len <= n));
    let whole = numbers(1, n * heads.qkv_width());
    let expected = forward(device, ruled, &whole, &[n]);
    assert!(expected.iter().flatten().all(|x| x.is_finite()));
    let got = forward(device, ruled, &whole, lens);
    for (what, width, got, expected) in
        [("out", heads.out_width(), &got[0], &expected[0]), ("lse", heads.query, &got[1], &expected[1])]
    {
        let mut start = 0;
        for len in lens {
            let rows = start * width..(start + len) * width;
            let same = bits(&got[rows]) == bits(&expected[..len * width]);
            assert!(same, "{ruled:?}: {what} of {len} tokens from row {start} on");
            start += len;
        }
    }
}

#[test]
fn short_sequences_of_every_length_on_cuda_have_the_bits_of_a_long_one() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    let heads = Heads { query: 2, kv: 1, dim: 64 };
    let lens: Vec<usize> = (1..=512).collect();
    check(device, (heads, ScoreRule::plain(heads.dim), false), &lens);
}

#[test]
fn short_sequences_on_cuda_have_the_bits_of_a_long_one_under_every_rule() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    // Two sequences have tiles behind those that come last; one is empty.
    let lens: Vec<usize> =
        (1..512).step_by(37).chain([1024, 0, 64, 128, 129, 256, 512, 65, 700, 1]).collect();
    for (query, kv, dim) in [(4, 2, 64), (6, 1, 96), (16, 8, 128), (4, 4, 128), (3, 1, 128), (4, 2, 256)] {
        let heads = Heads { query, kv, dim };
        let plain = ScoreRule::plain(dim);
        let windowed = ScoreRule { window: Some(100), ..plain };
        let capped = ScoreRule { softcap: Some(2.0), ..plain };
        for ruled in [(heads, plain, false), (heads, windowed, true), (heads, capped, false)] {
            check(device, ruled, &lens);
        }
    }
}
