use super::*;

/// A five-point central difference. The truncation error is of fourth order, so the step can be so large that rounding
/// does not matter.
fn derivative(f: impl Fn(f64) -> f64) -> f64 {
    // The step is a power of two, so that adding the step to a log-prob is exact.
    let h = 2f64.powi(-13);
    (8.0 * (f(h) - f(-h)) - (f(2.0 * h) - f(-2.0 * h))) / (12.0 * h)
}

/// The spread of log-ratios that reaches beyond the clip. GSPO's clip is 1000 times narrower than the others'.
fn drift(spec: &ObjectiveSpec) -> f64 {
    match spec.ratio {
        Ratio::Sequence { .. } => 6e-3,
        Ratio::Product => 0.2,
        _ => 0.6,
    }
}

/// Compares loss and `d_logp` with the naive implementation and its finite differences. Tokens within a step of a kink
/// are left out. Returns the number of derivatives compared.
fn check(name: &str, spec: &ObjectiveSpec, samples: &[Sample], update: UpdateKey) -> usize {
    let live: Vec<Vec<f64>> = samples.iter().map(|s| s.logp.clone()).collect();
    let entropy: Vec<Vec<f64>> = samples.iter().map(|s| s.entropy.clone()).collect();
    let (tally, effects) = run(spec, samples, update).unwrap();
    let frozen = naive::Frozen::new(spec, samples, update);
    let naive = naive::loss(spec, samples, &frozen, &live, &entropy);
    assert!((tally.loss - naive).abs() <= 1e-12 * (1.0 + naive.abs()), "{name}: loss {} {naive}", tally.loss);

    let step = if matches!(spec.ratio, Ratio::Sequence { .. }) { 2f64.powi(-7) } else { 1.0 };
    let mut n_compared = 0;
    for i in 0..samples.len() {
        for t in 0..samples[i].logp.len() {
            let moved = |delta: f64| {
                let mut live = live.clone();
                live[i][t] += step * delta;
                live
            };
            let at = |delta: f64| naive::loss(spec, samples, &frozen, &moved(delta), &entropy);
            // With a kink inside the stencil the two one-sided slopes differ.
            let (left, right) = ((at(0.0) - at(-3e-4)) / 3e-4, (at(3e-4) - at(0.0)) / 3e-4);
            if (left - right).abs() > 0.1 * (left.abs() + right.abs()) + 1e-9 {
                continue;
            }
            let numeric = derivative(at) / step;
            let ours = effects[i][t].d_logp;
            let scale = ours.abs().max(1e-2 * tally.scale);
            assert!(
                (numeric - ours).abs() <= 1e-8 * scale,
                "{name}: response {i} token {t}: {ours} {numeric}"
            );
            n_compared += 1;

            let by_entropy = |delta: f64| {
                let mut entropy = entropy.clone();
                entropy[i][t] += delta;
                naive::loss(spec, samples, &frozen, &live, &entropy)
            };
            let numeric = derivative(by_entropy);
            assert!(
                (numeric - effects[i][t].d_entropy).abs() <= 1e-8 * tally.scale.max(1e-8),
                "{name}: d_entropy"
            );
        }
    }
    n_compared
}

#[test]
fn d_logp_is_the_derivative_of_the_loss_for_every_preset_with_and_without_s2t() {
    for (name, spec) in all_specs() {
        let mut n_compared = 0;
        for case in 0..12 {
            for pass in 0..spec.n_passes() {
                let update = UpdateKey { pass, ..UpdateKey::default() };
                n_compared += check(&name, &spec, &random_minibatch(&spec, case, drift(&spec)), update);
            }
        }
        assert!(n_compared > 500, "{name}: only {n_compared} derivatives compared");
    }
}

#[test]
fn d_logp_is_the_derivative_on_policy_where_every_ratio_is_one() {
    for (name, spec) in all_specs() {
        let mut samples = random_minibatch(&spec, 3, 0.6);
        for sample in &mut samples {
            sample.behavior_logp.clone_from(&sample.logp);
        }
        // |ln r| has a kink at ratio 1, where the slope is taken as 0, between the slopes of the two sides.
        if !matches!(spec.surrogate, Surrogate::KlCov { .. }) {
            assert!(check(&name, &spec, &samples, UpdateKey::default()) > 0, "{name}");
        }
        let (tally, effects) = run(&spec, &samples, UpdateKey::default()).unwrap();
        assert!(effects.iter().flatten().all(|effect| effect.ratio == 1.0), "{name}: ratio");
        assert_eq!(tally.n_clipped, 0, "{name}: nothing clips at ratio 1");
    }
}

