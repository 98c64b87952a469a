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
            // A factorial is no exclamation.
            '!' if words.ends_with(|c: char| c.is_ascii_digit() || matches!(c, ')' | ']'))
                || is_single_letter(&words) =>
            {
                words.push(c);
            }
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

/// Whether the last word is one letter.
fn is_single_letter(words: &str) -> bool {
    let mut last = words.chars().rev();
    last.next().is_some_and(char::is_alphabetic) && last.next().is_none_or(|c| !c.is_alphanumeric())
}

/// `text` without white space and formatting; every other sign stays. Braces around one sign are left out, and the
/// styles of a fraction are one: `\dfrac{1}{2}` is `\frac12`.
pub(crate) fn unspaced(text: &str) -> String {
    let mut kept = String::new();
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '\\' {
            if !c.is_whitespace() && !matches!(c, '$' | '~') {
                kept.push(c);
            }
            close_single(&mut kept);
            continue;
        }
        let mut name = String::new();
        while let Some(letter) = chars.peek().filter(|c| c.is_ascii_alphabetic()) {
            name.push(*letter);
            chars.next();
        }
        match name.as_str() {
            "" => match chars.next() {
                Some(',' | ';' | ':' | '!' | ' ' | '(' | ')' | '[' | ']') | None => {}
                Some(sign) => kept.extend(['\\', sign]),
            },
            "dfrac" | "tfrac" | "cfrac" => kept.push_str("\\frac"),
            "ldots" | "cdots" | "dotsc" | "dotsb" => kept.push_str("\\dots"),
            _ if is_formatting(&name) => {}
            _ => {
                kept.push('\\');
                kept.push_str(&name);
                // The end of a macro's name is kept where a letter follows: `\sin x` is not `\sinx`.
                if chars.clone().find(|c| !c.is_whitespace()).is_some_and(char::is_alphabetic) {
                    kept.push(' ');
                }
            }
        }
    }
    kept
}

