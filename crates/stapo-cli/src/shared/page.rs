//! Self-contained HTML pages: a page fetches nothing, and no text of a run becomes markup or script.

use crate::shared::chart::{Figure, SERIES, to_svg};
use crate::shared::html::escape;
use anyhow::{Result, bail};
use stapo_rl::Error;
use stapo_rl::run::disk::write_whole;
use std::fmt::Write;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

pub const STYLE: &str = include_str!("page/style.css");
pub const SCRIPT: &str = include_str!("page/page.js");

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

/// Writes a page to the place that `--out` names, else to `file` in the folder that the page is about, and returns
/// the place. A folder that cannot be written to is refused with the option that names another place.
pub fn write(output: Option<&Path>, folder: &Path, file: &str, html: &str) -> Result<PathBuf> {
    let page = output.map_or_else(|| folder.join(file), Path::to_owned);
    match write_whole(&page, html.as_bytes()) {
        Err(Error::Io { source, .. }) if output.is_none() && is_read_only(source.kind()) => bail!(
            "run folder {}: cannot be written to: {source}\nhint: name a place for the page with --out FILE",
            folder.display()
        ),
        written => Ok(written.map(|()| page)?),
    }
}

fn is_read_only(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem)
}

/// The button that cycles through the light theme, the dark theme and the system's.
pub const THEME_BUTTON: &str =
    r#"<button id="theme" type="button" title="light, dark, or as the system">theme: system</button>"#;

pub fn series_colors() -> String {
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
