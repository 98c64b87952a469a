//! Long fuzz run: grades random, mutated and hostile texts and reports the slowest.
//!
//! `cargo run --release -p stapo-verify --example fuzz -- [INPUTS] [SEED]`; a panic or a stack overflow ends the run.

#![allow(clippy::print_stdout, reason = "a command-line tool")]

use stapo_verify::{Fallback, Form, Mode, Order, Rounding, Rules, Verdict, grade, grade_answer};
use std::time::{Duration, Instant};

include!("../tests/hostile/inputs.rs");
include!("../tests/hostile/fragments.rs");

fn main() {
    let mut args = std::env::args().skip(1);
    let n_inputs: u64 = args.next().map_or(1_000_000, |text| text.parse().expect("a number of inputs"));
    let seed: u64 = args.next().map_or(1, |text| text.parse().expect("a seed"));
    hostile();
    random(n_inputs, seed);
}

/// Grades each hostile text against a number, an expression and itself, in the slowest mode; prints the best of five
/// runs.
fn hostile() {
    let mut worst: Vec<(Duration, &str)> = Vec::new();
    for (name, text) in hostile_inputs() {
        let mut slowest = Duration::ZERO;
        for (answer, reference) in [(text.as_str(), "5"), ("x^2+y", text.as_str()), (text.as_str(), "(1,2)")]
        {
            let best = (0..5).map(|_| timed(|| grade_answer(answer, reference, Mode::Math))).min();
            slowest = slowest.max(best.unwrap_or_default());
        }
        let spaced = format!("{text} ");
        slowest = slowest.max(
            (0..5).map(|_| timed(|| grade_answer(&spaced, &text, Mode::Math))).min().unwrap_or_default(),
        );
        slowest =
            slowest.max((0..5).map(|_| timed(|| grade(&text, "5", Mode::Math))).min().unwrap_or_default());
        worst.push((slowest, name));
    }
    worst.sort();
    println!("hostile inputs: {}; slowest:", worst.len());
    for (time, name) in worst.iter().rev().take(10) {
        println!("  {:8.2} ms  {name}", time.as_secs_f64() * 1e3);
    }
}

fn random(n_inputs: u64, seed: u64) {
    let mut random = Random(seed);
    let mut n_verdicts = [0u64; 5];
    let mut slowest: Vec<(Duration, String)> = Vec::new();
    let start = Instant::now();
    for i in 0..n_inputs {
        let answer = random.text();
        let reference = if i % 4 == 0 { random.mutated(&answer) } else { random.text() };
        let began = Instant::now();
        let graded = if i % 8 == 7 {
            let rules = Rules {
                mode: Mode::Math,
                order: Order::LineFirst,
                fallback: Fallback::LastFormula,
                rounding: Rounding::ShownDigits,
                form: Form::WorkedOut,
            };
            grade(&answer, &reference, rules)
        } else {
            grade_answer(&answer, &reference, Mode::ALL[if i % 16 < 12 { 0 } else { (i % 5) as usize }])
        };
        let time = began.elapsed();
        n_verdicts[graded.verdict as usize] += 1;
        if i % 4 == 1 {
            let same = grade_answer(&answer, &answer, Mode::Math);
            let is_itself = matches!(same.verdict, Verdict::Right | Verdict::NoAnswer);
            assert!(is_itself, "{answer:?}: {}", same.reason);
        }
        if slowest.len() < 5 || time > slowest[4].0 {
            slowest.push((time, format!("{answer:?} against {reference:?}: {:?}", graded.verdict)));
            slowest.sort_by_key(|(time, _)| std::cmp::Reverse(*time));
            slowest.truncate(5);
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{n_inputs} random inputs in {seconds:.1} s, {:.0} per second; verdicts {n_verdicts:?}",
        n_inputs as f64 / seconds
    );
    for (time, text) in &slowest {
        println!("  {:8.2} ms  {}", time.as_secs_f64() * 1e3, text.chars().take(240).collect::<String>());
    }
}

fn timed<T>(work: impl FnOnce() -> T) -> Duration {
    let start = Instant::now();
    std::hint::black_box(work());
    start.elapsed()
}
