//! The effects and totals of small mini-batches, by hand.

use super::*;

fn spec(overrides: &[&str]) -> ObjectiveSpec {
    let all = ["masks=[]"].iter().chain(overrides).copied();
    ObjectiveSpec::from_preset("stapo").unwrap().with_overrides(all).unwrap()
}

/// A response whose second token is e times as likely as it was when it was sampled.
fn risen(advantage: f64) -> Sample {
    Sample { behavior_logp: vec![-1.0, -2.0], ..Sample::on_policy(advantage, &[-1.0, -1.0], &[0.5, 0.7]) }
}

#[test]
fn a_clipped_token_has_a_ratio_and_no_weight() {
    let overrides = [
        "aggregate={kind=\"sequence_mean_of_token_mean\"}",
        "entropy_bonus={kind=\"constant\",coefficient=0.25}",
    ];
    let (tally, effects) = run(&spec(&overrides), &[risen(2.0)], UpdateKey::default()).unwrap();
    let e = libm::exp(1.0);
    assert_eq!([effects[0][0].ratio, effects[0][1].ratio], [1.0, e]);
    assert_eq!([effects[0][0].clipped, effects[0][1].clipped], [false, true]);
    assert_eq!([effects[0][0].weight, effects[0][1].weight], [2.0, 0.0]);
    assert_eq!([effects[0][0].d_logp, effects[0][1].d_logp], [-1.0, 0.0]);
    assert_eq!([effects[0][0].d_entropy, effects[0][1].d_entropy], [-0.125, -0.125]);
    assert_eq!((tally.n_clipped, tally.clip_fraction), (1, 0.5));
    assert_eq!((tally.ratio_min, tally.ratio_max), (1.0, e));
    // 2 and 2 * 1.28 from the surrogate, 0.25 * 1.2 from the entropy, over two tokens.
    assert!((tally.loss + 0.5 * (2.0 + 2.56 + 0.3)).abs() < 1e-12, "{tally:?}");
}

/// e and 1, of which the first is beyond the bound: the ratio is e^(0.2), and only the second token moves it.
#[test]
fn a_token_beyond_the_bound_of_a_geometric_ratio_has_no_weight() {
    let geometric = spec(&["ratio={kind=\"geometric\",low=0.4,high=0.4}", "surrogate={kind=\"unclipped\"}"]);
    let (_, effects) = run(&geometric, &[risen(1.0)], UpdateKey::default()).unwrap();
    let ratio = libm::exp(0.2);
    assert_eq!((effects[0][1].weight, effects[0][1].d_logp, effects[0][1].clipped), (0.0, 0.0, true));
    assert!((effects[0][0].weight - ratio).abs() < 1e-12, "{effects:?}");
    assert!((effects[0][0].d_logp + 0.5 * ratio).abs() < 1e-12, "{effects:?}");
}

/// VESPO weighs each token's own log-prob, so advantages per token stay with their tokens.
#[test]
fn a_held_ratio_leaves_each_token_its_advantage() {
    let vespo = ObjectiveSpec::from_preset("vespo").unwrap();
    let mut sample = Sample::on_policy(0.0, &[-1.0, -1.0], &[1.0, 1.0]);
    sample.advantage = Advantages::Tokens(vec![1.0, 3.0]);
    let (_, effects) = run(&vespo, &[sample], UpdateKey::default()).unwrap();
    assert!(effects[0][0].d_logp < -0.1, "{effects:?}");
    assert!((effects[0][1].d_logp / effects[0][0].d_logp - 3.0).abs() < 1e-12, "{effects:?}");
}

#[test]
fn a_ratio_that_overflows_is_refused_even_where_it_is_clipped() {
    let mut sample = Sample::on_policy(1.0, &[-1.0, -1.0], &[1.0, 1.0]);
    sample.behavior_logp[1] = -800.0;
    let error = run(&spec(&[]), &[sample], UpdateKey::default()).unwrap_err();
    assert!(matches!(error, ObjectiveError::NotFinite { token_idx: 1, what: "ratio", .. }), "{error}");
}

#[test]
fn an_advantage_that_is_no_number_is_named() {
    for bad in [f64::NAN, f64::INFINITY] {
        let mut sample = Sample::on_policy(bad, &[-1.0, -1.0], &[1.0, 1.0]);
        let error = run(&spec(&[]), &[sample.clone()], UpdateKey::default()).unwrap_err();
        assert!(matches!(error, ObjectiveError::Advantage { response_idx: 0, .. }), "{error}");
        sample.advantage = Advantages::Tokens(vec![1.0, bad]);
        let error = run(&spec(&[]), &[sample], UpdateKey::default()).unwrap_err();
        assert!(matches!(error, ObjectiveError::Value { field: "advantage", token_idx: 1, .. }), "{error}");
    }
}

/// Both tokens have the covariance 1.
#[test]
fn a_covariance_at_a_bound_is_outside() {
    let samples = [Sample::on_policy(1.0, &[-1.0], &[1.0]), Sample::on_policy(-1.0, &[-3.0], &[1.0])];
    for (low, high, n_silenced) in [(1.0, 5.0, 0), (0.5, 1.0, 0), (0.5, 5.0, 1)] {
        let mask = format!("masks=[{{kind=\"clip_cov\",share=0.5,low={low:?},high={high:?}}}]");
        let (tally, _) = run(&spec(&[&mask]), &samples, UpdateKey::default()).unwrap();
        assert_eq!(tally.n_silenced, n_silenced, "{low} to {high}");
    }
}

#[test]
fn a_calibration_names_its_probability_threshold() {
    let tau_p = |overrides: &[&str]| {
        let spec = ObjectiveSpec::from_preset("stapo").unwrap();
        let spec = spec.with_overrides(overrides.iter().copied()).unwrap();
        let sample = Sample::on_policy(1.0, &[-1.0, -2.0, -9.0, -10.0], &[1.0; 4]);
        spec.calibrate(&[sample.response()], UpdateKey::default()).unwrap().tau_p()
    };
    assert_eq!(tau_p(&[]), 0.002);
    assert_eq!(tau_p(&["masks.0.tau_p=0.01"]), 0.01);
    assert_eq!(tau_p(&["masks=[]"]), 0.002);
    // Half of the tokens are below: the threshold lies between the second and the third.
    let found = tau_p(&["masks.0.threshold={kind=\"target_share\",share=0.5}"]);
    assert!((libm::exp(-9.0)..=libm::exp(-2.0)).contains(&found), "{found}");
}
