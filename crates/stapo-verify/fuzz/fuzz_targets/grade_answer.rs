//! Any answer against any reference; an answer that holds anything equals itself.

#![no_main]

use libfuzzer_sys::fuzz_target;
use stapo_verify::{Form, Mode, Rules, Verdict, grade_answer};

fuzz_target!(|input: (&str, &str)| {
    let (answer, reference) = input;
    for form in [Form::Any, Form::WorkedOut] {
        grade_answer(answer, reference, Rules { form, ..Rules::default() });
    }
    let itself = grade_answer(answer, answer, Mode::Math).verdict;
    assert!(matches!(itself, Verdict::Right | Verdict::NoAnswer | Verdict::OverBudget), "{answer:?} is {itself:?}");
});
