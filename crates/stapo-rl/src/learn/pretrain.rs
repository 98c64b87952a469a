//! Supervised next-token training, which makes base models from worked solutions and fine-tunes on given texts.

mod config;
mod file_rows;
mod file_texts;
mod fresh;
mod judged;
mod preference;
mod ranking;
mod recorded;
mod reference;
mod rows;
mod sequence;
mod spelling;
mod texts;

pub use config::{LossOn, PretrainConfig, Start};
pub use file_rows::FileRows;
pub use file_texts::FileTexts;
pub use fresh::export_policy;
pub use recorded::{RecordedTexts, Which};
pub use texts::TextsSpec;

use crate::error::{Error, Result};
use crate::learn::learner::Learner;
use crate::learn::memory::SamplingMemory;
use crate::learn::scoring::{Sequence, packed};
use crate::plan::config::PlanError;
use crate::policy::loaded::LoadedModel;
use crate::ranks::Solo;
use crate::reward::Programs;
use crate::rollout::{RecordedAnswers, Sampler};
use crate::run::meter::Meter;
use crate::run::{Abandon, Counters, Reopening, Run, RunKind, is_due};
use crate::tasks::prompting::fit_prompts;
use crate::tasks::{DataPath, Task};
use preference::{Reference, check_texts};
use sequence::TextSequence;
use stapo_core::batch::{Packing, pack_in_order};
use stapo_core::record::{
    Best, EventKind, Extra, Identity, PreferenceMetrics, PretrainMetrics, RankingMetrics, SCHEMA, StopReason,
    Writer,
};
use stapo_model::Device;
use stapo_model::decoder::{HeadOptions, Pass};
use stapo_model::optimizer::{StepError, Update};
use std::path::Path;
use std::time::Instant;
use texts::Texts;

/// Observes a pretraining run step by step, and may end the run.
pub trait WatchPretrain {
    fn stepped(&mut self, metrics: &PretrainMetrics);
    fn warned(&mut self, text: &str);
    /// Called after every step; true saves and ends the run.
    fn wants_stop(&mut self) -> bool;
    /// Why the observer ended the run, such as the name of a signal.
    fn stop_reason(&self) -> String {
        "asked to stop".to_string()
    }
}

/// The state of a pretraining run.
pub struct Pretrainer {
    pub learner: Learner,
    /// The task of the held-out evaluation.
    pub task: Option<Task>,
    /// What was found about the data at the start.
    warnings: Vec<String>,
    texts: Texts,
    pass: Pass,
    /// The frozen reference of a preference.
    reference: Reference,
}

/// What forward and backward over the examples of one optimizer step gave. Sums and gradients are un-normalised.
struct LearnedBatch {
    loss: f64,
    entropy_mean: f64,
    n_tokens: usize,
    n_scored: usize,
    n_examples: u64,
    /// What turns sums into means.
    scale: f64,
    preference: Option<PreferenceMetrics>,
    reward_model: Option<RankingMetrics>,
}

impl Pretrainer {
    /// The state before the first step. A fresh model is written to the folder `start` first.
    pub fn new(config: &PretrainConfig, start: &Path, device: &Device, programs: Programs) -> Result<Self> {
        config.check()?;
        let mut task = config.evaluation_task()?.map(|task| Task::open_with(&task, programs)).transpose()?;
        let mut model = match (&config.model, config.model.source()) {
            (Start::Fresh(shape), _) => {
                fresh::write(start, shape, config.seed, device)?;
                LoadedModel::open_path(start, device)?
            }
            (_, Some(source)) => {
                let open = match config.reward_model {
                    Some(_) => LoadedModel::open_to_rank,
                    None => LoadedModel::open_to_train,
                };
                open(&source.find()?, config.lora.as_ref(), config.seed, device)?
            }
            (_, None) => unreachable!("only a fresh model has no source"),
        };
        let mut warnings = Vec::new();
        let mut longest_asked = 0;
        if let Some(task) = &mut task {
            let plan = config.evaluation_plan()?;
            longest_asked = plan.longest_sequence();
            task.load_model_judges(device)?;
            warnings.extend(fit_prompts(&plan, &model.prompting(&plan.style)?, task)?);
        }
        model.policy.fit_longest(config.update.microbatch_tokens);
        let max_tokens = config.update.microbatch_tokens.min(model.policy.config().position_limit());
        let texts = Texts::open(&config.data, config.row_kind(), &model, max_tokens)?;
        // The factors are those of the sequences that there are, as for every reader of the model.
        model.policy.fit_longest(texts.longest().unwrap_or(max_tokens).max(longest_asked));
        check_texts(config, texts.file())?;
        warnings.extend(texts.warnings());
        let learner = Learner::new(model, config.optimizer())?;
        let pass = Pass::training(&learner.model.policy, config.update.recompute)?;
        Ok(Self { learner, task, warnings, texts, pass, reference: Reference::None })
    }

