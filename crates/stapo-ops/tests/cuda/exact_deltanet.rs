//! Gated DeltaNet on the GPU: the numbers of the CPU, and a row with the same bits in whole sequences, in prefill and in decode.
//! Without a GPU these tests print that they are skipped, and pass.

use super::parity::{distance, gpu, numbers};
use crate::Device;
use crate::cuda::Precision;
use crate::deltanet::tests::{backward_of, check_calls, check_extreme_gates, dims, forward_of, inputs};
use crate::deltanet::{Dims, Heads};
use crate::output_gate;
use crate::testing::{Tensors, bits, device as cpu};

/// Heads that the tile takes in bf16, with as many key heads as value heads and with fewer, and others.
const HEADS: [Heads; 7] = [
    Heads { key: 2, value: 2, key_dim: 64, value_dim: 64 },
    Heads { key: 2, value: 4, key_dim: 64, value_dim: 64 },
    Heads { key: 1, value: 1, key_dim: 128, value_dim: 128 },
    Heads { key: 1, value: 2, key_dim: 128, value_dim: 128 },
    Heads { key: 2, value: 4, key_dim: 128, value_dim: 128 },
    Heads { key: 2, value: 4, key_dim: 5, value_dim: 7 },
    Heads { key: 1, value: 3, key_dim: 64, value_dim: 80 },
];

fn gpus() -> impl Iterator<Item = (Precision, Device)> {
    [Precision::F32, Precision::Bf16].into_iter().filter_map(|precision| Some((precision, gpu(precision)?)))
}

#[test]
fn deltanet_on_cuda_agrees_with_the_cpu() {
    let mut wrong = Vec::new();
    for (precision, gpu) in gpus() {
        for (heads, lengths) in
            HEADS.into_iter().flat_map(|heads| [(heads, [1, 130, 64]), (heads, [5, 3, 200])])
        {
            let d = dims(heads, &lengths);
            let x: Tensors<f32> =
                (0..).zip(inputs::<f32>(d)).map(|(seed, x)| numbers(seed + 1, x.len())).collect();
            let run = |device: &Device| {
                let forward = forward_of(device, d, &lengths, &x);
                [&forward[1..], &backward_of(device, d, &lengths, &x, 0.0)].concat()
            };
            let (got, expected) = (run(&gpu), run(&cpu()));
            let d_raw = &expected[2];
            let names = ["inv_norms", "out", "d_raw", "d_conv", "d_a_log", "d_dt_bias", "d_norm"];
            for (name, (got, expected)) in names.into_iter().zip(got.iter().zip(&expected)) {
                // Sums over all tokens whose terms nearly cancel are measured by the sum of their absolute terms.
                let off = match name {
                    "d_a_log" => distance_by(
                        got,
                        expected,
                        &absolute_terms(d, &x, d_raw, |x| softplus(x) / sigmoid(x)),
                    ),
                    "d_dt_bias" => distance_by(got, expected, &absolute_terms(d, &x, d_raw, |_| 1.0)),
                    _ => distance(got, expected),
                };
                println!("{precision:?} {heads:?} {lengths:?} {name}: {off:.1e}");
                let tolerance = match precision {
                    Precision::F32 => 5e-5,
                    Precision::Bf16 => 2e-2,
                };
                if off.is_nan() || off > tolerance {
                    wrong.push(format!("{precision:?} {heads:?} {lengths:?} {name}: {off:.1e}"));
                }
            }
            let again = run(&gpu);
            assert!(
                got.iter().zip(&again).all(|(a, b)| bits(a) == bits(b)),
                "{heads:?}: a second run differs"
            );
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// For each value head the sum over tokens of the absolute gradient of a, times `factor` of a + dt_bias.
fn absolute_terms(d: Dims, x: &Tensors<f32>, d_raw: &[f32], factor: impl Fn(f32) -> f32) -> Vec<f32> {
    let (width, first) = (d.heads.input_width(), d.heads.input_width() - d.heads.value);
    let term = |head: usize, token: usize| {
        let at = token * width + first + head;
        (d_raw[at] * factor(x[0][at] + x[3][head])).abs()
    };
    (0..d.heads.value).map(|head| (0..d.tokens).map(|token| term(head, token)).sum()).collect()
}

/// The largest difference as a part of its scale.
fn distance_by(got: &[f32], expected: &[f32], scales: &[f32]) -> f64 {
    let parts = got.iter().zip(expected).zip(scales).map(|((a, b), scale)| f64::from((a - b).abs() / scale));
    parts.fold(0.0, |most: f64, part| if most.is_nan() || part <= most { most } else { part })
}

#[test]
fn a_row_of_deltanet_has_the_same_bits_in_any_call() {
    for (precision, gpu) in gpus() {
        for heads in HEADS {
            println!("{precision:?} {heads:?}");
            check_calls(&gpu, heads, [9, 70, 4], &[1, 2, 1, 3, 1, 40, 1, 30]);
            // Chunks end within a call, at its end and at its start; calls of several chunks.
            check_calls(&gpu, heads, [200, 64, 129], &[63, 1, 1, 62, 2, 1, 70]);
            check_calls(&gpu, heads, [130, 129, 65], &[1; 130]);
        }
    }
}

#[test]
fn extreme_gates_give_finite_numbers_on_cuda() {
    for (_, gpu) in gpus() {
        for heads in HEADS {
            check_extreme_gates(&gpu, heads);
        }
    }
}

#[test]
fn the_output_gate_on_cuda_agrees_with_the_cpu() {
    // Heads of whole eights go eight columns at a time.
    for ((precision, gpu), dim) in gpus().flat_map(|gpu| [34, 40].map(|dim| (gpu.clone(), dim))) {
        let heads = crate::attention::Heads { query: 6, kv: 2, dim };
        let d = output_gate::Dims { tokens: 37, heads };
        let run = |device: &Device| -> Tensors<f32> {
            let input = |seed, width: usize| super::parity::compute(device, &numbers(seed, d.tokens * width));
            let empty = |width: usize| super::parity::empty(device, d.tokens * width);
            let (projected, d_out) = (input(1, d.projected_width()), input(2, heads.out_width()));
            let [mut qkv, mut joined] = [heads.qkv_width(), d.projected_width()].map(empty);
            let [mut gate, mut out, mut d_attended, mut d_gate] = [heads.out_width(); 4].map(empty);
            let attended = input(3, heads.out_width());
            output_gate::divide(device, d, projected.view(), qkv.view_mut(), gate.view_mut());
            output_gate::forward(device, d, attended.view(), gate.view(), out.view_mut());
            let saved = (attended.view(), gate.view());
            output_gate::backward(device, d, saved, d_out.view(), d_attended.view_mut(), d_gate.view_mut());
            output_gate::join(device, d, qkv.view(), gate.view(), joined.view_mut());
            assert_eq!(bits(&joined.view().to_vec()), bits(&projected.view().to_vec()));
            [qkv, gate, out, d_attended, d_gate].iter().map(|x| x.view().to_vec()).collect()
        };
        let tolerance = if precision == Precision::F32 { 1e-6 } else { 6e-3 };
        for (i, (got, expected)) in run(&gpu).iter().zip(run(&cpu())).enumerate() {
            let off = distance(got, &expected);
            assert!(off <= tolerance, "{precision:?}, heads of {dim}, output {i}: off by {off:.1e}");
        }
    }
}
