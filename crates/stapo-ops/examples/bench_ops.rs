//! Times every op at the shapes of two small models and prints time, rate and share of the measured peak.
//!
//! `cargo run --release -p stapo-ops --example bench_ops [NAME-PART]`; `STAPO_SIMD` and `STAPO_THREADS` apply. With one
//! thread the clock is the thread's processor time, which a busy machine does not disturb; otherwise it is wall time.
#![allow(clippy::print_stdout)]

use stapo_ops::attention::paged::{Cache, CacheDims, Sequences};
use stapo_ops::attention::{self, Heads, paged};
use stapo_ops::sampling::{Drawn, Filter, SamplingRule};
use stapo_ops::{
    Buffer, CpuOptions, Device, Shape, Weight, Write, adamw, embedding, lm_head, matmul, peak, reduce,
    residual, rmsnorm, rope, sampling, swiglu,
};

struct Bench {
    device: Device,
    peak: f64,
    only: String,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::cpu(CpuOptions::from_env()?);
    let peak = peak::flops(&device);
    println!(
        "{} threads, {}, peak {:.0} GFLOP/s (measured, f32)",
        device.threads(),
        device.simd().name(),
        peak / 1e9
    );
    println!("{:<22} {:<34} {:>10} {:>9} {:>8} {:>6}", "op", "shape", "time", "GFLOP/s", "GB/s", "peak");
    let bench = Bench { device, peak, only: std::env::args().nth(1).unwrap_or_default() };
    bench.dispatch()?;
    bench.matmuls()?;
    bench.rows()?;
    bench.attention()?;
    bench.paged()?;
    bench.heads()?;
    bench.updates()?;
    Ok(())
}

fn wall_time() -> f64 {
    static START: std::sync::LazyLock<std::time::Instant> = std::sync::LazyLock::new(std::time::Instant::now);
    START.elapsed().as_secs_f64()
}

