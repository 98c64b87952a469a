use super::*;
use crate::objective::MaskKind;
use crate::rollout::{Finish, Verdict};
use serde_json::json;

fn silenced() -> TokenRecord {
    TokenRecord {
        schema: SCHEMA,
        step: 3,
        problem_id: "p7".into(),
        sample_idx: 1,
        token_idx: 12,
        id: 42,
        text: "2".into(),
        silenced_by: Some(MaskKind::Spurious),
        category: None,
        logp: -8.86,
        entropy: 0.004,
        advantage: 0.54,
        gradient_norm: 0.76,
        context_before: "so x = ".into(),
        context_after: ", and".into(),
        alternatives: vec![Alternative { id: 41, text: "1".into(), logp: -0.0005 }],
        extra: Extra::new(),
    }
}

#[test]
fn a_record_survives_a_round_trip() {
    let record = silenced();
    let line = record.to_line();
    assert!(line.ends_with("}\n") && !line[..line.len() - 1].contains('\n'));
    assert_eq!(parse::<TokenRecord>(&line).unwrap(), record);
}

#[test]
fn keys_of_a_newer_program_are_kept_and_written_back() {
    let mut value = serde_json::to_value(silenced()).unwrap();
    value["tomorrow"] = json!({"a": [1, 2]});
    let read: TokenRecord = parse(&value.to_string()).unwrap();
    assert_eq!(read.extra["tomorrow"], json!({"a": [1, 2]}));
    let again: Value = serde_json::from_str(&read.to_line()).unwrap();
    assert_eq!(again, value);
}

#[test]
fn a_newer_schema_and_a_missing_one_are_refused_by_line() {
    let good = silenced().to_line();
    let newer = good.replace("\"schema\":1", "\"schema\":2");
    let error = parse_lines::<TokenRecord>(&format!("{good}{newer}")).unwrap_err();
    assert_eq!(error, RecordError::TooNew { line: 2, found: 2, newest: 1 });
    let none = good.replace("\"schema\":1,", "");
    assert_eq!(parse_lines::<TokenRecord>(&none).unwrap_err(), RecordError::NoSchema { line: 1 });
}

#[test]
fn a_line_cut_in_half_at_the_end_is_torn_and_elsewhere_an_error() {
    let good = silenced().to_line();
    for cut in 1..good.len() - 1 {
        let text = format!("{good}{}", &good[..cut]);
        let lines = parse_lines::<TokenRecord>(&text).unwrap();
        assert_eq!((lines.records.len(), lines.torn), (1, true), "cut at {cut}");
    }
    let whole_without_newline = format!("{good}{}", good.trim_end());
    let lines = parse_lines::<TokenRecord>(&whole_without_newline).unwrap();
    assert_eq!((lines.records.len(), lines.torn), (2, false));
    let inside = format!("{}\n{good}", &good[..20]);
    assert!(matches!(parse_lines::<TokenRecord>(&inside), Err(RecordError::Json { line: 1, .. })));
}

#[test]
fn a_missing_or_mistyped_field_is_named() {
    let line = silenced().to_line().replace("\"step\":3", "\"step\":\"three\"");
    let error = parse::<TokenRecord>(&line).unwrap_err().to_string();
    assert!(error.contains("line 1") && error.contains("three"), "{error}");
    let line = silenced().to_line().replace("\"entropy\":0.004,", "");
    assert!(parse::<TokenRecord>(&line).unwrap_err().to_string().contains("entropy"));
}

#[test]
fn plain_names_are_what_metrics_readers_see() {
    let metrics = json!({
        "schema": 1, "step": 1, "reward_mean": 0.1, "accuracy": 0.5, "response_tokens_mean": 30.0, "truncated_share": 0.0,
        "entropy_mean": 0.4, "entropy_quantiles": {"q05": 0.0, "q25": 0.1, "q50": 0.2, "q75": 0.5, "q95": 1.0},
        "n_tokens": 100, "n_kept": 99, "n_candidates": 2, "n_silenced": 1, "clip_fraction": 0.0, "ratio_min": 1.0,
        "ratio_max": 1.0, "loss": 0.01, "learning_rate": 1e-6, "gradient_norm": 0.3, "silenced_gradient_share": 0.02,
        "quadrants": [], "exactness_max_abs": 0.0,
        "tokens_per_second": {"rollout": 1e4, "update": 3e3}
    });
    let read: Metrics = parse(&metrics.to_string()).unwrap();
    assert_eq!((read.eval_accuracy, read.tau_h, read.n_silenced), (None, None, 1));
    let again: Value = serde_json::from_str(&read.to_line()).unwrap();
    assert_eq!(again, metrics);
}

