//! Figures: drawn once as a [`Scene`] of a few kinds of marks, written as SVG for pages and as PNG for everything else.

mod bars;
mod curves;
mod png;
mod scale;
mod scatter;
mod svg;

pub use bars::{Bar, BarGroup, Bars};
pub use curves::{
    ANY, Band, Bounds, Curve, CurvePoint, Curves, MIN_SEEDS_FOR_INTERVAL, PERCENT, band_over, mean_over_seeds,
};
pub use png::write_png;
pub use scale::{Scale, number, significant};
pub use scatter::{Cross, Dot, Guide, Scatter};
pub use svg::to_svg;

/// A drawing with its title and note.
#[derive(Debug, Clone)]
pub struct Figure {
    /// The file name of the PNG and the element's id in the page.
    pub name: String,
    pub title: String,
    /// States what is drawn, in which unit, over which samples.
    pub note: String,
    pub scene: Scene,
}

/// Marks in drawing order. One unit is one pixel at natural size; y grows downwards.
#[derive(Debug, Clone)]
pub struct Scene {
    pub width: f64,
    pub height: f64,
    pub marks: Vec<Mark>,
}

/// Natural width of a figure: one column on a telephone, half a page on a screen.
pub const WIDTH: f64 = 420.0;

#[derive(Debug, Clone)]
pub enum Mark {
    Line {
        points: Vec<(f64, f64)>,
        ink: Ink,
        width: f64,
        dash: Dash,
    },
    Area {
        points: Vec<(f64, f64)>,
        ink: Ink,
        opacity: f64,
    },
    Dot {
        at: (f64, f64),
        radius: f64,
        ink: Ink,
        opacity: f64,
        hover: Option<String>,
    },
    Box {
        corner: (f64, f64),
        size: (f64, f64),
        ink: Ink,
        opacity: f64,
        hover: Option<String>,
    },
    Text {
        at: (f64, f64),
        text: String,
        size: f64,
        ink: Ink,
        anchor: Anchor,
        /// Whether the text lies over marks: an outline in the background colour keeps it readable.
        is_outlined: bool,
    },
    /// An invisible area over one x that shows `title` and the values of all lines there; PNG files leave it out.
    Hover {
        corner: (f64, f64),
        size: (f64, f64),
        /// The place of the x.
        x: f64,
        title: String,
        values: Vec<HoverValue>,
    },
    /// Marks that the legend entry `key` shows and hides.
    Keyed {
        key: usize,
        part: KeyPart,
        marks: Vec<Mark>,
    },
}

