//! A second implementation of every objective, written from the papers' formulas without regard for speed. The
//! finite-difference tests compare against this implementation. `live` holds the log-probs that are differentiated;
//! every term with a stop-gradient (fates, soft weights, CISPO's weight) reads the frozen log-probs in `samples`.

use super::*;

/// The terms with a stop-gradient: fates with soft weights, the tokens that KL-Cov penalises, the coefficient of the
/// entropy bonus.
pub struct Frozen {
    fates: Vec<Vec<Option<f64>>>,
    penalised: Vec<(usize, usize)>,
    entropy_coefficient: f64,
}

impl Frozen {
    pub fn new(spec: &ObjectiveSpec, samples: &[Sample], update: UpdateKey) -> Self {
        let penalised = match spec.surrogate {
            Surrogate::KlCov { share, .. } => highest_cov(spec, samples, share),
            _ => Vec::new(),
        };
        let entropy_coefficient = match spec.entropy_bonus {
            EntropyBonus::None => 0.0,
            EntropyBonus::Constant { coefficient } => coefficient,
            EntropyBonus::Target { target, initial, .. } => {
                let is_below = update.controls.entropy.is_some_and(|entropy| entropy <= target);
                if is_below { update.controls.entropy_coefficient.unwrap_or(initial) } else { 0.0 }
            }
        };
        Frozen { fates: fates(spec, samples, update), penalised, entropy_coefficient }
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
                    Kl::UnbiasedK3 { beta } => {
                        beta * (live[i][t] - sample.behavior_logp[t]).exp() * (d.exp() - d - 1.0)
                    }
                };
                let bonus = frozen.entropy_coefficient * live_entropy[i][t];
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
        (Aggregate::SequenceMeanOfTokenMean, denominator) => {
            let means: Vec<f64> = values
                .iter()
                .filter(|v| !v.is_empty())
                .map(|v| v.iter().sum::<f64>() / v.len() as f64)
                .collect();
            let stays = Denominator::KeptTokens { silenced_responses: SilencedResponses::Stay };
            let n = if denominator == stays { samples.len() } else { means.len() };
            means.iter().sum::<f64>() / n as f64
        }
        (Aggregate::SequenceMeanOfTokenSum, Denominator::Constant { length }) => {
            sums.iter().map(|sum| sum / length).sum::<f64>() / samples.len() as f64
        }
        other => panic!("refused at load: {other:?}"),
    }
}

/// The ratio of a token at the log-probs `live`.
fn ratio(spec: &ObjectiveSpec, sample: &Sample, t: usize, live: &[f64], kept: &[usize]) -> f64 {
    let log_ratio = |t: usize| live[t] - sample.behavior_logp[t];
    let all: Vec<usize> = (0..live.len()).collect();
    let mean = |silenced: SilencedTokens, f: &dyn Fn(usize) -> f64| {
        let counted = if silenced == SilencedTokens::Stay { &all } else { kept };
        counted.iter().map(|&t| f(t)).sum::<f64>() / counted.len() as f64
    };
    match spec.ratio {
        Ratio::Token { max_log_ratio } => {
            let bound = max_log_ratio.unwrap_or(f64::INFINITY);
            log_ratio(t).clamp(-bound, bound).exp()
        }
        Ratio::Sequence { silenced } => mean(silenced, &log_ratio).exp(),
        Ratio::Geometric { low, high, silenced } => {
            let held = |t: usize| {
                let sign = if sample.a(t) > 0.0 { 1.0 } else { -1.0 };
                let l = log_ratio(t);
                sign * (sign * l).min(sign * l.max(-low).min(high))
            };
            mean(silenced, &held).exp()
        }
        Ratio::Product => kept.iter().map(|&t| log_ratio(t)).sum::<f64>().exp().clamp(1e-8, 20f64.exp()),
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
    let a = sample.a(t);
    let log_ratio = live[t] - sample.behavior_logp[t];
    let r = ratio(spec, sample, t, live, kept);
    let frozen = ratio(spec, sample, t, &sample.logp, kept);
    let (p, q) = (live[t].exp(), sample.behavior_logp[t].exp());
    let dppo = |is_dropped: bool, cap: Option<f64>| match cap {
        _ if is_dropped => 0.0,
        Some(c) if r > c => c * a * (1.0 + (r / c).ln()),
        _ => r * a,
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
            frozen.max(low.map_or(0.0, |l| 1.0 - l)).min(1.0 + high) * a * live[t]
        }
        Surrogate::Reinforce => a * live[t],
        Surrogate::SquaredLogRatio { beta } => a * live[t] - beta / 2.0 * log_ratio.powi(2),
        Surrogate::Unclipped => r * a,
        Surrogate::KlCov { coefficient, .. } => {
            let penalty = if penalised { coefficient } else { 0.0 };
            r * a - penalty * log_ratio.abs()
        }
        Surrogate::Sapo { tau_positive, tau_negative } => {
            let tau = if a > 0.0 { tau_positive } else { tau_negative };
            4.0 / tau / (1.0 + (-tau * (r - 1.0)).exp()) * a
        }
        Surrogate::TotalVariation { low, high, cap } => {
            dppo((a > 0.0 && p - q > high) || (a < 0.0 && p - q < -low), cap)
        }
        Surrogate::BinaryKl { low, high, cap } => {
            let kl = q * (q / p).ln() + (1.0 - q) * ((1.0 - q + 1e-8) / (1.0 - p + 1e-8)).ln();
            dppo((a > 0.0 && p > q && kl > high) || (a < 0.0 && p < q && kl > low), cap)
        }
        Surrogate::Vespo { k_positive, lambda_positive, k_negative, lambda_negative } => {
            let (k, lambda) =
                if a < 0.0 { (k_negative, lambda_negative) } else { (k_positive, lambda_positive) };
            frozen.powf(k) * (lambda * (1.0 - frozen)).exp() * a * live[t]
        }
    }
}

