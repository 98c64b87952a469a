use super::*;
use crate::plan::config::CanaryConfig;
use crate::testing::metrics;
use stapo_core::record::Metrics;

fn shipped() -> Vec<(String, String)> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../experiments");
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let toml = entries.filter(|path| path.extension().is_some_and(|e| e == "toml"));
    let text = |path: &std::path::Path| std::fs::read_to_string(path).unwrap();
    toml.map(|path| (path.file_stem().unwrap().to_string_lossy().into_owned(), text(&path))).collect()
}

#[test]
fn shipped_experiments_have_the_runs_they_promise() {
    let runs: BTreeMap<String, usize> = shipped()
        .into_iter()
        .map(|(name, text)| {
            let experiment =
                ExperimentSpec::from_toml(&text).unwrap().expand().unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(experiment.name, name);
            (name, experiment.arms.len())
        })
        .collect();
    let expected = [
        ("ablation-mask", 33),
        ("ablation-tau", 12),
        ("base-arithmetic", 2),
        ("base-gsm8k", 2),
        ("code", 4),
        ("code-1.5b", 2),
        ("copying", 6),
        ("dasd", 20),
        ("dgg", 20),
        ("falsify", 10),
        ("gsm8k", 10),
        ("gsm8k-1.5b", 9),
        ("gsm8k-human", 6),
        ("gsm8k-short", 10),
        ("long-0.5b", 4),
        ("lora", 20),
        ("lora-gsm8k", 8),
        ("main", 20),
        ("main-quick", 8),
        ("math", 10),
        ("math-1.5b", 4),
        ("math-short", 10),
        ("rising", 27),
        ("rising-builtin", 18),
        ("rising-probe", 6),
        ("rising-starts", 9),
        ("scale", 40),
        ("stability", 24),
        ("stability-arms", 100),
        ("stability-builtin", 30),
        ("stability-stale", 24),
        ("thresholds", 25),
        ("transfer", 6),
    ];
    assert_eq!(runs, expected.map(|(name, n)| (name.to_string(), n)).into());
}

#[test]
fn a_matrix_takes_every_combination_and_names_it() {
    let text = "name = \"m\"\nseeds = [3]\n[[arms]]\nname = \"stapo\"\n[matrix]\n\"rollout.group_size\" = [4, 8]\n\"update.learning_rate\" = [1e-4, 2e-4]";
    let experiment = ExperimentSpec::from_toml(text).unwrap().expand().unwrap();
    assert_eq!(experiment.arms.len(), 4);
    let arm = &experiment.arms[3];
    assert_eq!(arm.name, "stapo,rollout.group_size=8,update.learning_rate=0.0002");
    assert_eq!(arm.run, "stapo-rollout.group_size-8-update.learning_rate-0.0002/seed-3");
    assert_eq!(arm.settings[..2], ["rollout.group_size=8", "update.learning_rate=0.0002"]);
}

#[test]
fn a_wrong_value_is_found_before_the_first_run() {
    let complaint = |text: &str| match ExperimentSpec::from_toml(text).and_then(|spec| spec.expand()) {
        Ok(_) => panic!("{text}"),
        Err(error) => error.to_string(),
    };
    let base = "name = \"m\"\nseeds = [0]\n";
    let said = complaint(&format!("{base}[[arms]]\nname = \"a\"\nset = [\"steps=none\"]"));
    assert!(said.contains("config.steps"), "{said}");
    let said = complaint(&format!("{base}[config]\nstepz = 2\n[[arms]]\nname = \"a\""));
    assert!(said.contains("did you mean `steps`?"), "{said}");
    let said = complaint(&format!("{base}method = \"b\"\n[[arms]]\nname = \"a\""));
    assert!(said.contains("b is no arm"), "{said}");
    let said = complaint(&format!("{base}reach = \"c\"\n[[arms]]\nname = \"a\""));
    assert!(said.contains("config.reach: c is no arm"), "{said}");
    let said = complaint("name = \"m\"\nseeds = []\n[[arms]]\nname = \"a\"");
    assert!(said.contains("expected at least one of each"), "{said}");
    let said = complaint(&format!("{base}[[arms]]\nname = \"a\"\n[matrix]\nsteps = 3"));
    assert!(said.contains("steps is not a list"), "{said}");
}

