//! The processor time to grade a megabyte of every mark of an answer, one line per mark, the slowest last:
//! `cargo run --release -p stapo-verify --example markers`. Extraction is linear: half the text takes half the time.

#![allow(clippy::print_stdout, reason = "a command-line tool")]

use stapo_verify::{Fallback, MAX_INPUT_BYTES, Mode, Order, Rules, grade};

#[path = "../tests/hostile/markers.rs"]
mod markers;

fn main() {
    let mut rows: Vec<(u128, u128, String)> = Vec::new();
    for mark in markers::MARKS {
        let text = mark.repeat(MAX_INPUT_BYTES / mark.len());
        let half = mark.repeat(MAX_INPUT_BYTES / mark.len() / 2);
        let (micros, rules) = slowest(&text);
        rows.push((micros, slowest(&half).0, format!("{} ({rules})", mark.replace('\n', "⏎"))));
    }
    rows.sort();
    for (micros, half, mark) in rows {
        println!("{:>8.1} ms {:>8.1} ms for half  {mark}", micros as f64 / 1e3, half as f64 / 1e3);
    }
}

/// Microseconds of the slowest mode, order and fallback, each the best of five, and which that is.
fn slowest(text: &str) -> (u128, String) {
    let mut slowest = (0, String::new());
    for mode in Mode::ALL {
        for order in [Order::BoxFirst, Order::LineFirst] {
            for fallback in [Fallback::Nothing, Fallback::LastNumber, Fallback::LastFormula] {
                let rules = Rules { mode, order, fallback, ..Rules::default() };
                let time = |_| {
                    let start = processor_micros();
                    std::hint::black_box(grade(text, "5", rules));
                    processor_micros() - start
                };
                let micros = (0..5).map(time).min().unwrap_or(0);
                if micros > slowest.0 {
                    slowest = (micros, format!("{mode}, {order:?}, {fallback:?}"));
                }
            }
        }
    }
    slowest
}

/// Processor time of this thread, which other work on the machine does not lengthen.
fn processor_micros() -> u128 {
    let stat =
        std::fs::read_to_string("/proc/thread-self/schedstat").expect("the times of this thread, on Linux");
    let nanos: u128 = stat.split(' ').next().and_then(|word| word.parse().ok()).expect("nanoseconds");
    nanos / 1_000
}
