//! Tests of bits on the GPU: products of many rows that are finished in their kernel. Without a GPU these tests print that they
//! are skipped, and pass.

use super::parity::{compute, empty, gpu, numbers};
use crate::attention::{Heads, ScoreRule, paged};
use crate::cuda::{Cuda, Fields, Precision};
use crate::device::Backend;
use crate::dtype::{bf16_to_f32, f32_to_bf16};
use crate::fused::rope_paged_attention::{self, Raw, Unrotated};
use crate::matmul::large_m::{self, Operands, Output};
use crate::rope::{self, Frequencies, HeadNorm, NormExtent, Scaling, Table};
use crate::testing::{bits, ids, upload, weight};
use crate::{Buffer, Device, Weight, Write, matmul, residual, rmsnorm, swiglu};

fn cuda_of(device: &Device) -> &Cuda {
    let Backend::Cuda(cuda) = device.backend() else { panic!("a GPU") };
    cuda
}

fn scaled_weight(device: &Device, outputs: usize, inputs: usize) -> Weight<f32> {
    let scaled: Vec<f32> =
        numbers(2, outputs * inputs).iter().map(|x| bf16_to_f32(f32_to_bf16(x * 0.05))).collect();
    weight(device, outputs, inputs, &scaled)
}

/// y, in memory of NaN.
fn run(device: &Device, output: Output<'_>, d: matmul::Dims, x: &Buffer<f32>, w: &Weight<f32>) -> Vec<f32> {
    let width = if matches!(output, Output::Gated { .. }) { d.outputs / 2 } else { d.outputs };
    let y = empty(device, d.tokens * width);
    let (x, weight) = (x.range(0..d.tokens * d.inputs).cuda(), w.view().cuda());
    let operands = Operands { d, x, weight, n_further: 0 };
    assert!(large_m::fits(output, cuda_of(device), &operands, y.view().cuda()), "{d:?}");
    large_m::run(output, cuda_of(device), &operands, y.view().cuda());
    y.view().to_vec()
}

#[test]
fn gate_and_up_of_many_rows_on_cuda_give_the_bits_of_one_by_one() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    let gates = [swiglu::Gate::Silu, swiglu::Gate::GeluTanh];
    // More tiles than multiprocessors, widths that are no whole tiles, and one step of the depth.
    let shapes = [(2048, 6144), (192, 1320), (64, 72)];
    for ((inputs, width), gate) in shapes.into_iter().flat_map(|shape| gates.map(|gate| (shape, gate))) {
        let (rows, outputs) = (2500, 2 * width);
        let w = scaled_weight(device, outputs, inputs);
        let x = compute(device, &numbers(1, rows * inputs));
        let [mut gate_up, mut out] = [outputs, width].map(|columns| empty(device, rows * columns));
        matmul::forward(device, rows, x.view(), &w, None, gate_up.view_mut());
        let dims = swiglu::Dims { tokens: rows, width, gate };
        swiglu::forward(device, dims, gate_up.view(), out.view_mut());
        let (gate_up, out) = (gate_up.view().to_vec(), out.view().to_vec());
        for tokens in [1, 128, 129, 300, rows] {
            let d = matmul::Dims { tokens, inputs, outputs };
            let dropped = run(device, Output::Gated { gate, kept: None }, d, &x, &w);
            assert!(bits(&dropped) == bits(&out[..tokens * width]), "{gate:?}, {d:?}");
            let kept = empty(device, tokens * outputs);
            let output = Output::Gated { gate, kept: Some(kept.view().cuda()) };
            assert!(bits(&run(device, output, d, &x, &w)) == bits(&dropped), "{gate:?}, {d:?}, kept");
            assert!(bits(&kept.view().to_vec()) == bits(&gate_up[..tokens * outputs]), "{d:?}, gate and up");
        }
    }
}

#[test]
fn deep_products_of_many_rows_on_cuda_give_the_bits_of_few() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    for (inputs, outputs) in [(6144, 2048), (2048, 1000), (2048, 8)] {
        let rows = 3100;
        let w = scaled_weight(device, outputs, inputs);
        let x = compute(device, &numbers(1, rows * inputs));
        let few = 200;
        let expected: Vec<f32> = (0..rows)
            .step_by(few)
            .flat_map(|start| {
                let n = few.min(rows - start);
                let mut y = empty(device, n * outputs);
                let x = x.range(start * inputs..(start + n) * inputs);
                matmul::forward(device, n, x, &w, None, y.view_mut());
                y.view().to_vec()
            })
            .collect();
        for tokens in [1, 128, 129, 300, rows] {
            let d = matmul::Dims { tokens, inputs, outputs };
            let y = run(device, Output::Deep, d, &x, &w);
            assert!(bits(&y) == bits(&expected[..tokens * outputs]), "{d:?}");
        }
    }
}

/// What heads are finished with.
struct Finish {
    table: Table<f32>,
    norm: Option<[Buffer<f32>; 2]>,
}

impl Finish {
    const POSITIONS: usize = 5000;