/// Two runs never share a folder or a result.
#[test]
fn arms_and_seeds_that_could_be_taken_for_one_another_are_refused() {
    let complaint = |seeds: &str, arms: &[&str]| {
        let named = |name: &&str| format!("[[arms]]\nname = {}\n", Value::String((*name).to_string()));
        let arms: Vec<String> = arms.iter().map(named).collect();
        let text = format!("name = \"m\"\nseeds = {seeds}\n{}", arms.concat());
        ExperimentSpec::from_toml(&text).and_then(|spec| spec.expand()).unwrap_err().to_string()
    };
    let said = complaint("[0]", &["a b", "a-b"]);
    assert!(said.contains("\"a b\" and \"a-b\" share the folder a-b/seed-0"), "{said}");
    let said = complaint("[0]", &["Stapo", "stapo"]);
    assert!(said.contains("\"Stapo\" and \"stapo\" share the folder"), "{said}");
    let said = complaint("[0]", &["a", "b", "a"]);
    assert!(said.contains("two arms are named \"a\""), "{said}");
    let said = complaint("[3, 0, 3]", &["a"]);
    assert!(said.contains("seeds: 3 is there twice"), "{said}");
    for name in ["", " ", "..", "a/b", "../a", "a\\b", "a\nb", "a\u{7f}"] {
        let said = complaint("[0]", &[name]);
        assert!(said.contains("is no name"), "{name:?}: {said}");
    }
    let text = "name = \"../m\"\nseeds = [0]\n[[arms]]\nname = \"a\"";
    assert!(ExperimentSpec::from_toml(text).unwrap().expand().is_err(), "the experiment names a folder too");
}

/// A run of three steps: seed, last accuracy, last entropy.
fn three_steps((seed, last, entropy): (u64, f64, f64)) -> (u64, Vec<Metrics>) {
    (seed, vec![metrics(1, 0.4, 0.3), metrics(2, 0.6, 0.2), metrics(3, last, entropy)])
}

fn arm<'a>(name: &'a str, runs: &'a [(u64, Vec<Metrics>)], canaries: &'a CanaryConfig) -> ArmRuns<'a> {
    let run = |(seed, metrics): &'a (u64, Vec<Metrics>)| SeedRun { seed: *seed, metrics, canaries };
    ArmRuns { name, runs: runs.iter().map(run).collect() }
}

#[test]
fn a_summary_compares_by_seed_and_sees_collapse() {
    let canaries = Config::default().canaries;
    let runs_a = [(0, 0.5, 0.25), (1, 0.6, 0.25), (2, 0.2, 0.01)].map(three_steps);
    let runs_b = [(2, 0.9, 0.25), (1, 0.7, 0.25), (0, 0.6, 0.25)].map(three_steps);
    let arms = [arm("a", &runs_a, &canaries), arm("b", &runs_b, &canaries)];
    let summary = summarise(&arms, Some("b"), None).unwrap();
    assert_eq!(summary.measure, Measure::HeldOut);
    let (a, b) = (&summary.arms[0], &summary.arms[1]);
    assert_eq!((a.n_collapsed, b.n_collapsed, a.n_runs), (1, 0, 3));
    let paired = a.against.as_ref().unwrap();
    assert!((paired.difference - 0.3).abs() < 1e-12 && paired.n_better == 3);
    assert!(b.against.is_none() && a.p_adjusted == Some(paired.p_permutation));
    assert!((b.accuracy.value - 2.2 / 3.0).abs() < 1e-12);
    // The mean of (0.4 + 0.6) / 2 and (0.6 + 0.6) / 2, which cover one step each.
    let lone = [arm("b", &runs_b[2..], &canaries)];
    assert!((summarise(&lone, None, None).unwrap().arms[0].area.value - 0.55).abs() < 1e-12);
    assert!((b.entropy_stability.value + 0.1).abs() < 1e-12);
    assert!((a.silenced_share.value - 1e-3).abs() < 1e-12);
}

