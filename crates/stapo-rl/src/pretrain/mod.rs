//! Supervised next-token training: makes base models from worked solutions, and fine-tunes on given texts.

mod config;
mod fresh;
mod texts;

pub use config::{LossOn, PretrainConfig, Start};
pub use fresh::export_policy;
pub use texts::TextsSpec;

use crate::error::{Error, Result};
use crate::policy::Student;
use crate::run::{Checkpoint, Counters, Run, is_due, state_hash};
use crate::task::Task;
use stapo_core::batch::pack_in_order;
use stapo_core::record::{Extra, PretrainMetrics, SCHEMA};
use stapo_model::Device;
use stapo_model::decoder::{Batch, Gradients, Pass, Reading};
use stapo_model::optimizer::{Optimizer, Update};
use std::path::Path;
use std::time::Instant;
use texts::{Example, Texts};

/// Whoever looks at a pretraining run, and may end it.
pub trait WatchPretrain {
    fn stepped(&mut self, metrics: &PretrainMetrics);
    /// Asked after every step; the run is saved when this says true.
    fn wants_stop(&mut self) -> bool;
}

/// Everything that changes in a pretraining run.
pub struct Pretrainer {
    pub student: Student,
    texts: Texts,
    optimizer: Optimizer,
    gradients: Gradients,
    pass: Pass,
    pub counters: Counters,
}

impl Pretrainer {
    /// The state before the first step; a fresh model is written to `start` first.
    pub fn new(config: &PretrainConfig, start: &Path, device: &Device) -> Result<Self> {
        let student = match &config.start {
            Start::Fresh(shape) => {
                fresh::write(start, shape, config.seed, device)?;
                Student::open_path(start, device)?
            }
            Start::Path { path } => Student::open_path(Path::new(path), device)?,
        };
        Ok(Self {
            texts: Texts::open(&config.texts)?,
            optimizer: Optimizer::new(&student.policy, config.optimizer())?,
            gradients: Gradients::zeros(&student.policy)?,
            pass: Pass::new(&student.policy, stapo_model::decoder::Keep::Everything)?,
            student,
            counters: Counters::default(),
        })
    }

    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.restore(&mut self.student.policy, &mut self.optimizer)?;
        self.counters = checkpoint.counters;
        Ok(())
    }

    pub fn state_hash(&self) -> String {
        state_hash(self.counters, &self.student.policy, &self.optimizer)
    }

    pub fn save(&self, run: &Run) -> Result<()> {
        Checkpoint::save(run.folder(), self.counters, &self.student.policy, &self.optimizer, 2)?;
        run.write_manifest()
    }

    /// One optimizer step over the next examples, as many as fill `batch_tokens`.
    pub fn step(&mut self, config: &PretrainConfig) -> Result<PretrainMetrics> {
        let start = Instant::now();
        let sequences = self.next_sequences(config)?;
        let lengths: Vec<usize> = sequences.iter().map(|(tokens, _)| tokens.len()).collect();
        let (mut loss, mut n_scored, mut entropy) = (0.0, 0usize, 0.0);
        for microbatch in pack_in_order(&lengths, config.microbatch_tokens)? {
            let mut batch = Batch::new();
            for &idx in &microbatch.sequences {
                batch.push(&sequences[idx].0, sequences[idx].1);
            }
            let scores = self.pass.forward(&self.student.policy, &batch, Reading::default())?;
            let n = scores.logp.len();
            loss -= scores.logp.iter().map(|&logp| f64::from(logp)).sum::<f64>();
            entropy += scores.entropy.iter().map(|&entropy| f64::from(entropy)).sum::<f64>();
            n_scored += n;
            self.pass.backward(&self.student.policy, &vec![-1.0; n], &vec![0.0; n], &mut self.gradients)?;
        }
        let step = self.counters.step + 1;
        let learning_rate = config.learning_rate * config.schedule.factor(self.counters.n_updates);
        let scale = 1.0 / n_scored.max(1) as f64;
        let update = Update { lr: learning_rate, scale, max_norm: config.max_gradient_norm };
        let gradient_norm = self
            .optimizer
            .step(&mut self.student.policy, &mut self.gradients, update)
            .map_err(|source| Error::Gradient { step, microbatch: None, source })?;
        let position = self.counters.position + sequences.len() as u64;
        self.counters = Counters { step, position, n_updates: self.counters.n_updates + 1 };
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
            extra: Extra::new(),
        })
    }

    /// Token sequences with the number of tokens that are given, not learned.
    fn next_sequences(&self, config: &PretrainConfig) -> Result<Vec<(Vec<u32>, usize)>> {
        let mut sequences = Vec::new();
        let mut n_tokens = 0;
        while n_tokens < config.batch_tokens {
            let position = self.counters.position + sequences.len() as u64;
            let Example { prompt, response } = self.texts.example(config.seed, position)?;
            let mut tokens = self.student.tokenizer.encode(&prompt)?;
            let n_prompt = tokens.len().max(1);
            tokens.extend(self.student.tokenizer.encode(&response)?);
            tokens.extend(self.student.stops.first());
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

/// Trains from where `pretrainer` is to the end of the config.
pub fn pretrain(
    config: &PretrainConfig,
    run: &mut Run,
    pretrainer: &mut Pretrainer,
    watch: &mut dyn WatchPretrain,
) -> Result<()> {
    let task = config.evaluation_task()?.map(|task| Task::open(&task)).transpose()?;
    while pretrainer.counters.step < config.steps {
        let mut metrics = pretrainer.step(config)?;
        let (step, is_last) = (metrics.step, metrics.step == config.steps);
        if let Some(task) = task.as_ref().filter(|_| is_last || is_due(step, config.evaluation_every_steps)) {
            let plan = config.evaluation_plan()?;
            metrics.eval_accuracy =
                Some(crate::rollout::held_out_accuracy(&pretrainer.student, task, &plan, step)?);
        }
        run.add_metrics(&metrics)?;
        watch.stepped(&metrics);
        let stops = watch.wants_stop();
        if stops || is_last || is_due(step, config.checkpoint_every_steps) {
            run.add_state_hash(step, pretrainer.state_hash());
            pretrainer.save(run)?;
        }
        if stops {
            break;
        }
    }
    Ok(())
}
