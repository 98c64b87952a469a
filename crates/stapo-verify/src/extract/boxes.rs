//! Boxes: the last one, those that make one list with it, and the words around it that deny it or name another answer.

use super::statement::is_negation;
use super::{closing_brace, sentence};
use crate::text::last_of;

/// Most boxes that are joined.
const MAX_BOXES: usize = 16;
/// Longest text between two boxes of one list.
const MAX_GAP_BYTES: usize = 80;
/// How much of the end of a response is searched for boxes that belong together.
const MAX_TAIL_BYTES: usize = 4_000;
/// Longest alternative after a box.
const MAX_ALTERNATIVE_BYTES: usize = 60;

/// The boxes at the end of a response that are next to each other, as one list: `\boxed{1}` and `\boxed{2}`. Between them are
/// only separators, names with an equals sign, or numbers of parts such as `(2)`; `None` if the last box is alone.
pub(crate) fn joined_boxes(text: &str) -> Option<String> {
    // The box before ends right before the last one.
    let last = last_of(text, "\\boxed{")?;
    text.as_bytes()[last.saturating_sub(MAX_GAP_BYTES)..last].iter().rfind(|b| **b == b'}')?;
    let start = text.len().saturating_sub(MAX_TAIL_BYTES);
    let start = (start..text.len()).find(|at| text.is_char_boundary(*at))?;
    let mut rest = &text[start..];
    let mut boxes: Vec<&str> = Vec::new();
    while let Some(at) = rest.find("\\boxed{") {
        if !is_list_gap(&rest[..at]) {
            boxes.clear();
        }
        let inside = &rest[at + "\\boxed{".len()..];
        let end = closing_brace(inside)?;
        boxes.push(&inside[..end]);
        rest = &inside[end + 1..];
    }
    (2..=MAX_BOXES).contains(&boxes.len()).then(|| boxes.join(", "))
}

/// Whether the text between two boxes only separates the elements of a list. A line ends the list, unless the next line
/// is a numbered part.
fn is_list_gap(gap: &str) -> bool {
    const MARKS: [&str; 22] = [
        "$", ",", ";", "\\(", "\\)", "\\[", "\\]", "\\quad", "\\qquad", "\\,", "\\;", "\\ ", "*", "and",
        "or", "和", "或", "且", "与", "、", "，", "；",
    ];
    if gap.len() >= MAX_GAP_BYTES {
        return false;
    }
    let mut rest = gap.trim_matches([' ', '\t']);
    let mut is_numbered = false;
    let mut n_lines = 0;
    while !rest.is_empty() {
        let shorter = if let Some(behind) = part_number(rest) {
            is_numbered = true;
            behind
        } else if let Some((words, behind)) =
            rest.strip_prefix("\\text{").and_then(|rest| rest.split_once('}'))
        {
            // `\text{and}`, `\text{ for part (a) and }`
            if !matches!(words.trim().rsplit(' ').next(), Some("and" | "or" | "")) {
                return false;
            }
            behind
        } else if let Some(behind) = rest.strip_prefix('\n') {
            n_lines += 1;
            behind
        } else if let Some(mark) = MARKS.iter().rev().find(|mark| rest.starts_with(*mark)) {
            &rest[mark.len()..]
        } else if let Some((_, value)) = rest.split_once('=').filter(|(name, _)| is_name(name)) {
            value
        } else {
            return false;
        };
        rest = shorter.trim_start_matches([' ', '\t', '\r', '.']);
    }
    n_lines == 0 || is_numbered
}

/// What is after the number of a part: `(2)`, `2)`, `（2）`.
fn part_number(text: &str) -> Option<&str> {
    let inside = text.strip_prefix(['(', '（']).unwrap_or(text);
    let behind = inside.trim_start_matches(|c: char| c.is_ascii_digit());
    let n_digits = inside.len() - behind.len();
    behind.strip_prefix([')', '）']).filter(|_| (1..=2).contains(&n_digits))
}

/// A short name such as `x`, `y_1` or `AB`.
fn is_name(text: &str) -> bool {
    let text = text.trim().trim_start_matches(['$', '\\']);
    (1..=6).contains(&text.len())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '{' | '}'))
}

/// Whether the word before a box, whose content is `inside`, denies it: "The answer is not \boxed{5}."
pub(super) fn is_box_denied(text: &str, inside: &str) -> bool {
    let Some((before, _)) = around_box(text, inside) else { return false };
    let before = before.trim_end_matches(['$', ' ', '*', '(', '\\', '[', '{', '\n', ':']);
    if ["不是", "并非", "不为", "不等于"].iter().any(|word| before.ends_with(word)) {
        return true;
    }
    let word = before.rsplit(|c: char| c.is_whitespace() || matches!(c, '$' | ',')).next().unwrap_or("");
    is_negation(&word.to_lowercase().replace('’', "'"))
}

/// What the sentence of a box, whose content is `inside`, names next to it as another answer: 8 in "either \boxed{6} or 8".
pub(crate) fn alternative<'a>(text: &'a str, inside: &str) -> Option<&'a str> {
    let (before, behind) = around_box(text, inside)?;
    let behind = behind.trim_start_matches(['$', ' ', '*', ')', '\\', ']']);
    let after = ["or ", "OR ", "或"].iter().find_map(|word| behind.strip_prefix(word));
    if let Some(other) = after.map(|rest| sentence(rest).trim()) {
        let is_value = other.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '$' | '\\' | '-'));
        return Some(other).filter(|other| is_value && other.len() <= MAX_ALTERNATIVE_BYTES);
    }
    // "either 6 or \boxed{8}"
    let head = before.trim_end_matches(['$', ' ', '*', '(', '\\']).strip_suffix(" or")?;
    let is_value = last_word(head).trim_start_matches(['$', '-']).starts_with(|c: char| c.is_ascii_digit());
    Some(last_formula(head)).filter(|other| is_value && other.len() <= MAX_ALTERNATIVE_BYTES)
}

/// The last word of a text, with the operands before it that operators join to it: `8 + 3,` in "so 8 + 3,".
fn last_formula(text: &str) -> &str {
    const OPERATORS: [&str; 7] = ["+", "-", "*", "/", "\\cdot", "\\times", "\\div"];
    let is_operand = |word: &str| {
        word.len() == 1
            || word.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '$' | '\\' | '(' | '-'))
    };
    let mut start = text.len() - last_word(text).len();
    while text.len() - start <= MAX_ALTERNATIVE_BYTES {
        let before = text[..start].trim_end();
        let is_continued = OPERATORS.iter().any(|mark| text[start..].starts_with(mark));
        let head = OPERATORS.iter().find_map(|mark| before.strip_suffix(mark)).map(str::trim_end);
        let Some(head) = head.or(is_continued.then_some(before)).filter(|head| is_operand(last_word(head)))
        else {
            break;
        };
        start = head.len() - last_word(head).len();
    }
    &text[start..]
}

fn last_word(text: &str) -> &str {
    text.rsplit(char::is_whitespace).next().unwrap_or("")
}

/// The text before a box and after it, where `inside`, a part of `text`, is what the box holds.
fn around_box<'a>(text: &'a str, inside: &str) -> Option<(&'a str, &'a str)> {
    let start = (inside.as_ptr() as usize).checked_sub(text.as_ptr() as usize)?;
    let before = text.get(..start)?;
    let mark = before.rfind('\\')?;
    let behind = &text[start + inside.len()..];
    Some((&before[..mark], behind.strip_prefix('}').unwrap_or(behind)))
}
