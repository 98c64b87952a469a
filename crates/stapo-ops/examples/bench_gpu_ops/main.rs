//! Times each hot op on a GPU at the shapes of Qwen3-1.7B and prints microseconds and the rate in operations or bytes.

#![allow(clippy::print_stdout, reason = "a benchmark")]

mod deltanet;

use stapo_ops::attention::paged::{Partials, SPLIT_KEYS};
use stapo_ops::attention::{self, Heads, paged};
use stapo_ops::cuda::CudaOptions;
use stapo_ops::fused::matmul_swiglu::{self, GateUp};
use stapo_ops::quantised::{self, Encoding, ModuleRows, Unpacking};
use stapo_ops::rope::{Frequencies, HeadNorm, HeadNormGrad, HeadNormSums, NormExtent, Scaling, Table};
use stapo_ops::{
    Buffer, Device, OutOfMemory, Shape, Weight, Write, adamw, lm_head, lora, matmul, reduce, rmsnorm, rope,
    sampling, swiglu,
};
use std::time::Instant;

type Failure = Box<dyn std::error::Error>;

fn numbers(n: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn compute(device: &Device, n: usize) -> Result<Buffer<f32>, OutOfMemory> {
    let mut buffer = device.compute_zeros(n)?;
    let pattern = numbers(n.min(1 << 22));
    for start in (0..n).step_by(pattern.len().max(1)) {
        let end = n.min(start + pattern.len());
        buffer.range_mut(start..end).write(&pattern[..end - start]);
    }
    Ok(buffer)
}

/// Seconds a call takes, in the best of several batches of calls.
fn time(device: &Device, mut call: impl FnMut()) -> f64 {
    call();
    device.synchronize();
    let clock = Instant::now();
    call();
    device.synchronize();
    let n = (0.02 / clock.elapsed().as_secs_f64().max(1e-6)).clamp(1.0, 200.0) as usize;
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let clock = Instant::now();
        (0..n).for_each(|_| call());
        device.synchronize();
        best = best.min(clock.elapsed().as_secs_f64() / n as f64);
    }
    best
}

/// As torch_attention.py measures: the best of five batches of ten calls, by the GPU's clock, after a pause in which the GPU
/// cools down: what ran before decides how soon the power cap lowers the clock.
fn time_batches(device: &Device, mut call: impl FnMut()) -> f64 {
    (0..3).for_each(|_| call());
    device.synchronize();
    std::thread::sleep(std::time::Duration::from_secs(1));
    let batch = |_| {
        let begin = device.mark();
        (0..10).for_each(|_| call());
        begin.seconds_until(&device.mark()) / 10.0
    };
    (0..5).map(batch).fold(f64::INFINITY, f64::min)
}

fn line(name: &str, seconds: f64, work: f64, unit: &str) {
    println!("{name:<44} {:>10.1} us {:>9.1} {unit}", seconds * 1e6, work / seconds);
}

/// `bench_gpu_ops [products | many | attention | deltanet | rows | heads | quantised]`: all ops, or those of one name.
fn main() -> Result<(), Failure> {
    let device = &Device::cuda(CudaOptions::default())?;
    println!("{}", device.name());
    let asked = std::env::args().nth(1);
    let is_asked = |name: &str| asked.as_ref().is_none_or(|asked| asked == name);
    if is_asked("products") {
        products(device)?;
    }
    if is_asked("many") {
        many_rows(device)?;
    }
    if is_asked("attention") {
        attentions(device)?;
    }
    if is_asked("deltanet") {
        deltanet::all(device)?;
    }
    if is_asked("rows") {
        rows(device)?;
    }
    if is_asked("heads") {
        heads(device)?;
    }
    if is_asked("quantised") {
        quantised(device)?;
    }
    Ok(())
}

