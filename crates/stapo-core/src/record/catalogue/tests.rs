use super::*;
use crate::record::{
    BenchmarkScore, DecodingRecord, EntropyChange, EntropyQuantiles, EpisodeMetrics, Extra, JudgeMetrics,
    LengthQuantiles, PhaseSeconds, ReuseRecord, ReusedUpdate, SCHEMA, TokensPerSecond,
};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

#[test]
fn units_and_directions_have_names() {
    use Unit::*;
    let units = [Plain, Share, Reward, Nats, Tokens, TokensPerSecond, Responses, Updates, Seconds, Bytes];
    let names = units.map(Unit::name);
    assert_eq!(
        names,
        ["", "share", "reward", "nats", "tokens", "tokens/s", "responses", "updates", "s", "bytes"]
    );
    assert_eq!([Share, Reward, Nats, Updates].map(|unit| unit.shown().0), ["%", "", "nats", ""]);
    assert_eq!(Bytes.shown(), ("GiB", 1.0 / 1_073_741_824.0));
    assert_eq!([Better::Higher, Better::Lower, Better::Neither].map(Better::name), ["higher", "lower", ""]);
}

#[test]
fn a_metric_is_found_by_its_key() {
    for metric in ALL {
        assert_eq!(Metric::by_key(metric.key).map(|found| found.label), Some(metric.label), "{}", metric.key);
    }
    assert!(Metric::by_key("no_such_number").is_none());
}

/// A step that has every number. A new field of [`Metrics`] must be named here, and so meets the test below.
fn full() -> Metrics {
    let score = BenchmarkScore {
        accuracy: 0.5,
        standard_error: Some(0.1),
        n_questions: 8,
        n_samples: 4,
        sha256: Some("a".into()),
    };
    let scores = BTreeMap::from([("amc23".to_string(), score)]);
    let update = ReusedUpdate { use_idx: 0, energy: 0.75, z: Some(1.0), gated: false };
    Metrics {
        schema: SCHEMA,
        step: 3,
        reward_mean: -0.5,
        reward_std: Some(1.5),
        equal_rewards_share: Some(0.25),
        rewards: BTreeMap::from([("format".to_string(), 0.125)]),
        accuracy: 0.375,
        eval_accuracy: Some(0.4),
        eval_accuracy_before: Some(0.3),
        benchmarks: scores.clone(),
        benchmarks_before: scores,
        response_tokens_mean: 31.0,
        response_tokens: Some(LengthQuantiles { min: 2, q10: 5.0, q50: 30.0, q90: 60.0, max: 64 }),
        truncated_share: 0.0625,
        episodes: Some(EpisodeMetrics {
            turns_mean: 2.5,
            n_calls: 40,
            n_failed_calls: 3,
            n_timed_out_calls: 1,
            n_cut_observations: 2,
            n_given: 300,
            turn_limit_share: 0.125,
        }),
        judge: Some(JudgeMetrics { asked_share: 0.75, agreement: Some(0.875), rule_accuracy: 0.375 }),
        score_mean: Some(-1.75),
        entropy_mean: 0.45,
        entropy_quantiles: EntropyQuantiles {
            q05: 0.01,
            q10: Some(0.02),
            q25: 0.1,
            q50: 0.3,
            q75: 0.7,
            q90: Some(1.1),
            q95: 1.3,
        },
        n_tokens: 1000,
        n_kept: 990,
        n_candidates: 40,
        n_silenced: 10,
        silenced_share: Some(0.01),
        tau_h: Some(0.6),
        clip_fraction: 0.002,
        ratio_min: 0.9,
        ratio_max: 1.2,
        kl_behavior: Some(1e-4),
        kl_reference: Some(2e-4),
        loss: -0.02,
        learning_rate: 1e-6,
        gradient_norm: 0.8,
        silenced_gradient_share: 0.03,
        quadrants: Vec::new(),
        entropy_change: Some(EntropyChange { predicted: -1e-3, measured: -2e-3 }),
        exactness_max_abs: 1e-7,
        entropy_coefficient: Some(0.003),
        n_responses: Some(32),
        n_sampled: Some(1100),
        decoding: Some(DecodingRecord { steps: 90, drafted: 40, accepted: 25 }),
        reuse: Some(ReuseRecord { n_uses: 2, gated: false, updates: vec![update] }),
        tokens_per_second: TokensPerSecond { rollout: 1e4, update: 3e3 },
        n_updates: Some(6),
        tokens_total: Some(3300),
        seconds: Some(seconds()),
        wall_seconds: Some(60.0),
        memory_bytes: Some(1 << 31),
        warnings: Vec::new(),
        state_sha256: Some("b".into()),
        extra: Extra::new(),
    }
}

