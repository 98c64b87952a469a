//! The parts that some families of models have, on the GPU against the CPU, and generation against training bit for bit. Without
//! a GPU these tests print that they are skipped, and pass.

use super::parity::{check, check_within, compute, empty, gpu, numbers, ruled_attention_case, scores, sinks};
use crate::attention::paged::{self, SPLIT_KEYS};
use crate::attention::{Heads, Inputs, ScoreRule};
use crate::cuda::Precision;
use crate::fused::matmul_add_rmsnorm::Product;
use crate::fused::matmul_rmsnorm_add::{self, NormedResult};
use crate::lm_head::LogitRule;
use crate::rope::{Frequencies, HeadNorm, HeadNormGrad, HeadNormSums, NormExtent, Scaling, Table};
use crate::testing::{Tensors, bits, ids, upload, weight};
use crate::{Buffer, Device, matmul, residual, rmsnorm, rope, swiglu};

const HEADS: [Heads; 5] = [
    Heads { query: 7, kv: 1, dim: 10 },
    Heads { query: 4, kv: 2, dim: 64 },
    Heads { query: 3, kv: 1, dim: 96 },
    Heads { query: 4, kv: 2, dim: 128 },
    Heads { query: 4, kv: 1, dim: 256 },
];

/// Rules of scores, each with sinks and without.
fn rules(heads: Heads) -> impl Iterator<Item = (Heads, ScoreRule, bool)> {
    let plain = ScoreRule::plain(heads.dim);
    let rules = [
        plain,
        ScoreRule { window: Some(1), ..plain },
        ScoreRule { window: Some(100), ..plain },
        ScoreRule { window: Some(1300), scale: 0.8 * plain.scale, softcap: None },
        ScoreRule { softcap: Some(1.5), scale: 0.7 * plain.scale, window: None },
        ScoreRule { softcap: Some(2.0), scale: plain.scale, window: Some(700) },
    ];
    rules.into_iter().flat_map(move |rule| [false, true].map(|has_sinks| (heads, rule, has_sinks)))
}

/// Every rule with some of these heads, with sinks or without them, and every third on sequences of several splits.
fn check_rules(range: std::ops::Range<usize>) {
    for (h, heads) in HEADS.into_iter().enumerate().filter(|(h, _)| range.contains(h)) {
        for (r, pair) in rules(heads).collect::<Vec<_>>().chunks(2).enumerate() {
            let rule = pair[(h + r) % 2];
            let long = (r % 3 == h % 3).then_some(&[2100, 1][..]);
            for lengths in [&[33][..], &[1, 130, 5, 64, 127, 128, 129, 2]].into_iter().chain(long) {
                // A sink's gradient is a sum over all rows, in which terms of both signs nearly cancel.
                check_within(&format!("attention {rule:?} {lengths:?}"), 1.2e-2, |device| {
                    ruled_attention_case(device, rule, lengths)
                });
            }
        }
    }
}

#[test]
fn attention_under_every_rule_on_cuda_agrees_with_the_cpu() {
    check_rules(0..2);
}

#[test]
fn attention_of_heads_of_96_and_128_under_every_rule_on_cuda_agrees_with_the_cpu() {
    check_rules(2..4);
}

#[test]
fn attention_of_wide_heads_under_every_rule_on_cuda_agrees_with_the_cpu() {
    check_rules(4..5);
}

/// One sequence through the cache in chunks and single tokens, on both sides of the borders of splits.
fn paged_case(
    device: &Device,
    (heads, rule, has_sinks): (Heads, ScoreRule, bool),
    chunks: &[usize],
) -> Vec<f32> {
    let sinks = has_sinks.then(|| sinks(device, heads));
    let (len, width, block_size): (usize, _, _) = (chunks.iter().sum(), heads.qkv_width(), 32);
    let all = numbers(1, len * width);
    let n_blocks = len.div_ceil(block_size);
    let dims = paged::CacheDims { blocks: n_blocks, block_size, kv_heads: heads.kv, head_dim: heads.dim };
    let mut cache = paged::Cache::zeros(device, dims).unwrap();
    let tables = upload(device, &(0..n_blocks as u32).rev().collect::<Vec<_>>());
    let (mut start, mut outputs) = (0, Vec::new());
    for &asked in chunks {
        let slot = |p: usize| ((n_blocks - 1 - p / block_size) * block_size + p % block_size) as u32;
        let slots = upload(device, &(start..start + asked).map(slot).collect::<Vec<_>>());
        let qkv = compute(device, &all[start * width..(start + asked) * width]);
        let (offsets, contexts) =
            (upload(device, &[0, asked as u32]), upload(device, &[(start + asked) as u32]));
        let call = paged::Dims { tokens: asked, sequences: 1, heads, rule, table_width: n_blocks };
        let mut out = empty(device, asked * heads.out_width());
        let sequences = paged::Sequences {
            offsets: offsets.view(),
            contexts: contexts.view(),
            tables: tables.view(),
            groups: None,
            prefill: None,
        };
        let inputs = Inputs { qkv: qkv.view(), sinks: sinks.as_ref().map(Buffer::view) };
        paged::forward(device, call, inputs, slots.view(), &mut cache, sequences, out.view_mut());
        outputs.extend(out.view().to_vec());
        start += asked;
    }
    outputs
}

