//! Adapters on the GPU: against the CPU, and the bits of every path against those of its parts and of other numbers of
//! rows. Without a GPU these tests print that they are skipped, and pass.

use super::lora_case::{Case, Memory};
use super::parity::{check, compute, distance, empty, gpu, numbers};
use crate::cuda::Precision;
use crate::fused::matmul_lora::{self, DownGradient, Product};
use crate::fused::matmul_swiglu::GateUp;
use crate::lora::{self, Backward, FactorGradients, Hidden, Input};
use crate::testing::{bits, upload};
use crate::{Buffer, Weight, Write, matmul, rmsnorm, swiglu};

#[test]
fn adapters_on_cuda_agree_with_the_cpu() {
    let cases = [
        (1, Case::new(72, &[64, 40, 24], &[0, 2], 8)),
        (33, Case::new(72, &[64, 40, 24], &[0, 1, 2], 1)),
        (70, Case::new(136, &[200], &[0], 16)),
        (129, Case::new(72, &[64, 40, 24], &[0, 2], 3)),
        (600, Case::new(2048, &[256, 128, 128], &[0, 1, 2], 32)),
        (300, Case::new(192, &[320, 320], &[0, 1], 64)),
        (257, Case::new(256, &[384], &[0], 100)),
        (65, Case::new(200, &[136], &[0], 200)),
    ];
    for (tokens, case) in cases {
        let (inputs, outputs) = (case.inputs, case.outputs());
        check(&format!("adapter, {tokens} tokens, {}", case.name()), |device| {
            let factors = case.factors(device);
            let adapter = &factors.adapter();
            let x = compute(device, &numbers(1, tokens * inputs));
            let d_y = compute(device, &numbers(3, tokens * outputs));
            let mut y = compute(device, &numbers(4, tokens * outputs));
            let [mut hidden, mut d_hidden] = [0; 2].map(|_| empty(device, tokens * case.pitch()));
            let mut input = Input::Apart { x: x.view(), hidden: hidden.view_mut() };
            lora::project(device, tokens, adapter, &mut input);
            lora::expand(device, tokens, adapter, hidden.view(), y.view_mut());
            let mut gradient = Input::Apart { x: d_y.view(), hidden: d_hidden.view_mut() };
            lora::backward_hidden(device, tokens, adapter, &mut gradient);
            let writes = [Write::Add, Write::Set, Write::Add];
            let mut d_b: Vec<Buffer<f32>> =
                factors.b.iter().map(|b| upload(device, &numbers(7, b.shape().len()))).collect();
            let mut d_a = upload(device, &numbers(8, factors.a.shape().len()));
            let to = FactorGradients {
                b: d_b.iter_mut().zip(writes).map(|(d_b, write)| (d_b.view_mut(), write)).collect(),
                a: Some((d_a.view_mut(), Write::Add)),
            };
            let [hidden, of_hidden] = [hidden.view(), d_hidden.view()].map(Hidden::apart);
            let saved = Backward { x: x.view(), d_y: d_y.view(), hidden, d_hidden: of_hidden };
            lora::backward_factors(device, tokens, adapter, saved, to);
            let mut d_x = compute(device, &numbers(9, tokens * inputs));
            lora::backward_input(device, tokens, adapter, d_hidden.view(), d_x.view_mut());
            d_b.extend([y, d_a, d_x]);
            d_b.iter().map(|buffer| buffer.view().to_vec()).collect()
        });
    }
}

