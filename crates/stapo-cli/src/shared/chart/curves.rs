//! Line charts over training steps, with bands.

use super::scale::number;
use super::{
    Anchor, Dash, Frame, HoverValue, Ink, KeyPart, LegendKey, Mark, Scale, Scene, WIDTH, draw_legend,
};
use stapo_core::stats::mean_estimate;

/// A value with its interval; a lone run's values have none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CurvePoint {
    pub x: f64,
    pub y: f64,
    pub interval: Option<(f64, f64)>,
}

#[derive(Debug, Clone)]
pub struct Curve {
    pub label: String,
    pub series: usize,
    pub points: Vec<CurvePoint>,
    /// The curves of the seeds whose mean `points` are, drawn as thin lines; empty for a lone run.
    pub seeds: Vec<Vec<(f64, f64)>>,
}

/// The values that a quantity can have; intervals end there.
pub type Bounds = std::ops::RangeInclusive<f64>;

pub const ANY: Bounds = f64::NEG_INFINITY..=f64::INFINITY;
pub const PERCENT: Bounds = 0.0..=100.0;

/// The interval of a mean is drawn from so many seeds on: of fewer seeds the interval is so wide that it hides the
/// curves, and the seeds themselves say more.
pub const MIN_SEEDS_FOR_INTERVAL: usize = 4;

impl Curve {
    /// The mean of the curves of an arm's seeds.
    pub fn over_seeds(label: &str, series: usize, seeds: Vec<Vec<(f64, f64)>>, bounds: &Bounds) -> Self {
        let points = mean_over_seeds(&seeds, bounds);
        let seeds = if seeds.len() > 1 { seeds } else { Vec::new() };
        Curve { label: label.to_string(), series, points, seeds }
    }
}

/// Mean over the curves of seeds, with its interval where there are enough of them.
pub fn mean_over_seeds(seeds: &[Vec<(f64, f64)>], bounds: &Bounds) -> Vec<CurvePoint> {
    let mut points = band_over(seeds, bounds);
    if seeds.len() < MIN_SEEDS_FOR_INTERVAL {
        for point in &mut points {
            point.interval = None;
        }
    }
    points
}

/// Mean over curves at each x that all of them have, with its interval; a single curve has no intervals.
pub fn band_over(curves: &[Vec<(f64, f64)>], bounds: &Bounds) -> Vec<CurvePoint> {
    let Some((first, others)) = curves.split_first() else { return Vec::new() };
    let mut places = vec![0; others.len()];
    let mut points = Vec::new();
    for &(x, y) in first {
        let mut values = vec![y];
        for (curve, place) in others.iter().zip(&mut places) {
            while curve.get(*place).is_some_and(|(other, _)| *other < x) {
                *place += 1;
            }
            values.extend(curve.get(*place).filter(|(other, _)| *other == x).map(|(_, value)| *value));
        }
        if values.len() < curves.len() {
            continue;
        }
        let Ok(estimate) = mean_estimate(&values) else { continue };
        let interval = estimate.interval.map(|i| i.within(*bounds.start(), *bounds.end()));
        points.push(CurvePoint { x, y: estimate.value, interval: interval.map(|i| (i.low, i.high)) });
    }
    points
}

/// A filled range between two curves.
#[derive(Debug, Clone)]
pub struct Band {
    pub label: String,
    pub series: usize,
    /// x, low, high.
    pub points: Vec<(f64, f64, f64)>,
    pub opacity: f64,
}

/// A line chart. `unit` follows each value in the text under the pointer.
#[derive(Debug, Clone)]
pub struct Curves {
    pub x_label: String,
    pub unit: &'static str,
    pub y: Scale,
    pub bands: Vec<Band>,
    pub lines: Vec<Curve>,
}

const HEIGHT: f64 = 190.0;
/// Areas under the pointer along x; of more x values than this only every n-th gets an area.
const MAX_STRIPS: usize = 240;
/// Curves with at most this many points also get dots, so that single points are visible.
const MAX_DOTS: usize = 24;

