//! Tests of bits on the GPU: products of many rows that are finished in their kernel. Without a GPU these tests print that they
//! are skipped, and pass.

use super::parity::{compute, empty, gpu, numbers};
use crate::cuda::{Cuda, Precision};
use crate::device::Backend;
use crate::dtype::{bf16_to_f32, f32_to_bf16};
use crate::matmul::large_m::{self, Operands, Output};
use crate::testing::{bits, upload, weight};
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
fn run(device: &Device, output: Output, d: matmul::Dims, x: &Buffer<f32>, w: &Weight<f32>) -> Vec<f32> {
    let width = if matches!(output, Output::Deep) { d.outputs } else { d.outputs / 2 };
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
