//! The input of `stapo objective`, line by line; errors name file, line and field.

use anyhow::{Context, Result, anyhow, bail};
use serde::Deserialize;
use std::io::BufRead;

/// One response of the input.
#[derive(Debug)]
pub struct ResponseInput {
    /// Line number, from 1.
    pub number: usize,
    pub group: String,
    pub reward: f64,
    pub logp: Vec<f64>,
    pub behavior_logp: Vec<f64>,
    pub entropy: Vec<f64>,
    pub reference_logp: Option<Vec<f64>>,
    pub behavior_entropy: Option<Vec<f64>>,
    pub sampler_logp: Option<Vec<f64>>,
    pub collision: Option<Vec<f64>>,
}

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct Fields {
    group: GroupId,
    reward: f64,
    logp: Vec<f64>,
    behavior_logp: Vec<f64>,
    entropy: Vec<f64>,
    reference_logp: Option<Vec<f64>>,
    behavior_entropy: Option<Vec<f64>>,
    sampler_logp: Option<Vec<f64>>,
    collision: Option<Vec<f64>>,
    #[serde(flatten)]
    others: serde_json::Map<String, serde_json::Value>,
}

/// A group's identifier: a string or a whole number.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a string or a whole number")]
enum GroupId {
    Text(String),
    Number(i64),
}

const OPTIONAL: [&str; 4] = ["reference_logp", "behavior_entropy", "sampler_logp", "collision"];

/// All responses, or the error of the first bad line. Blank lines are skipped.
pub fn read_lines(input: impl BufRead, file: &str) -> Result<Vec<ResponseInput>> {
    let mut lines = Vec::new();
    for (idx, text) in input.lines().enumerate() {
        let number = idx + 1;
        let text = text.with_context(|| format!("{file}:{number}"))?;
        if !text.trim().is_empty() {
            lines.push(parse(number, &text).map_err(|problem| anyhow!("{file}:{number}: {problem:#}"))?);
        }
    }
    Ok(lines)
}

fn parse(number: usize, text: &str) -> Result<ResponseInput> {
    let mut json = serde_json::Deserializer::from_str(text);
    let fields: Fields = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        explain(text, &path, &error.into_inner())
    })?;
    json.end().map_err(|error| anyhow!("more than one JSON object: {error}"))?;
    check_others(&fields)?;
    let group = match fields.group {
        GroupId::Text(text) => text,
        GroupId::Number(number) => number.to_string(),
    };
    if let Some(collision) = &fields.collision {
        if collision.len() != fields.logp.len() {
            bail!("collision has {} entries, logp has {}", collision.len(), fields.logp.len());
        }
        if let Some(at) = collision.iter().position(|c| !(0.0..=1.001).contains(c)) {
            bail!("collision[{at}] is {}, expected a sum of squared probabilities in [0, 1]", collision[at]);
        }
    }
    Ok(ResponseInput {
        number,
        group,
        reward: fields.reward,
        logp: fields.logp,
        behavior_logp: fields.behavior_logp,
        entropy: fields.entropy,
        reference_logp: fields.reference_logp,
        behavior_entropy: fields.behavior_entropy,
        sampler_logp: fields.sampler_logp,
        collision: fields.collision,
    })
}

/// Unknown keys belong to the user and are ignored, except a misspelt optional key, which is refused.
fn check_others(fields: &Fields) -> Result<()> {
    for key in fields.others.keys() {
        if let Some(meant) = OPTIONAL.iter().find(|known| strsim::damerau_levenshtein(key, known) <= 2) {
            bail!("unknown key `{key}`\nhint: did you mean `{meant}`?");
        }
    }
    Ok(())
}

/// serde's error with the field's path; NaN and infinities, which JSON does not have, are named as such.
fn explain(text: &str, path: &str, error: &serde_json::Error) -> anyhow::Error {
    let before = text.get(..error.column().saturating_sub(1)).unwrap_or(text);
    let start = before.rfind([',', '[', ':', ' ']).map_or(0, |at| at + 1);
    let token: String = text[start..].chars().take_while(|c| !matches!(c, ',' | ']' | '}' | ' ')).collect();
    let number = token.trim_start_matches('-').to_ascii_lowercase();
    if ["nan", "inf", "infinity"].contains(&number.as_str()) {
        let field = last_key(before).unwrap_or("a field");
        return anyhow!("{field} holds {token}, expected finite numbers");
    }
    let message = error.to_string();
    let problem = message.split(" at line ").next().unwrap_or(&message);
    let problem = problem.replace("missing field", "missing key");
    match path {
        _ if (error.is_syntax() || error.is_eof()) && !problem.contains("out of range") => {
            anyhow!("not JSON: {problem} (column {})", error.column())
        }
        "." | "" | "?" => anyhow!("{problem}"),
        path => anyhow!("{path}: {problem}"),
    }
}

/// The last `"key":` of a piece of JSON.
fn last_key(text: &str) -> Option<&str> {
    let colon = text.rfind("\":")?;
    let open = text[..colon].rfind('"')?;
    Some(&text[open + 1..colon])
}
