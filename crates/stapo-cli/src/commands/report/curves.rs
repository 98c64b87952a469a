//! Curves over training: one line per arm, the mean of its seeds with the interval of that mean.

use crate::shared::chart::{
    ANY, Band, Bounds, Curve, CurvePoint, Curves, Figure, MIN_SEEDS_FOR_INTERVAL, PERCENT, Scale, band_over,
};
use crate::shared::study::summary::interval_of;
use crate::shared::study::table::slug;
use crate::shared::study::{ArmData, RunData, Study};
use stapo_core::record::Metrics;
use stapo_core::record::catalogue::{self, Axis, Metric};
use stapo_rl::lab::experiment::Measure;
use std::collections::BTreeSet;

/// A curve of a report.
struct StepQuantity {
    /// The name of the figure.
    name: &'static str,
    metric: Metric,
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
const fn plain(name: &'static str, metric: Metric) -> StepQuantity {
    StepQuantity { name, metric, presence: |_| Presence::Drawn, details: |_| Vec::new() }
}

const QUANTITIES: [StepQuantity; 12] = [
    plain("training-accuracy", catalogue::ACCURACY),
    StepQuantity {
        details: |study| reward_names(study).iter().map(|name| reward(study, name)).collect(),
        ..plain("reward", catalogue::REWARD_MEAN)
    },
    StepQuantity {
        details: |study| study.arms.iter().map(|arm| quantiles(study, arm)).collect(),
        ..plain("entropy", catalogue::ENTROPY_MEAN)
    },
    StepQuantity { presence: silenced_share_presence, ..plain("silenced-share", catalogue::SILENCED_SHARE) },
    plain("gradient-norm", catalogue::GRADIENT_NORM),
    plain("response-length", catalogue::RESPONSE_TOKENS_MEAN),
    StepQuantity { presence: truncated_presence, ..plain("truncated-share", catalogue::TRUNCATED_SHARE) },
    StepQuantity {
        presence: |study| if is_silencing(study) { Presence::Drawn } else { Presence::Omitted },
        ..plain("silenced-gradient-share", catalogue::SILENCED_GRADIENT_SHARE)
    },
    StepQuantity { presence: judge_presence, ..plain("rule-accuracy", catalogue::RULE_ACCURACY) },
    StepQuantity { presence: judge_presence, ..plain("judge-agreement", catalogue::JUDGE_AGREEMENT) },
    StepQuantity { presence: reuse_presence, ..plain("uses", USES) },
    StepQuantity { presence: reuse_presence, ..plain("head-energy", catalogue::HEAD_ENERGY) },
];

/// A run without `update.reuse` uses each rollout batch once.
const USES: Metric =
    Metric { value: |m| Some((catalogue::N_USES.value)(m).unwrap_or(1.0)), ..catalogue::N_USES };

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

fn judge_presence(study: &Study) -> Presence {
    let is_judged = study.runs().any(|(_, run)| run.metrics.iter().any(|m| m.judge.is_some()));
    if is_judged { Presence::Drawn } else { Presence::Omitted }
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
    let metric = quantity.metric;
    let (unit, factor) = metric.unit.shown();
    let bounds = factor * metric.bounds().start()..=factor * metric.bounds().end();
    let lines = lines_of(study, &bounds, |m| (metric.value)(m).map(|value| factor * value));
    let y = if metric.axis == Axis::Log { Scale::log_or_zero(extent(&lines)) } else { None };
    let y = y.unwrap_or_else(|| Scale::around(extent(&lines)));
    Figure {
        name: quantity.name.to_string(),
        title: metric.label.to_string(),
        note: noted(study, &described(&metric)),
        scene: Curves { x_label: "training step".into(), unit, y, bands: Vec::new(), lines }.draw(),
    }
}

/// What a metric is, its unit, and a word on an unusual axis.
fn described(metric: &Metric) -> String {
    let unit = match metric.unit.shown().0 {
        "" => String::new(),
        unit => format!(", {unit}"),
    };
    let axis = if metric.axis == Axis::Log { "; logarithmic, with a place for 0" } else { "" };
    format!("{}{unit}{axis}", metric.about)
}

/// A line for each arm that has values.
fn lines_of(study: &Study, bounds: &Bounds, value: impl Fn(&Metrics) -> Option<f64>) -> Vec<Curve> {
    let line = |arm: &ArmData| {
        let seeds = arm.runs.iter().map(|run| values(run, &value)).collect();
        Curve::over_seeds(&arm.label(), arm.series, seeds, bounds)
    };
    study.arms.iter().map(line).filter(|curve| !curve.points.is_empty()).collect()
}

/// The note of a figure: for several seeds it names what the means are over, and what is drawn with them.
fn noted(study: &Study, what: &str) -> String {
    match study.n_seeds() {
        0 | 1 => what.to_string(),
        n if n < MIN_SEEDS_FOR_INTERVAL => {
            format!("{what} · mean of {n} seeds, and each seed as a thin line")
        }
        n => format!("{what} · mean and 95 % interval over {n} seeds, and each seed as a thin line"),
    }
}

fn values(run: &RunData, value: impl Fn(&Metrics) -> Option<f64>) -> Vec<(f64, f64)> {
    run.metrics.iter().filter_map(|m| value(m).map(|value| (m.step as f64, value))).collect()
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
    let metric = catalogue::EVAL_ACCURACY;
    let what = &described(&metric);
    let note = match study.n_seeds() {
        0 | 1 => format!("{what} · 95 % interval over the problems (Wilson)"),
        _ => noted(study, what),
    };
    let scene = Curves { x_label: "training step".into(), unit: "%", y, bands: Vec::new(), lines }.draw();
    Some(Figure { name: "held-out-accuracy".into(), title: metric.label.into(), note, scene })
}

/// Quantiles of the token entropies in one arm.
fn quantiles(study: &Study, arm: &ArmData) -> Figure {
    let series = arm.series;
    let mean = |metric: Metric| {
        let seeds: Vec<_> = arm.runs.iter().map(|run| values(run, metric.value)).collect();
        band_over(&seeds, &metric.bounds())
    };
    let band = |label: &str, low: Vec<CurvePoint>, high: Vec<CurvePoint>, opacity: f64| Band {
        label: label.to_string(),
        series,
        points: low.iter().zip(&high).map(|(l, h)| (l.x, l.y, h.y)).collect(),
        opacity,
    };
    let bands = vec![
        band("5 to 95 %", mean(catalogue::ENTROPY_Q05), mean(catalogue::ENTROPY_Q95), 0.16),
        band("25 to 75 %", mean(catalogue::ENTROPY_Q25), mean(catalogue::ENTROPY_Q75), 0.3),
    ];
    let median = mean(catalogue::ENTROPY_Q50);
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

    #[test]
    fn an_interval_reaches_one_range_of_the_means_beyond_them() {
        let point = |y: f64, interval| CurvePoint { x: 0.0, y, interval };
        let extent = |points| extent(&[Curve { label: String::new(), series: 0, points, seeds: Vec::new() }]);
        let wide = Some((-9.0, 99.0));
        assert_eq!(extent(vec![point(1.0, None), point(3.0, wide)]), [1.0, 3.0, -1.0, 5.0]);
        assert_eq!(extent(vec![point(4.0, wide)]), [4.0, 3.0, 5.0]);
        assert_eq!(extent(vec![point(-4.0, wide)]), [-4.0, -5.0, -3.0]);
    }
}
