//! Every op on the GPU against the CPU, at awkward sizes; two runs on the GPU must give the same bits. Without a GPU
//! these tests print that they are skipped, and pass.

use crate::attention::{self, Heads};
use crate::cuda::{CudaOptions, Precision};
use crate::dtype::{bf16_to_f32, f32_to_bf16};
use crate::rope::{Frequencies, HeadNorm, HeadNormGrad, Scaling, Table};
use crate::testing::{Tensors, bits, device as cpu, ids, upload, values, weight};
use crate::{
    Buffer, Device, Write, adamw, embedding, lm_head, matmul, reduce, residual, rmsnorm, rope, sampling,
    swiglu,
};

pub(super) fn gpu(precision: Precision) -> Option<Device> {
    Device::cuda(CudaOptions { precision, ..CudaOptions::default() })
        .map_err(|error| println!("skipped: {error}"))
        .ok()
}

/// Normal numbers that bf16 holds exactly, so that only the op rounds.
pub(super) fn numbers(seed: u64, n: usize) -> Vec<f32> {
    values::<f32>(seed, n).into_iter().map(|x| bf16_to_f32(f32_to_bf16(x))).collect()
}

/// A buffer in compute precision that holds `x`.
pub(super) fn compute(device: &Device, x: &[f32]) -> Buffer<f32> {
    let mut buffer = device.compute_zeros(x.len()).unwrap();
    buffer.view_mut().write(x);
    buffer
}

/// A buffer in compute precision that an op is to fill.
pub(super) fn empty(device: &Device, n: usize) -> Buffer<f32> {
    let mut buffer = device.compute_zeros(n).unwrap();
    // An element that the op does not write stays NaN, which no comparison passes.
    buffer.view_mut().write(&vec![f32::NAN; n]);
    buffer
}

/// `|a - b| / |b|` of vectors; NaN if an element is NaN.
pub(super) fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |x: f64| x * x;
    let off: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    let norm: f64 = b.iter().map(|b| square(f64::from(*b))).sum();
    (off / norm.max(1e-30)).sqrt()
}

/// Runs the op on the CPU and on the GPU in both precisions and compares every output.
pub(super) fn check(name: &str, run: impl Fn(&Device) -> Tensors<f32>) {
    check_within(name, 6e-3, run);
}

/// As [`check`], with the tolerance for bf16.
pub(super) fn check_within(name: &str, bf16_tolerance: f64, run: impl Fn(&Device) -> Tensors<f32>) {
    let mut expected = None;
    for (precision, tolerance) in [(Precision::F32, 1e-5), (Precision::Bf16, bf16_tolerance)] {
        let Some(gpu) = gpu(precision) else { return };
        let expected = expected.get_or_insert_with(|| run(&cpu()));
        let got = run(&gpu);
        for (i, (got, expected)) in got.iter().zip(&*expected).enumerate() {
            let distance = distance(got, expected);
            println!("{name} {precision:?} output {i}: {distance:.1e}");
            assert!(distance <= tolerance, "{name} in {precision:?}, output {i}: off by {distance:.2e}");
        }
        let again = run(&gpu);
        assert!(got.iter().zip(&again).all(|(a, b)| bits(a) == bits(b)), "{name}: a second run differs");
    }
}

