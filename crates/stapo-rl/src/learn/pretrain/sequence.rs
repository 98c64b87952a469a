//! Texts as tokens, each token learned or given.

use super::file_texts::FileTexts;
use super::rows::TextRow;
use crate::error::{Error, Result};
use crate::learn::scoring::Sequence;
use crate::plan::config::template_variables;
use serde_json::{Map, Value};
use stapo_core::preference::Side;
use stapo_model::{ChatTemplate, Message, Tokenizer};

/// A token sequence, each token learned or given.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TextSequence {
    pub tokens: Vec<u32>,
    pub is_learned: Vec<bool>,
    /// Present for a response that is compared or judged.
    pub side: Option<Side>,
}

impl<'a> From<&'a TextSequence> for Sequence<'a> {
    fn from(text: &'a TextSequence) -> Self {
        Sequence { tokens: &text.tokens, is_scored: &text.is_learned, kept: &[] }
    }
}

impl TextSequence {
    pub(super) fn push(&mut self, tokens: &[u32], is_learned: bool) {
        self.tokens.extend_from_slice(tokens);
        self.is_learned.resize(self.tokens.len(), is_learned);
    }

    /// Leaves out given tokens at the end, which teach nothing.
    fn trimmed(mut self) -> Self {
        let n = self.is_learned.iter().rposition(|&is_learned| is_learned).map_or(0, |last| last + 1);
        self.tokens.truncate(n);
        self.is_learned.truncate(n);
        self
    }
}

/// What turns rows into tokens.
pub struct TextEncoder<'a> {
    pub tokenizer: &'a Tokenizer,
    pub template: Option<&'a ChatTemplate>,
    /// Tokens that end a response; the first one is added to responses that no template ends.
    pub stops: &'a [u32],
    pub chat_arguments: Map<String, Value>,
}

/// A text to render: the messages, and whether the start of the assistant's answer follows.
type Rendering = (Vec<Message>, bool);

