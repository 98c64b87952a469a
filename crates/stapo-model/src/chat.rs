//! Conversations rendered to text by the model's own chat template, with the conventions of Hugging Face.

mod python;
#[cfg(test)]
mod tests;

use crate::error::{Error, Hint, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{Environment, ErrorKind};
use serde::Serialize;
use serde_json::Map;

/// Longest template accepted; published templates have up to about 20 kB.
const MAX_TEMPLATE: usize = 1 << 20;
/// Steps that a rendering may take per message, and the least number of steps granted.
const FUEL_PER_MESSAGE: u64 = 20_000;
const MIN_FUEL: u64 = 1_000_000;
const NAME: &str = "chat";

/// A compiled chat template. The template comes with the model and is therefore untrusted: the engine runs it without
/// files, clock or network and bounds nesting and steps. Memory is not bounded: a malicious template can double a
/// string at every step.
///
/// `strftime_now` is not defined, because a prompt must not depend on the day. Templates that test for the function
/// (Llama 3's) fall back on their own fixed date; templates that call it without a test are refused. A date can be
/// given as a variable where the template reads one.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    special_tokens: SpecialTokens,
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
    pub fn new(source: &str, special_tokens: SpecialTokens) -> Result<Self> {
        if source.len() > MAX_TEMPLATE {
            let problem = format!("{} bytes, at most {MAX_TEMPLATE} are accepted", source.len());
            return Err(Error::Template { problem, hint: Hint::default() });
        }
        let mut environment = Environment::new();
        let syntax =
            SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(|e| broken(&e))?;
        environment.set_syntax(syntax);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        python::install(&mut environment);
        environment
            .add_template_owned(NAME, python::without_generation_marks(source))
            .map_err(|e| broken(&e))?;
        Ok(Self { environment, source: source.to_owned(), special_tokens })
    }

    /// The conversation and the start of the assistant's answer (`add_generation_prompt`). `variables` are further
    /// variables of the template, such as `enable_thinking`.
    pub fn prompt(&self, messages: &[Message], variables: &Map<String, serde_json::Value>) -> Result<String> {
        self.render(messages, true, variables)
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
        // minijinja keeps the fuel in the environment, and the fuel depends on the conversation.
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(MIN_FUEL.max(messages.len() as u64 * FUEL_PER_MESSAGE)));
        let template = environment.get_template(NAME).map_err(|e| broken(&e))?;
        template.render(Value::from(context)).map_err(|e| broken(&e))
    }
}

/// The engine's error in one line, or the template's own message if the template refused the conversation.
fn broken(error: &minijinja::Error) -> Error {
    let line = error.line().map(|line| format!(" (line {line})")).unwrap_or_default();
    let detail = error.detail().unwrap_or_default();
    if let Some(message) = detail.strip_prefix(python::RAISED) {
        return Error::Template {
            problem: format!("refuses the conversation: {message}"),
            hint: Hint::default(),
        };
    }
    let hint = match error.kind() {
        ErrorKind::OutOfFuel => {
            "it takes more steps than any conversation needs; do not trust this model's files"
        }
        ErrorKind::UnknownFunction if detail.contains("strftime_now") => {
            "the prompt would depend on the day; edit the template to read the date from a variable"
        }
        _ => "",
    };
    Error::Template { problem: format!("{}: {detail}{line}", error.kind()), hint: hint.into() }
}