    /// The first file whose rows have answers: prompts with responses, or conversations.
    pub fn file_with_answers(&self) -> Option<&DataPath> {
        self.texts.file_with_answers()
    }

    /// The steps of a run: as given, or those of its epochs.
    pub fn steps(&self, config: &PretrainConfig) -> Result<u64> {
        let Some(epochs) = config.epochs else { return Ok(config.steps) };
        let Some(file) = self.texts.file() else {
            return Err(Error::Misfit {
                key: "epochs",
                problem: format!("{epochs}, but the texts are not one file"),
                remedy: "give steps",
            });
        };
        let update = &config.update;
        Ok(file.steps_of_epochs(config.seed, epochs, update.batch_rows, update.batch_tokens))
    }

    /// Writes a checkpoint and the manifest.
    pub fn save(&mut self, config: &PretrainConfig, run: &mut Run) -> Result<()> {
        self.learner.save(run, config.record.keeping())
    }

    /// The file that is learned from, where the texts are one file.
    pub fn file(&self) -> Option<&FileRows> {
        self.texts.file()
    }

    /// Fills in the loss of held-out rows, and the accuracy of a preference or of a reward model.
    fn evaluate_held_out(&mut self, config: &PretrainConfig, metrics: &mut PretrainMetrics) -> Result<()> {
        if let Some(spec) = &config.reward_model {
            let held_out = self.held_out_pairs(config, *spec)?;
            metrics.eval_loss = held_out.map(|(loss, _)| loss);
            if let Some(ranking) = &mut metrics.reward_model {
                ranking.eval = held_out.map(|(_, pairs)| pairs);
            }
            return Ok(());
        }
        let Some(spec) = &config.preference else {
            metrics.eval_loss = self.held_out_loss(config)?;
            return Ok(());
        };
        if let Some((loss, accuracy)) = self.held_out_preference(config, spec)? {
            metrics.eval_loss = Some(loss);
            if let Some(preference) = &mut metrics.preference {
                preference.eval_accuracy = accuracy;
            }
        }
        Ok(())
    }

    /// The mean negative log-prob of the learned tokens of held-out rows; `None` without such rows.
    fn held_out_loss(&mut self, config: &PretrainConfig) -> Result<Option<f64>> {
        let mut sequences = self.texts.held_out(&self.learner.model)?;
        for sequence in &mut sequences {
            mark_learned(sequence, config.loss_on);
        }
        let lengths: Vec<usize> = sequences.iter().map(|sequence| sequence.tokens.len()).collect();
        let options = HeadOptions { has_entropy_gradient: false, ..HeadOptions::default() };
        let (mut loss, mut n_scored) = (0.0, 0);
        for microbatch in pack_in_order(&lengths, config.update.microbatch_tokens)? {
            let chosen: Vec<Sequence> =
                microbatch.sequences.iter().map(|&idx| Sequence::from(&sequences[idx])).collect();
            let batch = packed(&chosen, Packing::whole(config.update.microbatch_tokens));
            let scores = self.pass.forward(&self.learner.model.policy, &batch, options)?;
            loss -= scores.logp.iter().map(|&logp| f64::from(logp)).sum::<f64>();
            n_scored += batch.n_scored();
        }
        Ok((n_scored > 0).then(|| loss / n_scored as f64))
    }

