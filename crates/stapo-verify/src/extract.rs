//! Finds the answer in a response.

mod boxes;
mod statement;

pub(crate) use boxes::{alternative, joined_boxes};

use crate::text::last_of;
use boxes::is_box_denied;
use serde::{Deserialize, Serialize};
use statement::{goes_on, is_denied, is_retracted, reason_start, stated_in};

/// Most places of one mark that are looked at. Each costs a bounded number of steps, so extraction is bounded too.
const MAX_MARKS: usize = 1 << 16;
/// Most signs between a heading and the end of its line.
const MAX_MARKUP: usize = 16;
/// Signs that set off a heading.
const MARKUP: [char; 5] = ['*', '#', ' ', '_', '\r'];

/// Which mark of an answer is looked for first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// The last box, then an `Answer:` line, then "the answer is".
    #[default]
    BoxFirst,
    /// An `Answer:` line, then "the answer is", then the last box.
    LineFirst,
}

/// What to take when a response marks no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Fallback {
    /// Nothing: a response without a mark has no answer.
    #[default]
    Nothing,
    /// The last number of the text.
    LastNumber,
    /// The last formula between dollar signs or the like, or the last number if that comes later.
    LastFormula,
}

/// The answer a response marks, as written, or `None`. A box that is never closed is no answer, whatever came before.
pub fn extract(response: &str, order: Order, fallback: Fallback) -> Option<&str> {
    let response = turn_ended(response);
    let marked = match order {
        Order::BoxFirst => match last_box(response) {
            LastBox::Answer(answer) if is_box_denied(response, answer) => return None,
            LastBox::Answer(answer) => Some(answer),
            LastBox::Unclosed => return None,
            LastBox::Missing => stated(response),
        },
        Order::LineFirst => stated(response).or_else(|| last_box(response).answer()),
    };
    let found = marked.or_else(|| match fallback {
        Fallback::Nothing => None,
        Fallback::LastNumber => last_number(response),
        Fallback::LastFormula => last_formula(response),
    });
    found.map(str::trim).filter(|answer| !answer.is_empty())
}

/// What [`last_box`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LastBox<'a> {
    Answer(&'a str),
    /// The last box has no closing brace, or no content.
    Unclosed,
    Missing,
}

impl<'a> LastBox<'a> {
    fn answer(self) -> Option<&'a str> {
        match self {
            Self::Answer(answer) => Some(answer),
            _ => None,
        }
    }
}

/// What the last `\boxed` or `\fbox` holds.
pub(crate) fn last_box(text: &str) -> LastBox<'_> {
    let Some((mark, start)) = last_mark(text) else { return LastBox::Missing };
    let rest = text[start..].trim_start_matches([' ', '\t']);
    if let Some(inside) = rest.strip_prefix('{') {
        let Some(end) = closing_brace(inside) else { return LastBox::Unclosed };
        // A box around this one is closed after this one.
        let outer = if inside[end + 1..].contains('}') { enclosing_box(text, mark) } else { None };
        return LastBox::Answer(outer.unwrap_or(&inside[..end]));
    }
    // \boxed 5$ and \boxed5 hold one word, up to the end of the formula.
    let end = rest.find(|c: char| c.is_whitespace() || c == '$').unwrap_or(rest.len());
    if end == 0 || rest.starts_with(|c: char| c.is_ascii_alphabetic()) {
        return LastBox::Unclosed;
    }
    LastBox::Answer(&rest[..end])
}

/// Where the last `\boxed` or `\fbox` begins and ends.
fn last_mark(text: &str) -> Option<(usize, usize)> {
    text.rmatch_indices('\\').find_map(|(at, _)| {
        let name = ["\\boxed", "\\fbox"].into_iter().find(|name| text[at..].starts_with(name))?;
        Some((at, at + name.len()))
    })
}

/// What the outermost box around `at` holds, if a box of the same paragraph is open at that place and closed at all.
fn enclosing_box(text: &str, at: usize) -> Option<&str> {
    let start = last_of(&text[..at], "\n\n").unwrap_or(0);
    let before = &text[start..at];
    last_mark(before)?;
    let is_box = |head: &str| head.ends_with("\\boxed") || head.ends_with("\\fbox");
    let mut n_closed = 0usize;
    let mut found = None;
    for (i, brace) in before.rmatch_indices(['{', '}']) {
        let is_escaped = before[..i].bytes().rev().take_while(|b| *b == b'\\').count() % 2 == 1;
        match brace {
            _ if is_escaped => {}
            "}" => n_closed += 1,
            _ if n_closed > 0 => n_closed -= 1,
            _ if is_box(before[..i].trim_end_matches([' ', '\t'])) => found = Some(start + i + 1),
            _ => {}
        }
    }
    let outer = &text[found?..];
    closing_brace(outer).map(|end| &outer[..end])
}

