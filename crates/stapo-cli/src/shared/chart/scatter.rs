//! Scatter plots with guide lines.

use super::curves::caption;
use super::scale::number;
use super::{
    Anchor, Dash, Frame, Ink, KeyPart, LegendKey, Mark, SMALL, Scale, Scene, WIDTH, draw_legend, rule, text,
};

#[derive(Debug, Clone)]
pub struct Dot {
    pub x: f64,
    pub y: f64,
    pub ink: Ink,
    pub radius: f64,
    pub hover: String,
}

/// A dot with the intervals of its two values.
#[derive(Debug, Clone)]
pub struct Cross {
    pub dot: Dot,
    pub x_interval: Option<(f64, f64)>,
    pub y_interval: Option<(f64, f64)>,
    /// The name in the legend; empty for none.
    pub label: String,
}

impl Cross {
    fn dash(&self) -> Dash {
        if let Ink::Series(series) = self.dot.ink { Dash::for_series(series) } else { Dash::Solid }
    }
}

/// A labelled line across the plot.
#[derive(Debug, Clone)]
pub enum Guide {
    Upright {
        x: f64,
        label: String,
    },
    Level {
        y: f64,
        label: String,
    },
    /// From one point to another.
    Slope {
        from: (f64, f64),
        to: (f64, f64),
        label: String,
    },
}

#[derive(Debug, Clone)]
pub struct Scatter {
    pub x_label: String,
    /// Drawn above the y axis.
    pub y_label: String,
    pub x: Scale,
    pub y: Scale,
    pub dots: Vec<Dot>,
    pub crosses: Vec<Cross>,
    pub guides: Vec<Guide>,
    /// The heat scale's quantity with its lowest and highest value.
    pub heat: Option<(String, f64, f64)>,
}

const HEIGHT: f64 = 230.0;

impl Scatter {
    pub fn draw(&self) -> Scene {
        let mut marks = Vec::new();
        let mut top = 8.0;
        if let Some((name, low, high)) = &self.heat {
            draw_heat_key(&mut marks, name, *low, *high);
            top += 24.0;
        }
        let named = self.crosses.iter().filter(|cross| !cross.label.is_empty());
        let legend: Vec<(LegendKey, &str)> =
            named.map(|cross| (LegendKey::Line(cross.dot.ink, cross.dash()), cross.label.as_str())).collect();
        if !legend.is_empty() {
            top = draw_legend(&mut marks, &legend);
        }
        marks.push(caption((0.0, top + 8.0), &self.y_label));
        top += 18.0;
        let left = Frame::margin(&self.y);
        let frame = Frame {
            left,
            top,
            width: WIDTH - left - 24.0,
            height: HEIGHT,
            x: self.x.clone(),
            y: self.y.clone(),
        };
        frame.draw_y_axis(&mut marks);
        frame.draw_x_axis(&mut marks, &self.x_label);
        self.dots.iter().for_each(|dot| draw_dot(&mut marks, &frame, dot));
        for (key, cross) in self.crosses.iter().enumerate() {
            let shown = draw_cross(&frame, cross);
            marks.push(Mark::Keyed { key, part: KeyPart::Shown, marks: shown });
        }
        for guide in &self.guides {
            draw_guide(&mut marks, &frame, guide);
        }
        Scene { width: WIDTH, height: frame.bottom() + 42.0, marks }
    }
}

fn draw_dot(marks: &mut Vec<Mark>, frame: &Frame, dot: &Dot) {
    marks.push(Mark::Dot {
        at: frame.at(dot.x, dot.y),
        radius: dot.radius,
        ink: dot.ink,
        opacity: 0.75,
        hover: Some(dot.hover.clone()),
    });
}

/// The intervals as bars, cut at the frame, and the dot over them.
fn draw_cross(frame: &Frame, cross: &Cross) -> Vec<Mark> {
    let mut marks = Vec::new();
    let Dot { x, y, ink, .. } = cross.dot;
    let right = frame.left + frame.width;
    let bar = |from, to| Mark::Line { points: vec![from, to], ink, width: 1.3, dash: cross.dash() };
    let (at_x, at_y) = frame.at(x, y);
    if let Some((low, high)) = cross.x_interval {
        let [low, high] = [low, high].map(|end| frame.x_at(end).clamp(frame.left, right));
        marks.push(bar((low, at_y), (high, at_y)));
    }
    if let Some((low, high)) = cross.y_interval {
        let [low, high] = [low, high].map(|end| frame.y_at(end).clamp(frame.top, frame.bottom()));
        marks.push(bar((at_x, low), (at_x, high)));
    }
    draw_dot(&mut marks, frame, &cross.dot);
    marks
}

fn draw_guide(marks: &mut Vec<Mark>, frame: &Frame, guide: &Guide) {
    let right = frame.left + frame.width;
    match guide {
        Guide::Upright { x, label } => {
            let x = frame.x_at(*x);
            marks.push(rule((x, frame.top), (x, frame.bottom()), Ink::Text, Dash::Dashed));
            let (anchor, shift) = if x > right - 110.0 { (Anchor::End, -5.0) } else { (Anchor::Start, 5.0) };
            marks.push(super::label((x + shift, frame.top + 11.0), label, anchor));
        }
        Guide::Level { y, label } => {
            let y = frame.y_at(*y);
            marks.push(rule((frame.left, y), (right, y), Ink::Text, Dash::Dashed));
            let at = (frame.left + 4.0, y - 5.0);
            marks.push(super::label(at, label, Anchor::Start));
        }
        Guide::Slope { from, to, label } => {
            let (from, to) = (frame.at(from.0, from.1), frame.at(to.0, to.1));
            marks.push(rule(from, to, Ink::Text, Dash::Dashed));
            let at = (right - 2.0, frame.bottom() - 8.0);
            marks.push(super::label(at, label, Anchor::End));
        }
    }
}

fn draw_heat_key(marks: &mut Vec<Mark>, name: &str, low: f64, high: f64) {
    const N: usize = 24;
    let left = WIDTH - 190.0;
    let width = 120.0;
    for idx in 0..N {
        let corner = (left + width * idx as f64 / N as f64, 3.0);
        let size = (width / N as f64 + 0.5, 10.0);
        let ink = Ink::Heat(idx as f64 / (N - 1) as f64);
        marks.push(Mark::Box { corner, size, ink, opacity: 1.0, hover: None });
    }
    marks.push(text((left - 6.0, 12.0), &format!("{name}  {}", number(low)), SMALL, Ink::Muted, Anchor::End));
    marks.push(text((left + width + 6.0, 12.0), &number(high), SMALL, Ink::Muted, Anchor::Start));
}
