//! The gradient norm of tokens against their probability and their entropy, in bins, with rank correlations.

use super::quadrants::{seen, whose};
use crate::shared::chart::{Cross, Dot, Figure, Ink, Scale, Scatter, number};
use crate::shared::study::Study;
use anyhow::Result;
use stapo_core::stats::{Estimate, mean_estimate, quantile, spearman};
use std::collections::BTreeMap;

/// Bins of each picture.
const N_BINS: usize = 12;
/// Tokens that a bin needs for a dot.
const MIN_TOKENS: usize = 5;

/// A token with the quantity on the x axis and its gradient norm.
#[derive(Clone, Copy)]
struct Pushed {
    step: u64,
    x: f64,
    norm: f64,
}

/// The quantity on the x axis.
#[derive(Clone, Copy, PartialEq)]
enum Against {
    Probability,
    Entropy,
}

/// Both pictures of the run whose tokens are shown, or why there are none.
pub fn figures(study: &Study) -> Result<std::result::Result<Vec<Figure>, String>> {
    let (_, run) = study.shown();
    let responses = run.responses()?;
    let tokens: Vec<_> = responses.iter().filter(|r| r.advantage != 0.0).flat_map(seen).collect();
    let pushed = |against: Against| -> Vec<Pushed> {
        let x = |logp: f64, entropy: f64| if against == Against::Probability { logp } else { entropy };
        let tokens = tokens.iter();
        tokens
            .filter_map(|t| Some(Pushed { step: t.step, x: x(t.logp, t.entropy), norm: t.norm? }))
            .filter(|t| t.x.is_finite() && t.norm.is_finite())
            .collect()
    };
    if !fill_the_bins(pushed(Against::Entropy).len()) {
        return Ok(Err(
            "Gradient norm against probability and entropy: too few recorded tokens with an advantage."
                .into(),
        ));
    }
    let both = [Against::Probability, Against::Entropy];
    let drawn: Result<Vec<Figure>> =
        both.map(|against| figure(study, against, &pushed(against))).into_iter().collect();
    Ok(Ok(drawn?))
}

/// Whether every bin could have as many tokens as a mean needs.
fn fill_the_bins(n_tokens: usize) -> bool {
    n_tokens >= N_BINS * MIN_TOKENS
}

fn figure(study: &Study, against: Against, tokens: &[Pushed]) -> Result<Figure> {
    // Probabilities are binned by their logarithm, which spreads the improbable ones out.
    let xs: Vec<f64> = tokens.iter().map(|token| token.x).collect();
    let (low, high) = (quantile(&xs, 0.0)?, quantile(&xs, 1.0)?);
    let width = ((high - low) / N_BINS as f64).max(f64::MIN_POSITIVE);
    let mut bins: Vec<Vec<Pushed>> = vec![Vec::new(); N_BINS];
    for token in tokens {
        bins[(((token.x - low) / width) as usize).min(N_BINS - 1)].push(*token);
    }
    let crosses: Vec<Cross> =
        bins.iter().filter(|bin| bin.len() >= MIN_TOKENS).map(|bin| cross(against, bin)).collect();
    let correlated = correlation(tokens)?.map_or(String::new(), |rho| {
        let interval = rho
            .interval
            .map_or(String::new(), |i| format!(", 95 % {:.2} to {:.2}", i.low.max(-1.0), i.high.min(1.0)));
        format!(" · Spearman's correlation {:.2}{interval} (mean over {} steps)", rho.value, rho.n_questions)
    });
    let (name, title, x_label) = match against {
        Against::Probability => (
            "gradient-probability",
            "Gradient norm against probability",
            "probability of the sampled token (logarithmic)",
        ),
        Against::Entropy => {
            ("gradient-entropy", "Gradient norm against entropy", "entropy at its position, nats")
        }
    };
    let x = match against {
        Against::Probability => {
            let ends = crosses.iter().map(|cross| cross.dot.x).chain([1.0]);
            Scale::log_around(ends).unwrap_or(Scale::Log { low: 1e-6, high: 1.0 })
        }
        Against::Entropy => Scale::around(crosses.iter().map(|cross| cross.dot.x).chain([0.0])),
    };
    let tops = crosses.iter().flat_map(|cross| [cross.dot.y, cross.y_interval.map_or(0.0, |(_, high)| high)]);
    let highest = crosses.iter().map(|cross| cross.dot.y).fold(0.0, f64::max);
    let y = Scale::around(tops.map(|top| top.min(2.0 * highest)).chain([0.0]));
    Ok(Figure {
        name: name.into(),
        title: title.into(),
        note: format!(
            "mean norm at the logits of {} recorded tokens with an advantage, in {} bins of equal width with at least {MIN_TOKENS} tokens; bars: 95 % interval of the mean over steps{correlated}{}",
            tokens.len(),
            crosses.len(),
            whose(study)
        ),
        scene: Scatter {
            x_label: x_label.into(),
            y_label: "mean gradient norm".into(),
            x,
            y,
            dots: Vec::new(),
            crosses,
            guides: Vec::new(),
            heat: None,
        }
        .draw(),
    })
}