#[test]
fn matmul_on_cuda_agrees_with_the_cpu() {
    for (tokens, inputs, outputs) in
        [(1, 64, 96), (31, 24, 40), (33, 257, 65), (300, 128, 512), (513, 2048, 1024)]
    {
        check(&format!("matmul {tokens} {inputs} {outputs}"), |device| {
            let scale = 1.0 / (inputs as f32).sqrt();
            let w: Vec<f32> =
                numbers(2, outputs * inputs).iter().map(|x| bf16_to_f32(f32_to_bf16(x * scale))).collect();
            let w = weight(device, outputs, inputs, &w);
            let (x, d_y) = (
                compute(device, &numbers(1, tokens * inputs)),
                compute(device, &numbers(3, tokens * outputs)),
            );
            let bias = compute(device, &numbers(4, outputs));
            let (mut y, mut d_x) = (empty(device, tokens * outputs), empty(device, tokens * inputs));
            let mut plain = empty(device, tokens * outputs);
            matmul::forward(device, tokens, x.view(), &w, Some(bias.view()), y.view_mut());
            matmul::forward(device, tokens, x.view(), &w, None, plain.view_mut());
            matmul::backward_input(device, tokens, d_y.view(), &w, Write::Set, d_x.view_mut());
            let mut d_w = upload(device, &numbers(5, outputs * inputs));
            let mut d_bias = upload(device, &numbers(6, outputs));
            let dims = matmul::Dims { tokens, inputs, outputs };
            matmul::backward_weight(device, dims, x.view(), d_y.view(), Write::Add, d_w.view_mut());
            matmul::backward_bias(device, tokens, outputs, d_y.view(), d_bias.view_mut());
            [y, plain, d_x, d_w, d_bias].iter().map(|b| b.view().to_vec()).collect()
        });
    }
}

#[test]
fn rmsnorm_and_residual_on_cuda_agree_with_the_cpu() {
    for (tokens, width) in [(1, 8), (3, 33), (31, 257), (600, 2048)] {
        check(&format!("rmsnorm {tokens} {width}"), |device| {
            let dims = rmsnorm::Dims { tokens, width, eps: 1e-6 };
            let n = tokens * width;
            let (x, addend) = (compute(device, &numbers(1, n)), compute(device, &numbers(2, n)));
            let w = compute(device, &numbers(3, width));
            let mut sum = empty(device, n);
            let mut out = empty(device, n);
            let mut inv = device.zeros(tokens).unwrap();
            let residual = rmsnorm::Residual { stream: x.view(), addend: addend.view() };
            let to = rmsnorm::Out { normed: out.view_mut(), inv_rms: inv.view_mut() };
            rmsnorm::forward_add(device, dims, residual, w.view(), sum.view_mut(), to);
            let mut plain = empty(device, n);
            let mut plain_inv = device.zeros(tokens).unwrap();
            let to = rmsnorm::Out { normed: plain.view_mut(), inv_rms: plain_inv.view_mut() };
            rmsnorm::forward(device, dims, x.view(), w.view(), to);
            let (d_out, mut d_x) = (compute(device, &numbers(4, n)), compute(device, &numbers(5, n)));
            let mut d_set = empty(device, n);
            let mut d_w = upload(device, &numbers(6, width));
            for (write, to) in [(Write::Add, &mut d_x), (Write::Set, &mut d_set)] {
                let saved = rmsnorm::Saved { x: x.view(), weight: w.view(), inv_rms: plain_inv.view() };
                rmsnorm::backward(device, dims, saved, d_out.view(), write, to.view_mut(), d_w.view_mut());
            }
            let mut added = compute(device, &numbers(7, n));
            residual::add(device, added.view_mut(), x.view());
            [sum, out, inv, plain, plain_inv, d_x, d_set, d_w, added]
                .iter()
                .map(|b| b.view().to_vec())
                .collect()
        });
    }
}

pub(super) const HEADS: [Heads; 7] = [
    Heads { query: 1, kv: 1, dim: 6 },
    Heads { query: 7, kv: 1, dim: 10 },
    Heads { query: 6, kv: 2, dim: 32 },
    Heads { query: 4, kv: 2, dim: 64 },
    Heads { query: 4, kv: 2, dim: 128 },
    Heads { query: 3, kv: 1, dim: 96 },
    Heads { query: 4, kv: 2, dim: 256 },
];

