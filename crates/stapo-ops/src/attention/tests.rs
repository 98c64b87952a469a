use super::paged::{Cache, CacheDims, SPLIT_KEYS, Sequences};
use super::*;
use crate::Buffer;
use crate::testing::*;

mod rules;
pub(crate) mod shared;
mod sinks;

const HEADS: [Heads; 4] = [
    Heads { query: 2, kv: 2, dim: 5 },
    Heads { query: 4, kv: 2, dim: 16 },
    Heads { query: 7, kv: 1, dim: 33 },
    Heads { query: 2, kv: 1, dim: 300 },
];

fn dims(heads: Heads, lens: &[usize]) -> Dims {
    Dims { tokens: lens.iter().sum(), sequences: lens.len(), heads, rule: ScoreRule::plain(heads.dim) }
}

fn offsets(lens: &[usize]) -> Vec<u32> {
    let mut sum = 0;
    let ends = lens.iter().map(|len| {
        sum += *len as u32;
        sum
    });
    std::iter::once(0).chain(ends).collect()
}

/// The tensors out and lse.
fn forward_of<T: Float>(device: &Device, heads: Heads, lens: &[usize], qkv: &[T]) -> Tensors<T> {
    let d = dims(heads, lens);
    let qkv = upload(device, qkv);
    let offsets = upload(device, &offsets(lens));
    let mut out = device.zeros(d.tokens * heads.out_width()).unwrap();
    let mut lse = device.zeros(d.tokens * heads.query).unwrap();
    forward(device, d, qkv.view(), offsets.view(), out.view_mut(), lse.view_mut());
    vec![out.view().to_vec(), lse.view().to_vec()]
}

fn backward_of<T: Float>(device: &Device, heads: Heads, lens: &[usize], qkv: &[T], d_out: &[T]) -> Vec<T> {
    let d = dims(heads, lens);
    let saved = forward_of(device, heads, lens, qkv);
    let out = upload(device, &saved[0]);
    let lse = upload(device, &saved[1]);
    let qkv = upload(device, qkv);
    let d_out = upload(device, d_out);
    let offsets = upload(device, &offsets(lens));
    let mut d_qkv = device.zeros(qkv.len()).unwrap();
    let saved = Saved { qkv: qkv.view(), out: out.view(), lse: lse.view() };
    backward(device, d, saved, offsets.view(), d_out.view(), d_qkv.view_mut());
    d_qkv.view().to_vec()
}

fn all_of<T: Float>(device: &Device, heads: Heads, lens: &[usize]) -> Tensors<T> {
    let tokens: usize = lens.iter().sum();
    let qkv = values(1, tokens * heads.qkv_width());
    let d_out = values(2, tokens * heads.out_width());
    let mut all = forward_of(device, heads, lens, &qkv);
    all.push(backward_of(device, heads, lens, &qkv, &d_out));
    all
}

/// Softmax attention as the textbook writes it.
fn textbook(heads: Heads, lens: &[usize], qkv: &[f64]) -> Vec<f64> {
    let width = heads.qkv_width();
    let dim = heads.dim;
    let mut out = Vec::new();
    let mut start = 0;
    for len in lens {
        for t in start..start + len {
            for h in 0..heads.query {
                let key = (heads.query + h / heads.group()) * dim;
                let q = &qkv[t * width + h * dim..][..dim];
                let keys = start..=t;
                let scores = keys.clone().map(|j| {
                    let k = &qkv[j * width + key..][..dim];
                    (q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() / (dim as f64).sqrt()).exp()
                });
                let scores: Vec<f64> = scores.collect();
                let sum: f64 = scores.iter().sum();
                for i in 0..dim {
                    let value = key + heads.kv * dim + i;
                    out.push(keys.clone().zip(&scores).map(|(j, p)| p / sum * qkv[j * width + value]).sum());
                }
            }
        }
        start += len;
    }
    out
}

fn lists<'a>(offsets: &'a Buffer<u32>, contexts: &'a Buffer<u32>, tables: &'a Buffer<u32>) -> Sequences<'a> {
    let offsets = offsets.view();
    let contexts = contexts.view();
    let tables = tables.view();
    Sequences { offsets, contexts, tables, groups: None, prefill: None }
}

