//! Recorded responses of all steps in one list, by what a page asks for: steps, verdict, reward, length, text, problem.

use super::http::{Refusal, Request, Response};
use super::question::{is_too_much, number_or, unreadable};
use super::responses::summary;
use crate::shared::run_folder;
use crate::shared::units::size;
use serde_json::json;
use stapo_core::record::ResponseRecord;
use stapo_rl::run::{part_files, responses_of_file, step_of};
use std::path::{Path, PathBuf};

/// Records that are read for one answer.
const MAX_BYTES: u64 = 512 << 20;
/// Responses in one answer.
const MAX_RESPONSES: usize = 500;

/// What a page asks for; a bound that it does not name is open.
struct Wanted {
    steps: (u64, u64),
    rewards: (f64, f64),
    tokens: (usize, usize),
    verdict: String,
    /// In lower case.
    text: String,
    problem: String,
}

impl Wanted {
    fn read(request: &Request) -> Result<Self, Refusal> {
        let text = |name: &str| request.value(name).unwrap_or_default().to_string();
        Ok(Self {
            steps: (number_or(request, "step_from", 0)?, number_or(request, "step_to", u64::MAX)?),
            rewards: (
                number_or(request, "reward_from", f64::NEG_INFINITY)?,
                number_or(request, "reward_to", f64::INFINITY)?,
            ),
            tokens: (number_or(request, "tokens_from", 0)?, number_or(request, "tokens_to", usize::MAX)?),
            verdict: text("verdict"),
            text: text("text").to_lowercase(),
            problem: text("problem"),
        })
    }

    fn takes(&self, response: &ResponseRecord) -> bool {
        let (n_tokens, verdict) = (response.tokens.id.len(), json!(response.verdict));
        let is_verdict = match self.verdict.as_str() {
            "" => true,
            "not_right" => verdict != "right",
            wanted => verdict == wanted,
        };
        let has_text = || {
            let texts = [&response.text, &response.prompt];
            texts.into_iter().any(|text| text.to_lowercase().contains(&self.text))
        };
        is_verdict
            && (self.problem.is_empty() || self.problem == response.problem_id)
            && (self.rewards.0..=self.rewards.1).contains(&response.reward)
            && (self.tokens.0..=self.tokens.1).contains(&n_tokens)
            && (self.text.is_empty() || has_text())
    }
}

pub fn answer(run: &Path, request: &Request) -> Result<Response, Refusal> {
    let wanted = Wanted::read(request)?;
    let most = number_or(request, "most", MAX_RESPONSES)?.min(MAX_RESPONSES);
    let is_wanted =
        |path: &PathBuf| step_of(path).is_some_and(|step| (wanted.steps.0..=wanted.steps.1).contains(&step));
    let files: Vec<PathBuf> =
        part_files(run, "rollouts").unwrap_or_default().into_iter().filter(is_wanted).collect();
    let n_bytes: u64 =
        files.iter().filter_map(|path| path.symlink_metadata().ok()).map(|file| file.len()).sum();
    if is_too_much(n_bytes, MAX_BYTES) {
        let text = format!(
            "{} of responses in these steps, at most {} are searched",
            size(n_bytes),
            size(MAX_BYTES)
        );
        return Err(Refusal::new(413, text));
    }
    let objective = run_folder::plan(run).map_err(|error| unreadable(&error))?.objective;
    let (mut found, mut n_found, mut n_read) = (Vec::new(), 0, 0);
    for path in &files {
        let responses = responses_of_file(path, &objective).map_err(|error| unreadable(&error.into()))?;
        n_read += responses.len();
        for response in responses.iter().filter(|response| wanted.takes(response)) {
            n_found += 1;
            if found.len() < most {
                let mut shown = summary(response);
                shown["step"] = json!(response.step);
                found.push(shown);
            }
        }
    }
    Ok(Response::json(&json!({ "responses": found, "n_found": n_found, "n_read": n_read })))
}