#[test]
fn finish_and_verdict_have_plain_names() {
    assert_eq!(serde_json::to_value(Finish::Stop { token: 2 }).unwrap(), json!({"kind": "stop", "token": 2}));
    assert_eq!(serde_json::to_value(Finish::LengthLimit).unwrap(), json!({"kind": "length_limit"}));
    assert_eq!(serde_json::to_value(Verdict::NoAnswer).unwrap(), json!("no_answer"));
}

#[test]
fn records_of_older_runs_still_read() {
    let response = json!({
        "schema": 1, "step": 1, "problem_id": "p", "sample_idx": 0, "prompt": "1+1", "reference": "2", "text": "2",
        "verdict": "right", "reward": 1.0, "advantage": 0.5, "finish": {"kind": "length_limit"},
        "tokens": {"id": [7], "text": ["2"], "logp": [-0.1], "behavior_logp": [-0.1], "entropy": [0.2], "collision": [0.9],
            "ratio": [1.0], "kept": [true], "silenced_by": [null], "clipped": [false], "d_logp": [0.0]}
    });
    let read: ResponseRecord = parse(&response.to_string()).unwrap();
    assert_eq!((read.update_idx, read.tau_h, read.tokens.weight.len()), (0, None, 0));
    let eval = json!({
        "schema": 1, "benchmark": "amc23", "decoding": "t1.0", "problem_id": "p", "sample_idx": 0, "text": "2", "n_tokens": 1,
        "finish": {"kind": "stop", "token": 2}, "answer": "2", "verdict": "right", "reason": "equal"
    });
    let read: EvalRecord = parse(&eval.to_string()).unwrap();
    assert_eq!((read.step, read.reference.as_str()), (None, ""));
}

/// A line of `rollouts/` as programs wrote it before responses could have given tokens.
const ONE_TURN: &str = r#"{"schema":1,"step":1,"problem_id":"p","sample_idx":0,"prompt":"1+1","reference":"2","text":"2","verdict":"right","reward":1.0,"advantage":0.5,"finish":{"kind":"length_limit"},"update_idx":0,"tokens":{"id":[7],"text":["2"],"logp":[-0.1],"behavior_logp":[-0.1],"entropy":[0.2],"collision":[0.9],"ratio":[1.0],"kept":[true],"silenced_by":[null],"clipped":[false],"d_logp":[0.0]}}
"#;

#[test]
fn a_response_in_one_turn_is_written_as_before() {
    let read: ResponseRecord = parse(ONE_TURN).unwrap();
    assert!(read.given.is_empty());
    assert_eq!(read.to_line(), ONE_TURN);
}

#[test]
fn a_response_with_given_tokens_has_a_schema_that_older_programs_refuse() {
    let one_turn: ResponseRecord = parse(ONE_TURN).unwrap();
    let given = vec![GivenTokens { after: 1, id: vec![4, 5], text: "no".into() }];
    let schema = ResponseRecord::SCHEMA_WITH_GIVEN;
    let record = ResponseRecord { schema, given, ..one_turn };
    let line = record.to_line();
    assert_eq!(parse::<ResponseRecord>(&line).unwrap(), record);
    assert_eq!((record.given_before(0), record.given_before(1)), (None, Some("no")));
    assert!(schema > SCHEMA, "older programs read up to {SCHEMA}");
    let newer = line.replace("\"schema\":2", "\"schema\":3");
    let error = parse::<ResponseRecord>(&newer).unwrap_err();
    assert_eq!(error, RecordError::TooNew { line: 1, found: 3, newest: 2 });
    assert!(error.to_string().contains("schema 3, this program reads up to 2"), "{error}");
}

#[test]
fn candidates_of_older_runs_are_derived_by_the_signal_that_the_masks_read() {
    let response = json!({
        "schema": 1, "step": 1, "problem_id": "p", "sample_idx": 0, "prompt": "1+1", "reference": "2", "text": "22",
        "verdict": "right", "reward": 1.0, "advantage": 0.5, "finish": {"kind": "length_limit"},
        "tokens": {"id": [7, 8], "text": ["2", "2"], "logp": [-9.0, -0.1], "behavior_logp": [-0.1, -9.0],
            "entropy": [0.2, 0.2], "collision": [0.9, 0.9], "ratio": [1.0, 1.0], "kept": [true, true],
            "silenced_by": [null, null], "clipped": [false, false], "d_logp": [0.0, 0.0]}
    });
    let candidates = |text: &str, mask_signals: &str| {
        let objective = ObjectiveSpec::from_preset("stapo").unwrap();
        let objective = objective.with_overrides([mask_signals]).unwrap();
        parse_responses(text, &objective).unwrap().records.remove(0).tokens.is_candidate
    };
    let old = response.to_string();
    assert_eq!(candidates(&old, "mask_signals=current"), [true, false]);
    assert_eq!(candidates(&old, "mask_signals=behavior"), [false, true]);
    let mut recorded = response;
    recorded["tokens"]["is_candidate"] = json!([true, true]);
    assert_eq!(candidates(&recorded.to_string(), "mask_signals=current"), [true, true], "the record decides");
}