/// Removes the braces of a group of one sign that has just been closed.
fn close_single(text: &mut String) {
    let mut last = text.chars().rev();
    if last.next() != Some('}') {
        return;
    }
    let Some(sign) = last.next().filter(|c| !matches!(c, '{' | '}' | '\\')) else { return };
    let is_group = last.next() == Some('{') && last.next() != Some('\\');
    if is_group {
        text.truncate(text.len() - sign.len_utf8() - 2);
        // A letter is kept apart from the name of a macro: `\vec{a}` is `\vec a`.
        let before = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        if before.len() < text.len() && before.ends_with('\\') && sign.is_alphabetic() {
            text.push(' ');
        }
        text.push(sign);
    }
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

/// Where the last `needle` begins. Only the places of its first character are compared, so a needle that begins with a rare
/// sign is found fast.
pub(crate) fn last_of(text: &str, needle: &str) -> Option<usize> {
    let first = needle.chars().next()?;
    text.rmatch_indices(first).map(|(at, _)| at).find(|at| text[*at..].starts_with(needle))
}

/// The number that words name, up to ninety-nine: `twenty-five`.
pub(crate) fn small_number(words: &str) -> Option<i64> {
    const NAMES: [&str; 20] = [
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
        "eighteen",
        "nineteen",
    ];
    const TENS: [&str; 8] = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"];
    let small = |word: &str| NAMES.iter().position(|name| *name == word).map(|n| n as i64);
    let tens = |word: &str| TENS.iter().position(|name| *name == word).map(|n| 10 * (n as i64 + 2));
    match words.split_once(['-', ' ']) {
        Some((ten, one)) => Some(tens(ten)? + small(one).filter(|n| (1..10).contains(n))?),
        None => small(words).or_else(|| tens(words)),
    }
}

/// The number that words name, below a million: `two thousand`, `one hundred and five`.
pub(crate) fn spelled_number(words: &str) -> Option<i64> {
    let below_thousand = |words: &str| match words.split_once("hundred") {
        Some((hundreds, rest)) => {
            let hundreds = small_number(hundreds.trim()).filter(|n| (1..10).contains(n))?;
            let rest = rest.trim();
            let rest = rest.strip_prefix("and ").unwrap_or(rest);
            let rest = if rest.is_empty() { 0 } else { small_number(rest).filter(|n| *n > 0)? };
            Some(100 * hundreds + rest)
        }
        None => small_number(words),
    };
    match words.split_once("thousand") {
        Some((thousands, rest)) => {
            let thousands = below_thousand(thousands.trim()).filter(|n| *n > 0)?;
            let rest = rest.trim();
            let rest = rest.strip_prefix("and ").unwrap_or(rest);
            let rest = if rest.is_empty() { 0 } else { below_thousand(rest).filter(|n| *n > 0)? };
            Some(1000 * thousands + rest)
        }
        None => below_thousand(words),
    }
}

/// Whether `words` are a time of day with am or pm: `3:30 pm`.
pub(crate) fn is_time(words: &str) -> bool {
    words
        .strip_suffix(" am")
        .or_else(|| words.strip_suffix(" pm"))
        .is_some_and(|time| time.contains(':') && time.chars().all(|c| c.is_ascii_digit() || c == ':'))
}

/// A date in digits, such as `2024-01-05` or `1/5/2024`, without leading zeros; `None` for other words.
pub(crate) fn date(words: &str) -> Option<String> {
    if !(8..=10).contains(&words.len()) {
        return None;
    }
    let sign = words.chars().find(|c| !c.is_ascii_digit()).filter(|c| matches!(c, '-' | '/'))?;
    let parts: Vec<&str> = words.split(sign).collect();
    let numbers: Vec<u32> = parts.iter().map(|part| part.parse().ok()).collect::<Option<_>>()?;
    let is_year = |i: usize| parts[i].len() == 4 && (1000..3000).contains(&numbers[i]);
    let is_day = |i: usize| (1..=31).contains(&numbers[i]);
    let is_date = match parts.as_slice() {
        [_, month, day] if is_year(0) => month.len() == 2 && day.len() == 2 && is_day(1) && is_day(2),
        [_, _, _] => is_year(2) && is_day(0) && is_day(1),
        _ => false,
    };
    is_date.then(|| numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(&sign.to_string()))
}

/// A date with the name of its month, without a year, in one way: `March 5th`, `5 March` and `the 5th of March`.
pub(crate) fn named_date(words: &str) -> Option<String> {
    const MONTHS: [&str; 12] = [
        "january",
        "february",
        "march",
        "april",
        "may",
        "june",
        "july",
        "august",
        "september",
        "october",
        "november",
        "december",
    ];
    let parts: Vec<&str> = words.split(' ').filter(|word| *word != "of").collect();
    let (month, day) = match parts.as_slice() {
        [a, b] if MONTHS.contains(a) => (a, b),
        [a, b] if MONTHS.contains(b) => (b, a),
        _ => return None,
    };
    let digits = day.trim_end_matches(|c: char| c.is_ascii_lowercase());
    let is_day = ["", "st", "nd", "rd", "th"].contains(&&day[digits.len()..]);
    let day: u32 = digits.parse().ok().filter(|day| is_day && (1..=31).contains(day))?;
    Some(format!("{month} {day}"))
}

/// The fraction that Chinese words name: 三分之一 is a third.
pub(crate) fn chinese_fraction(words: &str) -> Option<dashu_ratio::RBig> {
    let (denominator, numerator) = words.split_once("分之")?;
    let (numerator, denominator) = (chinese_number(numerator)?, chinese_number(denominator)?);
    (denominator > 0).then(|| dashu_ratio::RBig::from_parts(numerator.into(), denominator.into()))
}

/// A number below a hundred in Chinese: 七, 十二, 三十五.
fn chinese_number(words: &str) -> Option<u32> {
    const DIGITS: [&str; 10] = ["零", "一", "二", "三", "四", "五", "六", "七", "八", "九"];
    let digit = |text: &str| DIGITS.iter().position(|digit| *digit == text).map(|n| n as u32);
    if words == "百" || words == "一百" {
        return Some(100);
    }
    match words.split_once('十') {
        Some((tens, ones)) => {
            let tens = if tens.is_empty() { 1 } else { digit(tens)? };
            Some(10 * tens + if ones.is_empty() { 0 } else { digit(ones)? })
        }
        None => digit(words),
    }
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
