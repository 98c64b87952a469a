//! Plans of supervised runs: `stapo sft`, `prefer`, `rm` and `pretrain`.

use super::planned::{self, Here};
use super::text::{line, seconds};
use super::{Args, text};
use crate::shared::clock::span_of_seconds;
use crate::shared::run_folder;
use crate::shared::units::{grouped, size};
use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};
use stapo_core::settings::{RawConfig, parse};
use stapo_rl::learn::pretrain::{PretrainConfig, Pretrainer};
use stapo_rl::model_files::ModelConfig;
use stapo_rl::plan::config::{ModelSource, PlanError};
use stapo_rl::plan::estimate::{Machine, RowCounts, SupervisedPrediction, SupervisedShape};
use stapo_rl::plan::memory::MemoryPart;
use stapo_rl::run::{RunKind, plan_text};
use stapo_rl::untrusted::read_text;
use std::path::Path;
use std::process::ExitCode;

/// Bytes of a token where no tokenizer has counted them.
const TOKEN_BYTES: f64 = 4.0;
/// Tokens of a row that were not counted.
const ROW_TOKENS: f64 = 512.0;

/// The text of a config of a supervised run, or of the plan of one; `None` for any other.
pub fn config_text(config: Option<&Path>) -> Result<Option<String>> {
    let Some(path) = config else { return Ok(None) };
    let text = if path.is_dir() { plan_text(path)? } else { read_text(path).unwrap_or_default() };
    let is_supervised = parse(&text).is_ok_and(|given| RunKind::of_plan(&given) == RunKind::Supervised);
    Ok(is_supervised.then_some(text))
}

