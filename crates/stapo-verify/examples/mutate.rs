//! Mutation run: changes one sign of every gold answer and lists each mutant that is still called right.
//!
//! `cargo run --release -p stapo-verify --example mutate -- DATA`, where DATA holds `benchmarks/*.jsonl` and
//! `train/*.jsonl`. One line per surviving mutant on standard output (data set, kind of change, mutant, gold answer,
//! reason), a table of counts on standard error.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command-line tool")]

use serde_json::Value;
use stapo_verify::{Mode, Verdict, grade_answer};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Pairs of texts that a mutation swaps, by the kind of change.
const SWAPS: [(&str, &[(&str, &str)]); 5] = [
    ("sign", &[("+", "-"), ("-", "+"), ("\\pm", "+"), ("+", "\\pm ")]),
    (
        "operator",
        &[
            ("+", "\\cdot "),
            ("\\cdot", "+"),
            ("\\times", "+"),
            ("/", "+"),
            ("^", "_"),
            ("_", "^"),
            ("^", ""),
            ("_", ""),
            ("!", ""),
            ("\\frac", "\\binom"),
            ("\\binom", "\\frac"),
            ("\\sqrt", ""),
            ("\\sqrt", "\\sqrt[3]"),
            ("\\cup", "\\cap"),
            ("\\sin", "\\cos"),
            ("\\cos", "\\sin"),
            ("\\ln", "\\log_2"),
            ("=", "<"),
            ("=", "\\ne "),
            ("<", ">"),
            ("<", "\\le "),
            (">", "\\ge "),
            ("\\le", "<"),
            ("\\ge", ">"),
            ("\\leq", "\\geq"),
            ("\\lfloor", "\\lceil"),
            ("|", ""),
            (",", ""),
            (",", "."),
            (":", "/"),
            ("\\pi", "e"),
            ("\\overline", ""),
        ],
    ),
    (
        "bracket",
        &[
            ("(", "["),
            (")", "]"),
            ("[", "("),
            ("]", ")"),
            ("(", ""),
            ("\\{", "("),
            ("\\}", ")"),
            ("\\{", "["),
            ("{", ""),
        ],
    ),
    (
        "unit",
        &[
            ("cm", "m"),
            ("inches", "feet"),
            ("feet", "inches"),
            ("hours", "minutes"),
            ("minutes", "hours"),
            ("seconds", "hours"),
            ("miles", "km"),
            ("\\%", "\\$"),
            ("\\$", "€"),
            ("^\\circ", "\\%"),
            ("^2", "^3"),
            ("cents", "dollars"),
            ("square", "cubic"),
            ("mph", "km/h"),
        ],
    ),
    (
        "letter",
        &[
            ("x", "y"),
            ("y", "x"),
            ("a", "b"),
            ("b", "a"),
            ("n", "m"),
            ("k", "n"),
            ("A", "B"),
            ("B", "A"),
            ("x", "X"),
            ("i", "j"),
            ("e", "a"),
        ],
    ),
];

fn main() {
    let folder = std::env::args().nth(1).expect("the folder of the data sets");
    let mut total = [0usize; 2];
    for name in ["benchmarks", "train"] {
        let entries = fs::read_dir(Path::new(&folder).join(name)).expect("a folder of data sets");
        let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
        paths.retain(|path| path.extension().is_some_and(|end| end == "jsonl"));
        paths.sort();
        for path in paths {
            let [n_mutants, n_right] = run(&path);
            let set = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            eprintln!("{name}/{set}: {n_mutants} mutants, {n_right} called right");
            total[0] += n_mutants;
            total[1] += n_right;
        }
    }
    eprintln!("all: {} mutants, {} called right", total[0], total[1]);
}

/// Grades the mutants of one data set; how many there are and how many are called right.
fn run(path: &Path) -> [usize; 2] {
    let text = fs::read_to_string(path).expect("a data set");
    let answers: BTreeSet<String> = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok()?["answer"].as_str().map(str::to_owned))
        .filter(|answer| !answer.trim().is_empty() && answer.len() < 400)
        .collect();
    let set = path.file_stem().unwrap_or_default().to_string_lossy();
    let mut counts = [0, 0];
    for answer in &answers {
        for (kind, mutant) in mutants(answer) {
            let graded = grade_answer(&mutant, answer, Mode::Math);
            counts[0] += 1;
            if graded.verdict == Verdict::Right {
                counts[1] += 1;
                let line = |text: &str| text.replace('\n', "⏎").replace('\t', " ");
                println!("{set}\t{kind}\t{}\t{}\t{}", line(&mutant), line(answer), line(&graded.reason));
            }
        }
    }
    counts
}

/// Every text that differs from `answer` by one change, each once.
fn mutants(answer: &str) -> Vec<(&'static str, String)> {
    let mut found: Vec<(&'static str, String)> = Vec::new();
    for (kind, pairs) in SWAPS {
        for (from, to) in pairs {
            for (at, _) in answer.match_indices(from) {
                found.push((kind, format!("{}{to}{}", &answer[..at], &answer[at + from.len()..])));
            }
        }
    }
    for (at, c) in answer.char_indices() {
        let rest = &answer[at + c.len_utf8()..];
        if let Some(digit) = c.to_digit(10) {
            for other in [(digit + 1) % 10, (digit + 9) % 10] {
                found.push(("digit", format!("{}{other}{rest}", &answer[..at])));
            }
            found.push(("digit", format!("{}{c}{c}{rest}", &answer[..at])));
        }
        found.push(("character left out", format!("{}{rest}", &answer[..at])));
        if let Some(next) = rest.chars().next() {
            found.push((
                "two characters swapped",
                format!("{}{next}{c}{}", &answer[..at], &rest[next.len_utf8()..]),
            ));
        }
    }
    for extra in ["-", "1", "2"] {
        found.push(("sign", format!("{extra}{answer}")));
    }
    for extra in ["0", "1", "!", "\\%", "^2", "+1", "'", "x", ",0", "=1", "\\text{ cm}"] {
        found.push(("character put in", format!("{answer}{extra}")));
    }
    let mut seen = BTreeSet::new();
    found.retain(|(_, mutant)| mutant.trim() != answer.trim() && seen.insert(mutant.clone()));
    found
}
