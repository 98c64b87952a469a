//! The training loop on a tiny model: the result has the same bits for all interruptions, micro-batches and thread
//! counts.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod loops;

use serde_json::{Map, Value, json};
use stapo_core::record::{
    Metrics, Record, ResponseRecord, StopReason, TokenRecord, parse_lines, parse_responses,
};
use stapo_rl::device::{CpuOptions, Device};
use stapo_rl::lab::evaluation::Evaluated;
use stapo_rl::policy::identity;
use stapo_rl::ranks::Solo;
use stapo_rl::reward::Programs;
use stapo_rl::run::{Checkpoint, Run, read_events, this_process};
use stapo_rl::train::{Interrupted, Outcome, Trainer, Watch, train};
use stapo_rl::{Config, Plan};
use std::fs;
use std::path::Path;
use std::sync::LazyLock;
use std::time::Instant;

const PROGRAM: &str = "of a test";

/// An observer that ends the run after `stop_after`, as Ctrl-C would.
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
    fn started(&mut self, _: &Evaluated) {}
    fn stepped(&mut self, metrics: &Metrics) {
        self.step = metrics.step;
    }
    fn warned(&mut self, _: &str) {}
    fn wants_stop(&mut self) -> bool {
        self.stop_after.is_some_and(|last| self.step >= last)
    }
}

/// A plan with 4 problems of 4 responses per step.
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
    let identity = identity::of_plan(plan, PROGRAM).unwrap();
    let run = Run::create(folder, "", &plan.to_toml(), identity, &this_process(PROGRAM, "cpu")).unwrap();
    let trainer = Trainer::new(plan, &device(2), Programs::Recorded).unwrap();
    (run, trainer)
}

/// The run at its newest good checkpoint, and the errors of newer checkpoints that were refused.
fn resume(folder: &Path, threads: usize) -> (Run, Trainer, Vec<String>) {
    let interrupted = Interrupted::open(folder, &[], false, PROGRAM).unwrap();
    let refused = interrupted.reopening.refused.iter().map(ToString::to_string).collect();
    let writer = this_process(PROGRAM, "cpu");
    let (_, run, trainer) =
        interrupted.resume(&writer, &device(threads), Programs::Recorded, Solo::ranks()).unwrap();
    (run, trainer, refused)
}

