//! Tokens by probability and entropy, their gradient norms by quadrant, and the entropy change of a step.

use crate::shared::chart::{Bar, BarGroup, Bars, Dot, Figure, Guide, Ink, Scale, Scatter, number};
use crate::shared::html::visible;
use crate::shared::study::{Study, StudyKind};
use anyhow::Result;
use stapo_core::diagnostics::Quadrant;
use stapo_core::diagnostics::theory::gradient_norm_squared;
use stapo_core::objective::{is_improbable, logp_below};
use stapo_core::record::{EntropyChange, ResponseRecord};
use stapo_core::stats::{Resampling, bootstrap, mean_estimate, quantile};

/// Probable tokens drawn at most; more dots would overlap too much to be distinguished.
const MAX_DOTS: usize = 2500;

/// A recorded token.
pub struct Seen<'a> {
    text: &'a str,
    pub logp: f64,
    pub entropy: f64,
    /// The gradient norm at the logits; `None` in files written without weights.
    pub norm: Option<f64>,
    advantage: f64,
    pub step: u64,
    fate: &'static str,
}

pub fn seen(response: &ResponseRecord) -> impl Iterator<Item = Seen<'_>> {
    let tokens = &response.tokens;
    (0..tokens.id.len()).map(move |t| Seen {
        text: &tokens.text[t],
        logp: tokens.logp[t],
        entropy: tokens.entropy[t],
        norm: tokens
            .weight
            .get(t)
            .map(|&weight| gradient_norm_squared(tokens.logp[t].exp(), tokens.collision[t], weight).sqrt()),
        advantage: response.advantage,
        step: response.step,
        fate: match (tokens.silenced_by[t], tokens.clipped[t]) {
            (Some(_), _) => "silenced",
            (None, true) => "clipped",
            (None, false) => "kept",
        },
    })
}

/// Probability against entropy of recorded tokens that had an effect, coloured by gradient norm.
pub fn scatter(study: &Study) -> Result<std::result::Result<Figure, String>> {
    let (_, run) = study.shown();
    let responses = run.responses()?;
    let mut tokens: Vec<Seen> =
        responses.iter().filter(|r| r.advantage != 0.0).flat_map(seen).filter(|s| s.norm.is_some()).collect();
    if tokens.is_empty() {
        return Ok(Err(
            "Quadrant scatter: no recorded response has an advantage and token weights.".to_string()
        ));
    }
    let tau_p = run.plan.objective.tau_p();
    let n_all = tokens.len();
    // The picture is about the improbable tokens, so only probable tokens are thinned.
    let threshold = logp_below(tau_p);
    let is_rare = |token: &Seen| is_improbable(token.logp, threshold);
    let n_rare = tokens.iter().filter(|token| is_rare(token)).count();
    let every = (n_all - n_rare).div_ceil(MAX_DOTS).max(1);
    let mut n_probable = 0;
    tokens.retain(|token| {
        n_probable += usize::from(!is_rare(token));
        is_rare(token) || n_probable % every == 0
    });
    let norms: Vec<f64> = tokens.iter().filter_map(|token| token.norm).collect();
    let hottest = quantile(&norms, 0.99)?.max(1e-9);
    tokens.sort_by(|a, b| a.norm.unwrap_or(0.0).total_cmp(&b.norm.unwrap_or(0.0)));
    let thresholds: Vec<f64> = run.metrics.iter().filter_map(|m| m.tau_h).collect();
    let mut guides = vec![Guide::Upright { x: tau_p, label: format!("τp = {}", number(tau_p)) }];
    if !thresholds.is_empty() {
        let y = quantile(&thresholds, 0.5)?;
        guides.push(Guide::Level { y, label: format!("τh = {} (median of steps)", number(y)) });
    }
    let dots: Vec<Dot> = tokens.iter().map(|token| dot(token, hottest)).collect();
    let lowest = dots.iter().map(|dot| dot.x).fold(tau_p / 2.0, f64::min);
    let x = Scale::log_around([lowest, 1.0]).unwrap_or(Scale::Log { low: 1e-6, high: 1.0 });
    let y = Scale::around(dots.iter().map(|dot| dot.y).chain(thresholds));
    let thinned = if every > 1 {
        format!("; of probable ones every {} is drawn", ordinal(every))
    } else {
        String::new()
    };
    let whose = whose(study);
    Ok(Ok(Figure {
        name: "quadrants".into(),
        title: "Tokens by probability and entropy".into(),
        note: format!(
            "{n_all} tokens of recorded responses (spread over a step, and those with a silenced token) with an advantage; colour: gradient norm at the logits{thinned}{whose}"
        ),
        scene: Scatter {
            x_label: "probability of the sampled token (logarithmic)".into(),
            y_label: "entropy at its position, nats".into(),
            x,
            y,
            dots,
            crosses: Vec::new(),
            guides,
            heat: Some(("gradient norm".into(), 0.0, hottest)),
        }
        .draw(),
    }))
}

