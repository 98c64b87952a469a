use super::*;
use crate::objective::{MaskSignals, Select, Threshold};
use crate::random::Key;

/// A response whose columns are drawn.
struct Drawn {
    logp: Vec<f64>,
    entropy: Vec<f64>,
    reference_logp: Vec<f64>,
}

fn drawn(seed: u64, n_tokens: usize) -> Drawn {
    let column = |stream: u64, scale: f64| -> Vec<f64> {
        (0..n_tokens as u64).map(|t| scale * (0.01 + Key::new(seed).with(stream).with(t).uniform())).collect()
    };
    Drawn { logp: column(0, -3.0), entropy: column(1, 2.0), reference_logp: column(2, -3.0) }
}

impl Drawn {
    fn view(&self) -> JudgedResponse<'_> {
        JudgedResponse {
            logp: &self.logp,
            entropy: &self.entropy,
            collision: None,
            reference_logp: Some(&self.reference_logp),
        }
    }
}

fn pairs(seed: u64) -> Vec<(Drawn, Drawn)> {
    (0..5).map(|i| (drawn(seed + 10 * i, 3 + i as usize), drawn(seed + 10 * i + 1, 7 - i as usize))).collect()
}

fn comparisons(pairs: &[(Drawn, Drawn)]) -> Vec<Comparison<'_>> {
    pairs.iter().map(|(c, r)| Comparison { chosen: Some(c.view()), rejected: Some(r.view()) }).collect()
}

/// The mean loss and the effects of a mini-batch, with the calibration of `frozen`.
fn run(
    spec: &PreferenceSpec,
    calibration: &PreferenceCalibration,
    minibatch: &[Comparison],
) -> (f64, Vec<ComparisonEffect>) {
    let effects: Vec<ComparisonEffect> = minibatch
        .iter()
        .enumerate()
        .map(|(idx, comparison)| spec.evaluate(calibration, idx, comparison).unwrap())
        .collect();
    let n: usize = minibatch.iter().map(|comparison| comparison.n_terms(&spec.loss)).sum();
    (effects.iter().map(|effect| effect.loss).sum::<f64>() / n as f64, effects)
}

const LOSSES: [PreferenceLoss; 5] = [
    PreferenceLoss::Dpo { beta: 0.3, label_smoothing: 0.1 },
    PreferenceLoss::Ipo { beta: 0.2 },
    PreferenceLoss::Simpo { beta: 2.0, gamma: 0.5 },
    PreferenceLoss::Orpo { beta: 0.4 },
    PreferenceLoss::Kto { beta: 0.3, desirable_weight: 1.3, undesirable_weight: 0.7 },
];

fn spurious(tau_p: f64) -> Mask {
    let Mask::Spurious { threshold, q, select, quantile_over, seed, .. } = Mask::spurious() else {
        unreachable!()
    };
    Mask::Spurious { tau_p, threshold, q, select, quantile_over, seed }
}

#[derive(serde::Deserialize)]
struct Golden {
    loss: PreferenceLoss,
    logp: Vec<[Vec<f64>; 2]>,
    reference_logp: Vec<[Vec<f64>; 2]>,
    other_log_ratios: Vec<f64>,
    value: f64,
    d_logp: Vec<[Vec<f64>; 2]>,
}

#[test]
fn losses_and_derivatives_are_those_of_autograd() {
    let file: serde_json::Value =
        serde_json::from_str(include_str!("../../tests/goldens/preferences.json")).unwrap();
    let cases: Vec<Golden> = serde_json::from_value(file["cases"].clone()).unwrap();
    assert_eq!(cases.len(), 10);
    let close = |ours: f64, theirs: f64| (ours - theirs).abs() <= 1e-12 * theirs.abs().max(1e-3);
    for case in &cases {
        let spec = PreferenceSpec { loss: case.loss, masks: Vec::new() };
        let entropy: Vec<[Vec<f64>; 2]> =
            case.logp.iter().map(|pair| pair.clone().map(|c| vec![0.0; c.len()])).collect();
        let side = |idx: usize, side: usize| JudgedResponse {
            logp: &case.logp[idx][side],
            entropy: &entropy[idx][side],
            collision: None,
            reference_logp: Some(&case.reference_logp[idx][side]),
        };
        let minibatch: Vec<Comparison> = (0..case.logp.len())
            .map(|idx| Comparison { chosen: Some(side(idx, 0)), rejected: Some(side(idx, 1)) })
            .collect();
        let baseline = PreferenceLoss::baseline(&case.other_log_ratios);
        let (loss, effects) = run(&spec, &spec.calibrate(&minibatch, baseline, 0).unwrap(), &minibatch);
        assert!(close(loss, case.value), "{:?}: {loss} {}", case.loss, case.value);
        let n: usize = minibatch.iter().map(|comparison| comparison.n_terms(&spec.loss)).sum();
        for (effect, theirs) in effects.iter().zip(&case.d_logp) {
            for (ours, theirs) in [&effect.chosen, &effect.rejected].into_iter().zip(theirs) {
                assert_eq!(ours.d_logp.len(), theirs.len());
                for (&ours, &theirs) in ours.d_logp.iter().zip(theirs) {
                    assert!(close(ours / n as f64, theirs), "{:?}: {} {theirs}", case.loss, ours / n as f64);
                }
            }
        }
    }
}

