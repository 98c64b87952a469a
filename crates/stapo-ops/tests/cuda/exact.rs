//! Tests of bits on the GPU: decode, chunks of a prefill and products of few rows give the bits of training. Without a
//! GPU these tests print that they are skipped, and pass.

use super::parity::{HEADS, attention_case, compute, empty, gpu, numbers, ruled_attention_case, sinks};
use crate::attention::cuda::LONG_TOKENS;
use crate::attention::paged::{GROUPED_KEYS, GROUPED_ROWS, Partials, SPLIT_KEYS};
use crate::attention::{self, Heads, paged};
use crate::cuda::Precision;
use crate::dtype::{bf16_to_f32, f32_to_bf16};
use crate::fused::matmul_swiglu::{self, GateUp};
use crate::fused::{matmul_add_rmsnorm, rope_paged_attention};
use crate::rope::{Frequencies, HeadNorm, Scaling, Table};
use crate::testing::{bits, upload, weight};
use crate::{Buffer, View, Write, lm_head, matmul, rmsnorm, swiglu};

/// Runs a sequence by prefill in chunks and decode over a paged cache, and packed.
#[test]
fn paged_attention_on_cuda_gives_the_bits_of_packed_attention() {
    for precision in [Precision::Bf16, Precision::F32] {
        let Some(device) = &gpu(precision) else { return };
        for (heads, block_size) in HEADS.into_iter().zip([16, 32, 64, 128, 32, 16, 64]) {
            // Chunks and single tokens on both sides of the borders of splits.
            let to_first = SPLIT_KEYS - 170;
            let to_second = SPLIT_KEYS - 70;
            let chunks =
                [&[1, 2, 100, 60, 1, 3, to_first][..], &[1; 6], &[to_second, 50, 3], &[1; 24]].concat();
            let len = chunks.iter().sum();
            assert!(len > 2 * SPLIT_KEYS && len < 3 * SPLIT_KEYS);
            let all = numbers(1, len * heads.qkv_width());
            let packed = &attention_case(device, heads, &[len])[0];
            let n_blocks = len.div_ceil(block_size);
            let dims = paged::CacheDims {
                blocks: n_blocks + 3,
                block_size,
                kv_heads: heads.kv,
                head_dim: heads.dim,
            };
            let mut cache = paged::Cache::zeros(device, dims).unwrap();
            let table: Vec<u32> = (0..n_blocks as u32).map(|b| (b * 5 + 2) % (n_blocks as u32 + 3)).collect();
            let distinct: std::collections::HashSet<_> = table.iter().collect();
            let table: Vec<u32> =
                if distinct.len() == n_blocks { table } else { (0..n_blocks as u32).rev().collect() };
            let mut start = 0;
            let partials = Partials::new(device, heads, 3).unwrap();
            for asked in chunks {
                let slot = |p: usize| table[p / block_size] * block_size as u32 + (p % block_size) as u32;
                let slots: Vec<u32> = (start..start + asked).map(slot).collect();
                let width = heads.qkv_width();
                let qkv = compute(device, &all[start * width..(start + asked) * width]);
                let slots = upload(device, &slots);
                let rule = attention::ScoreRule::plain(heads.dim);
                let call = paged::Dims { tokens: asked, sequences: 1, heads, rule, table_width: n_blocks };
                let mut out = empty(device, asked * heads.out_width());
                let offsets = upload(device, &[0, asked as u32]);
                let contexts = upload(device, &[(start + asked) as u32]);
                let tables = upload(device, &table);
                let n_splits = (start + asked).div_ceil(SPLIT_KEYS);
                let alone: Vec<u32> = (0..n_splits as u32).flat_map(|split| [0, 1, 0, split]).collect();
                let [alone, first] = [&alone[..], &[0]].map(|x| upload(device, x));
                let groups = paged::Groups {
                    list: alone.view(),
                    max_members: 1,
                    first_partials: first.view(),
                    partials: (n_splits > 1).then_some(&partials),
                    reads_new_keys: false,
                };
                let sequences = paged::Sequences {
                    offsets: offsets.view(),
                    contexts: contexts.view(),
                    tables: tables.view(),
                    groups: (asked == 1).then_some(groups),
                    prefill: None,
                };
                let to = out.view_mut();
                paged::forward(device, call, qkv.view(), slots.view(), &mut cache, sequences, to);
                let range = start * heads.out_width()..(start + asked) * heads.out_width();
                let same = bits(&out.view().to_vec()) == bits(&packed[range]);
                assert!(same, "{precision:?} {heads:?}: tokens {start}..{} differ", start + asked);
                start += asked;
            }
        }
    }
}

