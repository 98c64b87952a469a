//! The lines between the trainer and an external verifier: one JSON object per sample, in both directions.

use crate::reward::judged::Judged;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use stapo_core::{Problem, Turn, Verdict};

/// The fields of a problem's row, by the problem's id, where the task keeps them.
pub(crate) type RowOf<'a> = dyn Fn(&str) -> Option<&'a Map<String, Value>> + 'a;

#[derive(Serialize)]
struct VerifierRequest<'a> {
    sample: u64,
    id: &'a str,
    /// The turns before the prompt; left out if there are none.
    #[serde(skip_serializing_if = "<[Turn]>::is_empty")]
    earlier_turns: &'a [Turn],
    prompt: &'a str,
    response: &'a str,
    reference: &'a str,
}

/// The request of a Python function.
#[derive(Serialize)]
struct FunctionRequest<'a> {
    #[serde(flatten)]
    request: VerifierRequest<'a>,
    /// Null for problems that no row of a file holds.
    row: Option<&'a Map<String, Value>>,
    /// How many samples of the same call follow, since the function may take them together.
    n_to_come: usize,
}

/// The lines of all samples; `first` is the number of the first.
pub(super) fn requests(samples: &[(&Problem, &str)], first: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (sample, &(problem, response)) in (first..).zip(samples) {
        write_line(&mut bytes, &VerifierRequest::new(sample, problem, response));
    }
    bytes
}

/// [`requests`] with the rows of the problems.
pub(super) fn requests_with_rows(samples: &[(&Problem, &str)], first: u64, row_of: &RowOf) -> Vec<u8> {
    let mut bytes = Vec::new();
    let to_come = (0..samples.len()).rev();
    for ((sample, &(problem, response)), n_to_come) in (first..).zip(samples).zip(to_come) {
        let request = VerifierRequest::new(sample, problem, response);
        write_line(&mut bytes, &FunctionRequest { request, row: row_of(&problem.id), n_to_come });
    }
    bytes
}

impl<'a> VerifierRequest<'a> {
    fn new(sample: u64, problem: &'a Problem, response: &'a str) -> Self {
        let Problem { id, earlier_turns, prompt, reference } = problem;
        Self { sample, id, earlier_turns, prompt, response, reference }
    }
}

