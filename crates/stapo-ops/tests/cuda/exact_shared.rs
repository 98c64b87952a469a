//! Tests on the GPU of keys that lie apart from the queries, as those of a prompt that several responses share. Without a GPU these
//! tests print that they are skipped, and pass.

use super::parity::{HEADS, check, compute, gpu, numbers};
use crate::attention::cuda::LONG_TOKENS;
use crate::attention::tests::shared::{GROUPS, Group, Tree, assert_shares, rules, tree_case};
use crate::attention::{Heads, ScoreRule};
use crate::cuda::Precision;
use crate::dtype::{bf16_to_f32, f32_to_bf16};
use crate::embedding;
use crate::testing::{bits, ids, upload};

/// Groups and chunks for every kernel: short, pipelined and long, with first queries on both sides of steps of keys.
fn trees() -> Vec<Tree> {
    const LONG: usize = LONG_TOKENS + 100;
    let pipelined = [
        Group { prompt: 1100, responses: &[300, 1, 64, 257] },
        Group { prompt: 640, responses: &[63, 65] },
        Group { prompt: 2047, responses: &[2, 130] },
    ];
    let chunks = [(37, 100), (3, 3), (0, 70), (1, 130), (65, 300)];
    vec![
        Tree::new(&GROUPS),
        Tree::new(&pipelined),
        Tree::new(&[Group { prompt: LONG, responses: &[100, 70] }]),
        Tree::chunks(&chunks),
        Tree::chunks(&[(200, 1100), (700, 700), (1, 2048), (130, 3000)]),
    ]
}

/// Every tree with these heads, each with one of the rules.
fn check_shares(precision: Precision, range: std::ops::Range<usize>) {
    let Some(device) = &gpu(precision) else { return };
    let (within, most) = if precision == Precision::Bf16 { (1e-2, usize::MAX) } else { (1e-5, 5000) };
    for (h, heads) in HEADS.into_iter().enumerate().filter(|(h, _)| range.contains(h)) {
        let windowed = ScoreRule { window: Some(650), ..ScoreRule::plain(heads.dim) };
        let rules: Vec<_> = rules(heads).into_iter().chain([windowed]).collect();
        for (t, tree) in trees().iter().enumerate().filter(|(_, tree)| tree.n_tokens < most) {
            assert_shares(device, (heads, rules[(h + t) % rules.len()]), tree, within);
        }
    }
}

#[test]
fn shared_keys_on_cuda_give_the_bits_of_whole_sequences_and_the_sums_of_their_gradients() {
    check_shares(Precision::Bf16, 0..4);
}

#[test]
fn shared_keys_of_heads_of_96_and_128_on_cuda_give_the_bits_of_whole_sequences() {
    check_shares(Precision::Bf16, 4..6);
}

#[test]
fn shared_keys_of_wide_heads_on_cuda_give_the_bits_of_whole_sequences() {
    check_shares(Precision::Bf16, 6..7);
}

#[test]
fn shared_keys_on_cuda_in_f32_give_the_bits_of_whole_sequences() {
    check_shares(Precision::F32, 0..7);
}

#[test]
fn shared_keys_on_cuda_agree_with_the_cpu() {
    let heads = [(1, 1, 6), (4, 2, 128), (6, 2, 64), (3, 1, 96), (4, 2, 256)];
    for heads in heads.map(|(query, kv, dim)| Heads { query, kv, dim }) {
        for rule in rules(heads) {
            for tree in [Tree::new(&GROUPS), Tree::new(&[Group { prompt: 700, responses: &[300, 65, 1] }])] {
                let qkv = numbers(1, tree.n_tokens * heads.qkv_width());
                let d_out = numbers(2, tree.n_tokens * heads.out_width());
                check(&format!("shared keys {heads:?} {rule:?}"), |device| {
                    tree_case(device, (heads, rule), &tree, &qkv, &d_out)
                });
            }
        }
    }
}

/// The last row of a prompt is scored once for each response: its gradient is their sum, in order, in f32, and is rounded once.
#[test]
fn gradients_of_a_repeated_row_on_cuda_are_added_in_f32() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    for width in [64, 33, 4104] {
        let dims = embedding::Dims { tokens: 700, vocab: 5, width };
        let ids = ids(1, dims.tokens, dims.vocab);
        let d_out = numbers(2, dims.tokens * width);
        let mut sums = vec![0.0f32; dims.vocab * width];
        for (id, row) in ids.iter().zip(d_out.chunks(width)) {
            sums[*id as usize * width..][..width].iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
        let rounded: Vec<f32> = sums.iter().map(|x| bf16_to_f32(f32_to_bf16(*x))).collect();
        let mut d_table = compute(device, &vec![0.0; sums.len()]);
        let (ids, d_out) = (upload(device, &ids), compute(device, &d_out));
        embedding::backward(device, dims, ids.view(), d_out.view(), d_table.view_mut());
        assert_eq!(bits(&d_table.view().to_vec()), bits(&rounded), "rows of {width}");
    }
}