/// Layers of the shapes of Qwen3-1.7B and of small models.
fn layers() -> Vec<Case> {
    let mut cases = Vec::new();
    for rank in [1, 32] {
        cases.push(Case::new(2048, &[2048, 1024, 1024], &[0, 1, 2], rank));
        cases.push(Case::new(6144, &[2048], &[0], rank));
    }
    for rank in [1, 8, 32, 80] {
        cases.push(Case::new(2048, &[1024], &[0], rank));
        cases.push(Case::new(256, &[128, 64, 64], &[1, 2], rank));
        cases.push(Case::new(200, &[72], &[0], rank));
    }
    // Tiles of the kernels for some hundred rows, with columns that end inside of one.
    cases.extend([2, 24, 33].map(|rank| Case::new(128, &[4104, 200], &[0, 1], rank)));
    cases.push(Case::new(1024, &[12296], &[0], 20));
    cases.push(Case::new(256, &[6144, 2080], &[0, 1], 16));
    cases
}

#[test]
fn rows_of_a_layer_with_adapters_on_cuda_do_not_depend_on_their_number() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    for case in layers() {
        let factors = case.factors(device);
        let base = case.base(device, &factors);
        if !base.is_joined() && !case.rank.is_multiple_of(8) {
            continue;
        }
        let outputs = case.outputs();
        let rows = 1100;
        let mut memory = case.memory(device, &base, rows);
        let mut product = |n: usize| {
            let mut y = empty(device, n * outputs);
            let (input, adapter) = (memory.input(n, rows), &factors.adapter());
            let product = Product { input, weight: &base, bias: None, adapter };
            matmul_lora::forward(device, n, product, y.view_mut());
            y.view().to_vec()
        };
        let all = product(rows);
        let name = case.name();
        assert!(all.iter().all(|y| y.is_finite()), "{name}");
        for n in [1, 2, 8, 17, 63, 64, 65, 128, 200, 300, 385, 512, 513] {
            assert!(bits(&product(n)) == bits(&all[..n * outputs]), "{name}: {n} rows differ");
        }
        let law = case.by_the_law(device, &base, &factors, rows);
        assert!(bits(&law) == bits(&all), "{name}: differs from the law");
        // The layer without its adapters, and the gradient of its input.
        let alone = case.base_alone(device);
        let (x, d_y) =
            (compute(device, &numbers(1, rows * case.inputs)), compute(device, &numbers(2, rows * outputs)));
        let plain = |weight: &Weight<f32>| {
            let (mut y, mut d_x) = (empty(device, rows * outputs), empty(device, rows * case.inputs));
            matmul::forward(device, rows, x.view(), weight, None, y.view_mut());
            matmul::backward_input(device, rows, d_y.view(), weight, Write::Set, d_x.view_mut());
            (bits(&y.view().to_vec()), bits(&d_x.view().to_vec()))
        };
        assert!(plain(&alone) == plain(&base), "{}: without adapters", case.name());
    }
}

/// `x A^T` by every kernel that computes it: which one does depends on the number of rows and on the shape.
#[test]
fn projections_on_cuda_do_not_depend_on_the_number_of_rows() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    for (case, most) in [
        (Case::new(2048, &[64, 64, 64], &[0, 1, 2], 32), 6400),
        (Case::new(2048, &[64], &[0], 32), 700),
        (Case::new(6144, &[64], &[0], 32), 700),
        (Case::new(12288, &[64], &[0], 32), 200),
        (Case::new(1024, &[64, 64], &[0, 1], 100), 2200),
        (Case::new(200, &[72], &[0], 3), 6400),
    ] {
        let (factors, inputs, pitch) = (case.factors(device), case.inputs, case.pitch());
        if !case.base(device, &factors).is_joined() {
            return println!("skipped: this GPU does not join adapters");
        }
        // The first rows, again and again.
        let x = numbers(1, most.min(700) * inputs);
        let x: Vec<f32> = x.iter().copied().cycle().take(most * inputs).collect();
        let x = compute(device, &x);
        let project = |n: usize| {
            let mut hidden = empty(device, n * pitch);
            hidden.view_mut().fill(f32::NAN);
            let mut input = Input::Apart { x: x.range(0..n * inputs), hidden: hidden.view_mut() };
            lora::project(device, n, &factors.adapter(), &mut input);
            bits(&hidden.view().to_vec())
        };
        let all = project(most);
        for n in [1, 8, 17, 64, 65, 130, 512, 700, 2200].into_iter().filter(|n| *n < most) {
            assert!(project(n) == all[..n * pitch], "{}: {n} rows differ", case.name());
        }
    }
}

