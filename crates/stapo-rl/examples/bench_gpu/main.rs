//! A benchmark on a GPU at the shapes of Qwen3: `bench_gpu TASK --key=value ..`; `bench/gpu.sh` compares the results with
//! `PyTorch`. Tasks: `train` (forward, log-prob and entropy of every token, the objective of STAPO, backward, clip,
//! `AdamW`), `decode`, `prefill` (prompts alone, beside the packed forward pass), `exact` (compares every sampled token's log-prob
//! with the packed training forward), `rollout` (spread lengths, beside an ideal scheduler), `step` (training steps as `stapo
//! train` makes them), `update` (the same with records in a folder, and where the time of updates goes). Each task prints JSON
//! objects. `train --prompt=100 --samples=8 --share=1` lets every eight sequences share the rows of a prompt; `update --share=0`
//! turns sharing off.
//! `--lora=RANK` gives the model adapters on all linear modules; `--blocks=4` and `--blocks=8` then keep random layers
//! quantised, as files of Q4_K with some Q6_K and of Q8_0 have them.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a benchmark's result")]

use stapo_core::batch::{Microbatch, Packing, SequenceLength, pack};
use stapo_core::objective::{
    AdvantagesRef, ObjectiveSpec, ResponseSignals, SequenceTally, TokenEffect, UpdateKey,
};
use stapo_model::cuda::{CudaOptions, Training};
use stapo_model::decoder::{
    BatchRows, Gradients, HeadOptions, LoraScale, LoraSpec, LoraTarget, PackedBatch, Pass, Policy,
    PolicySpec, Recompute, TokenScores,
};
use stapo_model::generate::{Completion, Engine, EngineMemory, EngineSettings, Event, Request};
use stapo_model::optimizer::{AdamWSettings, Optimizer, Update};
use stapo_model::{DeltaNetHeads, DeltaNetSpec, Device, Heads, LayerSpec, Mixer, ModelConfig};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::time::Instant;

mod bounds;
mod prefill;
mod quantised;
mod rollout;
mod start;
mod step;
mod update;

use start::{Start, waited_seconds};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let mut start = Start::new();
    let mut arguments = std::env::args().skip(1);
    let task = arguments.next().ok_or("expected train, decode, prefill, exact, rollout, step or update")?;
    let options = Options::parse(arguments)?;
    match task.as_str() {
        "step" => return step::step(&options),
        "update" => return update::update(&options),
        _ => {}
    }
    let training = match (task.as_str(), options.get("8bit", 0)) {
        ("train", 0) => Training::F32,
        ("train", _) => Training::EightBit,
        _ => Training::None,
    };
    let device = Device::cuda(CudaOptions { training, ..CudaOptions::default() })?;
    start.end_part("device");
    let config = shape(&options)?;
    let lora = lora(&options);
    let spec = PolicySpec { config: &config, lora: lora.as_ref() };
    let (mut policy, saved_bytes) = match options.get("blocks", 0) {
        0 => (Policy::noise(&device, spec, 1, 0.02)?, 0),
        n_bits => quantised::policy(&device, spec, n_bits)?,
    };
    fill_adapters(&mut policy);
    device.synchronize();
    start.end_part("weights");
    eprintln!("seconds of the start: {}", start.parts());
    match task.as_str() {
        "train" => train(policy, &options, saved_bytes, start),
        "decode" => decode(&policy, &options),
        "prefill" => prefill::prefill(&policy, &options),
        "exact" => exact(&policy, &options),
        "rollout" => rollout::rollout(&policy, &options),
        other => {
            Err(format!("{other:?}: expected train, decode, prefill, exact, rollout, step or update").into())
        }
    }
}

/// The adapters that `--lora` asks for.
fn lora(options: &Options) -> Option<LoraSpec> {
    let rank = options.get("lora", 0);
    let targets = LoraTarget::ALL.to_vec();
    (rank > 0).then_some(LoraSpec { rank, alpha: 2.0 * rank as f64, scale: LoraScale::Plain, targets })
}

fn used_gib(device: &Device) -> f64 {
    device.memory().map_or(0.0, |(free, total)| (total - free) as f64 / f64::from(1 << 30))
}