#[test]
fn rope_on_cuda_agrees_with_the_cpu() {
    for heads in HEADS {
        for has_norm in [true, false] {
            check(&format!("rope {heads:?}"), |device| {
                let tokens = 37;
                let width = heads.qkv_width();
                let frequencies = Frequencies {
                    head_dim: heads.dim,
                    rotary_dim: heads.dim,
                    theta: 1e4,
                    scaling: Scaling::None,
                };
                let table = Table::new(device, &frequencies, 64).unwrap();
                let positions = upload(device, &ids(9, tokens, 64));
                let (q, k) =
                    (compute(device, &numbers(2, heads.dim)), compute(device, &numbers(3, heads.dim)));
                let norm = HeadNorm {
                    extent: rope::NormExtent::Head,
                    query_weight: q.view(),
                    key_weight: k.view(),
                    eps: 1e-6,
                };
                let (raw, d_out) = (
                    compute(device, &numbers(1, tokens * width)),
                    compute(device, &numbers(4, tokens * width)),
                );
                let (mut out, mut d_raw) = (empty(device, tokens * width), empty(device, tokens * width));
                let mut inv = device.zeros(tokens * (heads.query + heads.kv)).unwrap();
                let dims = rope::Dims { tokens, heads };
                let with = has_norm.then(|| (norm, inv.view_mut()));
                rope::forward(device, dims, &table, positions.view(), with, raw.view(), out.view_mut());
                let (mut d_q, mut d_k) =
                    (upload(device, &numbers(5, heads.dim)), upload(device, &numbers(6, heads.dim)));
                let grad = has_norm.then(|| HeadNormGrad {
                    norm,
                    raw: raw.view(),
                    inv_rms: inv.view(),
                    to: Some(rope::HeadNormSums {
                        d_query_weight: d_q.view_mut(),
                        d_key_weight: d_k.view_mut(),
                    }),
                });
                rope::backward(device, dims, &table, positions.view(), grad, d_out.view(), d_raw.view_mut());
                [out, d_raw, d_q, d_k].iter().map(|b| b.view().to_vec()).collect()
            });
        }
    }
}

#[test]
fn swiglu_embedding_adamw_and_reductions_on_cuda_agree_with_the_cpu() {
    for (tokens, width) in [(1, 1), (33, 31), (257, 640)] {
        check(&format!("swiglu {tokens} {width}"), |device| {
            let n = tokens * width;
            let (gate_up, d_out) = (compute(device, &numbers(1, 2 * n)), compute(device, &numbers(2, n)));
            let (mut out, mut d_gate_up) = (empty(device, n), empty(device, 2 * n));
            let dims = swiglu::Dims { tokens, width, gate: swiglu::Gate::Silu };
            swiglu::forward(device, dims, gate_up.view(), out.view_mut());
            swiglu::backward(device, dims, gate_up.view(), d_out.view(), d_gate_up.view_mut());
            [out, d_gate_up].iter().map(|b| b.view().to_vec()).collect()
        });
        check(&format!("embedding {tokens} {width}"), |device| {
            let vocab = 19;
            let dims = embedding::Dims { tokens, vocab, width };
            let rows = upload(device, &ids(3, tokens, vocab));
            let table = compute(device, &numbers(4, vocab * width));
            let mut out = empty(device, tokens * width);
            embedding::forward(device, dims, rows.view(), table.view(), out.view_mut());
            let d_out = compute(device, &numbers(5, tokens * width));
            let mut d_table = upload(device, &numbers(6, vocab * width));
            embedding::backward(device, dims, rows.view(), d_out.view(), d_table.view_mut());
            // Scatters the rows in compute precision.
            let places: Vec<u32> = (0..tokens as u32).map(|t| 2 * t).collect();
            let mut scattered = compute(device, &vec![0.0; 2 * tokens * width]);
            let scatter = embedding::Dims { tokens, vocab: 2 * tokens, width };
            embedding::backward(
                device,
                scatter,
                upload(device, &places).view(),
                d_out.view(),
                scattered.view_mut(),
            );
            [out, d_table, scattered].iter().map(|b| b.view().to_vec()).collect()
        });
    }
    check("adamw, sum of squares", |device| {
        let n = 40_001;
        let mut param = device.weight_zeros(n).unwrap();
        param.view_mut().write(&numbers(1, n));
        let (mut m, mut v) = (device.zeros(n).unwrap(), device.zeros(n).unwrap());
        let grad = upload(device, &numbers(2, n));
        for step in 1..=5 {
            let rule = adamw::AdamW {
                lr: 1e-3,
                beta1: 0.9,
                beta2: 0.99,
                eps: 1e-8,
                weight_decay: 0.1,
                first: 0,
                step,
            };
            let (m, v) = (m.view_mut(), v.view_mut());
            let tensor = adamw::Tensor { rule, param: param.view_mut(), grad: grad.view(), m, v };
            adamw::step(device, 0.5, vec![tensor]);
        }
        let squares = reduce::sum_squares(device, [grad.view(), m.view()]);
        assert_eq!(reduce::first_non_finite(device, grad.view()), None);
        let mut broken = numbers(2, n);
        (broken[777], broken[30_000]) = (f32::NAN, f32::INFINITY);
        let broken = upload(device, &broken);
        assert_eq!(reduce::first_non_finite(device, broken.view()), Some(777));
        assert!(reduce::are_finite(device, [grad.view(), m.view()]));
        assert!(!reduce::are_finite(device, [grad.view(), broken.view()]));
        vec![param.view().to_vec(), m.view().to_vec(), v.view().to_vec(), vec![squares as f32]]
    });
}

