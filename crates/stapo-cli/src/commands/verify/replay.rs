//! The replay of a run: steps from a checkpoint, whose states and records are compared with the recorded ones.

mod recorded;

use crate::shared::allow_command::{self, AllowCommand};
use crate::shared::program::PROGRAM;
use crate::shared::ranks::Joined;
use crate::shared::run_folder;
use anyhow::{Result, bail};
use recorded::RecordedRun;
use stapo_core::record::{FileHash, Manifest, changed_inputs};
use stapo_rl::policy::identity;
use stapo_rl::rollout::AnswerUse;
use stapo_rl::run::receipt;
use stapo_rl::run::{Checkpoint, Freedom, Run, freedom, hash_bytes, plan_differences, plan_text, step_of};
use stapo_rl::train::{Recorder, Trainer};
use stapo_rl::{Config, Plan};
use std::path::Path;
use std::process::ExitCode;

/// What rank 0 asks of all ranks.
const START: &[u8] = b"evaluate before the first step";
const STEP: &[u8] = b"step";
const STEP_AND_EVALUATION: &[u8] = b"step and evaluate";
const END: &[u8] = b"end";

/// The part of every rank but the first: the steps and evaluations that rank 0 asks for.
pub(super) fn follow(allow: AllowCommand, is_live: bool, joined: &Joined) -> Result<ExitCode> {
    let plan = run_folder::resolved(&String::from_utf8_lossy(&joined.ranks.broadcast(&[])?))?;
    let mut trainer = trainer((allow, is_live), joined, &plan, None)?;
    loop {
        match joined.ranks.broadcast(&[])?.as_slice() {
            START => drop(trainer.replay_start(&plan, None)?),
            STEP => drop(trainer.replay_step(&plan, None, false)?),
            STEP_AND_EVALUATION => drop(trainer.replay_step(&plan, None, true)?),
            _ => break,
        }
    }
    if is_live {
        joined.ranks.all_gather(&serde_json::to_vec(&trainer.recorded.comparison())?)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The trainer at the checkpoint that rank 0 has.
fn trainer(
    (allow, is_live): (AllowCommand, bool),
    joined: &Joined,
    plan: &Plan,
    checkpoint: Option<&Checkpoint>,
) -> Result<Trainer> {
    let (device, ranks, _) = joined.open(plan, None, || identity::of_plan(plan, PROGRAM))?;
    let mut trainer = Trainer::on_ranks(plan, &device, allow.of_run(), ranks)?;
    trainer.restore(checkpoint)?;
    if is_live {
        trainer.recorded.set_use(AnswerUse::Compare);
    }
    Ok(trainer)
}

/// Replays `n_steps` steps; true if inputs, states and records are as recorded.
pub(super) fn replay(
    run: &Path,
    n_steps: u64,
    (allow, is_live): (AllowCommand, bool),
    joined: &Joined,
) -> Result<bool> {
    let plan = run_folder::plan(run)?;
    let manifest = Run::read_manifest(run)?;
    let last = manifest.steps.last().map_or(0, |hash| hash.step);
    let n_steps = n_steps.min(last);
    let checkpoint = start(run, last, n_steps)?;
    let first = checkpoint.counters.step;
    let mut n_different = check_inputs(run, &plan, &manifest, &checkpoint)?;
    joined.ranks.broadcast(plan.to_toml().as_bytes())?;
    let mut trainer = trainer((allow, is_live), joined, &plan, Some(&checkpoint))?;
    allow_command::warn(&trainer.task);
    let recorded = RecordedRun::read(run, manifest)?;
    let mut recorder = Recorder::from_history(recorded.history_before(first + 1));
    println!("replaying from step {first}");
    if first == 0 {
        joined.ranks.broadcast(START)?;
        let samples = trainer.replay_start(&plan, Some(&mut recorder))?;
        n_different += recorded.compare_start(samples.as_slice())?;
    }
    let n_made = n_steps.min(last - first);
    for step in first + 1..=first + n_made {
        let evaluates = recorded.evaluates(&plan, step);
        joined.ranks.broadcast(if evaluates { STEP_AND_EVALUATION } else { STEP })?;
        let replayed = trainer.replay_step(&plan, Some(&mut recorder), evaluates)?;
        n_different += recorded.compare(step, &replayed)?;
    }
    joined.ranks.broadcast(END)?;
    if is_live {
        n_different += compare_answers(&trainer, joined)?;
    }
    n_different += recorded.compare_best(&plan)?;
    if receipt::of_folder(run).is_none() {
        n_different += recorded.open_checkpoints()?;
    }
    if n_made < n_steps {
        println!(
            "replayed {n_made} of {n_steps} steps: the run has no checkpoint between step {} and step {first} to replay from",
            last.saturating_sub(n_steps)
        );
    }
    if first + n_made < last {
        let all = last - first;
        println!(
            "the weights of step {last} were not replayed: --steps {all} makes all steps from step {first} on"
        );
    }
    Ok(n_different == 0)
}

/// Says what became of the recorded answers of all ranks when the environment was asked again. Returns how many ranks found
/// a difference.
fn compare_answers(trainer: &Trainer, joined: &Joined) -> Result<usize> {
    let mine = serde_json::to_vec(&trainer.recorded.comparison())?;
    let mut n_compared = 0;
    let mut differences = Vec::new();
    for bytes in joined.ranks.all_gather(&mine)? {
        let (n, difference): (usize, Option<String>) = serde_json::from_slice(&bytes)?;
        n_compared += n;
        differences.extend(difference);
    }
    println!("environment: asked again for {n_compared} answers");
    for difference in &differences {
        println!("environment: DIFFERENT, {difference}");
    }
    Ok(differences.len())
}

/// A good checkpoint from which `n_steps` steps, or as many as there are, lead to the last step; or else the newest before it.
fn start(run: &Path, last: u64, n_steps: u64) -> Result<Checkpoint> {
    let mut paths = Checkpoint::list(run)?;
    paths.retain(|path| step_of(path).is_some_and(|step| step < last));
    let n_far = paths.partition_point(|path| step_of(path).is_some_and(|step| step + n_steps < last));
    let near = paths.split_off(n_far);
    let mut refused = String::new();
    for path in near.iter().chain(paths.iter().rev()) {
        match Checkpoint::open(path) {
            Ok(checkpoint) => return Ok(checkpoint),
            Err(error) => refused = format!("; {error}"),
        }
    }
    bail!("run {}: no good checkpoint before step {last} to replay from{refused}", run.display())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_of_earlier_programs_are_compared_by_the_names_that_they_gave() {
        let file = |name: &str| hash_bytes(name, name.as_bytes());
        let now = [file("config"), file("weights model.safetensors"), file("tokenizer")].to_vec();
        let named = |recorded: &[&str]| {
            let recorded: Vec<FileHash> = recorded.iter().map(|name| file(name)).collect();
            let found = as_recorded_before(now.clone(), &recorded);
            found.into_iter().map(|input| input.name).collect::<Vec<_>>()
        };
        assert_eq!(named(&["config", "weights", "data"]), ["config", "weights"]);
        assert_eq!(named(&[]), [""; 0]);
        let weights = &as_recorded_before(now.clone(), &[file("weights")])[0];
        assert_eq!(weights.sha256, now[1].sha256);
    }
}