#[test]
fn gate_and_up_with_adapters_on_cuda_give_the_bits_of_one_by_one() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    for (inputs, width, adapted, rank) in
        [(2048, 6144, &[0, 1][..], 32), (192, 320, &[0, 1], 5), (128, 72, &[0, 1], 100), (256, 64, &[1], 16)]
    {
        let case = Case::new(inputs, &[width, width], adapted, rank);
        let factors = case.factors(device);
        let base = case.base(device, &factors);
        // As many as the kernels for many rows take.
        let rows = 3072;
        let adapter = &factors.adapter();
        let mut memory = case.memory(device, &base, rows);
        let mut activate = |n: usize, kept| {
            let (mut gate_up, mut out) = (empty(device, 2 * n * width), empty(device, n * width));
            let dims = swiglu::Dims { tokens: n, width, gate: swiglu::Gate::Silu };
            let product = Product { input: memory.input(n, rows), weight: &base, bias: None, adapter };
            matmul_lora::forward_swiglu(device, dims, product, gate_up.view_mut(), kept, out.view_mut());
            (gate_up.view().to_vec(), out.view().to_vec())
        };
        let y = compute(device, &case.by_the_law(device, &base, &factors, rows));
        let mut out = empty(device, rows * width);
        swiglu::forward(
            device,
            swiglu::Dims { tokens: rows, width, gate: swiglu::Gate::Silu },
            y.view(),
            out.view_mut(),
        );
        let (gate_up, out) = (y.view().to_vec(), out.view().to_vec());
        for n in [1, 9, 64, 65, 300, 512, 600, rows] {
            for kept in [GateUp::Kept, GateUp::Dropped] {
                let found = activate(n, kept);
                let name = case.name();
                assert!(bits(&found.1) == bits(&out[..n * width]), "{name}: {n} rows, {kept:?} differ");
                if kept == GateUp::Kept {
                    assert!(bits(&found.0) == bits(&gate_up[..2 * n * width]), "{name}: {n} rows differ");
                }
            }
        }
    }
}

/// As a half-layer ends: the product with its term, added to the residual stream and normed.
#[test]
fn a_layer_with_adapters_added_and_normed_on_cuda_gives_the_bits_of_one_by_one() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    for (inputs, width, rank) in [(6144, 2048, 32), (6144, 2048, 1), (2048, 2048, 32), (128, 72, 3)] {
        let case = Case::new(inputs, &[width], &[0], rank);
        let factors = case.factors(device);
        let base = case.base(device, &factors);
        // As many as the kernels for many rows take.
        let rows = 3072;
        let stream = compute(device, &numbers(1, rows * width));
        let mut memory = case.memory(device, &base, rows);
        let norm = compute(device, &numbers(6, width));
        let adapter = &factors.adapter();
        let mut finish = |n: usize, fused: bool| {
            let [mut y, mut sum, mut normed] = [0; 3].map(|_| empty(device, n * width));
            let mut inv_rms = device.zeros(n).unwrap();
            let dims = rmsnorm::Dims { tokens: n, width, eps: 1e-6 };
            let stream = stream.range(0..n * width);
            let product = Product { input: memory.input(n, rows), weight: &base, bias: None, adapter };
            let out = rmsnorm::Out { normed: normed.view_mut(), inv_rms: inv_rms.view_mut() };
            if fused {
                let to = matmul_lora::Residual { stream, addend: y.view_mut(), sum: sum.view_mut() };
                matmul_lora::forward_add_rmsnorm(device, dims, product, to, norm.view(), out);
            } else {
                matmul_lora::forward(device, n, product, y.view_mut());
                let residual = rmsnorm::Residual { stream, addend: y.view() };
                rmsnorm::forward_add(device, dims, residual, norm.view(), sum.view_mut(), out);
            }
            [sum.view().to_vec(), normed.view().to_vec()]
        };
        let all = finish(rows, false);
        for n in [1, 9, 64, 65, 300, 385, 512, 600, rows] {
            let found = finish(n, true);
            for (found, all) in found.iter().zip(&all) {
                assert!(bits(found) == bits(&all[..n * width]), "{}: {n} rows differ", case.name());
            }
        }
    }
}