/// The canary of a run, the experiment and the report read one definition: any step below the plan's share of the first
/// one.
#[test]
fn the_method_is_compared_within_each_setting_of_a_matrix() {
    let canaries = Config::default().canaries;
    let low = [(0, 0.5, 0.25), (1, 0.6, 0.25)].map(three_steps);
    let high = [(0, 0.6, 0.25), (1, 0.8, 0.25)].map(three_steps);
    let arms = [
        arm("a,k=1", &low, &canaries),
        arm("b,k=1", &high, &canaries),
        arm("a,k=2", &high, &canaries),
        arm("b,k=2", &low, &canaries),
    ];
    let summary = summarise(&arms, Some("b"), None).unwrap();
    let difference = |idx: usize| summary.arms[idx].against.map(|paired| (10.0 * paired.difference).round());
    assert_eq!([0, 1, 2, 3].map(difference), [Some(2.0), None, Some(-2.0), None]);
    assert_eq!(summary.arms[0].stability_against.unwrap().difference, 0.0);
    // Holm over both settings: the least of two seeds is 1/2, and twice that is 1.
    assert_eq!(summary.arms[0].p_adjusted, Some(1.0));
    assert_eq!(split_arm("a, b,k=1,l=2"), ("a, b", "k=1,l=2"));
    assert_eq!(split_arm("a, b"), ("a, b", ""));
}

#[test]
fn an_accuracy_that_is_lost_is_a_collapse_of_its_own() {
    let canaries = Config::default().canaries;
    let collapse_step = |accuracy: fn(u64) -> f64| {
        (1..=40).map(|step| Metrics { accuracy: accuracy(step), ..metrics(step, 0.5, 0.3) }).collect()
    };
    let runs = [(0, collapse_step(|step| if step <= 20 { 0.8 } else { 0.0 })), (1, collapse_step(|_| 0.8))];
    let summary = summarise(&[arm("a", &runs, &canaries)], None, None).unwrap();
    assert_eq!((summary.arms[0].n_collapsed, summary.arms[0].n_collapsed_accuracy), (0, 1));
}

#[test]
fn responses_that_no_longer_end_are_a_collapse_of_their_own() {
    let canaries = Config::default().canaries;
    let with_truncated = |truncated_share: fn(u64) -> f64| -> Vec<Metrics> {
        let step = |step| Metrics { truncated_share: truncated_share(step), ..metrics(step, 0.5, 0.3) };
        (1..=40).map(step).collect()
    };
    // From step 21 on all are cut, so that half of ten steps is reached at step 25; one step alone is no collapse.
    let runs = [
        (0, with_truncated(|step| if step <= 20 { 0.0 } else { 1.0 })),
        (1, with_truncated(|step| if step == 20 { 1.0 } else { 0.0 })),
        (2, with_truncated(|step| if step <= 20 { 0.5 } else { 1.0 })),
    ];
    let arm = &summarise(&[arm("a", &runs, &canaries)], None, None).unwrap().arms[0];
    assert_eq!((arm.n_collapsed, arm.n_collapsed_accuracy, arm.n_collapsed_endings), (0, 0, 1));
    let seed = |n: usize| SeedRun { seed: n as u64, metrics: &runs[n].1, canaries: &canaries };
    let life = Collapse::Endings.lifetime(&seed(0));
    assert_eq!((life.time, life.is_event), (25.0, true));
    assert!(!Collapse::Endings.lifetime(&seed(2)).is_event);
}

#[test]
fn an_entropy_that_recovers_has_collapsed_all_the_same() {
    let canaries = CanaryConfig { entropy_collapse_factor: 0.5, ..Config::default().canaries };
    let runs = [(0, vec![metrics(1, 0.4, 0.3), metrics(2, 0.4, 0.14), metrics(3, 0.4, 0.3)])];
    assert_eq!(summarise(&[arm("a", &runs, &canaries)], None, None).unwrap().arms[0].n_collapsed, 1);
    assert_eq!(
        summarise(&[arm("a", &runs, &Config::default().canaries)], None, None).unwrap().arms[0].n_collapsed,
        0
    );
}

#[test]
fn without_evaluations_training_accuracy_is_compared() {
    let canaries = Config::default().canaries;
    let mut steps = vec![metrics(1, 0.0, 0.3), metrics(2, 0.0, 0.3)];
    for m in &mut steps {
        m.eval_accuracy = None;
    }
    let runs = [(0, steps)];
    let summary = summarise(&[arm("a", &runs, &canaries)], None, None).unwrap();
    assert_eq!((summary.measure, summary.arms[0].accuracy.value), (Measure::Training, 0.5));
}

