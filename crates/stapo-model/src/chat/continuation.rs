//! The text between two turns of the assistant: what the chat template writes after a turn, around the observations and
//! before the next turn.
//!
//! What the model sampled is never rendered. The conversation is rendered with a placeholder as the assistant's content, and
//! what follows the placeholder is the continuation. Observations are rendered as placeholders as well, so that the
//! template's text, which may hold special tokens, is kept apart from the text of an observation, which may not.

use super::{ChatTemplate, Message};
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A part of a continuation. Tokens never span two parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Segment {
    /// Text of the chat template, in which special tokens have their meaning.
    Template(String),
    /// Text from outside, such as a tool's output, in which special tokens are plain characters.
    Observation(String),
}

/// Roles whose messages carry an identifier of the call that they answer; some templates refuse messages without one.
const TOOL_ROLES: [&str; 3] = ["tool", "ipython", "tool_results"];
/// Mistral's templates ask for nine letters or digits.
const CALL_ID: &str = "call00001";
/// An observation that shows what a template does to observations.
const PROBE: &str = " \n\"a\" \\ <b> 'c' {d} \té\u{1f600}\u{7f}/ \n";
/// Frames that are kept. Samples of one problem, and all their turns, share one.
const MAX_FRAMES: usize = 1024;

/// The text around the observations of a continuation.
#[derive(Debug)]
pub(super) struct Frame {
    /// The text before the first observation, between observations and after the last.
    texts: Vec<String>,
    /// What the template does to each observation.
    changes: Vec<Change>,
}

/// Frames by the conversation that they follow.
pub(super) type Frames = Mutex<BTreeMap<String, Arc<Frame>>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    None,
    /// Removes white space at both ends.
    Trim,
    /// Writes a string of JSON; the quotes are the template's text.
    Json,
    /// Anything else, for which the template must be asked.
    Other,
}

impl Change {
    /// The change that makes `changed` of [`PROBE`].
    fn of_probe(changed: &str) -> Self {
        let known = [Self::None, Self::Trim, Self::Json];
        known
            .into_iter()
            .find(|change| change.apply(PROBE).as_deref() == Some(changed))
            .unwrap_or(Self::Other)
    }

    fn apply(self, text: &str) -> Option<String> {
        match self {
            Self::None => Some(text.to_owned()),
            Self::Trim => Some(text.trim().to_owned()),
            Self::Json => {
                let quoted = Value::from(text).to_string();
                Some(quoted[1..quoted.len() - 1].to_owned())
            }
            Self::Other => None,
        }
    }
}

impl ChatTemplate {
    /// What the template appends to a finished turn of the assistant: the end of the turn, the observations and the start
    /// of the next turn. `opening` is the conversation before the first turn of the assistant; the turn itself and all
    /// earlier ones stay as they were sampled.
    ///
    /// A template may change an observation, as Llama's does by writing strings as JSON; the change is kept. A template
    /// whose other text depends on an observation gets no such influence: the text is that of a neutral observation.
    pub fn continuation(
        &self,
        opening: &[Message],
        observations: &[Message],
        variables: &Map<String, Value>,
    ) -> Result<Vec<Segment>> {
        let frame = self.frame(opening, observations, variables)?;
        let mut segments = Vec::with_capacity(2 * observations.len() + 1);
        push_template(&mut segments, &frame.texts[0]);
        for (idx, observation) in observations.iter().enumerate() {
            let changed = match frame.changes[idx].apply(&observation.content) {
                Some(changed) => changed,
                None => self.changed((opening, observations, variables), idx, &observation.content)?,
            };
            segments.push(Segment::Observation(changed));
            push_template(&mut segments, &frame.texts[idx + 1]);
        }
        Ok(segments)
    }

