//! Texts of exactly the size that the grader takes, and one part more.

use stapo_verify::{Mode, Verdict, grade_answer};

/// What is too large, its most parts, and a text with so many parts.
type Limit = (&'static str, usize, fn(usize) -> String);

fn joined(n: usize, between: &str) -> String {
    (1..=n).map(|i| i.to_string()).collect::<Vec<_>>().join(between)
}

const LIMITS: [Limit; 8] = [
    ("an answer of more than 16 KiB", 1 << 14, |n| format!("x{}1", "+".repeat(n - 2))),
    ("a collection of more than 256 elements", 256, |n| joined(n, ", ")),
    ("a collection of more than 256 elements", 256, |n| format!("\\{{{}\\}}", joined(n, ", "))),
    ("a collection of more than 256 elements", 256, |n| {
        format!("\\begin{{cases}}{}\\end{{cases}}", joined(n, "&x>1\\\\") + "&x<1")
    }),
    ("a matrix of more than 256 elements", 256, |n| {
        format!("\\begin{{pmatrix}}{}\\end{{pmatrix}}", joined(n, "&"))
    }),
    ("a ratio of more than 16 parts", 16, |n| joined(n, ":")),
    ("a sum of more than 500 terms", 500, |n| format!("\\sum_{{k=0}}^{{{n}}}k")),
    ("a factorial grows past 20,000 digits", 5000, |n| format!("{n}!")),
];

#[test]
fn a_text_with_one_part_more_than_the_limit_is_over_budget() {
    for (what, most, text) in LIMITS {
        let [within, beyond] = [most, most + 1].map(|n| grade_answer(&text(n), "7", Mode::Math));
        assert!(!within.reason.contains(what), "{most}: {}", within.reason);
        assert_eq!(beyond.verdict, Verdict::OverBudget, "{what}: {}", beyond.reason);
        assert!(beyond.reason.contains(what), "{}", beyond.reason);
    }
}

#[test]
fn at_most_sixteen_choices_of_signs_are_spread() {
    let signs = |n: usize| format!("({}1)", "\\pm1,".repeat(n));
    let all = |n: u32| {
        let tuple = |bits: u32| -> String {
            (0..n).map(|i| if bits >> i & 1 == 1 { "-1," } else { "1," }).collect::<String>() + "1"
        };
        (0..1 << n).map(|bits| format!("({})", tuple(bits))).collect::<Vec<_>>().join(",")
    };
    assert_eq!(grade_answer(&signs(4), &all(4), Mode::Math).verdict, Verdict::Right);
    assert_ne!(grade_answer(&signs(5), &all(5), Mode::Math).verdict, Verdict::Right);
}
