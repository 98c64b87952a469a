//! How a problem becomes a prompt: the task's template and system message.

use super::error::TaskError;
use super::template::{Question, Template};
use serde_json::{Map, Value};
use stapo_core::Turn;

pub(super) struct Wording {
    template: Template,
    /// The first turn of conversations without a system message.
    system: Option<Turn>,
}

impl Wording {
    pub(super) fn new(template: &str, system: Option<&str>) -> Result<Self, TaskError> {
        let system = system.map(|text| Turn { role: SYSTEM.into(), content: text.into() });
        Ok(Self { template: Template::new(template)?, system })
    }

    /// The prompt of one problem; `fields` holds the variables of the template besides `id` and `problem`.
    pub(super) fn prompt(
        &self,
        id: &str,
        problem: &str,
        fields: &Map<String, Value>,
    ) -> Result<String, TaskError> {
        self.template.render(id, problem, fields)
    }

    /// The prompts of many problems.
    pub(super) fn prompts(&self, questions: &[Question]) -> Result<Vec<String>, TaskError> {
        self.template.render_all(questions)
    }

    /// The turns before the prompt, the system message first. A system message among `given` keeps its place and the
    /// task's is not added.
    pub(super) fn turns(&self, given: &[Turn]) -> Vec<Turn> {
        let system_turn =
            self.system.iter().filter(|_| given.iter().all(|turn| turn.role != SYSTEM)).cloned();
        system_turn.chain(given.iter().cloned()).collect()
    }
}

const SYSTEM: &str = "system";