/// Whose tokens a figure shows, in a report on several runs.
pub fn whose(study: &Study) -> String {
    let (arm, run) = study.shown();
    match study.kind {
        StudyKind::Run => String::new(),
        _ => format!(" · {}, seed {}", arm.label(), run.seed),
    }
}

/// `2nd`, `3rd`, `11th`.
fn ordinal(n: usize) -> String {
    let ending = match (n % 100, n % 10) {
        (11..=13, _) => "th",
        (_, 1) => "st",
        (_, 2) => "nd",
        (_, 3) => "rd",
        _ => "th",
    };
    format!("{n}{ending}")
}

fn dot(token: &Seen, hottest: f64) -> Dot {
    let norm = token.norm.unwrap_or(0.0);
    let is_silenced = token.fate == "silenced";
    Dot {
        x: token.logp.exp(),
        y: token.entropy,
        ink: Ink::Heat(norm / hottest),
        radius: if is_silenced { 4.5 } else { 2.6 },
        hover: format!(
            "{}  {}\np {}  H {} nats\nA {}  gradient norm {}\nstep {}",
            visible(token.text),
            token.fate,
            number(token.logp.exp()),
            number(token.entropy),
            number(token.advantage),
            number(norm),
            token.step
        ),
    }
}

/// Mean gradient norm by quadrant and arm, next to the paper's numbers.
pub fn gradient_norms(study: &Study) -> std::result::Result<Figure, String> {
    let mut series: Vec<(String, Ink)> = Vec::new();
    let mut columns: Vec<Vec<Option<Bar>>> = Vec::new();
    for arm in &study.arms {
        // Steps without candidates have no entropy threshold, and so no quadrants.
        let steps: Vec<_> =
            arm.runs.iter().flat_map(|run| &run.metrics).filter(|m| m.tau_h.is_some()).collect();
        if steps.is_empty() {
            continue;
        }
        series.push((
            format!("{} ({} {})", arm.label(), steps.len(), if steps.len() == 1 { "step" } else { "steps" }),
            Ink::Series(arm.series),
        ));
        let bar = |quadrant: Quadrant| {
            let rows = steps
                .iter()
                .flat_map(|m| &m.quadrants)
                .filter(|row| row.quadrant == quadrant && row.n_tokens > 0);
            let norms: Vec<f64> = rows.clone().map(|row| row.mean_gradient_norm).collect();
            let estimate = mean_estimate(&norms).ok()?;
            let n_tokens: usize = rows.map(|row| row.n_tokens).sum();
            let hover = format!(
                "{}, {}\nmean of {} steps: {}\n{n_tokens} tokens",
                arm.name,
                quadrant.words(),
                norms.len(),
                number(estimate.value)
            );
            let interval = estimate.interval.map(|i| (i.low.max(0.0), i.high));
            Some(Bar { value: estimate.value, interval, hover })
        };
        columns.push(Quadrant::ALL.map(bar).to_vec());
    }
    if columns.is_empty() {
        return Err("Gradient norm by quadrant: no step had a candidate (rewarded, p < τp), so there was no entropy threshold to cut by.".into());
    }
    series.push(("paper".to_string(), Ink::Muted));
    let groups = Quadrant::ALL.iter().enumerate().map(|(row, &quadrant)| {
        let published = quadrant.published_gradient_norm();
        let paper = Bar { value: published, interval: None, hover: format!("paper: {published}") };
        let measured = columns.iter().map(|column| column[row].clone());
        BarGroup { label: quadrant.words().to_string(), bars: measured.chain([Some(paper)]).collect() }
    });
    Ok(Figure {
        name: "gradient-by-quadrant".into(),
        title: "Gradient norm by quadrant".into(),
        note: "mean over steps of the mean norm at the logits, with its 95 % interval; all response tokens of a step's first mini-batch. The paper's (arXiv 2602.15620) are from other models and rewards: compare the order, not the size".into(),
        scene: Bars { series, groups: groups.collect() }.draw(),
    })
}

