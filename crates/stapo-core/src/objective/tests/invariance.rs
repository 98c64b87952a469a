use super::*;
use crate::batch::pack_in_order;

#[test]
fn no_cut_of_a_minibatch_into_microbatches_changes_a_bit() {
    for (name, spec) in all_specs() {
        let samples =
            random_minibatch(&spec, 8, if matches!(spec.ratio, Ratio::Sequence { .. }) { 2e-3 } else { 0.6 });
        let whole = run(&spec, &samples, UpdateKey::default()).unwrap();
        let lengths: Vec<usize> = samples.iter().map(|s| s.logp.len()).collect();
        for budget in [12, 20, 64, 1000] {
            let packed = pack_in_order(&lengths, budget).unwrap();
            let responses: Vec<ResponseSignals> = samples.iter().map(Sample::response).collect();
            let calibration = spec.calibrate(&responses, UpdateKey::default()).unwrap();
            let mut tallies = vec![SequenceTally::default(); samples.len()];
            let mut effects: Vec<Vec<TokenEffect>> = vec![Vec::new(); samples.len()];
            // The last micro-batch is evaluated first: the order of micro-batches must not matter either.
            for &idx in packed.iter().rev().flat_map(|microbatch| &microbatch.sequences) {
                effects[idx] = vec![TokenEffect::default(); lengths[idx]];
                tallies[idx] = spec.evaluate(&calibration, idx, &responses[idx], &mut effects[idx]).unwrap();
            }
            let tally = spec.total(&tallies);
            assert_eq!(tally, whole.0, "{name}, budget {budget}");
            for own in &mut effects {
                tally.scale_effects(own);
            }
            for (ours, whole) in effects.iter().flatten().zip(whole.1.iter().flatten()) {
                assert_eq!(ours.d_logp.to_bits(), whole.d_logp.to_bits(), "{name}, budget {budget}");
            }
        }
    }
}

#[test]
fn an_empty_minibatch_and_empty_responses_are_no_crash() {
    for (name, spec) in all_specs() {
        let (tally, _) = run(&spec, &[], UpdateKey::default()).unwrap();
        assert_eq!((tally.loss, tally.scale, tally.n_tokens), (0.0, 0.0, 0), "{name}");
        let samples = [Sample::on_policy(1.0, &[], &[]), Sample::on_policy(-1.0, &[-0.5], &[1.0])];
        let (tally, effects) = run(&spec, &samples, UpdateKey::default()).unwrap();
        assert!(tally.loss.is_finite() && effects[1][0].d_logp.is_finite(), "{name}");
    }
}

#[test]
fn one_token_responses_work_for_every_preset() {
    for (name, spec) in all_specs() {
        let samples = [Sample::on_policy(1.0, &[-0.7], &[1.0]), Sample::on_policy(-1.0, &[-0.7], &[1.0])];
        let (tally, effects) =
            run(&spec, &samples, UpdateKey { pass: spec.n_passes() - 1, ..UpdateKey::default() }).unwrap();
        assert!(tally.loss.is_finite(), "{name}");
        assert!(effects.iter().flatten().any(|e| e.d_logp != 0.0), "{name} has a derivative");
    }
}
