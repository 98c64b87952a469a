//! At most as many points as a chart has pixels: each stretch of the axis keeps its lowest, mean and highest value, so
//! that no spike is lost.

use crate::shared::chart::CurvePoint;
use serde::Serialize;
use stapo_rl::run::columns::Point;

/// The points of one curve. `low` and `high` are absent where every point is one value of the run.
#[derive(Debug, Default, Serialize, PartialEq)]
pub struct Curve {
    pub x: Vec<f64>,
    pub y: Vec<f32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub low: Vec<f32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub high: Vec<f32>,
}

/// The points of a curve in order of x, at most about `n_most`.
pub fn decimate(points: &[Point], n_most: usize) -> Curve {
    let mut curve = Curve::default();
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return curve };
    if points.len() <= n_most.max(2) {
        curve.x = points.iter().map(|p| p.x).collect();
        curve.y = points.iter().map(|p| p.y as f32).collect();
        return curve;
    }
    let width = (last.x - first.x).max(f64::MIN_POSITIVE);
    let bucket = |p: &Point| (((p.x - first.x) / width * n_most as f64) as usize).min(n_most - 1);
    for stretch in points.chunk_by(|a, b| bucket(a) == bucket(b)) {
        let mean = |value: fn(&Point) -> f64| stretch.iter().map(value).sum::<f64>() / stretch.len() as f64;
        curve.x.push(mean(|p| p.x));
        curve.y.push(mean(|p| p.y) as f32);
        curve.low.push(stretch.iter().map(|p| p.y).fold(f64::INFINITY, f64::min) as f32);
        curve.high.push(stretch.iter().map(|p| p.y).fold(f64::NEG_INFINITY, f64::max) as f32);
    }
    curve
}

/// Means at most about `n_most`, with their intervals as `low` and `high` where they have some.
pub fn decimate_means(means: &[CurvePoint], n_most: usize) -> Curve {
    let mut curve = Curve::default();
    for stretch in means.chunks(means.len().div_ceil(n_most.max(1)).max(1)) {
        let mean = |value: &dyn Fn(&CurvePoint) -> f64| {
            stretch.iter().map(value).sum::<f64>() / stretch.len() as f64
        };
        curve.x.push(mean(&|p| p.x));
        curve.y.push(mean(&|p| p.y) as f32);
        if stretch.iter().all(|p| p.interval.is_some()) {
            curve.low.push(mean(&|p| p.interval.map_or(p.y, |(low, _)| low)) as f32);
            curve.high.push(mean(&|p| p.interval.map_or(p.y, |(_, high)| high)) as f32);
        }
    }
    curve
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_points_stay_and_of_many_no_spike_is_lost() {
        let points: Vec<Point> = (0..20_000)
            .map(|i| Point {
                step: f64::from(i),
                x: f64::from(i),
                y: if i == 777 { 99.0 } else { f64::from(i % 2) },
            })
            .collect();
        let all = decimate(&points[..100], 100);
        assert_eq!((all.x.len(), all.y[99], all.low.len()), (100, 1.0, 0));
        let few = decimate(&points, 500);
        assert_eq!((few.x.len(), few.low.len(), few.high.len()), (500, 500, 500));
        assert!(few.high.contains(&99.0) && few.low.iter().all(|low| *low == 0.0));
        assert!(few.x.windows(2).all(|two| two[0] < two[1]));
        assert_eq!(few.y[0], 0.5);
        assert_eq!(decimate(&[], 10), Curve::default());
        let late: Vec<Point> = points[10_000..11_000].to_vec();
        assert_eq!(decimate(&late, 100).x.len(), 100, "a window far from 0 has as many points");
        let upright = vec![Point { step: 1.0, x: 1.0, y: 2.0 }; 50];
        assert_eq!(decimate(&upright, 10).x, [1.0]);
    }

    #[test]
    fn means_of_means_keep_an_interval_where_all_have_one() {
        let point = |x: f64, interval| CurvePoint { x, y: 2.0 * x, interval };
        let means = [
            point(1.0, Some((0.0, 4.0))),
            point(2.0, Some((2.0, 8.0))),
            point(3.0, Some((5.0, 7.0))),
            point(4.0, None),
        ];
        let curve = decimate_means(&means, 2);
        assert_eq!((curve.x, curve.y), (vec![1.5, 3.5], vec![3.0, 7.0]));
        assert_eq!((curve.low, curve.high), (vec![1.0], vec![6.0]));
        assert_eq!(decimate_means(&means, 9).x.len(), 4);
    }
}