/// A run whose steps of 10 responses and 200 sampled tokens take `1 + n_tokens / 100` seconds each.
fn spending(accuracies: &[f64], n_tokens: usize) -> Vec<Metrics> {
    let step = |(idx, &accuracy): (usize, &f64)| {
        let mut metrics = metrics(idx as u64 + 1, accuracy, 1.0);
        (metrics.n_responses, metrics.n_sampled, metrics.n_tokens) = (Some(10), Some(200), n_tokens);
        metrics.tokens_per_second.rollout = 200.0;
        metrics.tokens_per_second.update = 100.0;
        metrics
    };
    let mut all: Vec<Metrics> = accuracies.iter().enumerate().map(step).collect();
    all[0].eval_accuracy_before = Some(0.2);
    all
}

#[test]
fn costs_are_measured_to_the_accuracy_at_which_another_arm_ended() {
    let canaries = Config::default().canaries;
    let single = [(0, spending(&[0.3, 0.4, 0.5, 0.6], 100)), (1, spending(&[0.5, 0.6, 0.7, 0.8], 100))];
    let reused = [(0, spending(&[0.6, 0.8, 0.9, 0.9], 400))];
    let slow = [(0, spending(&[0.2, 0.2, 0.2, 0.2], 100))];
    let arms =
        [arm("single", &single, &canaries), arm("reused", &reused, &canaries), arm("slow", &slow, &canaries)];
    let summary = summarise(&arms, None, Some("single")).unwrap();
    let cost = |idx: usize| summary.arms[idx].cost.clone().unwrap();
    let near = |found: Option<f64>, expected: f64| found.is_some_and(|found| (found - expected).abs() < 1e-9);
    assert!((cost(0).target_accuracy - 0.7).abs() < 1e-12, "the mean over seeds at the end");
    assert_eq!((cost(0).responses, cost(0).seconds, cost(1).seconds), (40.0, 8.0, 20.0));
    assert!(near(cost(0).responses_to_target, 40.0) && near(cost(0).seconds_to_target, 8.0));
    // The reused arm goes from 0.6 after 10 responses and 5 s to 0.8 after 20 and 10 s.
    assert!(near(cost(1).responses_to_target, 15.0) && near(cost(1).seconds_to_target, 7.5));
    assert_eq!((cost(2).responses_to_target, cost(2).seconds_to_target), (None, None));
    assert_eq!(cost(1).equal_seconds, 8.0);
    assert!((cost(1).accuracy_at_equal_seconds - 0.72).abs() < 1e-12);
    assert!((cost(0).accuracy_at_equal_seconds - 0.7).abs() < 1e-12);
    assert!(summarise(&arms, None, None).unwrap().arms.iter().all(|arm| arm.cost.is_none()));
    let mut older = spending(&[0.3, 0.4], 100);
    older[1].n_responses = None;
    let older = [(0, older)];
    let arms = [arm("older", &older, &canaries)];
    assert!(summarise(&arms, None, Some("older")).unwrap().arms[0].cost.is_none(), "without counts no costs");
}

/// A single step is noise, so a run without evaluations ends at the mean of its last tenth.
#[test]
fn a_training_accuracy_is_that_of_the_last_tenth_of_the_steps() {
    let canaries = Config::default().canaries;
    let run = |n_steps: u64| -> Vec<Metrics> {
        let step = |step| {
            let accuracy = step as f64 / 100.0;
            Metrics { eval_accuracy: None, accuracy, ..metrics(step, 0.0, 0.3) }
        };
        (1..=n_steps).map(step).collect()
    };
    for (n_steps, expected) in [(1, 0.01), (10, 0.10), (11, 0.105), (30, 0.29)] {
        let runs = [(0, run(n_steps))];
        let summary = summarise(&[arm("a", &runs, &canaries)], None, None).unwrap();
        let found = summary.arms[0].accuracy.value;
        assert!((found - expected).abs() < 1e-12, "{n_steps} steps: {found}");
    }
    // One run without an evaluation, and all are compared by training.
    let mut evaluated = run(10);
    evaluated[9].eval_accuracy = Some(0.9);
    let (with, without) = ([(0, evaluated)], [(0, run(10))]);
    let measure = |arms: &[ArmRuns]| summarise(arms, None, None).unwrap().measure;
    assert_eq!(measure(&[arm("a", &with, &canaries)]), Measure::HeldOut);
    assert_eq!(measure(&[arm("a", &with, &canaries), arm("b", &without, &canaries)]), Measure::Training);
}