fn off_policy(spec: &ObjectiveSpec, sample: &Sample, t: usize) -> f64 {
    let log = |t: usize| sample.behavior_logp[t] - sample.sampler_logp[t];
    let weight = |level: WeightLevel| match level {
        WeightLevel::Token => log(t).exp(),
        WeightLevel::Sequence => (0..sample.logp.len()).map(log).sum::<f64>().exp(),
    };
    match spec.off_policy {
        OffPolicy::None => 1.0,
        OffPolicy::Tis { cap, level } => weight(level).min(cap),
        OffPolicy::Icepop { low, high } => {
            Some(weight(WeightLevel::Token)).filter(|w| *w >= low && *w <= high).unwrap_or(0.0)
        }
        OffPolicy::Mis { low, high, level } => {
            Some(weight(level)).filter(|w| *w >= low && *w <= high).unwrap_or(0.0)
        }
    }
}

/// Whether a token is improbable under an S2T mask; `rewarded` are the log-probs of the rewarded tokens.
fn is_improbable(
    threshold: Threshold,
    tau_p: f64,
    (logp, entropy, collision): (f64, f64, f64),
    rewarded: &[f64],
) -> bool {
    match threshold {
        Threshold::TauP => logp.exp() < tau_p,
        Threshold::TargetShare { share } => logp < sorted_quantile(rewarded.to_vec(), share),
        Threshold::Surprise { c, b } => -logp - c * entropy > b,
        Threshold::Influence { kappa, vocabulary } => {
            let c = vocabulary.map_or(0.0, |v| {
                let v = v as f64;
                (1.0 - 1.0 / v) / v.ln() / v.ln()
            });
            (1.0 - 2.0 * logp.exp() + collision) / (2.0 - c * entropy.powi(2)) > kappa
        }
    }
}