/// Outputs and gradients of a sequence alone and packed before others. On Hopper, thread blocks of one sequence add to the
/// gradient of its queries in turns, whatever other blocks run beside them, and a long sequence alone is attended by another kernel
/// than among short ones. Every rule takes some of the lengths, and one the longest.
fn check_alone(range: std::ops::Range<usize>) {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    for (h, heads) in HEADS.into_iter().enumerate().filter(|(h, _)| range.contains(h)) {
        for (r, rule) in windows(heads).into_iter().enumerate() {
            let longest = (r == h % 4 && heads.dim >= 64).then_some(LONG_TOKENS + 100);
            for len in [[130, 2100], [1, 700]][(h + r) % 2].into_iter().chain(longest) {
                let alone = ruled_attention_case(device, rule, &[len]);
                let packed = ruled_attention_case(device, rule, &[len, 64, 900, 3, 129]);
                for (what, (alone, packed)) in ["out", "lse", "d_qkv"].iter().zip(alone.iter().zip(&packed)) {
                    let same = bits(alone) == bits(&packed[..alone.len()]);
                    assert!(same, "{rule:?}: {what} of {len} tokens before others differs");
                }
            }
        }
    }
}

#[test]
fn gradients_of_attention_on_cuda_do_not_depend_on_other_sequences() {
    check_alone(0..4);
}

#[test]
fn gradients_of_heads_of_96_and_128_on_cuda_do_not_depend_on_other_sequences() {
    check_alone(4..6);
}

#[test]
fn gradients_of_wide_heads_on_cuda_do_not_depend_on_other_sequences() {
    check_alone(6..7);
}

/// All keys, and a window that ends within a split, without sinks and with them, and with capped scores.
fn windows(heads: Heads) -> [(Heads, attention::ScoreRule, bool); 4] {
    let plain = attention::ScoreRule::plain(heads.dim);
    let windowed = attention::ScoreRule { window: Some(650), ..plain };
    let capped = attention::ScoreRule { softcap: Some(2.0), ..windowed };
    [(heads, plain, false), (heads, windowed, false), (heads, windowed, true), (heads, capped, false)]
}

fn with_sinks<'a>(qkv: &'a Buffer<f32>, sinks: Option<&'a Buffer<f32>>) -> attention::Inputs<'a, f32> {
    attention::Inputs { qkv: qkv.view(), sinks: sinks.map(Buffer::view) }
}

/// Ways to group five sequences whose common prefix is all of split 0 and two steps of split 1, and of which only number 3
/// has a split 2: entries of `paged::Groups`.
fn ways_to_group() -> Vec<Vec<[u32; 4]>> {
    let steps = (SPLIT_KEYS / GROUPED_KEYS) as u32;
    let [one, all] = [steps + 1, steps + 2];
    // First sequence, number of sequences, common steps.
    let alone: &[[u32; 3]] = &[[0, 1, 0], [1, 1, 0], [2, 1, 0], [3, 1, 0], [4, 1, 0]];
    let whole: [&[[u32; 3]]; 4] =
        [alone, &[[0, 5, all]], &[[0, 2, all], [9, 0, 0], [2, 3, steps]], &[[0, 4, one], [4, 1, 0]]];
    let parts: [&[[u32; 3]]; 5] = [
        alone,
        &[[0, 2, all], [9, 0, 0], [2, 2, one], [4, 1, 0]],
        &[[0, 4, all], [4, 1, 0]],
        &[[0, 5, all]],
        &[[0, 2, 0], [2, 3, all]],
    ];
    let in_split = |split: u32| move |group: &[u32; 3]| [group[0], group[1], group[2], split];
    let pairs = whole.into_iter().flat_map(|whole| parts.map(|parts| (whole, parts)));
    pairs
        .map(|(whole, parts)| {
            let first = whole.iter().map(in_split(0)).chain(parts.iter().map(in_split(1)));
            first.chain([[3, 1, 0, 2]]).collect()
        })
        .collect()
}