/// The micro-batches of `sequences` x `length` tokens, with at most `microbatch` tokens each. Every `samples` of the sequences
/// begin with the same `prompt` tokens, whose rows they share with `--share=1`.
fn lessons(options: &Options, vocabulary: usize) -> Result<Vec<(Range<usize>, PackedBatch)>, Failure> {
    let (length, n_prompt) = (options.get("length", 2048), options.get("prompt", 1));
    let samples = options.get("samples", 1);
    let sequence = |s: usize| -> Vec<u32> {
        let response = tokens(s, length, vocabulary).split_off(n_prompt);
        [tokens(s / samples, n_prompt, vocabulary), response].concat()
    };
    let n_shared = |s: usize| if s.is_multiple_of(samples) { 0 } else { n_prompt };
    let lengths: Vec<SequenceLength> = (0..options.get("sequences", 8))
        .map(|s| SequenceLength { n_tokens: length, n_shared: n_shared(s) })
        .collect();
    let budget_tokens = options.get("microbatch", 8192).max(length);
    let shares = options.get("share", 0) == 1;
    let packing = Packing { budget_tokens, budget_keys: shares.then_some(8 * budget_tokens) };
    let batch = |microbatch: &Microbatch| {
        let mut batch = PackedBatch::new();
        for (idx, &s) in microbatch.sequences.iter().enumerate() {
            let is_scored: Vec<bool> = (0..length).map(|position| position >= n_prompt).collect();
            match n_shared(s) {
                n_shared @ 1.. if shares && idx > 0 => {
                    batch.push_sharing(n_shared, &sequence(s), &is_scored);
                }
                _ => batch.push(&sequence(s), &is_scored),
            }
        }
        let first = microbatch.sequences[0];
        (first..first + microbatch.sequences.len(), batch)
    };
    Ok(pack(&lengths, packing)?.iter().map(batch).collect())
}

/// Measures optimizer steps over the micro-batches of [`lessons`].
fn train(mut policy: Policy, options: &Options, saved_bytes: u64, mut begun: Start) -> Result<(), Failure> {
    let device = policy.device().clone();
    let recompute = [Recompute::Layers, Recompute::Inputs, Recompute::Nothing][options.get("keep", 2).min(2)];
    let mut optimizer =
        Optimizer::new(&policy, AdamWSettings { weight_decay: 0.01, ..AdamWSettings::default() })?;
    let mut gradients = Gradients::by_microbatch_in(&policy, &device)?;
    let mut pass = Pass::training(&policy, recompute)?;
    let n_sequences = options.get("sequences", 8);
    let length = options.get("length", 2048);
    let lessons = lessons(options, policy.config().vocabulary)?;
    let most =
        |count: fn(&PackedBatch) -> usize| lessons.iter().map(|(_, batch)| count(batch)).max().unwrap_or(0);
    let rows = BatchRows {
        tokens: most(PackedBatch::n_tokens),
        scored: most(PackedBatch::n_scored),
        keys: most(PackedBatch::n_key_rows),
    };
    let mut lesson = Lesson::new(n_sequences);
    let planned = bounds::planned_gib(policy.config(), options, rows, recompute)
        - saved_bytes as f64 / f64::from(1 << 30);
    let mut best = f64::INFINITY;
    let mut parts = [0.0; 4];
    let mut peak = 0.0f64;
    begun.end_part("memory");
    for step in 0..=options.get("steps", 3) {
        let start = Instant::now();
        let mut times = [0.0; 4];
        let mut tallies = Vec::new();
        for (of, batch) in &lessons {
            let clock = Instant::now();
            let options = HeadOptions { has_entropy_gradient: false, ..HeadOptions::default() };
            let scores = pass.forward(&policy, batch, options)?;
            times[0] += clock.elapsed().as_secs_f64();
            let clock = Instant::now();
            let (d_logp, d_entropy) = lesson.evaluate(of.clone(), &scores, &mut tallies)?;
            times[3] += clock.elapsed().as_secs_f64();
            let clock = Instant::now();
            pass.backward(&policy, &d_logp, &d_entropy, &mut gradients)?;
            device.synchronize();
            times[1] += clock.elapsed().as_secs_f64();
        }
        peak = peak.max(used_gib(&device));
        let clock = Instant::now();
        let update = Update { lr: 1e-5, scale: lesson.objective.total(&tallies).scale, max_norm: 1.0 };
        let norm = optimizer.step(&mut policy, &mut gradients, update)?;
        device.synchronize();
        times[2] = clock.elapsed().as_secs_f64();
        let seconds = start.elapsed().as_secs_f64();
        eprintln!(
            "step {step}: {seconds:.4} s, forward {:.4} objective {:.4} backward {:.4} optimizer {:.4}, norm {norm:.6}",
            times[0], times[3], times[1], times[2]
        );
        if step == 0 {
            begun.end_part("step");
        } else if seconds < best {
            (best, parts) = (seconds, times);
        }
    }
    println!(
        r#"{{"task": "train", "tokens_per_s": {:.0}, "share": {:.3}, "seconds": {best:.4}, "forward": {:.4}, "objective": {:.4}, "backward": {:.4}, "optimizer": {:.4}, "gib": {peak:.1}, "first_step_after": {:.2}, "start": {{{}}}, "kernel_s": {:.2}, "planned_gib": {planned:.1}}}"#,
        (n_sequences * length) as f64 / best,
        bounds::train_flops(policy.config(), n_sequences, length) / best / bounds::PEAK,
        parts[0],
        parts[3],
        parts[1],
        parts[2],
        begun.seconds(),
        begun.parts(),
        waited_seconds(&device),
    );
    Ok(())
}

