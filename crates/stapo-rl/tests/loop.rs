//! The loop as a whole, on a tiny model: the same bits whatever the interruptions, micro-batches and threads.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use stapo_core::record::{Extra, Manifest, Metrics, SCHEMA};
use stapo_rl::model::{CpuOptions, Device};
use stapo_rl::run::{Checkpoint, Run};
use stapo_rl::train::{Outcome, Trainer, Watch, resume, train};
use stapo_rl::{Config, Plan};
use std::fs;
use std::path::Path;

/// Stops after so many steps, as Ctrl-C would.
struct Quiet {
    stop_after: Option<u64>,
    step: u64,
}

impl Quiet {
    fn new() -> Self {
        Quiet { stop_after: None, step: 0 }
    }
}

impl Watch for Quiet {
    fn started(&mut self, _: f64) {}
    fn stepped(&mut self, metrics: &Metrics) {
        self.step = metrics.step;
    }
    fn warned(&mut self, _: &str) {}
    fn wants_stop(&mut self) -> bool {
        self.stop_after.is_some_and(|last| self.step >= last)
    }
}

/// Small enough for tests: 4 problems x 4 responses.
fn plan(overrides: &[&str]) -> Plan {
    let small = [
        "steps=4",
        "rollout.problems_per_step=4",
        "rollout.group_size=4",
        "update.problems_per_minibatch=2",
        "evaluation.problems=8",
        "evaluation.every_steps=0",
        "record.checkpoint_every_steps=2",
    ];
    let all = small.iter().chain(overrides).copied();
    Plan::resolve(Config::from_toml("", all).unwrap()).unwrap()
}

fn device(threads: usize) -> Device {
    Device::cpu(CpuOptions { threads, ..CpuOptions::from_env().unwrap() })
}

fn start(folder: &Path, plan: &Plan) -> (Run, Trainer) {
    let manifest = Manifest { schema: SCHEMA, inputs: Vec::new(), steps: Vec::new(), extra: Extra::new() };
    let run = Run::create(folder, "", &plan.to_toml(), manifest).unwrap();
    let trainer = Trainer::new(plan, &folder.join("base"), &device(2)).unwrap();
    (run, trainer)
}

/// Trains to the end and returns the final state hash with the metrics.
fn whole_run(plan: &Plan) -> (String, Vec<Metrics>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let (mut run, mut trainer) = start(&path, plan);
    assert_eq!(train(plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap(), Outcome::Done);
    (trainer.state_hash(), Run::read_metrics(&path).unwrap())
}

/// Metrics without what depends on the clock.
fn timeless(mut metrics: Vec<Metrics>) -> Vec<Metrics> {
    for m in &mut metrics {
        m.tokens_per_second.rollout = 0.0;
        m.tokens_per_second.update = 0.0;
    }
    metrics
}

#[test]
fn rollout_and_training_agree_to_the_bit_and_the_policy_moves() {
    let (hash, metrics) = whole_run(&plan(&[]));
    assert_eq!(metrics.len(), 4);
    assert!(metrics.iter().all(|m| m.exactness_max_abs == 0.0));
    assert!(metrics.iter().all(|m| m.ratio_min > 0.0 && m.n_tokens > 0 && m.entropy_mean > 0.0));
    let still = whole_run(&plan(&["update.learning_rate=1e-12"])).0;
    assert_ne!(hash, still);
}

#[test]
fn stopped_and_resumed_is_the_uninterrupted_run() {
    let plan = plan(&[]);
    let (hash, metrics) = whole_run(&plan);
    for stop_after in 1..4 {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        let (mut run, mut trainer) = start(&path, &plan);
        let mut quiet = Quiet { stop_after: Some(stop_after), step: 0 };
        assert_eq!(train(&plan, &mut run, &mut trainer, &mut quiet).unwrap(), Outcome::Stopped);
        drop((run, trainer));
        let (mut run, mut trainer, refused) = resume(&path, &plan, &device(1)).unwrap();
        assert!(refused.is_empty() && trainer.counters.step == stop_after);
        train(&plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
        assert_eq!(trainer.state_hash(), hash, "stopped after {stop_after}");
        assert_eq!(timeless(Run::read_metrics(&path).unwrap()), timeless(metrics.clone()));
    }
}

#[test]
fn a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used() {
    let plan = plan(&[]);
    let hash = whole_run(&plan).0;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let (mut run, mut trainer) = start(&path, &plan);
    let mut quiet = Quiet { stop_after: Some(3), step: 0 };
    train(&plan, &mut run, &mut trainer, &mut quiet).unwrap();
    let newest = Checkpoint::list(&path).unwrap().pop().unwrap();
    let state = newest.join("state.safetensors");
    let mut bytes = fs::read(&state).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&state, bytes).unwrap();
    // A killed writer's half line.
    let metrics = path.join("metrics.jsonl");
    let text = fs::read_to_string(&metrics).unwrap();
    fs::write(&metrics, &text[..text.len() - 30]).unwrap();
    let (mut run, mut trainer, refused) = resume(&path, &plan, &device(2)).unwrap();
    assert!(refused[0].to_string().contains("step-000003") && refused[0].to_string().contains("damaged"));
    assert_eq!(trainer.counters.step, 2);
    train(&plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
    assert_eq!(trainer.state_hash(), hash);
}

#[test]
fn the_microbatch_budget_changes_no_bit() {
    let hash = whole_run(&plan(&["update.microbatch_tokens=4096"])).0;
    assert_eq!(whole_run(&plan(&["update.microbatch_tokens=256"])).0, hash);
    assert_eq!(whole_run(&plan(&["update.microbatch_tokens=160", "update.recompute=layers"])).0, hash);
}

#[test]
fn every_preset_trains() {
    for preset in stapo_core::objective::presets() {
        let overrides = [format!("objective.preset={}", preset.name), "steps=3".to_string()];
        let overrides: Vec<&str> = overrides.iter().map(String::as_str).collect();
        let (_, metrics) = whole_run(&plan(&overrides));
        assert_eq!(metrics.len(), 3, "{}", preset.name);
        assert!(metrics.iter().all(|m| m.loss.is_finite() && m.gradient_norm.is_finite()), "{}", preset.name);
        assert_eq!(metrics[0].exactness_max_abs, 0.0, "{}", preset.name);
    }
}