fn seconds() -> PhaseSeconds {
    PhaseSeconds {
        rollout: 1.0,
        environment: 0.7,
        grade: 0.1,
        calibrate: 0.2,
        update: 2.0,
        record: 0.3,
        evaluate: 0.4,
        checkpoint: 0.5,
        checkpoint_wait: 0.6,
    }
}

fn numbers(path: &str, value: &Value, found: &mut BTreeMap<String, f64>) {
    match value {
        Value::Number(number) => {
            found.insert(path.to_string(), number.as_f64().unwrap());
        }
        Value::Object(fields) => {
            for (key, value) in fields {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                numbers(&path, value, found);
            }
        }
        _ => {}
    }
}

/// The catalogue has no line for the format's version and the number of the step, nor for what users name.
fn is_named(key: &str) -> bool {
    !["schema", "step"].contains(&key) && !key.starts_with("rewards.") && !key.starts_with("benchmarks")
}

#[test]
fn the_catalogue_has_every_number_of_a_step_and_no_other() {
    let metrics = full();
    let mut recorded = BTreeMap::new();
    numbers("", &serde_json::to_value(&metrics).unwrap(), &mut recorded);
    recorded.retain(|key, _| is_named(key));
    let listed: BTreeSet<&str> = ALL.iter().map(|metric| metric.key).collect();
    assert_eq!(listed.len(), ALL.len(), "a key stands twice in the catalogue");
    let expected: BTreeSet<&str> = recorded.keys().map(String::as_str).chain(DERIVED).collect();
    assert_eq!(listed, expected);
    for metric in ALL {
        let value = (metric.value)(&metrics).unwrap_or_else(|| panic!("{} has no value", metric.key));
        assert!(metric.bounds().contains(&value), "{}: {value} is out of bounds", metric.key);
        if let Some(recorded) = recorded.get(metric.key) {
            assert_eq!(value, *recorded, "{}", metric.key);
        }
    }
}

#[test]
fn labels_tags_and_descriptions_tell_metrics_apart() {
    let mut labels: Vec<&str> = ALL.iter().map(|metric| metric.label).collect();
    let mut tags: Vec<&str> = ALL.iter().filter_map(|metric| metric.tag).collect();
    for names in [&mut labels, &mut tags] {
        let n = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), n, "two metrics share a name");
    }
    assert!(ALL.iter().all(|metric| !metric.about.is_empty() && !metric.about.ends_with('.')));
}

#[test]
fn the_energy_of_a_step_is_the_mean_over_its_updates() {
    let mut metrics = full();
    let updates = &mut metrics.reuse.as_mut().unwrap().updates;
    updates.push(ReusedUpdate { use_idx: 1, energy: 0.25, z: None, gated: false });
    assert_eq!(head_energy(&metrics), Some(0.5));
}

/// Without recorded seconds, 1100 sampled tokens at 10,000 and 1000 trained ones at 3000 a second.
#[test]
fn the_seconds_of_a_step_are_those_of_its_phases() {
    let mut metrics = full();
    let phases = seconds();
    let working = phases.rollout + phases.environment + phases.grade + phases.calibrate + phases.update;
    assert_eq!(metrics.working_seconds(), Some(working));
    let others = phases.record + phases.evaluate + phases.checkpoint + phases.checkpoint_wait;
    assert!((phases.total() - working - others).abs() < 1e-12);
    metrics.seconds = None;
    assert!((metrics.working_seconds().unwrap() - (0.11 + 1.0 / 3.0)).abs() < 1e-12);
    metrics.n_tokens = 0;
    assert_eq!(metrics.working_seconds(), Some(0.11));
    metrics.n_sampled = None;
    assert_eq!(metrics.working_seconds(), None);
}
