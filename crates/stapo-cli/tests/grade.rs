//! `stapo grade` from the outside.

#![allow(clippy::format_collect, reason = "a test stops at the first surprise")]

use crate::common::{parsed_lines, stapo_with_input};
use std::process::Output;

fn stapo(args: &[&str], input: &[u8]) -> Output {
    stapo_with_input(&[&["grade"], args].concat(), input)
}

fn records(output: &Output) -> Vec<serde_json::Value> {
    parsed_lines(&String::from_utf8_lossy(&output.stdout))
}

fn keys(record: &serde_json::Value) -> Vec<&str> {
    let mut keys: Vec<&str> = record.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

#[test]
fn each_line_gets_a_record_in_the_same_order() {
    let lines: String = (0..10_000)
        .map(|i| {
            format!(
                "{{\"response\": \"so \\\\boxed{{{i}}}\", \"reference\": \"{}\"}}\n",
                if i % 3 == 0 { i } else { i + 1 }
            )
        })
        .collect();
    let output = stapo(&["-"], lines.as_bytes());
    assert!(output.status.success());
    let records = records(&output);
    assert_eq!(records.len(), 10_000);
    for (i, record) in records.iter().enumerate() {
        assert_eq!(record["extracted"], i.to_string());
        assert_eq!(record["verdict"], if i % 3 == 0 { "right" } else { "wrong" });
        assert_eq!(keys(record), ["extracted", "micros", "reason", "reference", "verdict"]);
    }
    let summary = String::from_utf8_lossy(&output.stderr);
    assert!(summary.contains("10000 graded in ") && summary.contains(" 3334 right, 6666 wrong"), "{summary}");
    assert!(summary.contains("; 33.3 % right; 0 malformed lines"), "{summary}");
}

#[test]
fn a_malformed_line_gives_an_error_record_and_does_not_stop_the_others() {
    let lines = br#"{"answer": "1/2", "reference": "0.5"}
not json
{"answer": "5"}
{"reference": "5"}
{"answer": "5", "response": "5", "reference": "5"}
{"answer": 5, "reference": "5"}

{"answer": "5", "reference": "6", "id": 7}
"#;
    let output = stapo(&["-"], lines);
    assert_eq!(output.status.code(), Some(1));
    let records = records(&output);
    assert_eq!(records.len(), 7);
    assert_eq!(records[0]["verdict"], "right");
    for (i, line) in [(1, 2), (2, 3), (3, 4), (4, 5), (5, 6)] {
        assert_eq!(records[i]["line"], line, "{}", records[i]);
        assert_eq!(keys(&records[i]), ["error", "line"]);
    }
    assert_eq!(records[6]["verdict"], "wrong");
    assert!(String::from_utf8_lossy(&output.stderr).contains("5 malformed"));
}

#[test]
fn bytes_that_are_not_text_are_malformed_lines() {
    let output = stapo(
        &["-"],
        b"{\"answer\": \"\xff\", \"reference\": \"5\"}\n{\"answer\": \"5\", \"reference\": \"5\"}",
    );
    assert_eq!(output.status.code(), Some(1));
    let records = records(&output);
    assert_eq!(records[0]["line"], 1);
    assert_eq!(records[1]["verdict"], "right");
}

#[test]
fn modes_and_extraction_can_be_chosen() {
    let verdict = |args: &[&str], response: &str, reference: &str| {
        let line = serde_json::json!({"response": response, "reference": reference}).to_string();
        records(&stapo(&[args, &["-"]].concat(), line.as_bytes()))[0]["verdict"].as_str().unwrap().to_owned()
    };
    assert_eq!(verdict(&[], r"\boxed{\frac12}", "0.5"), "right");
    assert_eq!(verdict(&["--mode", "boxed-exact"], r"\boxed{\frac12}", "0.5"), "wrong");
    assert_eq!(verdict(&["--mode", "dapo"], "Answer: 5 dollars", "5"), "right");
    assert_eq!(verdict(&["--mode", "multiple-choice"], "The answer is (B).", "B"), "right");
    assert_eq!(verdict(&["--mode", "exact"], " yes ", "yes"), "right");
    assert_eq!(verdict(&[], "it must be 7", "7"), "no_answer");
    assert_eq!(verdict(&["--fallback", "last-number"], "it must be 7", "7"), "right");
    assert_eq!(verdict(&[], "Answer: 6\n\\boxed{7}", "7"), "right");
    assert_eq!(verdict(&["--order", "line-first"], "Answer: 6\n\\boxed{7}", "7"), "wrong");
}

#[test]
fn canonical_forms_are_shown_on_request() {
    let output = stapo(&["--canonical", "-"], br#"{"answer": "\\sqrt{8}", "reference": "2\\sqrt2"}"#);
    let record = &records(&output)[0];
    assert_eq!(record["canonical_answer"], "2*sqrt(2)");
    assert_eq!(record["canonical_reference"], "2*sqrt(2)");
}

#[test]
fn one_thread_and_many_give_the_same_records() {
    let lines: String = (0..500)
        .map(|i| format!("{{\"answer\": \"{i}/7\", \"reference\": \"\\\\frac{{{i}}}{{7}}\"}}\n"))
        .collect();
    let without_time = |output: Output| {
        let mut records = records(&output);
        for record in &mut records {
            record["micros"] = 0.into();
        }
        records
    };
    assert_eq!(
        without_time(stapo(&["--threads", "1", "-"], lines.as_bytes())),
        without_time(stapo(&["-"], lines.as_bytes()))
    );
}

#[test]
fn a_missing_file_and_a_wrong_mode_say_so() {
    let output = stapo(&["no-such-file.jsonl"], b"");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no-such-file.jsonl"));
    let folder = tempfile::tempdir().unwrap();
    let output = stapo(&[folder.path().to_str().unwrap()], b"");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains(": is a folder, expected a file of JSON lines"));
    let output = stapo(&["--mode", "maths", "-"], b"");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("boxed-exact"));
}