    fn new(device: &Device, Heads { dim, .. }: Heads, is_normed: bool) -> Self {
        let frequencies = Frequencies { head_dim: dim, rotary_dim: dim, theta: 1e6, scaling: Scaling::None };
        let table = Table::new(device, &frequencies, Self::POSITIONS).unwrap();
        let norm = is_normed.then(|| [5, 6].map(|seed| compute(device, &numbers(seed, dim))));
        Self { table, norm }
    }

    fn norm(&self) -> Option<HeadNorm<'_, f32>> {
        self.norm.as_ref().map(|[query, key]| HeadNorm {
            extent: NormExtent::Head,
            query_weight: query.view(),
            key_weight: key.view(),
            eps: 1e-6,
        })
    }
}

/// Queries, keys and values of a product, in one kernel and by separate ones: to the output, and to scattered slots of a cache.
#[test]
fn heads_of_many_rows_on_cuda_give_the_bits_of_one_by_one() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    let cuda = cuda_of(device);
    // An odd number of heads with one step of the depth, too.
    for (query, kv, inputs) in [(16, 8, 2048), (32, 8, 2560), (12, 2, 1536), (3, 1, 64)] {
        let (rows, heads) = (4096 + 3, Heads { query, kv, dim: 128 });
        let width = heads.qkv_width();
        let w = scaled_weight(device, width, inputs);
        let x = compute(device, &numbers(1, rows * inputs));
        let positions = upload(device, &ids(9, rows, Finish::POSITIONS));
        // Blocks of 32 slots; the factor has no divisor in common with their number.
        let n_slots = 160 * 32;
        let slots: Vec<u32> = (0..rows).map(|row| (row * 2741 % n_slots) as u32).collect();
        let slots = upload(device, &slots);
        let mut raw = empty(device, rows * width);
        matmul::forward(device, rows, x.view(), &w, None, raw.view_mut());
        let several = [1, 129, 1024, 1500, rows];
        let several = if query == 16 { &several[..] } else { &several[3..] };
        for (is_normed, is_stored) in [(true, true), (true, false), (false, true), (false, false)] {
            let finish = Finish::new(device, heads, is_normed);
            for &tokens in several {
                let rotation = (&finish.table, positions.range(0..tokens).cuda());
                let cache = || [(); 2].map(|()| empty(device, n_slots * kv * heads.dim));
                let fields = |cache: &[Buffer<f32>; 2]| {
                    let [keys, values] = cache.each_ref().map(|buffer| buffer.view().cuda());
                    let fields = Fields::default().eight_bytes(slots.view().cuda()).eight_bytes(keys);
                    fields.eight_bytes(values).four_bytes(32usize).four_bytes(n_slots)
                };
                let (apart, joined) = (cache(), cache());
                let [to_apart, to_joined] = [&apart, &joined].map(|cache| is_stored.then(|| fields(cache)));

                let inv_rms = device.zeros::<f32>(rows * (query + kv)).unwrap();
                let expected = empty(device, tokens * width);
                let norm = finish.norm().map(|norm| (norm, inv_rms.view().cuda()));
                let raw = (raw.range(0..tokens * width).cuda(), expected.view().cuda());
                let dims = rope::Dims { tokens, heads };
                rope::cuda::forward_heads(cuda, dims, rotation, norm, raw, to_apart.as_ref());

                let norm = finish.norm();
                let fields = rope::cuda::head_fields(heads, rotation, norm, to_joined.as_ref()).unwrap();
                let d = matmul::Dims { tokens, inputs, outputs: width };
                let y = run(device, Output::Heads(&fields), d, &x, &w);
                let case = format!("{heads:?}, {d:?}, normed {is_normed}, stored {is_stored}");
                assert!(bits(&y) == bits(&expected.view().to_vec()), "{case}");
                assert!(y[..query * heads.dim].iter().all(|x| x.is_finite()), "{case}");
                for (joined, apart) in joined.iter().zip(&apart) {
                    assert!(bits(&joined.view().to_vec()) == bits(&apart.view().to_vec()), "{case}, cache");
                }
            }
        }
    }
}