fn products(device: &Device) -> Result<(), OutOfMemory> {
    for (name, inputs, outputs) in [
        ("qkv", 2048, 4096),
        ("output", 2048, 2048),
        ("gate_up", 2048, 12288),
        ("down", 6144, 2048),
        ("head", 2048, 151_936),
    ] {
        let mut w = Weight::zeros(device, Shape { outputs, inputs })?;
        w.update(device, |mut flat| flat.write(&numbers(outputs * inputs)));
        for tokens in [1, 64, 128, 512, 2048, 8192] {
            if name == "head" && tokens > 2048 {
                continue;
            }
            let (x, mut y) = (compute(device, tokens * inputs)?, compute(device, tokens * outputs)?);
            let flop = 2e-12 * (tokens * inputs * outputs) as f64;
            let seconds = time(device, || matmul::forward(device, tokens, x.view(), &w, None, y.view_mut()));
            let gb = 2e-12 * (inputs * outputs + tokens * (inputs + outputs)) as f64;
            line(&format!("product {name} {tokens} ({:.2} TB/s)", gb / seconds), seconds, flop, "TFLOP/s");
            if tokens >= 2048 {
                let mut d_x = compute(device, tokens * inputs)?;
                let seconds = time(device, || {
                    matmul::backward_input(device, tokens, y.view(), &w, Write::Set, d_x.view_mut());
                });
                line(&format!("product {name} {tokens} input gradient"), seconds, flop, "TFLOP/s");
                let mut d_w = device.zeros(inputs * outputs)?;
                let dims = matmul::Dims { tokens, inputs, outputs };
                let seconds = time(device, || {
                    matmul::backward_weight(device, dims, x.view(), y.view(), Write::Add, d_w.view_mut());
                });
                line(&format!("product {name} {tokens} weight gradient"), seconds, flop, "TFLOP/s");
            }
        }
    }
    Ok(())
}

/// The products of a layer at the rows of prefill: gate and up with their SwiGLU by one kernel and by two, down by one kernel
/// and, 2,048 rows at a time, with its partial sums in memory.
fn many_rows(device: &Device) -> Result<(), OutOfMemory> {
    let (width, ffn) = (2048, 6144);
    let weight = |outputs, inputs| -> Result<Weight<f32>, OutOfMemory> {
        let mut w = Weight::zeros(device, Shape { outputs, inputs })?;
        w.update(device, |mut flat| flat.write(&numbers(outputs * inputs)));
        Ok(w)
    };
    let (qkv, output, gate_up, down) =
        (weight(4096, width)?, weight(width, width)?, weight(2 * ffn, width)?, weight(width, ffn)?);
    for tokens in [1024, 8192, 16384] {
        let (x, mut y) = (compute(device, tokens * width)?, compute(device, tokens * 2 * ffn)?);
        let (mut activated, mut sum) = (compute(device, tokens * ffn)?, compute(device, tokens * width)?);
        let flop = |w: &Weight<f32>| 2e-12 * (tokens * w.shape().len()) as f64;
        let line = |name: &str, seconds: f64, w: &Weight<f32>| {
            line(&format!("{name} {tokens}"), seconds, flop(w), "TFLOP/s");
        };
        for (name, w) in [("qkv", &qkv), ("output", &output), ("gate and up", &gate_up)] {
            let n = tokens * w.shape().outputs;
            let call = || matmul::forward(device, tokens, x.view(), w, None, y.range_mut(0..n));
            line(name, time_batches(device, call), w);
        }
        let dims = swiglu::Dims { tokens, width: ffn, gate: swiglu::Gate::Silu };
        let seconds = time_batches(device, || {
            matmul::forward(device, tokens, x.view(), &gate_up, None, y.view_mut());
            swiglu::forward(device, dims, y.view(), activated.view_mut());
        });
        line("gate and up, then swiglu", seconds, &gate_up);
        for kept in [GateUp::Dropped, GateUp::Kept] {
            let seconds = time_batches(device, || {
                let gate_up_to = (y.view_mut(), kept);
                matmul_swiglu::forward(device, dims, x.view(), &gate_up, gate_up_to, activated.view_mut());
            });
            line(&format!("gate and up with swiglu, {kept:?}"), seconds, &gate_up);
        }
        let x = activated.view();
        let seconds = time_batches(device, || {
            for start in (0..tokens).step_by(2048) {
                let end = tokens.min(start + 2048);
                let to = sum.range_mut(start * width..end * width);
                matmul::forward(device, end - start, x.range(start * ffn..end * ffn), &down, None, to);
            }
        });
        line("down, 2048 rows at a time", seconds, &down);
        let call = || matmul::forward(device, tokens, x, &down, None, sum.view_mut());
        line("down", time_batches(device, call), &down);
    }
    Ok(())
}

