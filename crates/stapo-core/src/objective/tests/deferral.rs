use super::*;

/// Without thresholds, every token that does not wait has the effect that it has with them, to the last bit.
#[test]
fn tokens_that_do_not_wait_have_their_final_effects_before_the_minibatch_was_seen() {
    let mut n_by_kind = [0, 0, 0];
    let mut n_waited = [0, 0];
    for (name, spec) in all_specs() {
        let Some(deferral) = spec.deferral() else {
            n_by_kind[2] += 1;
            continue;
        };
        let kind = usize::from(deferral == Deferral::Responses);
        n_by_kind[kind] += 1;
        for case in 0..6 {
            let drift = if matches!(spec.ratio, Ratio::Token { .. }) { 0.6 } else { 2e-3 };
            let samples = random_minibatch(&spec, case, drift);
            let responses: Vec<ResponseSignals> = samples.iter().map(Sample::response).collect();
            let key = UpdateKey::default();
            let provisional = spec.provisional(key).unwrap();
            let calibration = spec.calibrate(&responses, key).unwrap();
            for (idx, response) in responses.iter().enumerate() {
                let mut before = vec![TokenEffect::default(); response.logp.len()];
                let mut after = before.clone();
                spec.evaluate(&provisional, idx, response, &mut before).unwrap();
                spec.evaluate(&calibration, idx, response, &mut after).unwrap();
                assert!(before.iter().all(|effect| !(effect.is_candidate && effect.kept)), "{name}");
                let waits = deferral.waits(&after);
                let waited = before.iter().zip(&after).filter(|(_, after)| waits(after));
                n_waited[kind] += waited.filter(|(_, after)| after.d_logp != 0.0).count();
                for (before, after) in before.iter().zip(&after) {
                    assert_eq!(before.is_candidate, after.is_candidate, "{name}");
                    if !waits(after) {
                        assert_eq!(before, after, "{name}");
                    }
                }
                assert_eq!(
                    deferral.has_waited(&after),
                    after.iter().any(|e| waits(e) && (e.d_logp != 0.0 || e.d_entropy != 0.0)),
                    "{name}"
                );
            }
        }
    }
    assert!(n_waited.iter().all(|n| *n > 20), "too few tokens waited to show anything: {n_waited:?}");
    assert!(n_by_kind.iter().all(|n| *n > 0), "each kind of objective occurs: {n_by_kind:?}");
}

#[test]
fn objectives_in_which_any_token_depends_on_the_minibatch_defer_nothing() {
    for name in ["entropy20", "clip-cov", "kl-cov", "grpo"] {
        let spec = preset(name).unwrap_or_else(|| panic!("{name}")).objective;
        assert_eq!(spec.deferral(), None, "{name}");
    }
    let mut spec = preset("stapo").unwrap().objective;
    assert_eq!(spec.deferral(), Some(Deferral::Candidates));
    spec.mask_signals = MaskSignals::Behavior;
    assert_eq!(spec.deferral(), None);
    spec.mask_signals = MaskSignals::Current;
    if let Mask::Spurious { threshold, .. } = &mut spec.masks[0] {
        *threshold = Threshold::TargetShare { share: 1e-3 };
    }
    assert_eq!(spec.deferral(), None, "a quantile of the mini-batch says which tokens are candidates");
}