#[test]
fn an_empty_input_is_graded_in_no_time() {
    let output = stapo(&["-"], b"");
    assert!(output.status.success() && output.stdout.is_empty());
    assert!(String::from_utf8_lossy(&output.stderr).contains("0 graded"));
}

#[test]
fn explain_prints_the_verdict_and_both_readings_as_trees() {
    let lines = concat!(
        "{\"response\": \"so \\\\boxed{x=5}\", \"reference\": \"6\"}\n",
        "{\"response\": \"nothing is marked\", \"reference\": \"\\\\frac12\"}\n",
        "{\"answer\": \"5\"}\n",
    );
    let output = stapo(&["--explain", "-"], lines.as_bytes());
    assert_eq!(output.status.code(), Some(1), "the last line has no reference");
    let text = String::from_utf8(output.stdout).unwrap();
    let expected = [
        "line 1: wrong: x = 5 is an equation, but the reference 6 is a number",
        "  the answer x=5 is read as",
        "    the name x stands for",
        "      the number 5",
        "  the reference 6 is read as",
        "    the number 6",
        "",
        "line 2: no answer: the response marks no answer: no \\boxed{}, no \"Answer:\" line, no \"the answer is\"",
        "  there is no answer",
        "  the reference \\frac12 is read as",
        "    the product of",
        "      the number 1",
        "      one over",
        "        the number 2",
    ];
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(&lines[..expected.len()], expected);
    assert!(text.contains("\"reference\\\" is missing"), "{text}");
}

#[test]
fn looser_rounding_is_opt_in() {
    let lines = concat!(
        "{\"answer\": \"0.333\", \"reference\": \"1/3\"}\n",
        "{\"answer\": \"0.334\", \"reference\": \"1/3\"}\n",
        "{\"response\": \"\\\\boxed{3.14}\", \"reference\": \"\\\\pi\"}\n",
    );
    let verdicts = |args: &[&str]| -> Vec<String> {
        let output = stapo(args, lines.as_bytes());
        records(&output).iter().map(|record| record["verdict"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(verdicts(&["-"]), ["wrong", "wrong", "wrong"]);
    assert_eq!(verdicts(&["--rounding", "six-decimals", "-"]), ["wrong", "wrong", "wrong"]);
    assert_eq!(verdicts(&["--rounding", "shown-digits", "-"]), ["right", "wrong", "right"]);
}

#[test]
fn an_answer_that_is_not_worked_out_is_wrong_on_request() {
    let lines = concat!(
        "{\"response\": \"\\\\boxed{60 + 180}\", \"reference\": \"240\"}\n",
        "{\"answer\": \"240\", \"reference\": \"240.0\"}\n",
    );
    let output = stapo(&["--form", "worked-out", "-"], lines.as_bytes());
    let [undone, done] = &records(&output)[..] else { panic!("two records") };
    assert_eq!((&undone["verdict"], &done["verdict"]), (&"wrong".into(), &"right".into()));
    assert_eq!(undone["reason"], "equals 240, but the answer leaves a calculation to the grader");
    for args in [&["-"][..], &["--form", "any", "-"]] {
        let graded = records(&stapo(args, lines.as_bytes()));
        assert!(graded.iter().all(|record| record["verdict"] == "right"), "{graded:?}");
    }
}
