//! Removes the wrapping around an answer: boxes, dollar signs, bold stars, full stops, "the answer is".

/// `text` without its wrapping.
pub(crate) fn cleaned(text: &str) -> &str {
    let mut rest = text.trim();
    for _ in 0..16 {
        let before = rest;
        rest = unwrapped(rest).trim();
        if rest.len() == before.len() {
            break;
        }
    }
    rest
}

fn unwrapped(text: &str) -> &str {
    if let Some(inside) = in_box(text) {
        return inside;
    }
    for (open, close) in
        [("**", "**"), ("$$", "$$"), ("\\(", "\\)"), ("\\[", "\\]"), ("`", "`"), ("\"", "\"")]
    {
        if let Some(inside) = text.strip_prefix(open).and_then(|t| t.strip_suffix(close)) {
            return inside;
        }
    }
    if let Some(inside) = text.strip_prefix('$').and_then(|t| t.strip_suffix('$'))
        && !inside.ends_with('\\')
        && !inside.contains('$')
    {
        return inside;
    }
    if let Some(rest) = text.strip_prefix("**").or_else(|| text.strip_suffix("**")) {
        return rest;
    }
    if let Some(rest) = text.strip_suffix(['.', '。'])
        && !rest.ends_with(['.', '\\'])
        && !rest.ends_with("\\right")
    {
        return rest;
    }
    for ending in [",", ";", "\\\\", "\\,", "\\!", "\\;", "!\\", "?"] {
        if let Some(rest) = text.strip_suffix(ending) {
            return rest;
        }
    }
    for start in
        ["\\displaystyle", "\\approx", "≈", "=", ":", "\\therefore", "∴", "\\Rightarrow", "\\implies"]
    {
        if let Some(rest) = text.strip_prefix(start)
            && !(start.ends_with(|c: char| c.is_alphabetic())
                && rest.starts_with(|c: char| c.is_ascii_alphabetic()))
        {
            return rest;
        }
    }
    for start in ["\\text{Answer: }", "\\text{Answer:}", "\\textbf{Answer: }", "\\textbf{Answer:}"] {
        if let Some(rest) = text.strip_prefix(start) {
            return rest;
        }
    }
    for start in [
        "the final answer is",
        "the answer is",
        "final answer:",
        "answer:",
        "answer is",
        "approximately",
        "about",
    ] {
        if text.get(..start.len()).is_some_and(|head| head.eq_ignore_ascii_case(start))
            && !text[start.len()..].starts_with(|c: char| c.is_ascii_alphabetic())
        {
            return &text[start.len()..];
        }
    }
    text
}

/// The content of a box, where the box is the whole text.
fn in_box(text: &str) -> Option<&str> {
    let inside = text.strip_prefix("\\boxed{").or_else(|| text.strip_prefix("\\fbox{"))?;
    let end = crate::extract::closing_brace(inside)?;
    (end + 1 == inside.len()).then(|| &inside[..end])
}
