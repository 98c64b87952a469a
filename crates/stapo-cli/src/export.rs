//! `stapo export`

use anyhow::{Context, Result, bail};
use stapo_rl::model::export::{Existing, ExportOptions, Precision};
use stapo_rl::model::{CpuOptions, Device};
use stapo_rl::pretrain::export_policy;
use stapo_rl::run::Checkpoint;
use stapo_rl::train::{Trainer, base_folder};
use stapo_rl::{Config, Plan};
use std::path::PathBuf;
use std::process::ExitCode;

/// Writes a run's newest checkpoint as a Hugging Face folder.
#[derive(clap::Args)]
pub struct Args {
    /// The run folder.
    run: PathBuf,

    /// The folder to make.
    #[arg(long, value_name = "DIR")]
    to: PathBuf,

    /// Keeps f32; bf16 by default.
    #[arg(long)]
    f32: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let path = args.run.join("plan.toml");
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("run {}: no plan.toml, so this is no run folder", args.run.display()))?;
    let plan = Plan::resolve(Config::from_toml(&text, [])?)?;
    let (checkpoint, refused) = Checkpoint::newest(&args.run)?;
    for error in refused {
        eprintln!("warning: {error}; taking the checkpoint before");
    }
    let Some(checkpoint) = checkpoint else { bail!("run {}: no good checkpoint", args.run.display()) };
    let device = Device::cpu(CpuOptions::from_env()?);
    let mut trainer = Trainer::new(&plan, &base_folder(&args.run, &plan), &device)?;
    trainer.restore(&checkpoint)?;
    let precision = if args.f32 { Precision::F32 } else { Precision::Bf16 };
    let options = ExportOptions { precision, existing: Existing::Refuse, ..ExportOptions::default() };
    let student = &trainer.student;
    let exported = export_policy(&args.to, &student.policy, &student.companions, &options)?;
    println!(
        "{}: step {}, {} parameters, {} bytes of weights",
        args.to.display(),
        checkpoint.counters.step,
        exported.n_parameters,
        exported.bytes
    );
    Ok(ExitCode::SUCCESS)
}
