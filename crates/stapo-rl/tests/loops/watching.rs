//! What a run tells of itself: metrics against a second computation, recorded groups, benchmarks, the best checkpoint,
//! patience, and longer runs.

use super::super::{PROGRAM, Quiet, device, plan, resume, start, whole_run};
use stapo_core::record::{EvalRecord, EventKind, Metrics, ResponseRecord, parse_lines};
use stapo_core::stats::quantile;
use stapo_core::{Finish, Verdict};
use stapo_rl::Plan;
use stapo_rl::ranks::Solo;
use stapo_rl::reward::Programs;
use stapo_rl::run::{Checkpoint, Run, read_events, this_process};
use stapo_rl::train::{Interrupted, Outcome, Trainer, train};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A run in a folder of its own, trained to its end.
fn run_of(plan: &Plan) -> (tempfile::TempDir, PathBuf, Outcome) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let (mut run, mut trainer) = start(&path, plan);
    let outcome = train(plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
    (folder, path, outcome)
}

fn metrics(path: &Path) -> Vec<Metrics> {
    Run::read_metrics(path).unwrap()
}

fn responses(path: &Path, step: u64) -> Vec<ResponseRecord> {
    let text = fs::read_to_string(path.join(format!("rollouts/step-{step:06}.jsonl"))).unwrap();
    parse_lines(&text).unwrap().records
}

fn checkpoints(path: &Path) -> Vec<String> {
    let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
    Checkpoint::list(path).unwrap().iter().map(name).collect()
}

fn is_near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-12 * a.abs().max(1.0)
}

/// The mean of `r - 1 - ln r` over the kept tokens of responses, with r the quotient of two probabilities.
fn k3(responses: &[ResponseRecord], log_ratio: impl Fn(&ResponseRecord, usize) -> f64) -> f64 {
    let mut terms = Vec::new();
    for response in responses {
        for token in (0..response.tokens.id.len()).filter(|&t| response.tokens.kept[t]) {
            let log_ratio = log_ratio(response, token);
            terms.push(log_ratio.exp() - 1.0 - log_ratio);
        }
    }
    terms.iter().sum::<f64>() / terms.len() as f64
}

#[test]
fn a_run_without_held_out_problems_has_no_held_out_accuracy() {
    let (_folder, path, outcome) =
        run_of(&plan(&["steps=2", "task.held_out_share=0", "evaluation.every_steps=1"]));
    assert_eq!(outcome, Outcome::Done);
    for step in metrics(&path) {
        assert_eq!((step.eval_accuracy, step.eval_accuracy_before), (None, None), "step {}", step.step);
    }
    assert!(!path.join("best.json").exists());
}

#[test]
fn a_run_whose_folder_is_renamed_ends_and_makes_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let plan = plan(&["steps=4", "record.checkpoint_every_steps=1"]);
    let (mut run, mut trainer) = start(&path, &plan);
    fs::rename(&path, folder.path().join("elsewhere")).unwrap();
    let error = train(&plan, &mut run, &mut trainer, &mut Quiet::new()).err().unwrap().to_string();
    assert!(error.contains("run") && error.contains("No such file"), "{error}");
    assert!(!path.exists());
}