    /// One optimizer step over the next examples.
    pub fn step(&mut self, config: &PretrainConfig) -> Result<PretrainMetrics> {
        let start = Instant::now();
        let batch = match (&config.preference, &config.reward_model) {
            (Some(spec), _) => self.learn_preferences(config, spec)?,
            (None, Some(spec)) => self.learn_ranking(config, *spec)?,
            (None, None) => self.learn_texts(config)?,
        };
        let learner = &mut self.learner;
        let step = learner.counters.step + 1;
        let learning_rate = config.update.learning_rate
            * config.update.schedule.factor(learner.counters.n_updates, config.steps);
        let LearnedBatch { n_tokens, n_scored, scale, .. } = batch;
        let update = Update { lr: learning_rate, scale, max_norm: config.update.max_gradient_norm };
        let gradient_norm = learner.step(update).map_err(|error| match error {
            StepError::Gradient(source) => Error::Gradient { step, microbatch: None, source },
            StepError::Rank(lost) => lost.into(),
        })?;
        let position = learner.counters.position + batch.n_examples;
        learner.counters = Counters { step, position, ..learner.counters };
        Ok(PretrainMetrics {
            schema: SCHEMA,
            step,
            loss: batch.loss * scale,
            entropy_mean: batch.entropy_mean,
            n_tokens,
            n_scored,
            learning_rate,
            gradient_norm,
            eval_accuracy: None,
            eval_loss: None,
            tokens_per_second: n_tokens as f64 / start.elapsed().as_secs_f64().max(1e-9),
            preference: batch.preference,
            reward_model: batch.reward_model,
            state_sha256: None,
            extra: Extra::new(),
        })
    }

    /// Forward and backward of next-token training.
    fn learn_texts(&mut self, config: &PretrainConfig) -> Result<LearnedBatch> {
        let (sequences, n_examples) = self.next_sequences(config)?;
        let lengths: Vec<usize> = sequences.iter().map(|sequence| sequence.tokens.len()).collect();
        let learner = &mut self.learner;
        let options = HeadOptions { has_entropy_gradient: false, ..HeadOptions::default() };
        let mut loss = 0.0;
        let mut entropy = 0.0;
        let mut n_scored = 0usize;
        for microbatch in pack_in_order(&lengths, config.update.microbatch_tokens)? {
            let chosen: Vec<Sequence> =
                microbatch.sequences.iter().map(|&idx| Sequence::from(&sequences[idx])).collect();
            let batch = packed(&chosen, Packing::whole(config.update.microbatch_tokens));
            let scores = self.pass.forward(&learner.model.policy, &batch, options)?;
            let sum = |values: &[f32]| values.iter().map(|&value| f64::from(value)).sum::<f64>();
            loss -= sum(&scores.logp);
            entropy += sum(&scores.entropy);
            n_scored += batch.n_scored();
            let (d_logp, d_entropy) = (vec![-1.0; batch.n_scored()], vec![0.0; batch.n_scored()]);
            learner.backward(&mut self.pass, Some((&d_logp, &d_entropy)), 1)?;
        }
        let scale = 1.0 / n_scored.max(1) as f64;
        let (entropy_mean, n_tokens) = (entropy * scale, lengths.iter().sum());
        Ok(LearnedBatch {
            loss,
            entropy_mean,
            n_tokens,
            n_scored,
            n_examples,
            scale,
            preference: None,
            reward_model: None,
        })
    }

