//! Inputs made to hang, overflow or exhaust a grader. No assertion depends on time;
//! `cargo run --release --example fuzz` measures the slowest inputs.

use stapo_verify::{Fallback, MAX_INPUT_BYTES, Mode, Order, Rules, Verdict, grade, grade_answer};

include!("hostile/inputs.rs");

#[path = "hostile/markers.rs"]
mod markers;

#[test]
fn a_megabyte_of_any_mark_gets_a_verdict() {
    for mark in markers::MARKS {
        let text = mark.repeat(MAX_INPUT_BYTES / mark.len());
        for order in [Order::BoxFirst, Order::LineFirst] {
            let rules = Rules { order, fallback: Fallback::LastFormula, ..Rules::default() };
            let graded = grade(&text, "41", rules);
            assert_ne!(graded.verdict, Verdict::Right, "{mark:?}: {}", graded.reason);
        }
    }
}

#[test]
fn hostile_answers_get_a_verdict_in_every_mode() {
    for (name, text) in hostile_inputs() {
        let mut pairs = vec![(Mode::Math, "41", text.as_str()), (Mode::Math, text.as_str(), r"\frac{x}{2}")];
        pairs.extend(Mode::ALL.map(|mode| (mode, text.as_str(), "41")));
        for (mode, answer, reference) in pairs {
            let graded = grade_answer(answer, reference, mode);
            assert!(graded.reason.len() < 2_000, "{name}: a reason of {} bytes", graded.reason.len());
            assert_ne!(graded.verdict, Verdict::Right, "{name} in mode {mode}: {}", graded.reason);
        }
    }
}

/// Extracts the answer of every hostile response in both orders. One test for each fallback: they run side by side.
fn extract_from_all(fallback: Fallback) {
    for (_, text) in hostile_inputs() {
        for order in [Order::BoxFirst, Order::LineFirst] {
            grade(&text, "5", Rules { order, fallback, ..Rules::default() });
        }
    }
}

#[test]
fn hostile_responses_are_extracted_from_without_a_fallback() {
    extract_from_all(Fallback::Nothing);
}

#[test]
fn hostile_responses_are_extracted_from_by_their_last_number() {
    extract_from_all(Fallback::LastNumber);
}

#[test]
fn hostile_responses_are_extracted_from_by_their_last_formula() {
    extract_from_all(Fallback::LastFormula);
}

#[test]
fn hostile_boxes_and_answer_lines_are_extracted_from() {
    for (_, text) in hostile_inputs() {
        grade(&format!("\\boxed{{{text}"), "5", Mode::Math);
        grade(&format!("Answer: {text}"), "5", Mode::Dapo);
    }
}

#[test]
fn every_hostile_input_equals_itself() {
    for (name, text) in hostile_inputs() {
        if !text.trim().is_empty() && text.len() <= MAX_INPUT_BYTES {
            let graded = grade_answer(&text, &text, Mode::Math);
            assert_eq!(graded.verdict, Verdict::Right, "{name}: {}", graded.reason);
        }
    }
}

#[test]
fn a_text_beyond_the_limit_is_over_budget() {
    let text = "1".repeat(MAX_INPUT_BYTES + 1);
    assert_eq!(grade(&text, "1", Mode::Math).verdict, Verdict::OverBudget);
    assert_eq!(grade_answer(&text, "1", Mode::Math).verdict, Verdict::OverBudget);
    assert_eq!(grade_answer("1", &text, Mode::Math).verdict, Verdict::OverBudget);
    let longest = format!("{}1", " ".repeat(MAX_INPUT_BYTES - 1));
    assert_eq!(grade_answer(&longest, "1", Mode::Math).verdict, Verdict::Right);
    assert_eq!(grade_answer("1", &longest, Mode::Math).verdict, Verdict::Right);
    assert_eq!(grade(&longest, "1", Mode::Exact).verdict, Verdict::Right);
    assert_eq!(grade("1", longest.as_str(), Mode::Exact).verdict, Verdict::Right);
    assert_eq!(grade("1", text.as_str(), Mode::Exact).verdict, Verdict::OverBudget);
}

#[test]
fn million_digit_numbers_are_compared_digit_by_digit() {
    let number = "7".repeat(1_000_000);
    let other = format!("{}8", "7".repeat(999_999));
    assert_eq!(grade_answer(&format!("{number}."), &number, Mode::Math).verdict, Verdict::Right);
    assert_eq!(grade_answer(&other, &number, Mode::Math).verdict, Verdict::Wrong);
}
