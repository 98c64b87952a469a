//! Verdicts, canonical forms and reasons by mode.

use stapo_verify::{Form, Mode, Reference, Rounding, Rules, Verdict, grade, grade_answer};

#[test]
fn reasons_say_what_a_person_needs() {
    for (answer, reference, reason) in [
        ("0.33", "1/3", "0.33 and 1/3 differ: 0.33 is exactly 33/100"),
        ("1/3", "0.33", "1/3 and 0.33 differ: 0.33 is exactly 33/100"),
        (r"\sqrt{8}", r"2\sqrt2", "both are exactly 2*sqrt(2)"),
        ("0.333333", "1/3", "0.333333 agrees with 1/3 to 6 decimals"),
        ("5 cm", r"5\text{ m}\cdot s", "5 cm is not 5 m s: the units differ"),
        (r"\frac{1", "5", "the answer cannot be read: a bracket that is never closed"),
        ("9^{9^{9^9}}", "5", "gave up: a power grows past 20,000 digits"),
    ] {
        let graded = grade_answer(answer, reference, Mode::Math);
        assert_eq!(graded.reason, reason, "{answer} against {reference}");
    }
}

#[test]
fn canonical_forms_are_the_same_for_equal_answers() {
    for (answer, reference, form) in [
        ("3.5", r"\frac72", "7/2"),
        ("(x+1)^2", "x^2+2x+1", "x^2 + 2*x + 1"),
        (r"\frac{1}{\sqrt6}", r"\frac{\sqrt6}{6}", "1/6*sqrt(6)"),
        (r"\frac{2+i}{i}", "1-2i", "1 - 2*i"),
    ] {
        let graded = grade_answer(answer, reference, Mode::Math);
        assert_eq!((graded.answer.as_deref(), graded.reference.as_str()), (Some(form), form));
    }
}

#[test]
fn answers_that_are_not_numbers_have_a_canonical_form_too() {
    for (answer, form) in
        [("3:05", "3 : 05"), (r"2\pm 1", "{3, 1}"), (r"\{5,5\}", "{5, 5}"), ("x<2", "x in (-inf, 2)")]
    {
        assert_eq!(grade_answer(answer, "7", Mode::Math).answer.as_deref(), Some(form), "{answer}");
    }
}

#[test]
fn digits_with_commas_beside_a_collection_are_shown_as_a_list() {
    let graded = grade_answer("101,102", r"\{101,102\}", Mode::Math);
    assert_eq!((graded.answer.as_deref(), graded.reference.as_str()), (Some("101, 102"), "{101, 102}"));
    let graded = grade_answer(r"\{101,102\}", "101,102", Mode::Math);
    assert_eq!((graded.answer.as_deref(), graded.reference.as_str()), (Some("{101, 102}"), "101, 102"));
}

#[test]
fn the_boxed_exact_window_counts_characters_not_bytes() {
    let padding = "é".repeat(80);
    assert_eq!(grade(&format!(r"\boxed{{5}}{padding}"), "5", Mode::BoxedExact).verdict, Verdict::Right);
    assert_eq!(
        grade(&format!(r"\boxed{{5}}{padding}{padding}"), "5", Mode::BoxedExact).verdict,
        Verdict::NoAnswer
    );
}

#[test]
fn modes_have_names_that_read_back() {
    for mode in Mode::ALL {
        assert_eq!(mode.to_string().parse(), Ok(mode));
        assert_eq!(Rules::from(mode).mode, mode);
    }
    assert!("maths".parse::<Mode>().unwrap_err().contains("boxed-exact"));
}

#[test]
fn under_looser_rounding_a_decimal_equals_what_rounds_to_it_at_its_own_digits() {
    let rules = Rules { rounding: Rounding::ShownDigits, ..Rules::default() };
    for (answer, reference, is_right) in [
        ("0.333", "1/3", true),
        ("0.334", "1/3", false),
        ("0.33", "1/3", false),
        ("3.14", "\\pi", true),
        ("3.15", "\\pi", false),
        ("\\sqrt2", "1.414", true),
        ("\\sqrt2", "1.415", false),
        ("2.67", "8/3", true),
        ("267", "266.7", false),
        ("33.3\\%", "1/3", true),
        ("33.4\\%", "1/3", false),
        ("(0.333, 2)", "(1/3, 2)", true),
        ("(0.334, 2)", "(1/3, 2)", false),
        ("1.67 \\text{ m}", "\\frac53 \\text{ m}", true),
        ("1.67 \\text{ m}", "\\frac53 \\text{ cm}", false),
        ("-0.333", "1/3", false),
        ("0.5", "0.45", false),
        ("x+0.333", "x+1/3", false),
    ] {
        let graded = grade_answer(answer, reference, rules);
        assert_eq!(
            graded.verdict == Verdict::Right,
            is_right,
            "{answer} against {reference}: {}",
            graded.reason
        );
        let strict = grade_answer(answer, reference, Rules::default());
        assert_ne!(
            strict.verdict,
            Verdict::Right,
            "{answer} against {reference} is right under the strict rule"
        );
    }
}