/// How a line goes from one point to the next.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Course {
    Straight,
    /// Level up to the next point and then upright, as the estimate of a survival curve does.
    Staircase,
}

impl Curves {
    pub fn draw(&self) -> Scene {
        self.draw_as(Course::Straight)
    }

    /// Draws lines that keep their value up to the next point.
    pub fn draw_staircase(&self) -> Scene {
        self.draw_as(Course::Staircase)
    }

    fn draw_as(&self, course: Course) -> Scene {
        let mut marks = Vec::new();
        let top = draw_legend(&mut marks, &self.legend()) + 4.0;
        let xs = self.xs();
        let (first, last) = (xs.first().copied().unwrap_or(0.0), xs.last().copied().unwrap_or(1.0));
        let left = Frame::margin(&self.y);
        let frame = Frame {
            left,
            top,
            width: WIDTH - left - 12.0,
            height: HEIGHT,
            x: Scale::whole(first, last),
            y: self.y.clone(),
        };
        frame.draw_y_axis(&mut marks);
        frame.draw_x_axis(&mut marks, &self.x_label);
        let keyed = |key: usize, shown: Vec<Mark>| Mark::Keyed { key, part: KeyPart::Shown, marks: shown };
        for (idx, band) in self.bands.iter().enumerate() {
            marks.push(keyed(self.lines.len() + idx, draw_band(&frame, band, course)));
        }
        for (key, line) in self.lines.iter().enumerate() {
            marks.push(keyed(key, self.draw_uncertainty(&frame, line, course)));
        }
        for (key, line) in self.lines.iter().enumerate() {
            marks.push(keyed(key, draw_line(&frame, line, course)));
        }
        self.draw_strips(&mut marks, &frame, &xs);
        Scene { width: WIDTH, height: top + HEIGHT + 42.0, marks }
    }

    /// One line without bands needs no legend.
    fn legend(&self) -> Vec<(LegendKey, &str)> {
        if self.lines.len() + self.bands.len() < 2 {
            return Vec::new();
        }
        let line = |line: &Curve| LegendKey::Line(Ink::Series(line.series), Dash::for_series(line.series));
        let lines = self.lines.iter().map(|l| (line(l), l.label.as_str()));
        let bands =
            self.bands.iter().map(|b| (LegendKey::Patch(Ink::Series(b.series), b.opacity), b.label.as_str()));
        lines.chain(bands).collect()
    }

    fn xs(&self) -> Vec<f64> {
        let of_lines = self.lines.iter().flat_map(|line| line.points.iter().map(|p| p.x));
        let of_bands = self.bands.iter().flat_map(|band| band.points.iter().map(|p| p.0));
        let mut xs: Vec<f64> = of_lines.chain(of_bands).collect();
        xs.sort_by(f64::total_cmp);
        xs.dedup();
        xs
    }

    /// One area under the pointer per x, without gaps between them, that lists all values at this x.
    fn draw_strips(&self, marks: &mut Vec<Mark>, frame: &Frame, xs: &[f64]) {
        let chosen: Vec<f64> = xs.iter().copied().step_by(xs.len() / MAX_STRIPS + 1).collect();
        for (idx, &x) in chosen.iter().enumerate() {
            let middle = |other: Option<&f64>, edge: f64| {
                other.map_or(edge, |o| f64::midpoint(frame.x_at(x), frame.x_at(*o)))
            };
            let left = middle(idx.checked_sub(1).and_then(|before| chosen.get(before)), frame.left);
            let right = middle(chosen.get(idx + 1), frame.left + frame.width);
            marks.push(Mark::Hover {
                corner: (left, frame.top),
                size: (right - left, frame.height),
                x: frame.x_at(x),
                title: format!("{} {}", self.x_label, number(x)),
                values: self.values_at(frame, x),
            });
        }
    }

