//! `prefill`: prompts alone, each with one sampled token, with the kernel of prefill and without it; and the packed forward pass
//! of training over the same tokens, whose head scores as few rows.

use super::bounds::{PEAK, prefill_flops};
use super::{Failure, Options, settings, tokens};
use stapo_model::decoder::{HeadOptions, PackedBatch, Pass, Policy};
use stapo_model::generate::{Engine, EngineMemory, Request};
use std::time::Instant;

pub fn prefill(policy: &Policy, options: &Options) -> Result<(), Failure> {
    let (n, len) = (options.get("prompts", 64), options.get("prompt", 2048));
    let options = options.clone().with("samples", 1).with("rows", options.get("rows", 16_384));
    let prompts: Vec<Vec<u32>> = (0..n).map(|p| tokens(p, len, policy.config().vocabulary)).collect();
    let mut memory = EngineMemory::new();
    let n_runs = options.get("steps", 2);
    let mut with = |kernel| best(n_runs, || engine(policy, &mut memory, &prompts, &options, kernel));
    let (before, with_kernel) = (with(false)?, with(true)?);
    drop(memory);
    let packed = packed(policy, &prompts, &options)?;
    let rate = |seconds: f64| (n * len) as f64 / seconds;
    let flops = prefill_flops(policy.config(), n, len);
    println!(
        r#"{{"task": "prefill", "prompts": {n}, "prompt": {len}, "rows": {}, "tokens_per_s": {:.0}, "tflops": {:.0}, "share": {:.3}, "without_kernel": {:.0}, "packed": {:.0}}}"#,
        options.get("rows", 0),
        rate(with_kernel),
        flops / with_kernel * 1e-12,
        flops / with_kernel / PEAK,
        rate(before),
        rate(packed),
    );
    Ok(())
}

/// The least seconds of a run, of `n` behind a first one.
fn best(n: usize, mut run: impl FnMut() -> Result<f64, Failure>) -> Result<f64, Failure> {
    run()?;
    (0..n).try_fold(f64::INFINITY, |best, _| Ok(best.min(run()?)))
}

/// Seconds from the first step to the last token.
fn engine(
    policy: &Policy,
    memory: &mut EngineMemory,
    prompts: &[Vec<u32>],
    options: &Options,
    has_kernel: bool,
) -> Result<f64, Failure> {
    let mut engine = Engine::new(policy, memory, settings(options))?;
    engine.use_prefill_kernel(has_kernel);
    for (problem, prompt) in prompts.iter().enumerate() {
        let (problem, prompt) = (problem as u64, prompt.clone());
        engine.submit(Request { problem, prompt, n_samples: 1, max_tokens: 1, stops: vec![] })?;
    }
    let start = Instant::now();
    engine.generate()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Seconds of packed forward passes of about as many rows as a step has.
fn packed(policy: &Policy, prompts: &[Vec<u32>], options: &Options) -> Result<f64, Failure> {
    let mut pass = Pass::scoring(policy)?;
    let per_pass = (options.get("rows", 0) / options.get("prompt", 2048)).max(1);
    best(options.get("steps", 2), || {
        let start = Instant::now();
        for part in prompts.chunks(per_pass) {
            let mut batch = PackedBatch::new();
            for prompt in part {
                batch.push_response(prompt, prompt.len() - 1);
            }
            pass.forward(policy, &batch, HeadOptions::default())?;
        }
        Ok(start.elapsed().as_secs_f64())
    })
}
