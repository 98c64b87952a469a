//! `stapo verify-run`

use crate::commands::train;
use crate::shared::allow_command::{self, AllowCommand};
use crate::shared::run_folder::{self, Use};
use anyhow::{Result, bail};
use stapo_core::record::Manifest;
use stapo_rl::Plan;
use stapo_rl::run::{Checkpoint, Run};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Replays steps of a run from a checkpoint and compares the state with the recorded hashes.
#[derive(clap::Args)]
pub struct Args {
    /// The run folder.
    run: PathBuf,

    /// How many steps to replay.
    #[arg(long, default_value_t = 3)]
    steps: u64,

    #[command(flatten)]
    allow: AllowCommand,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let plan = run_folder::plan(&args.run)?;
    let manifest = Run::read_manifest(&args.run)?;
    let recorded =
        |step: u64| manifest.steps.iter().find(|hash| hash.step == step).map(|hash| hash.sha256.as_str());
    let last = manifest.steps.last().map_or(0, |hash| hash.step);
    let checkpoints = Checkpoint::list(&args.run)?;
    let before = |path: &PathBuf| Checkpoint::open(path).ok().filter(|c| c.counters.step < last);
    let Some(checkpoint) = checkpoints.iter().rev().find_map(before) else {
        bail!("run {}: no checkpoint before step {last} to replay from", args.run.display());
    };
    let device = run_folder::device(plan.device(), None, Use::of(&plan))?;
    let mut trainer = run_folder::trainer_at(&plan, &checkpoint, &device, args.allow.of_run())?;
    allow_command::warn(&trainer.task);
    let mut n_different = check_inputs(&args.run, &plan, &manifest);
    println!("replaying from step {}", checkpoint.counters.step);
    for _ in 0..args.steps {
        if trainer.learner.counters.step >= last {
            break;
        }
        let rolled = trainer.roll_out(&plan)?;
        trainer.learn(&plan, &rolled)?;
        let step = trainer.learner.counters.step;
        let found = trainer.learner.state_hash();
        match recorded(step) {
            Some(hash) if hash == found => println!("step {step}: the same, {found}"),
            Some(hash) => {
                n_different += 1;
                println!("step {step}: DIFFERENT, recorded {hash}, replayed {found}");
            }
            None => println!("step {step}: no hash recorded"),
        }
    }
    Ok(if n_different == 0 { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// Compares the inputs that the manifest recorded with those on disk, by hash, and returns how many differ. Another
/// build of the program does not count as a difference: the replayed steps are compared.
fn check_inputs(run: &Path, plan: &Plan, manifest: &Manifest) -> usize {
    let now = std::fs::read_to_string(run.join("config.toml")).map_err(anyhow::Error::from);
    let now = match now.and_then(|config| train::manifest(&config, plan)) {
        Ok(now) => now.inputs,
        Err(error) => {
            println!("inputs: cannot be compared: {error:#}");
            return 1;
        }
    };
    let mut n_different = 0;
    for recorded in &manifest.inputs {
        let name = &recorded.name;
        if now.contains(recorded) {
            println!("{name}: the same, {}", recorded.sha256);
        } else if name == "program" {
            println!("program: another build than the one that trained");
        } else {
            n_different += 1;
            println!("{name}: DIFFERENT, recorded {}", recorded.sha256);
        }
    }
    n_different
}
