//! The comparison that `stapo serve` shows of two runs with evaluations.

use crate::browser::runs::{STAPO, json_lines, train};
use crate::serve::Server;
use serde_json::json;
use std::path::Path;

/// An evaluation of six questions, of which the first `n_right` are right.
fn evaluated(run: &Path, n_right: usize) {
    let line = |question: usize| {
        let verdict = if question < n_right { "right" } else { "wrong" };
        json!({"schema": 1, "benchmark": "b", "decoding": "greedy", "problem_id": question.to_string(), "reference": "7",
            "sample_idx": 0, "text": "", "tokens": [], "n_tokens": 3, "finish": {"kind": "stop", "token": 0},
            "answer": null, "verdict": verdict, "reason": ""})
    };
    std::fs::create_dir_all(run.join("eval")).unwrap();
    std::fs::write(run.join("eval/step-000004.jsonl"), json_lines((0..6).map(line))).unwrap();
}

#[test]
fn a_comparison_by_question_names_each_side() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    train(at, "stapo", STAPO, 0);
    train(at, "other", r#"{preset="justrl"}"#, 0);
    evaluated(&at.join("stapo"), 1);
    evaluated(&at.join("other"), 6);
    let server = Server::start(at, &[]);
    let compared = server.json("/api/compare?run=stapo&run=other");
    let tables = compared["tables"].as_array().unwrap();
    let paired =
        tables.iter().find(|table| table["name"] == "compared").unwrap_or_else(|| panic!("{compared}"));
    assert_eq!(paired["title"], "other minus stapo, paired by question");
    // Five of six questions change sides: two of 2^5 sign permutations are as extreme.
    let cells = ["b", "+83.3 (+40.5 to +126.2)", "no detectable difference", "0.0625", "6", "greedy"];
    assert_eq!(paired["rows"], json!([cells]));
}
