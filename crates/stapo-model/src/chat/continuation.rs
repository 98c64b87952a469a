//! The text between two turns of the assistant: what the chat template writes after a turn, around the observations and
//! before the next turn.
//!
//! What the model sampled is never rendered. The conversation is rendered with a placeholder as the assistant's content, and
//! what follows the placeholder is the continuation. Observations are rendered as placeholders as well, so that the
//! template's text, which may hold special tokens, is told apart from the text of an observation, which may not.

use super::{ChatTemplate, Message};
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};

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
        let marks = Marks::absent_from(opening, observations, variables);
        let neutral: Vec<String> = (0..observations.len()).map(|idx| marks.observation(idx)).collect();
        let conversation = |contents: &[String]| {
            let mut messages: Vec<Value> = opening.iter().map(|message| json!(message)).collect();
            messages.push(json!({"role": "assistant", "content": marks.turn()}));
            messages
                .extend(observations.iter().zip(contents).map(|(message, content)| reply(message, content)));
            messages
        };
        // The first rendering has every observation as a placeholder, each further one shows one observation as it is.
        let mut renderings = vec![conversation(&neutral)];
        for (idx, observation) in observations.iter().enumerate() {
            let mut contents = neutral.clone();
            contents[idx].clone_from(&observation.content);
            renderings.push(conversation(&contents));
        }
        // A rendering that an observation breaks says nothing about the others.
        let texts: Vec<Result<String>> = match self.render_json(&renderings, variables) {
            Ok(texts) => texts.into_iter().map(Ok).collect(),
            Err(_) => renderings
                .iter()
                .map(|messages| Ok(self.render_json(std::slice::from_ref(messages), variables)?.concat()))
                .collect(),
        };
        let mut texts = texts.into_iter();
        let frame = texts.next().unwrap_or_else(|| Ok(String::new()))?;
        let frame = self.after_turn(&frame, &marks)?;
        let mut segments = Vec::with_capacity(2 * observations.len() + 1);
        let mut rest = frame;
        for (idx, (observation, text)) in observations.iter().zip(texts).enumerate() {
            let mark = marks.observation(idx);
            let (before, after) = self.split_once(rest, &mark, &format!("observation {}", idx + 1))?;
            push_template(&mut segments, before);
            let head = &frame[..frame.len() - after.len() - mark.len()];
            let changed = text.as_ref().ok().and_then(|text| {
                let shown = self.after_turn(text, &marks).ok()?;
                shown.strip_prefix(head)?.strip_suffix(after)
            });
            segments.push(Segment::Observation(changed.unwrap_or(&observation.content).to_owned()));
            rest = after;
        }
        push_template(&mut segments, rest);
        Ok(segments)
    }

    /// Whether the template has a form for messages of this role after a turn of the assistant.
    pub fn knows_role(&self, role: &str, opening: &[Message], variables: &Map<String, Value>) -> bool {
        let probe = Message { role: role.to_owned(), content: "probe".to_owned() };
        self.continuation(opening, &[probe], variables).is_ok()
    }

    /// Whether the template leaves out the thinking of earlier turns, as Qwen3's does. A conversation that goes on token
    /// by token keeps it: the past is what was sampled.
    pub fn drops_earlier_thinking(&self, variables: &Map<String, Value>) -> bool {
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let thought = "kept earlier thinking";
        let conversation = vec![
            message("user", "question"),
            message("assistant", &format!("<think>\n{thought}\n</think>\n\nanswer")),
            message("user", "question"),
        ];
        match self.render_json(&[conversation], variables) {
            Ok(texts) => texts.iter().all(|text| !text.contains(thought)),
            Err(_) => false,
        }
    }

    /// The part of a rendering that follows the assistant's placeholder.
    fn after_turn<'a>(&self, text: &'a str, marks: &Marks) -> Result<&'a str> {
        self.split_once(text, &marks.turn(), "the turn of the assistant").map(|(_, after)| after)
    }

    /// The text before and after a placeholder, which must stand in the text once.
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

/// The segments of observations for a model without a chat template: each stands between line breaks.
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
    /// Placeholders that occur in no text of the conversation.
    fn absent_from(opening: &[Message], observations: &[Message], variables: &Map<String, Value>) -> Self {
        let variables = json!(variables).to_string();
        let contents = opening.iter().chain(observations).map(|message| message.content.as_str());
        let texts: Vec<&str> = contents.chain([variables.as_str()]).collect();
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