#[test]
fn an_experiment_names_each_arm_once_and_in_order() {
    let arm = |name: &str, seed: u64| Arm {
        name: name.into(),
        seed,
        run: format!("{name}-{seed}"),
        settings: vec![format!("seed={seed}")],
        error: None,
    };
    let arms = vec![arm("stapo", 0), arm("grpo", 0), arm("stapo", 1), arm("grpo", 1)];
    let experiment = Experiment {
        schema: SCHEMA,
        name: "main".into(),
        method: None,
        reach: None,
        arms,
        extra: Extra::new(),
    };
    assert_eq!(experiment.arm_names(), ["stapo", "grpo"]);
    assert_eq!(parse::<Experiment>(&experiment.to_line()).unwrap(), experiment);
}

#[test]
fn metrics_of_training_and_pretraining_name_their_step() {
    let pretraining = json!({
        "schema": SCHEMA, "step": 7, "loss": 1.5, "entropy_mean": 0.9, "n_tokens": 100, "n_scored": 80,
        "learning_rate": 1e-3, "gradient_norm": 0.5, "tokens_per_second": 1000.0
    });
    let read: PretrainMetrics = parse(&pretraining.to_string()).unwrap();
    assert_eq!((read.step(), read.state_sha256()), (7, None));
    let hashed = PretrainMetrics { state_sha256: Some("a1".into()), ..read };
    assert_eq!(hashed.state_sha256(), Some("a1"));
    let training = json!({
        "schema": SCHEMA, "step": 9, "reward_mean": -0.2, "accuracy": 0.4, "response_tokens_mean": 30.5,
        "truncated_share": 0.0, "entropy_mean": 0.3,
        "entropy_quantiles": {"q05": 0.0, "q25": 0.1, "q50": 0.2, "q75": 0.4, "q95": 0.9},
        "n_tokens": 100, "n_kept": 99, "n_candidates": 2, "n_silenced": 1, "tau_h": 0.1, "clip_fraction": 0.0,
        "ratio_min": 1.0, "ratio_max": 1.0, "loss": 0.0, "learning_rate": 1e-4, "gradient_norm": 0.3,
        "silenced_gradient_share": 0.01, "quadrants": [], "exactness_max_abs": 0.0,
        "tokens_per_second": {"rollout": 1000.0, "update": 500.0}
    });
    let read: Metrics = parse(&training.to_string()).unwrap();
    assert_eq!((read.step(), read.state_sha256()), (9, None));
    let hashed = Metrics { state_sha256: Some("b2".into()), ..read };
    assert_eq!(hashed.state_sha256(), Some("b2"));
}

fn input(name: &str, sha256: &str) -> FileHash {
    FileHash { name: name.into(), n_bytes: 5, sha256: sha256.into() }
}

#[test]
fn changed_inputs_are_named_with_both_hashes() {
    let before = [input("data", "aa"), input("weights", "bb"), input("weights", "cc"), input("old", "dd")];
    let after = [input("new", "ee"), input("weights", "bb"), input("data", "ff"), input("weights", "cc")];
    let shown: Vec<String> = changed_inputs(&before, &after).iter().map(Change::to_string).collect();
    assert_eq!(shown, ["data: was aa, is ff", "old: was dd, is absent", "new: was absent, is ee"]);
    let swapped = [input("weights", "cc"), input("weights", "bb")];
    let changes = changed_inputs(&before[1..3], &swapped);
    assert_eq!((changes.len(), changes[0].before.as_str(), changes[0].after.as_str()), (1, "bb cc", "cc bb"));
    assert_eq!(changes[0].file(), None, "an input is no file of the folder");
    let change = Change::of_file("metrics.jsonl", "aa", "bb");
    assert_eq!((change.name.as_str(), change.file()), ("file metrics.jsonl", Some("metrics.jsonl")));
}

#[test]
fn a_manifest_is_written_with_its_keys_in_order() {
    let text = r#"{"steps":[],"schema":1,"inputs":[{"sha256":"aa","name":"data","n_bytes":5}],"later":2}"#;
    let manifest: Manifest = parse(text).unwrap();
    let expected =
        r#"{"inputs":[{"n_bytes":5,"name":"data","sha256":"aa"}],"later":2,"schema":1,"steps":[]}"#;
    assert_eq!(manifest.to_line(), format!("{expected}\n"));
}

#[test]
fn phases_that_took_no_time_are_left_out() {
    let phases = |environment| PhaseSeconds { environment, ..PhaseSeconds::default() };
    let has_it =
        |environment| serde_json::to_value(phases(environment)).unwrap().get("environment").is_some();
    assert_eq!((has_it(0.0), has_it(0.5)), (false, true));
}