    /// The text around observations of these roles. Rendering takes about a millisecond, so frames are kept.
    fn frame(
        &self,
        opening: &[Message],
        observations: &[Message],
        variables: &Map<String, Value>,
    ) -> Result<Arc<Frame>> {
        let roles: Vec<&str> = observations.iter().map(|message| message.role.as_str()).collect();
        let key = json!([opening, roles, variables]).to_string();
        if let Some(frame) = self.frames.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(Arc::clone(frame));
        }
        let marks = Marks::absent_from(&[&key, PROBE]);
        let text = self.rendered(opening, observations, variables, &marks, None)?;
        let mut rest = self.after_turn(&text, &marks)?;
        let mut texts = Vec::with_capacity(observations.len() + 1);
        for idx in 0..observations.len() {
            let what = format!("observation {}", idx + 1);
            let (before, after) = self.split_once(rest, &marks.observation(idx), &what)?;
            texts.push(before.to_owned());
            rest = after;
        }
        texts.push(rest.to_owned());
        let conversation = (opening, observations, variables);
        let changes = (0..observations.len())
            .map(|idx| Ok(Change::of_probe(&self.changed(conversation, idx, PROBE)?)))
            .collect::<Result<_>>()?;
        let frame = Arc::new(Frame { texts, changes });
        keep(&mut self.frames.lock().unwrap_or_else(PoisonError::into_inner), key, &frame);
        Ok(frame)
    }

    /// What the template makes of an observation: what is between the text that surrounds its placeholder. The
    /// observation as it is where the template refuses it or writes other text around it.
    fn changed(
        &self,
        (opening, observations, variables): (&[Message], &[Message], &Map<String, Value>),
        idx: usize,
        content: &str,
    ) -> Result<String> {
        let marks = Marks::absent_from(&[&json!([opening, observations, variables]).to_string(), content]);
        let neutral = self.rendered(opening, observations, variables, &marks, None)?;
        let (before, after) = self.split_once(
            self.after_turn(&neutral, &marks)?,
            &marks.observation(idx),
            &format!("observation {}", idx + 1),
        )?;
        let shown = self.rendered(opening, observations, variables, &marks, Some((idx, content)));
        let between = shown
            .as_ref()
            .ok()
            .and_then(|text| self.after_turn(text, &marks).ok()?.strip_prefix(before)?.strip_suffix(after));
        Ok(between.unwrap_or(content).to_owned())
    }

    /// The whole conversation, with placeholders as the assistant's turn and as observations, but for the one that is
    /// `shown`.
    fn rendered(
        &self,
        opening: &[Message],
        observations: &[Message],
        variables: &Map<String, Value>,
        marks: &Marks,
        shown: Option<(usize, &str)>,
    ) -> Result<String> {
        let mut messages: Vec<Value> = opening.iter().map(|message| json!(message)).collect();
        messages.push(json!({"role": "assistant", "content": marks.turn()}));
        for (idx, message) in observations.iter().enumerate() {
            let content = match shown {
                Some((at, content)) if at == idx => content.to_owned(),
                _ => marks.observation(idx),
            };
            messages.push(reply(message, &content));
        }
        self.render_json(&messages, variables)
    }

    /// Whether the template has a form for messages of this role after a turn of the assistant.
    pub fn knows_role(&self, role: &str, opening: &[Message], variables: &Map<String, Value>) -> bool {
        let probe = Message { role: role.to_owned(), content: "probe".to_owned() };
        self.continuation(opening, &[probe], variables).is_ok()
    }

    /// Whether the template leaves out the thinking of earlier turns, as Qwen3's does. A conversation that continues token
    /// by token keeps it: the past is what was sampled.
    pub fn drops_earlier_thinking(&self, variables: &Map<String, Value>) -> bool {
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let thought = "kept earlier thinking";
        let conversation = vec![
            message("user", "question"),
            message("assistant", &format!("<think>\n{thought}\n</think>\n\nanswer")),
            message("user", "question"),
        ];
        self.render_json(&conversation, variables).is_ok_and(|text| !text.contains(thought))
    }

    /// The part of a rendering that follows the assistant's placeholder.
    fn after_turn<'a>(&self, text: &'a str, marks: &Marks) -> Result<&'a str> {
        self.split_once(text, &marks.turn(), "the turn of the assistant").map(|(_, after)| after)
    }

    /// The text before and after a placeholder, which must occur in the text once.
    fn split_once<'a>(&self, text: &'a str, mark: &str, what: &str) -> Result<(&'a str, &'a str)> {
        let problem = match text.matches(mark).count() {
            1 => return Ok(text.split_once(mark).unwrap_or((text, ""))),
            0 => {
                format!("leaves out or moves the content of {what}, so the tokens that follow it are unknown")
            }
            n => format!("writes the content of {what} {n} times"),
        };
        let hint = "use a chat template that writes each message once and in order; for a role that it does not know, give observations the role user";
        Err(Error::Template { location: self.location.clone(), problem, hint: hint.into() })
    }
}

/// Keeps a frame, the only one where as many as there may be are kept already.
fn keep(frames: &mut BTreeMap<String, Arc<Frame>>, key: String, frame: &Arc<Frame>) {
    if frames.len() >= MAX_FRAMES {
        frames.clear();
    }
    frames.insert(key, Arc::clone(frame));
}

/// The segments of observations for a model without a chat template: each is between line breaks.
pub fn plain_continuation(observations: &[Message]) -> Vec<Segment> {
    let mut segments = Vec::with_capacity(2 * observations.len() + 1);
    for observation in observations {
        segments.push(Segment::Template("\n".into()));
        segments.push(Segment::Observation(observation.content.clone()));
    }
    segments.push(Segment::Template("\n".into()));
    segments
}

fn push_template(segments: &mut Vec<Segment>, text: &str) {
    if !text.is_empty() {
        segments.push(Segment::Template(text.to_owned()));
    }
}

/// A message with other content; replies of tools carry the identifier of a call.
fn reply(message: &Message, content: &str) -> Value {
    if TOOL_ROLES.contains(&message.role.as_str()) {
        json!({"role": message.role, "content": content, "name": "tool", "tool_call_id": CALL_ID})
    } else {
        json!({"role": message.role, "content": content})
    }
}

/// Placeholders: letters and digits alone, which no template trims, escapes or splits.
struct Marks {
    salt: u64,
}

impl Marks {
    /// Placeholders that occur in none of the texts.
    fn absent_from(texts: &[&str]) -> Self {
        let mut marks = Self { salt: 0 };
        while texts.iter().any(|text| text.contains(&marks.stem())) {
            marks.salt += 1;
        }
        marks
    }

    fn stem(&self) -> String {
        format!("stapoplaceholder{}x", self.salt)
    }

    fn turn(&self) -> String {
        format!("{}turn", self.stem())
    }

    /// The trailing letter ends the number, so that no placeholder is the beginning of another.
    fn observation(&self, idx: usize) -> String {
        format!("{}observation{idx}x", self.stem())
    }
}

#[cfg(test)]
mod tests;
