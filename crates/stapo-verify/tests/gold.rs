//! Gold answers of public benchmarks against themselves. A data set that is missing is skipped.

use serde_json::Value;
use stapo_verify::{Mode, Verdict, grade_answer};
use std::fs;
use std::path::{Path, PathBuf};

const SETS: [&str; 9] = [
    "benchmarks/aime24",
    "benchmarks/aime25",
    "benchmarks/amc23",
    "benchmarks/math500",
    "benchmarks/minerva",
    "benchmarks/olympiad",
    "benchmarks/gsm8k",
    "train/math",
    "train/dapo-math-17k",
];

fn folder() -> Option<PathBuf> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent()?;
    let above = crates.parent()?.parent()?;
    [above.join("shared/data"), above.parent()?.join("shared/data")]
        .into_iter()
        .find(|folder| folder.is_dir())
}

fn answers(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let answer = |line: &str| {
        let record: Value = serde_json::from_str(line).expect("a JSON record");
        record["answer"].as_str().expect("an answer").to_owned()
    };
    let mut answers: Vec<String> = text.lines().map(answer).collect();
    answers.sort();
    answers.dedup();
    // One MATH row has no answer at all.
    answers.retain(|answer| !answer.trim().is_empty());
    answers
}

/// The answer written a little differently, so that comparing the texts is not enough.
fn rewritten(answer: &str) -> String {
    format!(
        "$ {} $.",
        answer
            .trim()
            .trim_matches('$')
            .replace("\\frac", "\\dfrac")
            .replace("\\left", "")
            .replace("\\right", "")
    )
}

#[test]
fn every_gold_answer_equals_itself() {
    let Some(folder) = folder() else {
        println!("skipped: no ../shared/data beside the checkout");
        return;
    };
    let mut failures = Vec::new();
    for set in SETS {
        let path = folder.join(format!("{set}.jsonl"));
        if !path.exists() {
            println!("skipped: {set} is not there");
            continue;
        }
        for answer in answers(&path) {
            for (text, is_literal) in [(answer.clone(), true), (rewritten(&answer), false)] {
                let graded = grade_answer(&text, &answer, Mode::Math);
                let is_read = graded.verdict == Verdict::Right
                    || (!is_literal && graded.verdict == Verdict::Unparsable);
                if !is_read {
                    failures.push(format!(
                        "{set}: {text:?} against {answer:?}: {:?}, {}",
                        graded.verdict, graded.reason
                    ));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Counts the gold answers that can only be compared as text; `--nocapture` prints the list in docs/verifier.md.
#[test]
fn few_gold_answers_are_beyond_reading() {
    let Some(folder) = folder() else {
        println!("skipped: no ../shared/data beside the checkout");
        return;
    };
    let mut n_answers = 0;
    let mut n_unread = 0;
    for set in SETS {
        for answer in answers(&folder.join(format!("{set}.jsonl"))) {
            n_answers += 1;
            let graded = grade_answer("123454321", &answer, Mode::Math);
            if graded.verdict == Verdict::Unparsable {
                n_unread += 1;
                println!("{set}\t{answer}\t{}", graded.reason);
            }
        }
    }
    println!("{n_unread} of {n_answers} distinct gold answers are compared as text");
    assert!(n_unread * 200 < n_answers, "{n_unread} of {n_answers}");
}
