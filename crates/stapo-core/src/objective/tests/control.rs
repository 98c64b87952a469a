use super::*;

fn with(text: &str) -> ObjectiveSpec {
    ObjectiveSpec::from_preset("stapo").unwrap().with_overrides([text]).unwrap()
}

/// A mini-batch of one response whose tokens all have this entropy.
fn at_entropy(entropy: f64) -> Vec<Sample> {
    vec![Sample::on_policy(1.0, &[-0.5, -1.0, -2.0], &[entropy; 3])]
}

fn step(spec: &ObjectiveSpec, controls: Controls, entropy: f64) -> (Vec<Vec<TokenEffect>>, Controls) {
    let update = UpdateKey { controls, ..UpdateKey::default() };
    let (tally, effects) = run(spec, &at_entropy(entropy), update).unwrap();
    (effects, spec.next_controls(controls, &tally))
}

#[test]
fn an_entropy_target_pays_from_the_step_after_and_within_its_bounds() {
    let spec = with("entropy_bonus={kind=\"target\",target=0.3,initial=0.1,step=0.05,max=0.2}");
    assert!(spec.is_adaptive());
    let paid = |effects: &[Vec<TokenEffect>]| -3.0 * effects[0][0].d_entropy;
    let (effects, controls) = step(&spec, Controls::default(), 0.2);
    assert_eq!(paid(&effects), 0.0, "the first step has no step before");
    assert!((controls.entropy.unwrap() - 0.2).abs() < 1e-15);
    let mut seen = Vec::new();
    let mut state = controls;
    for entropy in [0.2, 0.2, 0.2, 0.9, 0.9, 0.9, 0.9, 0.25] {
        let (effects, next) = step(&spec, state, entropy);
        seen.push((paid(&effects), next.entropy_coefficient.unwrap()));
        state = next;
    }
    let expected =
        [(0.15, 0.2), (0.2, 0.2), (0.2, 0.2), (0.2, 0.15), (0.0, 0.1), (0.0, 0.05), (0.0, 0.0), (0.0, 0.05)];
    for (place, (seen, expected)) in seen.iter().zip(expected).enumerate() {
        let is_close = (seen.0 - expected.0).abs() < 1e-12 && (seen.1 - expected.1).abs() < 1e-12;
        assert!(is_close, "step {place}: {seen:?}, expected {expected:?}");
    }
}

#[test]
fn the_mean_entropy_is_over_kept_tokens_and_only_where_a_setting_follows_it() {
    let spec = with("entropy_bonus={kind=\"target\"}");
    let samples = [
        Sample::on_policy(1.0, &[-9.0, -8.0, -0.1], &[0.0, 0.4, 0.2]),
        Sample::on_policy(-1.0, &[-0.1], &[0.6]),
    ];
    let (tally, _) = run(&spec, &samples, UpdateKey::default()).unwrap();
    assert_eq!(tally.n_silenced, 1);
    assert!((tally.entropy_mean.unwrap() - 0.4).abs() < 1e-15);
    let plain = ObjectiveSpec::from_preset("stapo").unwrap();
    assert_eq!(run(&plain, &samples, UpdateKey::default()).unwrap().0.entropy_mean, None);
    let nothing = run(&spec, &[], UpdateKey::default()).unwrap().0;
    let before = Controls { entropy: Some(0.5), entropy_coefficient: Some(0.1), stare_weight: None };
    assert_eq!(spec.next_controls(before, &nothing), before, "a step without tokens changes nothing");
}

#[test]
fn stare_weighs_surprising_rewarded_tokens_while_entropy_is_low() {
    let spec = ObjectiveSpec::from_preset("stare").unwrap();
    let bare = spec.clone().with_overrides(["masks=[{kind=\"stare\"}]"]).unwrap();
    assert_eq!(bare.masks, spec.masks, "what is left out has the values of the preset");
    let weights = |spec: &ObjectiveSpec, entropy: f64, controls: Controls| {
        let logp: Vec<f64> = (1..=10).map(|i| -0.1 * f64::from(i)).collect();
        let samples =
            [Sample::on_policy(1.0, &logp, &[entropy; 10]), Sample::on_policy(-1.0, &logp, &[entropy; 10])];
        let update = UpdateKey { controls, ..UpdateKey::default() };
        let (tally, effects) = run(spec, &samples, update).unwrap();
        let size = |i: usize, t: usize| (effects[i][t].d_logp / tally.scale).abs();
        assert!((0..9).all(|t| size(0, t) == 1.0 && size(1, t) == 1.0), "only the top 10 % are weighed");
        (size(0, 9), size(1, 9))
    };
    let spec = spec.with_overrides(["masks.0.entropy_below=0.25"]).unwrap();
    assert_eq!(weights(&spec, 0.125, Controls::default()), (1.1, 1.0));
    assert_eq!(weights(&spec, 0.25, Controls::default()), (1.0, 1.0), "not below the threshold");
    let both = spec.with_overrides(["masks.0.signs=both"]).unwrap();
    let (up, down) = weights(&both, 0.1, Controls::default());
    assert!((up - 1.1).abs() < 1e-15 && (down - 0.9).abs() < 1e-15);
    let adaptive = spec.with_overrides(["masks.0.step=0.01"]).unwrap();
    assert!(adaptive.is_adaptive() && !spec.is_adaptive());
    let mut controls = Controls::default();
    for _ in 0..60 {
        controls = step(&adaptive, controls, 0.1).1;
    }
    assert_eq!(controls.stare_weight, Some(1.5), "at most");
    assert!((weights(&adaptive, 0.9, controls).0 - 1.5).abs() < 1e-15, "in force at every entropy");
    for _ in 0..150 {
        controls = step(&adaptive, controls, 0.9).1;
    }
    assert_eq!(controls.stare_weight, Some(0.5), "at least");
}

#[test]
fn controls_survive_json() {
    for controls in [
        Controls::default(),
        Controls { entropy: Some(0.1 + 0.2), entropy_coefficient: Some(0.005), stare_weight: Some(1.1) },
    ] {
        let text = serde_json::to_string(&controls).unwrap();
        assert_eq!(serde_json::from_str::<Controls>(&text).unwrap(), controls, "{text}");
    }
}
