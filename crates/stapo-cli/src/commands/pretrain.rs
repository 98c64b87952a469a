//! `stapo pretrain`, `sft`, `prefer` and `rm`

mod view;

use crate::commands::plan;
use crate::shared::allow_command::{self, AllowCommand};
use crate::shared::option::threads;
use crate::shared::program::{PROGRAM, writer};
use crate::shared::run_folder::Use;
use crate::shared::{run_folder, stop};
use anyhow::{Context, Result, bail};
use stapo_core::record::{PretrainMetrics, RankingMetrics};
use stapo_core::settings::RawConfig;
use stapo_rl::device::DeviceName;
use stapo_rl::learn::pretrain::{
    FileRows, InterruptedPretraining, PretrainConfig, Pretrainer, export_policy, pretrain,
};
use stapo_rl::model_files::{Existing, ExportOptions, Precision};
use stapo_rl::plan::config::{ModelSource, PlanError};
use stapo_rl::policy::identity;
use stapo_rl::run::{Checkpoint, Run, hash_file};
use stapo_rl::tasks::{TaskSpec, file_kind};
use stapo_rl::untrusted::read_text;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use view::{PretrainView, in_order};

/// Trains a model on whole texts, next token by next token, from scratch or from a model.
///
/// Without a config it trains the built-in base model again: a small Qwen3-shaped model learns worked solutions, some of
/// which are wrong. The trained model ends up in RUN/model, a Hugging Face folder.
#[derive(clap::Args)]
pub struct Args {
    /// A TOML file that names the model, the data and the settings.
    config: Option<PathBuf>,

    /// Changes one value of the config, as in steps=100; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// The run folder; by default runs/TIME-NAME.
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Continues an interrupted run.
    #[arg(long, value_name = "RUN", conflicts_with_all = ["config", "out"])]
    resume: Option<PathBuf>,

    /// Continues although the plan, the texts or the model changed since the run was saved, and records the change.
    #[arg(long, requires = "resume")]
    accept_changes: bool,

    /// Prints metrics as JSON lines on standard output.
    #[arg(long)]
    json: bool,

    /// cpu, cuda or cuda:N, instead of the config's.
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceName>,

    /// Threads on the CPU; all cores by default. The number of threads does not change results.
    #[arg(long, value_parser = threads)]
    threads: Option<usize>,

    #[command(flatten)]
    allow: AllowCommand,
}

/// Fine-tunes a model on given answers: conversations, or prompts with responses.
///
/// Only the assistant's tokens have a loss. Rows are packed without padding. The trained model ends up in RUN/model, a
/// Hugging Face folder that `train`, `eval` and `generate` take.
#[derive(clap::Args)]
#[command(after_help = "Example: stapo sft --model models/Qwen3-0.6B --data answers.jsonl --out runs/sft")]
pub struct SftArgs {
    #[command(flatten)]
    common: Args,

    #[command(flatten)]
    inputs: Inputs,

    /// Learns responses that a run of stapo train recorded, instead of --data; the model is the one that the run started from, unless --model names one.
    #[arg(long, value_name = "RUN", conflicts_with_all = ["data", "resume"])]
    from_run: Option<PathBuf>,

    /// Which of them: all right ones (rejection sampling), or the best of each group (best-of-n).
    #[arg(long = "where", value_name = "right|best", requires = "from_run", value_parser = ["right", "best"])]
    which: Option<String>,
}

/// Learns from preferences: prompts with a chosen and a rejected response, or with a response and a label.
///
/// The loss is DPO, IPO, SimPO, ORPO or KTO (preference.loss.kind); masks such as S2T may silence tokens of chosen
/// responses (preference.masks). The trained model ends up in RUN/model, a Hugging Face folder that `train`, `eval` and
/// `generate` take.
#[derive(clap::Args)]
pub struct PreferArgs {
    #[command(flatten)]
    common: Args,

    #[command(flatten)]
    inputs: Inputs,
}

/// Trains a reward model from pairs: prompts with a chosen and a rejected response, or whole conversations. Deletes nothing.
///
/// A language model gets a new head that gives one score for a text, instead of the scores of the next token. The loss is
/// Bradley-Terry's, with a margin if rows have one. The trained model ends up in RUN/model, a Hugging Face folder
/// (AutoModelForSequenceClassification in transformers), for rewards of the kind reward-model.
#[derive(clap::Args)]
pub struct RmArgs {
    #[command(flatten)]
    common: Args,