/// One line of the text under the pointer.
#[derive(Debug, Clone)]
pub struct HoverValue {
    pub key: usize,
    pub series: usize,
    /// The place of the value; `None` for a range.
    pub y: Option<f64>,
    pub text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyPart {
    /// The legend entry itself.
    Legend,
    /// What the entry shows and hides.
    Shown,
}

/// The role of a colour; a page maps each role to one colour per theme.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Ink {
    Text,
    Muted,
    Grid,
    /// A series by number, from 0. The colours of [`SERIES`] are distinct for colour-blind readers and repeat after the
    /// last.
    Series(usize),
    /// A series in a lighter colour.
    Faint(usize),
    /// A place on the heat scale, from 0 (low) to 1 (high).
    Heat(f64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dash {
    Solid,
    Dashed,
    Dotted,
    Mixed,
}

impl Dash {
    /// Every dash, in the order in which series take them.
    pub const ALL: [Dash; 4] = [Dash::Solid, Dash::Dashed, Dash::Dotted, Dash::Mixed];

    /// Series that share a colour, because colours repeat, differ in their dashes.
    pub fn for_series(series: usize) -> Self {
        Self::ALL[(series / SERIES.len()).min(Self::ALL.len() - 1)]
    }

    /// Lengths of strokes and gaps in turn; none for an unbroken line.
    fn lengths(self) -> &'static [f64] {
        match self {
            Dash::Solid => &[],
            Dash::Dashed => &[6.0, 4.0],
            Dash::Dotted => &[1.5, 3.5],
            Dash::Mixed => &[7.0, 3.5, 1.5, 3.5],
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

/// The part of its colour that [`Ink::Faint`] keeps; the rest is the background.
const FAINT: f64 = 0.55;
/// Width of the outline of a text over marks.
const OUTLINE: f64 = 4.0;

/// Series colours as (light theme, dark theme), after Okabe and Ito (2008), lightened for the dark theme.
pub const SERIES: [(&str, &str); 6] = [
    ("#0072b2", "#5ab4f0"),
    ("#d55e00", "#ff9350"),
    ("#00835f", "#35c79c"),
    ("#a8498a", "#e79bcb"),
    ("#a87500", "#f0bd45"),
    ("#5b5fc7", "#a9adff"),
];

/// Anchors of the heat scale: even steps in lightness, readable on white and on black.
const HEAT: [(u8, u8, u8); 5] =
    [(62, 73, 137), (38, 130, 142), (53, 183, 121), (180, 200, 50), (250, 190, 40)];

/// The colour of a heat from 0 to 1.
pub fn heat_rgb(heat: f64) -> (u8, u8, u8) {
    let position = heat.clamp(0.0, 1.0) * (HEAT.len() - 1) as f64;
    let below = (position as usize).min(HEAT.len() - 2);
    let part = position - below as f64;
    let mix = |a: u8, b: u8| (f64::from(a) + (f64::from(b) - f64::from(a)) * part).round() as u8;
    let (a, b) = (HEAT[below], HEAT[below + 1]);
    (mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2))
}

/// The rectangle of a scene that holds the data, and the scales that map values into the rectangle.
#[derive(Debug, Clone)]
pub struct Frame {
    pub left: f64,
    pub top: f64,
    pub width: f64,
    pub height: f64,
    pub x: Scale,
    pub y: Scale,
}

/// Upper bound on how much wider a browser's font is than the font that `text_width` measures with.
const BROWSER: f64 = 1.15;
const LABEL: f64 = 12.0;
const SMALL: f64 = 11.0;
const LEGEND_LINE: f64 = 18.0;

impl Frame {
    pub fn at(&self, x: f64, y: f64) -> (f64, f64) {
        (self.x_at(x), self.y_at(y))
    }

    pub fn x_at(&self, x: f64) -> f64 {
        self.left + self.x.fraction(x) * self.width
    }

    pub fn y_at(&self, y: f64) -> f64 {
        self.top + (1.0 - self.y.fraction(y)) * self.height
    }

    pub fn bottom(&self) -> f64 {
        self.top + self.height
    }

    /// Horizontal grid lines with their labels.
    fn draw_y_axis(&self, marks: &mut Vec<Mark>) {
        for tick in self.y.ticks(5) {
            let y = self.y_at(tick.value);
            marks.push(rule((self.left, y), (self.left + self.width, y), Ink::Grid, Dash::Solid));
            marks.push(text((self.left - 6.0, y + 4.0), &tick.label, LABEL, Ink::Muted, Anchor::End));
        }
    }

    fn draw_x_axis(&self, marks: &mut Vec<Mark>, label: &str) {
        let bottom = self.bottom();
        marks.push(rule((self.left, bottom), (self.left + self.width, bottom), Ink::Muted, Dash::Solid));
        for tick in self.x.ticks(6) {
            let x = self.x_at(tick.value);
            marks.push(rule((x, bottom), (x, bottom + 4.0), Ink::Muted, Dash::Solid));
            marks.push(text((x, bottom + 17.0), &tick.label, LABEL, Ink::Muted, Anchor::Middle));
        }
        let middle = self.left + self.width / 2.0;
        marks.push(text((middle, bottom + 34.0), label, LABEL, Ink::Muted, Anchor::Middle));
    }

    /// Width left of the y axis for its widest label.
    fn margin(y: &Scale) -> f64 {
        let widest = y.ticks(5).iter().map(|tick| png::text_width(&tick.label, LABEL)).fold(0.0, f64::max);
        (BROWSER * widest + 12.0).clamp(28.0, 90.0)
    }
}

fn rule(from: (f64, f64), to: (f64, f64), ink: Ink, dash: Dash) -> Mark {
    Mark::Line { points: vec![from, to], ink, width: 1.0, dash }
}

fn text(at: (f64, f64), text: &str, size: f64, ink: Ink, anchor: Anchor) -> Mark {
    Mark::Text { at, text: text.to_string(), size, ink, anchor, is_outlined: false }
}

/// Text over marks.
fn label(at: (f64, f64), text: &str, anchor: Anchor) -> Mark {
    Mark::Text { at, text: text.to_string(), size: SMALL, ink: Ink::Text, anchor, is_outlined: true }
}

/// The sign next to a name in a legend.
#[derive(Debug, Clone, Copy)]
enum LegendKey {
    Line(Ink, Dash),
    Patch(Ink, f64),
}

/// Draws a legend in as many rows as it needs and returns its height. The key of an entry is its index.
fn draw_legend(marks: &mut Vec<Mark>, entries: &[(LegendKey, &str)]) -> f64 {
    if entries.is_empty() {
        return 4.0;
    }
    let (mut x, mut y) = (0.0, 12.0);
    for (idx, (key, label)) in entries.iter().enumerate() {
        let width = 24.0 + BROWSER * png::text_width(label, LABEL) + 14.0;
        if x > 0.0 && x + width > WIDTH {
            (x, y) = (0.0, y + LEGEND_LINE);
        }
        let sign = match *key {
            LegendKey::Line(ink, dash) => {
                Mark::Line { points: vec![(x, y - 4.0), (x + 18.0, y - 4.0)], ink, width: 2.5, dash }
            }
            LegendKey::Patch(ink, opacity) => {
                Mark::Box { corner: (x, y - 10.0), size: (18.0, 12.0), ink, opacity, hover: None }
            }
        };
        let name = text((x + 24.0, y), label, LABEL, Ink::Text, Anchor::Start);
        marks.push(Mark::Keyed { key: idx, part: KeyPart::Legend, marks: vec![sign, name] });
        x += width;
    }
    y + 12.0
}

#[cfg(test)]
mod tests;
