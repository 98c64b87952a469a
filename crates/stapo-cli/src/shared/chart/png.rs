//! A figure as PNG: the marks of its scene on white, text as glyph outlines of a font embedded in the program.

use super::{Anchor, FAINT, Figure, Ink, Mark, OUTLINE, SERIES, heat_rgb};
use anyhow::{Context, Result};
use std::sync::LazyLock;
use tiny_skia::{
    Color, FillRule, LineCap, LineJoin, Paint, PathBuilder, Pixmap, Rect, Stroke, StrokeDash, Transform,
};
use ttf_parser::{Face, OutlineBuilder};

/// Pixels per unit of the scene; 2 keeps figures sharp on high-density screens.
const SCALE: f32 = 2.0;
const MARGIN: f64 = 16.0;
const GAP: f64 = 36.0;
const TITLE: f64 = 16.0;
const NOTE: f64 = 11.5;

static FACE: LazyLock<Face<'static>> = LazyLock::new(|| {
    Face::parse(epaint_default_fonts::UBUNTU_LIGHT, 0).expect("the font inside the program is whole")
});

/// Writes figures side by side, each under its title and note.
pub fn write_png(path: &std::path::Path, figures: &[&Figure]) -> Result<()> {
    let notes: Vec<Vec<String>> =
        figures.iter().map(|figure| wrapped(&figure.note, NOTE, figure.scene.width)).collect();
    let head = notes.iter().map(|lines| 22.0 + 16.0 * lines.len() as f64 + 8.0).fold(0.0, f64::max);
    let widths: f64 = figures.iter().map(|figure| figure.scene.width).sum();
    let width = 2.0 * MARGIN + widths + GAP * figures.len().saturating_sub(1) as f64;
    let tallest = figures.iter().map(|figure| figure.scene.height).fold(0.0, f64::max);
    let height = 2.0 * MARGIN + head + tallest;
    let pixels = |length: f64| (length * f64::from(SCALE)).ceil() as u32;
    let mut sheet = Sheet {
        pixmap: Pixmap::new(pixels(width), pixels(height)).context("a figure without size")?,
        at: (0.0, 0.0),
    };
    sheet.pixmap.fill(Color::WHITE);
    let mut left = MARGIN;
    for (figure, note) in figures.iter().zip(&notes) {
        sheet.at = (left, MARGIN);
        sheet.text((0.0, 14.0), &figure.title, TITLE, Ink::Text, Anchor::Start);
        for (idx, line) in note.iter().enumerate() {
            sheet.text((0.0, 33.0 + 16.0 * idx as f64), line, NOTE, Ink::Muted, Anchor::Start);
        }
        sheet.at = (left, MARGIN + head);
        sheet.draw(&figure.scene.marks);
        left += figure.scene.width + GAP;
    }
    let bytes = sheet.pixmap.encode_png().with_context(|| format!("picture {}", path.display()))?;
    std::fs::write(path, bytes).with_context(|| format!("picture {}", path.display()))
}

/// The width of a text in the embedded font. A browser's font may be wider (`BROWSER`).
pub fn text_width(text: &str, size: f64) -> f64 {
    let units: u32 = text.chars().map(advance).sum();
    f64::from(units) * size / f64::from(FACE.units_per_em())
}

fn advance(c: char) -> u32 {
    let glyph = FACE.glyph_index(c).unwrap_or_default();
    u32::from(FACE.glyph_hor_advance(glyph).unwrap_or_default())
}

/// Lines no wider than `width`, broken at spaces.
fn wrapped(text: &str, size: f64, width: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if text_width(&format!("{line} {word}"), size) <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_string()),
        }
    }
    lines
}

/// The picture under construction, and the place of the scene's origin in it.
struct Sheet {
    pixmap: Pixmap,
    at: (f64, f64),
}

