//! Cases as data: one check grades every row of `tests/cases/*.tsv`.
//!
//! Columns: answer (or response), reference, mode, verdict, why. A file whose first column is headed `response` goes
//! through extraction; `⏎` stands for a line break. The mode `worked-out` is `math` with that form; its answers that
//! are no responses are all right by their value.

#![allow(clippy::format_collect, reason = "a test stops at the first surprise")]

use stapo_verify::{Form, Graded, Mode, Rules, Verdict, grade, grade_answer};
use std::fs;
use std::path::Path;

pub struct Case {
    pub place: String,
    is_response: bool,
    pub text: String,
    pub reference: String,
    rules: Rules,
    verdict: Verdict,
    why: String,
}

impl Case {
    pub fn run(&self) -> Graded {
        if self.is_response {
            grade(&self.text, &self.reference, self.rules)
        } else {
            grade_answer(&self.text, &self.reference, self.rules)
        }
    }
}

pub fn cases() -> Vec<Case> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases");
    let mut paths: Vec<_> =
        fs::read_dir(folder).expect("the folder of cases").map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let mut cases = Vec::new();
    for path in paths {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).unwrap();
        let mut lines = text.lines().enumerate();
        let (_, header) = lines.next().expect("a header");
        for (i, line) in lines.filter(|(_, line)| !line.is_empty()) {
            let place = format!("{name}:{}", i + 1);
            let columns: Vec<&str> = line.split('\t').collect();
            let [text, reference, mode, verdict, why] = columns[..] else {
                panic!("{place}: {} columns, expected 5", columns.len());
            };
            cases.push(Case {
                is_response: header.starts_with("response"),
                text: text.replace('⏎', "\n"),
                reference: reference.into(),
                rules: match mode {
                    "worked-out" => Rules { form: Form::WorkedOut, ..Rules::default() },
                    mode => mode.parse::<Mode>().unwrap_or_else(|e| panic!("{place}: {e}")).into(),
                },
                verdict: serde_json::from_str(&format!("\"{verdict}\""))
                    .unwrap_or_else(|e| panic!("{place}: {e}")),
                why: why.into(),
                place,
            });
        }
    }
    cases
}

#[test]
fn every_case_gets_its_verdict() {
    let cases = cases();
    let failures: Vec<String> = cases
        .iter()
        .filter_map(|case| {
            let graded = case.run();
            (graded.verdict != case.verdict).then(|| {
                format!(
                    "{}: {:?} against {:?} is {:?}, expected {:?} ({}); {}",
                    case.place,
                    case.text,
                    case.reference,
                    graded.verdict,
                    case.verdict,
                    case.why,
                    graded.reason
                )
            })
        })
        .collect();
    assert!(
        failures.is_empty(),
        "{} of {} cases fail:\n{}",
        failures.len(),
        cases.len(),
        failures.join("\n")
    );
}

#[test]
fn there_are_many_cases_and_half_of_them_are_negative() {
    let cases = cases();
    let n_negative = cases.iter().filter(|case| case.verdict != Verdict::Right).count();
    assert!(cases.len() >= 900, "{} cases", cases.len());
    assert!(2 * n_negative >= cases.len(), "{n_negative} of {} cases are negative", cases.len());
}

#[test]
fn every_case_is_equal_to_itself() {
    for case in cases().iter().filter(|case| {
        !case.is_response && case.rules.mode == Mode::Math && case.verdict != Verdict::NoAnswer
    }) {
        for text in [&case.text, &case.reference] {
            let graded = grade_answer(text, text, Mode::Math);
            assert_eq!(graded.verdict, Verdict::Right, "{}: {text:?}: {}", case.place, graded.reason);
        }
    }
}

#[test]
fn an_answer_that_is_not_worked_out_is_right_by_its_value() {
    for case in cases().iter().filter(|case| !case.is_response && case.rules.form == Form::WorkedOut) {
        let graded = grade_answer(&case.text, &case.reference, Mode::Math);
        assert_eq!(graded.verdict, Verdict::Right, "{}: {:?}: {}", case.place, case.text, graded.reason);
    }
}
