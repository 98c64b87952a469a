//! `stapo export`

use crate::shared::model::Fetch;
use crate::shared::run_folder::{self, Use};
use crate::shared::units::{grouped, size};
use anyhow::{Result, bail};
use stapo_rl::LoadedModel;
use stapo_rl::device::DeviceName;
use stapo_rl::learn::pretrain::export_policy;
use stapo_rl::model_files::{Existing, ExportOptions, Precision, Pretrained, export, write_adapter};
use stapo_rl::policy::found::is_run;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Writes a run's checkpoint, or any other model, as a Hugging Face folder. For a run that trained adapters it writes the
/// adapter in PEFT's format.
#[derive(clap::Args)]
pub struct Args {
    /// The run folder, for its newest checkpoint; or RUN@STEP, or any other model.
    #[arg(value_name = "RUN")]
    model: String,

    /// The folder to create.
    #[arg(short, long, alias = "to", value_name = "DIR")]
    out: PathBuf,

    /// Takes the run's checkpoint of this step, or of the best one, as RUN@STEP and RUN@best do.
    #[arg(long, value_name = "N|best")]
    step: Option<String>,

    /// Adds the adapter of this folder, in PEFT's format, to the model.
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,

    /// Merges the adapter into the weights and writes a whole model.
    #[arg(long)]
    merge: bool,

    /// Keeps f32; bf16 by default. Adapters are always in f32.
    #[arg(long)]
    f32: bool,

    #[command(flatten)]
    fetch: Fetch,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let name = args.step.as_ref().map_or(args.model.clone(), |step| format!("{}@{step}", args.model));
    if args.step.is_some() && !is_run(Path::new(&args.model)) {
        bail!(
            "--step: {} is no run folder, so it has no steps to choose from\nhint: leave --step out, or name a run; RUN@STEP names its step already",
            args.model
        );
    }
    // The folder is looked at before a model is read, which may take a while.
    if std::fs::read_dir(&args.out).is_ok_and(|mut entries| entries.next().is_some()) {
        bail!("{}: exists and is not empty\nhint: choose another folder with --out", args.out.display());
    }
    let found = args.fetch.find(&name)?;
    let precision = if args.f32 { Precision::F32 } else { Precision::Bf16 };
    let options = ExportOptions { precision, existing: Existing::Refuse, ..ExportOptions::default() };
    let has_adapter = found.lora.is_some() || args.adapter.is_some();
    if args.merge && !has_adapter {
        bail!("--merge: {name} has no adapter\nhint: leave --merge out, or name one with --adapter");
    }
    let exported = if found.step().is_some() || has_adapter {
        // Checkpoints hold f32 weights whatever device trained them, so the CPU can export every run.
        let device = run_folder::device(DeviceName::Cpu, None, Use::Reading)?;
        let model = LoadedModel::open_found(&found, args.adapter.as_deref(), &device)?;
        if has_adapter && !args.merge {
            let written = write_adapter(&args.out, &model.policy, &found.base_name())?;
            let (n, bytes) = (grouped(written.n_parameters), size(written.bytes));
            println!("{}: adapter of {}, {n} parameters, {bytes}", args.out.display(), found.base_name());
            return Ok(ExitCode::SUCCESS);
        }
        export_policy(&args.out, &model.policy, &model.companions, &options)?
    } else {
        let files = found.files()?;
        let model = Pretrained::open(&files.path)?;
        export(&args.out, &model.config, &model.companions()?, &options, |spec, out| {
            model.weights.read_f32(&spec.name, &spec.shape, out)
        })?
    };
    let step = found.step().map_or(String::new(), |step| format!("step {step}, "));
    println!(
        "{}: {step}{} parameters, {} of weights",
        args.out.display(),
        grouped(exported.n_parameters),
        size(exported.bytes)
    );
    Ok(ExitCode::SUCCESS)
}