#[test]
fn the_backward_of_down_and_swiglu_on_cuda_gives_the_bits_of_one_by_one() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    for (width, outputs, rank, tokens) in [(6144, 2048, 32, 600), (200, 72, 3, 65), (64, 64, 100, 1)] {
        let case = Case::new(width, &[outputs], &[0], rank);
        let factors = case.factors(device);
        let adapter = &factors.adapter();
        let dims = swiglu::Dims { tokens, width, gate: swiglu::Gate::Silu };
        let d_y = compute(device, &numbers(3, tokens * outputs));
        let gate_up = compute(device, &numbers(4, 2 * tokens * width));
        let mut d_hidden = empty(device, tokens * case.pitch());
        let mut gradient = Input::Apart { x: d_y.view(), hidden: d_hidden.view_mut() };
        lora::backward_hidden(device, tokens, adapter, &mut gradient);
        let [mut together, mut parts] = [0; 2].map(|_| empty(device, 2 * tokens * width));
        let [mut d, mut d_again] = [0; 2].map(|_| compute(device, &numbers(5, tokens * width)));
        let down = DownGradient { adapter, d_hidden: d_hidden.view(), d_activated: d.view_mut() };
        matmul_lora::backward_swiglu(device, dims, down, gate_up.view(), together.view_mut(), None);
        lora::backward_input(device, tokens, adapter, d_hidden.view(), d_again.view_mut());
        swiglu::backward(device, dims, gate_up.view(), d_again.view(), parts.view_mut());
        assert!(bits(&together.view().to_vec()) == bits(&parts.view().to_vec()), "{} differs", case.name());
    }
}

/// Beside SwiGLU's backward: the same gradients of gate and up, and a gradient of the first factor close to that of its own
/// product.
#[test]
fn the_gradient_of_a_factor_beside_swiglu_on_cuda_agrees_with_its_own_product() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    for (width, outputs, rank, tokens) in
        [(6144, 2048, 32, 1500), (200, 72, 3, 65), (1024, 256, 16, 700), (64, 64, 8, 1)]
    {
        let case = Case::new(width, &[outputs], &[0], rank);
        let factors = case.factors(device);
        let adapter = &factors.adapter();
        if !matmul_lora::makes_first_factor(device, swiglu::Gate::Silu, adapter) {
            return println!("skipped: this GPU makes gradients of factors by themselves");
        }
        let dims = swiglu::Dims { tokens, width, gate: swiglu::Gate::Silu };
        let gates = compute(device, &numbers(4, 2 * tokens * width));
        let d_hidden = compute(device, &numbers(1, tokens * case.pitch()));
        for write in [Write::Add, Write::Set] {
            let [mut beside, mut own] = [0; 2].map(|_| upload(device, &numbers(7, rank * width)));
            let backward = |d_a| {
                let mut d = compute(device, &numbers(5, tokens * width));
                let mut d_gates = empty(device, 2 * tokens * width);
                let down = DownGradient { adapter, d_hidden: d_hidden.view(), d_activated: d.view_mut() };
                matmul_lora::backward_swiglu(device, dims, down, gates.view(), d_gates.view_mut(), d_a);
                bits(&d_gates.view().to_vec())
            };
            let name = case.name();
            assert!(backward(Some((beside.view_mut(), write))) == backward(None), "{name}: gate and up");
            let mut activated = empty(device, tokens * width);
            swiglu::forward(device, dims, gates.view(), activated.view_mut());
            let d_y = compute(device, &numbers(3, tokens * outputs));
            let hidden = Hidden::apart(d_hidden.view());
            let saved = Backward { x: activated.view(), d_y: d_y.view(), hidden, d_hidden: hidden };
            let to = FactorGradients { b: Vec::new(), a: Some((own.view_mut(), write)) };
            lora::backward_factors(device, tokens, adapter, saved, to);
            let off = distance(&beside.view().to_vec(), &own.view().to_vec());
            assert!(off < 1e-5, "{name}: off by {off}");
        }
    }
}