/// The inputs of the objective. Half of the sequences are rewarded; the log-probs and entropies of the first step serve as
/// those of the behavior policy.
struct Lesson {
    objective: ObjectiveSpec,
    sampled: Vec<(Vec<f64>, Vec<f64>)>,
    n_sequences: usize,
}

impl Lesson {
    fn new(n_sequences: usize) -> Self {
        let objective = stapo_core::objective::preset("stapo").expect("a preset").objective;
        Self { objective, sampled: Vec::new(), n_sequences }
    }

    /// The derivatives by log-prob and entropy of the tokens of the sequences `of`.
    fn evaluate(
        &mut self,
        of: Range<usize>,
        scores: &TokenScores,
        tallies: &mut Vec<SequenceTally>,
    ) -> Result<(Vec<f32>, Vec<f32>), Failure> {
        let per_sequence = scores.logp.len() / of.len();
        let widen = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
        let now: Vec<(Vec<f64>, Vec<f64>)> = scores
            .logp
            .chunks(per_sequence)
            .zip(scores.entropy.chunks(per_sequence))
            .map(|(p, h)| (widen(p), widen(h)))
            .collect();
        if self.sampled.len() < self.n_sequences {
            self.sampled.extend(now.iter().cloned());
        }
        let responses: Vec<ResponseSignals> = (0..self.sampled.len())
            .map(|s| {
                let (behavior_logp, behavior_entropy) = &self.sampled[s];
                let (logp, entropy) = if of.contains(&s) { &now[s - of.start] } else { &self.sampled[s] };
                ResponseSignals {
                    advantage: AdvantagesRef::Response(if s % 2 == 0 { 1.0 } else { -1.0 }),
                    logp,
                    behavior_logp,
                    entropy,
                    behavior_entropy: Some(behavior_entropy),
                    reference_logp: None,
                    sampler_logp: None,
                    collision: None,
                }
            })
            .collect();
        let calibration = self.objective.calibrate(&responses, UpdateKey::default())?;
        let mut effects = vec![TokenEffect::default(); scores.logp.len()];
        for (s, effects) in of.zip(effects.chunks_mut(per_sequence)) {
            tallies.push(self.objective.evaluate(&calibration, s, &responses[s], effects)?);
        }
        Ok((
            effects.iter().map(|e| e.d_logp as f32).collect(),
            effects.iter().map(|e| e.d_entropy as f32).collect(),
        ))
    }
}

fn settings(options: &Options) -> EngineSettings {
    let sequences = options.get("prompts", 64) * options.get("samples", 8);
    EngineSettings {
        kv_bytes: options.get("kv-gib", 24) << 30,
        max_rows: options.get("rows", 4096),
        max_sequences: sequences,
        ..EngineSettings::default()
    }
}

/// A rollout batch with its duration.
struct Generated {
    prompts: Vec<Vec<u32>>,
    responses: Vec<Completion>,
    seconds: f64,
    /// Where there is a time in which every sequence decodes.
    steady: Option<Steady>,
}

/// The time in which every sequence decodes, from the step in which the last sequence gets token number [`SETTLED`] to the
/// first end of a response.
struct Steady {
    tokens_per_s: f64,
    /// Keys of a sequence, on average.
    context: f64,
}

/// Steps of one shape are recorded as a CUDA graph when they come for the second time: after this many tokens they are
/// replayed.
const SETTLED: usize = 8;