#[test]
fn forward_is_the_textbook_formula() {
    for heads in HEADS {
        let lens = [1, 0, 33, 3, 270];
        let qkv: Vec<f64> = values(1, 307 * heads.qkv_width());
        let got = forward_of(&device(), heads, &lens, &qkv);
        let expected = textbook(heads, &lens, &qkv);
        assert!(got[0].iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-10), "{heads:?}");
    }
}

#[test]
fn gradients_are_finite_differences() {
    for (heads, lens) in
        [(HEADS[0], &[3, 0, 5][..]), (HEADS[2], &[2, 3]), (Heads { query: 4, kv: 2, dim: 3 }, &[31])]
    {
        let device = device();
        let tokens: usize = lens.iter().sum();
        let qkv: Vec<f64> = values(1, tokens * heads.qkv_width());
        let d_out = &cotangents(&[vec![0.0; tokens * heads.out_width()]])[0];
        let gradients = vec![backward_of(&device, heads, lens, &qkv, d_out)];
        assert_gradients(&vec![qkv], &gradients, |x| project(&forward_of(&device, heads, lens, &x[0])[..1]));
    }
}

#[test]
fn all_devices_agree_bitwise_and_stay_close_to_double() {
    for heads in HEADS {
        let lens = [1, 33, 0, 31, 261];
        assert_same_on_all_devices(|device| all_of(device, heads, &lens));
        assert_close(&all_of(&device(), heads, &lens), &all_of(&device(), heads, &lens), 1e-5);
    }
}

#[test]
fn a_sequence_does_not_depend_on_its_neighbours_in_the_pack() {
    let device = device();
    let heads = HEADS[1];
    let lens = [5, 70, 31];
    let qkv = values::<f32>(1, 106 * heads.qkv_width());
    let d_out = values::<f32>(2, 106 * heads.out_width());
    let packed = forward_of(&device, heads, &lens, &qkv);
    let d_packed = backward_of(&device, heads, &lens, &qkv, &d_out);
    let mut start = 0;
    for len in lens {
        let wide = start * heads.qkv_width()..(start + len) * heads.qkv_width();
        let out = start * heads.out_width()..(start + len) * heads.out_width();
        let alone = forward_of(&device, heads, &[len], &qkv[wide.clone()]);
        assert_eq!(bits(&alone[0]), bits(&packed[0][out.clone()]));
        let d_alone = backward_of(&device, heads, &[len], &qkv[wide.clone()], &d_out[out]);
        assert_eq!(bits(&d_alone), bits(&d_packed[wide]));
        start += len;
    }
}