fn attentions(device: &Device) -> Result<(), OutOfMemory> {
    let [qwen, small, phi, olmo, gemma] =
        [(16, 8, 128), (32, 8, 64), (32, 32, 96), (32, 32, 128), (8, 4, 256)].map(|(query, kv, dim)| Heads {
            query,
            kv,
            dim,
        });
    for (sequences, length) in [(4, 2048), (64, 256), (16, 1024), (2, 8192), (2, 16384)] {
        packed(device, qwen, None, sequences, length)?;
    }
    for heads in [small, phi, olmo, gemma] {
        packed(device, heads, None, 4, 2048)?;
        packed(device, heads, None, 2, 8192)?;
    }
    packed(device, gemma, None, 64, 256)?;
    // What windows save.
    for (heads, window) in [(qwen, 4096), (qwen, 1024), (gemma, 16384), (gemma, 1024)] {
        packed(device, heads, Some(window), 2, 16384)?;
    }
    for (sequences, context) in
        [(64, 192), (512, 192), (64, 2048), (2, 15_008), (4, 15_008), (16, 15_008), (40, 15_008)]
    {
        decode(device, qwen, sequences, context)?;
    }
    for (sequences, context) in [(512, 192), (64, 2048), (4, 15_008)] {
        decode(device, gemma, sequences, context)?;
    }
    Ok(())
}

/// Attention of packed sequences, forward and backward. Rates count the keys that a token sees.
fn packed(
    device: &Device,
    heads: Heads,
    window: Option<usize>,
    sequences: usize,
    length: usize,
) -> Result<(), OutOfMemory> {
    let tokens = sequences * length;
    let rule = attention::ScoreRule { window, ..attention::ScoreRule::plain(heads.dim) };
    let dims = attention::Dims { tokens, sequences, heads, rule };
    let offsets: Vec<u32> = (0..=sequences).map(|s| (s * length) as u32).collect();
    let offsets = device.upload(&offsets)?;
    let qkv = compute(device, tokens * heads.qkv_width())?;
    let mut out = compute(device, tokens * heads.out_width())?;
    let mut lse = device.zeros(tokens * heads.query)?;
    let seen = window.unwrap_or(length).min(length);
    let unit = 2e-12 * (tokens * seen - sequences * seen * seen / 2) as f64 * heads.out_width() as f64;
    let seconds = time_batches(device, || {
        attention::forward(device, dims, qkv.view(), offsets.view(), out.view_mut(), lse.view_mut());
    });
    let shape = format!("{} / {} x {}, {sequences} x {length}", heads.query, heads.kv, heads.dim);
    let shape = window.map_or(shape.clone(), |window| format!("{shape}, window {window}"));
    line(&format!("attention forward {shape}"), seconds, 2.0 * unit, "TFLOP/s");
    let (forward_us, forward) = (seconds * 1e6, 2.0 * unit / seconds);
    let d_out = compute(device, tokens * heads.out_width())?;
    let mut d_qkv = compute(device, tokens * heads.qkv_width())?;
    let seconds = time_batches(device, || {
        let saved = attention::Saved { qkv: qkv.view(), out: out.view(), lse: lse.view() };
        attention::backward(device, dims, saved, offsets.view(), d_out.view(), d_qkv.view_mut());
    });
    line(&format!("attention backward {shape} (of 5)"), seconds, 5.0 * unit, "TFLOP/s");
    let (backward_us, backward) = (seconds * 1e6, 5.0 * unit / seconds);
    println!(
        r#"{{"task": "attention", "head_dim": {}, "kv_heads": {}, "window": {}, "sequences": {sequences}, "length": {length}, "forward_us": {forward_us:.1}, "backward_us": {backward_us:.1}, "forward_tflops": {forward:.1}, "backward_tflops": {backward:.1}}}"#,
        heads.dim,
        heads.kv,
        window.unwrap_or(0),
    );
    Ok(())
}