fn generate(policy: &Policy, memory: &mut EngineMemory, options: &Options) -> Result<Generated, Failure> {
    let mut engine = Engine::new(policy, memory, settings(options))?;
    engine.use_prefill_kernel(options.get("prefill-kernel", 1) == 1);
    let vocabulary = policy.config().vocabulary;
    let prompts: Vec<Vec<u32>> =
        (0..options.get("prompts", 64)).map(|p| tokens(p, options.get("prompt", 128), vocabulary)).collect();
    for (problem, prompt) in prompts.iter().enumerate() {
        engine.submit(Request {
            problem: problem as u64,
            prompt: prompt.clone(),
            n_samples: options.get("samples", 8) as u32,
            max_tokens: options.get("new", 128),
            stops: vec![],
        })?;
    }
    let n_sequences = options.get("prompts", 64) * options.get("samples", 8);
    let mut responses = Vec::new();
    let mut drawn: HashMap<_, usize> = HashMap::new();
    let mut n_settled = 0;
    let mut n_tokens = 0usize;
    let mut begun = None;
    let mut ended = None;
    let start = Instant::now();
    engine.run(|event| {
        match event {
            Event::Token { ticket, sample, .. } => {
                n_tokens += 1;
                let n_drawn = drawn.entry((ticket, sample)).or_default();
                *n_drawn += 1;
                if *n_drawn == SETTLED {
                    n_settled += 1;
                    begun = (n_settled == n_sequences).then(|| (Instant::now(), n_tokens));
                }
            }
            Event::Finished(response) => {
                ended = ended.or_else(|| Some((Instant::now(), n_tokens)));
                responses.push(response);
            }
        }
        true
    })?;
    let seconds = start.elapsed().as_secs_f64();
    let steady = begun.zip(ended).filter(|(begun, ended)| begun < ended).map(|(begun, ended)| {
        let n_mean = (begun.1 + ended.1) as f64 / 2.0 / n_sequences as f64;
        Steady {
            tokens_per_s: (ended.1 - begun.1) as f64 / (ended.0 - begun.0).as_secs_f64(),
            context: options.get("prompt", 128) as f64 + n_mean,
        }
    });
    Ok(Generated { prompts, responses, seconds, steady })
}

fn decode(policy: &Policy, options: &Options) -> Result<(), Failure> {
    // A short run of the same size comes first, which loads kernels, prepares matrix products and records CUDA graphs. In
    // training, the first rollout does this for all others.
    let mut memory = EngineMemory::new();
    if options.get("warm", 1) == 1 {
        generate(policy, &mut memory, &options.clone().with("new", 4))?;
    }
    let Generated { responses, seconds, steady, .. } = generate(policy, &mut memory, options)?;
    let Steady { tokens_per_s: decode_rate, context } =
        steady.ok_or("the first response ends before the last sequence decodes: raise --new or --rows")?;
    let n: usize = responses.iter().map(|r| r.tokens.len()).sum();
    let n_steps_per_s = decode_rate / responses.len() as f64;
    let bytes_per_s = bounds::decode_bytes(policy.config(), responses.len(), context) * n_steps_per_s;
    let copy_rate = copy_rate(policy.device())?;
    println!(
        r#"{{"task": "decode", "sequences": {}, "prompts": {}, "tokens_per_s": {:.0}, "decode_tokens_per_s": {decode_rate:.0}, "context": {context:.0}, "prompt": {}, "copy_bytes_per_s": {copy_rate:.3e}, "share": {:.3}, "seconds": {seconds:.4}, "gib": {:.1}}}"#,
        responses.len(),
        options.get("prompts", 64),
        n as f64 / seconds,
        options.get("prompt", 128),
        bytes_per_s / copy_rate,
        used_gib(policy.device()),
    );
    Ok(())
}

/// Bytes read and written per second by copies within the GPU's memory, as the bandwidth to compare decode with.
fn copy_rate(device: &Device) -> Result<f64, Failure> {
    const LEN: usize = 1 << 30;
    let (from, mut to) = (device.zeros::<f32>(LEN)?, device.zeros::<f32>(LEN)?);
    let mut best = f64::INFINITY;
    for _ in 0..10 {
        device.synchronize();
        let clock = Instant::now();
        to.view_mut().copy_from(from.view());
        device.synchronize();
        best = best.min(clock.elapsed().as_secs_f64());
    }
    Ok(8.0 * LEN as f64 / best)
}