impl Sheet {
    fn draw(&mut self, marks: &[Mark]) {
        for mark in marks {
            match mark {
                Mark::Line { points, ink, width, dash } => {
                    let stroke = Stroke {
                        width: *width as f32,
                        line_cap: LineCap::Round,
                        line_join: LineJoin::Round,
                        dash: StrokeDash::new(dash.lengths().iter().map(|l| *l as f32).collect(), 0.0),
                        ..Stroke::default()
                    };
                    if let Some(path) = polygon(points).finish() {
                        self.pixmap.stroke_path(&path, &paint(*ink, 1.0), &stroke, self.transform(), None);
                    }
                }
                Mark::Area { points, ink, opacity } => {
                    self.fill(polygon(points), *ink, *opacity);
                }
                Mark::Dot { at, radius, ink, opacity, .. } => {
                    let mut builder = PathBuilder::new();
                    builder.push_circle(at.0 as f32, at.1 as f32, *radius as f32);
                    self.fill(builder, *ink, *opacity);
                }
                Mark::Box { corner, size, ink, opacity, .. } => {
                    let rect =
                        Rect::from_xywh(corner.0 as f32, corner.1 as f32, size.0 as f32, size.1 as f32);
                    if let Some(rect) = rect {
                        let mut builder = PathBuilder::new();
                        builder.push_rect(rect);
                        self.fill(builder, *ink, *opacity);
                    }
                }
                Mark::Text { at, text, size, ink, anchor, is_outlined } => {
                    if *is_outlined {
                        self.outline(*at, text, *size, *anchor);
                    }
                    self.text(*at, text, *size, *ink, *anchor);
                }
                Mark::Hover { .. } => {}
                Mark::Keyed { marks, .. } => self.draw(marks),
            }
        }
    }

    fn transform(&self) -> Transform {
        Transform::from_translate(self.at.0 as f32, self.at.1 as f32).post_scale(SCALE, SCALE)
    }

    fn fill(&mut self, builder: PathBuilder, ink: Ink, opacity: f64) {
        if let Some(path) = builder.finish() {
            self.pixmap.fill_path(&path, &paint(ink, opacity), FillRule::Winding, self.transform(), None);
        }
    }

    fn text(&mut self, at: (f64, f64), text: &str, size: f64, ink: Ink, anchor: Anchor) {
        let Some(path) = glyphs(at, text, size, anchor) else { return };
        let paint = paint(ink, 1.0);
        self.pixmap.fill_path(&path, &paint, FillRule::Winding, self.transform(), None);
        // The embedded font is light; a thin stroke around each glyph brings it to regular weight.
        let hair = Stroke { width: (size * 0.025) as f32, ..Stroke::default() };
        self.pixmap.stroke_path(&path, &paint, &hair, self.transform(), None);
    }

    fn outline(&mut self, at: (f64, f64), text: &str, size: f64, anchor: Anchor) {
        let Some(path) = glyphs(at, text, size, anchor) else { return };
        let rim = Stroke { width: OUTLINE as f32, line_join: LineJoin::Round, ..Stroke::default() };
        let mut white = Paint::default();
        white.set_color(Color::WHITE);
        self.pixmap.stroke_path(&path, &white, &rim, self.transform(), None);
    }
}

/// The glyphs of a text as one path; `None` for text without outlines.
fn glyphs(at: (f64, f64), text: &str, size: f64, anchor: Anchor) -> Option<tiny_skia::Path> {
    let shift = match anchor {
        Anchor::Start => 0.0,
        Anchor::Middle => 0.5,
        Anchor::End => 1.0,
    };
    let scale = (size / f64::from(FACE.units_per_em())) as f32;
    let mut outline = Outline {
        builder: PathBuilder::new(),
        x: (at.0 - shift * text_width(text, size)) as f32,
        y: at.1 as f32,
        scale,
    };
    for c in text.chars() {
        FACE.outline_glyph(FACE.glyph_index(c).unwrap_or_default(), &mut outline);
        outline.x += advance(c) as f32 * scale;
    }
    outline.builder.finish()
}

fn polygon(points: &[(f64, f64)]) -> PathBuilder {
    let mut builder = PathBuilder::new();
    for (idx, &(x, y)) in points.iter().enumerate() {
        if idx == 0 {
            builder.move_to(x as f32, y as f32);
        } else {
            builder.line_to(x as f32, y as f32);
        }
    }
    builder
}

/// Collects glyph outlines at the place of their text.
struct Outline {
    builder: PathBuilder,
    x: f32,
    y: f32,
    scale: f32,
}