fn cross(against: Against, bin: &[Pushed]) -> Cross {
    let mean = |value: fn(&Pushed) -> f64| bin.iter().map(value).sum::<f64>() / bin.len() as f64;
    let (x, y) = (mean(|token| token.x), mean(|token| token.norm));
    let mut steps: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for token in bin {
        steps.entry(token.step).or_default().push(token.norm);
    }
    let means: Vec<f64> =
        steps.values().map(|norms| norms.iter().sum::<f64>() / norms.len() as f64).collect();
    let interval = mean_estimate(&means).ok().and_then(|estimate| estimate.interval);
    let (x, shown) = match against {
        Against::Probability => (x.exp(), format!("p {}", number(x.exp()))),
        Against::Entropy => (x, format!("H {} nats", number(x))),
    };
    Cross {
        dot: Dot {
            x,
            y,
            ink: Ink::Series(0),
            radius: 3.5,
            hover: format!("{shown}\nmean norm {}\n{} tokens, {} steps", number(y), bin.len(), means.len()),
        },
        x_interval: None,
        y_interval: interval.map(|i| (i.low.max(0.0), i.high)),
        label: String::new(),
    }
}

/// Spearman's correlation of x and norm in each step, and the mean over steps, which are the unit of chance: tokens of one
/// response are alike.
fn correlation(tokens: &[Pushed]) -> Result<Option<Estimate>> {
    let mut steps: BTreeMap<u64, (Vec<f64>, Vec<f64>)> = BTreeMap::new();
    for token in tokens {
        let (x, norm) = steps.entry(token.step).or_default();
        x.push(token.x);
        norm.push(token.norm);
    }
    let mut found = Vec::new();
    for (x, norm) in steps.values().filter(|(x, _)| x.len() >= MIN_TOKENS) {
        found.extend(spearman(x, norm)?);
    }
    Ok(if found.is_empty() { None } else { Some(mean_estimate(&found)?) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twelve_bins_need_sixty_tokens() {
        assert_eq!([59, 60].map(fill_the_bins), [false, true]);
    }

    #[test]
    fn a_bin_has_the_means_of_its_tokens_and_the_interval_of_its_steps() {
        let token = |step, x: f64, norm| Pushed { step, x, norm };
        let bin = [token(1, 0.2, 1.0), token(1, 0.4, 2.0), token(2, 0.6, 3.0)];
        let cross = cross(Against::Entropy, &bin);
        assert!((cross.dot.x - 0.4).abs() < 1e-12 && cross.dot.y == 2.0, "{} {}", cross.dot.x, cross.dot.y);
        assert!(cross.dot.hover.ends_with("mean norm 2\n3 tokens, 2 steps"), "{}", cross.dot.hover);
        // Steps of 1.5 and 3: 2.25 and 12.706 times 0.75 to each side, and no norm is below 0.
        let (low, high) = cross.y_interval.unwrap();
        assert!(low == 0.0 && (high - 11.78).abs() < 0.01, "{low} {high}");
        let even = [token(1, 0.0, 2.0), token(2, 0.0, 2.01), token(3, 0.0, 1.99)];
        assert!(super::cross(Against::Probability, &even).y_interval.unwrap().0 > 1.9);
    }
}
