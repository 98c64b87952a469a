//! `bench_gpu rollout`: a rollout batch with spread lengths, beside what an ideal scheduler would do with the same memory.

use crate::{Failure, Options, copy_rate, settings, tokens, used_gib};
use stapo_model::ModelConfig;
use stapo_model::decoder::Policy;
use stapo_model::generate::{Engine, EngineMemory, ForcedLengths, Request};
use std::time::Instant;

/// Lengths before the cut: the mean, and the deviation of the logarithm.
const LENGTHS: ForcedLengths = ForcedLengths { mean: 4000.0, sigma: 0.8 };

pub fn rollout(policy: &Policy, options: &Options) -> Result<(), Failure> {
    let settings = settings(options);
    let n_prompts = options.get("prompts", 64);
    let n_samples = options.get("samples", 8);
    let n_prompt = options.get("prompt", 512);
    let longest = options.get("longest", 15_360);
    let mut memory = EngineMemory::new();
    let mut engine = Engine::new(policy, &mut memory, settings)?;
    let mut lengths = Vec::new();
    for problem in 0..n_prompts {
        let request = Request {
            problem: problem as u64,
            prompt: tokens(problem, n_prompt, policy.config().vocabulary),
            n_samples: n_samples as u32,
            max_tokens: longest,
            stops: vec![],
        };
        let drawn = LENGTHS.draw(settings.seed, request.problem, request.n_samples);
        engine.submit_with_lengths(request, &drawn)?;
        lengths.extend(drawn.into_iter().map(|length| length.min(longest)));
    }
    let start = Instant::now();
    let responses = engine.generate()?;
    let seconds = start.elapsed().as_secs_f64();
    let n_preemptions = engine.n_preemptions();
    let n: usize = responses.iter().map(|response| response.tokens.len()).sum();
    assert_eq!(n, lengths.iter().sum::<usize>(), "the lengths were forced");
    let gib = used_gib(policy.device());
    drop(engine);
    drop(memory);
    let bandwidth = copy_rate(policy.device())?;
    let ideal = Ideal::new(policy.config(), settings.kv_bytes, n_prompt as f64 / n_samples as f64, bandwidth);
    let ideal_seconds = ideal.seconds(lengths);
    println!(
        r#"{{"task": "rollout", "sequences": {}, "tokens": {n}, "tokens_per_s": {:.0}, "ideal_tokens_per_s": {:.0}, "share": {:.3}, "preemptions": {n_preemptions}, "seconds": {seconds:.2}, "copy_bytes_per_s": {bandwidth:.3e}, "gib": {gib:.1}}}"#,
        responses.len(),
        n as f64 / seconds,
        n as f64 / ideal_seconds,
        ideal_seconds / seconds,
    );
    Ok(())
}

/// A scheduler that knows every length beforehand and starts the longest responses first, whenever all that run will fit
/// to their ends. A step takes the time to read the weights and the keys and values of all sequences once; prompts take no
/// time, and each of their keys is read once for all samples.
struct Ideal {
    weight_bytes: f64,
    token_bytes: f64,
    /// Keys and values of a response's share in its prompt, in tokens.
    prompt_tokens: f64,
    capacity_tokens: f64,
    bytes_per_s: f64,
}

/// A response that the ideal scheduler runs.
#[derive(Clone, Copy)]
struct Running {
    n_done: f64,
    n_left: f64,
}

impl Ideal {
    fn new(config: &ModelConfig, kv_bytes: usize, prompt_tokens: f64, bytes_per_s: f64) -> Self {
        let token_bytes = 2.0 * config.kv_numbers_per_token() as f64;
        Self {
            weight_bytes: 2.0 * config.n_parameters() as f64,
            token_bytes,
            prompt_tokens,
            capacity_tokens: kv_bytes as f64 / token_bytes,
            bytes_per_s,
        }
    }

    fn seconds(&self, mut lengths: Vec<usize>) -> f64 {
        lengths.sort_unstable();
        let mut running: Vec<Running> = Vec::new();
        let mut bytes = 0.0;
        while !lengths.is_empty() || !running.is_empty() {
            while let Some(&longest) = lengths.last() {
                running.push(Running { n_done: 0.0, n_left: longest as f64 });
                if running.len() > 1 && !self.fits(&running) {
                    running.pop();
                    break;
                }
                lengths.pop();
            }
            let n = running.len() as f64;
            let n_steps = running.iter().map(|r| r.n_left).fold(f64::INFINITY, f64::min);
            let keys: f64 = running.iter().map(|r| r.n_done + self.prompt_tokens).sum();
            let read = n_steps * keys + n * n_steps * (n_steps - 1.0) / 2.0;
            bytes += n_steps * self.weight_bytes + read * self.token_bytes;
            for response in &mut running {
                response.n_done += n_steps;
                response.n_left -= n_steps;
            }
            running.retain(|r| r.n_left > 0.0);
        }
        bytes / self.bytes_per_s
    }

    /// Whether the responses fit at every time until the last of them ends.
    fn fits(&self, running: &[Running]) -> bool {
        let mut by_end = running.to_vec();
        by_end.sort_by(|a, b| a.n_left.total_cmp(&b.n_left));
        let mut held: f64 = by_end.iter().map(|r| r.n_done + self.prompt_tokens).sum();
        for (n_ended, first) in by_end.iter().enumerate() {
            if held + (by_end.len() - n_ended) as f64 * first.n_left > self.capacity_tokens {
                return false;
            }
            held -= first.n_done + self.prompt_tokens;
        }
        true
    }
}
