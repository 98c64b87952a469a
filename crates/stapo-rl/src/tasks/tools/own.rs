//! Tools of the user's: a function of a Python file, or a program.

use super::{Observation, Tool, ToolSchema};
use crate::reward::dialogue::{Dialogue, NoAnswer};
use crate::reward::spec::CommandSpec;
use crate::reward::{Programs, driver_greeting};
use crate::tasks::error::TaskError;
use serde_json::{Map, Value, json};
use std::sync::atomic::{AtomicU64, Ordering};

pub(super) struct Own {
    schema: ToolSchema,
    dialogue: Dialogue,
    /// The seconds that a call may take.
    limit: f64,
    n_calls: AtomicU64,
}

impl Own {
    pub(super) fn command(
        schema: ToolSchema,
        command: CommandSpec,
        n_workers: usize,
        programs: Programs,
    ) -> Result<Self, TaskError> {
        let limit = command.limits.sample_seconds;
        let (dialogue, _) = Dialogue::start(command, None, n_workers, programs)?;
        Ok(Self { schema, dialogue, limit, n_calls: AtomicU64::new(0) })
    }

    /// The driver in the interpreter reads the schema from the function.
    pub(super) fn function(
        command: CommandSpec,
        n_workers: usize,
        programs: Programs,
    ) -> Result<Self, TaskError> {
        let limit = command.limits.sample_seconds;
        let (dialogue, answer) = Dialogue::start(command, Some(driver_greeting()), n_workers, programs)?;
        let text = |key: &str| answer["schema"][key].as_str().unwrap_or_default().to_string();
        let parameters = answer["schema"]["parameters"].clone();
        let schema = ToolSchema { name: text("name"), description: text("description"), parameters };
        Ok(Self { schema, dialogue, limit, n_calls: AtomicU64::new(0) })
    }
}

impl Tool for Own {
    fn schema(&self) -> &ToolSchema {
        &self.schema
    }

    fn call(
        &self,
        arguments: &Map<String, Value>,
        _: &[Map<String, Value>],
    ) -> Result<Observation, TaskError> {
        let number = self.n_calls.fetch_add(1, Ordering::Relaxed);
        let request = json!({"call": number, "tool": self.schema.name, "arguments": arguments});
        let reply = match self.dialogue.ask(&request)? {
            Ok(reply) => reply,
            Err(NoAnswer::TimedOut) => {
                let text = format!("error: no answer within {} s", self.limit);
                return Ok(Observation { timed_out: true, ..Observation::failure(text) });
            }
            Err(NoAnswer::Failed(problem)) => {
                return Ok(Observation::failure(format!("error: the tool failed: {problem}")));
            }
        };
        Ok(match (reply["text"].as_str(), reply["error"].as_str()) {
            _ if reply["call"].as_u64().is_some_and(|other| other != number) => {
                Observation::failure("error: the tool answered another call")
            }
            (Some(text), None) => Observation::answer(text),
            (_, Some(error)) => Observation::failure(format!("error: {error}")),
            (None, None) => Observation::failure("error: the tool gave neither text nor error"),
        })
    }

    fn warnings(&self) -> Vec<String> {
        self.dialogue.warnings()
    }
}