fn write_line(bytes: &mut Vec<u8>, request: &impl Serialize) {
    serde_json::to_writer(&mut *bytes, request).expect("numbers, strings and lists are always JSON");
    bytes.push(b'\n');
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct VerifierReply {
    sample: Option<u64>,
    verdict: Option<Verdict>,
    reward: Option<f64>,
    answer: Option<String>,
    reason: Option<String>,
    id: Option<String>,
}

/// Reads the verdict of a sample; the error says what is wrong with the line.
pub(super) fn read_reply(line: &[u8], id: &str, sample: u64) -> Result<Judged, String> {
    let reply: VerifierReply =
        serde_json::from_slice(line).map_err(|e| format!("wrote {}: {e}", shortened(line)))?;
    if let Some(other) = reply.sample.filter(|&other| other != sample) {
        return Err(format!("answered sample {other} where {sample} was next"));
    }
    if let Some(other) = reply.id.filter(|other| other != id) {
        return Err(format!("answered for {other:?}"));
    }
    let verdict = match (reply.verdict, reply.reward) {
        (_, Some(reward)) if !reward.is_finite() => return Err(format!("gave the reward {reward}")),
        (Some(verdict), _) => verdict,
        (None, Some(reward)) if reward > 0.0 => Verdict::Right,
        (None, Some(_)) => Verdict::Wrong,
        (None, None) => return Err(format!("gave neither verdict nor reward: {}", shortened(line))),
    };
    let reason = reply.reason.unwrap_or_else(|| "by the external verifier".into());
    Ok(Judged { reward: reply.reward, ..Judged::new(verdict, reply.answer, reason) })
}

/// The beginning of a line, quoted.
pub(super) fn shortened(line: &[u8]) -> String {
    const MAX_CHARS: usize = 120;
    let text = String::from_utf8_lossy(&line[..line.len().min(4 * MAX_CHARS)]);
    let start: String = text.chars().take(MAX_CHARS).collect();
    let rest = if text.chars().count() > MAX_CHARS || line.len() > 4 * MAX_CHARS { " ..." } else { "" };
    format!("{start:?}{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(earlier_turns: Vec<Turn>) -> Problem {
        let [id, prompt, reference] = ["p", "1+1=", "2"].map(String::from);
        Problem { id, earlier_turns, prompt, reference }
    }

    #[test]
    fn requests_are_numbered_and_say_how_many_follow() {
        let (plain, asked) = (problem(Vec::new()), Turn { role: "user".into(), content: "hi".into() });
        let talk = problem(vec![asked]);
        let samples = [(&plain, "so 2"), (&talk, "3")];
        let lines = |bytes: Vec<u8>| -> Vec<Value> {
            String::from_utf8(bytes)
                .unwrap()
                .lines()
                .map(|line| serde_json::from_str(line).unwrap())
                .collect()
        };
        let found = lines(requests(&samples, 40));
        let expected = r#"{"sample": 40, "id": "p", "prompt": "1+1=", "response": "so 2", "reference": "2"}"#;
        assert_eq!(found[0], serde_json::from_str::<Value>(expected).unwrap());
        assert_eq!(
            (&found[1]["sample"], &found[1]["earlier_turns"][0]["content"]),
            (&41.into(), &"hi".into())
        );
        let row = Map::from_iter([("difficulty".to_string(), Value::from(3))]);
        let with_rows = lines(requests_with_rows(&samples, 7, &|id| (id == "p").then_some(&row)));
        let numbers = |key: &str| with_rows.iter().map(|line| line[key].clone()).collect::<Vec<_>>();
        assert_eq!(numbers("n_to_come"), [1, 0]);
        assert_eq!(numbers("sample"), [7, 8]);
        assert_eq!(with_rows[0]["row"]["difficulty"], 3);
    }

    #[test]
    fn a_reply_is_a_verdict_or_a_reward_of_the_sample_that_was_asked_about() {
        let read = |line: &str| read_reply(line.as_bytes(), "p", 5);
        for (line, verdict, reward) in [
            (r#"{"verdict": "right"}"#, Verdict::Right, None),
            (r#"{"reward": 0.5, "sample": 5, "id": "p"}"#, Verdict::Right, Some(0.5)),
            (r#"{"reward": 0.0}"#, Verdict::Wrong, Some(0.0)),
            (r#"{"reward": -1}"#, Verdict::Wrong, Some(-1.0)),
            (r#"{"reward": 1, "verdict": "no_answer"}"#, Verdict::NoAnswer, Some(1.0)),
        ] {
            let judged = read(line).unwrap();
            assert_eq!((judged.verdict, judged.reward), (verdict, reward), "{line}");
        }
        for (line, problem) in [
            (r#"{"verdict": "right", "sample": 6}"#, "answered sample 6 where 5 was next"),
            (r#"{"verdict": "right", "id": "q"}"#, "answered for \"q\""),
            (r#"{"reason": "so"}"#, "gave neither verdict nor reward"),
            (r#"{"verdict": "right", "score": 1}"#, "unknown field `score`"),
            ("right", "wrote \"right\""),
        ] {
            let said = read(line).unwrap_err();
            assert!(said.contains(problem), "{line}: {said}");
        }
    }

    #[test]
    fn long_lines_are_shown_by_their_beginning() {
        assert_eq!(shortened(&[b'x'; 120]), format!("{:?}", "x".repeat(120)));
        assert_eq!(shortened(&[b'x'; 121]), format!("{:?} ...", "x".repeat(120)));
    }
}
