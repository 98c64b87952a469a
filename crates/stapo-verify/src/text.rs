//! Answers as plain words.

/// Lower-case words without LaTeX, punctuation and leading articles: `\text{The Moon.}` is `moon`.
pub(crate) fn plain(text: &str) -> String {
    let mut words = String::new();
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\\' => {
                let mut name = String::new();
                while let Some(letter) = chars.peek().filter(|c| c.is_ascii_alphabetic()) {
                    name.push(*letter);
                    chars.next();
                }
                match name.as_str() {
                    "" => {
                        // An escaped brace, percent or dollar sign stands for itself; other escapes are spacing.
                        if let Some(sign) = chars.next().filter(|c| matches!(c, '{' | '}' | '%' | '$')) {
                            words.push(sign);
                        } else {
                            words.push(' ');
                        }
                    }
                    _ if is_formatting(&name) => words.push(' '),
                    _ => {
                        words.push(' ');
                        words.push_str(&name);
                        words.push(' ');
                    }
                }
            }
            '$' | '{' | '}' | '~' | '*' | '"' | '“' | '”' | '`' => words.push(' '),
            '’' | '‘' => words.push('\''),
            '−' | '–' | '—' => words.push('-'),
            '.' | ',' | ';' | ':' | '!' | '?' => {
                // Punctuation counts inside a number or a time of day, but not at the end of a word.
                let digit_after = chars.peek().is_some_and(char::is_ascii_digit);
                let digit_before = words.ends_with(|c: char| c.is_ascii_digit());
                words.push(if digit_after && (digit_before || c == '.') { c } else { ' ' });
            }
            _ => words.extend(c.to_lowercase()),
        }
    }
    let mut list: Vec<&str> = words.split_whitespace().collect();
    if list.len() > 1 && matches!(list[0], "the" | "a" | "an") {
        list.remove(0);
    }
    join_meridiem(&list.join(" "))
}

fn is_formatting(name: &str) -> bool {
    matches!(
        name,
        "text"
            | "mathrm"
            | "mathbf"
            | "textbf"
            | "textit"
            | "textrm"
            | "mbox"
            | "hbox"
            | "operatorname"
            | "left"
            | "right"
            | "quad"
            | "qquad"
            | "displaystyle"
            | "boxed"
            | "fbox"
            | "mathit"
            | "emph"
            | "textsf"
            | "textnormal"
    )
}

/// The number a word names, up to twelve.
pub(crate) fn small_number(word: &str) -> Option<i64> {
    const NAMES: [&str; 13] = [
        "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
        "twelve",
    ];
    NAMES.iter().position(|name| *name == word).map(|n| n as i64)
}

/// Whether `words` are a time of day with am or pm: `3:30 pm`.
pub(crate) fn is_time(words: &str) -> bool {
    words
        .strip_suffix(" am")
        .or_else(|| words.strip_suffix(" pm"))
        .is_some_and(|time| time.contains(':') && time.chars().all(|c| c.is_ascii_digit() || c == ':'))
}

/// Writes a time of day in one way: `3 pm`, `3:00 p m` and `3:00pm` become `3:00 pm`.
fn join_meridiem(words: &str) -> String {
    let joined = words.replace(" p m", " pm").replace(" a m", " am");
    for half in ["am", "pm"] {
        let Some(time) = joined.strip_suffix(half).map(str::trim_end) else { continue };
        let is_time = !time.is_empty() && time.chars().all(|c| c.is_ascii_digit() || c == ':');
        if is_time {
            let time = time
                .strip_prefix('0')
                .filter(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
                .unwrap_or(time);
            let minutes = if time.contains(':') { "" } else { ":00" };
            return format!("{time}{minutes} {half}");
        }
    }
    joined
}