impl TextEncoder<'_> {
    pub fn with_arguments(mut self, spec: &FileTexts) -> Self {
        self.chat_arguments = template_variables(&spec.chat_arguments);
        self
    }

    /// The sequences of a prompt and its response: both as they are, the response ended by a stop token.
    pub fn pair(&self, prompt: &str, response: &str) -> Result<TextSequence> {
        let mut sequence = TextSequence::default();
        let prompt = self.tokenizer.encode(prompt)?;
        // The tokenizer's first token, where it has one, begins the prompt.
        let response = if prompt.is_empty() {
            self.tokenizer.encode(response)?
        } else {
            self.tokenizer.encode_rendered(response)?
        };
        sequence.push(&prompt, false);
        sequence.push(&response, true);
        sequence.push(&self.stops[..self.stops.len().min(1)], true);
        Ok(sequence)
    }

    /// The sequences of many rows: one for a pair or a text. A conversation is one sequence, in which every answer is
    /// learned; where the template renders earlier turns otherwise once later ones follow, as templates that drop
    /// earlier thinking do, each answer is a separate sequence, rendered as the model will meet it.
    pub fn sequences(&self, rows: &[&TextRow]) -> Result<Vec<Vec<TextSequence>>> {
        let wanted: Vec<Rendering> = rows.iter().flat_map(|row| renderings(row)).collect();
        let rendered = match (self.template, wanted.is_empty()) {
            (_, true) => Vec::new(),
            (Some(template), false) => template.render_all(&wanted, &self.chat_arguments)?,
            (None, false) => {
                return Err(Error::Misfit {
                    key: "data",
                    problem: "holds conversations, and the model has no chat template".into(),
                    remedy: "add chat_template.jinja to the model, or give prompt and response as texts without data.chat",
                });
            }
        };
        let mut rendered = rendered.into_iter();
        rows.iter().map(|row| self.row(row, &mut rendered)).collect()
    }

    /// The sequences of a row, whose renderings come next in `rendered`.
    fn row(&self, row: &TextRow, rendered: &mut impl Iterator<Item = String>) -> Result<Vec<TextSequence>> {
        match row {
            TextRow::Text(text) => Ok(vec![self.pair("", text)?]),
            TextRow::Pair { prompt, response } => Ok(vec![self.pair(prompt, response)?]),
            TextRow::Recorded { tokens, is_learned, .. } => {
                Ok(vec![TextSequence { tokens: tokens.clone(), is_learned: is_learned.clone(), side: None }])
            }
            TextRow::Conversation(_) => {
                let texts: Vec<String> = rendered.take(renderings(row).len()).collect();
                self.conversation(&texts)
            }
            TextRow::Judged { sides, .. } => {
                let mut sequences = Vec::new();
                for (side, row) in sides {
                    let texts: Vec<String> = rendered.take(last_answer(row).len()).collect();
                    let response = match row {
                        TextRow::Conversation(_) => self.conversation(&texts)?,
                        row => self.row(row, &mut std::iter::empty())?,
                    };
                    let judged = |sequence| TextSequence { side: Some(*side), ..sequence };
                    sequences.extend(response.into_iter().map(judged));
                }
                Ok(sequences)
            }
        }
    }

    /// `texts` has two renderings for each answer: the conversation before it with the start of the answer, and the
    /// conversation up to its end.
    fn conversation(&self, texts: &[String]) -> Result<Vec<TextSequence>> {
        let answers: Vec<(&str, &str)> =
            texts.chunks_exact(2).map(|pair| (pair[0].as_str(), pair[1].as_str())).collect();
        if let Some((before, _)) = answers.iter().find(|(before, through)| !through.starts_with(before)) {
            return Err(Error::Misfit {
                key: "data",
                problem: format!(
                    "the chat template asks for the answer with {:?}, and a conversation with that answer does not continue it",
                    before.chars().rev().take(60).collect::<Vec<_>>().into_iter().rev().collect::<String>()
                ),
                remedy: "try other data.chat_arguments, such as { enable_thinking = false }; or give prompt and response as texts",
            });
        }
        let is_one_text = answers.windows(2).all(|pair| pair[1].0.starts_with(pair[0].1));
        if is_one_text {
            return Ok(vec![self.rendered(&answers)?]);
        }
        answers.iter().map(|answer| self.rendered(&[*answer])).collect()
    }

    /// One sequence; each answer's text before it continues that of the answer before.
    fn rendered(&self, answers: &[(&str, &str)]) -> Result<TextSequence> {
        let mut sequence = TextSequence::default();
        let mut n_done = 0;
        for (before, through) in answers {
            sequence.push(&self.tokenizer.encode_rendered(&before[n_done..])?, false);
            let answer = self.tokenizer.encode_rendered(&through[before.len()..])?;
            // A response ends with its stop token; what a template adds after it is never sampled.
            let end = answer.iter().rposition(|token| self.stops.contains(token));
            let (learned, rest) = answer.split_at(end.map_or(answer.len(), |end| end + 1));
            sequence.push(learned, true);
            sequence.push(rest, false);
            n_done = through.len();
        }
        Ok(sequence.trimmed())
    }
}

/// The texts that a row's sequences are cut from: two for each answer.
fn renderings(row: &TextRow) -> Vec<Rendering> {
    let turns = match row {
        TextRow::Conversation(turns) => turns,
        TextRow::Judged { sides, .. } => return sides.iter().flat_map(|(_, row)| last_answer(row)).collect(),
        TextRow::Pair { .. } | TextRow::Text(_) | TextRow::Recorded { .. } => return Vec::new(),
    };
    let messages: Vec<Message> =
        turns.iter().map(|turn| Message { role: turn.role.clone(), content: turn.content.clone() }).collect();
    let answers = turns.iter().enumerate().filter(|(_, turn)| turn.role == "assistant");
    answers.flat_map(|(at, _)| [(messages[..at].to_vec(), true), (messages[..=at].to_vec(), false)]).collect()
}

/// The renderings of the last answer, which alone is judged.
fn last_answer(row: &TextRow) -> Vec<Rendering> {
    let mut all = renderings(row);
    all.split_off(all.len().saturating_sub(2))
}