/// Fates from the rules of the masks, one token at a time; for masks that draw at random, as the calibration drew.
fn fates(spec: &ObjectiveSpec, samples: &[Sample], update: UpdateKey) -> Vec<Vec<Option<f64>>> {
    let (_, drawn) = run(spec, samples, update).unwrap();
    let signal = |s: &Sample, t: usize| match spec.mask_signals {
        MaskSignals::Current => (s.logp[t], s.entropy[t], s.collision[t]),
        MaskSignals::Behavior => (s.behavior_logp[t], s.behavior_entropy[t], 0.0),
    };
    let tokens = || samples.iter().enumerate().flat_map(|(i, s)| (0..s.logp.len()).map(move |t| (i, t, s)));
    let rewarded: Vec<f64> =
        tokens().filter(|&(_, t, s)| s.a(t) > 0.0).map(|(_, t, s)| signal(s, t).0).collect();
    let mut fates: Vec<Vec<Option<f64>>> = samples.iter().map(|s| vec![Some(1.0); s.logp.len()]).collect();
    for mask in &spec.masks {
        for (i, t, s) in tokens() {
            let (logp, entropy, _) = signal(s, t);
            let mut weight = 1.0;
            let silenced = match *mask {
                Mask::Spurious { tau_p, threshold, q, select: Select::LowEntropy, quantile_over, .. } => {
                    let candidate = |s: &Sample, t: usize| {
                        s.a(t) > 0.0 && is_improbable(threshold, tau_p, signal(s, t), &rewarded)
                    };
                    let counted = tokens().filter(|&(_, t, s)| match quantile_over {
                        QuantileOver::AllTokens => true,
                        QuantileOver::RewardedTokens => s.a(t) > 0.0,
                        QuantileOver::Candidates => candidate(s, t),
                    });
                    let entropies: Vec<f64> = counted.map(|(_, t, s)| signal(s, t).1).collect();
                    candidate(s, t) && entropy < sorted_quantile(entropies, q)
                }
                Mask::Spurious { tau_p, threshold, select: Select::Full, .. } => {
                    s.a(t) > 0.0 && is_improbable(threshold, tau_p, signal(s, t), &rewarded)
                }
                Mask::TopEntropy { share } => {
                    let all = tokens().map(|(_, t, s)| signal(s, t).1).collect();
                    entropy < sorted_quantile(all, 1.0 - share)
                }
                Mask::LowProbabilityFirst { eta } => (s.behavior_logp[t].exp() < eta) != (update.pass == 0),
                Mask::ProbabilityWeight { alpha } => {
                    weight = alpha * s.behavior_logp[t].exp() + (1.0 - alpha);
                    false
                }
                Mask::Taco { a, l } => {
                    let x = -logp - entropy + a.ln();
                    if s.a(t) > 0.0 && x > 0.0 {
                        weight = 1.0 - l * (1.0 - (-x).exp());
                    }
                    false
                }
                Mask::Stare { share, weight: constant, entropy_below, signs, step, .. } => {
                    let n = tokens().count() as f64;
                    let mean_entropy = tokens().map(|(_, t, s)| signal(s, t).1).sum::<f64>() / n;
                    let w = match update.controls.stare_weight {
                        Some(adapted) if step > 0.0 => adapted,
                        _ if step > 0.0 || mean_entropy < entropy_below => constant,
                        _ => 1.0,
                    };
                    let surprisals = tokens().map(|(_, t, s)| -signal(s, t).0).collect();
                    if -logp >= sorted_quantile(surprisals, 1.0 - share) {
                        weight = match s.a(t) {
                            a if a > 0.0 => w,
                            a if a < 0.0 && signs == StareSigns::Both => 2.0 - w,
                            _ => 1.0,
                        };
                    }
                    false
                }
                Mask::Rsi { low, high } => -logp < low * entropy || -logp > high * entropy,
                Mask::OffPolicySequence { delta } => {
                    let n = s.logp.len() as f64;
                    let drift = (0..s.logp.len()).map(|t| s.sampler_logp[t] - s.logp[t]).sum::<f64>() / n;
                    s.a(t) < 0.0 && drift > delta
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
    let mean_a = tokens.iter().map(|&(i, t)| samples[i].a(t)).sum::<f64>() / n;
    let mean_l = tokens.iter().map(|&(i, t)| samples[i].logp[t]).sum::<f64>() / n;
    let cov = |&(i, t): &(usize, usize)| (samples[i].a(t) - mean_a) * (samples[i].logp[t] - mean_l);
    let mut ranked = tokens.clone();
    ranked.sort_by(|a, b| cov(b).total_cmp(&cov(a)).then(a.cmp(b)));
    ranked.truncate(((share * n).floor() as usize).max(1));
    ranked
}

fn sorted_quantile(mut values: Vec<f64>, q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let Some(last) = values.len().checked_sub(1) else { return f64::NEG_INFINITY };
    let rank = q * last as f64;
    let (low, high) = (values[rank.floor() as usize], values[rank.ceil() as usize]);
    low + (high - low) * (rank - rank.floor())
}