fn decode(device: &Device, heads: Heads, sequences: usize, context: usize) -> Result<(), OutOfMemory> {
    let (block_size, width) = (32, context / 32);
    let dims =
        paged::CacheDims { blocks: sequences * width, block_size, kv_heads: heads.kv, head_dim: heads.dim };
    let mut cache = paged::Cache::zeros(device, dims)?;
    let rule = attention::ScoreRule::plain(heads.dim);
    let call = paged::Dims { tokens: sequences, sequences, heads, rule, table_width: width };
    let upload = |x: Vec<u32>| device.upload(&x);
    let offsets = upload((0..=sequences as u32).collect())?;
    let contexts = upload(vec![context as u32; sequences])?;
    let tables = upload((0..(sequences * width) as u32).collect())?;
    let qkv = compute(device, sequences * heads.qkv_width())?;
    let mut out = compute(device, sequences * heads.out_width())?;
    let slots = upload((1..=sequences).map(|s| (s * context - 1) as u32).collect())?;
    let n_splits = context.div_ceil(SPLIT_KEYS);
    let list =
        (0..n_splits as u32).flat_map(|split| (0..sequences as u32).flat_map(move |s| [s, 1, 0, split]));
    let list = upload(list.collect())?;
    let first_partials = upload((0..sequences).map(|s| (s * n_splits) as u32).collect())?;
    let partials = Partials::new(device, heads, sequences * n_splits)?;
    let seconds = time(device, || {
        let groups = paged::Groups {
            list: list.view(),
            max_members: 1,
            first_partials: first_partials.view(),
            partials: (n_splits > 1).then_some(&partials),
            reads_new_keys: false,
        };
        let lists = paged::Sequences {
            offsets: offsets.view(),
            contexts: contexts.view(),
            tables: tables.view(),
            groups: Some(groups),
            prefill: None,
        };
        paged::forward(device, call, qkv.view(), slots.view(), &mut cache, lists, out.view_mut());
    });
    let bytes = 2e-12 * (sequences * context * 2 * heads.kv * heads.dim) as f64;
    let name = format!("attention decode {} x {}, {sequences} of {context}", heads.kv, heads.dim);
    line(&name, seconds, bytes, "TB/s");
    Ok(())
}

