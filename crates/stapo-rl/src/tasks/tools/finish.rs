//! The tool that ends an episode. `CallFormat::parse` takes the answer from its call, so it is never called.

use super::{FINISH, Observation, Tool, ToolSchema};
use crate::tasks::error::TaskError;
use serde_json::{Map, Value};

pub(super) struct Finish {
    schema: ToolSchema,
}

impl Finish {
    pub(super) fn new() -> Self {
        let description = "Ends the conversation with the final answer.";
        Self { schema: ToolSchema::of_strings(FINISH, description, &[("answer", "the final answer")]) }
    }
}

impl Tool for Finish {
    fn schema(&self) -> &ToolSchema {
        &self.schema
    }

    fn call(&self, _: &Map<String, Value>, _: &[Map<String, Value>]) -> Result<Observation, TaskError> {
        Ok(Observation::answer("the conversation has ended"))
    }
}