pub(super) fn attention_case(device: &Device, heads: Heads, lengths: &[usize]) -> Tensors<f32> {
    ruled_attention_case(device, (heads, attention::ScoreRule::plain(heads.dim), false), lengths)
}

/// A sink for each query head.
pub(super) fn sinks(device: &Device, heads: Heads) -> Buffer<f32> {
    compute(device, &numbers(7, heads.query).iter().map(|sink| 4.0 * sink).collect::<Vec<_>>())
}

/// out, lse, d_qkv and, with sinks, d_sinks of packed sequences.
pub(super) fn ruled_attention_case(
    device: &Device,
    (heads, rule, has_sinks): (Heads, attention::ScoreRule, bool),
    lengths: &[usize],
) -> Tensors<f32> {
    let tokens = lengths.iter().sum();
    let offsets: Vec<u32> = std::iter::once(0)
        .chain(lengths.iter().scan(0, |end, n| {
            *end += *n as u32;
            Some(*end)
        }))
        .collect();
    let dims = attention::Dims { tokens, sequences: lengths.len(), heads, rule };
    let qkv = compute(device, &numbers(1, tokens * heads.qkv_width()));
    let offsets = upload(device, &offsets);
    let mut out = empty(device, tokens * heads.out_width());
    let mut lse = device.zeros(tokens * heads.query).unwrap();
    let sinks = has_sinks.then(|| sinks(device, heads));
    let inputs = attention::Inputs { qkv: qkv.view(), sinks: sinks.as_ref().map(Buffer::view) };
    attention::forward(device, dims, inputs, offsets.view(), out.view_mut(), lse.view_mut());
    let d_out = compute(device, &numbers(2, tokens * heads.out_width()));
    let mut d_qkv = empty(device, tokens * heads.qkv_width());
    let saved = attention::Saved { qkv: qkv.view(), out: out.view(), lse: lse.view() };
    attention::backward(device, dims, saved, offsets.view(), d_out.view(), d_qkv.view_mut());
    let d_sinks = sinks.map(|sinks| {
        let mut d_sinks = upload(device, &numbers(8, heads.query));
        let to = d_sinks.view_mut();
        attention::sinks::backward(device, dims, saved, sinks.view(), d_out.view(), to);
        d_sinks.view().to_vec()
    });
    [out, lse, d_qkv].iter().map(|b| b.view().to_vec()).chain(d_sinks).collect()
}

#[test]
fn attention_on_cuda_agrees_with_the_cpu() {
    for heads in HEADS {
        for lengths in [&[1][..], &[33], &[1, 130, 5, 64, 127, 128, 129, 2], &[700], &[2100, 1]] {
            check(&format!("attention {heads:?} {lengths:?}"), |device| {
                attention_case(device, heads, lengths)
            });
        }
    }
}

