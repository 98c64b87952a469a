//! Curves over training: one line per arm, the mean of its seeds with the interval of that mean.

use crate::shared::chart::{
    ANY, AT_LEAST_ZERO, Band, Bounds, Curve, CurvePoint, Curves, Figure, MIN_SEEDS_FOR_INTERVAL, PERCENT,
    Scale, band_over,
};
use crate::shared::study::summary::interval_of;
use crate::shared::study::table::slug;
use crate::shared::study::{ArmData, RunData, Study};
use stapo_core::record::Metrics;
use stapo_rl::lab::experiment::Measure;
use std::collections::BTreeSet;

/// A quantity of a training step and how its curve is drawn.
struct StepQuantity {
    name: &'static str,
    title: &'static str,
    what: &'static str,
    unit: &'static str,
    bounds: Bounds,
    /// Whether the axis is logarithmic, with a place for 0.
    is_log: bool,
    of: fn(&Metrics) -> Option<f64>,
    /// Whether a study has something to draw.
    presence: fn(&Study) -> Presence,
    /// Further figures, placed after the curve.
    details: fn(&Study) -> Vec<Figure>,
}

enum Presence {
    Drawn,
    /// No figure; the text gives the reason.
    Missing(String),
    /// No figure; the text of another quantity gives the reason.
    Omitted,
}

/// A curve that every study has, without further figures.
const PLAIN: StepQuantity = StepQuantity {
    name: "",
    title: "",
    what: "",
    unit: "",
    bounds: AT_LEAST_ZERO,
    is_log: false,
    of: |_| None,
    presence: |_| Presence::Drawn,
    details: |_| Vec::new(),
};

const QUANTITIES: [StepQuantity; 10] = [
    StepQuantity {
        name: "training-accuracy",
        title: "Training accuracy",
        what: "share of sampled responses judged right, %",
        unit: "%",
        bounds: PERCENT,
        of: |m| Some(100.0 * m.accuracy),
        ..PLAIN
    },
    StepQuantity {
        name: "reward",
        title: "Reward",
        what: "mean reward of sampled responses",
        bounds: ANY,
        of: |m| Some(m.reward_mean),
        details: |study| reward_names(study).iter().map(|name| reward(study, name)).collect(),
        ..PLAIN
    },
    StepQuantity {
        name: "entropy",
        title: "Entropy",
        what: "mean over response tokens, nats",
        unit: "nats",
        of: |m| Some(m.entropy_mean),
        details: |study| study.arms.iter().map(|arm| quantiles(study, arm)).collect(),
        ..PLAIN
    },
    StepQuantity {
        name: "silenced-share",
        title: "Silenced share",
        what: "silenced tokens among response tokens; logarithmic, with a place for steps that silenced none",
        is_log: true,
        of: |m| (m.n_tokens > 0).then(|| m.n_silenced as f64 / m.n_tokens as f64),
        presence: silenced_share_presence,
        ..PLAIN
    },
    StepQuantity {
        name: "gradient-norm",
        title: "Gradient norm",
        what: "of all weights, before clipping, mean over the optimizer steps of a step",
        of: |m| Some(m.gradient_norm),
        ..PLAIN
    },
    StepQuantity {
        name: "response-length",
        title: "Response length",
        what: "mean, tokens",
        unit: "tokens",
        of: |m| Some(m.response_tokens_mean),
        ..PLAIN
    },
    StepQuantity {
        name: "truncated-share",
        title: "Truncated responses",
        what: "share of responses that the length limit cut, %",
        unit: "%",
        bounds: PERCENT,
        of: |m| Some(100.0 * m.truncated_share),
        presence: truncated_presence,
        ..PLAIN
    },
    StepQuantity {
        name: "silenced-gradient-share",
        title: "Gradient taken out by silencing",
        what: "share of the summed squared gradient norm at the logits, %",
        unit: "%",
        bounds: PERCENT,
        of: |m| Some(100.0 * m.silenced_gradient_share),
        presence: |study| if is_silencing(study) { Presence::Drawn } else { Presence::Omitted },
        ..PLAIN
    },
    StepQuantity {
        name: "uses",
        title: "Uses of a rollout batch",
        what: "optimizer passes over one rollout batch, the one that the gate ended included",
        of: |m| Some(m.reuse.as_ref().map_or(1.0, |reuse| reuse.n_uses as f64)),
        presence: reuse_presence,
        ..PLAIN
    },
    StepQuantity {
        name: "head-energy",
        title: "Gradient energy of the output head",
        what: "squared norm of its gradient after 1/N, mean over the updates of a step",
        of: head_energy,
        presence: reuse_presence,
        ..PLAIN
    },
];