/// Where the group that was opened before `text` ends, escaped braces not counting.
pub(crate) fn closing_brace(text: &str) -> Option<usize> {
    let mut n_open = 1usize;
    let mut is_escaped = false;
    for (i, byte) in text.bytes().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'{' => n_open += 1,
            b'}' => {
                n_open -= 1;
                if n_open == 0 {
                    return Some(i);
                }
            }
            _ => {}
        }
    }
    None
}

/// `text` without the end-of-turn tokens that a sampler may leave at its end.
fn turn_ended(text: &str) -> &str {
    const TOKENS: [&str; 8] = [
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|end_of_text|>",
        "<|end|>",
        "<end_of_turn>",
        "</s>",
        "<｜end▁of▁sentence｜>",
    ];
    let mut text = text.trim_end();
    while let Some(rest) = TOKENS.iter().find_map(|token| text.strip_suffix(token)) {
        text = rest.trim_end();
    }
    text
}

/// An answer stated in words: between answer tags, in an `Answer:` or `####` line, after "the answer is" or its
/// Chinese words.
fn stated(text: &str) -> Option<&str> {
    tagged(text)
        .or_else(|| marked_line(text))
        .or_else(|| stated_answer(text))
        .or_else(|| said_in_chinese(text))
}

/// What the last `<answer>` or `<Answer>` holds.
fn tagged(text: &str) -> Option<&str> {
    let (end, open) = match last_of(text, "</answer>") {
        Some(end) => (end, "<answer>"),
        None => (last_of(text, "</Answer>")?, "<Answer>"),
    };
    let start = last_of(&text[..end], open)? + open.len();
    Some(text[start..end].trim()).filter(|answer| !answer.is_empty())
}

/// The last answer line; a sentence in it that says what the answer is, such as "The final answer is 100. I hope it is
/// correct.", counts by what it says.
fn marked_line(text: &str) -> Option<&str> {
    let line = answer_line(text)?;
    if ends_of(line, "answer is").next().is_some() { stated_answer(line) } else { Some(stated_in(line)) }
}

/// What follows the last Chinese mark of an answer, up to the end of the sentence.
fn said_in_chinese(text: &str) -> Option<&str> {
    const MARKS: [&str; 4] = ["答案", "故选", "所以选", "正确选项"];
    if text.is_ascii() {
        return None;
    }
    let start = MARKS.iter().filter_map(|mark| text.rfind(mark).map(|at| at + mark.len())).max()?;
    let mark = MARKS.iter().find(|mark| text[..start].ends_with(*mark))?;
    let before = text[..start - mark.len()].trim_end_matches('的');
    if ["错误", "错", "不正确", "不是", "假设"].iter().any(|word| before.ends_with(word)) {
        return None;
    }
    let rest = text[start..].trim_start_matches(['是', '为', '：', ':', ' ', '*', '选', '项', '择', '】']);
    let statement = rest.split(['\n', '。', '；']).next().unwrap_or("");
    let behind = rest[statement.len()..].trim_start_matches(['\n', '。', '；', ' ']);
    if ["不对", "不是", "错", "应该是", "更正", "或者", "或"].iter().any(|word| behind.starts_with(word))
    {
        return None;
    }
    let statement = statement.trim().trim_end_matches(['．', '.']);
    (!statement.is_empty()).then_some(statement)
}

/// The text of the last `Answer:` or `####` line; where that is empty, of the next line that is not.
pub(crate) fn answer_line(text: &str) -> Option<&str> {
    let start = last_line_mark(text)?;
    let rest = &text[start..];
    let line = rest.lines().next().unwrap_or("");
    let line = line.trim().trim_start_matches('*').trim();
    // `**Answer: (B)** because`: the bold that began before the mark ends the answer.
    let line = match line.split_once("**") {
        Some((bold, rest)) if !bold.is_empty() && !rest.contains("**") => bold.trim(),
        _ => line,
    };
    if !line.is_empty() {
        return Some(line);
    }
    rest.lines().map(str::trim).find(|line| !line.is_empty() && *line != "**")
}

/// Where the text after the last mark of an answer line begins.
fn last_line_mark(text: &str) -> Option<usize> {
    let behind = |end: usize| behind_colon(text, end).or_else(|| is_heading(text, end).then_some(end));
    let found = ends_of(text, "answer").take(MAX_MARKS).find_map(behind);
    let hashes = last_of(text, "####").map(|at| at + "####".len());
    found.max(hashes)
}

/// Where the text after the colon begins that follows the word answer: `Answer:`, `Answer**:`, `Answer :`, `answer：`.
fn behind_colon(text: &str, end: usize) -> Option<usize> {
    let rest = &text[end..];
    let gap = rest.bytes().take(5).position(|b| !matches!(b, b'*' | b' ' | b'_'))?;
    let colon = rest[gap..].chars().next().filter(|c| matches!(c, ':' | '：'))?;
    Some(end + gap + colon.len_utf8())
}