/// Feeds sequences to a paged cache, `chunk` tokens of each sequence per call, and returns the outputs in packed order.
fn paged_of<T: Float>(
    device: &Device,
    heads: Heads,
    lens: &[usize],
    qkv: &[T],
    block_size: usize,
    chunk: usize,
) -> Vec<T> {
    let width = lens.iter().max().unwrap().div_ceil(block_size);
    let cache_dims =
        CacheDims { blocks: lens.len() * width + 1, block_size, kv_heads: heads.kv, head_dim: heads.dim };
    let mut cache = Cache::zeros(device, cache_dims).unwrap();
    // A step that is coprime to the number of blocks visits every block once, in scattered order.
    let n = lens.len() * width;
    let step = (5..100).find(|step| gcd(*step, n) == 1).unwrap();
    let tables: Vec<u32> = (0..n).map(|i| ((i * step) % n + 1) as u32).collect();
    let starts = offsets(lens);
    let mut out = vec![T::ZERO; starts[lens.len()] as usize * heads.out_width()];
    for from in (0..*lens.iter().max().unwrap()).step_by(chunk) {
        let asked: Vec<usize> = lens.iter().map(|len| len.saturating_sub(from).min(chunk)).collect();
        let contexts: Vec<u32> = lens.iter().map(|len| (*len).min(from + chunk) as u32).collect();
        let mut rows = Vec::new();
        let mut slots = Vec::new();
        for (s, n) in asked.iter().enumerate() {
            for position in from..from + n {
                let row = starts[s] as usize + position;
                rows.extend_from_slice(&qkv[row * heads.qkv_width()..(row + 1) * heads.qkv_width()]);
                slots.push(
                    tables[s * width + position / block_size] * block_size as u32
                        + (position % block_size) as u32,
                );
            }
        }
        let d = paged::Dims {
            tokens: slots.len(),
            sequences: lens.len(),
            heads,
            rule: ScoreRule::plain(heads.dim),
            table_width: width,
        };
        let rows = upload(device, &rows);
        let slots = upload(device, &slots);
        let mut part = device.zeros(d.tokens * heads.out_width()).unwrap();
        let [offsets, contexts, tables] =
            [offsets(&asked), contexts, tables.clone()].map(|x| upload(device, &x));
        let sequences = lists(&offsets, &contexts, &tables);
        paged::forward(device, d, rows.view(), slots.view(), &mut cache, sequences, part.view_mut());
        let part = part.view().to_vec();
        let mut at = 0;
        for (s, n) in asked.iter().enumerate().filter(|(_, n)| **n > 0) {
            let to = (starts[s] as usize + from) * heads.out_width();
            let len = n * heads.out_width();
            out[to..to + len].copy_from_slice(&part[at..at + len]);
            at += len;
        }
    }
    out
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// A sequence of one split and one of three. The tokens of the second lie on both sides of every border.
const LONG: [usize; 2] = [7, 2 * SPLIT_KEYS + 37];
const N_LONG: usize = LONG[0] + LONG[1];

#[test]
fn attention_over_several_splits_is_the_textbook_formula() {
    let heads = Heads { query: 2, kv: 1, dim: 4 };
    let qkv: Vec<f64> = values(1, N_LONG * heads.qkv_width());
    let got = forward_of(&device(), heads, &LONG, &qkv);
    let expected = textbook(heads, &LONG, &qkv);
    assert!(got[0].iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-10));
}

#[test]
fn decode_and_chunked_prefill_of_several_splits_equal_packed_training_bitwise() {
    for heads in [Heads { query: 4, kv: 2, dim: 8 }, Heads { query: 5, kv: 1, dim: 6 }] {
        let qkv: Vec<f32> = values(1, N_LONG * heads.qkv_width());
        let device = device();
        let packed = forward_of(&device, heads, &LONG, &qkv).remove(0);
        for (block_size, chunk) in [(16, 300), (256, 1000)] {
            let paged = paged_of(&device, heads, &LONG, &qkv, block_size, chunk);
            assert_eq!(bits(&paged), bits(&packed), "{heads:?}, chunks of {chunk}");
        }
        let decoded = decoded_of(&device, heads, &LONG, &qkv, 64);
        assert_eq!(bits(&decoded), bits(&packed), "{heads:?}, token by token");
    }
}

#[test]
fn several_splits_agree_on_all_devices() {
    let heads = Heads { query: 1, kv: 1, dim: 5 };
    let lens = [SPLIT_KEYS + 50];
    assert_same_on_all_devices(|device| all_of(device, heads, &lens));
}

#[test]
fn decode_and_chunked_prefill_over_any_block_size_equal_packed_training_bitwise() {
    let lens = [1, 40, 33, 290];
    for heads in [HEADS[0], HEADS[2], Heads { query: 2, kv: 1, dim: 64 }] {
        let qkv: Vec<f32> = values(1, 364 * heads.qkv_width());
        let device = device();
        let packed = forward_of(&device, heads, &lens, &qkv).remove(0);
        for block_size in CacheDims::BLOCK_SIZES {
            for chunk in [1, 7, 64, 300] {
                let paged = paged_of(&device, heads, &lens, &qkv, block_size, chunk);
                assert_eq!(
                    bits(&paged),
                    bits(&packed),
                    "{heads:?}, block size {block_size}, chunks of {chunk}"
                );
            }
        }
    }
}

