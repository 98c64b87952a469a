//! SwiGLU and `x A^T` of the layer behind it in one kernel, against the kernels of each. Without a GPU these tests print that they are
//! skipped, and pass.

use super::lora_case::Case;
use super::parity::{compute, empty, gpu, numbers};
use crate::cuda::Precision;
use crate::device::Backend;
use crate::fused::matmul_lora::{self, Next, Product, Residual};
use crate::fused::matmul_swiglu::GateUp;
use crate::lora::cuda::Placed;
use crate::lora::{self, Input, cuda_swiglu};
use crate::testing::bits;
use crate::{Device, rmsnorm, swiglu};

const ROWS: [usize; 7] = [65, 100, 128, 200, 384, 500, 512];

fn dims(tokens: usize, width: usize) -> swiglu::Dims {
    swiglu::Dims { tokens, width, gate: swiglu::Gate::Silu }
}

/// Gate and up side by side, with gates among them whose exponentials leave the range of the quick division.
fn gates(n: usize) -> Vec<f32> {
    let mut gates = numbers(4, n);
    for (apart, gate) in [(997, -88.0), (1009, -150.0), (1013, 120.0), (1019, -87.0), (1021, -87.5)] {
        gates.iter_mut().skip(apart / 2).step_by(apart).for_each(|at| *at = gate);
    }
    gates
}

#[test]
fn swiglu_with_the_projection_behind_it_on_cuda_gives_the_bits_of_one_by_one() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    let Backend::Cuda(cuda) = device.backend() else { panic!("a GPU") };
    for width in [6144, 4864, 8960, 1928] {
        let most = ROWS[ROWS.len() - 1];
        let gate_up = compute(device, &gates(2 * most * width));
        for (rank, room) in [(8, 0), (16, 8), (32, 0), (32, 72), (64, 8)] {
            let case = Case::new(width, &[64], &[0], rank);
            let factors = case.factors(device);
            let adapter = &factors.adapter();
            if !lora::cuda::fits(cuda, adapter) {
                return println!("skipped: this GPU has no such kernel");
            }
            let pitch = width + case.pitch() + room;
            for n in ROWS {
                let name = format!("{n} rows, {}, {room} columns behind", case.name());
                let gate_up = gate_up.range(0..2 * n * width);
                // x and hidden in the same rows, whose last columns stay NaN.
                let mut apart = empty(device, n * pitch);
                swiglu::forward(device, dims(n, width), gate_up, apart.view_mut());
                lora::project(device, n, adapter, &mut Input::Joined(apart.view_mut()));
                let apart = bits(&apart.view().to_vec());
                // The second run finds what the first has left in shared memory.
                for run in 0..2 {
                    let rows = empty(device, n * pitch);
                    let slice = rows.view().cuda();
                    let hidden = Placed::new(slice, n, width);
                    let is_done =
                        cuda_swiglu::forward(cuda, dims(n, width), gate_up.cuda(), slice, adapter, hidden);
                    let found = rows.view().to_vec();
                    if !is_done {
                        assert!(rank > 32 || width > 6144, "{name}: no kernel");
                        assert!(found.iter().all(|x| x.is_nan()), "{name}: written, but not by a kernel");
                        continue;
                    }
                    let first = bits(&found).iter().zip(&apart).position(|(a, b)| a != b);
                    let place = first.map(|at| (at / pitch, at % pitch));
                    assert!(place.is_none(), "{name}, run {run}: differs first at row and column {place:?}");
                }
            }
        }
    }
}

/// From what gate and up take in to the norm behind down; with x A^T of down made beside SwiGLU, or with down's product.
fn half_layer(device: &Device, n: usize, [gate_up, down]: [&Case; 2], is_fused: bool) -> (bool, Vec<u32>) {
    let (width, outputs) = (down.inputs, down.outputs());
    let factors = [gate_up.factors(device), down.factors(device)];
    let bases = [gate_up.base(device, &factors[0]), down.base(device, &factors[1])];
    let adapters = [factors[0].adapter(), factors[1].adapter()];
    let mut memory = gate_up.memory(device, &bases[0], n);
    let mut gates = empty(device, 2 * n * width);
    let mut rows = empty(device, n * (width + down.pitch()));
    let product = Product { input: memory.input(n, n), weight: &bases[0], bias: None, adapter: &adapters[0] };
    let next = is_fused.then_some(Next { weight: &bases[1], adapter: &adapters[1] });
    let (gates, kept, out) = (gates.view_mut(), GateUp::Dropped, rows.view_mut());
    let is_projected = matmul_lora::forward_swiglu(device, dims(n, width), product, gates, kept, out, next);
    let input = if is_projected { Input::Projected(rows.view()) } else { Input::Joined(rows.view_mut()) };
    let [mut y, mut sum, mut normed] = [0; 3].map(|_| empty(device, n * outputs));
    let mut inv_rms = device.zeros(n).unwrap();
    let (stream, norm) = (compute(device, &numbers(1, n * outputs)), compute(device, &numbers(6, outputs)));
    let product = Product { input, weight: &bases[1], bias: None, adapter: &adapters[1] };
    let to = Residual { stream: stream.view(), addend: y.view_mut(), sum: sum.view_mut() };
    let out = rmsnorm::Out { normed: normed.view_mut(), inv_rms: inv_rms.view_mut() };
    let dims = rmsnorm::Dims { tokens: n, width: outputs, eps: 1e-6 };
    matmul_lora::forward_add_rmsnorm(device, dims, product, to, norm.view(), out);
    (is_projected, bits(&[sum.view().to_vec(), normed.view().to_vec(), rows.view().to_vec()].concat()))
}

#[test]
fn a_half_layer_with_the_projection_beside_swiglu_on_cuda_gives_the_bits_of_one_by_one() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    let cases = [Case::new(2048, &[6144; 2], &[0, 1], 32), Case::new(6144, &[2048], &[0], 32)];
    let cases = [&cases[0], &cases[1]];
    if !cases[1].base(device, &cases[1].factors(device)).is_joined() {
        return println!("skipped: this GPU does not join adapters");
    }
    for n in [1, 64, 65, 300, 512, 513] {
        let (is_projected, fused) = half_layer(device, n, cases, true);
        assert_eq!(is_projected, (65..=512).contains(&n), "{n} rows");
        assert!(fused == half_layer(device, n, cases, false).1, "{n} rows differ");
    }
}
