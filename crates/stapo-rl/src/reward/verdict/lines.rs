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
