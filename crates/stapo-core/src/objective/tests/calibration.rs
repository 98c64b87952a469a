use super::*;

fn stapo() -> ObjectiveSpec {
    ObjectiveSpec::from_preset("stapo").unwrap()
}

/// Response 0 is rewarded and has five candidates with entropies 0.5, 0.1, 0.4, 0.2, 0.3; response 1 is not rewarded.
fn five_candidates() -> Vec<Sample> {
    vec![
        Sample::on_policy(1.0, &[-7.0, -7.0, -0.1, -8.0, -9.0, -6.3], &[0.5, 0.1, 0.01, 0.4, 0.2, 0.3]),
        Sample::on_policy(-1.0, &[-9.0, -9.0], &[0.0, 0.0]),
    ]
}

fn silenced(effects: &[Vec<TokenEffect>]) -> Vec<(usize, usize)> {
    let all = effects.iter().enumerate().flat_map(|(i, own)| (0..own.len()).map(move |t| (i, t)));
    all.filter(|&(i, t)| !effects[i][t].kept).collect()
}

#[test]
fn s2t_silences_candidates_strictly_below_the_quantile_of_their_entropy() {
    let (tally, effects) = run(&stapo(), &five_candidates(), UpdateKey::default()).unwrap();
    // Sorted 0.1 0.2 0.3 0.4 0.5: the 0.75-quantile is 0.4, and the token at 0.4 is kept.
    assert_eq!(silenced(&effects), [(0, 1), (0, 4), (0, 5)]);
    assert_eq!((tally.n_tokens, tally.n_kept, tally.n_candidates, tally.n_silenced), (8, 5, 5, 3));
    assert_eq!(tally.scale, 1.0 / 5.0, "N counts the tokens not silenced");
    assert_eq!(effects[0][1].silenced_by, Some(MaskKind::Spurious));
    assert_eq!(effects[0][1].weight, 1.0, "the derivative without the mask");
}

#[test]
fn the_quantile_interpolates_linearly_over_the_candidates_of_the_whole_minibatch() {
    let samples = [
        Sample::on_policy(1.0, &[-7.0, -7.0], &[1.0, 2.0]),
        Sample::on_policy(0.5, &[-7.0, -7.0], &[4.0, 10.0]),
    ];
    let responses: Vec<ResponseSignals> = samples.iter().map(Sample::response).collect();
    let calibration = stapo().calibrate(&responses, UpdateKey::default()).unwrap();
    assert_eq!(calibration.tau_h(), Some(5.5)); // place 0.75 * 3 = 2.25 between 4 and 10
    let (_, effects) = run(&stapo(), &samples, UpdateKey::default()).unwrap();
    assert_eq!(silenced(&effects), [(0, 0), (0, 1), (1, 0)]);
}

#[test]
fn probability_threshold_is_strict() {
    let edge = libm::log(0.002);
    let samples = [Sample::on_policy(1.0, &[edge, edge.next_down(), -9.0, -9.0], &[0.0, 0.0, 1.0, 1.0])];
    let (tally, effects) = run(&stapo(), &samples, UpdateKey::default()).unwrap();
    assert_eq!(tally.n_candidates, 3);
    assert_eq!(silenced(&effects), [(0, 1)]);
}

#[test]
fn no_candidate_and_one_candidate_silence_nothing() {
    for logps in [[-1.0, -2.0], [-1.0, -9.0]] {
        let (tally, effects) =
            run(&stapo(), &[Sample::on_policy(1.0, &logps, &[0.1, 0.2])], UpdateKey::default()).unwrap();
        assert_eq!((silenced(&effects).len(), tally.n_kept), (0, 2));
    }
    let unrewarded =
        [Sample::on_policy(-1.0, &[-9.0, -9.0], &[0.1, 0.2]), Sample::on_policy(0.0, &[-9.0], &[0.1])];
    let (tally, _) = run(&stapo(), &unrewarded, UpdateKey::default()).unwrap();
    assert_eq!((tally.n_candidates, tally.n_silenced), (0, 0));
}