/// Trains to the end and returns the final state hash with the metrics.
fn whole_run(plan: &Plan) -> (String, Vec<Metrics>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let (mut run, mut trainer) = start(&path, plan);
    assert_eq!(train(plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap(), Outcome::Done);
    (trainer.learner.state_hash().unwrap(), Run::read_metrics(&path).unwrap())
}

/// With these limits every step but the first warns of its entropy, beside that of the first step.
fn warned_plan() -> Plan {
    plan(&["canaries.entropy_collapse_factor=1.0", "canaries.entropy_explosion_factor=1.0"])
}

/// The end of the whole run of `warned_plan`, which several tests compare with.
static WHOLE: LazyLock<(String, Vec<Metrics>)> = LazyLock::new(|| whole_run(&warned_plan()));

/// The metrics without the values that depend on the clock.
fn timeless(mut metrics: Vec<Metrics>) -> Vec<Metrics> {
    for m in &mut metrics {
        m.tokens_per_second.rollout = 0.0;
        m.tokens_per_second.update = 0.0;
        (m.seconds, m.wall_seconds, m.memory_bytes) = (None, None, None);
        if m.episodes.is_some() {
            // Which sequences share a step depends on when the environment answers, and so do counts of steps and drafts.
            m.decoding = None;
        }
    }
    metrics
}

#[test]
fn rollout_and_training_agree_to_the_bit_and_the_policy_moves() {
    let (hash, metrics) = &*WHOLE;
    assert_eq!(metrics.len(), 4);
    assert!(metrics.iter().all(|m| m.exactness_max_abs == 0.0));
    assert!(metrics.iter().all(|m| m.ratio_min > 0.0 && m.n_tokens > 0 && m.entropy_mean > 0.0));
    let slower = whole_run(&plan(&["update.learning_rate=1e-5"])).0;
    assert_ne!(*hash, slower);
}

#[test]
fn stopped_and_resumed_is_the_uninterrupted_run() {
    let plan = warned_plan();
    let (hash, metrics) = &*WHOLE;
    let baseline = format!("from {:.3} to ", metrics[0].entropy_mean);
    let warns = |m: &Metrics| m.warnings.iter().any(|text| text.contains(&baseline));
    // The drift lasts, and is named once.
    let warned: Vec<bool> = metrics.iter().map(warns).collect();
    assert_eq!(warned, [false, true, false, false], "{baseline}");
    for stop_after in 1..4 {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        let began = Instant::now();
        let (mut run, mut trainer) = start(&path, &plan);
        let mut quiet = Quiet { stop_after: Some(stop_after), step: 0 };
        assert_eq!(train(&plan, &mut run, &mut trainer, &mut quiet).unwrap(), Outcome::Stopped);
        drop((run, trainer));
        let signature = path.join("manifest.sig");
        fs::write(&signature, "of the receipt before").unwrap();
        let (mut run, mut trainer, refused) = resume(&path, 1);
        assert!(refused.is_empty() && trainer.learner.counters.step == stop_after);
        assert!(!signature.exists(), "a signature ends with its receipt");
        train(&plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
        let resumed: Vec<Metrics> = Run::read_metrics(&path).unwrap();
        let worked: f64 = resumed.iter().map(|m| m.seconds.unwrap().total()).sum();
        let counted = resumed[3].wall_seconds.unwrap();
        assert!(counted >= worked, "the clock of both processes goes on");
        assert!(counted <= began.elapsed().as_secs_f64(), "and counts every second once: {counted}");
        assert_eq!(trainer.learner.state_hash().unwrap(), *hash, "stopped after {stop_after}");
        assert_eq!(timeless(Run::read_metrics(&path).unwrap()), timeless(metrics.clone()));
    }
}

#[test]
fn a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used() {
    let plan = plan(&[]);
    let hash = &WHOLE.0;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let (mut run, mut trainer) = start(&path, &plan);
    let mut quiet = Quiet { stop_after: Some(3), step: 0 };
    train(&plan, &mut run, &mut trainer, &mut quiet).unwrap();
    let newest = Checkpoint::list(&path).unwrap().pop().unwrap();
    let state = newest.join("weights.safetensors");
    let mut bytes = fs::read(&state).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&state, bytes).unwrap();
    // Cut the last line, as a killed writer would leave the file.
    let metrics = path.join("metrics.jsonl");
    let text = fs::read_to_string(&metrics).unwrap();
    fs::write(&metrics, &text[..text.len() - 30]).unwrap();
    fs::remove_file(path.join("manifest.sha256")).unwrap();
    drop(run);
    let (mut run, mut trainer, refused) = resume(&path, 2);
    assert!(refused[0].contains("step-000003") && refused[0].contains("damaged"));
    assert_eq!(trainer.learner.counters.step, 2);
    train(&plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
    assert_eq!(trainer.learner.state_hash().unwrap(), *hash);
}

#[test]
fn the_microbatch_budget_changes_no_bit() {
    let hash = |budget: &str| whole_run(&plan(&["steps=5", budget])).0;
    let large = hash("update.microbatch_tokens=4096");
    assert_eq!(hash("update.microbatch_tokens=256"), large);
    for recompute in ["update.recompute=inputs", "update.recompute=layers"] {
        let recomputed = plan(&["steps=5", "update.microbatch_tokens=160", recompute]);
        assert_eq!(whole_run(&recomputed).0, large, "{recompute}");
    }
}

/// Candidates wait for tau_h until the other tokens are learned from. A further mask that keeps every token but reads the
/// whole mini-batch makes the run score the mini-batch first instead.
#[test]
fn drafts_change_no_bit_of_a_run() {
    let run = |speculate: &str| {
        let speculate = format!("rollout.speculate={speculate:?}");
        whole_run(&plan(&["steps=3", "rollout.max_response_tokens=64", &speculate]))
    };
    let [(hash, with), (expected, without)] = ["auto", "off"].map(run);
    assert_eq!(hash, expected);
    let decoding = |metrics: &[Metrics]| -> Vec<_> { metrics.iter().filter_map(|m| m.decoding).collect() };
    let (with_counts, without_counts) = (decoding(&with), decoding(&without));
    assert!(with_counts.iter().any(|counts| counts.accepted > 0), "{with_counts:?}");
    assert!(without_counts.iter().all(|counts| counts.drafted == 0), "{without_counts:?}");
    for (with, without) in with_counts.iter().zip(&without_counts) {
        assert!(with.steps <= without.steps, "{with:?} {without:?}");
    }
    let responses = |metrics: Vec<Metrics>| {
        timeless(metrics).into_iter().map(|m| Metrics { decoding: None, ..m }).collect::<Vec<_>>()
    };
    assert_eq!(responses(with), responses(without));
}

#[test]
fn truncated_sampling_is_trained_exactly() {
    let settings = ["steps=2", "rollout.top_k=5", "rollout.top_p=0.9", "rollout.min_p=0.01"];
    let (hash, metrics) = whole_run(&plan(&settings));
    let (full, _) = whole_run(&plan(&["steps=2"]));
    assert_ne!(hash, full);
    for m in &metrics {
        assert_eq!((m.exactness_max_abs, m.extra["distribution"].as_str()), (0.0, Some("kept")));
        assert!(m.entropy_mean <= 5_f64.ln() && m.gradient_norm > 0.0, "{m:?}");
        // The second mini-batch reads the tokens that were kept when its responses were sampled.
        assert!(m.ratio_min < 1.0 && m.ratio_max > 1.0 && m.ratio_max < 2.0, "{m:?}");
    }
    // Responses of the whole distribution are its truncation to all tokens.
    let kl = [&settings[..], &["objective=grpo"]].concat();
    assert!(whole_run(&plan(&kl)).1.iter().all(|m| m.exactness_max_abs == 0.0));
}

#[test]
fn a_model_that_drafts_changes_no_bit_of_a_run() {
    let drafting = plan(&["steps=2", "rollout.draft=\"builtin\""]);
    let (hash, with) = whole_run(&drafting);
    let (expected, without) = whole_run(&plan(&["steps=2", "rollout.speculate=\"off\""]));
    assert_eq!(hash, expected);
    // The model at the start of the run drafts for the policy, which has hardly moved.
    for (with, without) in with.iter().zip(&without) {
        let (with, without) = (with.decoding.unwrap(), without.decoding.unwrap());
        assert!(with.accepted > 0 && with.steps < without.steps, "{with:?} {without:?}");
    }
}

#[test]
fn candidates_that_wait_are_learned_from_as_after_a_scoring_pass() {
    const S2T: &str = r#"{kind="spurious", tau_p=0.2, q=0.5}"#;
    let run = |masks: &str| {
        let masks = format!("objective.masks=[{masks}]");
        whole_run(&plan(&["steps=1", "rollout.group_size=8", "update.learning_rate=1e-3", &masks]))
    };
    let (waiting_state, waiting) = run(S2T);
    let (scored_state, scored) = run(&format!(r#"{S2T}, {{kind="top_entropy", share=1.0}}"#));
    let counts = |m: &Metrics| (m.n_tokens, m.n_candidates, m.n_silenced);
    assert_eq!(counts(&waiting[0]), counts(&scored[0]));
    assert!(waiting[0].n_silenced > 0 && waiting[0].n_silenced < waiting[0].n_candidates);
    let off = (waiting[0].gradient_norm / scored[0].gradient_norm - 1.0).abs();
    assert!(off < 1e-4, "gradient norms {off} apart");
    assert!((waiting[0].loss - scored[0].loss).abs() < 1e-6);
    assert_ne!(waiting_state, scored_state, "no kept candidate waited, so the test shows nothing");
}

/// The curve of a run: the metrics that do not depend on the clock, and the final state hash.
fn curve(plan: &Plan) -> Value {
    const KEYS: [&str; 11] = [
        "step",
        "reward_mean",
        "accuracy",
        "response_tokens_mean",
        "entropy_mean",
        "n_tokens",
        "n_candidates",
        "n_silenced",
        "clip_fraction",
        "loss",
        "gradient_norm",
    ];
    let (state, metrics) = whole_run(plan);
    assert_eq!(metrics[0].exactness_max_abs, 0.0);
    let steps: Vec<Value> = metrics
        .iter()
        .map(|metrics| {
            let line = serde_json::to_value(metrics).unwrap();
            KEYS.into_iter().map(|key| (key.to_string(), line[key].clone())).collect::<Map<_, _>>().into()
        })
        .collect();
    json!({ "steps": steps, "state": state })
}

/// The committed curves hold to the last bit on every machine. After a change that is meant to change results, write
/// the curves anew: `STAPO_WRITE_CURVES=1 cargo test -p stapo-rl --test loop along`.
#[test]
fn every_preset_trains_along_its_committed_curve() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/curves.json");
    let mut found = Map::new();
    for preset in stapo_core::objective::presets() {
        let objective = format!("objective.preset={}", preset.name);
        found.insert(preset.name.to_string(), curve(&plan(&[&objective, "steps=2"])));
    }
    if std::env::var_os("STAPO_WRITE_CURVES").is_some() {
        fs::write(path, format!("{:#}\n", Value::from(found.clone()))).unwrap();
    }
    let committed: Map<String, Value> = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    for (name, curve) in &found {
        assert_eq!(Some(curve), committed.get(name), "{name}");
    }
    assert_eq!(found.len(), committed.len());
}

/// The error message of a run that stops.
fn complaint(plan: &Plan) -> String {
    let folder = tempfile::tempdir().unwrap();
    let (mut run, mut trainer) = start(&folder.path().join("run"), plan);
    train(plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap_err().to_string()
}

/// Metrics, token records and response records have the same candidates, whichever policy's signals the masks read.
#[test]
fn candidates_agree_in_every_record() {
    for signals in ["current", "behavior"] {
        let plan = plan(&[
            &format!("objective.mask_signals={signals}"),
            "objective.masks.0.tau_p=0.3",
            "update.learning_rate=1e-3",
            "record.responses=1000",
            "record.responses_every_steps=1",
        ]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        let (mut run, mut trainer) = start(&path, &plan);
        train(&plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
        for metrics in Run::read_metrics::<Metrics>(&path).unwrap() {
            let file = |part: &str| path.join(part).join(format!("step-{:06}.jsonl", metrics.step));
            let read = |part: &str| fs::read_to_string(file(part)).unwrap_or_default();
            let n_tokens = |part| parse_lines::<TokenRecord>(&read(part)).unwrap().records.len();
            assert_eq!(n_tokens("tokens") + n_tokens("explored"), metrics.n_candidates, "{signals}");
            let mut responses = parse_lines::<ResponseRecord>(&read("rollouts")).unwrap().records;
            let marked: Vec<Vec<bool>> = responses.iter().map(|r| r.tokens.is_candidate.clone()).collect();
            assert_eq!(marked.iter().flatten().filter(|&&is| is).count(), metrics.n_candidates, "{signals}");
            for response in &mut responses {
                response.tokens.is_candidate.clear();
            }
            let without: String = responses.iter().map(Record::to_line).collect();
            assert!(!without.contains("is_candidate"));
            let derived = parse_responses(&without, &plan.objective).unwrap().records;
            assert!(derived.iter().zip(&marked).all(|(response, own)| response.tokens.is_candidate == *own));
        }
    }
}

#[test]
fn an_update_too_small_for_the_weights_is_told() {
    let said =
        complaint(&plan(&["update.learning_rate=1e-46", "update.weight_decay=0", "rollout.group_size=8"]));
    assert!(said.contains("canary weights") && said.contains("raise update.learning_rate"), "{said}");
}

#[test]
fn a_gradient_that_is_not_finite_names_step_microbatch_and_tensor_and_changes_nothing() {
    let plan = plan(&["reward.right=1e38", "objective.preset=rloo", "update.microbatch_tokens=160"]);
    let folder = tempfile::tempdir().unwrap();
    let (mut run, mut trainer) = start(&folder.path().join("run"), &plan);
    let fresh = trainer.learner.state_hash().unwrap();
    let said = train(&plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap_err().to_string();
    assert!(said.contains(", micro-batch ") && said.contains("gradient of "), "{said}");
    let n_done = trainer.learner.counters.step;
    assert!(said.starts_with(&format!("step {}", n_done + 1)), "{said}");
    let before = if n_done == 0 {
        fresh
    } else {
        whole_run(&Plan { config: Config { steps: n_done, ..plan.config.clone() }, ..plan }).0
    };
    assert_eq!(trainer.learner.state_hash().unwrap(), before);
}

#[test]
fn groups_of_equal_rewards_are_redrawn_as_often_as_allowed() {
    let redrawn = plan(&["rollout.max_redraws=8", "rollout.group_size=2"]);
    let mut trainer = Trainer::new(&redrawn, &device(2), Programs::Recorded).unwrap();
    let rolled = trainer.roll_out(&redrawn).unwrap();
    assert!(rolled.n_drawn > 4, "with two responses each, some groups agree");
    assert_eq!(rolled.batch.groups.len(), 4);
    assert!(rolled.batch.groups.iter().all(|group| !group.is_unanimous()));
    let again = trainer.roll_out(&redrawn).unwrap();
    assert_eq!((&again.batch, again.n_drawn), (&rolled.batch, rolled.n_drawn));
    let once = trainer.roll_out(&plan(&["rollout.group_size=2"])).unwrap();
    assert_eq!(once.n_drawn, 4);
    // The key of a sample holds the number of its draw, so a later draw is no repetition of the first.
    let text = |group: usize| {
        let rollout = &again.batch.groups[group].members[0].rollout;
        trainer.learner.model.text(rollout.response()).unwrap().unwrap()
    };
    assert_eq!([text(0), text(3)], [r"and 23*(4+1), and 23*5, next \boxed{155}", r"so \boxed{3}"]);
    trainer.learn(&redrawn, &again).unwrap();
    assert_eq!(trainer.learner.counters.position, again.n_drawn, "the next step begins after what was drawn");
}

#[test]
fn long_responses_lose_reward_where_shaping_is_on() {
    let shaped = plan(&["rollout.overlong={max_tokens=96,buffer_tokens=90}"]);
    let mut trainer = Trainer::new(&shaped, &device(2), Programs::Recorded).unwrap();
    for scored in trainer.roll_out(&shaped).unwrap().batch.responses() {
        let verdict = if scored.verdict == stapo_core::Verdict::Right { 1.0 } else { -1.0 };
        let over = (scored.rollout.n_sampled() as f64 - 6.0).max(0.0) / 90.0;
        assert!((scored.reward - (verdict - over)).abs() < 1e-12, "{}", scored.reward);
    }
}

/// The reference of a KL penalty is the model at the start of the run, after a resume too.
#[test]
fn the_reference_is_frozen() {
    let held =
        plan(&["objective.preset=grpo", "objective.kl={kind=\"k3\",beta=5.0}", "update.learning_rate=1e-3"]);
    let (held_hash, metrics) = whole_run(&held);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let (mut run, mut trainer) = start(&path, &held);
    train(&held, &mut run, &mut trainer, &mut Quiet { stop_after: Some(2), step: 0 }).unwrap();
    drop(run);
    let (mut run, mut trainer, _) = resume(&path, 2);
    train(&held, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
    assert_eq!(trainer.learner.state_hash().unwrap(), held_hash);
    assert_eq!(timeless(Run::read_metrics(&path).unwrap()), timeless(metrics.clone()));
    drop(run);
    // Another reference, the trained model, is another run from its first step on.
    let reference = format!("reference={{kind=\"path\", path={path:?}}}");
    let kl = "objective.kl={kind=\"k3\",beta=5.0}";
    let other = plan(&["steps=1", "objective.preset=grpo", kl, "update.learning_rate=1e-3", &reference]);
    let (_, other) = whole_run(&other);
    assert!(other[0].kl_reference > metrics[0].kl_reference.map(|kl| kl + 1e-4), "{other:?}");
    assert_ne!(other[0].gradient_norm, metrics[0].gradient_norm);
}

#[test]
fn a_target_ends_the_run_early() {
    // The accuracy after the first step, to the bit.
    let plan = plan(&["evaluation.every_steps=1", "evaluation.target_accuracy=0.375"]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let (mut run, mut trainer) = start(&path, &plan);
    assert_eq!(train(&plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap(), Outcome::TargetReached);
    let metrics = Run::read_metrics::<Metrics>(&path).unwrap();
    assert_eq!((metrics.len(), metrics[0].eval_accuracy), (1, Some(0.375)));
    assert!(metrics[0].eval_accuracy_before.is_some());
    // A target that is reached in the last step is reached too, and without the evaluation at the start to the same bits.
    let mut last = Plan { config: Config { steps: 1, ..plan.config.clone() }, ..plan };
    last.config.evaluation.at_start = false;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let (mut run, mut trainer) = start(&path, &last);
    assert_eq!(train(&last, &mut run, &mut trainer, &mut Quiet::new()).unwrap(), Outcome::TargetReached);
    assert_eq!(read_events(&path).unwrap().last().unwrap().reason, Some(StopReason::TargetReached));
    let metrics = Run::read_metrics::<Metrics>(&path).unwrap();
    assert_eq!((metrics[0].eval_accuracy_before, metrics[0].eval_accuracy), (None, Some(0.375)));
}

/// Evaluations, hashes, responses and checkpoints of every second step, and of the last where a run ends with one.
#[test]
fn what_is_due_every_second_step_is_there_in_no_other() {
    let plan = plan(&[
        "steps=3",
        "evaluation.every_steps=2",
        "record.state_hash_every_steps=2",
        "record.responses_every_steps=2",
        "record.checkpoint_every_steps=2",
        "record.keep_checkpoints=9",
        "evaluation.best=none",
    ]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let (mut run, mut trainer) = start(&path, &plan);
    train(&plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
    let metrics = Run::read_metrics::<Metrics>(&path).unwrap();
    let has = |of: fn(&Metrics) -> bool| metrics.iter().map(of).collect::<Vec<_>>();
    assert_eq!(has(|m| m.eval_accuracy.is_some()), [false, true, true]);
    assert_eq!(has(|m| m.eval_accuracy_before.is_some()), [true, false, false]);
    assert_eq!(has(|m| m.state_sha256.is_some()), [false, true, false]);
    let responses = (1..=3).filter(|step| path.join(format!("rollouts/step-{step:06}.jsonl")).exists());
    assert_eq!(responses.collect::<Vec<_>>(), [1, 2], "those of the first step always");
    let checkpoints = Checkpoint::list(&path).unwrap();
    let names: Vec<_> = checkpoints.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(names, ["step-000000", "step-000002", "step-000003"]);
    loops::check_state_files(&checkpoints[1]);
}