/// With the gradient of hidden behind that of y, and the first factors below the weight: the gradients of the factors have the
/// bits of matrices apart, and that of x is close to the sum of two products.
#[test]
fn the_joined_backward_on_cuda_agrees_with_one_by_one() {
    let Some(device) = &gpu(Precision::Bf16) else { return };
    let qkv = |rank| Case::new(2048, &[2048, 1024, 1024], &[0, 1, 2], rank);
    for (tokens, case) in [(600, qkv(32)), (65, qkv(1)), (33, Case::new(192, &[320, 320], &[0, 1], 100))] {
        let factors = case.factors(device);
        let base = case.base(device, &factors);
        if !base.joins_gradients() {
            return println!("skipped: this GPU does not join adapters");
        }
        let (adapter, outputs, pitch) = (&factors.adapter(), case.outputs(), case.pitch());
        let mut memory = case.memory(device, &base, tokens);
        lora::project(device, tokens, adapter, &mut memory.input(tokens, tokens));
        let Memory::Joined(x) = &memory else { panic!("a joined input") };
        let d_y = numbers(3, tokens * outputs);
        let mut rows = vec![f32::NAN; tokens * (outputs + pitch)];
        for (row, d_y) in rows.chunks_exact_mut(outputs + pitch).zip(d_y.chunks_exact(outputs)) {
            row[..outputs].copy_from_slice(d_y);
        }
        let (mut rows, d_y) = (compute(device, &rows), compute(device, &d_y));
        let mut d_hidden = empty(device, tokens * pitch);
        let gradients = |d_output: &mut Input<'_, f32>| {
            lora::backward_hidden(device, tokens, adapter, d_output);
            let mut d_b: Vec<Buffer<f32>> =
                factors.b.iter().map(|b| upload(device, &numbers(7, b.shape().len()))).collect();
            let mut d_a = upload(device, &numbers(8, factors.a.shape().len()));
            let to = FactorGradients {
                b: d_b.iter_mut().map(|d_b| (d_b.view_mut(), Write::Add)).collect(),
                a: Some((d_a.view_mut(), Write::Set)),
            };
            let hidden = Hidden::joined(x.view(), case.inputs);
            let saved =
                Backward { x: x.view(), d_y: d_output.x(), hidden, d_hidden: d_output.hidden(outputs) };
            lora::backward_factors(device, tokens, adapter, saved, to);
            d_b.push(d_a);
            d_b.iter().map(|d| bits(&d.view().to_vec())).collect::<Vec<_>>()
        };
        let together = gradients(&mut Input::Joined(rows.view_mut()));
        let apart = gradients(&mut Input::Apart { x: d_y.view(), hidden: d_hidden.view_mut() });
        assert!(together == apart, "{}: gradients of factors", case.name());
        let [mut d_x, mut sum] = [0; 2].map(|_| empty(device, tokens * case.inputs));
        matmul_lora::backward_input(device, tokens, rows.view(), &base, d_x.view_mut());
        matmul::backward_input(device, tokens, d_y.view(), &base, Write::Set, sum.view_mut());
        lora::backward_input(device, tokens, adapter, d_hidden.view(), sum.view_mut());
        let off = distance(&d_x.view().to_vec(), &sum.view().to_vec());
        assert!(off < 6e-3, "{}: off by {off}", case.name());
    }
}