const DECODED: [(usize, usize, usize); 4] = [(16, 8, 128), (6, 2, 64), (3, 1, 96), (8, 4, 256)];

/// Decodes one token of several sequences with a common prefix, grouped in several ways.
#[test]
fn grouped_decode_on_cuda_gives_the_bits_of_packed_attention() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    let heads = DECODED.map(|(query, kv, dim)| Heads { query, kv, dim });
    for (heads, rule, has_sinks) in heads.into_iter().flat_map(windows) {
        let width = heads.qkv_width();
        let sinks = has_sinks.then(|| sinks(device, heads));
        let block_size = 32;
        let members = 5;
        let n_common = SPLIT_KEYS + 128;
        let n_common_blocks = n_common / block_size;
        let lens = [n_common + 1, n_common + 64, n_common + 65, n_common + SPLIT_KEYS, n_common + 31];
        let common = numbers(9, n_common * width);
        let per_sequence = (n_common + SPLIT_KEYS) / block_size;
        let dims = paged::CacheDims {
            blocks: n_common_blocks + members * per_sequence,
            block_size,
            kv_heads: heads.kv,
            head_dim: heads.dim,
        };
        let (mut tables, mut last, mut last_slots, mut expected) = (vec![], vec![], vec![], vec![]);
        let mut cache = paged::Cache::zeros(device, dims).unwrap();
        for (s, &len) in lens.iter().enumerate() {
            let rows = numbers(20 + s as u64, (len - n_common) * width);
            let all = [common.clone(), rows].concat();
            let own_block = |b: usize| (n_common_blocks + s * per_sequence + b) as u32;
            let block = |b: usize| if b < n_common_blocks { b as u32 } else { own_block(b) };
            let table: Vec<u32> = (0..per_sequence).map(block).collect();
            let slot = |p: usize| table[p / block_size] * block_size as u32 + (p % block_size) as u32;
            let slots: Vec<u32> = (0..len).map(slot).collect();
            let before = len - 1;
            let rows = compute(device, &all[..before * width]);
            let places = upload(device, &slots[..before]);
            paged::store(device, before, heads, rows.view(), places.view(), &mut cache);
            last.extend_from_slice(&all[before * width..]);
            last_slots.push(slots[before]);
            tables.extend(table);
            let qkv = compute(device, &all);
            let offsets = upload(device, &[0, len as u32]);
            let mut out = empty(device, len * heads.out_width());
            let mut lse = device.zeros(len * heads.query).unwrap();
            let packed = attention::Dims { tokens: len, sequences: 1, heads, rule };
            let to = out.view_mut();
            let inputs = with_sinks(&qkv, sinks.as_ref());
            attention::forward(device, packed, inputs, offsets.view(), to, lse.view_mut());
            expected.extend_from_slice(&out.view().to_vec()[before * heads.out_width()..]);
        }
        let contexts: Vec<u32> = lens.iter().map(|len| *len as u32).collect();
        let offsets: Vec<u32> = (0..=members as u32).collect();
        let partials = Partials::new(device, heads, 11).unwrap();
        let first_partials = [0, 2, 4, 6, 9];
        for groups in ways_to_group() {
            let max_members = groups.iter().map(|group| group[1] as usize).max().unwrap();
            let groups = groups.concat();
            let [groups, first_partials, offsets, contexts, tables, slots] =
                [&groups[..], &first_partials, &offsets, &contexts, &tables, &last_slots]
                    .map(|x| upload(device, x));
            let sequences = paged::Sequences {
                offsets: offsets.view(),
                contexts: contexts.view(),
                tables: tables.view(),
                groups: Some(paged::Groups {
                    list: groups.view(),
                    max_members,
                    first_partials: first_partials.view(),
                    partials: Some(&partials),
                    reads_new_keys: false,
                }),
                prefill: None,
            };
            let call =
                paged::Dims { tokens: members, sequences: members, heads, rule, table_width: per_sequence };
            let qkv = compute(device, &last);
            let mut out = empty(device, members * heads.out_width());
            let inputs = with_sinks(&qkv, sinks.as_ref());
            paged::forward(device, call, inputs, slots.view(), &mut cache, sequences, out.view_mut());
            let same = bits(&out.view().to_vec()) == bits(&expected);
            assert!(same, "{heads:?} {rule:?} {has_sinks} {:?}", groups.view().to_vec());
        }
    }
}

