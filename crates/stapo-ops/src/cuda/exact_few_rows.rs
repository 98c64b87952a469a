//! Tests of bits on the GPU: what few rows have kernels of their own for. Without a GPU these tests print that they are
//! skipped, and pass, except that the law of `fused` is checked on the CPU, too.

use super::parity::{compute, empty, gpu, numbers};
use crate::cuda::Precision;
use crate::dtype::{bf16_to_f32, f32_to_bf16};
use crate::fused::{matmul_swiglu, rmsnorm_matmul};
use crate::testing::{bits, upload, weight};
use crate::{Device, lm_head, matmul, rmsnorm, sampling, swiglu};

/// Outputs, the width of gate and up, and the residual stream, by the fused op or by its parts.
fn normed_products(
    device: &Device,
    (tokens, width, outputs): (usize, usize, usize),
    is_added: bool,
    is_fused: bool,
) -> [Vec<u32>; 3] {
    let n = tokens * width;
    let scaled: Vec<f32> =
        numbers(2, outputs * width).iter().map(|x| bf16_to_f32(f32_to_bf16(x * 0.03))).collect();
    let matrix = weight(device, outputs, width, &scaled);
    let [stream, addend] = [4, 5].map(|seed| compute(device, &numbers(seed, n)));
    let norm = compute(device, &numbers(3, width));
    let dims = rmsnorm::Dims { tokens, width, eps: 1e-6 };
    let [mut sum, mut normed] = [(); 2].map(|()| empty(device, n));
    let mut inv = device.zeros(tokens).unwrap();
    let mut y = empty(device, tokens * outputs);
    let mut gate_up = empty(device, tokens * outputs);
    let mut activated = empty(device, tokens * outputs / 2);
    let of_gate_up = swiglu::Dims { tokens, width: outputs / 2 };
    if is_fused {
        for is_swiglu in [false, true] {
            let entry = rmsnorm_matmul::Entry {
                dims,
                stream: stream.view(),
                addition: is_added.then_some((addend.view(), sum.view_mut())),
                norm_weight: norm.view(),
                out: rmsnorm::Out { normed: normed.view_mut(), inv_rms: inv.view_mut() },
            };
            if is_swiglu {
                let (gate_up, out) = (gate_up.view_mut(), activated.view_mut());
                rmsnorm_matmul::forward_swiglu(device, entry, &matrix, gate_up, out);
            } else {
                rmsnorm_matmul::forward(device, entry, &matrix, None, y.view_mut());
            }
        }
    } else {
        let to = rmsnorm::Out { normed: normed.view_mut(), inv_rms: inv.view_mut() };
        if is_added {
            let residual = rmsnorm::Residual { stream: stream.view(), addend: addend.view() };
            rmsnorm::forward_add(device, dims, residual, norm.view(), sum.view_mut(), to);
        } else {
            rmsnorm::forward(device, dims, stream.view(), norm.view(), to);
        }
        matmul::forward(device, tokens, normed.view(), &matrix, None, y.view_mut());
        let (x, out) = (normed.view(), activated.view_mut());
        matmul_swiglu::forward(device, of_gate_up, x, &matrix, gate_up.view_mut(), out);
    }
    let sum = if is_added { sum } else { stream };
    [y, activated, sum].map(|buffer| bits(&buffer.view().to_vec()))
}

/// The law of `fused`, on every device. Rows beyond 8 take the parts.
#[test]
fn rows_normed_by_their_product_give_the_bits_of_one_by_one() {
    let devices = [Some(crate::testing::device()), gpu(Precision::Bf16)];
    for device in devices.iter().flatten() {
        for (width, outputs) in [(2048, 4096), (384, 640), (128, 72), (2560, 1008)] {
            for (tokens, is_added) in [(1, true), (2, false), (2, true), (5, true), (8, true), (9, true)] {
                let shape = (tokens, width, outputs);
                let one_by_one = normed_products(device, shape, is_added, false);
                assert!(one_by_one.iter().flatten().any(|bits| *bits != 0));
                let fused = normed_products(device, shape, is_added, true);
                assert!(fused == one_by_one, "{tokens} rows, {width} to {outputs}, added: {is_added}");
            }
        }
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
            let alternatives = lm_head::Alternatives {
                n: n_best,
                ids: best_ids.view_mut(),
                logp: best_logp.view_mut(),
            };
            let to = sampling::Drawn {
                ids: ids.view_mut(),
                logp: logp.view_mut(),
                entropy: entropy.view_mut(),
                alternatives: (n_best > 0).then_some(alternatives),
            };
            let mut logits = sampling::Logits::new(device, vocab, tokens).unwrap();
            let from = sampling::Inputs { hidden: hidden.view(), head: &w, uniforms: uniforms.view() };
            let rule = sampling::SamplingRule::Draw { temperature: 0.8, filter: sampling::Filter::NONE };
            sampling::forward(device, rule, from, to, &mut logits);
            (ids.view().to_vec(), bits(&logp.view().to_vec()), bits(&entropy.view().to_vec()))
        };
        for uniform in [0.0, 0.1, 0.37, 0.5, 0.99, 1.0 - f64::EPSILON] {
            assert_eq!(run(0, uniform), run(1, uniform), "{tokens} rows of {vocab}, uniform {uniform}");
        }
    }
}