#[test]
fn stapo_with_nothing_silenced_is_justrl() {
    let stapo = stapo();
    let justrl = ObjectiveSpec::from_preset("justrl").unwrap();
    let samples: Vec<Sample> = random_minibatch(&stapo, 2, 0.4)
        .into_iter()
        .map(|mut sample| {
            sample.logp.iter_mut().for_each(|logp| *logp = logp.max(-5.0));
            sample.behavior_logp.iter_mut().for_each(|logp| *logp = logp.max(-5.0));
            sample
        })
        .collect();
    let ours = run(&stapo, &samples, UpdateKey::default()).unwrap();
    assert_eq!(ours.0.n_silenced, 0);
    assert_eq!(ours, run(&justrl, &samples, UpdateKey::default()).unwrap());
}

#[test]
fn ablations_choose_from_the_same_candidates() {
    let thresholds = |overrides: &[&str]| {
        let spec = stapo().with_overrides(overrides.iter().copied()).unwrap();
        run(&spec, &five_candidates(), UpdateKey::default()).unwrap()
    };
    // The 75 % with the highest entropy: above the 0.25-quantile 0.2.
    assert_eq!(silenced(&thresholds(&["masks.0.select=high_entropy"]).1), [(0, 0), (0, 3), (0, 5)]);
    assert_eq!(silenced(&thresholds(&["masks.0.select=full"]).1), [(0, 0), (0, 1), (0, 3), (0, 4), (0, 5)]);
    assert_eq!(silenced(&thresholds(&["masks.0.q=0.5"]).1), [(0, 1), (0, 4)]);
    let (tally, effects) = thresholds(&["masks.0.select=random"]);
    assert_eq!((tally.n_candidates, tally.n_silenced), (5, 3));
    assert!(silenced(&effects).iter().all(|&(i, t)| i == 0 && t != 2), "only candidates are drawn");
    // Version 1: 0.8-quantile over all eight tokens, sorted 0 0 .01 .1 .2 .3 .4 .5: place 5.6 gives 0.36.
    let v1 = run(&ObjectiveSpec::from_preset("stapo-v1").unwrap(), &five_candidates(), UpdateKey::default())
        .unwrap();
    assert_eq!(silenced(&v1.1), [(0, 1), (0, 4), (0, 5)]);
}

#[test]
fn random_masks_silence_as_many_as_s2t_and_differ_by_step_and_seed() {
    let samples: Vec<Sample> = (0..4).flat_map(|case| random_minibatch(&stapo(), case, 0.0)).collect();
    let n_s2t = run(&stapo(), &samples, UpdateKey::default()).unwrap().0.n_silenced;
    assert!(n_s2t >= 3, "{n_s2t}");
    let within = stapo().with_overrides(["masks.0.select=random"]).unwrap();
    let over_all = stapo().with_overrides(["masks=[{kind=\"random_tokens\"}]"]).unwrap();
    for spec in [within, over_all] {
        let at = |spec: &ObjectiveSpec, step| {
            let (tally, effects) = run(spec, &samples, UpdateKey { step, ..UpdateKey::default() }).unwrap();
            assert_eq!(tally.n_silenced, n_s2t);
            silenced(&effects)
        };
        assert_eq!(at(&spec, 5), at(&spec, 5), "the same step draws the same tokens");
        let steps: std::collections::HashSet<_> = (0..20).map(|step| at(&spec, step)).collect();
        assert!(steps.len() > 10, "steps draw anew: {} different of 20", steps.len());
        let seeded = spec.with_overrides(["masks.0.seed=7"]).unwrap();
        assert!((0..20).any(|step| at(&seeded, step) != at(&spec, step)));
    }
}