#[test]
fn a_form_that_is_worked_out_leaves_no_calculation_to_the_grader() {
    let rules = Rules { form: Form::WorkedOut, ..Rules::default() };
    assert_eq!(
        grade_answer("60+6", "66", rules).reason,
        "equals 66, but the answer leaves a calculation to the grader"
    );
    // What is written exactly as the reference is right, whatever it leaves to do.
    assert_eq!(grade_answer("60+6", "60 + 6", rules).verdict, Verdict::Right);
    assert_eq!(grade_answer("67", "66", rules).reason, grade_answer("67", "66", Mode::Math).reason);
    // A power of a product is left to the grader where a factor can be worked out.
    let raised = [("(2x)^3", "8x^3"), ("(-x)^3", "-x^3"), (r"(x\sqrt{2})^2", "2x^2"), ("(xy)^2", "x^2y^2")];
    let is_right = |(answer, reference)| grade_answer(answer, reference, rules).verdict == Verdict::Right;
    assert_eq!(raised.map(is_right), [false, false, false, true]);
}

#[test]
fn a_formula_of_the_question_is_not_worked_out_unless_it_is_the_reference() {
    let rules = Rules { form: Form::WorkedOut, ..Rules::default() };
    for (answer, reference, problem, expected) in [
        ("x^2 - 1", "(x-1)(x+1)", r"Factor $x^2-1$.", Verdict::Wrong),
        (r"x^{2}-1", "(x-1)(x+1)", r"Factor \(x^2 - 1\).", Verdict::Wrong),
        (r"\dfrac{1}{x+1}", r"\frac{1}{1+x}", r"Write \[\frac1{x+1}.\] otherwise.", Verdict::Wrong),
        ("(x+1)(x-1)", "(x-1)(x+1)", r"Factor $x^2-1$.", Verdict::Right),
        ("x^2 - 1", "x^2-1", r"Which of $x^2-1$ and $x^2+1$ has a root?", Verdict::Right),
        (r"\frac{1}{x}", r"\dfrac1x", r"Is $\frac1x$ or $x$ less?", Verdict::Right),
        ("x^2-1", "(x-1)(x+1)", "Multiply x-1 and x+1.", Verdict::Right),
        ("x^2-1", "(x-1)(x+1)", "An unclosed $x^2-1", Verdict::Right),
        ("-1+x^2", "(x-1)(x+1)", "Factor $x^2-1$.", Verdict::Wrong),
        ("-1+x^2", "(x-1)(x+1)", "Simplify $x^2-1$.", Verdict::Right),
        ("(x+1)(x-1)", "x^2-1", "Expand $(x-1)(x+1)$.", Verdict::Wrong),
        ("-1+x^2", "x^2-1", "Expand $(x-1)(x+1)$.", Verdict::Right),
    ] {
        let with = Reference { answer: reference, problem: Some(problem) };
        assert_eq!(grade_answer(answer, with, rules).verdict, expected, "{answer} for {problem}");
        assert_eq!(grade_answer(answer, with, Mode::Math).verdict, Verdict::Right, "{answer} by its value");
    }
}

#[test]
fn a_formula_of_up_to_4_kib_is_compared_with_the_question() {
    let rules = Rules { form: Form::WorkedOut, ..Rules::default() };
    let is_copied = |n_bytes: usize| {
        let answer = format!("1{}", "0".repeat(n_bytes - 1));
        let problem = format!("Write ${answer}$ as a power.");
        let reference = Reference { answer: &format!("10^{{{}}}", n_bytes - 1), problem: Some(&problem) };
        grade_answer(&answer, reference, rules).verdict == Verdict::Wrong
    };
    assert_eq!([4095, 4096, 4097].map(is_copied), [true, true, false]);
}
