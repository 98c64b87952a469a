//! Grades JSON lines without the `stapo` program: `cargo run --release -p stapo-verify --example jsonl -- FILE`.
//!
//! A line holds "response" or "answer", "reference" and perhaps "problem"; the output has one record per line. `-` reads standard input,
//! `--form worked-out` and `--fallback last-formula` are those of `stapo grade`. Other words are ignored, so that the
//! scripts in `bench/verify` can call this program in place of `stapo grade`.

#![allow(clippy::print_stdout, reason = "a command-line tool")]

use serde_json::{Value, json};
use stapo_verify::{Fallback, Form, Reference, Rules, grade, grade_answer};
use std::io::{Read, Write};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let has = |name: &str| args.iter().any(|arg| arg == name);
    let rules = Rules {
        form: if has("worked-out") { Form::WorkedOut } else { Form::Any },
        fallback: if has("last-formula") { Fallback::LastFormula } else { Fallback::Nothing },
        ..Rules::default()
    };
    let mut text = String::new();
    match args.last().map(String::as_str) {
        None | Some("-") => std::io::stdin().read_to_string(&mut text).map(|_| ()).expect("standard input"),
        Some(path) => text = std::fs::read_to_string(path).expect("a file of JSON lines"),
    }
    let mut out = std::io::BufWriter::new(std::io::stdout());
    for line in text.lines().filter(|line| !line.is_empty()) {
        let record: Value = serde_json::from_str(line).expect("a JSON record");
        let answer = record["reference"].as_str().expect("a reference");
        let reference = Reference { answer, problem: record["problem"].as_str() };
        let graded = match record["response"].as_str() {
            Some(response) => grade(response, reference, rules),
            None => grade_answer(record["answer"].as_str().expect("an answer"), reference, rules),
        };
        let line = json!({
            "verdict": graded.verdict, "extracted": graded.extracted, "reference": answer, "reason": graded.reason,
        });
        writeln!(out, "{line}").expect("standard output");
    }
}
