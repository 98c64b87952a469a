//! `stapo verify-run`

use crate::run_folder;
use anyhow::{Result, bail};
use stapo_rl::run::{Checkpoint, Run};
use std::path::PathBuf;
use std::process::ExitCode;

/// Replays steps of a run from a checkpoint and compares the state with the recorded hashes.
#[derive(clap::Args)]
pub struct Args {
    /// The run folder.
    run: PathBuf,

    /// How many steps to replay.
    #[arg(long, default_value_t = 3)]
    steps: u64,
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
    let mut trainer = run_folder::trainer_at(&args.run, &plan, &checkpoint)?;
    println!("replaying from step {}", checkpoint.counters.step);
    let mut n_different = 0;
    for _ in 0..args.steps {
        if trainer.counters.step >= last {
            break;
        }
        let rolled = trainer.roll_out(&plan)?;
        trainer.learn(&plan, &rolled)?;
        let step = trainer.counters.step;
        let found = trainer.state_hash();
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