#[test]
fn metrics_are_what_the_records_of_all_responses_say() {
    let plan = plan(&[
        "seed=3",
        "steps=2",
        "objective.masks.0.tau_p=0.3",
        "objective.kl={kind=\"k3\", beta=0.1}",
        "update.learning_rate=1e-3",
        "record.responses=1000",
        "record.responses_every_steps=1",
    ]);
    let (_folder, path, _) = run_of(&plan);
    let metrics = metrics(&path);
    let mut n_sampled = 0;
    for m in &metrics {
        let all = responses(&path, m.step);
        assert_eq!(all.len(), 16);
        let behavior = k3(&all, |r, t| r.tokens.logp[t] - r.tokens.behavior_logp[t]);
        assert!(behavior > 1e-9 && (m.kl_behavior.unwrap() - behavior).abs() < 1e-12, "{behavior:e} {m:?}");
        let n_kept = all.iter().flat_map(|r| &r.tokens.kept).filter(|&&kept| kept).count();
        let n_tokens: usize = all.iter().map(|r| r.tokens.id.len()).sum();
        assert_eq!(m.silenced_share, Some((n_tokens - n_kept) as f64 / n_tokens as f64));
        assert!(n_kept < n_tokens, "some tokens are silenced");
        let lengths: Vec<f64> = all.iter().map(|r| r.tokens.id.len() as f64).collect();
        let found = m.response_tokens.unwrap();
        assert_eq!(
            [found.min as f64, found.q10, found.q50, found.q90, found.max as f64],
            [0.0, 0.1, 0.5, 0.9, 1.0].map(|q| quantile(&lengths, q).unwrap())
        );
        let rewards: Vec<f64> = all.iter().map(|r| r.reward).collect();
        let squares: f64 = rewards.iter().map(|reward| reward * reward).sum();
        let variance = (squares - 16.0 * m.reward_mean * m.reward_mean) / 15.0;
        assert!(is_near(m.reward_std.unwrap(), variance.sqrt()));
        let mut groups: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        for response in &all {
            groups.entry(response.group_idx.unwrap()).or_default().push(response.reward);
        }
        let n_equal = groups.values().filter(|rewards| rewards.iter().all(|r| *r == rewards[0])).count();
        assert_eq!((groups.len(), m.equal_rewards_share), (4, Some(n_equal as f64 / 4.0)));
        n_sampled += n_tokens as u64;
        assert_eq!((m.n_updates, m.tokens_total), (Some(2 * m.step), Some(n_sampled)));
        let seconds = m.seconds.unwrap();
        assert!(seconds.rollout > 0.0 && seconds.grade > 0.0 && seconds.calibrate > 0.0);
        assert!(seconds.update > 0.0 && seconds.record > 0.0 && seconds.checkpoint >= 0.0);
        assert!(is_near(m.tokens_per_second.rollout, m.n_sampled.unwrap() as f64 / seconds.rollout));
        assert!(cfg!(not(target_os = "linux")) || m.memory_bytes.unwrap() > 1 << 20);
    }
    // In the first step the reference is the policy that sampled.
    let reference = k3(&responses(&path, 1), |r, t| r.tokens.behavior_logp[t] - r.tokens.logp[t]);
    assert!(reference > 1e-9 && (metrics[0].kl_reference.unwrap() - reference).abs() < 1e-12);
    assert!(metrics[1].kl_reference.unwrap() > metrics[1].kl_behavior.unwrap());
    // The evaluation and the checkpoint before the first step count in its line.
    let first = metrics[0].seconds.unwrap();
    assert!(first.evaluate > 0.0 && first.checkpoint > 0.0);
    let total: f64 = metrics.iter().map(|m| m.seconds.unwrap().total()).sum();
    assert!(metrics[1].wall_seconds.unwrap() >= total && metrics[0].wall_seconds < metrics[1].wall_seconds);

    let mut trainer = Trainer::new(&plan, &device(1), Programs::Recorded).unwrap();
    let rolled = trainer.roll_out(&plan).unwrap();
    let entropies: Vec<f64> = rolled
        .batch
        .responses()
        .flat_map(|s| &s.rollout.entropy)
        .map(|&entropy| f64::from(entropy))
        .collect();
    let found = metrics[0].entropy_quantiles;
    let expected = [0.1, 0.5, 0.9].map(|q| quantile(&entropies, q).unwrap());
    assert_eq!([found.q10.unwrap(), found.q50, found.q90.unwrap()], expected);
    assert!(metrics.iter().all(|m| m.warnings.is_empty()));
}

