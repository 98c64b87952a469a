//! Tests of bits on the GPU: what few rows have kernels of their own for. Without a GPU these tests print that they are
//! skipped, and pass, except that the law of `fused` is checked on the CPU, too.

use super::parity::{compute, empty, gpu, numbers};
use crate::cuda::Precision;
use crate::dtype::{bf16_to_f32, f32_to_bf16};
use crate::fused::matmul_add_rmsnorm;
use crate::fused::matmul_add_rmsnorm_matmul::{self, Next, Normed};
use crate::fused::matmul_swiglu::{self, GateUp};
use crate::testing::{bits, upload, weight};
use crate::{Device, lm_head, matmul, rmsnorm, sampling, swiglu};

/// What follows a product, its addition to the residual stream and the norm: a product and a SwiGLU, and the stream; by the
/// fused op or by its parts.
fn two_products(
    device: &Device,
    (tokens, inputs, width, outputs): (usize, usize, usize, usize),
    is_fused: bool,
) -> [Vec<u32>; 3] {
    let n = tokens * width;
    let scaled = |seed: u64, n: usize| -> Vec<f32> {
        numbers(seed, n).iter().map(|x| bf16_to_f32(f32_to_bf16(x * 0.03))).collect()
    };
    let first = weight(device, width, inputs, &scaled(1, width * inputs));
    let second = weight(device, outputs, width, &scaled(2, outputs * width));
    let x = compute(device, &numbers(6, tokens * inputs));
    let stream = compute(device, &numbers(4, n));
    let norm = compute(device, &numbers(3, width));
    let dims = rmsnorm::Dims { tokens, width, eps: 1e-6 };
    let [mut product, mut sum, mut normed] = [(); 3].map(|()| empty(device, n));
    let mut inv = device.zeros(tokens).unwrap();
    let [mut y, mut gate_up] = [(); 2].map(|()| empty(device, tokens * outputs));
    let mut activated = empty(device, tokens * outputs / 2);
    for is_swiglu in [false, true] {
        let product = matmul_add_rmsnorm::Product { x: x.view(), weight: &first, y: product.view_mut() };
        let out = rmsnorm::Out { normed: normed.view_mut(), inv_rms: inv.view_mut() };
        if is_fused {
            let (stream, sum) = (stream.view(), sum.view_mut());
            let between = Normed { dims, stream, weight: norm.view(), sum, out };
            let next = if is_swiglu {
                Next::Swiglu { weight: &second, gate_up: gate_up.view_mut(), out: activated.view_mut() }
            } else {
                Next::Product { weight: &second, y: y.view_mut() }
            };
            matmul_add_rmsnorm_matmul::forward(device, product, between, next);
            continue;
        }
        let mut addend = product.y;
        matmul::forward(device, tokens, x.view(), &first, None, addend.reborrow());
        let residual = rmsnorm::Residual { stream: stream.view(), addend: addend.into_view() };
        rmsnorm::forward_add(device, dims, residual, norm.view(), sum.view_mut(), out);
        if is_swiglu {
            let dims = swiglu::Dims { tokens, width: outputs / 2, gate: swiglu::Gate::Silu };
            let (gate_up, out) = ((gate_up.view_mut(), GateUp::Dropped), activated.view_mut());
            matmul_swiglu::forward(device, dims, normed.view(), &second, gate_up, out);
        } else {
            matmul::forward(device, tokens, normed.view(), &second, None, y.view_mut());
        }
    }
    [y, activated, sum].map(|buffer| bits(&buffer.view().to_vec()))
}

/// The law of `fused`, on every device. One to four rows have kernels of their own; the second shape uses split-K. On a GPU
/// wider products by split-K have blocks of more columns.
#[test]
fn products_with_a_norm_between_them_give_the_bits_of_one_by_one() {
    let shapes = [(384, 256, 640), (2048, 1024, 520), (128, 128, 80), (256, 2560, 112)];
    let wide = [(4608, 2176, 80), (8704, 4352, 48)];
    let check = |device: &Device, (inputs, width, outputs), n_tokens: &[usize]| {
        for &tokens in n_tokens {
            let shape = (tokens, inputs, width, outputs);
            let one_by_one = two_products(device, shape, false);
            assert!(one_by_one.iter().all(|part| part.iter().any(|bits| *bits != 0)));
            assert!(two_products(device, shape, true) == one_by_one, "{shape:?}");
        }
    };
    for shape in shapes {
        check(&crate::testing::device(), shape, &[1, 2, 3, 4, 9]);
    }
    let Some(device) = &gpu(Precision::Bf16) else { return };
    for shape in shapes {
        check(device, shape, &[1, 2, 3, 4, 9]);
    }
    for shape in wide {
        check(device, shape, &[1, 3]);
    }
}

/// Few rows are drawn by clusters of thread blocks. Alternatives, which these do not report, ask for one block a row.
#[test]
fn draws_by_a_cluster_on_cuda_give_the_bits_of_draws_by_a_block() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    for (tokens, vocab) in [(1, 151_936), (3, 32_000), (2, 1000), (2, 72), (5, 8197)] {
        let width = 64;
        let w = weight(device, vocab, width, &numbers(2, vocab * width));
        let hidden = compute(device, &numbers(1, tokens * width));
        let run = |n_best: usize, uniform: f64| {
            let uniforms = upload(device, &vec![uniform; tokens]);
            let mut ids = device.zeros(tokens).unwrap();
            let [mut logp, mut entropy] = [(); 2].map(|()| device.zeros::<f32>(tokens).unwrap());
            let mut best_ids = device.zeros(tokens * n_best).unwrap();
            let mut best_logp = device.zeros(tokens * n_best).unwrap();
            let alternatives =
                lm_head::Alternatives { n: n_best, ids: best_ids.view_mut(), logp: best_logp.view_mut() };
            let to = sampling::Drawn {
                ids: ids.view_mut(),
                logp: logp.view_mut(),
                entropy: entropy.view_mut(),
                alternatives: (n_best > 0).then_some(alternatives),
                kept: None,
            };
            let mut logits = sampling::Logits::new(device, vocab, tokens).unwrap();
            let from = sampling::Inputs {
                hidden: hidden.view(),
                rule: lm_head::LogitRule::default(),
                head: &w,
                uniforms: uniforms.view(),
            };
            let rule = sampling::SamplingRule::Draw { temperature: 0.8, filter: sampling::Filter::NONE };
            sampling::forward(device, rule, from, to, &mut logits);
            (ids.view().to_vec(), bits(&logp.view().to_vec()), bits(&entropy.view().to_vec()))
        };
        for uniform in [0.0, 0.1, 0.37, 0.5, 0.99, 1.0 - f64::EPSILON] {
            assert_eq!(run(0, uniform), run(1, uniform), "{tokens} rows of {vocab}, uniform {uniform}");
        }
    }
}