fn exact(policy: &Policy, options: &Options) -> Result<(), Failure> {
    let Generated { prompts, responses, .. } = generate(policy, &mut EngineMemory::new(), options)?;
    let mut pass = Pass::scoring(policy)?;
    let mut n = 0usize;
    let mut n_off = 0usize;
    let mut worst = 0.0f32;
    for part in responses.chunks(options.get("together", 24)) {
        let mut batch = PackedBatch::new();
        for response in part {
            let prompt = &prompts[response.ticket.0 as usize];
            let all: Vec<u32> =
                prompt.iter().copied().chain(response.tokens.iter().map(|t| t.token)).collect();
            batch.push_response(&all, prompt.len());
        }
        let scores = pass.forward(policy, &batch, HeadOptions::default())?;
        let sampled = part.iter().flat_map(|response| &response.tokens);
        for ((token, logp), entropy) in sampled.zip(&scores.logp).zip(&scores.entropy) {
            let off = (token.logp - logp).abs().max((token.entropy - entropy).abs());
            n += 1;
            n_off += usize::from(off != 0.0);
            worst = worst.max(off);
            assert!(!off.is_nan(), "a log-prob is not a number");
        }
    }
    println!(r#"{{"task": "exact", "tokens": {n}, "differ": {n_off}, "max_abs": {worst:e}}}"#);
    Ok(())
}

fn tokens(sequence: usize, n: usize, vocabulary: usize) -> Vec<u32> {
    (0..n).map(|i| ((sequence * 7919 + i * 104_729) % vocabulary) as u32).collect()
}

/// Fills adapters with uniform numbers of deviation 0.02. For speed, the values repeat a pattern of prime length.
fn fill_adapters(policy: &mut Policy) {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 0.02 * 3f32.sqrt()
    };
    let pattern: Vec<f32> = (0..1_048_573).map(|_| next()).collect();
    let Ok(()) = policy.try_fill_adapters(|_, values| {
        values.chunks_mut(pattern.len()).for_each(|part| part.copy_from_slice(&pattern[..part.len()]));
        Ok::<_, std::convert::Infallible>(())
    });
}

/// The shape that `--large` asks for, of Qwen3-1.7B, 8B or 32B, Gemma 3 4B, OLMo 3 7B, Mistral 7B, Qwen3.5-9B, a hybrid of 2B or
/// Qwen3-4B, with as many layers as `--layers` says.
fn shape(options: &Options) -> Result<ModelConfig, Failure> {
    let names =
        ["qwen3-1.7b", "qwen3-8b", "qwen3-32b", "gemma-3-4b", "olmo-3-7b", "mistral-7b", "qwen3.5-9b"];
    let number = options.get("large", 0);
    let config = match number {
        7 => hybrid_2b(),
        8 => ModelConfig::known("qwen3-4b"),
        number => ModelConfig::known(names.get(number).ok_or("--large: expected 0 to 8")?),
    };
    let mut config = config.ok_or("a known shape")?;
    let layer = config.layers[0].clone();
    config.layers.resize(options.get("layers", config.layers.len()), layer);
    config.validate("shape")?;
    Ok(config)
}

/// A hybrid of 2B weights with the heads of Qwen3.5-9B.
fn hybrid_2b() -> Option<ModelConfig> {
    let mut config = ModelConfig::known("qwen3.5-9b")?;
    let attention = config.attentions().next()?.clone();
    let mut full = config.family.layer(Heads { query: 8, kv: 2, dim: 256 }, attention.rope, 6144);
    full.attention_mut()?.rotary_dim = attention.rotary_dim;
    let heads = DeltaNetHeads { key: 16, value: 16, key_dim: 128, value_dim: 128 };
    let linear = LayerSpec { mixer: Mixer::DeltaNet(DeltaNetSpec { heads, kernel: 4 }), ..full.clone() };
    config.layers = [linear.clone(), linear.clone(), linear, full].into_iter().cycle().take(24).collect();
    (config.width, config.tied_embeddings) = (2048, true);
    Some(config)
}

/// `--key=value` arguments. Defaults are given where a value is read.
#[derive(Clone, Default)]
struct Options(BTreeMap<String, usize>);

impl Options {
    fn parse(arguments: impl Iterator<Item = String>) -> Result<Self, Failure> {
        let pair = |argument: String| -> Result<(String, usize), Failure> {
            let (key, value) = argument.split_once('=').ok_or("expected --key=value")?;
            Ok((key.trim_start_matches("--").to_owned(), value.parse()?))
        };
        Ok(Self(arguments.map(pair).collect::<Result<_, _>>()?))
    }

    fn get(&self, key: &str, default: usize) -> usize {
        self.0.get(key).copied().unwrap_or(default)
    }

    fn with(mut self, key: &str, value: usize) -> Self {
        self.0.insert(key.to_owned(), value);
        self
    }
}