#[test]
fn whole_groups_are_recorded_spread_over_the_step() {
    let recorded = |n: usize, overrides: &[&str]| {
        let n = format!("record.responses={n}");
        let (_folder, path, _) =
            run_of(&plan(&[&["steps=1", "evaluation.problems=1", &n], overrides].concat()));
        let file = path.join("rollouts/step-000001.jsonl");
        if file.exists() { responses(&path, 1) } else { Vec::new() }
    };
    let groups = |responses: &[ResponseRecord]| -> Vec<(usize, usize, usize)> {
        let place = |r: &ResponseRecord| (r.group_idx.unwrap(), r.update_idx, r.sample_idx);
        responses.iter().map(place).collect()
    };
    let whole =
        |group_idx: usize, update_idx: usize| (0..4).map(move |sample| (group_idx, update_idx, sample));
    let without_masks = ["objective.preset=grpo"];
    assert_eq!(groups(&recorded(8, &without_masks)), whole(1, 0).chain(whole(3, 1)).collect::<Vec<_>>());
    assert_eq!(groups(&recorded(5, &without_masks)), whole(3, 1).collect::<Vec<_>>(), "one group fits");
    assert_eq!(groups(&recorded(1, &without_masks)), whole(3, 1).collect::<Vec<_>>(), "at least one");
    assert!(recorded(0, &without_masks).is_empty());
    let silenced = recorded(4, &["seed=3", "objective.masks.0.tau_p=0.3"]);
    let has_silenced = |r: &ResponseRecord| r.tokens.silenced_by.iter().any(Option::is_some);
    assert!(silenced.len() > 4 && silenced.iter().filter(|r| r.group_idx != Some(3)).all(has_silenced));
    assert_eq!(silenced.iter().filter(|r| r.group_idx == Some(3)).count(), 4);
}

#[test]
fn warnings_stand_in_the_metrics_and_in_the_events() {
    let (_folder, path, _) = run_of(&plan(&["steps=1", "reward.right=1.0", "rollout.temperature=0.01"]));
    let said = &metrics(&path)[0].warnings;
    assert!(said.len() == 1 && said[0].contains("every group has equal rewards"), "{said:?}");
    let events = read_events(&path).unwrap();
    let warned: Vec<&String> =
        events.iter().filter(|e| e.event == EventKind::Warning).map(|e| &e.text).collect();
    assert_eq!(warned, [&said[0]]);
}

