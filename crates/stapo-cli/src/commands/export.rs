//! `stapo export`

use crate::shared::model::Fetch;
use crate::shared::run_folder::{self, Use};
use crate::shared::units::{grouped, size};
use anyhow::{Result, bail};
use stapo_rl::LoadedModel;
use stapo_rl::device::DeviceName;
use stapo_rl::model_files::{Existing, ExportOptions, Precision, Pretrained, export};
use stapo_rl::pretrain::export_policy;
use std::path::PathBuf;
use std::process::ExitCode;

/// Writes a run's checkpoint, or any other model, as a Hugging Face folder.
#[derive(clap::Args)]
pub struct Args {
    /// The run folder, for its newest checkpoint; or RUN@STEP, or any other model.
    #[arg(value_name = "RUN")]
    model: String,

    /// The folder to make.
    #[arg(short, long, alias = "to", value_name = "DIR")]
    out: PathBuf,

    /// Takes the run's checkpoint of this step, or of the best one, as RUN@STEP and RUN@best do.
    #[arg(long, value_name = "N|best")]
    step: Option<String>,

    /// Keeps f32; bf16 by default.
    #[arg(long)]
    f32: bool,

    #[command(flatten)]
    fetch: Fetch,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let name = args.step.as_ref().map_or(args.model.clone(), |step| format!("{}@{step}", args.model));
    // The folder is looked at before a model is read, which may take a while.
    if std::fs::read_dir(&args.out).is_ok_and(|mut entries| entries.next().is_some()) {
        bail!("{}: exists and is not empty\nhint: choose another folder with --out", args.out.display());
    }
    let found = args.fetch.find(&name)?;
    let precision = if args.f32 { Precision::F32 } else { Precision::Bf16 };
    let options = ExportOptions { precision, existing: Existing::Refuse, ..ExportOptions::default() };
    let exported = if found.step().is_some() {
        // Checkpoints hold f32 weights whatever device trained them, so the CPU can export every run.
        let device = run_folder::device(DeviceName::Cpu, None, Use::Reading)?;
        let model = LoadedModel::open_found(&found, &device)?;
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