/// Query heads, key heads, their width, and the size of a block.
const ROTATED: [(usize, usize, usize, usize); 6] =
    [(16, 8, 128, 32), (6, 2, 64, 16), (14, 2, 64, 128), (4, 4, 128, 64), (3, 1, 96, 32), (8, 4, 256, 16)];

/// Groups of consecutive sequences, and the second split of the last one.
fn groups_of(n: usize, members: usize) -> Vec<u32> {
    let groups = (0..n).step_by(members).flat_map(|s| [s as u32, members.min(n - s) as u32, 0, 0]);
    groups.chain([n as u32 - 1, 1, 0, 1]).collect()
}

/// Compares the fused rope and decode attention with its parts, for short and long sequences.
#[test]
fn decode_on_cuda_rotates_queries_and_keys_as_rope_does() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    let contexts = [1, 17, 63, 64, 65, 128, 129, 200, 250, SPLIT_KEYS + 76];
    for (is_normed, (query, kv, dim, block_size)) in ROTATED.into_iter().flat_map(|s| [(true, s), (false, s)])
    {
        let heads = Heads { query, kv, dim };
        let (width, n) = (heads.qkv_width(), contexts.len());
        let per_sequence = (SPLIT_KEYS + 128) / block_size;
        let frequencies = Frequencies { head_dim: dim, rotary_dim: dim, theta: 1e4, scaling: Scaling::None };
        let table = Table::new(device, &frequencies, SPLIT_KEYS + 128).unwrap();
        let (query_weight, key_weight) =
            (compute(device, &numbers(3, dim)), compute(device, &numbers(4, dim)));
        let norm = is_normed.then(|| HeadNorm {
            extent: crate::rope::NormExtent::Head,
            query_weight: query_weight.view(),
            key_weight: key_weight.view(),
            eps: 1e-6,
        });
        let dims = paged::CacheDims { blocks: n * per_sequence, block_size, kv_heads: kv, head_dim: dim };
        let tables: Vec<u32> = (0..(n * per_sequence) as u32).rev().collect();
        let slot = |s: usize, p: usize| {
            tables[s * per_sequence + p / block_size] * block_size as u32 + (p % block_size) as u32
        };
        let before: Vec<u32> = (0..n).flat_map(|s| (0..contexts[s] - 1).map(move |p| slot(s, p))).collect();
        let last: Vec<u32> = (0..n).map(|s| slot(s, contexts[s] - 1)).collect();
        let (positions, lens): (Vec<u32>, Vec<u32>) =
            contexts.map(|n| (n as u32 - 1, n as u32)).into_iter().unzip();
        let offsets: Vec<u32> = (0..=n as u32).collect();
        // Alone, and as many as a block takes, which have no keys in common.
        let lists = [1, 5.min(GROUPED_ROWS / heads.group())].map(|members| (members, groups_of(n, members)));
        let (first_partials, partials) = (vec![0; n], Partials::new(device, heads, 2).unwrap());
        let stored = compute(device, &numbers(5, before.len() * width));
        let raw = compute(device, &numbers(6, n * width));
        let [tables, before, last, positions, lens, offsets, first_partials] =
            [&tables, &before, &last, &positions, &lens, &offsets, &first_partials]
                .map(|x| upload(device, x));
        let run = |groups: Option<paged::Groups<'_>>| {
            let mut cache = paged::Cache::zeros(device, dims).unwrap();
            paged::store(device, before.len(), heads, stored.view(), before.view(), &mut cache);
            let (mut qkv, mut out) = (empty(device, n * width), empty(device, n * heads.out_width()));
            let mut inv_rms = device.zeros(n * (query + kv)).unwrap();
            let given = rope_paged_attention::Unrotated {
                table: &table,
                positions: positions.view(),
                norm,
                raw: rope_paged_attention::Raw::Rows(raw.view()),
                sinks: None,
                qkv: qkv.view_mut(),
                inv_rms: inv_rms.view_mut(),
            };
            let (contexts, tables, offsets) = (lens.view(), tables.view(), offsets.view());
            let sequences = paged::Sequences { offsets, contexts, tables, groups, prefill: None };
            let rule = attention::ScoreRule::plain(heads.dim);
            let call = paged::Dims { tokens: n, sequences: n, heads, rule, table_width: per_sequence };
            let (slots, to) = (last.view(), out.view_mut());
            rope_paged_attention::forward(device, call, given, slots, &mut cache, sequences, to);
            out.view().to_vec()
        };
        let apart = run(None);
        assert!(apart.iter().all(|x| x.is_finite()) && apart.iter().any(|x| *x != 0.0), "{heads:?}");
        for (max_members, list) in lists {
            let list = upload(device, &list);
            let together = run(Some(paged::Groups {
                list: list.view(),
                max_members,
                first_partials: first_partials.view(),
                partials: Some(&partials),
                reads_new_keys: false,
            }));
            assert!(
                bits(&together) == bits(&apart),
                "{heads:?}, {block_size}, normed {is_normed}, {max_members}"
            );
        }
    }
}