#[test]
fn random_masks_draw_every_token_equally_often() {
    let spec = stapo().with_overrides(["masks.0.select=random"]).unwrap();
    let mut drawn = [0usize; 6];
    for step in 0..6000 {
        let (_, effects) =
            run(&spec, &five_candidates(), UpdateKey { step, ..UpdateKey::default() }).unwrap();
        for (_, token) in silenced(&effects) {
            drawn[token] += 1;
        }
    }
    // 3 of 5 candidates per step: 3600 expected each, deviation sqrt(6000 * 0.6 * 0.4) = 38.
    for (token, n) in drawn.iter().enumerate().filter(|(token, _)| *token != 2) {
        assert!((3400..3800).contains(n), "token {token} drawn {n} times of 6000");
    }
    assert_eq!(drawn[2], 0);
}

#[test]
fn entropy20_keeps_the_top_share_and_divides_by_it() {
    let spec = ObjectiveSpec::from_preset("entropy20").unwrap();
    let entropies: Vec<f64> = (0..10).map(f64::from).collect();
    let (tally, effects) =
        run(&spec, &[Sample::on_policy(1.0, &[-1.0; 10], &entropies)], UpdateKey::default()).unwrap();
    // The 0.8-quantile of 0..9 is 7.2.
    assert_eq!(silenced(&effects).len(), 8);
    assert_eq!((tally.n_kept, tally.scale), (2, 0.5));
    let by_all = spec.with_overrides(["denominator.kind=all_tokens"]).unwrap();
    let (tally, _) =
        run(&by_all, &[Sample::on_policy(1.0, &[-1.0; 10], &entropies)], UpdateKey::default()).unwrap();
    assert_eq!(tally.scale, 0.1);
}

#[test]
fn clip_cov_silences_at_least_one_token_of_high_covariance_and_keeps_the_denominator() {
    let spec = ObjectiveSpec::from_preset("clip-cov").unwrap();
    let samples = [
        Sample::on_policy(2.0, &[-0.1, -4.0, -0.2], &[1.0; 3]),
        Sample::on_policy(-2.0, &[-0.1, -4.0], &[1.0; 2]),
    ];
    let (tally, effects) = run(&spec, &samples, UpdateKey::default()).unwrap();
    // Mean A 0.4, mean logp -1.68: cov is 2.5 and 2.4 for the likely rewarded tokens, 5.6 for the unlikely unrewarded
    // one.
    assert_eq!(silenced(&effects).len(), 1);
    assert!(matches!(silenced(&effects)[0], (0, 0 | 2)));
    assert_eq!(tally.scale, 1.0 / 5.0);
}

#[test]
fn lopti_splits_a_minibatch_into_two_passes_by_behavior_probability() {
    let spec = ObjectiveSpec::from_preset("lopti").unwrap();
    assert_eq!(spec.n_passes(), 2);
    let samples = random_minibatch(&spec, 6, 0.3);
    let first = run(&spec, &samples, UpdateKey { pass: 0, ..UpdateKey::default() }).unwrap().1;
    let second = run(&spec, &samples, UpdateKey { pass: 1, ..UpdateKey::default() }).unwrap().1;
    for (i, sample) in samples.iter().enumerate() {
        for t in 0..sample.logp.len() {
            assert_eq!(first[i][t].kept, sample.behavior_logp[t].exp() < 0.4);
            assert_ne!(first[i][t].kept, second[i][t].kept);
        }
    }
}

#[test]
fn masks_may_read_the_behavior_policy() {
    let spec = stapo().with_overrides(["mask_signals=behavior"]).unwrap();
    let mut samples = five_candidates();
    for sample in &mut samples {
        sample.logp.fill(-1.0);
        sample.behavior_logp.iter_mut().for_each(|logp| *logp = logp.max(-7.0));
        sample.entropy.fill(0.0);
    }
    let (tally, effects) = run(&spec, &samples, UpdateKey::default()).unwrap();
    assert_eq!((tally.n_candidates, silenced(&effects)), (5, vec![(0, 1), (0, 4), (0, 5)]));
    assert!(!spec.calibrates_on_current_policy() && stapo().calibrates_on_current_policy());
    let marked: Vec<usize> = (0..6).filter(|&t| effects[0][t].is_candidate).collect();
    assert_eq!(marked, [0, 1, 3, 4, 5], "effects are marked by the same signal");
    let current = run(&stapo(), &samples, UpdateKey::default()).unwrap().1;
    assert!(current.iter().flatten().all(|effect| !effect.is_candidate));
}