#[test]
fn derivatives_are_those_of_the_loss_with_masks_and_without() {
    for loss in LOSSES {
        for masks in [vec![], vec![spurious(0.3)], vec![Mask::RandomTokens { tau_p: 0.3, q: 0.75, seed: 1 }]]
        {
            let spec = PreferenceSpec { loss, masks };
            spec.check().unwrap();
            let mut pairs = pairs(3);
            let calibration = spec.calibrate(&comparisons(&pairs), 0.2, 4).unwrap();
            let (_, effects) = run(&spec, &calibration, &comparisons(&pairs));
            let n: usize = comparisons(&pairs).iter().map(|it| it.n_terms(&spec.loss)).sum();
            // Masks are constants: which tokens are silenced does not change with the log-prob that is moved.
            let is_silenced = |idx: usize, t: usize| effects[idx].chosen.d_logp[t] == 0.0;
            let h = 2f64.powi(-16);
            for idx in 0..pairs.len() {
                for t in 0..pairs[idx].0.logp.len() {
                    if is_silenced(idx, t) {
                        continue;
                    }
                    let mut at = |delta: f64| {
                        pairs[idx].0.logp[t] += delta;
                        let loss = run(&spec, &calibration, &comparisons(&pairs)).0;
                        pairs[idx].0.logp[t] -= delta;
                        loss
                    };
                    let numeric = (at(h) - at(-h)) / (2.0 * h);
                    let ours = effects[idx].chosen.d_logp[t] / n as f64;
                    assert!((ours - numeric).abs() <= 1e-8, "{loss:?} {idx} {t}: {ours} {numeric}");
                }
                for t in 0..pairs[idx].1.logp.len() {
                    let mut at = |delta: f64| {
                        pairs[idx].1.logp[t] += delta;
                        let loss = run(&spec, &calibration, &comparisons(&pairs)).0;
                        pairs[idx].1.logp[t] -= delta;
                        loss
                    };
                    let numeric = (at(h) - at(-h)) / (2.0 * h);
                    let ours = effects[idx].rejected.d_logp[t] / n as f64;
                    assert!((ours - numeric).abs() <= 1e-8, "{loss:?} {idx} {t}: {ours} {numeric}");
                }
            }
        }
    }
}

#[test]
fn s2t_silences_improbable_tokens_of_low_entropy_in_chosen_responses_and_the_control_as_many() {
    let pairs = pairs(3);
    let minibatch = comparisons(&pairs);
    let silenced = |mask: Mask| -> Vec<(usize, usize)> {
        let spec = PreferenceSpec { loss: PreferenceLoss::default(), masks: vec![mask] };
        let (_, effects) = run(&spec, &spec.calibrate(&minibatch, 0.0, 2).unwrap(), &minibatch);
        assert!(effects.iter().all(|effect| effect.rejected.d_logp.iter().all(|&d| d != 0.0)));
        let n: usize = effects.iter().map(|effect| effect.chosen.n_silenced).sum();
        let zeros: Vec<(usize, usize)> = effects
            .iter()
            .enumerate()
            .flat_map(|(i, effect)| effect.chosen.d_logp.iter().enumerate().map(move |(t, &d)| (i, t, d)))
            .filter(|(_, _, d)| *d == 0.0)
            .map(|(i, t, _)| (i, t))
            .collect();
        assert_eq!(zeros.len(), n);
        zeros
    };
    let ours = silenced(spurious(0.3));
    let candidates: Vec<(usize, usize)> = pairs
        .iter()
        .enumerate()
        .flat_map(|(i, (chosen, _))| (0..chosen.logp.len()).map(move |t| (i, t)))
        .filter(|&(i, t)| pairs[i].0.logp[t] < libm::log(0.3))
        .collect();
    let entropy = |&(i, t): &(usize, usize)| pairs[i].0.entropy[t];
    assert!(ours.iter().all(|token| candidates.contains(token)));
    assert_eq!(ours.len(), candidates.len() * 3 / 4, "of {candidates:?}");
    let kept = candidates.iter().filter(|token| !ours.contains(token));
    let highest = ours.iter().map(entropy).fold(0.0, f64::max);
    assert!(kept.map(entropy).all(|entropy| entropy >= highest), "the candidates of highest entropy stay");
    let control = silenced(Mask::RandomTokens { tau_p: 0.3, q: 0.75, seed: 1 });
    assert_eq!(control.len(), ours.len());
    assert_ne!(control, ours);
}