#[test]
fn gate_and_up_of_few_rows_on_cuda_give_the_bits_of_many() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    let gates = [swiglu::Gate::Silu, swiglu::Gate::GeluTanh];
    let shapes = [(2048, 6144), (192, 320), (128, 72)];
    for ((inputs, width), gate) in shapes.into_iter().flat_map(|shape| gates.map(|gate| (shape, gate))) {
        let scaled: Vec<f32> =
            numbers(2, 2 * width * inputs).iter().map(|x| bf16_to_f32(f32_to_bf16(x * 0.05))).collect();
        let w = weight(device, 2 * width, inputs, &scaled);
        let rows = 130;
        let x = compute(device, &numbers(1, rows * inputs));
        let project = |n: usize| {
            let (mut gate_up, mut out) = (empty(device, 2 * n * width), empty(device, n * width));
            let dims = swiglu::Dims { tokens: n, width, gate };
            let x = x.range(0..n * inputs);
            let gate_up = (gate_up.view_mut(), GateUp::Dropped);
            matmul_swiglu::forward(device, dims, x, &w, gate_up, out.view_mut());
            out.view().to_vec()
        };
        let all = project(rows);
        for n in [1, 2, 8, 9, 63, 64, 65] {
            assert!(
                bits(&project(n)) == bits(&all[..n * width]),
                "{gate:?}, {inputs} to {width}: {n} rows differ"
            );
        }
    }
}

#[test]
fn rows_of_a_product_on_cuda_do_not_depend_on_their_number() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    let shapes = [
        (2048, 4096),
        (2048, 2048),
        (6144, 2048),
        (4096, 6144),
        (1024, 8224),
        (2048, 12288),
        (1024, 151_936),
        (256, 640),
        (2560, 264),
    ];
    for (inputs, outputs) in shapes {
        let w = weight(device, outputs, inputs, &numbers(2, outputs * inputs));
        let rows = 1100;
        let x = numbers(1, rows * inputs);
        let product = |n: usize| {
            let mut y = empty(device, n * outputs);
            matmul::forward(device, n, compute(device, &x[..n * inputs]).view(), &w, None, y.view_mut());
            y.view().to_vec()
        };
        let all = product(rows);
        for n in [1, 2, 5, 8, 9, 17, 64, 127, 128, 129, 200, 512, 1000] {
            assert!(bits(&product(n)) == bits(&all[..n * outputs]), "{inputs} to {outputs}: {n} rows differ");
        }
    }
}