/// Decodes token by token; a step has the sequences that are not at their end yet.
fn decoded_of<T: Float>(
    device: &Device,
    heads: Heads,
    lens: &[usize],
    qkv: &[T],
    block_size: usize,
) -> Vec<T> {
    let starts = offsets(lens);
    let width = lens.iter().max().unwrap().div_ceil(block_size);
    let cache_dims =
        CacheDims { blocks: lens.len() * width, block_size, kv_heads: heads.kv, head_dim: heads.dim };
    let mut cache = Cache::zeros(device, cache_dims).unwrap();
    let mut out = vec![T::ZERO; starts[lens.len()] as usize * heads.out_width()];
    for position in 0..*lens.iter().max().unwrap() {
        let running: Vec<usize> = (0..lens.len()).filter(|s| position < lens[*s]).collect();
        let token = |s: usize| starts[s] as usize + position;
        // The blocks of different sequences alternate in the cache.
        let block = |s: usize, i: usize| (i * lens.len() + s) as u32;
        let rows: Vec<T> = running
            .iter()
            .flat_map(|s| &qkv[token(*s) * heads.qkv_width()..(token(*s) + 1) * heads.qkv_width()])
            .copied()
            .collect();
        let slots: Vec<u32> = running
            .iter()
            .map(|s| block(*s, position / block_size) * block_size as u32 + (position % block_size) as u32)
            .collect();
        let tables: Vec<u32> = running.iter().flat_map(|s| (0..width).map(|i| block(*s, i))).collect();
        let n = running.len() as u32;
        let [step, contexts, tables, slots] =
            [(0..=n).collect(), vec![position as u32 + 1; running.len()], tables, slots]
                .map(|x| upload(device, &x));
        let sequences = Sequences {
            offsets: step.view(),
            contexts: contexts.view(),
            tables: tables.view(),
            groups: None,
            prefill: None,
        };
        let d = paged::Dims {
            tokens: running.len(),
            sequences: running.len(),
            heads,
            rule: ScoreRule::plain(heads.dim),
            table_width: width,
        };
        let mut part = device.zeros(running.len() * heads.out_width()).unwrap();
        let rows = upload(device, &rows);
        paged::forward(device, d, rows.view(), slots.view(), &mut cache, sequences, part.view_mut());
        for (s, part) in running.iter().zip(part.view().to_vec().chunks(heads.out_width())) {
            out[token(*s) * heads.out_width()..][..heads.out_width()].copy_from_slice(part);
        }
    }
    out
}

const DECODED: [Heads; 6] = [
    Heads { query: 2, kv: 2, dim: 32 },
    Heads { query: 6, kv: 3, dim: 20 },
    Heads { query: 3, kv: 1, dim: 64 },
    Heads { query: 8, kv: 2, dim: 48 },
    Heads { query: 5, kv: 1, dim: 8 },
    Heads { query: 2, kv: 1, dim: 300 },
];

#[test]
fn decode_over_any_block_size_equals_packed_training_bitwise() {
    let lens = [1, 40, 33, 290];
    for heads in DECODED {
        let qkv: Vec<f32> = values(1, 364 * heads.qkv_width());
        let device = device();
        let packed = forward_of(&device, heads, &lens, &qkv).remove(0);
        for block_size in CacheDims::BLOCK_SIZES {
            let decoded = decoded_of(&device, heads, &lens, &qkv, block_size);
            assert_eq!(bits(&decoded), bits(&packed), "{heads:?}, block size {block_size}");
        }
    }
}

#[test]
fn decode_agrees_on_all_devices() {
    for heads in DECODED {
        let qkv: Vec<f32> = values(1, 40 * heads.qkv_width());
        assert_same_on_all_devices(|device| vec![decoded_of(device, heads, &[33, 7], &qkv, 16)]);
    }
}

#[test]
fn paged_attention_agrees_on_all_devices() {
    let lens = [33, 7];
    let heads = HEADS[1];
    let qkv: Vec<f32> = values(1, 40 * heads.qkv_width());
    assert_same_on_all_devices(|device| vec![paged_of(device, heads, &lens, &qkv, 16, 9)]);
}

