//! The input of `stapo objective`, line by line; errors name file, line and field.

use crate::shared::input::{Line, MAX_LINE_BYTES, next_line, too_long};
use anyhow::{Context, Result, anyhow, bail};
use serde::Deserialize;
use stapo_core::minibatch::meant_key;
use stapo_core::objective::Advantages;
use std::io::BufRead;

/// One response of the input. Tokens that the line's loss mask leaves out are in no column.
#[derive(Debug)]
pub struct ResponseInput {
    /// Line number, from 1.
    pub number: usize,
    pub group: String,
    /// Empty if the line gives its advantage.
    pub rewards: Vec<f64>,
    /// As the line gives it.
    pub advantage: Option<Advantages>,
    /// True for a token that is in the loss; absent if every token is.
    pub loss_mask: Option<Vec<bool>>,
    pub columns: Columns,
}

/// The columns of a response, with one entry per token.
#[derive(Debug)]
pub struct Columns {
    pub logp: Vec<f64>,
    pub behavior_logp: Vec<f64>,
    pub entropy: Vec<f64>,
    pub reference_logp: Option<Vec<f64>>,
    pub behavior_entropy: Option<Vec<f64>>,
    pub sampler_logp: Option<Vec<f64>>,
    pub collision: Option<Vec<f64>>,
    pub teacher_logp: Option<Vec<f64>>,
}

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct Fields {
    group: GroupId,
    reward: Option<Numbers>,
    advantage: Option<Numbers>,
    loss_mask: Option<Vec<Bit>>,
    logp: Vec<f64>,
    behavior_logp: Vec<f64>,
    entropy: Vec<f64>,
    reference_logp: Option<Vec<f64>>,
    behavior_entropy: Option<Vec<f64>>,
    sampler_logp: Option<Vec<f64>>,
    collision: Option<Vec<f64>>,
    teacher_logp: Option<Vec<f64>>,
    #[serde(flatten)]
    others: serde_json::Map<String, serde_json::Value>,
}

/// One number, or a list.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a number or a list of numbers")]
enum Numbers {
    One(f64),
    Several(Vec<f64>),
}

/// An entry of a loss mask.
#[derive(Clone, Copy, Deserialize)]
#[serde(untagged, expecting = "expected true, false, 1 or 0")]
enum Bit {
    Bool(bool),
    Number(f64),
}

impl Bit {
    fn is_set(self) -> Option<bool> {
        match self {
            Bit::Bool(bit) => Some(bit),
            Bit::Number(1.0) => Some(true),
            Bit::Number(0.0) => Some(false),
            Bit::Number(_) => None,
        }
    }
}

/// A group's identifier: a string or a whole number.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a string or a whole number")]
enum GroupId {
    Text(String),
    Number(i64),
}