/// The figures of all quantities that a study has, and the reason for each absent one.
pub fn curves(study: &Study) -> (Vec<Figure>, Vec<String>) {
    let mut figures = Vec::new();
    let mut missing = Vec::new();
    match held_out(study) {
        Some(figure) => figures.push(figure),
        None => missing.push("Held-out accuracy: no step of these runs was evaluated.".to_string()),
    }
    for quantity in &QUANTITIES {
        match (quantity.presence)(study) {
            Presence::Drawn => {
                figures.push(figure(study, quantity));
                figures.extend((quantity.details)(study));
            }
            Presence::Missing(line) => missing.push(line),
            Presence::Omitted => {}
        }
    }
    (figures, missing)
}

fn reuse_presence(study: &Study) -> Presence {
    let is_reused = study.runs().any(|(_, run)| run.metrics.iter().any(|m| m.reuse.is_some()));
    if is_reused { Presence::Drawn } else { Presence::Omitted }
}

fn head_energy(metrics: &Metrics) -> Option<f64> {
    let updates = &metrics.reuse.as_ref()?.updates;
    Some(updates.iter().map(|update| update.energy).sum::<f64>() / updates.len().max(1) as f64)
}

/// The names of all rewards of a study, in order.
fn reward_names(study: &Study) -> BTreeSet<String> {
    let steps = study.runs().flat_map(|(_, run)| &run.metrics);
    steps.flat_map(|metrics| metrics.rewards.keys().cloned()).collect()
}

/// The curve of one of several rewards.
fn reward(study: &Study, name: &str) -> Figure {
    let lines = lines_of(study, &ANY, |metrics| metrics.rewards.get(name).copied());
    let y = Scale::around(extent(&lines));
    Figure {
        name: format!("reward-{name}"),
        title: format!("Reward {name}"),
        note: noted(study, "mean of this reward over sampled responses, before its weight"),
        scene: Curves { x_label: "training step".into(), unit: "", y, bands: Vec::new(), lines }.draw(),
    }
}

fn is_silencing(study: &Study) -> bool {
    study.runs().any(|(_, run)| run.n_silenced() > 0)
}

fn silenced_share_presence(study: &Study) -> Presence {
    if is_silencing(study) {
        return Presence::Drawn;
    }
    let n: usize = study.runs().map(|(_, run)| run.n_candidates()).sum();
    Presence::Missing(format!("Silenced share: no token was silenced; there were {n} candidates."))
}

fn truncated_presence(study: &Study) -> Presence {
    if study.runs().any(|(_, run)| run.metrics.iter().any(|m| m.truncated_share != 0.0)) {
        Presence::Drawn
    } else {
        Presence::Missing("Truncated responses: none.".to_string())
    }
}

fn figure(study: &Study, quantity: &StepQuantity) -> Figure {
    let lines = lines_of(study, &quantity.bounds, quantity.of);
    let y = if quantity.is_log { Scale::log_or_zero(extent(&lines)) } else { None };
    let y = y.unwrap_or_else(|| Scale::around(extent(&lines)));
    Figure {
        name: quantity.name.to_string(),
        title: quantity.title.to_string(),
        note: noted(study, quantity.what),
        scene: Curves { x_label: "training step".into(), unit: quantity.unit, y, bands: Vec::new(), lines }
            .draw(),
    }
}

/// A line for each arm that has values.
fn lines_of(study: &Study, bounds: &Bounds, of: impl Fn(&Metrics) -> Option<f64>) -> Vec<Curve> {
    let line = |arm: &ArmData| {
        let seeds = arm.runs.iter().map(|run| values(run, &of)).collect();
        Curve::over_seeds(&arm.label(), arm.series, seeds, bounds)
    };
    study.arms.iter().map(line).filter(|curve| !curve.points.is_empty()).collect()
}

/// The note of a figure: for several seeds it names what the means are over, and what is drawn beside them.
fn noted(study: &Study, what: &str) -> String {
    match study.n_seeds() {
        0 | 1 => what.to_string(),
        n if n < MIN_SEEDS_FOR_INTERVAL => {
            format!("{what} · mean of {n} seeds, and each seed as a thin line")
        }
        n => format!("{what} · mean and 95 % interval over {n} seeds, and each seed as a thin line"),
    }
}

fn values(run: &RunData, of: impl Fn(&Metrics) -> Option<f64>) -> Vec<(f64, f64)> {
    run.metrics.iter().filter_map(|m| of(m).map(|value| (m.step as f64, value))).collect()
}

/// The values that the y axis must include: all means and seeds, and each interval up to one range of these beyond
/// them. Intervals of a few scattered seeds are so wide that an axis for them would flatten the curves; such bands are
/// cut at the frame.
fn extent(lines: &[Curve]) -> Vec<f64> {
    let points = || lines.iter().flat_map(|line| &line.points);
    let seeds = lines.iter().flat_map(|line| &line.seeds).flatten().map(|(_, y)| *y);
    let mut values: Vec<f64> = points().map(|p| p.y).chain(seeds).collect();
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    // A constant curve keeps its interval only as far as a quarter of its height.
    let room = (high - low).max(0.25 * high.abs());
    let intervals = points().filter_map(|p| p.interval);
    values.extend(intervals.flat_map(|(a, b)| [a.max(low - room), b.min(high + room)]));
    values
}

