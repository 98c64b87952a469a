//! Any response, any reference, every mode, order, fallback and form.

#![no_main]

use libfuzzer_sys::fuzz_target;
use stapo_verify::{Fallback, Form, Mode, Order, Reference, Rules, grade};

fuzz_target!(|input: (&str, &str, &str, u8)| {
    let (response, answer, problem, choice) = input;
    let rules = Rules {
        mode: Mode::ALL[usize::from(choice) % Mode::ALL.len()],
        order: if choice & 8 == 0 { Order::BoxFirst } else { Order::LineFirst },
        fallback: if choice & 16 == 0 { Fallback::Nothing } else { Fallback::LastFormula },
        form: if choice & 32 == 0 { Form::Any } else { Form::WorkedOut },
        ..Rules::default()
    };
    grade(response, Reference { answer, problem: Some(problem) }, rules);
});
