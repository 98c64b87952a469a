//! Multiple choice: the letters of the answer are those of the reference.

use super::plain;
use crate::lex::symbols::narrow;
use crate::{Graded, Verdict, show, text};
use std::collections::BTreeSet;

pub(super) fn grade(answer: &str, reference: &str) -> Graded {
    let Some(expected) = letters(reference) else {
        let reason =
            format!("the reference {} is no multiple-choice letter", show::shortened(reference.trim()));
        return plain(Verdict::Unparsable, Some(answer), reference, reason);
    };
    let Some(found) = letters(answer) else {
        let reason = "the answer holds no multiple-choice letter".into();
        return plain(Verdict::Unparsable, Some(answer), reference, reason);
    };
    let is_right = found == expected;
    let show = |letters: &BTreeSet<char>| letters.iter().map(char::to_string).collect::<Vec<_>>().join(", ");
    let (ours, wanted) = (show(&found), show(&expected));
    Graded {
        verdict: if is_right { Verdict::Right } else { Verdict::Wrong },
        extracted: Some(answer.to_owned()),
        reason: if is_right { format!("choice {ours}") } else { format!("choice {ours} is not {wanted}") },
        answer: Some(ours),
        reference: wanted,
    }
}

/// The letters that a text names: `B`, `(b)`, `B. twelve`, `option B`, `A and C`, `AC`.
fn letters(text: &str) -> Option<BTreeSet<char>> {
    // Turning the text into words drops the punctuation after a letter, so a marked letter is looked for first.
    let shown: String = text.chars().filter(|c| !matches!(c, '$' | '*' | '{' | '}')).map(narrow).collect();
    let shown = formatting_removed(&shown);
    let shown = shown.trim().trim_end_matches('.').trim();
    let rest = [
        "the correct option is",
        "the correct answer is",
        "correct answer:",
        "option",
        "choice",
        "answer:",
        "answer",
    ]
    .iter()
    .find_map(|word| {
        let head = shown.get(..word.len())?;
        head.eq_ignore_ascii_case(word).then(|| shown[word.len()..].trim_start_matches([' ', ':']))
    })
    .unwrap_or(shown);
    if let Some(letter) = marked_letter(rest) {
        return Some(BTreeSet::from([letter]));
    }
    if let Some(letters) = letter_run(rest) {
        return Some(letters);
    }
    let parts: Vec<&str> = rest
        .split(|c: char| c.is_whitespace() || matches!(c, '(' | ')' | ',' | ';'))
        .filter(|word| !word.is_empty() && !matches!(*word, "and" | "or"))
        .collect();
    let all: Option<BTreeSet<char>> = parts.iter().map(|word| single_letter(word)).collect();
    all.filter(|letters| !letters.is_empty() && parts.len() <= 10)
}

/// The letters of a text that is nothing but different capital letters from A to J: `AC`, `(AC)`.
fn letter_run(text: &str) -> Option<BTreeSet<char>> {
    let text = text.trim();
    let run = text.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')).unwrap_or(text).trim();
    let letters: BTreeSet<char> = run.chars().filter(|c| ('A'..='J').contains(c)).collect();
    (run.len() > 1 && letters.len() == run.len()).then_some(letters)
}

fn formatting_removed(text: &str) -> String {
    let mut rest = text.to_owned();
    for name in [
        "\\textbf", "\\text", "\\mathrm", "\\mathbf", "\\boxed", "\\left", "\\right", "\\quad", "\\ ", "\\,",
        "~",
    ] {
        rest = rest.replace(name, " ");
    }
    rest
}

/// A letter in brackets, or a letter before a bracket, full stop or colon.
fn marked_letter(text: &str) -> Option<char> {
    let inner = text.trim_start();
    let (open, inner) = match inner.strip_prefix(['(', '[']) {
        Some(rest) => (true, rest.trim_start()),
        None => (false, inner),
    };
    let mut chars = inner.chars();
    let letter = single_letter(&chars.next()?.to_string())?;
    let behind = chars.as_str().trim_start();
    let is_alone = behind.is_empty() && !open;
    let is_marked = behind.starts_with([')', ']']) || (!open && chars.as_str().starts_with(['.', ':']));
    // "(A) and (C)" names two letters.
    let after_mark = behind.trim_start_matches([')', ']', '.', ':']);
    let names_more = text::plain(after_mark).split_whitespace().next().is_some_and(|word| {
        matches!(word, "and" | "or")
            || (word.starts_with('(') && single_letter(word.trim_matches(['(', ')'])).is_some())
    });
    // "(A) 5 or (B) 6" hedges between two letters.
    let names_more =
        names_more || after_mark.split_whitespace().any(is_bracketed_letter) || names_option(after_mark);
    ((is_alone || is_marked) && !names_more).then_some(letter)
}

/// Whether a text continues with options, or ends with a letter: `5 B. 6`, "The answer could be B".
fn names_option(text: &str) -> bool {
    let is_capital = |word: &str| matches!(word.as_bytes(), [b'A'..=b'J']);
    let mut words = text.split_whitespace().skip(1).peekable();
    while let Some(word) = words.next() {
        let is_marked = word.strip_suffix(['.', ')', ':']).is_some_and(is_capital);
        if (is_marked && words.peek().is_some()) || (words.peek().is_none() && is_capital(word)) {
            return true;
        }
    }
    false
}

/// Whether a word is a letter in brackets: `(B)`.
fn is_bracketed_letter(word: &str) -> bool {
    let inside =
        word.strip_prefix('(').and_then(|rest| rest.trim_end_matches([',', ';', '.']).strip_suffix(')'));
    inside.and_then(single_letter).is_some()
}

fn single_letter(word: &str) -> Option<char> {
    let mut chars = word.chars();
    match (chars.next(), chars.next()) {
        (Some(c), None) if c.is_ascii_alphabetic() => {
            Some(c.to_ascii_uppercase()).filter(|c| ('A'..='J').contains(c))
        }
        _ => None,
    }
}
