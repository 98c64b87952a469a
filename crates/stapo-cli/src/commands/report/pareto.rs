//! Accuracy against the stability of entropy, one point for each arm.

use crate::shared::chart::{Cross, Dot, Figure, Ink, Scale, Scatter, number};
use crate::shared::study::Study;
use stapo_core::stats::Estimate;
use stapo_rl::lab::experiment::{ExperimentSummary, Measure};

/// The picture; `None` for a single arm. An arm is on the front where no other arm is better in both means.
pub fn figure(study: &Study, summary: &ExperimentSummary) -> Option<Figure> {
    if summary.arms.len() < 2 {
        return None;
    }
    let points: Vec<(f64, f64)> =
        summary.arms.iter().map(|arm| (arm.entropy_stability.value, arm.accuracy.value)).collect();
    let front = front(&points);
    let crosses: Vec<Cross> = summary
        .arms
        .iter()
        .zip(&study.arms)
        .enumerate()
        .map(|(idx, (arm, data))| Cross {
            dot: Dot {
                x: arm.entropy_stability.value,
                y: 100.0 * arm.accuracy.value,
                ink: Ink::Series(data.series),
                radius: if front.contains(&idx) { 5.5 } else { 3.5 },
                hover: format!(
                    "{}\n{} %, {} seeds\n−max|ΔH| {} nats",
                    data.label(),
                    number(100.0 * arm.accuracy.value),
                    arm.n_runs,
                    number(arm.entropy_stability.value)
                ),
            },
            x_interval: ends(&arm.entropy_stability, 1.0, (f64::NEG_INFINITY, 0.0)),
            y_interval: ends(&arm.accuracy, 100.0, (0.0, 100.0)),
            label: data.label(),
        })
        .collect();
    let named = |idx: &usize| study.arms[*idx].label();
    let names = front.iter().map(named).collect::<Vec<_>>().join(", ");
    let accuracy = match summary.measure {
        Measure::HeldOut => "held-out accuracy at the end, %",
        Measure::Training => "training accuracy at the end, %",
    };
    Some(Figure {
        name: "pareto".into(),
        title: "Accuracy against entropy stability".into(),
        note: format!(
            "means over seeds with 95 % intervals in both directions, cut at the frame; right and up is better. Large dots: no other arm is better in both means ({names}); where intervals overlap this says little"
        ),
        scene: Scatter {
            x_label: "entropy stability −max|ΔH| between steps, nats".into(),
            y_label: accuracy.into(),
            x: Scale::around(room(crosses.iter().map(|cross| (cross.dot.x, cross.x_interval)))),
            y: Scale::around(room(crosses.iter().map(|cross| (cross.dot.y, cross.y_interval)))),
            dots: Vec::new(),
            crosses,
            guides: Vec::new(),
            heat: None,
        }
        .draw(),
    })
}

/// The ends of an interval, within what the quantity can be.
fn ends(estimate: &Estimate, factor: f64, (least, most): (f64, f64)) -> Option<(f64, f64)> {
    estimate.interval.map(|i| ((factor * i.low).max(least), (factor * i.high).min(most)))
}

/// The values that an axis must include: all means, and of each interval what is within three ranges of the means, since
/// an interval of two seeds is wider than any picture.
fn room(values: impl Iterator<Item = (f64, Option<(f64, f64)>)> + Clone) -> Vec<f64> {
    let means: Vec<f64> = values.clone().map(|(mean, _)| mean).collect();
    let low = means.iter().copied().fold(f64::INFINITY, f64::min);
    let high = means.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let margin = (3.0 * (high - low)).max(0.02 * high.abs()).max(1e-9);
    let ends = values.filter_map(|(_, interval)| interval);
    let inside = |value: f64| value.clamp(low - margin, high + margin);
    means.iter().copied().chain(ends.flat_map(|(a, b)| [inside(a), inside(b)])).collect()
}

/// The places of points that no other is better than in both coordinates, or equal in one and better in the other.
fn front(points: &[(f64, f64)]) -> Vec<usize> {
    let beats = |a: (f64, f64), b: (f64, f64)| a.0 >= b.0 && a.1 >= b.1 && a != b;
    (0..points.len()).filter(|&idx| !points.iter().any(|&other| beats(other, points[idx]))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::chart::{SERIES, to_svg};

    #[test]
    fn the_front_holds_what_nothing_beats() {
        assert_eq!(front(&[(0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (1.0, 0.0)]), [0, 1, 3]);
    }

    #[test]
    fn arms_of_one_colour_differ_in_their_dashes() {
        let cross = |series| Cross {
            dot: Dot { x: 0.0, y: 1.0, ink: Ink::Series(series), radius: 3.5, hover: String::new() },
            x_interval: Some((-1.0, 1.0)),
            y_interval: None,
            label: format!("arm {series}"),
        };
        let dashes = |series| {
            let scatter = Scatter {
                x_label: String::new(),
                y_label: String::new(),
                x: Scale::around([-1.0, 1.0]),
                y: Scale::around([0.0, 2.0]),
                dots: Vec::new(),
                crosses: vec![cross(series)],
                guides: Vec::new(),
                heat: None,
            };
            to_svg(&scatter.draw(), "").matches("stroke-dasharray").count()
        };
        // One in the legend, one through the dot.
        assert_eq!(dashes(SERIES.len()), dashes(0) + 2);
    }

    #[test]
    fn an_interval_ends_where_the_quantity_does() {
        let interval = |low, high| Some(stapo_core::stats::Interval { low, high, level: 0.95 });
        let estimate =
            |interval| Estimate { value: 0.5, standard_error: None, interval, n_questions: 2, n_samples: 2 };
        assert_eq!(ends(&estimate(interval(0.25, 0.75)), 100.0, (0.0, 100.0)), Some((25.0, 75.0)));
        assert_eq!(ends(&estimate(interval(-0.5, 1.5)), 100.0, (0.0, 100.0)), Some((0.0, 100.0)));
        assert_eq!(ends(&estimate(None), 100.0, (0.0, 100.0)), None);
    }

    #[test]
    fn an_axis_keeps_a_runaway_interval_out() {
        let values = [(80.0, Some((0.0, 100.0))), (82.0, None)];
        let room = room(values.into_iter());
        assert_eq!(room, [80.0, 82.0, 74.0, 88.0]);
        // Equal means leave a fiftieth of their height, and 0 almost nothing.
        let equal = super::room([(50.0, Some((0.0, 100.0)))].into_iter());
        assert_eq!(equal, [50.0, 49.0, 51.0]);
        assert_eq!(super::room([(0.0, Some((-1.0, 1.0)))].into_iter()), [0.0, -1e-9, 1e-9]);
    }
}