#[test]
fn the_best_checkpoint_is_kept_and_named() {
    let best_of = |metrics: &[Metrics]| {
        let before = (0, metrics[0].eval_accuracy_before.unwrap());
        let after = metrics.iter().map(|m| (m.step, m.eval_accuracy.unwrap()));
        after.fold(before, |best, next| if next.1 > best.1 { next } else { best })
    };
    let settings =
        ["seed=5", "evaluation.every_steps=1", "record.keep_checkpoints=1", "update.learning_rate=3e-3"];
    let plan = plan(&settings);
    let (_folder, path, outcome) = run_of(&plan);
    let best = Run::read_best(&path).unwrap().unwrap();
    let metrics = metrics(&path);
    assert_eq!((outcome, (best.step, best.value)), (Outcome::Done, best_of(&metrics)));
    assert_eq!(best.metric, "held_out");
    let mut expected = vec![format!("step-{:06}", best.step), "step-000004".to_string()];
    expected.dedup();
    assert_eq!(checkpoints(&path), expected, "{best:?}");
    // A resume finds the same best from the metrics alone, and without one nothing is kept.
    fs::remove_file(path.join("best.json")).unwrap();
    fs::remove_file(path.join("manifest.sha256")).unwrap();
    let (mut run, mut trainer, _) = resume(&path, 1);
    train(&plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
    assert_eq!(Run::read_best(&path).unwrap(), Some(best));
    drop(run);
    let interrupted = Interrupted::open(&path, &["evaluation.best=none".into()], false, PROGRAM).unwrap();
    let writer = this_process(PROGRAM, "cpu");
    let (plan, mut run, mut trainer) =
        interrupted.resume(&writer, &device(1), Programs::Recorded, Solo::ranks()).unwrap();
    train(&plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
    assert_eq!((Run::read_best(&path).unwrap(), checkpoints(&path)), (None, vec!["step-000004".to_string()]));
}

/// A learning rate so small that no evaluation changes.
#[test]
fn patience_ends_a_run_that_does_not_improve() {
    let still = ["update.learning_rate=1e-9", "update.weight_decay=0", "evaluation.every_steps=1"];
    let patient = plan(&[&still[..], &["evaluation.patience=2", "record.keep_checkpoints=1"]].concat());
    let (_folder, path, outcome) = run_of(&patient);
    assert_eq!((outcome, metrics(&path).len()), (Outcome::NoImprovement, 2));
    assert_eq!(checkpoints(&path), ["step-000000", "step-000002"], "the state before training is the best");
    let go_on = |set: &[&str]| go_on(&path, set);
    assert_eq!(go_on(&[]), (Outcome::NoImprovement, 2), "its patience is at an end already");
    assert_eq!(go_on(&["evaluation.patience=3"]), (Outcome::NoImprovement, 3));
    assert_eq!(go_on(&["evaluation.patience=9"]), (Outcome::Done, 4));
}

/// Goes on with a run; returns how it ended and its steps.
fn go_on(path: &Path, set: &[&str]) -> (Outcome, usize) {
    let set: Vec<String> = set.iter().map(ToString::to_string).collect();
    let interrupted = Interrupted::open(path, &set, false, PROGRAM).unwrap();
    let writer = this_process(PROGRAM, "cpu");
    let (plan, mut run, mut trainer) =
        interrupted.resume(&writer, &device(1), Programs::Recorded, Solo::ranks()).unwrap();
    let outcome = train(&plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
    (outcome, metrics(path).len())
}

/// Responses of one token are never right.
#[test]
fn idle_patience_ends_a_run_in_which_every_group_has_equal_rewards() {
    let idle = plan(&["rollout.max_response_tokens=1", "evaluation.idle_patience=2"]);
    let (_folder, path, outcome) = run_of(&idle);
    assert_eq!((outcome, metrics(&path).len()), (Outcome::NothingLearned, 2));
    assert_eq!(go_on(&path, &[]), (Outcome::NothingLearned, 2), "its patience is at an end already");
    assert_eq!(go_on(&path, &["evaluation.idle_patience=3"]), (Outcome::NothingLearned, 3));
    assert_eq!(go_on(&path, &["evaluation.idle_patience=4"]), (Outcome::Done, 4), "all steps are done");
    let is_told = |text: &String| text.contains("every group has equal rewards");
    let n_told = metrics(&path).iter().flat_map(|step| &step.warnings).filter(|text| is_told(text)).count();
    assert_eq!(n_told, 1, "a run warns once, however often it goes on");
    assert_eq!(go_on(&path, &[]), (Outcome::Done, 4), "they still are");
}

#[test]
fn benchmarks_are_evaluated_during_training_and_can_choose_the_best() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("own.jsonl");
    fs::write(&file, "{\"problem\": \"1+1=\", \"answer\": \"2\"}\n").unwrap();
    let benchmarks = format!("evaluation.benchmarks=[\"arithmetic\", {file:?}]");
    let plan = plan(&[
        "steps=2",
        "evaluation.every_steps=1",
        "evaluation.benchmark_limit=5",
        "evaluation.benchmark_samples=2",
        "evaluation.benchmark_template=\"{{problem}}\"",
        "evaluation.best=arithmetic",
        &benchmarks,
    ]);
    let (_own, path, _) = run_of(&plan);
    let metrics = metrics(&path);
    let mut best = (0, f64::NEG_INFINITY);
    for step in 0..=2 {
        let scores =
            if step == 0 { &metrics[0].benchmarks_before } else { &metrics[step as usize - 1].benchmarks };
        let text = fs::read_to_string(path.join(format!("benchmarks/step-{step:06}.jsonl"))).unwrap();
        let samples: Vec<EvalRecord> = parse_lines(&text).unwrap().records;
        assert_eq!(samples.len(), 12);
        assert!(samples.iter().all(|s| s.step == Some(step) && s.n_tokens <= 96));
        assert!(samples.iter().any(|s| matches!(s.finish, Finish::Stop { .. })));
        for (name, n_questions) in [("arithmetic", 5), ("own", 1)] {
            let own = samples.iter().filter(|s| s.benchmark == name);
            let n_right = own.filter(|s| s.verdict == Verdict::Right).count();
            let score = &scores[name];
            assert!(is_near(score.accuracy, n_right as f64 / (2 * n_questions) as f64), "{score:?}");
            assert_eq!((score.n_questions, score.n_samples), (n_questions, 2));
            assert_eq!(score.sha256.is_some(), name == "own");
        }
        if scores["arithmetic"].accuracy > best.1 {
            best = (step, scores["arithmetic"].accuracy);
        }
    }
    let named = Run::read_best(&path).unwrap().unwrap();
    assert_eq!((named.step, named.value, named.metric.as_str()), (best.0, best.1, "arithmetic"));
    // Another file under the same name is told when the run goes on.
    fs::write(&file, "{\"problem\": \"1+2=\", \"answer\": \"3\"}\n").unwrap();
    let (mut run, mut trainer, _) = resume(&path, 1);
    train(&plan, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
    let events = read_events(&path).unwrap();
    assert!(
        events.iter().any(|e| e.text == "benchmark own: its questions changed after step 2"),
        "{events:?}"
    );

    let missing =
        super::super::plan(&["evaluation.benchmarks=[\"gsm8k\"]", "evaluation.benchmark_data=\"nowhere\""]);
    let mut trainer = Trainer::new(&missing, &device(1), Programs::Recorded).unwrap();
    let said = trainer.open_benchmarks(&missing).unwrap_err().to_string();
    assert!(said.contains("no gsm8k.jsonl") && said.contains("stapo fetch"), "{said}");
}

/// A longer run has the learning rates that its settings name, never others in silence.
#[test]
fn a_run_whose_learning_rates_follow_from_its_steps_is_extended_with_a_total() {
    let cosine = "update.schedule={kind=\"cosine\", warmup_share=0.5}";
    let (_folder, path, _) = run_of(&plan(&["steps=2", cosine]));
    let set = |texts: &[&str]| -> Vec<String> { texts.iter().map(ToString::to_string).collect() };
    let said = match Interrupted::open(&path, &set(&["steps=3"]), false, PROGRAM) {
        Ok(_) => panic!("must be refused"),
        Err(error) => error.to_string(),
    };
    for expected in
        ["update.schedule.total_steps: absent", "from 2 to 3", "a total of 4", "hint: give the total"]
    {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    assert!(Interrupted::open(&path, &set(&["evaluation.problems=9"]), false, PROGRAM).is_ok());
    let longer = set(&["steps=3", "update.schedule.total_steps=4"]);
    let interrupted = Interrupted::open(&path, &longer, false, PROGRAM).unwrap();
    let writer = this_process(PROGRAM, "cpu");
    let (longer, mut run, mut trainer) =
        interrupted.resume(&writer, &device(1), Programs::Recorded, Solo::ranks()).unwrap();
    train(&longer, &mut run, &mut trainer, &mut Quiet::new()).unwrap();
    let events = read_events(&path).unwrap();
    let changes: Vec<&str> =
        events.iter().filter_map(|e| e.change.as_ref()).map(|change| change.name.as_str()).collect();
    assert_eq!(changes, ["steps", "update.schedule.total_steps"]);
    let total = "update.schedule={kind=\"cosine\", warmup_share=0.5, total_steps=4}";
    let (hash, metrics) = whole_run(&plan(&["steps=3", total]));
    assert_eq!(trainer.learner.state_hash().unwrap(), hash, "as if it had been long from the start");
    assert_eq!(metrics[2].learning_rate, 0.0);
}