/// All responses, or the error of the first bad line. Blank lines are skipped, and so is a byte-order mark at the start.
pub fn read_lines(input: &mut dyn BufRead, file: &str) -> Result<Vec<ResponseInput>> {
    let mut lines: Vec<ResponseInput> = Vec::new();
    for number in 1.. {
        let at = || format!("{file}:{number}");
        let Some(line) = next_line(input, MAX_LINE_BYTES).with_context(at)? else { break };
        let Line::Text(bytes) = line else { bail!("{}: {}", at(), too_long(MAX_LINE_BYTES)) };
        let text = String::from_utf8(bytes).with_context(at)?;
        let text = if number == 1 { text.trim_start_matches('\u{feff}') } else { &text };
        if text.trim().is_empty() {
            continue;
        }
        let line = parse(number, text).map_err(|problem| anyhow!("{file}:{number}: {problem:#}"))?;
        if let Some(first) =
            lines.first().filter(|first| first.advantage.is_some() != line.advantage.is_some())
        {
            let (with, without) = if line.advantage.is_some() { (&line, first) } else { (first, &line) };
            bail!(
                "{file}:{number}: line {} has an advantage, line {} has none\nhint: give an advantage on all lines, or on none",
                with.number,
                without.number
            );
        }
        lines.push(line);
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
    let n_tokens = fields.logp.len();
    let advantage = fields.advantage.map(|numbers| match numbers {
        Numbers::One(number) => Advantages::Response(number),
        Numbers::Several(numbers) => Advantages::Tokens(numbers),
    });
    let rewards = match fields.reward {
        Some(Numbers::One(number)) => vec![number],
        Some(Numbers::Several(numbers)) => numbers,
        None if advantage.is_some() => Vec::new(),
        None => bail!("missing key `reward`\nhint: a line without a reward needs an advantage"),
    };
    let loss_mask = fields.loss_mask.map(|bits| loss_mask(&bits, n_tokens)).transpose()?;
    let columns = Columns {
        logp: fields.logp,
        behavior_logp: fields.behavior_logp,
        entropy: fields.entropy,
        reference_logp: fields.reference_logp,
        behavior_entropy: fields.behavior_entropy,
        sampler_logp: fields.sampler_logp,
        collision: fields.collision,
        teacher_logp: fields.teacher_logp,
    };
    let mut line = ResponseInput { number, group, rewards, advantage, loss_mask: None, columns };
    if let Some(mask) = loss_mask {
        line.leave_out(&mask)?;
        line.loss_mask = Some(mask);
    }
    Ok(line)
}

fn loss_mask(bits: &[Bit], n_tokens: usize) -> Result<Vec<bool>> {
    if bits.len() != n_tokens {
        bail!("loss_mask has {} entries, logp has {n_tokens}", bits.len());
    }
    let set = bits.iter().enumerate().map(|(at, bit)| {
        bit.is_set().ok_or_else(|| anyhow!("loss_mask[{at}] is neither true or 1 nor false or 0"))
    });
    set.collect()
}

impl ResponseInput {
    /// Takes the tokens that a loss mask leaves out from every column.
    fn leave_out(&mut self, mask: &[bool]) -> Result<()> {
        let Columns {
            logp,
            behavior_logp,
            entropy,
            reference_logp,
            behavior_entropy,
            sampler_logp,
            collision,
            teacher_logp,
        } = &mut self.columns;
        let advantage = match &mut self.advantage {
            Some(Advantages::Tokens(advantages)) => Some(advantages),
            _ => None,
        };
        let columns = [
            ("behavior_logp", Some(behavior_logp)),
            ("entropy", Some(entropy)),
            ("reference_logp", reference_logp.as_mut()),
            ("behavior_entropy", behavior_entropy.as_mut()),
            ("sampler_logp", sampler_logp.as_mut()),
            ("collision", collision.as_mut()),
            ("teacher_logp", teacher_logp.as_mut()),
            ("advantage", advantage),
            ("logp", Some(logp)),
        ];
        for (field, values) in columns {
            let Some(values) = values else { continue };
            if values.len() != mask.len() {
                bail!("{field} has {} entries, logp has {}", values.len(), mask.len());
            }
            let mut in_loss = mask.iter();
            values.retain(|_| in_loss.next().copied().unwrap_or(false));
        }
        Ok(())
    }

    /// The index in the line of a token that is in the loss.
    pub fn index_in_line(&self, token_idx: usize) -> usize {
        let Some(mask) = &self.loss_mask else { return token_idx };
        let mut in_loss = (0..mask.len()).filter(|&idx| mask[idx]);
        in_loss.nth(token_idx).unwrap_or(token_idx)
    }
}

/// Unknown keys belong to the user and are ignored, except a misspelt optional key, which is refused.
fn check_others(fields: &Fields) -> Result<()> {
    for key in fields.others.keys() {
        if let Some(meant) = meant_key(key) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_key_is_the_one_before_the_last_colon() {
        assert_eq!(last_key("{\"group\": \"a\", \"logp\": [0.1, "), Some("logp"));
        assert_eq!((last_key("[1, "), last_key("{a: ")), (None, None));
    }
}