/// The law of `fused`, on every device.
#[test]
fn products_added_and_normed_at_once_give_the_bits_of_one_by_one() {
    let devices = [Some(crate::testing::device()), gpu(Precision::Bf16)];
    let (inputs, width) = (2048, 1024);
    let scaled: Vec<f32> =
        numbers(2, width * inputs).iter().map(|x| bf16_to_f32(f32_to_bf16(x * 0.02))).collect();
    for device in devices.iter().flatten() {
        let matrix = weight(device, width, inputs, &scaled);
        let norm = compute(device, &numbers(3, width));
        for tokens in [1, 5, 64, 70] {
            let n = tokens * width;
            let dims = rmsnorm::Dims { tokens, width, eps: 1e-6 };
            let x = compute(device, &numbers(1, tokens * inputs));
            let stream = compute(device, &numbers(4, n));
            let run = |is_fused: bool, rows: Option<View<'_, u32>>| {
                let [mut y, mut sum, mut out] = [(); 3].map(|()| empty(device, n));
                let mut inv = device.zeros(tokens).unwrap();
                let to = rmsnorm::Out { normed: out.view_mut(), inv_rms: inv.view_mut() };
                let stream = stream.view();
                let weight = norm.view();
                let sum_to = sum.view_mut();
                if is_fused {
                    let product =
                        matmul_add_rmsnorm::Product { x: x.view(), weight: &matrix, y: y.view_mut() };
                    matmul_add_rmsnorm::forward(device, dims, stream, product, weight, sum_to, to);
                } else {
                    matmul::forward(device, tokens, x.view(), &matrix, None, y.view_mut());
                    let residual = rmsnorm::Residual { stream, addend: y.view() };
                    match rows {
                        None => rmsnorm::forward_add(device, dims, residual, weight, sum_to, to),
                        Some(rows) => {
                            rmsnorm::forward_add_rows(device, dims, rows, residual, weight, sum_to, to);
                        }
                    }
                }
                [sum, out, inv].map(|buffer| bits(&buffer.view().to_vec()))
            };
            let one_by_one = run(false, None);
            assert!(run(true, None) == one_by_one, "{tokens} rows with their product");
            let backwards = upload(device, &(0..tokens as u32).rev().collect::<Vec<_>>());
            let mut turned = run(false, Some(backwards.view()));
            for (values, width) in turned.iter_mut().zip([width, width, 1]) {
                *values = values.chunks_exact(width).rev().flatten().copied().collect();
            }
            assert!(turned == one_by_one, "{tokens} rows from the last to the first");
        }
    }
}

#[test]
fn gradients_of_the_head_on_cuda_do_not_depend_on_kept_logits() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    // More tokens than a chunk holds.
    let (tokens, width, vocab) = (3000, 64, 520);
    let w = weight(device, vocab, width, &numbers(2, vocab * width));
    let hidden = compute(device, &numbers(1, tokens * width));
    let targets = upload(device, &(0..tokens as u32).map(|t| t % vocab as u32).collect::<Vec<_>>());
    let [d_logp, d_entropy] = [3, 4].map(|seed| upload(device, &numbers(seed, tokens)));
    let dims = lm_head::Dims { tokens, temperature: 0.7, rule: lm_head::LogitRule::default() };
    let run = |keeps: bool| {
        let [mut logp, mut entropy, mut collision, mut lse] =
            [(); 4].map(|()| device.zeros::<f32>(tokens).unwrap());
        let scores = lm_head::HeadScores {
            logp: logp.view_mut(),
            entropy: entropy.view_mut(),
            collision: collision.view_mut(),
            lse: lse.view_mut(),
            slopes: None,
        };
        let last = lm_head::forward(device, dims, hidden.view(), &w, targets.view(), scores, None);
        let last = if keeps { last } else { lm_head::LastLogits::default() };
        let grads = lm_head::ScoreGrads {
            targets: targets.view().into(),
            lse: lse.view(),
            entropy: entropy.view(),
            d_logp: d_logp.view(),
            d_entropy: d_entropy.view(),
        };
        let mut d_hidden = empty(device, tokens * width);
        let mut d_w = device.zeros::<f32>(vocab * width).unwrap();
        let to = lm_head::HeadGrads {
            d_hidden: d_hidden.view_mut(),
            d_weight: Some((d_w.view_mut(), Write::Add)),
        };
        lm_head::backward(device, dims, hidden.view(), &w, grads, last, to);
        [d_hidden.view().to_vec(), d_w.view().to_vec()].map(|x| bits(&x))
    };
    let kept = run(true);
    assert!(kept.iter().all(|x| x.iter().any(|bits| *bits != 0)));
    assert!(kept == run(false));
}
