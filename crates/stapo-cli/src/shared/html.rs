//! Texts of a run inside a page: escaped for HTML and for scripts, and with every character visible.

use serde::Serialize;

/// Text escaped for use between tags and in quoted attributes. Control characters, which HTML cannot hold, become their
/// Unicode control pictures.
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

/// The Unicode control picture of a control character; line breaks, tabs and all other characters stay.
fn printable(c: char) -> char {
    match c {
        '\n' | '\t' => c,
        '\u{0}'..='\u{1f}' => char::from_u32(0x2400 + c as u32).unwrap_or('\u{fffd}'),
        '\u{7f}' => '\u{2421}',
        '\u{80}'..='\u{9f}' => '\u{fffd}',
        c => c,
    }
}

/// A token with visible signs for spaces, line breaks and tabs; `∅` for the empty token.
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

/// A value as JSON for a script element: `<` is escaped, so that no text can close the element, and so are U+2028 and
/// U+2029, which older JavaScript engines read as line ends.
pub fn script_json(value: &impl Serialize) -> String {
    let json = serde_json::to_string(value).expect("pages hold only what JSON can");
    json.replace('<', "\\u003c").replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029")
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
