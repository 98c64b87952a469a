//! Verdicts, canonical forms and reasons by mode.

use stapo_verify::{Form, Mode, Rounding, Rules, Verdict, grade, grade_answer};

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

/// Answers beside their references, in a form that is worked out.
const WORKED_OUT: &[(&str, &str)] = &[
    // A number beside a number, however it is printed.
    ("0.75", r"\frac34"),
    (r"\frac{6}{8}", r"\frac{12}{16}"),
    (r"\frac{3}{-4}", "-0.75"),
    ("3:4", "0.75"),
    ("245_8", "245_{8}"),
    ("36=40_9", "40_9"),
    ("413_5=108", "108"),
    ("1_000", "1000"),
    ("1_012", "1012"),
    (r"\frac{-3}{4}", "-0.75"),
    (r"\frac{5}{1}", "5"),
    (r"3\frac12", "3.5"),
    ("1.5e3", "1500"),
    (r"1.5\times 10^{3}", "1500"),
    ("10^6", "1000000"),
    (r"2\times10^{-3}", "0.002"),
    (r"50\%", "0.5"),
    (r"90^\circ", "90"),
    (r"\$43.50", "43.5"),
    (r"6\text{ dozen}", "72"),
    ("5 hundred thousand", "500000"),
    ("3 hours 20 minutes", "200 minutes"),
    ("5 m^2", r"5\text{ m}^2"),
    ("x=2+3=5", "5"),
    ("2+3=5", "5"),
    ("m+n=34", "34"),
    ("3:4", "6:8"),
    ("1:2:3", "2:4:6"),
    ("a+b", "b+a"),
    (r"2^{\frac13}", r"\sqrt[3]{2}"),
    (r"0.\overline{3}", "1/3"),
    (r"\pm 3", "3, -3"),
    ("(B) 12", "B"),
    (r"[5, \infty)", r"x\ge 5"),
    ("x > 5 cm", "x > 5"),
    // What the reference leaves to do, the answer may.
    ("1024", "2^{10}"),
    ("4^5", "2^{10}"),
    (r"\frac{10!}{4!\,6!}", r"\binom{10}{4}"),
    // Other forms of an expression.
    (r"\sqrt{12}", r"\sqrt[4]{144}"),
    (r"\sqrt[3]{2}", r"2^{\frac13}"),
    (r"\frac{1}{\sqrt2}", r"\frac{\sqrt2}{2}"),
    (r"\frac{5}{2}+\frac{\sqrt3}{2}", r"\frac{5+\sqrt3}{2}"),
    (r"4\cdot\frac13\pi", r"\frac{4\pi}{3}"),
    ("(x+1)^2", "x^2+2x+1"),
    ("x^3-3x^2+3x-1", "(x-1)^3"),
    ("x^4-4x^3+6x^2-4x+1", "(x-1)^4"),
    ("(x+1)(x+2)(x+3)", "x^3+6x^2+11x+6"),
    (r"\frac{\cos x}{\sin x}", r"\cot x"),
    (r"\exp(2)", "e^2"),
    ("y-3=2x", "y=2x+3"),
];

/// Answers beside their references that leave a calculation to the grader.
const LEFT_TO_GRADER: &[(&str, &str)] = &[
    ("60 + 180 + 126", "366"),
    (r"43 \times 3 + 23 \times 4", "221"),
    (r"6\cdot 12", "72"),
    (r"\frac{150}{3}", "50"),
    (r"\frac{6}{8}", r"\frac34"),
    ("480:2", "240"),
    ("6:8", "3:4"),
    ("21_3", "11_6"),
    (r"\frac{2+1}{4}", "0.75"),
    ("555_{10}", "4210_5"),
    ("108", "413_5"),
    ("413_5", "108"),
    (r"\frac{1.5}{2}", "0.75"),
    (r"\frac{4}{20}\times 100\%", "20"),
    ("2^{10}", "1024"),
    (r"1.5\times 11^{3}", "1996.5"),
    (r"\sqrt{16}", "4"),
    (r"\binom{7}{3}", "35"),
    (r"\left\lceil\frac{28}{3}\right\rceil", "10"),
    (r"58_9-18_9", "40_9"),
    ("441 + 2(21)(19) + 361 = x", "1600"),
    ("(8+7, -29)", "(15,-29)"),
    ("[2+3, 7)", "[5,7)"),
    (r"x\le 3\cdot 4", r"x\le 12"),
    (r"\begin{pmatrix}1+1\\3\end{pmatrix}", r"\begin{pmatrix}2\\3\end{pmatrix}"),
    ("(u+4)(u-1)-(u-3)(u+6)", "14"),
    // Beside an expression.
    ("(1+2i)6-3i", "6+9i"),
    (r"\frac{-3+4i}{1+2i}", "1+2i"),
    ("19x+1-4x-81", "15x-80"),
    ("x+3+4", "x+7"),
    (r"x^2\cdot x^3\cdot x^4", "x^9"),
    (r"\sqrt{x+x+x+x+x}", r"\sqrt{5x}"),
    (r"2\sin x\cos x+\sin 2x", r"2\sin 2x"),
    (r"x\left(x(1+x)+2x\right)-3(x^2-x+2)", "x^3+3x-6"),
    (r"\frac{4+6a}{5}-\frac{1+3a}{4}", r"\frac{11+9a}{20}"),
    (r"\frac{(10r^3)(4r^6)}{8r^4}", "5r^5"),
    (r"\frac{\sec x}{\sin x}-\frac{\sin x}{\cos x}", r"\cot x"),
    (r"\arcsin\left(-\frac12\right)", r"-\frac{\pi}{6}"),
    (r"2\pi\cdot 15", r"30\pi"),
    (r"2^5\pi", r"32\pi"),
    (r"\sqrt{16}\,\pi", r"4\pi"),
    (r"\sqrt{12}", r"2\sqrt3"),
    (r"\frac{3}{\sqrt{27}}", r"\frac{\sqrt3}{3}"),
    (r"\sqrt{\sqrt[3]{\sqrt{\frac{1}{729}}}}", r"\frac{\sqrt3}{3}"),
    ("y=2\\cdot 3x+1", "y=6x+1"),
];

#[test]
fn a_form_that_is_worked_out_leaves_no_calculation_to_the_grader() {
    let rules = Rules { form: Form::WorkedOut, ..Rules::default() };
    for (rows, expected) in [(WORKED_OUT, Verdict::Right), (LEFT_TO_GRADER, Verdict::Wrong)] {
        for (answer, reference) in rows {
            let verdict = |rules| grade_answer(answer, reference, rules).verdict;
            let found = (verdict(Rules::default()), verdict(rules));
            assert_eq!(found, (Verdict::Right, expected), "{answer} beside {reference}");
        }
    }
    assert_eq!(
        grade_answer("60+6", "66", rules).reason,
        "equals 66, but the answer leaves a calculation to the grader"
    );
    // What is written exactly as the reference is right, whatever it leaves to do.
    assert_eq!(grade_answer("60+6", "60 + 6", rules).verdict, Verdict::Right);
    assert_eq!(grade_answer("67", "66", rules).reason, grade_answer("67", "66", Mode::Math).reason);
}