/// Whether the word answer is a heading: `**Final Answer**` or `### Answer` on a separate line. A few signs around the word
/// decide, so that the search stays linear in a text of nothing but marks.
fn is_heading(text: &str, end: usize) -> bool {
    let behind = text[end..].chars().take(MAX_MARKUP).find(|c| !MARKUP.contains(c));
    if behind != Some('\n') {
        return false;
    }
    let before = text[..end - "answer".len()].trim_end_matches(MARKUP);
    before.is_empty() || before.ends_with('\n') || before.ends_with("inal") || before.ends_with("INAL")
}

/// What follows the last "answer is" or "correct option is", up to the end of the sentence.
fn stated_answer(text: &str) -> Option<&str> {
    let found = ["answer is", "correct option is", "correct choice is"]
        .into_iter()
        .find_map(|phrase| ends_of(text, phrase).next().map(|end| (end - phrase.len(), end)));
    let (_, start) = found.filter(|(phrase, _)| !is_denied(&text[..*phrase]))?;
    let rest = text[start..].trim_start().trim_start_matches(':').trim_start();
    let rest = rest.strip_prefix("**").unwrap_or(rest);
    for (open, close) in [("$$", "$$"), ("\\(", "\\)"), ("\\[", "\\]"), ("$", "$")] {
        if let Some(inside) = rest.strip_prefix(open)
            && let Some(end) = inside.find(close)
        {
            // A unit may follow the formula in the same sentence.
            let rest_of_text = &inside[end + close.len()..];
            let behind = sentence(rest_of_text);
            if is_retracted(&rest_of_text[behind.len()..]) {
                return None;
            }
            return Some(if behind.len() <= 24 || goes_on(behind) {
                &rest[..open.len() + end + close.len() + behind.len()]
            } else {
                &inside[..end]
            });
        }
    }
    let statement = sentence(rest);
    let found = statement[..reason_start(statement)].trim_end_matches(['*', ' ']);
    // A question states nothing.
    let is_stated = !found.is_empty() && !found.ends_with('?') && !is_retracted(&rest[statement.len()..]);
    is_stated.then_some(found)
}

/// `text` up to the end of its first sentence or line.
fn sentence(text: &str) -> &str {
    let line = text.split('\n').next().unwrap_or("");
    let bytes = line.as_bytes();
    let end = (0..bytes.len()).find(|&i| {
        bytes[i] == b'.' && bytes.get(i + 1).is_none_or(|next| next.is_ascii_whitespace() || *next == b'*')
    });
    &line[..end.unwrap_or(line.len())]
}

/// Where each occurrence of `phrase` (lower-case ASCII) ends, whatever its case in `text`, the last one first.
fn ends_of<'a>(text: &'a str, phrase: &'a str) -> impl Iterator<Item = usize> + 'a {
    let needle = phrase.as_bytes();
    text.as_bytes()
        .windows(needle.len().max(1))
        .enumerate()
        .rev()
        .filter(move |(_, window)| window[0] | 0x20 == needle[0] && window.eq_ignore_ascii_case(needle))
        .map(move |(at, _)| at + needle.len())
}

fn last_number(text: &str) -> Option<&str> {
    let bytes = text.as_bytes();
    let last = bytes.iter().rposition(u8::is_ascii_digit)?;
    let is_inner = |i: usize| {
        bytes[i].is_ascii_digit()
            || (matches!(bytes[i], b'.' | b',')
                && i > 0
                && bytes[i - 1].is_ascii_digit()
                && bytes.get(i + 1).is_some_and(u8::is_ascii_digit))
    };
    let mut start = last;
    while start > 0 && is_inner(start - 1) {
        start -= 1;
    }
    // A numerator or a sign in front belongs to the number.
    if start > 1 && bytes[start - 1] == b'/' && bytes[start - 2].is_ascii_digit() {
        start -= 1;
        while start > 0 && is_inner(start - 1) {
            start -= 1;
        }
    }
    let has_sign = start > 0
        && bytes[start - 1] == b'-'
        && (start == 1 || !(bytes[start - 2].is_ascii_alphanumeric() || bytes[start - 2] == b')'));
    if has_sign {
        start -= 1;
    }
    Some(&text[start..=last])
}

fn last_formula(text: &str) -> Option<&str> {
    let number = last_number(text);
    let mut formula: Option<&str> = None;
    for (open, close) in [("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")] {
        let Some(end) = text.rfind(close) else { continue };
        // The last dollar sign of $$…$$ closes both.
        if open == "$" && text[..end].ends_with('$') {
            continue;
        }
        let Some(start) = text[..end].rfind(open).map(|at| at + open.len()) else { continue };
        let inside = text[start..end].trim_matches('$');
        let is_later = formula.is_none_or(|old| old.as_ptr() < inside.as_ptr());
        if is_later && !inside.trim().is_empty() {
            formula = Some(inside);
        }
    }
    match (formula, number) {
        (Some(formula), Some(number)) => {
            let number_ends_later =
                number.as_ptr().wrapping_add(number.len()) > formula.as_ptr().wrapping_add(formula.len());
            Some(if number_ends_later { number } else { formula })
        }
        (formula, number) => formula.or(number),
    }
}