pub fn run(args: &Args, text: &str, set: &[String]) -> Result<ExitCode> {
    let config = read(args, text, set)?;
    let mut assumed = Vec::new();
    let (name, model) = shape(args, &config, &mut assumed)?;
    let named = args.machine.as_deref().and_then(Machine::by_name);
    let here = Here::look(config.device());
    let machine = named.unwrap_or_else(|| here.machine(config.device(), args.threads, &mut assumed));
    let memory_bytes =
        if named.is_some() { machine.memory_bytes } else { here.memory_bytes.or(machine.memory_bytes) };
    let rows = rows(args, &config, &mut assumed)?;
    let shape = SupervisedShape { config: &config, model: &model, machine: &machine, rows };
    let (memory, prediction) = (shape.memory()?, shape.simulate());
    if config.reward_model.is_none() {
        assumed.push("every token has a loss, which is the most".to_string());
    }
    let planned = SupervisedPlan { config: &config, name, shape, memory, memory_bytes, prediction, assumed };
    if args.json {
        println!("{:#}", planned.object());
    } else {
        planned.print();
    }
    Ok(if planned.fits() == Some(false) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// What a supervised run that is about to start takes, on one line.
pub fn announce(config: &PretrainConfig, pretrainer: &Pretrainer, threads: Option<usize>) -> Result<()> {
    let Some(file) = pretrainer.file() else { return Ok(()) };
    let (n_rows, n_tokens) = file.size();
    let here = Here::look(config.device());
    let machine = here.machine(config.device(), threads, &mut Vec::new());
    let rows = RowCounts {
        n_learned: n_rows as u64,
        n_held_out: file.n_held_out() as u64,
        tokens_mean: n_tokens as f64 / n_rows.max(1) as f64,
    };
    let model = pretrainer.learner.model.policy.config();
    let shape = SupervisedShape { config, model, machine: &machine, rows };
    let total = sum(&shape.memory()?);
    let of_all = here.memory_bytes.map_or(String::new(), |bytes| format!(" of {}", size(bytes)));
    let prediction = shape.simulate();
    eprintln!(
        "plan: about {} for {} steps of {} tokens, by the rates of {}; {} of memory{of_all}",
        span_of_seconds(prediction.seconds()),
        grouped(prediction.n_steps),
        grouped(prediction.step_tokens.round() as u64),
        machine.name,
        size(total)
    );
    Ok(())
}

fn sum(parts: &[MemoryPart]) -> u64 {
    parts.iter().map(|part| part.bytes).sum()
}

/// The config over the defaults of its command, which its keys reveal.
fn read(args: &Args, text: &str, set: &[String]) -> Result<PretrainConfig> {
    let file = run_folder::file_name(args.config.as_deref());
    let placed = |error: PlanError, raw: Option<&RawConfig>| run_folder::placed(error, &file, raw);
    let raw =
        RawConfig::new(text, set.iter().map(String::as_str)).map_err(|error| placed(error.into(), None))?;
    let has = |key: &str| raw.table.contains_key(key);
    let defaults = if has("preference") {
        PretrainConfig::preferring()
    } else if has("reward_model") {
        PretrainConfig::ranking()
    } else {
        PretrainConfig::fine_tuning()
    };
    let read = PretrainConfig::with_defaults(&defaults, &raw).map_err(PlanError::from);
    read.and_then(|config| config.check().map(|()| config)).map_err(|error| placed(error, Some(&raw)))
}

/// The name and the shape of the model that is trained.
fn shape(args: &Args, config: &PretrainConfig, assumed: &mut Vec<String>) -> Result<(String, ModelConfig)> {
    let source = args.model.as_deref().map(ModelSource::named).or_else(|| config.model.source());
    let Some(source) = source else {
        bail!(
            "config.model: fresh, whose shape is drawn when the run starts\nhint: --model names a shape to plan for"
        );
    };
    let (model, is_here) = planned::shape(&source)?;
    if !is_here && args.model.is_none() {
        assumed.push(format!("the shape of {source}, whose files are not here, by its name"));
    }
    let is_new_head = config.reward_model.is_some() && model.score.is_none();
    Ok((source.to_string(), if is_new_head { model.with_score(None) } else { model }))
}

/// The rows of the config's files, where they are here, and what is assumed of their lengths.
fn rows(args: &Args, config: &PretrainConfig, assumed: &mut Vec<String>) -> Result<RowCounts> {
    let counted = match config.count_rows() {
        Ok(counted) => counted,
        Err(_) if config.epochs.is_none() => None,
        Err(error) => {
            return Err(error).context("data\nhint: --set steps=N plans a number of steps without the data");
        }
    };
    let Some((n_rows, n_bytes, held_out_share)) = counted else {
        if config.epochs.is_some() {
            bail!(
                "config.epochs: given, but the rows of the data are not counted\nhint: --set steps=N plans a number of steps"
            );
        }
        let tokens_mean = args.mean_row.map_or(ROW_TOKENS, |tokens| tokens as f64);
        if args.mean_row.is_none() {
            assumed.push(format!("rows of {ROW_TOKENS:.0} tokens; --mean-row N says better"));
        }
        return Ok(RowCounts { n_learned: 0, n_held_out: 0, tokens_mean });
    };
    let by_bytes = n_bytes as f64 / n_rows.max(1) as f64 / TOKEN_BYTES;
    if args.mean_row.is_none() {
        assumed.push(format!(
            "rows of {by_bytes:.0} tokens, {TOKEN_BYTES:.0} bytes of their texts each; --mean-row N says better"
        ));
    }
    let tokens_mean = args.mean_row.map_or(by_bytes.max(2.0), |tokens| tokens as f64);
    let n_held_out = (held_out_share * n_rows as f64).round() as u64;
    Ok(RowCounts { n_learned: n_rows - n_held_out, n_held_out, tokens_mean })
}

/// Everything that is shown.
struct SupervisedPlan<'a> {
    config: &'a PretrainConfig,
    name: String,
    shape: SupervisedShape<'a>,
    memory: Vec<MemoryPart>,
    memory_bytes: Option<u64>,
    prediction: SupervisedPrediction,
    assumed: Vec<String>,
}

impl SupervisedPlan<'_> {
    fn fits(&self) -> Option<bool> {
        planned::fits(sum(&self.memory), self.memory_bytes)
    }

    fn command(&self) -> &'static str {
        match self.config {
            PretrainConfig { preference: Some(_), .. } => "prefer",
            PretrainConfig { reward_model: Some(_), .. } => "rm",
            _ => "sft",
        }
    }

    fn print(&self) {
        let Self { config, shape, prediction, .. } = self;
        line("run", &format!("{}: stapo {}", config.name, self.command()));
        let model = shape.model;
        line(
            "model",
            &format!("{}, {}, {} parameters", self.name, model.family.name(), grouped(model.n_parameters())),
        );
        line("machine", &format!("{}; {}", shape.machine.description, text::rates(shape.machine)));
        let rows = &shape.rows;
        if rows.n_learned > 0 {
            line(
                "data",
                &format!(
                    "{} rows of {:.0} tokens on average, and {} held out",
                    grouped(rows.n_learned),
                    rows.tokens_mean,
                    grouped(rows.n_held_out)
                ),
            );
        }
        for (idx, part) in self.memory.iter().enumerate() {
            line(
                if idx == 0 { "memory" } else { "" },
                &format!("{:<13} {:>10}", part.name, size(part.bytes)),
            );
        }
        let of_all = self.memory_bytes.map_or(String::new(), |bytes| format!(" of {}", size(bytes)));
        line("", &format!("{:<13} {:>10}{of_all}", "together", size(sum(&self.memory))));
        if self.fits() == Some(false) {
            line(
                "",
                "does not fit; a lower update.microbatch_tokens, update.recompute = \"layers\" or [model.lora] helps",
            );
        }
        let total = span_of_seconds(prediction.seconds());
        let tokens = grouped(prediction.step_tokens.round() as u64);
        let steps = grouped(prediction.n_steps);
        line(
            "time",
            &format!(
                "about {total} for {steps} steps of {tokens} tokens, {} a step:",
                seconds(prediction.step_seconds())
            ),
        );
        for phase in prediction.phases.iter().filter(|phase| phase.seconds > 0.0) {
            line("", &format!("{:<13} {:>10}", phase.name, seconds(phase.seconds)));
        }
        if prediction.before > 0.0 {
            line("", &format!("{:<13} {:>10}", "before", seconds(prediction.before)));
        }
        for (idx, text) in self.assumed.iter().enumerate() {
            line(if idx == 0 { "assumed" } else { "" }, text);
        }
    }

    fn object(&self) -> Value {
        let Self { config, shape, prediction, .. } = self;
        let parts: Map<String, Value> =
            self.memory.iter().map(|part| (part.name.to_string(), json!(part.bytes))).collect();
        let phases: Map<String, Value> =
            prediction.phases.iter().map(|phase| (phase.name.to_string(), json!(phase.seconds))).collect();
        json!({
            "name": config.name,
            "command": self.command(),
            "model": self.name,
            "parameters": shape.model.n_parameters(),
            "trained_parameters": shape.n_trained(),
            "steps": prediction.n_steps,
            "step_tokens_mean": prediction.step_tokens,
            "rows": shape.rows.n_learned,
            "rows_held_out": shape.rows.n_held_out,
            "row_tokens_mean": shape.rows.tokens_mean,
            "machine": super::json::of_machine(shape.machine),
            "memory_bytes": parts,
            "memory_bytes_total": sum(&self.memory),
            "memory_bytes_here": self.memory_bytes,
            "fits": self.fits(),
            "time": {
                "is_measured": false,
                "seconds": prediction.seconds(),
                "seconds_before": prediction.before,
                "seconds_per_step": prediction.step_seconds(),
                "phases": phases,
            },
            "assumed": self.assumed,
        })
    }
}