fn rows(device: &Device) -> Result<(), OutOfMemory> {
    let (tokens, width, ffn) = (8192, 2048, 6144);
    let n = tokens * width;
    let dims = rmsnorm::Dims { tokens, width, eps: 1e-6 };
    let (x, addend, w) = (compute(device, n)?, compute(device, n)?, compute(device, width)?);
    let mut sum = compute(device, n)?;
    let mut out = compute(device, n)?;
    let mut inv = device.zeros(tokens)?;
    let seconds = time(device, || {
        let residual = rmsnorm::Residual { stream: x.view(), addend: addend.view() };
        let to = rmsnorm::Out { normed: out.view_mut(), inv_rms: inv.view_mut() };
        rmsnorm::forward_add(device, dims, residual, w.view(), sum.view_mut(), to);
    });
    line("rmsnorm forward_add 8192 x 2048", seconds, 2e-12 * (4 * n) as f64, "TB/s");
    let mut d_x = compute(device, n)?;
    let mut d_w = device.zeros(width)?;
    let seconds = time(device, || {
        let saved = rmsnorm::Saved { x: x.view(), weight: w.view(), inv_rms: inv.view() };
        rmsnorm::backward(device, dims, saved, addend.view(), Write::Add, d_x.view_mut(), d_w.view_mut());
    });
    line("rmsnorm backward", seconds, 2e-12 * (4 * n) as f64, "TB/s");
    let n = tokens * ffn;
    let (gate_up, mut out) = (compute(device, 2 * n)?, compute(device, n)?);
    let dims = swiglu::Dims { tokens, width: ffn, gate: swiglu::Gate::Silu };
    let seconds = time(device, || swiglu::forward(device, dims, gate_up.view(), out.view_mut()));
    line("swiglu forward 8192 x 6144", seconds, 2e-12 * (3 * n) as f64, "TB/s");
    let mut d_gate_up = compute(device, 2 * n)?;
    let seconds =
        time(device, || swiglu::backward(device, dims, gate_up.view(), out.view(), d_gate_up.view_mut()));
    line("swiglu backward", seconds, 2e-12 * (5 * n) as f64, "TB/s");
    let heads = Heads { query: 16, kv: 8, dim: 128 };
    let n = tokens * heads.qkv_width();
    let frequencies = Frequencies { head_dim: 128, rotary_dim: 128, theta: 1e6, scaling: Scaling::None };
    let table = Table::new(device, &frequencies, 2048)?;
    let positions = device.upload(&(0..tokens as u32).map(|t| t % 2048).collect::<Vec<_>>())?;
    let (q, k) = (compute(device, 128)?, compute(device, 128)?);
    let extent = NormExtent::Head;
    let norm = HeadNorm { extent, query_weight: q.view(), key_weight: k.view(), eps: 1e-6 };
    let raw = compute(device, n)?;
    let mut out = compute(device, n)?;
    let mut inv = device.zeros(tokens * 24)?;
    let dims = rope::Dims { tokens, heads };
    let seconds = time(device, || {
        rope::forward(
            device,
            dims,
            &table,
            positions.view(),
            Some((norm, inv.view_mut())),
            raw.view(),
            out.view_mut(),
        );
    });
    line("rope + head norm forward 8192 x 4096", seconds, 2e-12 * (2 * n) as f64, "TB/s");
    let mut d_q = device.zeros(128)?;
    let mut d_k = device.zeros(128)?;
    let mut d_raw = compute(device, n)?;
    let seconds = time(device, || {
        let to = HeadNormSums { d_query_weight: d_q.view_mut(), d_key_weight: d_k.view_mut() };
        let grad = HeadNormGrad { norm, raw: raw.view(), inv_rms: inv.view(), to: Some(to) };
        rope::backward(device, dims, &table, positions.view(), Some(grad), out.view(), d_raw.view_mut());
    });
    line("rope + head norm backward", seconds, 2e-12 * (3 * n) as f64, "TB/s");
    let n = 1 << 28;
    let mut param = device.weight_zeros::<f32>(n)?;
    let (grad, mut m, mut v) = (device.zeros(n)?, device.zeros(n)?, device.zeros(n)?);
    let rule =
        adamw::AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, first: 0, step: 1 };
    let seconds = time(device, || {
        let (m, v) = (m.view_mut(), v.view_mut());
        let tensor = adamw::Tensor { rule, param: param.view_mut(), grad: grad.view(), m, v };
        adamw::step(device, 1.0, vec![tensor]);
    });
    line("adamw 2^28", seconds, 30e-12 * n as f64, "TB/s");
    let seconds = time(device, || {
        reduce::sum_squares(device, [grad.view()]);
    });
    line("sum of squares 2^28", seconds, 4e-12 * n as f64, "TB/s");
    Ok(())
}