impl Outline {
    fn at(&self, x: f32, y: f32) -> (f32, f32) {
        (self.x + x * self.scale, self.y - y * self.scale)
    }
}

impl OutlineBuilder for Outline {
    fn move_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.at(x, y);
        self.builder.move_to(x, y);
    }
    fn line_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.at(x, y);
        self.builder.line_to(x, y);
    }
    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        let (x1, y1) = self.at(x1, y1);
        let (x, y) = self.at(x, y);
        self.builder.quad_to(x1, y1, x, y);
    }
    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        let (x1, y1) = self.at(x1, y1);
        let (x2, y2) = self.at(x2, y2);
        let (x, y) = self.at(x, y);
        self.builder.cubic_to(x1, y1, x2, y2, x, y);
    }
    fn close(&mut self) {
        self.builder.close();
    }
}

fn paint(ink: Ink, opacity: f64) -> Paint<'static> {
    let (r, g, b) = match ink {
        Ink::Text => (0x1a, 0x1d, 0x21),
        Ink::Muted => (0x5c, 0x63, 0x6b),
        Ink::Grid => (0xe3, 0xe6, 0xea),
        Ink::Series(idx) => rgb(SERIES[idx % SERIES.len()].0),
        Ink::Faint(idx) => lighter(rgb(SERIES[idx % SERIES.len()].0)),
        Ink::Heat(heat) => heat_rgb(heat),
    };
    let mut paint = Paint::default();
    paint.set_color_rgba8(r, g, b, (opacity * 255.0).round() as u8);
    paint
}

/// A colour mixed with the white of the sheet, as the page mixes [`Ink::Faint`].
fn lighter((r, g, b): (u8, u8, u8)) -> (u8, u8, u8) {
    let mix = |part: u8| (f64::from(part) * FAINT + 255.0 * (1.0 - FAINT)).round() as u8;
    (mix(r), mix(g), mix(b))
}

/// Red, green and blue of `#rrggbb`.
fn rgb(hex: &str) -> (u8, u8, u8) {
    let byte = |at: usize| u8::from_str_radix(hex.get(at..at + 2).unwrap_or("0"), 16).unwrap_or_default();
    (byte(1), byte(3), byte(5))
}

#[cfg(test)]
pub(super) fn has_glyph(c: char) -> bool {
    FACE.glyph_index(c).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_begins_ends_or_has_its_middle_at_its_place() {
        let bounds = |anchor| glyphs((100.0, 50.0), "HHH", 20.0, anchor).unwrap().bounds();
        let width = text_width("HHH", 20.0) as f32;
        let (start, middle, end) = (bounds(Anchor::Start), bounds(Anchor::Middle), bounds(Anchor::End));
        assert!(start.left() >= 100.0 && start.right() <= 100.0 + width, "{start:?}");
        assert!(end.left() >= 100.0 - width && end.right() <= 100.0, "{end:?}");
        assert!((start.left() - middle.left() - width / 2.0).abs() < 1e-3, "{middle:?}");
        // Letters stand on the line and beside each other.
        assert!((start.bottom() - 50.0).abs() < 1.0 && start.top() < 40.0, "{start:?}");
        assert!(start.width() > 0.8 * width && width > 30.0, "{start:?} {width}");
    }

    /// White around letters on a grey ground, and no other colour.
    #[test]
    fn the_rim_of_a_text_is_white() {
        let mut pixmap = Pixmap::new(200, 100).unwrap();
        pixmap.fill(Color::from_rgba8(90, 90, 90, 255));
        let mut sheet = Sheet { pixmap, at: (0.0, 0.0) };
        sheet.outline((10.0, 30.0), "HHH", 20.0, Anchor::Start);
        let pixels = sheet.pixmap.pixels();
        assert!(pixels.iter().filter(|p| p.red() == 255).count() > 100);
        assert!(pixels.iter().all(|p| p.red() >= 90));
    }

    #[test]
    fn a_polygon_has_its_corners() {
        let path = polygon(&[(1.0, 2.0), (4.0, 2.0), (4.0, 9.0)]).finish().unwrap();
        assert_eq!(
            path.points().iter().map(|p| (p.x, p.y)).collect::<Vec<_>>(),
            [(1.0, 2.0), (4.0, 2.0), (4.0, 9.0)]
        );
    }
}