    /// The sequences of the next examples, and the number of examples.
    fn next_sequences(&self, config: &PretrainConfig) -> Result<(Vec<TextSequence>, u64)> {
        let mut sequences: Vec<TextSequence> = Vec::new();
        let mut n_tokens = 0;
        let mut n_examples = 0;
        let is_full = |n_examples: u64, n_tokens: usize| match config.update.batch_rows {
            Some(batch_rows) => n_examples >= batch_rows as u64,
            None => n_tokens >= config.update.batch_tokens,
        };
        while !is_full(n_examples, n_tokens) {
            let position = self.learner.counters.position + n_examples;
            n_examples += 1;
            for mut sequence in self.texts.sequences(&self.learner.model, config.seed, position)? {
                let limit = config.update.microbatch_tokens;
                let n = sequence.tokens.len();
                if n < 2 || n > limit {
                    return Err(Error::BadExample { position, n_tokens: n, limit });
                }
                mark_learned(&mut sequence, config.loss_on);
                n_tokens += n;
                sequences.push(sequence);
            }
        }
        Ok((sequences, n_examples))
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
    // After an error too the checkpoint that is being written is completed.
    let settled = run.settle();
    let outcome = outcome.and(settled);
    let is_done = pretrainer.learner.counters.step >= config.steps;
    // Where the event cannot be written, the caller learns of the error that ended the run.
    let _ = match &outcome {
        Ok(()) if is_done => run.record_stop(StopReason::Done, ""),
        Ok(()) => run.record_stop(StopReason::Signal, &watch.stop_reason()),
        Err(error) => run.record_stop(StopReason::Error, &error.to_string()),
    };
    outcome
}

/// Marks the tokens that are learned. Nothing predicts the first token of a sequence.
fn mark_learned(sequence: &mut TextSequence, on: LossOn) {
    if on == LossOn::Everything {
        sequence.is_learned.fill(true);
    }
    sequence.is_learned[0] = false;
}

fn pretrain_steps(
    config: &PretrainConfig,
    run: &mut Run,
    pretrainer: &mut Pretrainer,
    watch: &mut dyn WatchPretrain,
) -> Result<()> {
    let mut memory = SamplingMemory::small();
    for text in &pretrainer.warnings {
        run.record(EventKind::Warning, text)?;
        watch.warned(text);
    }
    let history = Run::read_metrics::<PretrainMetrics>(run.folder())?;
    run.set_best(history.iter().fold(None, better));
    pretrainer.open_reference(config, run.folder())?;
    pretrainer.save(config, run)?;
    while pretrainer.learner.counters.step < config.steps {
        let mut metrics = pretrainer.step(config)?;
        let step = metrics.step;
        let is_last = step == config.steps;
        let is_saved = is_last || is_due(step, config.record.checkpoint_every_steps);
        let is_evaluated = is_last || is_due(step, config.evaluation.every_steps);
        if is_saved || is_evaluated {
            pretrainer.learner.check_finite()?;
        }
        if let Some(task) = pretrainer.task.as_ref().filter(|_| is_evaluated) {
            let plan = config.evaluation_plan()?;
            let model = &pretrainer.learner.model;
            let meter = Meter::default();
            let mut sampler = Sampler {
                model,
                memory: &mut memory,
                task,
                plan: &plan,
                counters: pretrainer.learner.counters,
                ranks: &Solo,
                recorded: &RecordedAnswers::default(),
                meter: &meter,
                abandon: &Abandon::default(),
            };
            metrics.eval_accuracy = sampler.held_out_accuracy()?.0;
        }
        if is_evaluated {
            pretrainer.evaluate_held_out(config, &mut metrics)?;
        }
        let best = better(run.best().cloned(), &metrics);
        let is_saved = is_saved || best.as_ref().is_some_and(|best| best.step == step);
        run.set_best(best);
        metrics.state_sha256 = is_saved.then(|| pretrainer.learner.state_hash()).transpose()?;
        run.add_metrics(&metrics)?;
        run.settle_if_landed()?;
        watch.stepped(&metrics);
        let is_stopped = watch.wants_stop();
        if is_stopped || is_saved {
            pretrainer.save(config, run)?;
        }
        if is_stopped {
            break;
        }
    }
    Ok(())
}

/// The better of the best held-out loss so far and that of a step.
fn better(best: Option<Best>, metrics: &PretrainMetrics) -> Option<Best> {
    let Some(value) = metrics.eval_loss else { return best };
    if best.as_ref().is_some_and(|best| best.value <= value) {
        return best;
    }
    let metric = "held-out loss".to_string();
    Some(Best { schema: SCHEMA, step: metrics.step, metric, value, extra: Extra::new() })
}

/// An interrupted run that has been locked and compared; nothing in its folder has changed.
pub struct InterruptedPretraining {
    pub config: PretrainConfig,
    pub reopening: Reopening,
    identity: Identity,
}

impl InterruptedPretraining {
    /// Opens a run to continue with `set` applied to its config. `identity` hashes the files that a config names. What
    /// changed since the checkpoint is refused by name, unless changes are accepted.
    pub fn open(
        folder: &Path,
        set: &[String],
        accept_changes: bool,
        identity: impl FnOnce(&PretrainConfig) -> Result<Identity>,
    ) -> Result<Self> {
        RunKind::Supervised.check(folder)?;
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
        reopening.check_steps(config.steps, config.update.schedule, |steps| steps)?;
        Ok(Self { config, reopening, identity })
    }

    /// The run and its state at the newest good checkpoint, or at the start if there is none yet. A fresh model is
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

#[cfg(test)]
mod tests;
