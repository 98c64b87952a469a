//! Which part of a response is the answer.

use stapo_verify::{Fallback, Order, extract};

fn boxed(response: &str) -> Option<&str> {
    extract(response, Order::BoxFirst, Fallback::Nothing)
}

fn with_fallback(response: &str, fallback: Fallback) -> Option<&str> {
    extract(response, Order::BoxFirst, fallback)
}

#[test]
fn the_last_box_is_taken_with_its_braces_matched() {
    assert_eq!(boxed(r"\boxed{1} then \boxed{\frac{1}{2}}."), Some(r"\frac{1}{2}"));
    assert_eq!(boxed(r"\boxed{\{1, 2\}}"), Some(r"\{1, 2\}"));
    assert_eq!(boxed(r"\boxed{\left\{ x \right\}}"), Some(r"\left\{ x \right\}"));
}

#[test]
fn an_unclosed_box_is_no_answer_not_a_crash() {
    assert_eq!(boxed(r"\boxed{1} then \boxed{\frac{1}{2}"), None);
    assert_eq!(boxed("Answer: 5 \\boxed{"), None);
}

#[test]
fn order_decides_between_a_box_and_a_line() {
    let response = "Answer: 4\nor \\boxed{5}";
    assert_eq!(extract(response, Order::BoxFirst, Fallback::Nothing), Some("5"));
    assert_eq!(extract(response, Order::LineFirst, Fallback::Nothing), Some("4"));
    assert_eq!(extract("\\boxed{5}", Order::LineFirst, Fallback::Nothing), Some("5"));
}

#[test]
fn a_sentence_ends_the_answer_but_a_decimal_point_does_not() {
    assert_eq!(boxed("The answer is 3.5. That is all."), Some("3.5"));
    assert_eq!(boxed("The answer is $\\frac{1}{2}$."), Some("$\\frac{1}{2}$"));
}

#[test]
fn fallbacks_are_opt_in() {
    let response = "it follows that $x = 3$, so at most 1,250.5 in all";
    assert_eq!(with_fallback(response, Fallback::Nothing), None);
    assert_eq!(with_fallback(response, Fallback::LastNumber), Some("1,250.5"));
    assert_eq!(with_fallback("thus $x = 3$ holds", Fallback::LastFormula), Some("x = 3"));
    assert_eq!(with_fallback("a loss of -7", Fallback::LastNumber), Some("-7"));
    assert_eq!(with_fallback("-7", Fallback::LastNumber), Some("-7"));
    assert_eq!(with_fallback("it costs ($7)", Fallback::LastNumber), Some("7"), "no sign");
    assert_eq!(with_fallback("rooms 12-7", Fallback::LastNumber), Some("7"), "a hyphen or an operator");
    assert_eq!(with_fallback("f(2)-7", Fallback::LastNumber), Some("7"), "an operator");
    assert_eq!(with_fallback("about 3/4", Fallback::LastNumber), Some("3/4"));
    assert_eq!(with_fallback("no number at all", Fallback::LastFormula), None);
}