#[test]
fn d_logp_is_the_derivative_with_every_other_axis() {
    let base = ObjectiveSpec::from_preset("stapo").unwrap();
    let variants = [
        "kl={kind=\"k1\",beta=0.1}",
        "kl={kind=\"k2\",beta=0.1}",
        "kl={kind=\"k3\",beta=0.1}",
        "entropy_bonus={kind=\"constant\",coefficient=0.01}",
        "off_policy={kind=\"tis\"}",
        "off_policy={kind=\"icepop\"}",
        "off_policy={kind=\"tis\",cap=1.1,level=\"sequence\"}",
        "off_policy={kind=\"mis\",low=0.2,high=2.0}",
        "off_policy={kind=\"mis\",low=0.7,high=1.2,level=\"token\"}",
        "kl={kind=\"unbiased_k3\",beta=0.1}",
        "surrogate={kind=\"squared_log_ratio\",beta=0.5}",
        "surrogate={kind=\"total_variation\",low=0.01,high=0.02,cap=1.2}",
        "surrogate={kind=\"binary_kl\",low=0.002,high=0.004,cap=1.2}",
        "ratio.max_log_ratio=0.05",
        "ratio={kind=\"geometric\",low=0.1,high=0.3}",
        "ratio={kind=\"geometric\",low=0.1,high=0.3,silenced=\"stay\"}",
        "ratio={kind=\"sequence\",silenced=\"stay\"}",
        "masks.0.threshold={kind=\"target_share\",share=0.3}",
        "masks.0.threshold={kind=\"surprise\",c=0.5,b=1.0}",
        "masks.0.threshold={kind=\"influence\",kappa=0.85,vocabulary=20}",
        "masks=[{kind=\"spurious\",threshold={kind=\"influence\",kappa=0.8},select=\"full\"}]",
        "masks.0.quantile_over=rewarded_tokens",
        "masks=[{kind=\"stare\",entropy_below=9.0,signs=\"both\"}]",
        "masks=[{kind=\"off_policy_sequence\",delta=0.1}]",
        "kl_in_reward={kind=\"k1\",beta=0.1}",
        "distillation={kind=\"dasd\",beta=0.5}",
        "distillation={kind=\"reverse_kl\",beta=0.5,reward_weight=1.0}",
        "mask_signals=behavior",
        "denominator.kind=all_tokens",
        "surrogate={kind=\"unclipped\"}",
        "surrogate={kind=\"cispo\",low=0.3,high=0.2}",
        "masks.0.select=high_entropy",
        "masks.0.select=random",
        "masks.0.select=full",
        "masks=[{kind=\"random_tokens\"}]",
        "masks=[{kind=\"spurious\"},{kind=\"top_entropy\",share=0.5},{kind=\"taco\"},{kind=\"probability_weight\"}]",
    ];
    for variant in variants {
        let spec = base.with_overrides([variant]).unwrap();
        let n = check(variant, &spec, &random_minibatch(&spec, 1, 0.6), UpdateKey::default());
        assert!(n > 20, "{variant}: {n} derivatives compared");
    }
}

/// The slopes of the loss on both sides of a token's log-prob.
fn one_sided(spec: &ObjectiveSpec, samples: &[Sample]) -> (f64, f64) {
    let live: Vec<Vec<f64>> = samples.iter().map(|s| s.logp.clone()).collect();
    let entropy: Vec<Vec<f64>> = samples.iter().map(|s| s.entropy.clone()).collect();
    let frozen = naive::Frozen::new(spec, samples, UpdateKey::default());
    let at = |delta: f64| {
        let mut live = live.clone();
        live[0][0] += delta;
        naive::loss(spec, samples, &frozen, &live, &entropy)
    };
    ((at(0.0) - at(-1e-7)) / 1e-7, (at(1e-7) - at(0.0)) / 1e-7)
}

