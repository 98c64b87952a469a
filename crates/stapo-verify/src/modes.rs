//! The five modes: what is extracted, and what counts as equal.

mod choice;
mod dapo;
mod math;

use crate::extract::{self, LastBox, answer_line, extract, last_box};
use crate::{Form, Graded, MAX_INPUT_BYTES, Mode, Reference, Rules, Verdict, show, text};

/// Characters at the end of a response that the `JustRL` rule looks at, and those within which the box must lie.
const BOXED_EXACT_TAIL: usize = 300;
const BOXED_EXACT_BOX: usize = 100;
/// Longest text that may turn out to hold no answer at all.
const MAX_BLANK_BYTES: usize = 256;

pub(crate) fn grade(response: &str, reference: Reference, rules: Rules) -> Graded {
    if response.len() > MAX_INPUT_BYTES || reference.answer.len() > MAX_INPUT_BYTES {
        return plain(Verdict::OverBudget, None, reference.answer, "the text is longer than 1 MiB".into());
    }
    let response = spoken(response);
    let found = match rules.mode {
        Mode::Math | Mode::MultipleChoice => extract(response, rules.order, rules.fallback),
        Mode::Exact => extract(response, rules.order, rules.fallback).or(Some(response.trim())),
        Mode::Dapo => answer_line(response),
        Mode::BoxedExact => boxed_in_tail(response),
    };
    match found {
        Some(answer) if rules.mode == Mode::Math && is_in_box(response, answer) => {
            if let Some(list) = extract::joined_boxes(response) {
                return grade_answer(&list, reference, rules);
            }
            let graded = grade_answer(answer, reference, rules);
            match extract::alternative(response, answer) {
                Some(other) if graded.verdict == Verdict::Right => either(graded, other, reference, rules),
                _ => graded,
            }
        }
        Some(answer) => grade_answer(answer, reference, rules),
        None => plain(Verdict::NoAnswer, None, reference.answer, why_nothing(response, rules.mode)),
    }
}

/// Whether the answer, a part of the response, is in a box.
fn is_in_box(response: &str, answer: &str) -> bool {
    let start = (answer.as_ptr() as usize).saturating_sub(response.as_ptr() as usize);
    let before = response.get(..start).unwrap_or("").trim_end_matches([' ', '\t', '{', '\n']);
    before.ends_with("\\boxed") || before.ends_with("\\fbox")
}

/// The grading of a right answer whose sentence names another one too: right where the other has the same value, in
/// whatever form, as in "1/2 or 0.5" and "8+3, or \boxed{11}".
fn either(graded: Graded, other: &str, reference: Reference, rules: Rules) -> Graded {
    if grade_answer(other, reference, Rules { form: Form::Any, ..rules }).verdict == Verdict::Right {
        return graded;
    }
    let reason = format!("the response also names {} as the answer", show::shortened(other));
    Graded { verdict: Verdict::Wrong, reason, ..graded }
}

pub(crate) fn grade_answer(answer: &str, reference: Reference, rules: Rules) -> Graded {
    let Reference { answer: reference, problem } = reference;
    if answer.len() > MAX_INPUT_BYTES || reference.len() > MAX_INPUT_BYTES {
        return plain(Verdict::OverBudget, None, reference, "the text is longer than 1 MiB".into());
    }
    if holds_nothing(answer) {
        return plain(Verdict::NoAnswer, None, reference, "the answer is empty".into());
    }
    if holds_nothing(reference) {
        return plain(Verdict::Unparsable, Some(answer), reference, "the reference is empty".into());
    }
    match rules.mode {
        Mode::Math => math::grade(answer, Reference { answer: reference, problem }, rules),
        Mode::MultipleChoice => choice::grade(answer, reference),
        Mode::Dapo => by_text(answer, &dapo::normal(answer), reference, &dapo::normal(reference)),
        Mode::BoxedExact => by_text(answer, answer, reference, reference),
        Mode::Exact => by_text(answer, answer.trim(), reference, reference.trim()),
    }
}

/// Whether a text is only white space, formatting and punctuation.
fn holds_nothing(text: &str) -> bool {
    // A long text of nothing but formatting is not worth the walk; a short one is looked at in full.
    let text = text.trim();
    if text.len() > MAX_BLANK_BYTES || text.bytes().any(|b| b.is_ascii_digit()) {
        return false;
    }
    let mut kept = text::unspaced(text);
    // `{}` alone is the empty set.
    if text.contains('\\') {
        while kept.contains("{}") {
            kept = kept.replace("{}", "");
        }
    }
    kept.chars().all(|c| matches!(c, '.' | ',' | ';' | ':' | '?' | '*' | '。'))
}

/// What a response says outside its reasoning: the text after the last `</think>`, up to a `<think>` that is never closed.
fn spoken(response: &str) -> &str {
    let said = text::last_of(response, "</think>").map_or(response, |at| &response[at + "</think>".len()..]);
    let is_open = |at: &usize| said[*at..].starts_with("<think>");
    said.match_indices('<').map(|(at, _)| at).find(is_open).map_or(said, |at| &said[..at])
}

/// The last box within the last 100 of the last 300 characters.
fn boxed_in_tail(response: &str) -> Option<&str> {
    let tail = last_chars(last_chars(response, BOXED_EXACT_TAIL), BOXED_EXACT_BOX);
    let inside = &tail[tail.rfind("\\boxed{")? + "\\boxed{".len()..];
    extract::closing_brace(inside).map(|end| &inside[..end])
}

fn last_chars(text: &str, n: usize) -> &str {
    let start = text.char_indices().rev().nth(n.saturating_sub(1)).map_or(0, |(at, _)| at);
    &text[start..]
}

fn why_nothing(response: &str, mode: Mode) -> String {
    match (mode, last_box(response)) {
        (Mode::Dapo, _) => "the response has no line with \"Answer:\"".into(),
        (Mode::BoxedExact, LastBox::Answer(_)) => {
            "the last box does not fit into the last 100 characters".into()
        }
        (_, LastBox::Unclosed) => "the last \\boxed is never closed".into(),
        (Mode::BoxedExact, LastBox::Missing) => "the response has no \\boxed{}".into(),
        _ => "the response marks no answer: no \\boxed{}, no \"Answer:\" line, no \"the answer is\"".into(),
    }
}

fn by_text(answer: &str, normal: &str, reference: &str, expected: &str) -> Graded {
    let is_right = normal == expected;
    let shown = show::shortened(normal);
    let wanted = show::shortened(expected);
    Graded {
        verdict: if is_right { Verdict::Right } else { Verdict::Wrong },
        reason: if is_right {
            format!("the text {shown} is the reference")
        } else {
            format!("the text {shown} is not {wanted}")
        },
        extracted: Some(answer.to_owned()),
        answer: Some(shown),
        reference: if reference.is_empty() { String::new() } else { wanted },
    }
}

/// A grading without canonical forms.
fn plain(verdict: Verdict, extracted: Option<&str>, reference: &str, reason: String) -> Graded {
    Graded {
        verdict,
        extracted: extracted.map(str::to_owned),
        answer: None,
        reference: show::shortened(reference.trim()),
        reason,
    }
}