fn heads(device: &Device) -> Result<(), OutOfMemory> {
    let (tokens, width, vocab) = (8192, 2048, 151_936);
    let mut w = Weight::zeros(device, Shape { outputs: vocab, inputs: width })?;
    let values: Vec<f32> = numbers(vocab * width).into_iter().map(|x| x * 0.03).collect();
    w.update(device, |mut flat| flat.write(&values));
    let hidden = compute(device, tokens * width)?;
    let targets = device.upload(&(0..tokens as u32).map(|t| t * 17 % 150_000).collect::<Vec<_>>())?;
    let mut out: Vec<Buffer<f32>> = (0..4).map(|_| device.zeros(tokens)).collect::<Result<_, _>>()?;
    let dims = lm_head::Dims { tokens, temperature: 1.0, rule: lm_head::LogitRule::default() };
    let flop = 2e-12 * (tokens * width) as f64 * vocab as f64;
    let seconds = time(device, || {
        let [a, b, c, d] = &mut out[..] else { unreachable!() };
        let (logp, entropy, collision, lse) = (a.view_mut(), b.view_mut(), c.view_mut(), d.view_mut());
        let scores = lm_head::HeadScores { logp, entropy, collision, lse, slopes: None };
        lm_head::forward(device, dims, hidden.view(), &w, targets.view(), scores, None);
    });
    line("lm_head forward 8192", seconds, flop, "TFLOP/s");
    let mut d_hidden = compute(device, tokens * width)?;
    let mut d_w = device.zeros(vocab * width)?;
    let ones = device.upload(&vec![0.5f32; tokens])?;
    let seconds = time(device, || {
        let lse = out[3].view();
        let entropy = out[1].view();
        let d = ones.view();
        let grads =
            lm_head::ScoreGrads { targets: targets.view().into(), lse, entropy, d_logp: d, d_entropy: d };
        let to = lm_head::HeadGrads {
            d_hidden: d_hidden.view_mut(),
            d_weight: Some((d_w.view_mut(), Write::Add)),
        };
        lm_head::backward(device, dims, hidden.view(), &w, grads, lm_head::LastLogits::default(), to);
    });
    line("lm_head backward 8192 (of 3)", seconds, 3.0 * flop, "TFLOP/s");
    for n in [64, 512] {
        let uniforms = device.upload(&(0..n).map(|i| i as f64 / 600.0).collect::<Vec<f64>>())?;
        let (mut ids, mut a, mut b) = (device.zeros::<u32>(n)?, device.zeros(n)?, device.zeros(n)?);
        let rule = sampling::SamplingRule::Draw { temperature: 1.0, filter: sampling::Filter::NONE };
        let mut logits = sampling::Logits::new(device, vocab, n)?;
        let seconds = time(device, || {
            let drawn = sampling::Drawn {
                ids: ids.view_mut(),
                logp: a.view_mut(),
                entropy: b.view_mut(),
                alternatives: None,
                kept: None,
            };
            let hidden = hidden.range(0..n * width);
            let from = sampling::Inputs {
                hidden,
                rule: lm_head::LogitRule::default(),
                head: &w,
                uniforms: uniforms.view(),
            };
            sampling::forward(device, rule, from, drawn, &mut logits);
        });
        line(&format!("sampling {n}"), seconds, 2e-12 * (vocab * width) as f64, "TB/s of weights");
    }
    Ok(())
}

/// Unpacking quantised weights: bytes of blocks read and of bf16 written.
fn quantised(device: &Device) -> Result<(), OutOfMemory> {
    use Encoding::{Bf16, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};
    for (name, inputs, outputs) in [("qkv", 2048, 4096), ("gate_up", 2048, 12288), ("down", 6144, 2048)] {
        let shape = Shape { outputs, inputs };
        let unpacking = Unpacking::<f32>::new(device, shape.len())?;
        for encoding in [Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, Bf16] {
            let modules = vec![ModuleRows { n_rows: outputs, encoding }];
            let n_bytes = quantised::n_bytes(inputs, &modules);
            // Different weights in turn, so that blocks come from memory and not from the cache.
            let zeros = |_| Weight::quantised_zeros(device, shape, 0, modules.clone(), &unpacking);
            let weights = (0..16).map(zeros).collect::<Result<Vec<_>, _>>()?;
            let mut turn = 0;
            let seconds = time(device, || {
                lora::unpack(device, &weights[turn % weights.len()], None);
                turn += 1;
            });
            let gb = 1e-9 * (n_bytes + 2 * shape.len()) as f64;
            line(&format!("unpack {name} {encoding:?}"), seconds, gb, "GB/s");
        }
    }
    Ok(())
}