/// The entropy change of each step, as first-order theory predicts it and as measured.
pub fn entropy_change(study: &Study) -> std::result::Result<Figure, String> {
    let (_, run) = study.shown();
    let steps: Vec<(u64, EntropyChange)> =
        run.metrics.iter().filter_map(|m| m.entropy_change.map(|change| (m.step, change))).collect();
    if steps.len() < 3 {
        return Err("Entropy change, predicted against measured: it is measured on the last mini-batch of a step, so it needs steps with two or more (rollout.problems_per_step above update.problems_per_minibatch).".into());
    }
    let (x, y): (Vec<f64>, Vec<f64>) = steps.iter().map(|(_, c)| (c.predicted, c.measured)).unzip();
    let n_same = steps.iter().filter(|(_, c)| c.predicted.signum() == c.measured.signum()).count();
    let resampled = bootstrap(x.len(), &Resampling { n_resamples: 2000, ..Resampling::default() }, |idx| {
        correlation(idx.iter().map(|&i| (x[i], y[i])))
    });
    let correlated = resampled.map_or(String::new(), |b| {
        format!(" · correlation {:.2} (95 %: {:.2} to {:.2})", b.value, b.percentile.low, b.percentile.high)
    });
    let slope = slope_through_origin(&x, &y);
    let (left, right) = (x.iter().copied().fold(0.0, f64::min), x.iter().copied().fold(0.0, f64::max));
    let (from, to) = ((left, slope * left), (right, slope * right));
    let dots = steps.iter().map(|(step, c)| Dot {
        x: c.predicted,
        y: c.measured,
        ink: Ink::Series(0),
        radius: 3.2,
        hover: format!(
            "step {step}\npredicted {} nats\nmeasured {} nats",
            number(c.predicted),
            number(c.measured)
        ),
    });
    let whose = whose(study);
    Ok(Figure {
        name: "entropy-change".into(),
        title: "Entropy change, predicted against measured".into(),
        note: format!(
            "one dot per step, nats per token; same sign in {n_same} of {} steps{correlated}. Predicted as if the learning rate were a step at the logits: Adam rescales it, so sign and proportion count, not size{whose}",
            steps.len()
        ),
        scene: Scatter {
            x_label: "predicted".into(),
            y_label: "measured on the same positions, nats".into(),
            x: Scale::around(x.iter().copied().chain([0.0])),
            y: Scale::around(y.iter().copied().chain([from.1, to.1])),
            dots: dots.collect(),
            crosses: Vec::new(),
            guides: vec![Guide::Slope {
                from,
                to,
                label: format!("measured ≈ {} × predicted", number(slope)),
            }],
            heat: None,
        }
        .draw(),
    })
}

/// The slope of the line through the origin with the least squares.
fn slope_through_origin(x: &[f64], y: &[f64]) -> f64 {
    let squares: f64 = x.iter().map(|x| x * x).sum();
    x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>() / squares.max(f64::MIN_POSITIVE)
}

fn correlation(pairs: impl Iterator<Item = (f64, f64)> + Clone) -> f64 {
    let n = pairs.clone().count() as f64;
    let (sum_x, sum_y) = pairs.clone().fold((0.0, 0.0), |(a, b), (x, y)| (a + x, b + y));
    let (mean_x, mean_y) = (sum_x / n, sum_y / n);
    let (xx, yy, xy) = pairs.fold((0.0, 0.0, 0.0), |(xx, yy, xy), (x, y)| {
        let (dx, dy) = (x - mean_x, y - mean_y);
        (xx + dx * dx, yy + dy * dy, xy + dx * dy)
    });
    if xx > 0.0 && yy > 0.0 { xy / (xx * yy).sqrt() } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinals_end_as_english_has_them() {
        let shown = [1, 2, 3, 4, 11, 12, 13, 21, 22, 103, 111].map(ordinal);
        let expected = ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "103rd", "111th"];
        assert_eq!(shown, expected);
    }

    #[test]
    fn correlation_of_a_line_is_one_and_of_a_constant_none() {
        let line = [(1.0, 2.0), (2.0, 4.0), (3.0, 6.0)];
        assert!((correlation(line.into_iter()) - 1.0).abs() < 1e-12);
        assert!((correlation(line.into_iter().map(|(x, y)| (x, -y))) + 1.0).abs() < 1e-12);
        assert_eq!(correlation([(1.0, 2.0), (1.0, 3.0)].into_iter()), 0.0);
        // Of deviations -2, -1, 0, 3 and -1, -1, 0, 2: (2 + 1 + 6) / sqrt(14 * 6).
        let pairs = [(0.0, 1.0), (1.0, 1.0), (2.0, 2.0), (5.0, 4.0)];
        assert!((correlation(pairs.into_iter()) - 9.0 / 84f64.sqrt()).abs() < 1e-12);
        // (1 * 3 + 2 * 4) / (1 + 4).
        assert_eq!(slope_through_origin(&[1.0, 2.0], &[3.0, 4.0]), 2.2);
        assert_eq!(slope_through_origin(&[0.0], &[3.0]), 0.0);
    }
}