/// Log-probs, entropies and all gradients of a head; sizes are tokens, width and vocabulary.
pub(super) fn scores(
    device: &Device,
    (tokens, width, vocab): (usize, usize, usize),
    temperature: f64,
    rule: lm_head::LogitRule,
) -> Tensors<f32> {
    let hidden = compute(device, &numbers(1, tokens * width));
    let w: Vec<f32> = numbers(2, vocab * width).iter().map(|x| bf16_to_f32(f32_to_bf16(x * 0.3))).collect();
    let w = weight(device, vocab, width, &w);
    let targets = upload(device, &ids(3, tokens, vocab));
    let mut out: Vec<Buffer<f32>> = (0..4).map(|_| device.zeros(tokens).unwrap()).collect();
    let n = 3;
    let dims = lm_head::Dims { tokens, temperature, rule };
    let (mut best_ids, mut best) =
        (device.zeros::<u32>(tokens * n).unwrap(), device.zeros(tokens * n).unwrap());
    let [logp, entropy, collision, lse] = &mut out[..] else { unreachable!() };
    let numbers_out = lm_head::HeadScores {
        logp: logp.view_mut(),
        entropy: entropy.view_mut(),
        collision: collision.view_mut(),
        lse: lse.view_mut(),
        slopes: None,
    };
    let alternatives = lm_head::Alternatives { n, ids: best_ids.view_mut(), logp: best.view_mut() };
    let target_ids = targets.view();
    let to = Some(alternatives);
    let last = lm_head::forward(device, dims, hidden.view(), &w, target_ids, numbers_out, to);
    let (d_logp, d_entropy) = (upload(device, &numbers(4, tokens)), upload(device, &numbers(5, tokens)));
    let mut d_hidden = empty(device, tokens * width);
    let mut d_w = upload(device, &vec![0.0; vocab * width]);
    let grads = lm_head::ScoreGrads {
        targets: targets.view().into(),
        lse: out[3].view(),
        entropy: out[1].view(),
        d_logp: d_logp.view(),
        d_entropy: d_entropy.view(),
    };
    let to =
        lm_head::HeadGrads { d_hidden: d_hidden.view_mut(), d_weight: Some((d_w.view_mut(), Write::Add)) };
    lm_head::backward(device, dims, hidden.view(), &w, grads, last, to);
    let mut slopes = empty(device, tokens * width);
    let [logp, entropy, collision, lse] = &mut out[..] else { unreachable!() };
    let frozen = lm_head::HeadScores {
        logp: logp.view_mut(),
        entropy: entropy.view_mut(),
        collision: collision.view_mut(),
        lse: lse.view_mut(),
        slopes: Some(slopes.view_mut()),
    };
    lm_head::forward(device, dims, hidden.view(), &w, target_ids, frozen, None);
    lm_head::backward_frozen(device, d_logp.view(), slopes.view_mut());
    let mut all: Tensors<f32> = out.iter().map(|b| b.view().to_vec()).collect();
    all.extend([best.view().to_vec(), d_hidden.view().to_vec(), d_w.view().to_vec(), slopes.view().to_vec()]);
    all.push(best_ids.view().to_vec().into_iter().map(|id| id as f32).collect());
    all
}

#[test]
fn lm_head_on_cuda_agrees_with_the_cpu() {
    for (tokens, width, vocab) in
        [(1, 8, 5), (33, 40, 257), (300, 64, 3001), (7, 128, 520), (9, 2048, 512), (24, 64, 20_011)]
    {
        check(&format!("lm_head {tokens} {width} {vocab}"), |device| {
            scores(device, (tokens, width, vocab), 0.9, lm_head::LogitRule::default())
        });
    }
}