#[test]
fn sequences_may_share_the_blocks_of_a_common_prefix() {
    let device = device();
    let heads = HEADS[1];
    let width = heads.qkv_width();
    let prefix: Vec<f32> = values(1, 32 * width);
    let tails = [values::<f32>(2, width), values::<f32>(3, width)];
    let cache_dims = CacheDims { blocks: 4, block_size: 16, kv_heads: heads.kv, head_dim: heads.dim };
    let mut cache = Cache::zeros(&device, cache_dims).unwrap();
    let all = upload(&device, &[prefix.clone(), tails.concat()].concat());
    // The prefix fills blocks 2 and 0; the tails start blocks 1 and 3.
    let slots: Vec<u32> = (32..48).chain(0..16).chain([16, 48]).collect();
    let slots = upload(&device, &slots);
    paged::store(&device, 34, heads, all.view(), slots.view(), &mut cache);
    let [offsets, contexts, tables] =
        [&[0, 1, 2][..], &[33, 33], &[2, 0, 1, 2, 0, 3]].map(|x| upload(&device, x));
    let sequences = lists(&offsets, &contexts, &tables);
    let d = paged::Dims { tokens: 2, sequences: 2, heads, rule: ScoreRule::plain(heads.dim), table_width: 3 };
    let mut out = device.zeros(2 * heads.out_width()).unwrap();
    let last = all.range(32 * width..34 * width);
    paged::forward(&device, d, last, slots.range(32..34), &mut cache, sequences, out.view_mut());
    for (tail, got) in tails.iter().zip(out.view().to_vec().chunks(heads.out_width())) {
        let whole = forward_of(&device, heads, &[33], &[prefix.clone(), tail.clone()].concat());
        assert_eq!(bits(got), bits(&whole[0][32 * heads.out_width()..]));
    }
}

#[test]
#[should_panic(expected = "attention::paged::forward: sequence 0 names block 7 of 2")]
fn a_block_outside_the_cache_is_named() {
    let device = device();
    let heads = Heads { query: 1, kv: 1, dim: 2 };
    let cache_dims = CacheDims { blocks: 2, block_size: 16, kv_heads: 1, head_dim: 2 };
    let mut cache = Cache::<f32>::zeros(&device, cache_dims).unwrap();
    let [offsets, contexts, tables] = [&[0, 1][..], &[1], &[7]].map(|x| upload(&device, x));
    let sequences = lists(&offsets, &contexts, &tables);
    let d = paged::Dims { tokens: 1, sequences: 1, heads, rule: ScoreRule::plain(heads.dim), table_width: 1 };
    let qkv = upload(&device, &[0f32; 6]);
    let mut out = device.zeros(2).unwrap();
    let slots = upload(&device, &[0]);
    paged::forward(&device, d, qkv.view(), slots.view(), &mut cache, sequences, out.view_mut());
}

#[test]
fn of_two_tokens_in_one_slot_the_later_stays() {
    let heads = Heads { query: 2, kv: 2, dim: 3 };
    assert_same_on_all_devices(|device| {
        let cache_dims = CacheDims { blocks: 1, block_size: 16, kv_heads: 2, head_dim: 3 };
        let mut cache = Cache::zeros(device, cache_dims).unwrap();
        let qkv = upload(device, &values::<f32>(1, 2 * heads.qkv_width()));
        let slots = upload(device, &[0, 0]);
        paged::store(device, 2, heads, qkv.view(), slots.view(), &mut cache);
        let [offsets, contexts, tables] = [&[0, 1][..], &[1], &[0]].map(|x| upload(device, x));
        let sequences = lists(&offsets, &contexts, &tables);
        let d =
            paged::Dims { tokens: 1, sequences: 1, heads, rule: ScoreRule::plain(heads.dim), table_width: 1 };
        let mut out = device.zeros(heads.out_width()).unwrap();
        let last = qkv.range(heads.qkv_width()..2 * heads.qkv_width());
        paged::forward(device, d, last, slots.range(1..2), &mut cache, sequences, out.view_mut());
        // A single key has weight 1, so the output is its value.
        assert_eq!(out.view().to_vec(), last.to_vec()[12..]);
        vec![out.view().to_vec()]
    });
}