#[test]
fn a_silenced_token_leaves_the_loss() {
    let pairs = pairs(3);
    let spec = PreferenceSpec { loss: PreferenceLoss::default(), masks: vec![spurious(0.3)] };
    let minibatch = comparisons(&pairs);
    let calibration = spec.calibrate(&minibatch, 0.0, 0).unwrap();
    let (loss, effects) = run(&spec, &calibration, &minibatch);
    let without: Vec<(Drawn, Drawn)> = pairs
        .iter()
        .zip(&effects)
        .map(|((chosen, rejected), effect)| {
            let kept = |column: &[f64]| -> Vec<f64> {
                let tokens = column.iter().zip(&effect.chosen.d_logp);
                tokens.filter(|(_, d)| **d != 0.0).map(|(&value, _)| value).collect()
            };
            let [logp, entropy, reference_logp] =
                [&chosen.logp, &chosen.entropy, &chosen.reference_logp].map(|column| kept(column));
            let copy = |it: &Drawn| Drawn {
                logp: it.logp.clone(),
                entropy: it.entropy.clone(),
                reference_logp: it.reference_logp.clone(),
            };
            (Drawn { logp, entropy, reference_logp }, copy(rejected))
        })
        .collect();
    let plain = PreferenceSpec::default();
    let minibatch = comparisons(&without);
    let (expected, _) = run(&plain, &plain.calibrate(&minibatch, 0.0, 0).unwrap(), &minibatch);
    assert!((loss - expected).abs() < 1e-15, "{loss} {expected}");
}

#[test]
fn kto_learns_from_single_responses_and_other_losses_refuse_them() {
    let response = drawn(1, 4);
    let single = Comparison { chosen: None, rejected: Some(response.view()) };
    let kto = PreferenceSpec { loss: LOSSES[4], masks: vec![] };
    let (_, effects) = run(&kto, &kto.calibrate(&[single], 0.1, 0).unwrap(), &[single]);
    assert!(effects[0].rejected.d_logp.iter().all(|&d| d > 0.0) && effects[0].chosen.d_logp.is_empty());
    let dpo = PreferenceSpec::default();
    let said = dpo.evaluate(&dpo.calibrate(&[single], 0.0, 0).unwrap(), 0, &single).unwrap_err().to_string();
    assert!(said.contains("chosen is missing") && said.contains("kto"), "{said}");
    let bare = JudgedResponse { reference_logp: None, ..response.view() };
    let pair = Comparison { chosen: Some(bare), rejected: Some(bare) };
    let said = dpo.evaluate(&dpo.calibrate(&[pair], 0.0, 0).unwrap(), 0, &pair).unwrap_err().to_string();
    assert!(said.contains("reference_logp is missing"), "{said}");
    assert_eq!(PreferenceLoss::baseline(&[-1.0, 0.5]), 0.0, "at least 0");
}

/// The square of 1e200 is no number, while its derivative is.
#[test]
fn a_loss_that_overflows_is_refused() {
    let (chosen, rejected) = (drawn(1, 1), drawn(2, 1));
    let far = JudgedResponse { logp: &[-1e200], ..chosen.view() };
    let pair = Comparison { chosen: Some(far), rejected: Some(rejected.view()) };
    let ipo = PreferenceSpec { loss: PreferenceLoss::Ipo { beta: 0.2 }, masks: vec![] };
    let calibration = ipo.calibrate(&[pair], 0.0, 0).unwrap();
    let said = ipo.evaluate(&calibration, 3, &pair).unwrap_err().to_string();
    assert!(said.contains("log-probs whose preference loss is finite"), "{said}");
}

