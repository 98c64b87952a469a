//! BM25 over the paragraphs of a text file (Robertson and Zaragoza, 2009), with k1 = 1.2 and b = 0.75.

use super::calls::as_text;
use super::{Observation, SearchSpec, Tool, ToolSchema};
use crate::tasks::error::TaskError;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

const K1: f64 = 1.2;
const B: f64 = 0.75;
/// The largest text that is read.
const MAX_BYTES: u64 = 1 << 30;

pub(super) struct Search {
    schema: ToolSchema,
    paragraphs: Vec<String>,
    /// For each word the paragraphs that hold it, in order, and how often.
    postings: BTreeMap<String, Vec<(usize, f64)>>,
    /// The words of each paragraph.
    lengths: Vec<f64>,
    mean_length: f64,
    n_results: usize,
}

impl Search {
    pub(super) fn open(spec: &SearchSpec) -> Result<Self, TaskError> {
        let refuse = |problem: String, remedy: &str| TaskError::File {
            path: spec.path.clone(),
            problem,
            remedy: remedy.into(),
        };
        if spec.results == 0 {
            return Err(TaskError::setting("tools.results", "0", "the paragraphs of an answer, at least 1"));
        }
        let remedy = "path of the tool search: a text file with blank lines between its paragraphs";
        let n_bytes = std::fs::metadata(&spec.path).map_err(|error| refuse(error.to_string(), remedy))?.len();
        if n_bytes > MAX_BYTES {
            return Err(refuse(
                format!("{n_bytes} bytes, at most {MAX_BYTES} are searched"),
                "split the file",
            ));
        }
        let text = std::fs::read_to_string(&spec.path).map_err(|error| refuse(error.to_string(), remedy))?;
        let search = Self::new(&text, spec.results);
        if search.paragraphs.is_empty() {
            return Err(refuse("holds no text".into(), remedy));
        }
        Ok(search)
    }

    fn new(text: &str, n_results: usize) -> Self {
        let description = "Searches a collection of texts and returns the best passages.";
        let schema = ToolSchema::of_strings("search", description, &[("query", "words to search for")]);
        let paragraphs = paragraphs(text);
        let mut postings: BTreeMap<String, Vec<(usize, f64)>> = BTreeMap::new();
        let mut lengths = Vec::with_capacity(paragraphs.len());
        for (idx, paragraph) in paragraphs.iter().enumerate() {
            let mut counts: BTreeMap<String, f64> = BTreeMap::new();
            words(paragraph).for_each(|word| *counts.entry(word).or_default() += 1.0);
            lengths.push(counts.values().sum());
            for (word, count) in counts {
                postings.entry(word).or_default().push((idx, count));
            }
        }
        let mean_length = lengths.iter().sum::<f64>() / lengths.len().max(1) as f64;
        Self { schema, paragraphs, postings, lengths, mean_length: mean_length.max(1.0), n_results }
    }

    /// The paragraphs with a word of the query and their scores, the best first; of equal ones the first in the file.
    fn ranked(&self, query: &str) -> Vec<(usize, f64)> {
        let mut scores: BTreeMap<usize, f64> = BTreeMap::new();
        let n = self.paragraphs.len() as f64;
        for word in words(query) {
            let Some(postings) = self.postings.get(&word) else { continue };
            let n_with = postings.len() as f64;
            // The logarithm of libm has the same bits on every machine.
            let rarity = libm::log(1.0 + (n - n_with + 0.5) / (n_with + 0.5));
            for &(idx, count) in postings {
                let norm = K1 * (1.0 - B + B * self.lengths[idx] / self.mean_length);
                *scores.entry(idx).or_default() += rarity * count * (K1 + 1.0) / (count + norm);
            }
        }
        let mut ranked: Vec<(usize, f64)> = scores.into_iter().collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        ranked
    }
}

/// The texts between blank lines.
fn paragraphs(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    lines
        .split(|line| line.is_empty())
        .map(|lines| lines.join("\n"))
        .filter(|text| !text.is_empty())
        .collect()
}

/// Runs of letters and digits, in lower case.
fn words(text: &str) -> impl Iterator<Item = String> {
    text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).map(str::to_lowercase)
}

impl Tool for Search {
    fn schema(&self) -> &ToolSchema {
        &self.schema
    }

    fn call(
        &self,
        arguments: &Map<String, Value>,
        _: &[Map<String, Value>],
    ) -> Result<Observation, TaskError> {
        let query = arguments.get("query").map(as_text).unwrap_or_default();
        let ranked = self.ranked(&query);
        if ranked.is_empty() {
            return Ok(Observation::answer("no passage matches"));
        }
        let best = ranked.iter().take(self.n_results).map(|&(idx, _)| &self.paragraphs[idx]);
        let numbered = best.enumerate().map(|(idx, text)| format!("[{}] {text}", idx + 1));
        Ok(Observation::answer(numbered.collect::<Vec<_>>().join("\n\n")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The scores of BM25, computed apart from this program.
    #[test]
    fn paragraphs_are_scored_by_rare_words_in_short_paragraphs() {
        let search =
            Search::new("the cat sat\n\nthe dog sat\non the mat\n\nthe cat ran after the cat\n\nzebra\n", 2);
        for (query, expected) in [
            ("cat sat", vec![(0, 1.5442266301082326), (2, 0.8355746834147286), (1, 0.5754429423516527)]),
            (
                "the zebra",
                vec![
                    (3, 1.736878799683318),
                    (1, 0.42996431598093776),
                    (2, 0.42996431598093776),
                    (0, 0.3973087983114994),
                ],
            ),
            ("horse", vec![]),
        ] {
            let found = search.ranked(query);
            assert_eq!(found.len(), expected.len(), "{query}");
            for (found, expected) in found.iter().zip(&expected) {
                assert!(
                    found.0 == expected.0 && (found.1 - expected.1).abs() < 1e-12,
                    "{found:?} {expected:?}"
                );
            }
        }
    }
}
