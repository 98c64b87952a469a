//! A scene as inline SVG. Colours are CSS variables of the page, so one drawing serves both themes and print.

use super::{Anchor, Ink, Mark, SMALL, Scene, heat_rgb};
use crate::shared::html::escape;
use std::fmt::Write;

/// The scene as an `<svg>` element; `label` is its text for screen readers.
pub fn to_svg(scene: &Scene, label: &str) -> String {
    let mut out = format!(
        r#"<svg viewBox="0 0 {} {}" role="img" aria-label="{}">"#,
        short(scene.width),
        short(scene.height),
        escape(label)
    );
    for mark in &scene.marks {
        // Writing to a string cannot fail.
        let _ = write_mark(&mut out, mark);
    }
    out.push_str("</svg>");
    out
}

fn write_mark(out: &mut String, mark: &Mark) -> std::fmt::Result {
    match mark {
        Mark::Line { points, ink, width, dash } => {
            write!(
                out,
                r#"<path d="{}" fill="none" stroke="{}" stroke-width="{width}""#,
                path(points),
                color(*ink)
            )?;
            if let Some([on, off]) = dash.lengths() {
                write!(out, r#" stroke-dasharray="{on} {off}""#)?;
            }
            out.push_str(r#" stroke-linejoin="round"/>"#);
            Ok(())
        }
        Mark::Area { points, ink, opacity } => {
            write!(out, r#"<path d="{}Z" fill="{}" opacity="{opacity}"/>"#, path(points), color(*ink))
        }
        Mark::Dot { at, radius, ink, opacity, hover } => write!(
            out,
            r#"<circle cx="{}" cy="{}" r="{radius}" fill="{}" opacity="{opacity}"{}/>"#,
            short(at.0),
            short(at.1),
            color(*ink),
            hover_attribute(hover.as_deref())
        ),
        Mark::Box { corner, size, ink, opacity, hover } => write!(
            out,
            r#"<rect {} fill="{}" opacity="{opacity}"{}/>"#,
            area(*corner, *size),
            color(*ink),
            hover_attribute(hover.as_deref())
        ),
        Mark::Text { at, text, size, ink, anchor } => {
            write!(
                out,
                r#"<text x="{}" y="{}" font-size="{size}" fill="{}" text-anchor="{}">{}</text>"#,
                short(at.0),
                short(at.1),
                color(*ink),
                anchored(*anchor),
                escape(text)
            )
        }
        Mark::Label { at, text, anchor } => write!(
            out,
            r#"<text x="{}" y="{}" font-size="{SMALL}" fill="var(--ink)" stroke="var(--sheet)" stroke-width="4" paint-order="stroke" text-anchor="{}">{}</text>"#,
            short(at.0),
            short(at.1),
            anchored(*anchor),
            escape(text)
        ),
        Mark::Hover { corner, size, text } => {
            write!(out, r#"<rect class="hit" {}{}/>"#, area(*corner, *size), hover_attribute(Some(text)))
        }
    }
}

fn anchored(anchor: Anchor) -> &'static str {
    match anchor {
        Anchor::Start => "start",
        Anchor::Middle => "middle",
        Anchor::End => "end",
    }
}

fn path(points: &[(f64, f64)]) -> String {
    let mut d = String::new();
    for (idx, (x, y)) in points.iter().enumerate() {
        let _ = write!(d, "{}{} {}", if idx == 0 { 'M' } else { 'L' }, short(*x), short(*y));
    }
    d
}

fn area(corner: (f64, f64), size: (f64, f64)) -> String {
    format!(
        r#"x="{}" y="{}" width="{}" height="{}""#,
        short(corner.0),
        short(corner.1),
        short(size.0.max(0.0)),
        short(size.1.max(0.0))
    )
}

fn hover_attribute(hover: Option<&str>) -> String {
    hover.map_or(String::new(), |text| format!(r#" data-t="{}""#, escape(text)))
}

fn color(ink: Ink) -> String {
    match ink {
        Ink::Text => "var(--ink)".to_string(),
        Ink::Muted => "var(--muted)".to_string(),
        Ink::Grid => "var(--grid)".to_string(),
        Ink::Series(idx) => format!("var(--s{})", idx % super::SERIES.len()),
        Ink::Heat(heat) => {
            let (r, g, b) = heat_rgb(heat);
            format!("#{r:02x}{g:02x}{b:02x}")
        }
    }
}

/// A number with at most two decimals: a hundredth of a pixel.
fn short(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}
