//! A scene as inline SVG. Colours are CSS variables of the page, so one drawing serves both themes and print.

use super::{Anchor, Dash, FAINT, HoverValue, Ink, KeyPart, Mark, OUTLINE, Scene, heat_rgb};
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
            if *dash != Dash::Solid {
                let lengths: Vec<String> = dash.lengths().iter().map(f64::to_string).collect();
                write!(out, r#" stroke-dasharray="{}""#, lengths.join(" "))?;
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
        Mark::Text { at, text, size, ink, anchor, is_outlined } => {
            let (x, y, fill) = (short(at.0), short(at.1), color(*ink));
            write!(out, r#"<text x="{x}" y="{y}" font-size="{size}" fill="{fill}""#)?;
            if *is_outlined {
                write!(out, r#" stroke="var(--sheet)" stroke-width="{OUTLINE}" paint-order="stroke""#)?;
            }
            write!(out, r#" text-anchor="{}">{}</text>"#, anchored(*anchor), escape(text))
        }
        Mark::Hover { corner, size, x, title, values } => write!(
            out,
            r#"<rect class="hit" {} data-x="{}"{}/>"#,
            area(*corner, *size),
            short(*x),
            value_attributes(title, values)
        ),
        Mark::Keyed { key, part, marks } => {
            match part {
                KeyPart::Legend => write!(
                    out,
                    r#"<g class="key" data-key="{key}" tabindex="0" role="button" aria-pressed="true">"#
                )?,
                KeyPart::Shown => write!(out, r#"<g data-of="{key}">"#)?,
            }
            marks.iter().try_for_each(|mark| write_mark(out, mark))?;
            out.push_str("</g>");
            Ok(())
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

/// The lines under the pointer, and for each line after the first its legend entry, its series and its place, as in
/// `0:2:113.5`; a range has no place.
fn value_attributes(title: &str, values: &[HoverValue]) -> String {
    let text =
        values.iter().fold(title.to_string(), |text, value| format!("{text}\n{}", one_line(&value.text)));
    let position = |value: &HoverValue| {
        format!("{}:{}:{}", value.key, value.series, value.y.map_or(String::new(), short))
    };
    let positions: Vec<String> = values.iter().map(position).collect();
    format!(r#" data-t="{}" data-k="{}""#, escape(&text), positions.join(" "))
}

fn one_line(text: &str) -> String {
    text.replace('\n', " ")
}

fn color(ink: Ink) -> String {
    match ink {
        Ink::Text => "var(--ink)".to_string(),
        Ink::Muted => "var(--muted)".to_string(),
        Ink::Grid => "var(--grid)".to_string(),
        Ink::Series(idx) => format!("var(--s{})", idx % super::SERIES.len()),
        Ink::Faint(idx) => {
            format!(
                "color-mix(in srgb, var(--s{}) {}%, var(--sheet))",
                idx % super::SERIES.len(),
                (100.0 * FAINT).round()
            )
        }
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
