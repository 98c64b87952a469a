//! Times training steps or generation of one shape; `bench/engine/speed.py` puts the result beside `PyTorch`.
//!
//! `bench_engine train|generate|peak --key=value ..` prints one JSON object: seconds of the best training step or of the
//! whole generation; the machine's measured f32 operations per second.

#![allow(clippy::print_stdout, reason = "a benchmark's result")]

use stapo_model::decoder::{Gradients, HeadOptions, PackedBatch, Pass, Policy, Recompute};
use stapo_model::generate::{Engine, EngineMemory, EngineSettings, Request};
use stapo_model::optimizer::{AdamWSettings, Optimizer, Update};
use stapo_model::{CpuOptions, Device, Family, Heads, ModelConfig, Rope, RopeScaling};
use std::collections::BTreeMap;
use std::time::Instant;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let task = arguments.next().ok_or("expected train, generate or peak")?;
    let options = Options::parse(arguments)?;
    let device = Device::cpu(CpuOptions { threads: options.get("threads")?, ..CpuOptions::default() });
    if task == "peak" {
        println!(r#"{{"flops": {}}}"#, stapo_ops::peak::flops(&device));
        return Ok(());
    }
    let config = options.config()?;
    let policy = Policy::random(&device, &config, 0, 0.02)?;
    let seconds = match task.as_str() {
        "train" => train(policy, &options)?,
        "generate" => generate(&policy, &options)?,
        other => return Err(format!("{other:?}: expected train, generate or peak").into()),
    };
    println!(r#"{{"seconds": {seconds}, "parameters": {}}}"#, config.n_parameters());
    Ok(())
}

/// Forward, log-prob and entropy of every next token, backward, clip, `AdamW`.
fn train(mut policy: Policy, options: &Options) -> Result<f64, Failure> {
    let mut optimizer =
        Optimizer::new(&policy, AdamWSettings { weight_decay: 0.01, ..AdamWSettings::default() })?;
    let mut gradients = Gradients::zeros(&policy)?;
    let mut pass = Pass::training(&policy, Recompute::Nothing)?;
    let mut batch = PackedBatch::new();
    for sequence in 0..options.get("batch")? {
        batch.push_response(&options.tokens(sequence, options.get("length")?)?, 1);
    }
    let n = batch.n_scored();
    let d_logp: Vec<f32> = (0..n).map(|i| (i % 7) as f32 / 3.0 - 1.0).collect();
    let d_entropy = vec![-0.01; n];
    let mut best = f64::INFINITY;
    for _ in 0..=options.get("steps")? {
        let start = Instant::now();
        pass.forward(&policy, &batch, HeadOptions::default())?;
        pass.backward(&policy, &d_logp, &d_entropy, &mut gradients)?;
        optimizer.step(
            &mut policy,
            &mut gradients,
            Update { lr: 1e-4, scale: 1.0 / n as f64, max_norm: 1.0 },
        )?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

fn generate(policy: &Policy, options: &Options) -> Result<f64, Failure> {
    let mut memory = EngineMemory::new();
    let mut engine =
        Engine::new(policy, &mut memory, EngineSettings { kv_bytes: 4 << 30, ..EngineSettings::default() })?;
    let n_samples = options.get("samples")?;
    for problem in 0..options.get("prompts")? {
        engine.submit(Request {
            problem: problem as u64,
            prompt: options.tokens(problem, options.get("prompt")?)?,
            n_samples: n_samples as u32,
            max_tokens: options.get("new-tokens")?,
            stops: vec![],
        })?;
    }
    let start = Instant::now();
    let responses = engine.generate()?;
    let seconds = start.elapsed().as_secs_f64();
    assert_eq!(responses.len(), options.get("prompts")? * n_samples, "every sequence finished");
    Ok(seconds)
}

/// `--key=value` arguments.
struct Options(BTreeMap<String, usize>);

impl Options {
    fn parse(arguments: impl Iterator<Item = String>) -> Result<Self, Failure> {
        let pair = |argument: String| -> Result<(String, usize), Failure> {
            let (key, value) = argument.split_once('=').ok_or("expected --key=value")?;
            Ok((key.trim_start_matches("--").to_owned(), value.parse()?))
        };
        Ok(Self(arguments.map(pair).collect::<Result<_, _>>()?))
    }

    fn get(&self, key: &str) -> Result<usize, Failure> {
        self.0.get(key).copied().ok_or_else(|| format!("--{key}=N is missing").into())
    }

    fn tokens(&self, sequence: usize, n: usize) -> Result<Vec<u32>, Failure> {
        let vocabulary = self.get("vocab")?;
        Ok((0..n).map(|i| ((sequence * 7919 + i * 104729) % vocabulary) as u32).collect())
    }

    fn config(&self) -> Result<ModelConfig, Failure> {
        let heads =
            Heads { query: self.get("heads")?, kv: self.get("kv-heads")?, dim: self.get("head-dim")? };
        let rope = Rope { theta: 1e4, scaling: RopeScaling::None };
        let layer = Family::Qwen3.layer(heads, rope, self.get("ffn")?);
        let config = ModelConfig {
            width: self.get("width")?,
            layers: ModelConfig::repeat_layer("shape", layer, self.get("layers")?)?,
            vocabulary: self.get("vocab")?,
            norm_eps: 1e-6,
            max_positions: 1024,
            tied_embeddings: true,
            stops: vec![],
            ..ModelConfig::empty(Family::Qwen3)
        };
        config.validate("shape")?;
        Ok(config)
    }
}