/// Prompts through the op that leaves the product to it, and with the product in front of it.
#[test]
fn prompts_on_cuda_with_their_product_give_the_bits_of_one_by_one() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    let (heads, inputs, block_size, lens) = (Heads { query: 16, kv: 8, dim: 128 }, 2048, 32, [1500, 548]);
    let (width, tokens) = (heads.qkv_width(), lens.iter().sum::<usize>());
    let w = scaled_weight(device, width, inputs);
    let x = compute(device, &numbers(1, tokens * inputs));
    let finish = Finish::new(device, heads, true);
    let table_width = lens[0].div_ceil(block_size);
    let n_blocks = lens.len() * table_width;
    let tables: Vec<u32> = (0..n_blocks as u32).rev().collect();
    let (mut slots, mut positions) = (Vec::new(), Vec::new());
    for (table, len) in tables.chunks(table_width).zip(lens) {
        slots.extend((0..len).map(|p| table[p / block_size] * block_size as u32 + (p % block_size) as u32));
        positions.extend(0..len as u32);
    }
    let contexts = lens.map(|len| len as u32);
    let offsets = [0, contexts[0], tokens as u32];
    let [slots, positions, tables] = [slots, positions, tables].map(|list| upload(device, &list));
    let [contexts, offsets] = [&contexts[..], &offsets].map(|list| upload(device, list));
    let [joined, apart] = [true, false].map(|is_joined| {
        let dims = paged::CacheDims { blocks: n_blocks, block_size, kv_heads: heads.kv, head_dim: heads.dim };
        let mut cache = paged::Cache::zeros(device, dims).unwrap();
        let [mut rows, mut qkv] = [(); 2].map(|()| empty(device, tokens * width));
        let mut inv_rms = device.zeros(tokens * (heads.query + heads.kv)).unwrap();
        let mut out = empty(device, tokens * heads.out_width());
        if !is_joined {
            matmul::forward(device, tokens, x.view(), &w, None, rows.view_mut());
        }
        let raw = if is_joined {
            Raw::Product { x: x.view(), weight: &w, rows: rows.view_mut() }
        } else {
            Raw::Rows(rows.view())
        };
        let given = Unrotated {
            table: &finish.table,
            positions: positions.view(),
            norm: finish.norm(),
            raw,
            sinks: None,
            qkv: qkv.view_mut(),
            inv_rms: inv_rms.view_mut(),
        };
        let sequences = paged::Sequences {
            offsets: offsets.view(),
            contexts: contexts.view(),
            tables: tables.view(),
            groups: None,
            prefill: None,
        };
        let rule = ScoreRule::plain(heads.dim);
        let call = paged::Dims { tokens, sequences: lens.len(), heads, rule, table_width };
        rope_paged_attention::forward(
            device,
            call,
            given,
            slots.view(),
            &mut cache,
            sequences,
            out.view_mut(),
        );
        let is_one_kernel = rows.view().to_vec().iter().all(|x| x.is_nan());
        // 128 pairs of tiles fill two rounds of 66 clusters.
        let fills = cuda_of(device).gpu.multiprocessors == 132;
        assert!(is_one_kernel == (is_joined && fills) || !fills, "one kernel: {is_one_kernel}");
        out.view().to_vec()
    });
    assert!(joined.iter().all(|x| x.is_finite()) && joined.iter().any(|x| *x != 0.0));
    assert!(bits(&joined) == bits(&apart));
}

#[test]
fn norms_of_many_rows_on_cuda_give_the_bits_of_few() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    for width in [256, 1536, 2048, 2560, 4096] {
        let rows = 1100;
        let (x, addend) =
            (compute(device, &numbers(1, rows * width)), compute(device, &numbers(2, rows * width)));
        let weight = compute(device, &numbers(3, width));
        let norm = |range: std::ops::Range<usize>| {
            let (n, elements) = (range.len(), range.start * width..range.end * width);
            let [mut sum, mut normed] = [(); 2].map(|()| empty(device, n * width));
            let mut inv_rms = device.zeros(n).unwrap();
            let stream = x.range(elements.clone());
            let residual = rmsnorm::Residual { stream, addend: addend.range(elements) };
            let out = rmsnorm::Out { normed: normed.view_mut(), inv_rms: inv_rms.view_mut() };
            let dims = rmsnorm::Dims { tokens: n, width, eps: 1e-6 };
            rmsnorm::forward_add(device, dims, residual, weight.view(), sum.view_mut(), out);
            [sum, normed, inv_rms].map(|buffer| bits(&buffer.view().to_vec()))
        };
        let all = norm(0..rows);
        for start in (0..rows).step_by(100) {
            let few = norm(start..start + 100);
            for (few, (all, width)) in few.iter().zip(all.iter().zip([width, width, 1])) {
                assert!(*few == all[start * width..(start + 100) * width], "{width} columns, row {start}");
            }
        }
    }
}

/// Ranks add the gradients of micro-batches one by one; a GPU alone lets the product add to the sum.
#[test]
fn a_product_that_adds_gives_the_bits_of_a_product_and_an_addition() {
    for precision in [Precision::Bf16, Precision::F32] {
        let Some(device) = &gpu(precision) else { return };
        for (tokens, inputs, outputs) in [(1, 64, 64), (33, 256, 96), (700, 1024, 2048), (4096, 2048, 512)] {
            let dims = matmul::Dims { tokens, inputs, outputs };
            let x = compute(device, &numbers(1, tokens * inputs));
            let d_y = compute(device, &numbers(2, tokens * outputs));
            let before = numbers(3, inputs * outputs);
            let mut added = upload(device, &before);
            matmul::backward_weight(device, dims, x.view(), d_y.view(), Write::Add, added.view_mut());
            let mut alone = upload(device, &before);
            matmul::backward_weight(device, dims, x.view(), d_y.view(), Write::Set, alone.view_mut());
            let mut sum = upload(device, &before);
            residual::add(device, sum.view_mut(), alone.view());
            assert_eq!(bits(&added.view().to_vec()), bits(&sum.view().to_vec()), "{dims:?}");
        }
    }
}
