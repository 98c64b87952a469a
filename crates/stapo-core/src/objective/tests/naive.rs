//! A second implementation of every objective, written from the papers' formulas without regard for speed. The
//! finite-difference tests compare against this implementation. `live` holds the log-probs that are differentiated; every term
//! with a stop-gradient (fates, soft weights, CISPO's weight) reads the frozen log-probs in `samples`.

use super::*;

/// The terms with a stop-gradient: fates with soft weights, and the tokens that KL-Cov penalises.
pub struct Frozen {
    fates: Vec<Vec<Option<f64>>>,
    penalised: Vec<(usize, usize)>,
}

impl Frozen {
    pub fn new(spec: &ObjectiveSpec, samples: &[Sample], pass: usize) -> Self {
        let penalised = match spec.surrogate {
            Surrogate::KlCov { share, .. } => highest_cov(spec, samples, share),
            _ => Vec::new(),
        };
        Frozen { fates: fates(spec, samples, pass), penalised }
    }
}

/// The loss as a plain function of the live log-probs and entropies.
pub fn loss(
    spec: &ObjectiveSpec,
    samples: &[Sample],
    frozen: &Frozen,
    live: &[Vec<f64>],
    live_entropy: &[Vec<f64>],
) -> f64 {
    let fates = &frozen.fates;
    let mut per_response = Vec::new();
    for (i, sample) in samples.iter().enumerate() {
        let kept: Vec<usize> = (0..sample.logp.len()).filter(|&t| fates[i][t].is_some()).collect();
        let values: Vec<f64> = kept
            .iter()
            .map(|&t| {
                let weight = fates[i][t].unwrap_or(0.0) * off_policy(spec, sample, t);
                let d = sample.reference_logp[t] - live[i][t];
                let kl = match spec.kl {
                    Kl::None => 0.0,
                    Kl::K1 { beta } => beta * -d,
                    Kl::K2 { beta } => beta * d * d / 2.0,
                    Kl::K3 { beta } => beta * (d.exp() - d - 1.0),
                };
                let bonus = match spec.entropy_bonus {
                    EntropyBonus::None => 0.0,
                    EntropyBonus::Constant { coefficient } => coefficient * live_entropy[i][t],
                };
                let penalised = frozen.penalised.contains(&(i, t));
                weight * surrogate(spec, sample, t, &live[i], &kept, penalised) - kl + bonus
            })
            .collect();
        per_response.push(values);
    }
    -aggregate(spec, samples, &per_response)
}

fn aggregate(spec: &ObjectiveSpec, samples: &[Sample], values: &[Vec<f64>]) -> f64 {
    let sums: Vec<f64> = values.iter().map(|v| v.iter().sum()).collect();
    let total: f64 = sums.iter().sum();
    let n_kept: usize = values.iter().map(Vec::len).sum();
    let n_all: usize = samples.iter().map(|s| s.logp.len()).sum();
    if n_kept == 0 {
        return 0.0;
    }
    match (spec.aggregate, spec.denominator) {
        (Aggregate::TokenMean, Denominator::AllTokens) => total / n_all as f64,
        (Aggregate::TokenMean, _) => total / n_kept as f64,
        (Aggregate::SequenceMeanOfTokenMean, Denominator::AllTokens) => {
            let means = sums.iter().zip(samples).map(|(sum, s)| sum / s.logp.len() as f64);
            means.sum::<f64>() / samples.len() as f64
        }
        (Aggregate::SequenceMeanOfTokenMean, _) => {
            let means: Vec<f64> = values
                .iter()
                .filter(|v| !v.is_empty())
                .map(|v| v.iter().sum::<f64>() / v.len() as f64)
                .collect();
            means.iter().sum::<f64>() / means.len() as f64
        }
        (Aggregate::SequenceMeanOfTokenSum, Denominator::Constant { length }) => {
            sums.iter().map(|sum| sum / length).sum::<f64>() / samples.len() as f64
        }
        other => panic!("refused at load: {other:?}"),
    }
}

fn surrogate(
    spec: &ObjectiveSpec,
    sample: &Sample,
    t: usize,
    live: &[f64],
    kept: &[usize],
    penalised: bool,
) -> f64 {
    let a = sample.advantage;
    let log_ratio = |t: usize| live[t] - sample.behavior_logp[t];
    let mean = |f: &dyn Fn(usize) -> f64| kept.iter().map(|&t| f(t)).sum::<f64>() / kept.len() as f64;
    let r = match spec.ratio {
        Ratio::Token => log_ratio(t).exp(),
        Ratio::Sequence => mean(&log_ratio).exp(),
    };
    match spec.surrogate {
        Surrogate::Clip { low, high, dual } => {
            let clipped = (r * a).min(r.max(1.0 - low).min(1.0 + high) * a);
            match dual {
                Some(c) if a < 0.0 => clipped.max(c * a),
                _ => clipped,
            }
        }
        Surrogate::Cispo { low, high } => {
            let frozen = (sample.logp[t] - sample.behavior_logp[t]).exp();
            frozen.max(low.map_or(0.0, |l| 1.0 - l)).min(1.0 + high) * a * live[t]
        }
        Surrogate::Reinforce => a * live[t],
        Surrogate::Unclipped => r * a,
        Surrogate::KlCov { coefficient, .. } => {
            let penalty = if penalised { coefficient } else { 0.0 };
            r * a - penalty * log_ratio(t).abs()
        }
        Surrogate::Sapo { tau_positive, tau_negative } => {
            let tau = if a > 0.0 { tau_positive } else { tau_negative };
            4.0 / tau / (1.0 + (-tau * (r - 1.0)).exp()) * a
        }
        Surrogate::Geometric { clip } => {
            let sign = if a > 0.0 { 1.0 } else { -1.0 };
            let held = |t: usize| {
                let l = log_ratio(t);
                sign * (sign * l).min(sign * l.max(-clip).min(clip))
            };
            mean(&held).exp() * a
        }
        Surrogate::TotalVariation { delta } => {
            let moved = live[t].exp() - sample.behavior_logp[t].exp();
            if (a > 0.0 && moved > delta) || (a < 0.0 && moved < -delta) { 0.0 } else { r * a }
        }
    }
}

