//! Self-contained HTML pages: a page fetches nothing, and no text of a run becomes markup or script.

use crate::shared::chart::{Figure, SERIES, to_svg};
use crate::shared::html::escape;
use std::fmt::Write;

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("page.js");

/// A whole page. `style` and `script` come after those that all pages share; `body` is markup.
pub fn page(title: &str, style: &str, body: &str, script: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">\n\
         <link rel=\"icon\" href=\"data:,\">\n\
         <title>{}</title>\n<style>\n{}{STYLE}{style}</style>\n</head>\n<body>\n{body}\n<div id=\"tip\" hidden></div>\n\
         <script>\n{SCRIPT}{script}</script>\n</body>\n</html>\n",
        escape(title),
        series_colors(),
    )
}

/// The button that cycles through the light theme, the dark theme and the system's.
pub const THEME_BUTTON: &str =
    r#"<button id="theme" type="button" title="light, dark, or as the system">theme: system</button>"#;

fn series_colors() -> String {
    let mut css = String::from(":root{");
    for (idx, (light, dark)) in SERIES.iter().enumerate() {
        let _ = write!(css, "--s{idx}:light-dark({light},{dark});");
    }
    css + "}\n"
}

/// A figure with its caption.
pub fn figure(figure: &Figure) -> String {
    format!(
        "<figure id=\"{}\"><figcaption><b>{}</b><span>{}</span></figcaption>{}</figure>",
        escape(&figure.name),
        escape(&figure.title),
        escape(&figure.note),
        to_svg(&figure.scene, &figure.title)
    )
}