fn draw(
    device: &Device,
    rule: sampling::SamplingRule,
    (tokens, width, vocab): (usize, usize, usize),
) -> (Vec<u32>, Tensors<f32>) {
    let hidden = compute(device, &numbers(1, tokens * width));
    let w: Vec<f32> = numbers(2, vocab * width).iter().map(|x| bf16_to_f32(f32_to_bf16(x * 0.3))).collect();
    let w = weight(device, vocab, width, &w);
    let key = crate::rng::RngKey::new(8);
    let uniforms: Vec<f64> = (0..tokens).map(|t| key.uniform(1, 2, t as u32)).collect();
    let mut drawn = device.zeros::<u32>(tokens).unwrap();
    let (mut logp, mut entropy) = (device.zeros(tokens).unwrap(), device.zeros(tokens).unwrap());
    let to = sampling::Drawn {
        ids: drawn.view_mut(),
        logp: logp.view_mut(),
        entropy: entropy.view_mut(),
        alternatives: None,
        kept: None,
    };
    let uniforms = upload(device, &uniforms);
    let mut logits = sampling::Logits::new(device, vocab, tokens).unwrap();
    let from = sampling::Inputs {
        hidden: hidden.view(),
        rule: lm_head::LogitRule::default(),
        head: &w,
        uniforms: uniforms.view(),
    };
    sampling::forward(device, rule, from, to, &mut logits);
    let drawn_ids = drawn.view().to_vec();
    // The numbers of the drawn tokens as training computes them.
    let mut out: Vec<Buffer<f32>> = (0..4).map(|_| device.zeros(tokens).unwrap()).collect();
    let [a, b, c, d] = &mut out[..] else { unreachable!() };
    let scored = lm_head::HeadScores {
        logp: a.view_mut(),
        entropy: b.view_mut(),
        collision: c.view_mut(),
        lse: d.view_mut(),
        slopes: None,
    };
    let dims = lm_head::Dims { tokens, temperature: rule.temperature(), rule: lm_head::LogitRule::default() };
    lm_head::forward(device, dims, hidden.view(), &w, drawn.view(), scored, None);
    assert_eq!(
        bits(&out[0].view().to_vec()),
        bits(&logp.view().to_vec()),
        "logp of sampling and of training"
    );
    assert_eq!(
        bits(&out[1].view().to_vec()),
        bits(&entropy.view().to_vec()),
        "entropy of sampling and of training"
    );
    (drawn_ids, vec![logp.view().to_vec(), entropy.view().to_vec()])
}

#[test]
fn sampling_on_cuda_draws_what_the_cpu_draws_and_reports_the_bits_of_training() {
    let filter = |top_k, top_p, min_p| sampling::Filter { top_k, top_p, min_p };
    let filters = [
        sampling::Filter::NONE,
        filter(Some(5), 1.0, 0.0),
        filter(None, 0.7, 0.0),
        filter(None, 1.0, 0.2),
        filter(Some(40), 0.8, 0.05),
        filter(Some(1), 1.0, 0.0),
    ];
    let rules = filters.map(|filter| sampling::SamplingRule::Draw { temperature: 0.8, filter });
    for rule in rules.into_iter().chain([sampling::SamplingRule::Greedy]) {
        for size in [(1, 8, 5), (64, 40, 257), (200, 64, 3001), (64, 128, 520), (5, 2048, 512)] {
            for precision in [Precision::F32, Precision::Bf16] {
                let Some(gpu) = gpu(precision) else { return };
                let (expected, numbers) = draw(&cpu(), rule, size);
                let (got, reported) = draw(&gpu, rule, size);
                // The logits differ in the last digits, so a uniform number near the border of two tokens may draw the
                // other.
                let n_other = got.iter().zip(&expected).filter(|(a, b)| a != b).count();
                println!("{rule:?} {size:?} {precision:?}: {n_other} of {} drawn otherwise", size.0);
                assert!(n_other * 50 <= size.0, "{n_other} of {} drawn otherwise", size.0);
                assert!(distance(&reported[1], &numbers[1]) < 1e-4);
            }
        }
    }
}