    #[command(flatten)]
    inputs: Inputs,
}

/// What a command without a config is given.
#[derive(clap::Args)]
struct Inputs {
    /// The model to start from, instead of the config's; builtin if neither names one.
    #[arg(long, value_name = "MODEL", conflicts_with = "resume")]
    model: Option<String>,

    /// A file, or a pattern of files (.jsonl, .json, .csv, .parquet; .gz and .zst too), instead of the config's: rows with messages, or with prompt and response; for prefer and rm with prompt, chosen and rejected.
    #[arg(long, value_name = "FILE", conflicts_with = "resume")]
    data: Option<String>,
}

impl Inputs {
    /// As `given`, refused where a command has nothing to train on.
    fn settings(&self, command: &str, common: &Args) -> Result<Vec<String>> {
        if common.config.is_none() && common.resume.is_none() && self.data.is_none() {
            bail!(
                "--data: absent, so there is nothing to train on\nhint: stapo {command} --model MODEL --data FILE, or stapo {command} CONFIG"
            );
        }
        Ok(self.given())
    }

    /// The settings that stand for the options.
    fn given(&self) -> Vec<String> {
        let model = self.model.as_ref().map(|model| match model.as_str() {
            "builtin" => "model={kind=\"builtin\"}".to_string(),
            path => format!("model={{kind=\"path\",path={}}}", toml::Value::from(path)),
        });
        let data = self.data.as_ref().map(|path| {
            format!("data={{kind=\"{}\",path={}}}", file_kind(Some(path)), toml::Value::from(path.as_str()))
        });
        model.into_iter().chain(data).collect()
    }
}