/// Every rule with all heads, with sinks or without them.
fn check_paged(precision: Precision) {
    let chunks =
        [&[1, 2, 100, 60, 1, 3, SPLIT_KEYS - 170][..], &[1; 6], &[SPLIT_KEYS - 70, 50, 3], &[1; 24]].concat();
    let Some(device) = gpu(precision) else { return };
    for (h, heads) in HEADS.into_iter().enumerate() {
        for (r, pair) in rules(heads).collect::<Vec<_>>().chunks(2).enumerate() {
            let rule = pair[(h + r) % 2];
            let packed = ruled_attention_case(&device, rule, &[chunks.iter().sum()]);
            let paged = paged_case(&device, rule, &chunks);
            assert!(bits(&packed[0]) == bits(&paged), "{precision:?} {rule:?}");
        }
    }
}

#[test]
fn paged_attention_under_every_rule_is_packed_attention_bit_for_bit() {
    check_paged(Precision::Bf16);
}

#[test]
fn paged_attention_in_f32_under_every_rule_is_packed_attention_bit_for_bit() {
    check_paged(Precision::F32);
}

fn rope_case(device: &Device, heads: Heads, rotary_dim: usize, extent: Option<NormExtent>) -> Tensors<f32> {
    let (tokens, width) = (37, heads.qkv_width());
    let frequencies = Frequencies { head_dim: heads.dim, rotary_dim, theta: 1e4, scaling: Scaling::None };
    let table = Table::new(device, &frequencies, 64).unwrap();
    let positions = upload(device, &ids(9, tokens, 64));
    let [n_query, n_key] = match extent {
        Some(NormExtent::Head) => [heads.dim; 2],
        _ => [heads.query * heads.dim, heads.kv * heads.dim],
    };
    let (query, key) = (compute(device, &numbers(2, n_query)), compute(device, &numbers(3, n_key)));
    let norm = HeadNorm {
        extent: extent.unwrap_or(NormExtent::Head),
        query_weight: query.view(),
        key_weight: key.view(),
        eps: 1e-6,
    };
    let [raw, d_out] = [1, 4].map(|seed| compute(device, &numbers(seed, tokens * width)));
    let [mut out, mut d_raw] = [(); 2].map(|()| empty(device, tokens * width));
    let mut inv = device.zeros(tokens * (heads.query + heads.kv)).unwrap();
    let dims = rope::Dims { tokens, heads };
    let with = extent.map(|_| (norm, inv.view_mut()));
    rope::forward(device, dims, &table, positions.view(), with, raw.view(), out.view_mut());
    let (mut d_query, mut d_key) = (upload(device, &numbers(5, n_query)), upload(device, &numbers(6, n_key)));
    let to = Some(HeadNormSums { d_query_weight: d_query.view_mut(), d_key_weight: d_key.view_mut() });
    let grad = extent.map(|_| HeadNormGrad { norm, raw: raw.view(), inv_rms: inv.view(), to });
    rope::backward(device, dims, &table, positions.view(), grad, d_out.view(), d_raw.view_mut());
    [out, inv, d_raw, d_query, d_key].iter().map(|b| b.view().to_vec()).collect()
}

#[test]
fn norms_of_projections_and_partial_rotations_on_cuda_agree_with_the_cpu() {
    for heads in HEADS {
        let part = heads.dim / 4 * 2;
        let [of_heads, of_all] = [NormExtent::Head, NormExtent::Projection].map(Some);
        let cases =
            [(heads.dim, of_all), (0, of_all), (part, of_all), (0, of_heads), (part, of_heads), (part, None)];
        for (rotary_dim, extent) in cases {
            check(&format!("{heads:?}, {rotary_dim} rotated, norm {extent:?}"), |device| {
                rope_case(device, heads, rotary_dim, extent)
            });
        }
    }
}