    /// The interval of a line, and the seeds it is the mean of.
    fn draw_uncertainty(&self, frame: &Frame, line: &Curve, course: Course) -> Vec<Mark> {
        // Overlapping bands of many lines add up: each is drawn fainter.
        let opacity = if self.lines.len() > 2 { 0.09 } else { 0.18 };
        let points = line.points.iter().filter_map(|p| p.interval.map(|(low, high)| (p.x, low, high)));
        let band = Band { label: String::new(), series: line.series, points: points.collect(), opacity };
        let mut marks = draw_band(frame, &band, course);
        marks.extend(line.seeds.iter().map(|seed| Mark::Line {
            points: seed.iter().map(|&(x, y)| frame.at(x, y)).collect(),
            ink: Ink::Faint(line.series),
            width: 0.8,
            dash: Dash::Solid,
        }));
        marks
    }

    fn values_at(&self, frame: &Frame, x: f64) -> Vec<HoverValue> {
        let unit = if self.unit.is_empty() { String::new() } else { format!(" {}", self.unit) };
        let mut values = Vec::new();
        for (key, line) in self.lines.iter().enumerate() {
            let Some(point) = line.points.iter().find(|p| p.x == x) else { continue };
            let seeds =
                line.seeds.iter().filter_map(|seed| seed.iter().find(|p| p.0 == x).map(|p| number(p.1)));
            let around = match point.interval {
                Some((low, high)) => format!("  ({} to {})", number(low), number(high)),
                None if line.seeds.is_empty() => String::new(),
                None => format!("  (seeds {})", seeds.collect::<Vec<_>>().join(", ")),
            };
            let text = format!("{}  {}{unit}{around}", line.label, number(point.y));
            values.push(HoverValue { key, series: line.series, y: Some(frame.y_at(point.y)), text });
        }
        for (idx, band) in self.bands.iter().enumerate() {
            let Some((_, low, high)) = band.points.iter().find(|p| p.0 == x) else { continue };
            let text = format!("{}  {} to {}{unit}", band.label, number(*low), number(*high));
            values.push(HoverValue { key: self.lines.len() + idx, series: band.series, y: None, text });
        }
        values
    }
}

/// The points of a line on its course.
fn along(points: Vec<(f64, f64)>, course: Course) -> Vec<(f64, f64)> {
    if course == Course::Straight {
        return points;
    }
    let corners = points.windows(2).flat_map(|pair| [pair[0], (pair[1].0, pair[0].1)]);
    corners.chain(points.last().copied()).collect()
}

fn draw_band(frame: &Frame, band: &Band, course: Course) -> Vec<Mark> {
    if band.points.len() < 2 {
        return Vec::new();
    }
    let high = along(band.points.iter().map(|&(x, _, high)| frame.at(x, high)).collect(), course);
    let low = along(band.points.iter().map(|&(x, low, _)| frame.at(x, low)).collect(), course);
    let points = high.into_iter().chain(low.into_iter().rev()).collect();
    vec![Mark::Area { points, ink: Ink::Series(band.series), opacity: band.opacity }]
}

fn draw_line(frame: &Frame, line: &Curve, course: Course) -> Vec<Mark> {
    let ink = Ink::Series(line.series);
    let points: Vec<(f64, f64)> = line.points.iter().map(|p| frame.at(p.x, p.y)).collect();
    let is_dotted = points.len() <= MAX_DOTS && course == Course::Straight;
    let n_dots = if is_dotted { points.len() } else { 0 };
    let dot = |&at: &(f64, f64)| Mark::Dot { at, radius: 2.6, ink, opacity: 1.0, hover: None };
    let mut marks: Vec<Mark> = points[..n_dots].iter().map(dot).collect();
    let points = along(points, course);
    marks.push(Mark::Line { points, ink, width: 1.9, dash: Dash::for_series(line.series) });
    marks
}

/// A small muted caption.
pub(super) fn caption(at: (f64, f64), text: &str) -> Mark {
    super::text(at, text, super::SMALL, Ink::Muted, Anchor::Start)
}
