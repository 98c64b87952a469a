//! Supervised next-token training, which makes base models from worked solutions and fine-tunes on given texts.

mod config;
mod fresh;
mod texts;

pub use config::{LossOn, PretrainConfig, Start};
pub use fresh::export_policy;
pub use texts::TextsSpec;

use crate::config::PlanError;
use crate::error::{Error, Result};
use crate::learner::Learner;
use crate::loaded_model::LoadedModel;
use crate::rollout::held_out_accuracy;
use crate::run::{Counters, Reopening, Run, is_due};
use crate::run_memory::SamplingMemory;
use crate::task::{Programs, Task};
use stapo_core::batch::pack_in_order;
use stapo_core::record::{Extra, Identity, PretrainMetrics, SCHEMA, StopReason, Writer};
use stapo_model::Device;
use stapo_model::decoder::{HeadOptions, PackedBatch, Pass, Recompute};
use stapo_model::optimizer::Update;
use std::path::Path;
use std::time::Instant;
use texts::{Example, Texts};

/// Observes a pretraining run step by step, and may end the run.
pub trait WatchPretrain {
    fn stepped(&mut self, metrics: &PretrainMetrics);
    /// Called after every step; true saves and ends the run.
    fn wants_stop(&mut self) -> bool;
    /// Why the observer ended the run, such as the name of a signal.
    fn stop_reason(&self) -> String {
        "asked to stop".to_string()
    }
}

/// Checkpoints that a pretraining run keeps.
const KEPT_CHECKPOINTS: usize = 2;

/// The state of a pretraining run.
pub struct Pretrainer {
    pub learner: Learner,
    /// The task of the held-out evaluation.
    pub task: Option<Task>,
    texts: Texts,
    pass: Pass,
}

impl Pretrainer {
    /// The state before the first step. A fresh model is written to the folder `start` first.
    pub fn new(config: &PretrainConfig, start: &Path, device: &Device, programs: Programs) -> Result<Self> {
        let task = config.evaluation_task()?.map(|task| Task::open_with(&task, programs)).transpose()?;
        let model = match &config.start {
            Start::Fresh(shape) => {
                fresh::write(start, shape, config.seed, device)?;
                LoadedModel::open_path(start, device)?
            }
            Start::Path { path } => LoadedModel::open_path(Path::new(path), device)?,
        };
        let texts = Texts::open(&config.texts)?;
        let learner = Learner::new(model, config.optimizer())?;
        let pass = Pass::training(&learner.model.policy, Recompute::Nothing)?;
        Ok(Self { learner, task, texts, pass })
    }

    /// Writes a checkpoint and the manifest.
    pub fn save(&self, run: &mut Run) -> Result<()> {
        self.learner.save(run, KEPT_CHECKPOINTS)
    }

    /// One optimizer step over the next examples, until these have `batch_tokens` tokens.
    pub fn step(&mut self, config: &PretrainConfig) -> Result<PretrainMetrics> {
        let start = Instant::now();
        let sequences = self.next_sequences(config)?;
        let lengths: Vec<usize> = sequences.iter().map(|(tokens, _)| tokens.len()).collect();
        let learner = &mut self.learner;
        let mut loss = 0.0;
        let mut entropy = 0.0;
        let mut n_scored = 0usize;
        for microbatch in pack_in_order(&lengths, config.microbatch_tokens)? {
            let mut batch = PackedBatch::new();
            for &idx in &microbatch.sequences {
                batch.push(&sequences[idx].0, sequences[idx].1);
            }
            let scores = self.pass.forward(&learner.model.policy, &batch, HeadOptions::default())?;
            let n = scores.logp.len();
            loss -= scores.logp.iter().map(|&logp| f64::from(logp)).sum::<f64>();
            entropy += scores.entropy.iter().map(|&entropy| f64::from(entropy)).sum::<f64>();
            n_scored += n;
            let (d_logp, d_entropy) = (vec![-1.0; n], vec![0.0; n]);
            self.pass.backward(&learner.model.policy, &d_logp, &d_entropy, &mut learner.gradients)?;
        }
        let step = learner.counters.step + 1;
        let learning_rate = config.learning_rate * config.schedule.factor(learner.counters.n_updates);
        let scale = 1.0 / n_scored.max(1) as f64;
        let update = Update { lr: learning_rate, scale, max_norm: config.max_gradient_norm };
        let gradient_norm =
            learner.step(update).map_err(|source| Error::Gradient { step, microbatch: None, source })?;
        let position = learner.counters.position + sequences.len() as u64;
        learner.counters = Counters { step, position, ..learner.counters };
        let n_tokens: usize = lengths.iter().sum();
        Ok(PretrainMetrics {
            schema: SCHEMA,
            step,
            loss: loss * scale,
            entropy_mean: entropy * scale,
            n_tokens,
            n_scored,
            learning_rate,
            gradient_norm,
            eval_accuracy: None,
            tokens_per_second: n_tokens as f64 / start.elapsed().as_secs_f64().max(1e-9),
            state_sha256: None,
            extra: Extra::new(),
        })
    }