/// Held-out accuracy, with intervals over the problems for one run and over the seeds for several.
fn held_out(study: &Study) -> Option<Figure> {
    if study.runs().any(|(_, run)| run.held_out().is_empty()) {
        return None;
    }
    let line = |arm: &ArmData| {
        let curves: Vec<Vec<(f64, f64)>> = arm
            .runs
            .iter()
            .map(|r| r.held_out().into_iter().map(|(x, y)| (x, 100.0 * y)).collect())
            .collect();
        let mut line = Curve::over_seeds(&arm.label(), arm.series, curves, &PERCENT);
        if let [run] = arm.runs.as_slice() {
            for point in &mut line.points {
                let interval = interval_of(run, point.y / 100.0);
                point.interval = interval.map(|(low, high)| (100.0 * low, 100.0 * high));
            }
        }
        line
    };
    let lines: Vec<Curve> = study.arms.iter().map(line).collect();
    let y = Scale::around(extent(&lines));
    let what = "held-out problems answered right, %";
    let note = match study.n_seeds() {
        0 | 1 => format!("{what} · 95 % interval over the problems (Wilson)"),
        _ => noted(study, what),
    };
    let scene = Curves { x_label: "training step".into(), unit: "%", y, bands: Vec::new(), lines }.draw();
    Some(Figure { name: "held-out-accuracy".into(), title: "Held-out accuracy".into(), note, scene })
}

/// Quantiles of the token entropies in one arm.
fn quantiles(study: &Study, arm: &ArmData) -> Figure {
    let series = arm.series;
    let mean = |of: fn(&Metrics) -> Option<f64>| {
        band_over(&arm.runs.iter().map(|run| values(run, of)).collect::<Vec<_>>(), &AT_LEAST_ZERO)
    };
    let band = |label: &str, low: Vec<CurvePoint>, high: Vec<CurvePoint>, opacity: f64| Band {
        label: label.to_string(),
        series,
        points: low.iter().zip(&high).map(|(l, h)| (l.x, l.y, h.y)).collect(),
        opacity,
    };
    let bands = vec![
        band(
            "5 to 95 %",
            mean(|m| Some(m.entropy_quantiles.q05)),
            mean(|m| Some(m.entropy_quantiles.q95)),
            0.16,
        ),
        band(
            "25 to 75 %",
            mean(|m| Some(m.entropy_quantiles.q25)),
            mean(|m| Some(m.entropy_quantiles.q75)),
            0.3,
        ),
    ];
    let median = mean(|m| Some(m.entropy_quantiles.q50));
    let points = median.iter().map(|p| CurvePoint { interval: None, ..*p }).collect();
    let y = Scale::around(bands[0].points.iter().flat_map(|&(_, low, high)| [low, high]));
    let lines = vec![Curve { label: "median".into(), series, points, seeds: Vec::new() }];
    let (suffix, title) = if study.arms.len() > 1 {
        (format!("-{}", slug(&arm.name)), format!("Entropy quantiles: {}", arm.label()))
    } else {
        (String::new(), "Entropy quantiles".to_string())
    };
    let what = "over the response tokens of a step, nats";
    let note = match arm.runs.len() {
        1 => what.to_string(),
        n => format!("{what} · mean of {n} seeds"),
    };
    Figure {
        name: format!("entropy-quantiles{suffix}"),
        title,
        note,
        scene: Curves { x_label: "training step".into(), unit: "nats", y, bands, lines }.draw(),
    }
}

/// The figures of `--figure overview`: accuracy and entropy.
pub fn overview(figures: &[Figure], study: &Study) -> Vec<Figure> {
    let accuracy = match study.measure() {
        Measure::HeldOut => "held-out-accuracy",
        Measure::Training => "training-accuracy",
    };
    [accuracy, "entropy"]
        .iter()
        .filter_map(|name| figures.iter().find(|figure| figure.name == *name).cloned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_holds_every_mean_and_no_runaway_interval() {
        let point = |y: f64, interval| CurvePoint { x: 0.0, y, interval };
        let points = vec![point(2e-5, None), point(1e-3, Some((-9.0, 9.0)))];
        let extent =
            extent(&[Curve { label: String::new(), series: 0, points, seeds: vec![vec![(0.0, 4e-3)]] }]);
        assert!(extent.contains(&2e-5) && extent.contains(&4e-3), "{extent:?}");
        assert!(extent.iter().all(|value| value.abs() < 0.01), "{extent:?}");
    }
}
