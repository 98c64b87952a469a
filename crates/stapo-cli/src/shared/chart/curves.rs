//! Line charts over training steps, with bands.

use super::scale::number;
use super::{Anchor, Dash, Frame, Ink, LegendKey, Mark, Scale, Scene, WIDTH, draw_legend};

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

impl Curves {
    pub fn draw(&self) -> Scene {
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
        for band in &self.bands {
            draw_band(&mut marks, &frame, band);
        }
        // Overlapping bands of many lines add up: each is drawn fainter.
        let opacity = if self.lines.len() > 2 { 0.09 } else { 0.18 };
        for line in &self.lines {
            let points = line.points.iter().filter_map(|p| p.interval.map(|(low, high)| (p.x, low, high)));
            let band = Band { label: String::new(), series: line.series, points: points.collect(), opacity };
            draw_band(&mut marks, &frame, &band);
        }
        for line in &self.lines {
            draw_line(&mut marks, &frame, line);
        }
        self.draw_strips(&mut marks, &frame, &xs);
        Scene { width: WIDTH, height: top + HEIGHT + 42.0, marks }
    }

    /// One line without bands needs no legend.
    fn legend(&self) -> Vec<(LegendKey, &str)> {
        if self.lines.len() + self.bands.len() < 2 {
            return Vec::new();
        }
        let line = |line: &Curve| LegendKey::Line(Ink::Series(line.series), Dash::of(line.series));
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
            let size = (right - left, frame.height);
            marks.push(Mark::Hover { corner: (left, frame.top), size, text: self.told_at(x) });
        }
    }

    fn told_at(&self, x: f64) -> String {
        let unit = if self.unit.is_empty() { String::new() } else { format!(" {}", self.unit) };
        let mut lines = vec![format!("{} {}", self.x_label, number(x))];
        for line in &self.lines {
            let Some(point) = line.points.iter().find(|p| p.x == x) else { continue };
            let interval = point
                .interval
                .map_or(String::new(), |(low, high)| format!("  ({} to {})", number(low), number(high)));
            lines.push(format!("{}  {}{unit}{interval}", line.label, number(point.y)));
        }
        for band in &self.bands {
            let Some((_, low, high)) = band.points.iter().find(|p| p.0 == x) else { continue };
            lines.push(format!("{}  {} to {}{unit}", band.label, number(*low), number(*high)));
        }
        lines.join("\n")
    }
}

fn draw_band(marks: &mut Vec<Mark>, frame: &Frame, band: &Band) {
    if band.points.len() < 2 {
        return;
    }
    let high = band.points.iter().map(|&(x, _, high)| frame.at(x, high));
    let low = band.points.iter().rev().map(|&(x, low, _)| frame.at(x, low));
    let points = high.chain(low).collect();
    marks.push(Mark::Area { points, ink: Ink::Series(band.series), opacity: band.opacity });
}

fn draw_line(marks: &mut Vec<Mark>, frame: &Frame, line: &Curve) {
    let ink = Ink::Series(line.series);
    let points: Vec<(f64, f64)> = line.points.iter().map(|p| frame.at(p.x, p.y)).collect();
    if points.len() <= MAX_DOTS {
        for &at in &points {
            marks.push(Mark::Dot { at, radius: 2.6, ink, opacity: 1.0, hover: None });
        }
    }
    marks.push(Mark::Line { points, ink, width: 1.9, dash: Dash::of(line.series) });
}

/// A small muted caption.
pub(super) fn caption(at: (f64, f64), text: &str) -> Mark {
    super::text(at, text, super::SMALL, Ink::Muted, Anchor::Start)
}
