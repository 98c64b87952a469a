//! Conversations rendered to text by the model's own chat template, with the conventions of Hugging Face.

mod continuation;
#[cfg(test)]
mod tests;

pub use continuation::{Segment, plain_continuation};

use crate::error::{Error, Result};
use crate::template::{Dialect, Limits, Refused, Template};
use minijinja::value::{Serde, Value};
use serde::Serialize;
use serde_json::Map;

/// Steps that a rendering may take per message, and the least number of steps granted.
const STEPS_PER_MESSAGE: u64 = 60_000;
const MIN_STEPS: u64 = 3_000_000;
/// Bytes of work per byte of conversation, and besides that.
const WORK_PER_BYTE: u64 = 256;
const MIN_WORK_BYTES: u64 = 64 << 20;
/// Longest rendered conversation.
const MAX_OUTPUT_BYTES: usize = 64 << 20;

/// A chat template. The template comes with the model and is therefore untrusted: it runs without files, clock or
/// network, and nesting, steps, memory and output are bounded.
///
/// A prompt must not depend on the day. Templates get `strftime_now` only with a variable `today` (`2026-11-18`), which it
/// formats. Without one, templates that test for the function (Llama 3's) fall back on their own fixed date, and templates
/// that call it without a test are refused.
#[derive(Debug)]
pub struct ChatTemplate {
    location: String,
    source: String,
    template: Template,
    special_tokens: SpecialTokens,
    frames: continuation::Frames,
}

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or another role that the template knows.
    pub role: String,
    pub content: String,
}

/// The texts of special tokens by the names that templates use: `bos_token`, `eos_token`, ..
pub type SpecialTokens = std::collections::BTreeMap<String, String>;

impl ChatTemplate {
    /// Checks and compiles a template; `location` names its file in errors.
    pub fn new(location: &str, source: &str, special_tokens: SpecialTokens) -> Result<Self> {
        let template = Template::new(without_generation_marks(source), Dialect::Chat)
            .map_err(|refused| named(location, refused))?;
        let (location, source) = (location.to_owned(), source.to_owned());
        Ok(Self { location, source, template, special_tokens, frames: continuation::Frames::default() })
    }

    /// The conversation and the start of the assistant's answer (`add_generation_prompt`). `variables` are further
    /// variables of the template, such as `enable_thinking`.
    pub fn prompt(&self, messages: &[Message], variables: &Map<String, serde_json::Value>) -> Result<String> {
        self.render(messages, true, variables)
    }

    /// Many conversations, each with the start of the assistant's answer or without, faster than one by one. The first
    /// conversation that the template refuses refuses all.
    pub fn render_all(
        &self,
        conversations: &[(Vec<Message>, bool)],
        variables: &Map<String, serde_json::Value>,
    ) -> Result<Vec<String>> {
        let renderings: Vec<(Value, Limits)> = conversations
            .iter()
            .map(|(messages, add_generation_prompt)| {
                self.rendering(messages, *add_generation_prompt, variables)
            })
            .collect();
        self.template.render_all(&renderings).map_err(|refused| named(&self.location, refused))
    }

    /// The conversation alone, every turn closed.
    pub fn transcript(
        &self,
        messages: &[Message],
        variables: &Map<String, serde_json::Value>,
    ) -> Result<String> {
        self.render(messages, false, variables)
    }

    /// The template as the model carries it.
    pub fn source(&self) -> &str {
        &self.source
    }

    fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        variables: &Map<String, serde_json::Value>,
    ) -> Result<String> {
        let (context, limits) = self.rendering(messages, add_generation_prompt, variables);
        self.template.render(&context, limits).map_err(|refused| named(&self.location, refused))
    }

    /// A conversation of messages with further keys, with the start of the assistant's answer.
    fn render_json(
        &self,
        messages: &[serde_json::Value],
        variables: &Map<String, serde_json::Value>,
    ) -> Result<String> {
        let (context, limits) = self.rendering(messages, true, variables);
        self.template.render(&context, limits).map_err(|refused| named(&self.location, refused))
    }

    /// The variables of the template for a conversation, and the bounds of its rendering.
    fn rendering<M: Serialize + ContentBytes>(
        &self,
        messages: &[M],
        add_generation_prompt: bool,
        variables: &Map<String, serde_json::Value>,
    ) -> (Value, Limits) {
        let mut context = std::collections::BTreeMap::new();
        for (name, text) in &self.special_tokens {
            context.insert(name.as_str(), Value::from(text.as_str()));
        }
        context.insert("messages", Value::from(Serde(messages)));
        context.insert("tools", Value::from(()));
        context.insert("documents", Value::from(()));
        context.insert("add_generation_prompt", Value::from(add_generation_prompt));
        for (name, value) in variables {
            context.insert(name, Value::from(Serde(value)));
        }
        let n_bytes: usize = messages.iter().map(M::content_bytes).sum();
        let limits = Limits {
            steps: MIN_STEPS.max(messages.len() as u64 * STEPS_PER_MESSAGE),
            work_bytes: MIN_WORK_BYTES + n_bytes as u64 * WORK_PER_BYTE,
            output_bytes: MAX_OUTPUT_BYTES,
        };
        (Value::from(context), limits)
    }
}

/// The length of a message's content, which decides how much work a rendering may do.
trait ContentBytes {
    fn content_bytes(&self) -> usize;
}

impl ContentBytes for Message {
    fn content_bytes(&self) -> usize {
        self.content.len()
    }
}

impl ContentBytes for serde_json::Value {
    fn content_bytes(&self) -> usize {
        self["content"].as_str().map_or(0, str::len)
    }
}

fn named(location: &str, refused: Refused) -> Error {
    Error::Template { location: location.to_owned(), problem: refused.problem, hint: refused.hint.into() }
}

/// `source` with Hugging Face's tags `{% generation %}` and `{% endgeneration %}`, which mark the assistant's tokens
/// and render nothing, replaced by a condition that always holds, with the same control of white space.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            out.push_str(tag);
            return out;
        };
        let (tag, after) = tag.split_at(end + 2);
        let word = tag[2..end].trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        match word {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}
