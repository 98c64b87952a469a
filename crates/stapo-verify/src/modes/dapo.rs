//! Text normalisation of the DAPO training rule: units, spaces and formatting are removed, fractions and roots written
//! in full.

/// Texts that are removed everywhere.
const DROPPED: [&str; 42] = [
    "square",
    "ways",
    "integers",
    "dollars",
    "mph",
    "inches",
    "ft",
    "hours",
    "km",
    "units",
    "\\ldots",
    "sue",
    "points",
    "feet",
    "minutes",
    "digits",
    "cents",
    "degrees",
    "cm",
    "gm",
    "pounds",
    "meters",
    "meals",
    "edges",
    "students",
    "childrentickets",
    "multiples",
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    "\"",
    "\\dots",
];

/// The normal form of an answer.
pub(super) fn normal(answer: &str) -> String {
    let mut text = answer.rsplit('=').next().unwrap_or("").to_owned();
    for (from, to) in [
        ("an ", ""),
        ("a ", ""),
        (".$", "$"),
        ("\\$", ""),
        ("\\ ", ""),
        (" ", ""),
        ("mbox", "text"),
        (",\\text{and}", ","),
        ("\\text{and}", ","),
        ("\\text{m}", "\\text{}"),
    ] {
        text = text.replace(from, to);
    }
    for word in DROPPED {
        text = text.replace(word, "");
    }
    text = inside_dollars(&text);
    for name in ["\\text{", "\\textbf{", "\\overline{", "\\boxed{"] {
        text = unwrapped(&text, name);
    }
    text = full_arguments(&full_arguments(&text, "frac", 2), "sqrt", 1).replace('$', "");
    if text.replace(',', "").bytes().all(|b| b.is_ascii_digit()) {
        text = text.replace(',', "");
    }
    text.trim().to_owned()
}

/// The first formula of a text that has one between dollar signs, else the text.
fn inside_dollars(text: &str) -> String {
    let mut parts = text.splitn(3, '$');
    match (parts.next(), parts.next(), parts.next()) {
        (Some(_), Some(inside), Some(_)) => format!("${inside}$"),
        _ => text.to_owned(),
    }
}

/// `text` with every `name…}` replaced by its content, up to the next closing brace.
fn unwrapped(text: &str, name: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(name) {
        let inside = &rest[at + name.len()..];
        let Some(end) = inside.find('}') else { break };
        out.push_str(&rest[..at]);
        out.push_str(&inside[..end]);
        rest = &inside[end + 1..];
    }
    out.push_str(rest);
    out
}

/// `\frac12` as `\frac{1}{2}`, `\sqrt2` as `\sqrt{2}`.
fn full_arguments(text: &str, name: &str, n_args: usize) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(name) {
        let end = at + name.len();
        out.push_str(&rest[..end]);
        rest = &rest[end..];
        let bare: Vec<char> = rest.chars().take(n_args).collect();
        if bare.len() == n_args && bare.iter().all(char::is_ascii_alphanumeric) {
            for c in &bare {
                out.push('{');
                out.push(*c);
                out.push('}');
            }
            rest = &rest[n_args..];
        }
    }
    out.push_str(rest);
    out
}
