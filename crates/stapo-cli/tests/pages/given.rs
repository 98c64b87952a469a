//! Responses with text that the policy was given between its turns.

use super::RUN;
use crate::browser::runs::{json_lines, lines, read};
use crate::common::{complaint, ok, stapo};
use serde_json::json;

#[test]
fn text_given_between_turns_is_shown_where_it_stands() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    std::fs::create_dir_all(at.join("turns/rollouts")).unwrap();
    std::fs::copy(RUN.path().join("run/plan.toml"), at.join("turns/plan.toml")).unwrap();
    std::fs::write(at.join("turns/metrics.jsonl"), "").unwrap();
    let mut response = lines(RUN.path().join("run/rollouts/step-000002.jsonl"))[0].clone();
    let mut with_given = |after: usize| {
        response["schema"] = json!(2);
        response["given"] = json!([{"after": after, "id": [3, 4], "text": "and then?"}]);
        let line = json_lines([response.clone()].into_iter());
        std::fs::write(at.join("turns/rollouts/step-000002.jsonl"), line).unwrap();
        response["tokens"]["text"][0].as_str().unwrap().to_string()
    };
    let first = with_given(1);
    let said = ok(&stapo(at, &["inspect", "turns", "--terminal"]));
    let shown = said.find("[=and then?=]").expect("the given text is shown");
    assert!(said[..shown].trim_end_matches(['-', '?', '~', ']']).ends_with(&first), "{said}");
    ok(&stapo(at, &["inspect", "turns", "-o", "turns.html"]));
    assert!(read(at.join("turns.html")).contains("\"given\":[[1,\"and then?\"]]"));
    with_given(100_000);
    let said = complaint(at, &["inspect", "turns"]);
    assert!(said.contains("response 1: given tokens after 100000"), "{said}");
}
