//! How a run asks its model.

use super::RolloutConfig;
use super::refusal::{PlanError, require};
use crate::tasks::TaskSpec;
use serde_json::{Map, Value};
use toml::Table;

/// How a model is asked, and which texts end its answers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PromptStyle {
    /// Renders prompts with the model's chat template.
    pub chat: bool,
    /// Further variables of the chat template, such as `enable_thinking`.
    pub chat_arguments: Map<String, Value>,
    /// Texts that end a response, see [`stapo_model::generate::StopTexts`].
    pub stop: Vec<String>,
}

impl PromptStyle {
    pub(super) fn from_rollout(rollout: &RolloutConfig) -> Self {
        let chat_arguments = template_variables(&rollout.chat_arguments);
        Self { chat: rollout.chat, chat_arguments, stop: rollout.stop.clone() }
    }
}

/// The variables of a chat template as values of JSON. A date without quotes is the text of the date.
pub(crate) fn template_variables(arguments: &Table) -> Map<String, Value> {
    let json = |value: &toml::Value| match value {
        toml::Value::Datetime(date) => Value::from(date.to_string()),
        other => serde_json::to_value(other).expect("values of TOML are values of JSON"),
    };
    arguments.iter().map(|(name, value)| (name.clone(), json(value))).collect()
}

/// Refuses settings of the prompts that would have no effect or no meaning.
pub(super) fn check(rollout: &RolloutConfig, task: &TaskSpec) -> Result<(), PlanError> {
    let given = [
        ("rollout.chat_arguments", !rollout.chat_arguments.is_empty()),
        ("task.system", task.system().is_some()),
    ];
    for (key, is_given) in given {
        let problem = "has no effect, because prompts are not rendered with a chat template";
        require(rollout.chat || !is_given, key, "given:", problem, "set rollout.chat=true, or leave it out")?;
    }
    let is_text = rollout.stop.iter().all(|text| !text.is_empty());
    require(is_text, "rollout.stop", "an empty text", "ends every response", "leave it out")
}