#[test]
fn impossible_values_and_masks_are_refused_by_their_key() {
    let refused = |loss: PreferenceLoss, masks: Vec<Mask>| {
        PreferenceSpec { loss, masks }.check().unwrap_err().to_string()
    };
    let said = refused(PreferenceLoss::Dpo { beta: 0.0, label_smoothing: 0.0 }, vec![]);
    assert_eq!(said, "preference.loss.beta: 0, expected a positive number");
    let said = refused(PreferenceLoss::Dpo { beta: 0.1, label_smoothing: 0.5 }, vec![]);
    assert!(said.starts_with("preference.loss.label_smoothing: 0.5"), "{said}");
    let said = refused(LOSSES[0], vec![Mask::Taco { a: 0.01, l: 0.9 }]);
    assert!(said.starts_with("preference.masks.0.kind") && said.contains("hint: spurious"), "{said}");
    let mask = Mask::Spurious {
        tau_p: 2.0,
        threshold: Threshold::TauP,
        q: 0.5,
        select: Select::LowEntropy,
        quantile_over: crate::objective::QuantileOver::Candidates,
        seed: 0,
    };
    let said = refused(LOSSES[0], vec![mask]);
    assert!(said.starts_with("preference.masks.0.tau_p"), "{said}");
    assert_eq!(PreferenceSpec::default().mask_objective().mask_signals, MaskSignals::Current);
}

#[test]
fn certain_and_wholly_silenced_responses_have_finite_derivatives() {
    let sure = Drawn { logp: vec![0.0; 3], entropy: vec![0.0; 3], reference_logp: vec![-1.0; 3] };
    let other = drawn(2, 4);
    for loss in LOSSES {
        let spec = PreferenceSpec { loss, masks: vec![] };
        for (chosen, rejected) in [(&sure, &other), (&other, &sure)] {
            let pair = Comparison { chosen: Some(chosen.view()), rejected: Some(rejected.view()) };
            let (loss, _) = run(&spec, &spec.calibrate(&[pair], 0.1, 0).unwrap(), &[pair]);
            assert!(loss.is_finite());
        }
        let full = Mask::Spurious {
            tau_p: 0.999,
            threshold: Threshold::TauP,
            q: 1.0,
            select: Select::Full,
            quantile_over: crate::objective::QuantileOver::Candidates,
            seed: 0,
        };
        let spec = PreferenceSpec { loss, masks: vec![full] };
        let pair = Comparison { chosen: Some(other.view()), rejected: Some(sure.view()) };
        let (_, effects) = run(&spec, &spec.calibrate(&[], 0.1, 0).unwrap(), &[pair]);
        assert_eq!(effects[0].chosen.n_silenced, 4);
        assert!(effects[0].chosen.d_logp.iter().all(|&d| d == 0.0));
        let is_pushed = effects[0].rejected.d_logp.iter().any(|&d| d != 0.0);
        assert_eq!(is_pushed, loss.judges_alone(), "{loss:?}: a pair needs both");
    }
}

/// Three tokens whose log-ratios to the reference are 1 each, and log-probs -1.
#[test]
fn the_reward_of_a_response_is_a_sum_or_a_mean_of_its_tokens() {
    let response = Drawn { logp: vec![-1.0; 3], entropy: vec![0.0; 3], reference_logp: vec![-2.0; 3] };
    let pair = Comparison { chosen: Some(response.view()), rejected: Some(response.view()) };
    for loss in LOSSES {
        let spec = PreferenceSpec { loss, masks: vec![] };
        let (_, effects) = run(&spec, &spec.calibrate(&[pair], 0.1, 0).unwrap(), &[pair]);
        let expected = match loss {
            PreferenceLoss::Dpo { beta, .. } | PreferenceLoss::Kto { beta, .. } => 3.0 * beta,
            PreferenceLoss::Ipo { beta } => beta,
            PreferenceLoss::Simpo { beta, .. } | PreferenceLoss::Orpo { beta } => -beta,
        };
        assert!(
            (effects[0].chosen.reward - expected).abs() < 1e-12,
            "{loss:?}: {}",
            effects[0].chosen.reward
        );
    }
}