impl SftArgs {
    /// The settings that stand for the options.
    fn settings(&self) -> Result<Vec<String>> {
        let Some(run) = &self.from_run else { return self.inputs.settings("sft", &self.common) };
        let path = toml::Value::from(run.display().to_string());
        let which = self.which.as_deref().unwrap_or("right");
        let mut settings = vec![format!("data={{kind=\"rollouts\",path={path},where=\"{which}\"}}")];
        if self.inputs.model.is_none() && self.common.config.is_none() {
            settings.push(match run_folder::plan(run)?.config.model {
                ModelSource::Path { path } => {
                    format!("model={{kind=\"path\",path={}}}", toml::Value::from(path))
                }
                ModelSource::Builtin | ModelSource::Random { .. } => "model={kind=\"builtin\"}".to_string(),
            });
        }
        settings.extend(self.inputs.given());
        Ok(settings)
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let built_in = include_str!("../../../../configs/base.toml");
    train_on_texts(
        args,
        &Base {
            command: "pretrain",
            defaults: PretrainConfig::default(),
            text: built_in,
            without_config: "; without one, stapo pretrain makes the built-in model",
            set: vec![],
        },
    )
}

/// What a hint says of a command that reads a config or options.
const OR_OPTIONS: &str = ", or give --model MODEL --data FILE; the shipped configs are those of stapo train";

pub fn run_sft(args: &SftArgs) -> Result<ExitCode> {
    let base = Base {
        command: "sft",
        defaults: PretrainConfig::fine_tuning(),
        text: "",
        without_config: OR_OPTIONS,
        set: args.settings()?,
    };
    train_on_texts(&args.common, &base)
}

pub fn run_prefer(args: &PreferArgs) -> Result<ExitCode> {
    let base = Base {
        command: "prefer",
        defaults: PretrainConfig::preferring(),
        text: "",
        without_config: OR_OPTIONS,
        set: args.inputs.settings("prefer", &args.common)?,
    };
    train_on_texts(&args.common, &base)
}

pub fn run_rm(args: &RmArgs) -> Result<ExitCode> {
    if let Some(folder) = args.common.config.as_deref().filter(|path| path.is_dir()) {
        bail!(
            "{}: is a folder; stapo rm trains a reward model and deletes nothing\nhint: stapo rm --model MODEL --data PAIRS, or stapo rm CONFIG; to continue a run, stapo rm --resume RUN; to delete a folder, use the shell's rm -r",
            folder.display()
        );
    }
    let base = Base {
        command: "rm",
        defaults: PretrainConfig::ranking(),
        text: "",
        without_config: OR_OPTIONS,
        set: args.inputs.settings("rm", &args.common)?,
    };
    train_on_texts(&args.common, &base)
}

/// A command and what its configs are laid over.
struct Base {
    command: &'static str,
    defaults: PretrainConfig,
    /// The config where none is named, and what a hint says of a command without one.
    text: &'static str,
    without_config: &'static str,
    /// Settings of the command line in addition to `--set`.
    set: Vec<String>,
}

fn train_on_texts(args: &Args, base: &Base) -> Result<ExitCode> {
    let stop = stop::on_signals()?;
    // A fresh model's files, which are exported with the trained weights.
    let scratch = tempfile::tempdir().context("temporary folder")?;
    let (config, mut run, mut pretrainer) = match &args.resume {
        Some(folder) => reopen(args, folder, scratch.path())?,
        None => begin(args, base, scratch.path())?,
    };
    if base.command != "pretrain" && !args.json {
        announce_data(&config, &pretrainer);
        plan::supervised::announce(&config, &pretrainer, args.threads)?;
    }
    let mut view = PretrainView::new(args.json, config.steps, stop.clone());
    let task = config.evaluation_task()?;
    let verifiers = task.iter().map(TaskSpec::verifier);
    allow_command::announce(pretrainer.task.as_ref(), verifiers, None, run.warnings());
    if let Err(error) = pretrain(&config, &mut run, &mut pretrainer, &mut view) {
        // Where the receipt cannot be written, the error that ended the run is shown all the same.
        let _ = run.seal();
        return Err(error.into());
    }
    let folder = run.folder().display();
    if pretrainer.learner.counters.step < config.steps {
        eprintln!(
            "stopped after {} steps; continue with stapo {} --resume {folder}",
            pretrainer.learner.counters.step, base.command
        );
        run.seal()?;
        return Ok(ExitCode::from(stop.exit_status()));
    }
    let options =
        ExportOptions { precision: Precision::Bf16, existing: Existing::Replace, ..ExportOptions::default() };
    let model = run.folder().join("model");
    let trained = &pretrainer.learner.model;
    export_policy(&model, &trained.policy, &trained.companions, &options)?;
    let weights = hash_file("weights", &model.join("model.safetensors"))?;
    eprintln!("model {}: {} bytes of weights, sha256 {}", model.display(), weights.n_bytes, weights.sha256);
    if base.command != "pretrain" {
        export_best(&run, &mut pretrainer, config.steps, &options)?;
        eprint!("{}", next_steps(&run, config.steps)?);
    }
    run.seal()?;
    if let Some(error) = view.output_error {
        bail!(
            "standard output: {error}\nhint: nothing of the run is lost; its metrics are in {folder}/metrics.jsonl"
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the model of the checkpoint with the lowest held-out loss, where this is not the last one.
fn export_best(run: &Run, pretrainer: &mut Pretrainer, n_steps: u64, options: &ExportOptions) -> Result<()> {
    let Some(best) = run.best().filter(|best| best.step < n_steps) else { return Ok(()) };
    for path in Checkpoint::list(run.folder())? {
        let checkpoint = Checkpoint::open(&path)?;
        if checkpoint.counters.step == best.step {
            pretrainer.learner.restore(&checkpoint)?;
            let model = &pretrainer.learner.model;
            export_policy(&run.folder().join("model-best"), &model.policy, &model.companions, options)?;
        }
    }
    Ok(())
}

/// What the run reached, and the commands that come next.
fn next_steps(run: &Run, n_steps: u64) -> Result<String> {
    let folder = run.folder().display();
    let held_out = match run.best() {
        Some(best) if best.step == n_steps => {
            format!("held-out loss {:.4} nats, the lowest, after the last step\n", best.value)
        }
        Some(best) => format!(
            "held-out loss: {:.4} nats at its lowest, after step {} of {n_steps}; it was higher at the end; the model of that step is {folder}/model-best\n",
            best.value, best.step
        ),
        None => {
            "held-out loss: none, because data.held_out_share is 0; with 0.05 the best checkpoint is kept\n"
                .to_string()
        }
    };
    let metrics = Run::read_metrics::<PretrainMetrics>(run.folder())?;
    if let Some(RankingMetrics { eval, .. }) = metrics.last().and_then(|last| last.reward_model) {
        let accuracy =
            eval.map_or(String::new(), |eval| format!("held-out pairs in order: {}\n", in_order(&eval)));
        return Ok(format!(
            "{held_out}{accuracy}next:\n  [[rewards]]\n  name = \"rm\"\n  verifier = {{ kind = \"reward-model\", model = \"{folder}/model\" }}    in a config of stapo train\n"
        ));
    }
    Ok(format!(
        "{held_out}next:\n  stapo generate --model {folder}/model --chat \"...\"        what it answers\n  stapo eval --model {folder}/model --benchmarks FILE       how often it is right\n  stapo init --model {folder}/model --data FILE             a config to go on by reinforcement\n"
    ))
}

/// What is learned from and how it is cut into steps.
fn announce_data(config: &PretrainConfig, pretrainer: &Pretrainer) {
    let Some((n_rows, n_tokens)) = pretrainer.file().map(FileRows::size) else { return };
    let (update, steps) = (&config.update, config.steps);
    let batch = match update.batch_rows {
        Some(batch_rows) => format!("{batch_rows} rows"),
        None => format!("at least {}", update.batch_tokens),
    };
    eprintln!(
        "data: {n_rows} rows, {n_tokens} tokens; whole rows are packed without padding, up to {} tokens for one pass and {batch} for one of the {steps} steps",
        update.microbatch_tokens
    );
    let stores_reference = config.preference.as_ref().is_some_and(|spec| spec.loss.reads_reference())
        && config.lora.as_ref().is_none_or(|lora| lora.adapter.is_some());
    if stores_reference && pretrainer.learner.counters.step == 0 {
        eprintln!(
            "reference: its log-probs are computed for all rows before the first step, and stored in the run folder"
        );
    }
}

type Opened = (PretrainConfig, Run, Pretrainer);

/// The settings of the command line: those of the command itself, `--set`, and `--device` as one of them.
fn settings(args: &Args, of_command: &[String]) -> Vec<String> {
    let device = args.device.map(|device| format!("device={device}"));
    of_command.iter().cloned().chain(args.set.iter().cloned()).chain(device).collect()
}

fn begin(args: &Args, base: &Base, start: &Path) -> Result<Opened> {
    let text = match &args.config {
        Some(path) => read_text(path).with_context(|| {
            format!("config {}\nhint: name a TOML file{}", path.display(), base.without_config)
        })?,
        None => base.text.to_string(),
    };
    let set = settings(args, &base.set);
    let file = run_folder::file_name(args.config.as_deref());
    let raw = RawConfig::new(&text, set.iter().map(String::as_str))
        .map_err(|error| run_folder::placed(error.into(), &file, None))?;
    let read = PretrainConfig::with_defaults(&base.defaults, &raw).map_err(PlanError::from);
    let checked = read.and_then(|config| config.check().map(|()| config));
    let mut config = checked.map_err(|error| run_folder::placed(error, &file, Some(&raw)))?;
    refuse_other_commands(&config, args, base)?;
    let folder = run_folder::new_folder(args.out.as_deref(), &config.name)?;
    let identity = identity::of_pretraining(&config, PROGRAM)?;
    // The model and the texts are opened before the run folder is made, so that a bad config leaves no folder behind.
    let programs = args.allow.of_config(args.config.as_deref());
    let device = run_folder::device(config.device(), args.threads, Use::Training)?;
    let pretrainer = Pretrainer::new(&config, start, &device, programs)?;
    if let Some(file) = pretrainer.file_with_answers().filter(|_| base.command == "pretrain") {
        let config = args.config.as_deref().unwrap_or(Path::new("CONFIG")).display();
        bail!(
            "file {file}: has prompts with responses or conversations, and stapo pretrain learns whole texts\nhint: stapo sft {config} learns the responses; for whole texts, name one field with data.response_field"
        );
    }
    config.steps = pretrainer.steps(&config)?;
    config.epochs = None;
    let run = Run::create(&folder, &text, &config.to_toml(), identity, &writer(config.device()))?;
    Ok((config, run, pretrainer))
}

/// Refuses a config of `prefer` or `rm` in another command.
fn refuse_other_commands(config: &PretrainConfig, args: &Args, base: &Base) -> Result<()> {
    let PretrainConfig { preference, reward_model, .. } = &base.defaults;
    let path = args.config.as_deref().unwrap_or(Path::new("CONFIG")).display();
    let (key, command) = match config {
        _ if config.preference.is_some() && preference.is_none() => ("preference", "prefer"),
        _ if config.reward_model.is_some() && reward_model.is_none() => ("reward_model", "rm"),
        _ => return Ok(()),
    };
    bail!(
        "config.{key}: given, and this is stapo {}\nhint: stapo {command} {path} learns from it",
        base.command
    )
}

fn reopen(args: &Args, folder: &Path, start: &Path) -> Result<Opened> {
    let identity = |config: &PretrainConfig| identity::of_pretraining(config, PROGRAM);
    let set = settings(args, &[]);
    let interrupted = InterruptedPretraining::open(folder, &set, args.accept_changes, identity)?;
    run_folder::warn_of_refused(&interrupted.reopening);
    let device_name = interrupted.config.device();
    let device = run_folder::device(device_name, args.threads, Use::Training)?;
    Ok(interrupted.resume(&writer(device_name), start, &device, args.allow.of_run())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Given {
        #[command(flatten)]
        args: SftArgs,
    }

    fn given(words: &[&str]) -> SftArgs {
        Given::parse_from([&["sft"], words].concat()).args
    }

    #[test]
    fn the_options_of_a_supervised_command_are_settings() {
        let settings = |words: &[&str]| given(words).settings().map_err(|error| error.to_string());
        let data = |kind: &str, path: &str| format!("data={{kind=\"{kind}\",path=\"{path}\"}}");
        assert_eq!(settings(&["--data", "a.jsonl"]), Ok(vec![data("jsonl", "a.jsonl")]));
        let both = settings(&["--data", "a.parquet", "--model", "o/m"]).unwrap();
        assert_eq!(both, ["model={kind=\"path\",path=\"o/m\"}".to_string(), data("parquet", "a.parquet")]);
        let builtin = settings(&["--data", "a.csv", "--model", "builtin"]).unwrap();
        assert_eq!(builtin[0], "model={kind=\"builtin\"}");
        assert!(settings(&[]).unwrap_err().contains("--data: absent"));
        assert!(settings(&["--model", "o/m"]).unwrap_err().contains("stapo sft --model MODEL --data FILE"));
        assert_eq!((settings(&["config.toml"]), settings(&["--resume", "run"])), (Ok(vec![]), Ok(vec![])));
        for words in [["--resume", "run", "--data", "x"], ["--resume", "run", "--model", "x"]] {
            assert!(Given::try_parse_from([&["sft"][..], &words].concat()).is_err(), "{words:?}");
        }
    }

    #[test]
    fn settings_of_the_command_come_first_and_the_device_last() {
        let args = given(&["--data", "x", "--set", "steps=3", "--device", "cpu"]).common;
        assert_eq!(settings(&args, &["a=1".to_string()]), ["a=1", "steps=3", "device=cpu"]);
    }

    #[test]
    fn a_config_of_another_command_is_refused_with_its_name() {
        let args = given(&["my.toml"]).common;
        let refused = |config: &PretrainConfig, command: &'static str, defaults: PretrainConfig| {
            let base = Base { command, defaults, text: "", without_config: "", set: vec![] };
            refuse_other_commands(config, &args, &base).map_err(|error| error.to_string())
        };
        let (sft, dpo, rm) =
            (PretrainConfig::fine_tuning(), PretrainConfig::preferring(), PretrainConfig::ranking());
        for (config, defaults) in [(&sft, &sft), (&dpo, &dpo), (&rm, &rm)] {
            assert_eq!(refused(config, "x", defaults.clone()), Ok(()));
        }
        let said = refused(&dpo, "sft", sft.clone()).unwrap_err();
        assert!(
            said.starts_with("config.preference: given, and this is stapo sft\nhint: stapo prefer my.toml"),
            "{said}"
        );
        let said = refused(&rm, "prefer", dpo).unwrap_err();
        assert!(
            said.starts_with("config.reward_model: given, and this is stapo prefer\nhint: stapo rm my.toml"),
            "{said}"
        );
        assert!(refused(&rm, "sft", sft).is_err());
    }
}