/// Without a norm of the next half-layer and with one, of products with split-K and without.
#[test]
fn normed_results_on_cuda_give_the_bits_of_their_parts() {
    for precision in [Precision::F32, Precision::Bf16] {
        let Some(device) = &gpu(precision) else { return };
        for (tokens, inputs, width) in
            [(1, 256, 512), (5, 2048, 256), (64, 2048, 1024), (300, 96, 40), (3, 64, 8200)]
        {
            for has_next in [false, true] {
                let dims = rmsnorm::Dims { tokens, width, eps: 1e-6 };
                let x = compute(device, &numbers(1, tokens * inputs));
                let w = weight(device, width, inputs, &numbers(2, width * inputs));
                let stream = compute(device, &numbers(3, tokens * width));
                let [own, next] = [4, 5].map(|seed| compute(device, &numbers(seed, width)));
                let next = has_next.then(|| next.view());
                let [mut y, mut sum, mut addend, mut normed] =
                    [(); 4].map(|()| empty(device, tokens * width));
                let [mut inv_rms, mut next_inv_rms] = [(); 2].map(|()| device.zeros(tokens).unwrap());
                let result = NormedResult {
                    dims,
                    weight: own.view(),
                    inv_rms: inv_rms.view_mut(),
                    stream: stream.view(),
                    sum: sum.view_mut(),
                    addend: addend.view_mut(),
                    next_weight: next,
                    out: rmsnorm::Out { normed: normed.view_mut(), inv_rms: next_inv_rms.view_mut() },
                };
                let product = Product { x: x.view(), weight: &w, y: y.view_mut() };
                matmul_rmsnorm_add::forward(device, product, result);
                let together = [&y, &sum, &normed, &inv_rms, &next_inv_rms].map(|b| bits(&b.view().to_vec()));
                matmul::forward(device, tokens, x.view(), &w, None, y.view_mut());
                let out = rmsnorm::Out { normed: addend.view_mut(), inv_rms: inv_rms.view_mut() };
                rmsnorm::forward(device, dims, y.view(), own.view(), out);
                sum.view_mut().copy_from(stream.view());
                residual::add(device, sum.view_mut(), addend.view());
                normed.view_mut().copy_from(sum.view());
                if let Some(next) = next {
                    let out = rmsnorm::Out { normed: normed.view_mut(), inv_rms: next_inv_rms.view_mut() };
                    rmsnorm::forward(device, dims, sum.view(), next, out);
                }
                let apart = [&y, &sum, &normed, &inv_rms, &next_inv_rms].map(|b| bits(&b.view().to_vec()));
                assert!(together == apart, "{precision:?} {tokens} {inputs} {width} {has_next}");
            }
        }
    }
}

#[test]
fn gelu_gates_on_cuda_agree_with_the_cpu() {
    for (tokens, width) in [(1, 8), (33, 257), (100, 512)] {
        check(&format!("geglu {tokens} {width}"), |device| {
            let dims = swiglu::Dims { tokens, width, gate: swiglu::Gate::GeluTanh };
            let gate_up = compute(device, &numbers(1, 2 * tokens * width));
            let d_out = compute(device, &numbers(2, tokens * width));
            let (mut out, mut d) = (empty(device, tokens * width), empty(device, 2 * tokens * width));
            swiglu::forward(device, dims, gate_up.view(), out.view_mut());
            swiglu::backward(device, dims, gate_up.view(), d_out.view(), d.view_mut());
            vec![out.view().to_vec(), d.view().to_vec()]
        });
    }
}

#[test]
fn factors_on_cuda_agree_with_the_cpu() {
    check("scale and copy", |device| {
        let mut x = compute(device, &numbers(1, 7 * 1003));
        residual::scale(device, x.view_mut(), 25.25);
        let mut copy = empty(device, 7 * 1003);
        residual::copy_rows(device, 7, x.view(), copy.view_mut());
        vec![x.view().to_vec(), copy.view().to_vec()]
    });
    let rule = LogitRule { divisor: 1.5, softcap: Some(3.0) };
    for (tokens, width, vocab) in [(5, 33, 257), (300, 64, 1003)] {
        check(&format!("capped logits {tokens} {vocab}"), |device| {
            scores(device, (tokens, width, vocab), 0.8, rule)
        });
    }
}
