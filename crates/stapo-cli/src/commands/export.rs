//! `stapo export`

use crate::shared::run_folder::{self, Use};
use anyhow::Result;
use stapo_rl::device::DeviceName;
use stapo_rl::model_files::{Existing, ExportOptions, Precision};
use stapo_rl::pretrain::export_policy;
use std::path::PathBuf;
use std::process::ExitCode;

/// Writes a run's checkpoint as a Hugging Face folder.
#[derive(clap::Args)]
pub struct Args {
    /// The run folder.
    run: PathBuf,

    /// The folder to make.
    #[arg(long, value_name = "DIR")]
    to: PathBuf,

    /// The step of the checkpoint, or `best` for the one that best.json names; the newest by default.
    #[arg(long, value_name = "N|best")]
    step: Option<String>,

    /// Keeps f32; bf16 by default.
    #[arg(long)]
    f32: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let plan = run_folder::plan(&args.run)?;
    let checkpoint = match &args.step {
        Some(step) => run_folder::checkpoint_at(&args.run, step)?,
        None => run_folder::newest_checkpoint(&args.run)?,
    };
    // Checkpoints hold f32 weights whatever device trained them, so the CPU can export every run.
    let device = run_folder::device(DeviceName::Cpu, None, Use::Reading)?;
    let model = run_folder::model_at(&plan, &checkpoint, &device)?;
    let precision = if args.f32 { Precision::F32 } else { Precision::Bf16 };
    let options = ExportOptions { precision, existing: Existing::Refuse, ..ExportOptions::default() };
    let exported = export_policy(&args.to, &model.policy, &model.companions, &options)?;
    println!(
        "{}: step {}, {} parameters, {} bytes of weights",
        args.to.display(),
        checkpoint.counters.step,
        exported.n_parameters,
        exported.bytes
    );
    Ok(ExitCode::SUCCESS)
}
