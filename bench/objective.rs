//! Speed of `calibrate` + `evaluate` on one core, for every preset, and of the census of the tokens.
//!
//!     cargo run --release -p stapo-core --example bench_objective

#![allow(clippy::print_stdout, reason = "a benchmark prints its table")]

use stapo_core::diagnostics::{Census, Observed, Thresholds};
use stapo_core::objective::{
    AdvantagesRef, ObjectiveError, ResponseSignals, TokenEffect, UpdateKey, presets,
};
use stapo_core::random::Key;
use std::time::Instant;

const N_RESPONSES: usize = 512;
const N_TOKENS: usize = 2048;
const N_ROUNDS: usize = 7;

/// A response as in a rollout: most tokens are likely, a few are improbable. The log-probs of every second token differ
/// from the behavior policy's.
struct Sample {
    advantage: f64,
    logp: Vec<f64>,
    behavior_logp: Vec<f64>,
    entropy: Vec<f64>,
}

fn uniform(counter: &[u64]) -> f64 {
    counter.iter().fold(Key::new(1), |key, &word| key.with(word)).uniform()
}

fn sample(idx: u64) -> Sample {
    let column = |of: &dyn Fn(u64) -> f64| (0..N_TOKENS as u64).map(of).collect::<Vec<f64>>();
    let logp = column(&|t| -12.0 * uniform(&[idx, t, 0]).powi(6));
    let drift = |t: u64| if t.is_multiple_of(2) { 0.0 } else { 0.1 * uniform(&[idx, t, 1]) - 0.05 };
    Sample {
        advantage: if idx.is_multiple_of(2) { 0.7 } else { -0.7 },
        behavior_logp: column(&|t| (logp[t as usize] + drift(t)).min(0.0)),
        entropy: column(&|t| 2.0 * uniform(&[idx, t, 2])),
        logp,
    }
}

fn main() -> Result<(), ObjectiveError> {
    let samples: Vec<Sample> = (0..N_RESPONSES as u64).map(sample).collect();
    let responses: Vec<ResponseSignals> = samples
        .iter()
        .map(|s| ResponseSignals {
            advantage: AdvantagesRef::Response(s.advantage),
            logp: &s.logp,
            behavior_logp: &s.behavior_logp,
            entropy: &s.entropy,
            behavior_entropy: None,
            reference_logp: Some(&s.behavior_logp),
            sampler_logp: None,
            collision: None,
        })
        .collect();
    let n_tokens = N_RESPONSES * N_TOKENS;
    println!("{N_RESPONSES} responses x {N_TOKENS} tokens, one core, best of {N_ROUNDS}");
    println!("{:<12} {:>12} {:>16}", "preset", "ns/token", "million tokens/s");
    let mut effects = vec![TokenEffect::default(); N_TOKENS];
    for preset in presets() {
        let spec = preset.objective;
        let mut best = f64::INFINITY;
        for step in 0..N_ROUNDS as u64 {
            let start = Instant::now();
            let calibration = spec.calibrate(&responses, UpdateKey { step, ..UpdateKey::default() })?;
            let mut tallies = Vec::with_capacity(responses.len());
            for (idx, response) in responses.iter().enumerate() {
                tallies.push(spec.evaluate(&calibration, idx, response, &mut effects)?);
            }
            std::hint::black_box(spec.total(&tallies));
            best = best.min(start.elapsed().as_secs_f64());
        }
        let per_token = best / n_tokens as f64;
        println!("{:<12} {:>12.1} {:>16.1}", preset.name, 1e9 * per_token, 1e-6 / per_token);
    }
    let per_token = census(&samples) / n_tokens as f64;
    println!("{:<12} {:>12.1} {:>16.1}", "census", 1e9 * per_token, 1e-6 / per_token);
    Ok(())
}

/// Seconds of the census of all tokens, which is taken once for each mini-batch.
fn census(samples: &[Sample]) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..N_ROUNDS {
        let start = Instant::now();
        let mut census = Census::new(Thresholds { tau_p: 0.002, tau_h: 0.5 });
        for sample in samples {
            for (logp, entropy) in sample.logp.iter().zip(&sample.entropy) {
                let effect = TokenEffect::default();
                census.add(&Observed { logp: *logp, entropy: *entropy, collision: 0.5, effect });
            }
        }
        std::hint::black_box(&census);
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}