fn off_policy(spec: &ObjectiveSpec, sample: &Sample, t: usize) -> f64 {
    let w = (sample.behavior_logp[t] - sample.sampler_logp[t]).exp();
    match spec.off_policy {
        OffPolicy::None => 1.0,
        OffPolicy::Tis { cap } => w.min(cap),
        OffPolicy::Icepop { low, high } => {
            if w < low || w > high {
                0.0
            } else {
                w
            }
        }
    }
}

/// `Some(soft weight)` for kept tokens. The tokens that random masks draw are taken from the implementation under test,
/// because no formula of a paper determines these.
fn fates(spec: &ObjectiveSpec, samples: &[Sample], pass: usize) -> Vec<Vec<Option<f64>>> {
    let drawn =
        run(spec, samples, UpdateKey { step: 0, pass }).map(|(_, effects)| effects).unwrap_or_default();
    let signal = |s: &Sample, t: usize| match spec.mask_signals {
        MaskSignals::Current => (s.logp[t], s.entropy[t]),
        MaskSignals::Behavior => (s.behavior_logp[t], s.behavior_entropy[t]),
    };
    let tokens = || samples.iter().enumerate().flat_map(|(i, s)| (0..s.logp.len()).map(move |t| (i, t, s)));
    let candidate = |s: &Sample, t: usize, tau_p: f64| s.advantage > 0.0 && signal(s, t).0.exp() < tau_p;
    let mut fates: Vec<Vec<Option<f64>>> = samples.iter().map(|s| vec![Some(1.0); s.logp.len()]).collect();
    for mask in &spec.masks {
        for (i, t, s) in tokens() {
            let (logp, entropy) = signal(s, t);
            let mut weight = 1.0;
            let silenced = match *mask {
                Mask::Spurious { tau_p, q, select: Select::LowEntropy, quantile_over, .. } => {
                    let counted = tokens().filter(|&(_, t, s)| {
                        quantile_over == QuantileOver::AllTokens || candidate(s, t, tau_p)
                    });
                    let entropies: Vec<f64> = counted.map(|(_, t, s)| signal(s, t).1).collect();
                    candidate(s, t, tau_p) && entropy < sorted_quantile(entropies, q)
                }
                Mask::TopEntropy { share } => {
                    let all = tokens().map(|(_, t, s)| signal(s, t).1).collect();
                    entropy < sorted_quantile(all, 1.0 - share)
                }
                Mask::LowProbabilityFirst { eta } => (s.behavior_logp[t].exp() < eta) != (pass == 0),
                Mask::ProbabilityWeight { alpha } => {
                    weight = alpha * s.behavior_logp[t].exp() + (1.0 - alpha);
                    false
                }
                Mask::Taco { a, l } => {
                    let x = -logp - entropy + a.ln();
                    if s.advantage > 0.0 && x > 0.0 {
                        weight = 1.0 - l * (1.0 - (-x).exp());
                    }
                    false
                }
                _ => drawn[i][t].silenced_by == Some(mask.kind()),
            };
            fates[i][t] = if silenced { None } else { fates[i][t].map(|w| w * weight) };
        }
    }
    fates
}

fn highest_cov(spec: &ObjectiveSpec, samples: &[Sample], share: f64) -> Vec<(usize, usize)> {
    assert_eq!(spec.mask_signals, MaskSignals::Current);
    let tokens: Vec<(usize, usize)> =
        samples.iter().enumerate().flat_map(|(i, s)| (0..s.logp.len()).map(move |t| (i, t))).collect();
    let n = tokens.len() as f64;
    let mean_a = tokens.iter().map(|&(i, _)| samples[i].advantage).sum::<f64>() / n;
    let mean_l = tokens.iter().map(|&(i, t)| samples[i].logp[t]).sum::<f64>() / n;
    let cov = |&(i, t): &(usize, usize)| (samples[i].advantage - mean_a) * (samples[i].logp[t] - mean_l);
    let mut ranked = tokens.clone();
    ranked.sort_by(|a, b| cov(b).total_cmp(&cov(a)).then(a.cmp(b)));
    ranked.truncate(((share * n).floor() as usize).max(1));
    ranked
}

fn sorted_quantile(mut values: Vec<f64>, q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let Some(last) = values.len().checked_sub(1) else { return f64::NEG_INFINITY };
    let place = q * last as f64;
    let (low, high) = (values[place.floor() as usize], values[place.ceil() as usize]);
    low + (high - low) * (place - place.floor())
}