/// Seconds that this thread has run.
fn processor_time() -> f64 {
    #[repr(C)]
    struct Timespec {
        seconds: i64,
        nanoseconds: i64,
    }
    unsafe extern "C" {
        fn clock_gettime(clock: i32, time: *mut Timespec) -> i32;
    }
    const CLOCK_THREAD_CPUTIME_ID: i32 = 3;
    let mut time = Timespec { seconds: 0, nanoseconds: 0 };
    // SAFETY: the struct has the layout of the C library on 64-bit Linux.
    unsafe { clock_gettime(CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.seconds as f64 + time.nanoseconds as f64 * 1e-9
}

type Outcome = Result<(), stapo_ops::OutOfMemory>;

impl Bench {
    /// Runs `body` for about half a second and prints the best time.
    fn line(&self, op: &str, shape: &str, flops: f64, bytes: f64, mut body: impl FnMut()) {
        if !op.contains(&self.only) {
            return;
        }
        body();
        let clock = if self.device.threads() == 1 { processor_time } else { wall_time };
        let start = clock();
        let mut best = f64::MAX;
        let mut n = 0;
        while clock() - start < 0.5 || n < 3 {
            let once = clock();
            body();
            best = best.min(clock() - once);
            n += 1;
        }
        println!(
            "{op:<22} {shape:<34} {:>8.1}us {:>9.1} {:>8.1} {:>5.0}%",
            best * 1e6,
            flops / best / 1e9,
            bytes / best / 1e9,
            100.0 * flops / best / self.peak
        );
    }

    fn values(&self, n: usize) -> Result<Buffer<f32>, stapo_ops::OutOfMemory> {
        // A Weyl sequence, equally spread over (-1/2, 1/2).
        let x: Vec<f32> =
            (0..n as u32).map(|i| i.wrapping_mul(0x9e37_79b9) as f32 / u32::MAX as f32 - 0.5).collect();
        self.device.upload(&x)
    }

    fn weight(&self, outputs: usize, inputs: usize) -> Result<Weight<f32>, stapo_ops::OutOfMemory> {
        Weight::from_slice(
            &self.device,
            Shape { outputs, inputs },
            &self.values(outputs * inputs)?.view().to_vec(),
        )
    }

    /// The cost of an op that has almost nothing to do.
    fn dispatch(&self) -> Outcome {
        let w = self.weight(256, 256)?;
        let (x, mut y) = (self.values(256)?, self.values(256)?);
        self.line("matmul forward", "T=1 256->256", 2.0 * 65536.0, 4.0 * 65536.0, || {
            matmul::forward(&self.device, 1, x.view(), &w, None, y.view_mut());
        });
        Ok(())
    }

    fn matmuls(&self) -> Outcome {
        let shapes = [
            (6144, 256, 256),
            (6144, 256, 512),
            (6144, 256, 1536),
            (6144, 768, 256),
            (2048, 512, 1024),
            (2048, 512, 3072),
            (2048, 1536, 512),
            (512, 512, 32000),
            (256, 256, 512),
            (256, 256, 1536),
            (256, 512, 32000),
            (8, 512, 1536),
            (1, 512, 1536),
            (1, 512, 32000),
        ];
        for (tokens, inputs, outputs) in shapes {
            let d = matmul::Dims { tokens, inputs, outputs };
            let shape = format!("T={tokens} {inputs}->{outputs}");
            let flops = 2.0 * (tokens * inputs * outputs) as f64;
            let bytes = 4.0 * (tokens * inputs + inputs * outputs + tokens * outputs) as f64;
            let w = self.weight(outputs, inputs)?;
            let (mut x, mut y) = (self.values(tokens * inputs)?, self.values(tokens * outputs)?);
            self.line("matmul forward", &shape, flops, bytes, || {
                matmul::forward(&self.device, tokens, x.view(), &w, None, y.view_mut());
            });
            if tokens <= 256 {
                continue;
            }
            let mut d_w = self.values(outputs * inputs)?;
            self.line("matmul backward_weight", &shape, flops, bytes, || {
                matmul::backward_weight(&self.device, d, x.view(), y.view(), Write::Add, d_w.view_mut());
            });
            self.line("matmul backward_input", &shape, flops, bytes, || {
                matmul::backward_input(&self.device, tokens, y.view(), &w, Write::Set, x.view_mut());
            });
        }
        let mut w = self.weight(32000, 512)?;
        self.line("weight pack", "512->32000", 0.0, 8.0 * 32000.0 * 512.0, || w.update(&self.device, |_| ()));
        Ok(())
    }

    fn rows(&self) -> Outcome {
        let device = &self.device;
        for (tokens, width, ffn) in [(6144, 256, 768), (2048, 512, 1536), (256, 256, 768)] {
            let n = (tokens * width) as f64;
            let shape = format!("T={tokens} D={width}");
            let (x, addend, w) =
                (self.values(tokens * width)?, self.values(tokens * width)?, self.values(width)?);
            let (mut sum, mut out) = (self.values(tokens * width)?, self.values(tokens * width)?);
            let (mut inv_rms, mut d_w) = (self.values(tokens)?, self.values(width)?);
            let d = rmsnorm::Dims { tokens, width, eps: 1e-6 };
            self.line("rmsnorm forward_add", &shape, 6.0 * n, 16.0 * n, || {
                let residual = rmsnorm::Residual { stream: x.view(), addend: addend.view() };
                let to = rmsnorm::Out { normed: out.view_mut(), inv_rms: inv_rms.view_mut() };
                rmsnorm::forward_add(device, d, residual, w.view(), sum.view_mut(), to);
            });
            self.line("rmsnorm backward", &shape, 12.0 * n, 24.0 * n, || {
                let saved = rmsnorm::Saved { x: x.view(), weight: w.view(), inv_rms: inv_rms.view() };
                let d_out = addend.view();
                rmsnorm::backward(device, d, saved, d_out, Write::Add, out.view_mut(), d_w.view_mut());
            });
            self.line("residual add", &shape, n, 12.0 * n, || {
                residual::add(device, out.view_mut(), addend.view());
            });
            let ids: Vec<u32> = (0..tokens as u32).map(|t| t * 7919 % 256).collect();
            let ids = device.upload(&ids)?;
            let table = self.values(256 * width)?;
            let mut d_table = self.values(256 * width)?;
            let d = embedding::Dims { tokens, vocab: 256, width };
            self.line("embedding forward", &shape, 0.0, 8.0 * n, || {
                embedding::forward(device, d, ids.view(), table.view(), out.view_mut());
            });
            self.line("embedding backward", &shape, n, 12.0 * n, || {
                embedding::backward(device, d, ids.view(), out.view(), d_table.view_mut());
            });

            let d = swiglu::Dims { tokens, width: ffn, gate: swiglu::Gate::Silu };
            let n = (tokens * ffn) as f64;
            let shape = format!("T={tokens} F={ffn}");
            let (gate_up, mut d_gate_up) = (self.values(2 * tokens * ffn)?, self.values(2 * tokens * ffn)?);
            let mut out = self.values(tokens * ffn)?;
            self.line("swiglu forward", &shape, 20.0 * n, 12.0 * n, || {
                swiglu::forward(device, d, gate_up.view(), out.view_mut());
            });
            self.line("swiglu backward", &shape, 26.0 * n, 20.0 * n, || {
                swiglu::backward(device, d, gate_up.view(), out.view(), d_gate_up.view_mut());
            });
        }
        Ok(())
    }

    fn attention(&self) -> Outcome {
        let device = &self.device;
        let small = Heads { query: 8, kv: 4, dim: 32 };
        let large = Heads { query: 8, kv: 4, dim: 64 };
        for (heads, sequences, len) in [(small, 64, 96), (large, 8, 256), (large, 1, 2048)] {
            let tokens = sequences * len;
            let shape = format!("{sequences}x{len} {}/{} heads of {}", heads.query, heads.kv, heads.dim);
            let (raw, mut qkv) =
                (self.values(tokens * heads.qkv_width())?, self.values(tokens * heads.qkv_width())?);
            let positions: Vec<u32> = (0..tokens).map(|t| (t % len) as u32).collect();
            let positions = device.upload(&positions)?;
            let freqs = rope::Frequencies {
                head_dim: heads.dim,
                rotary_dim: heads.dim,
                theta: 1e4,
                scaling: rope::Scaling::None,
            };
            let table = rope::Table::new(device, &freqs, len)?;
            let (q, k) = (self.values(heads.dim)?, self.values(heads.dim)?);
            let norm = rope::HeadNorm {
                extent: rope::NormExtent::Head,
                query_weight: q.view(),
                key_weight: k.view(),
                eps: 1e-6,
            };
            let mut inv_rms = self.values(tokens * (heads.query + heads.kv))?;
            let bytes = 8.0 * raw.len() as f64;
            let d = rope::Dims { tokens, heads };
            self.line("rope forward (norm)", &shape, 0.0, bytes, || {
                let norm = Some((norm, inv_rms.view_mut()));
                rope::forward(device, d, &table, positions.view(), norm, raw.view(), qkv.view_mut());
            });
            let [mut d_q, mut d_k] = [self.values(heads.dim)?, self.values(heads.dim)?];
            let mut d_raw = self.values(raw.len())?;
            self.line("rope backward (norm)", &shape, 0.0, 2.5 * bytes, || {
                let grad = rope::HeadNormGrad {
                    norm,
                    raw: raw.view(),
                    inv_rms: inv_rms.view(),
                    to: Some(rope::HeadNormSums {
                        d_query_weight: d_q.view_mut(),
                        d_key_weight: d_k.view_mut(),
                    }),
                };
                rope::backward(device, d, &table, positions.view(), Some(grad), qkv.view(), d_raw.view_mut());
            });
            let offsets: Vec<u32> = (0..=sequences).map(|s| (s * len) as u32).collect();
            let offsets = device.upload(&offsets)?;
            let d =
                attention::Dims { tokens, sequences, heads, rule: attention::ScoreRule::plain(heads.dim) };
            let mut out = self.values(tokens * heads.out_width())?;
            let mut lse = self.values(tokens * heads.query)?;
            // Multiply-adds that the causal half needs.
            let flops = 2.0 * (tokens * (len + 1)) as f64 * (heads.query * heads.dim) as f64;
            self.line("attention forward", &shape, flops, 0.0, || {
                attention::forward(device, d, qkv.view(), offsets.view(), out.view_mut(), lse.view_mut());
            });
            let d_out = self.values(out.len())?;
            self.line("attention backward", &shape, 2.5 * flops, 0.0, || {
                let saved = attention::Saved { qkv: qkv.view(), out: out.view(), lse: lse.view() };
                attention::backward(device, d, saved, offsets.view(), d_out.view(), d_raw.view_mut());
            });
        }
        Ok(())
    }

    fn paged(&self) -> Outcome {
        let device = &self.device;
        for (sequences, context, dim) in [(256, 96, 32), (256, 256, 64), (1, 1024, 64)] {
            let heads = Heads { query: 8, kv: 4, dim };
            let block_size = 32;
            let table_width = context / block_size;
            let cache_dims =
                CacheDims { blocks: sequences * table_width, block_size, kv_heads: 4, head_dim: dim };
            let mut cache = Cache::zeros(device, cache_dims)?;
            let qkv = self.values(sequences * heads.qkv_width())?;
            let slots: Vec<u32> = (1..=sequences).map(|s| (s * context - 1) as u32).collect();
            let slots = device.upload(&slots)?;
            let shape = format!("{sequences} at {context}, 8/4 heads of {dim}");
            self.line("paged store", &shape, 0.0, 16.0 * (sequences * 4 * dim) as f64, || {
                paged::store(device, sequences, heads, qkv.view(), slots.view(), &mut cache);
            });
            let d = paged::Dims {
                tokens: sequences,
                sequences,
                heads,
                rule: attention::ScoreRule::plain(heads.dim),
                table_width,
            };
            let offsets = device.upload(&(0..=sequences as u32).collect::<Vec<_>>())?;
            let contexts = device.upload(&vec![context as u32; sequences])?;
            let tables = device.upload(&(0..(sequences * table_width) as u32).collect::<Vec<_>>())?;
            let layout = Sequences {
                offsets: offsets.view(),
                contexts: contexts.view(),
                tables: tables.view(),
                groups: None,
                prefill: None,
            };
            let mut out = self.values(sequences * heads.out_width())?;
            let flops = 4.0 * (sequences * context * heads.query * dim) as f64;
            self.line(
                "paged forward",
                &shape,
                flops,
                flops * heads.kv as f64 / heads.query as f64 * 2.0,
                || {
                    paged::forward(device, d, qkv.view(), slots.view(), &mut cache, layout, out.view_mut());
                },
            );
        }
        Ok(())
    }

    fn heads(&self) -> Outcome {
        let device = &self.device;
        for (tokens, width, vocab) in
            [(6144, 256, 256), (2048, 512, 32000), (256, 512, 32000), (256, 256, 256)]
        {
            let shape = format!("T={tokens} D={width} V={vocab}");
            let flops = 2.0 * (tokens * width * vocab) as f64;
            let hidden = self.values(tokens * width)?;
            let w = self.weight(vocab, width)?;
            let targets: Vec<u32> = (0..tokens).map(|t| (t * 7919 % vocab) as u32).collect();
            let targets = device.upload(&targets)?;
            let [mut logp, mut entropy, mut collision, mut lse] =
                [self.values(tokens)?, self.values(tokens)?, self.values(tokens)?, self.values(tokens)?];
            let dims = lm_head::Dims { tokens, temperature: 1.0, rule: lm_head::LogitRule::default() };
            self.line("lm_head forward", &shape, flops, 0.0, || {
                let scores = lm_head::HeadScores {
                    logp: logp.view_mut(),
                    entropy: entropy.view_mut(),
                    collision: collision.view_mut(),
                    lse: lse.view_mut(),
                    slopes: None,
                };
                lm_head::forward(device, dims, hidden.view(), &w, targets.view(), scores, None);
            });
            let (mut d_hidden, mut d_weight) = (self.values(tokens * width)?, self.values(vocab * width)?);
            self.line("lm_head backward", &shape, 3.0 * flops, 0.0, || {
                let grads = lm_head::ScoreGrads {
                    targets: targets.view().into(),
                    lse: lse.view(),
                    entropy: entropy.view(),
                    d_logp: logp.view(),
                    d_entropy: collision.view(),
                };
                let to = lm_head::HeadGrads {
                    d_hidden: d_hidden.view_mut(),
                    d_weight: Some((d_weight.view_mut(), Write::Add)),
                };
                lm_head::backward(device, dims, hidden.view(), &w, grads, lm_head::LastLogits::default(), to);
            });
            if tokens > 256 {
                continue;
            }
            let uniforms: Vec<f64> = (0..tokens).map(|t| (t as f64 + 0.5) / tokens as f64).collect();
            let uniforms = device.upload(&uniforms)?;
            let mut ids = device.zeros(tokens)?;
            let mut logits = sampling::Logits::new(device, w.shape().outputs, tokens)?;
            let top_p = Filter { top_p: 0.95, ..Filter::NONE };
            for (name, filter) in [("sampling", Filter::NONE), ("sampling (top-p)", top_p)] {
                self.line(name, &shape, flops, 0.0, || {
                    let drawn = Drawn {
                        ids: ids.view_mut(),
                        logp: logp.view_mut(),
                        entropy: entropy.view_mut(),
                        alternatives: None,
                        kept: None,
                    };
                    let rule = SamplingRule::Draw { temperature: 1.0, filter };
                    let from = sampling::Inputs {
                        hidden: hidden.view(),
                        rule: lm_head::LogitRule::default(),
                        head: &w,
                        uniforms: uniforms.view(),
                    };
                    sampling::forward(device, rule, from, drawn, &mut logits);
                });
            }
        }
        Ok(())
    }

    fn updates(&self) -> Outcome {
        let device = &self.device;
        for n in [4_800_000, 41_600_000] {
            let shape = format!("{:.1}M parameters", n as f64 / 1e6);
            let grad = device.zeros::<f32>(n)?;
            let [mut param, mut m, mut v] = [device.zeros(n)?, device.zeros(n)?, device.zeros(n)?];
            let rule = adamw::AdamW {
                lr: 1e-3,
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                weight_decay: 0.0,
                first: 0,
                step: 1,
            };
            self.line("adamw", &shape, 0.0, 28.0 * n as f64, || {
                let (param, m, v) = (param.view_mut(), m.view_mut(), v.view_mut());
                adamw::step(device, 1.0, vec![adamw::Tensor { rule, param, grad: grad.view(), m, v }]);
            });
            self.line("sum_squares", &shape, 0.0, 4.0 * n as f64, || {
                reduce::sum_squares(device, [grad.view()]);
            });
        }
        Ok(())
    }
}