#[test]
fn a_ratio_exactly_at_a_clip_edge_takes_the_inner_slope() {
    let spec = ObjectiveSpec::from_preset("justrl").unwrap();
    for (advantage, edge) in [(1.0, 1.28), (-1.0, 0.8), (-1.0, 10.0)] {
        // `behavior_logp` is such that exp(logp - behavior_logp) is the edge to the last bit, where f64 has such a
        // value.
        let mut sample = Sample::on_policy(advantage, &[-5.0, -1.0], &[0.5, 0.5]);
        sample.behavior_logp[0] = -5.0 - libm::log(edge);
        let (_, effects) = run(&spec, &[sample.clone()], UpdateKey::default()).unwrap();
        let (left, right) = one_sided(&spec, &[sample]);
        let ours = effects[0][0].d_logp;
        let is_a_side = (ours - left).abs() < 1e-5 || (ours - right).abs() < 1e-5;
        assert!(is_a_side, "edge {edge}: {ours}, sides {left} {right}");
        assert!((effects[0][0].ratio - edge).abs() < 1e-12);
    }
    let at = |ratio: f64, advantage: f64| {
        let point =
            surrogate::SurrogatePoint { ratio, advantage, logp: -1.0, behavior_logp: -1.0, penalised: false };
        spec.surrogate.at(point)
    };
    assert_eq!((at(1.28, 1.0).clipped, at(1.28, 1.0).slope), (false, 1.28));
    assert_eq!((at(0.8, -1.0).clipped, at(0.8, -1.0).slope), (false, -0.8));
    assert_eq!((at(10.0, -1.0).clipped, at(10.0, -1.0).slope), (false, -10.0));
    assert!(at(1.28f64.next_up(), 1.0).clipped && at(0.8f64.next_down(), -1.0).clipped);
    assert_eq!(at(10.1, -1.0), surrogate::Valued { value: -10.0, slope: 0.0, clipped: true });
}

#[test]
fn extreme_log_probs_give_finite_effects_for_every_preset() {
    for (name, spec) in all_specs() {
        for logp in [0.0, -1e-300, -1e4] {
            let samples = [
                Sample::on_policy(1.5, &[logp, -0.5, logp], &[0.0, 0.7, 0.1]),
                Sample::on_policy(-1.5, &[logp], &[0.0]),
            ];
            let (tally, effects) = run(&spec, &samples, UpdateKey::default()).unwrap();
            assert!(tally.loss.is_finite(), "{name} at logp {logp}");
            assert!(
                effects.iter().flatten().all(|e| e.d_logp.is_finite() && e.ratio == 1.0),
                "{name} at logp {logp}"
            );
            if !matches!(spec.surrogate, Surrogate::KlCov { .. }) {
                check(&name, &spec, &samples, UpdateKey::default());
            }
        }
    }
}

#[test]
fn equal_rewards_push_nothing() {
    for (name, spec) in all_specs() {
        let scored = [(); 5].map(|()| ScoredResponse::new(0, &[0.1], 2));
        let advantages = spec.advantages(&scored, &[1.0]).unwrap();
        assert!(advantages.iter().all(|own| *own == Advantages::Response(0.0)), "{name}");
        let samples: Vec<Sample> =
            advantages.iter().map(|_| Sample::on_policy(0.0, &[-1.0, -8.0], &[1.0, 0.1])).collect();
        let (tally, effects) = run(&spec, &samples, UpdateKey::default()).unwrap();
        assert_eq!(tally.loss, 0.0, "{name}");
        assert!(effects.iter().flatten().all(|e| e.d_logp == 0.0), "{name}");
    }
}

#[test]
fn silenced_tokens_get_zero_weight() {
    for (name, spec) in all_specs() {
        let (_, effects) =
            run(&spec, &random_minibatch(&spec, 4, drift(&spec)), UpdateKey::default()).unwrap();
        let mut silenced = effects.iter().flatten().filter(|e| !e.kept);
        assert!(silenced.all(|e| e.d_logp == 0.0 && e.d_entropy == 0.0 && e.silenced_by.is_some()), "{name}");
        assert!(effects.iter().flatten().filter(|e| e.kept).all(|e| e.silenced_by.is_none()), "{name}");
    }
}