#[test]
fn candidates_are_marked_without_a_mask_but_counted_for_s2t_alone() {
    let marked = |effects: &[Vec<TokenEffect>]| effects.iter().flatten().filter(|e| e.is_candidate).count();
    let (tally, effects) = run(&stapo(), &five_candidates(), UpdateKey::default()).unwrap();
    assert_eq!((tally.n_candidates, marked(&effects)), (5, 5));
    let plain = ObjectiveSpec::from_preset("justrl").unwrap();
    let (tally, effects) = run(&plain, &five_candidates(), UpdateKey::default()).unwrap();
    assert_eq!((tally.n_candidates, marked(&effects)), (0, 5));
    let two = stapo()
        .with_overrides(["masks=[{kind=\"spurious\",tau_p=1e-5},{kind=\"random_tokens\",tau_p=0.002}]"]);
    let (tally, effects) = run(&two.unwrap(), &five_candidates(), UpdateKey::default()).unwrap();
    assert_eq!((tally.n_candidates, marked(&effects)), (5, 5), "the highest threshold counts");
}

#[test]
fn bad_signals_are_refused_with_response_field_and_token() {
    let bad = |change: fn(&mut Sample)| {
        let mut samples = five_candidates();
        change(&mut samples[1]);
        run(&stapo(), &samples, UpdateKey::default()).unwrap_err()
    };
    let cases: [(ObjectiveError, &str); 6] = [
        (bad(|s| s.logp[1] = f64::NAN), "response 1: logp[1] is NaN"),
        (bad(|s| s.behavior_logp[0] = f64::NEG_INFINITY), "response 1: behavior_logp[0] is -inf"),
        (bad(|s| s.entropy[1] = f64::INFINITY), "response 1: entropy[1] is inf"),
        (bad(|s| s.entropy[1] = -0.5), "response 1: entropy[1] is -0.5"),
        (bad(|s| s.logp[0] = 0.5), "response 1: logp[0] is 0.5"),
        (bad(|s| s.entropy.truncate(1)), "response 1: entropy has 1 entries, logp has 2"),
    ];
    for (error, start) in cases {
        assert!(error.to_string().starts_with(start), "{error}");
        assert_eq!(error.response_idx(), Some(1));
    }
    assert!(matches!(
        bad(|s| s.advantage = Advantages::Response(f64::NAN)),
        ObjectiveError::Advantage { response_idx: 1, .. }
    ));
    let overflow = bad(|s| s.behavior_logp[0] = -1e4);
    assert!(matches!(
        overflow,
        ObjectiveError::NotFinite { response_idx: 1, token_idx: 0, what: "ratio", .. }
    ));
}

#[test]
fn missing_signals_are_refused_with_the_remedy() {
    let mut samples = five_candidates();
    samples.truncate(1);
    let mut response = samples[0].response();
    response.reference_logp = None;
    response.behavior_entropy = None;
    response.sampler_logp = None;
    let refusal = |name: &str, set: &[&str]| {
        let spec = ObjectiveSpec::from_preset(name).unwrap().with_overrides(set.iter().copied()).unwrap();
        spec.calibrate(&[response], UpdateKey::default()).unwrap_err().to_string()
    };
    assert!(
        refusal("grpo", &[])
            .contains("reference_logp is missing; the KL penalty needs it\nhint: give reference_logp")
    );
    assert!(refusal("stapo", &["mask_signals=behavior"]).contains("behavior_entropy is missing"));
    assert!(refusal("stapo", &["off_policy={kind=\"tis\"}"]).contains("sampler_logp is missing"));
    assert!(
        ObjectiveSpec::from_preset("stapo").unwrap().calibrate(&[response], UpdateKey::default()).is_ok()
    );
}
