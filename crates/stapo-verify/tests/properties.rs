//! Laws of grading on random texts: no panic, a text equals itself, equality of plain values is symmetric.

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use stapo_verify::{Fallback, Mode, Order, Verdict, extract, grade, grade_answer};

use crate::readings::Random;

/// The random texts of each law are the same in every run; `STAPO_FUZZ_CASES` sets their number, `STAPO_FUZZ_SEED`
/// their seed.
fn config() -> ProptestConfig {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let cases = number("STAPO_FUZZ_CASES").unwrap_or(2_000);
    let rng_seed = RngSeed::Fixed(number("STAPO_FUZZ_SEED").unwrap_or(1).into());
    ProptestConfig { cases, rng_seed, failure_persistence: None, ..ProptestConfig::default() }
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<u64>().prop_map(|seed| Random(seed).text()),
        ".{0,40}",
        "[-+*/^_{}()\\[\\]\\\\a-z0-9,.= ]{0,60}"
    ]
}

fn verdict(answer: &str, reference: &str) -> Verdict {
    grade_answer(answer, reference, Mode::Math).verdict
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn any_text_gets_a_verdict_in_every_mode(answer in text(), reference in text()) {
        for mode in Mode::ALL {
            grade_answer(&answer, &reference, mode);
            grade(&answer, &reference, mode);
        }
    }

    #[test]
    fn an_answer_equals_itself(answer in text()) {
        let found = verdict(&answer, &answer);
        prop_assume!(found != Verdict::NoAnswer);
        prop_assert_eq!(found, Verdict::Right);
    }

    #[test]
    fn extraction_returns_a_part_of_the_response(response in text()) {
        for order in [Order::BoxFirst, Order::LineFirst] {
            for fallback in [Fallback::Nothing, Fallback::LastNumber, Fallback::LastFormula] {
                if let Some(answer) = extract(&response, order, fallback) {
                    prop_assert!(response.contains(answer));
                }
            }
        }
    }

    #[test]
    fn a_boxed_answer_is_found_again(seed in any::<u64>()) {
        let answer = Random(seed).expression(0);
        let response = format!("We think, then conclude \\boxed{{{answer}}}, done.");
        prop_assert_eq!(extract(&response, Order::BoxFirst, Fallback::Nothing), Some(answer.trim()));
    }

    #[test]
    fn spaces_around_operators_change_nothing(seed in any::<u64>(), other in any::<u64>()) {
        let answer = Random(seed).expression(0);
        let reference = Random(other).expression(0);
        // Spaces change the meaning of 2e+1, which is twenty, and of 3!=x, which is an inequality.
        prop_assume!(!answer.contains("e+") && !answer.contains("!="));
        let spaced = answer.replace('+', " + ").replace('=', " = ").replace("\\cdot", " \\cdot ");
        prop_assert_eq!(verdict(&answer, &reference), verdict(&spaced, &reference));
    }

    #[test]
    fn equality_of_plain_values_is_symmetric(a in -99i64..99, b in 1i64..99, c in -99i64..99, d in 1i64..99) {
        let x = format!("\\frac{{{a}}}{{{b}}}");
        let y = format!("{c}/{d}");
        prop_assert_eq!(verdict(&x, &y), verdict(&y, &x));
        prop_assert_eq!(verdict(&x, &y) == Verdict::Right, a * d == c * b);
    }

    #[test]
    fn expansion_is_recognised_and_a_changed_term_is_not(a in -20i64..20, b in -20i64..20, off in 1i64..9) {
        let product = format!("(x+{a})(x+{b})").replace("+-", "-");
        let expanded = format!("x^2+{}x+{}", a + b, a * b).replace("+-", "-");
        let changed = format!("x^2+{}x+{}", a + b, a * b + off).replace("+-", "-");
        prop_assert_eq!(verdict(&product, &expanded), Verdict::Right);
        prop_assert_eq!(verdict(&product, &changed), Verdict::Wrong);
    }

    #[test]
    fn surds_agree_with_their_squares(n in 1u64..5_000, k in 1u64..50) {
        prop_assert_eq!(verdict(&format!("\\sqrt{{{}}}", n * k * k), &format!("{k}\\sqrt{{{n}}}")), Verdict::Right);
        prop_assert_eq!(verdict(&format!("\\sqrt{{{}}}", n * k * k + 1), &format!("{k}\\sqrt{{{n}}}")), Verdict::Wrong);
    }
}

#[test]
fn a_reading_is_a_tree_in_plain_words() {
    let tree = stapo_verify::reading(r"x \in [1, \sqrt{2})");
    assert_eq!(
        tree,
        "the part of the real line of x made of\n  from (the end is included)\n    the number 1\n  to (the end is left \
         out)\n    a root with radicand and degree\n      the number 2\n      the number 2"
    );
    assert_eq!(stapo_verify::reading("0=1").lines().count(), 1, "a contradiction has no value");
}

#[test]
fn long_collections_of_numbers_are_compared_in_any_order() {
    // 256 is the limit of docs/verifier.md; 97 has no factor in common with the lengths.
    for n in [150usize, 200, 256, 257] {
        let in_order: Vec<usize> = (0..n).collect();
        let mixed: Vec<usize> = in_order.iter().map(|i| i * 97 % n).collect();
        let mut other = mixed.clone();
        other[7] = 1_000;
        let fraction = |i: &usize| format!("\\frac{{{i}}}{{7}}");
        let list = |numbers: &[usize]| numbers.iter().map(fraction).collect::<Vec<_>>().join(", ");
        let set = |numbers: &[usize]| format!("\\{{{}\\}}", list(numbers));
        let expected = if n > 256 { [Verdict::OverBudget; 2] } else { [Verdict::Right, Verdict::Wrong] };
        for (answer, verdict) in [&mixed, &other].into_iter().zip(expected) {
            let graded = grade_answer(&list(answer), &list(&in_order), Mode::Math);
            assert_eq!(graded.verdict, verdict, "a list of {n}: {}", graded.reason);
            let graded = grade_answer(&set(answer), &set(&in_order), Mode::Math);
            assert_eq!(graded.verdict, verdict, "a set of {n}: {}", graded.reason);
        }
    }
}
