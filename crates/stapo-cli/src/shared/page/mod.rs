//! The shell of self-contained pages: nothing is fetched, nothing from a run is ever markup or script.

use crate::shared::chart::{Figure, SERIES, to_svg};
use serde::Serialize;
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

/// The button that goes through light, dark and what the system says.
pub const THEME_BUTTON: &str =
    r#"<button id="theme" type="button" title="light, dark, or as the system">theme: system</button>"#;

fn series_colors() -> String {
    let mut css = String::from(":root{");
    for (idx, (light, dark)) in SERIES.iter().enumerate() {
        let _ = write!(css, "--s{idx}:light-dark({light},{dark});");
    }
    css + "}\n"
}

/// Text as it may stand between tags and in quoted attributes. Characters that HTML cannot hold become pictures of themselves.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(printable(c)),
        }
    }
    out
}

/// Control characters as their pictures, line breaks and tabs aside.
fn printable(c: char) -> char {
    match c {
        '\n' | '\t' => c,
        '\u{0}'..='\u{1f}' => char::from_u32(0x2400 + c as u32).unwrap_or('\u{fffd}'),
        '\u{7f}' => '\u{2421}',
        '\u{80}'..='\u{9f}' => '\u{fffd}',
        c => c,
    }
}

/// A token as people can see it: spaces and line breaks have a sign.
pub fn visible(token: &str) -> String {
    if token.is_empty() {
        return "∅".to_string();
    }
    let sign = |c: char| match c {
        ' ' => '␣',
        '\n' => '⏎',
        '\t' => '⇥',
        c => printable(c),
    };
    token.chars().map(sign).collect()
}

/// A value as JSON that may stand inside a script element: no `<`, so nothing can close it, and no separators that old readers
/// take for line ends.
pub fn script_json(value: &impl Serialize) -> String {
    let json = serde_json::to_string(value).expect("pages hold only what JSON can");
    json.replace('<', "\\u003c").replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_from_a_run_can_leave_its_place() {
        assert_eq!(escape("</script>&\"'"), "&lt;/script&gt;&amp;&quot;&#39;");
        assert_eq!(escape("a\u{1b}[31m\u{0}\n"), "a␛[31m␀\n");
        let json = script_json(&"</script><!-- \u{2028}");
        assert_eq!(json, "\"\\u003c/script>\\u003c!-- \\u2028\"");
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), "</script><!-- \u{2028}");
    }

    #[test]
    fn blanks_of_a_token_are_seen() {
        assert_eq!((visible(" 2\n"), visible("")), ("␣2⏎".to_string(), "∅".to_string()));
    }
}