    /// The next token sequences, each with the number of leading tokens that have no loss.
    fn next_sequences(&self, config: &PretrainConfig) -> Result<Vec<(Vec<u32>, usize)>> {
        let tokenizer = self.learner.model.tokenizer()?;
        let mut sequences = Vec::new();
        let mut n_tokens = 0;
        while n_tokens < config.batch_tokens {
            let position = self.learner.counters.position + sequences.len() as u64;
            let Example { prompt, response } = self.texts.example(config.seed, position)?;
            let mut tokens = tokenizer.encode(&prompt)?;
            let n_prompt = tokens.len().max(1);
            tokens.extend(tokenizer.encode(&response)?);
            tokens.extend(self.learner.model.stops.first());
            if tokens.len() < 2 || tokens.len() > config.microbatch_tokens {
                return Err(Error::BadExample {
                    position,
                    n_tokens: tokens.len(),
                    limit: config.microbatch_tokens,
                });
            }
            n_tokens += tokens.len();
            let n_given = match config.loss_on {
                LossOn::Response => n_prompt,
                LossOn::Everything => 1,
            };
            sequences.push((tokens, n_given));
        }
        Ok(sequences)
    }
}

/// Trains from the pretrainer's step to the config's last step, and records how the run ended.
pub fn pretrain(
    config: &PretrainConfig,
    run: &mut Run,
    pretrainer: &mut Pretrainer,
    watch: &mut dyn WatchPretrain,
) -> Result<()> {
    let outcome = pretrain_steps(config, run, pretrainer, watch);
    let is_done = pretrainer.learner.counters.step >= config.steps;
    // Where the event cannot be written, the caller learns of the error that ended the run.
    let _ = match &outcome {
        Ok(()) if is_done => run.record_stop(StopReason::Done, ""),
        Ok(()) => run.record_stop(StopReason::Signal, &watch.stop_reason()),
        Err(error) => run.record_stop(StopReason::Error, &error.to_string()),
    };
    outcome
}

fn pretrain_steps(
    config: &PretrainConfig,
    run: &mut Run,
    pretrainer: &mut Pretrainer,
    watch: &mut dyn WatchPretrain,
) -> Result<()> {
    let mut memory = SamplingMemory::small();
    pretrainer.save(run)?;
    while pretrainer.learner.counters.step < config.steps {
        let mut metrics = pretrainer.step(config)?;
        let step = metrics.step;
        let is_last = step == config.steps;
        let is_saved = is_last || is_due(step, config.checkpoint_every_steps);
        let is_evaluated = is_last || is_due(step, config.evaluation_every_steps);
        if is_saved || is_evaluated {
            pretrainer.learner.check_finite()?;
        }
        if let Some(task) = pretrainer.task.as_ref().filter(|_| is_evaluated) {
            let plan = config.evaluation_plan()?;
            let model = &pretrainer.learner.model;
            metrics.eval_accuracy = Some(held_out_accuracy(model, &mut memory, task, &plan, step)?);
        }
        metrics.state_sha256 = is_saved.then(|| pretrainer.learner.state_hash());
        run.add_metrics(&metrics)?;
        watch.stepped(&metrics);
        let is_stopped = watch.wants_stop();
        if is_stopped || is_saved {
            pretrainer.save(run)?;
        }
        if is_stopped {
            break;
        }
    }
    Ok(())
}

/// An interrupted run that has been locked and compared; nothing in its folder has changed.
pub struct InterruptedPretraining {
    pub config: PretrainConfig,
    pub reopening: Reopening,
    identity: Identity,
}

impl InterruptedPretraining {
    /// Opens a run to go on with `set` applied to its config. `identity` hashes the files that a config names. What
    /// changed since the checkpoint is refused by name, unless changes are accepted.
    pub fn open(
        folder: &Path,
        set: &[String],
        accept_changes: bool,
        identity: impl FnOnce(&PretrainConfig) -> Result<Identity>,
    ) -> Result<Self> {
        let read = |text: &str, set: &[String]| -> Result<PretrainConfig> {
            Ok(PretrainConfig::from_toml(text, set.iter().map(String::as_str)).map_err(PlanError::from)?)
        };
        let complete = |text: &str| Ok(read(text, &[])?.to_toml());
        let mut reopening = Reopening::open(folder, &complete)?;
        let config = read(&reopening.plan_text, set)?;
        if !set.is_empty() {
            reopening.set(config.to_toml(), &complete)?;
        }
        let identity = identity(&config)?;
        reopening.compare(&identity, accept_changes)?;
        reopening.check_steps(config.steps)?;
        Ok(Self { config, reopening, identity })
    }

    /// The run and its state at the newest good checkpoint, or at the start where there is none yet. A fresh model is
    /// written to the folder `start` first.
    pub fn resume(
        self,
        writer: &Writer,
        start: &Path,
        device: &Device,
        programs: Programs,
    ) -> Result<(PretrainConfig, Run, Pretrainer)> {
        let InterruptedPretraining { config, reopening, identity } = self;
        let mut pretrainer = Pretrainer::new(&config, start, device, programs)?;
        if let Some(checkpoint) = &reopening.checkpoint {
            pretrainer.learner.restore(checkpoint)?;
        }
        let run = reopening.commit::<PretrainMetrics>(identity, writer)?;
        Ok((config, run, pretrainer))
    }
}
