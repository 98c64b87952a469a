//! The replay of a run: steps from a checkpoint, whose states are compared with the recorded hashes.

use crate::shared::allow_command::{self, AllowCommand};
use crate::shared::program::PROGRAM;
use crate::shared::ranks::Joined;
use crate::shared::run_folder;
use anyhow::{Result, bail};
use stapo_core::record::{FileHash, Manifest, changed_inputs};
use stapo_rl::policy::identity;
use stapo_rl::run::{Checkpoint, Freedom, Run, freedom, hash_bytes, plan_differences, plan_text};
use stapo_rl::train::Trainer;
use stapo_rl::{Config, Plan};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The part of every rank but the first: the steps that rank 0 asks for.
pub(super) fn follow(allow: AllowCommand, joined: &Joined) -> Result<ExitCode> {
    let plan = run_folder::resolved(&String::from_utf8_lossy(&joined.ranks.broadcast(&[])?))?;
    let (mut trainer, _) = trainer(allow, joined, &plan, None)?;
    while joined.ranks.broadcast(&[])? == GO_ON {
        step(&mut trainer, &plan)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What rank 0 tells the others before each step.
const GO_ON: &[u8] = b"step";

/// The trainer at the checkpoint that rank 0 has, and the hash of its state.
fn trainer(
    allow: AllowCommand,
    joined: &Joined,
    plan: &Plan,
    checkpoint: Option<&Checkpoint>,
) -> Result<(Trainer, String)> {
    let (device, ranks, _) = joined.open(plan, None, || identity::of_plan(plan, PROGRAM))?;
    let mut trainer = Trainer::on_ranks(plan, &device, allow.of_run(), ranks)?;
    trainer.restore(checkpoint)?;
    let hash = trainer.learner.state_hash()?;
    Ok((trainer, hash))
}

/// Makes one step. Returns the hash of the state after it.
fn step(trainer: &mut Trainer, plan: &Plan) -> Result<String> {
    let rolled = trainer.roll_out(plan)?;
    trainer.learn(plan, &rolled)?;
    Ok(trainer.learner.state_hash()?)
}

/// Replays `n_steps` steps; true where inputs and states are as recorded.
pub(super) fn replay(run: &Path, n_steps: u64, allow: AllowCommand, joined: &Joined) -> Result<bool> {
    let plan = run_folder::plan(run)?;
    let manifest = Run::read_manifest(run)?;
    let recorded =
        |step: u64| manifest.steps.iter().find(|hash| hash.step == step).map(|hash| hash.sha256.as_str());
    let last = manifest.steps.last().map_or(0, |hash| hash.step);
    let checkpoints = Checkpoint::list(run)?;
    let before = |path: &PathBuf| Checkpoint::open(path).ok().filter(|c| c.counters.step < last);
    let Some(checkpoint) = checkpoints.iter().rev().find_map(before) else {
        bail!("run {}: no checkpoint before step {last} to replay from", run.display());
    };
    let mut n_different = check_inputs(run, &plan, &manifest, &checkpoint)?;
    joined.ranks.broadcast(plan.to_toml().as_bytes())?;
    let (mut trainer, found) = trainer(allow, joined, &plan, Some(&checkpoint))?;
    let recorded_hash = checkpoint.provenance.as_ref().map(|provenance| &provenance.state_hash);
    if let Some(hash) = recorded_hash.filter(|hash| **hash != found) {
        let (run, step) = (run.display(), checkpoint.counters.step);
        bail!(
            "run {run}: the state of step {step} has the hash {found}, recorded {hash}\nhint: a program that hashes states in another way wrote the run; verify it with the program that build.json names"
        );
    }
    allow_command::warn(&trainer.task);
    println!("replaying from step {}", checkpoint.counters.step);
    for _ in 0..n_steps {
        if trainer.learner.counters.step >= last {
            break;
        }
        joined.ranks.broadcast(GO_ON)?;
        let found = step(&mut trainer, &plan)?;
        let step = trainer.learner.counters.step;
        match recorded(step) {
            Some(hash) if hash == found => println!("step {step}: the same, {found}"),
            Some(hash) => {
                n_different += 1;
                println!("step {step}: DIFFERENT, recorded {hash}, replayed {found}");
            }
            None => println!("step {step}: no hash recorded"),
        }
    }
    joined.ranks.broadcast(b"end")?;
    Ok(n_different == 0)
}

/// Compares the inputs that the manifest and the checkpoint recorded with those on disk, by hash, and the plan with that
/// of the checkpoint, key by key. Returns how many differ. Another program does not count as a difference: the replayed
/// steps are compared.
fn check_inputs(run: &Path, plan: &Plan, manifest: &Manifest, checkpoint: &Checkpoint) -> Result<usize> {
    let config = std::fs::read(run.join("config.toml")).unwrap_or_default();
    let plan_text = plan_text(run)?;
    let now = identity::of_plan(plan, PROGRAM)?;
    let texts = [hash_bytes("config", &config), hash_bytes("plan", plan_text.as_bytes())];
    let mut inputs: Vec<FileHash> = texts.into_iter().chain(now.inputs.iter().cloned()).collect();
    if checkpoint.provenance.is_none() {
        inputs = as_recorded_before(inputs, &manifest.inputs);
    }
    let recorded: Vec<FileHash> =
        manifest.inputs.iter().filter(|input| input.name != "program").cloned().collect();
    let mut changes = changed_inputs(&recorded, &inputs);
    match &checkpoint.provenance {
        None => println!("identity: not recorded by the program that made the checkpoint"),
        Some(provenance) => {
            let complete = Plan::resolve(Config::from_toml(&provenance.plan, [])?)?.to_toml();
            let keys = plan_differences(&provenance.plan, &complete, &plan_text)?;
            changes.extend(keys.into_iter().filter(|change| freedom(change) == Freedom::Identity));
            changes.extend(changed_inputs(&provenance.identity.inputs, &now.inputs));
            changes.dedup();
            if provenance.identity.program != PROGRAM {
                println!("program: another, {}; this is {PROGRAM}", provenance.identity.program);
            }
        }
    }
    let is_changed = |input: &FileHash| changes.iter().any(|change| change.name == input.name);
    for input in inputs.iter().filter(|input| !is_changed(input)) {
        println!("{}: the same, {}", input.name, input.sha256);
    }
    for change in &changes {
        println!("{}: DIFFERENT, recorded {}, found {}", change.name, change.before, change.after);
    }
    Ok(changes.len())
}

/// The inputs that programs recorded before checkpoints had an identity, under the names these programs gave them.
fn as_recorded_before(inputs: Vec<FileHash>, recorded: &[FileHash]) -> Vec<FileHash> {
    let named = |input: FileHash| {
        let name = if input.name.starts_with("weights") { "weights".to_string() } else { input.name };
        FileHash { name, ..input }
    };
    let is_recorded = |input: &FileHash| recorded.iter().any(|known| known.name == input.name);
    inputs.into_iter().map(named).filter(is_recorded).collect()
}
