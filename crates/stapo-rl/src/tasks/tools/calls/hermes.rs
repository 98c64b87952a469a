//! Calls between `<tool_call>` and `</tool_call>`.

use super::{Call, CallProblem, from_json};
use serde_json::Value;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

pub(super) fn calls(text: &str) -> Vec<Result<Call, CallProblem>> {
    // What a model thinks about calls is no call.
    let mut rest = text.rsplit_once("</think>").map_or(text, |(_, after)| after);
    let mut found = Vec::new();
    while let Some((_, after)) = rest.split_once(OPEN) {
        let close = after.find(CLOSE);
        let open = after.find(OPEN);
        match (close, open) {
            (Some(close), open) if open.is_none_or(|open| close < open) => {
                found.push(call(&after[..close]));
                rest = &after[close + CLOSE.len()..];
            }
            (_, open) => {
                found.push(Err(CallProblem::new(format!("{OPEN} without {CLOSE}"))));
                rest = open.map_or("", |open| &after[open..]);
            }
        }
    }
    found
}

fn call(json: &str) -> Result<Call, CallProblem> {
    let value: Value = serde_json::from_str(json.trim()).map_err(|error| {
        CallProblem::new(format!("the text between {OPEN} and {CLOSE} is no JSON: {error}"))
    })?;
    from_json(&value)
}
