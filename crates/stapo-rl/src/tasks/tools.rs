//! Tools that a policy calls between its turns: the calls in a sampled text, the tools themselves, and what they answer.
//!
//! A call changes nothing that a later call sees, except where a `python` tool has a session; and a session is a function
//! of the earlier calls of its episode. So an observation depends on its episode alone, not on the order of episodes.

mod calculator;
pub mod calls;
mod finish;
mod own;
mod python;
mod search;
mod spec;
#[cfg(test)]
mod tests;

pub use calls::{Arguments, Call, CallFormat, CallProblem, ParsedTurn};
pub(crate) use spec::default_workers;
pub use spec::{FunctionSpec, OwnCommandSpec, PythonToolSpec, SearchSpec, Session, ToolSpec};

use crate::reward::Programs;
use crate::tasks::error::TaskError;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::time::Instant;

/// The name of the tool that ends an episode with an answer.
pub const FINISH: &str = "finish";

/// What a tool answers to a call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Observation {
    pub text: String,
    /// Whether the call was wrong, or the tool could not answer it.
    pub failed: bool,
    /// Whether the tool was stopped by a limit of time. Another machine may find another answer.
    pub timed_out: bool,
    /// The time that the call took. No result depends on it.
    pub seconds: f64,
}

impl Observation {
    pub fn answer(text: impl Into<String>) -> Self {
        Self { text: text.into(), failed: false, timed_out: false, seconds: 0.0 }
    }

    pub fn failure(text: impl Into<String>) -> Self {
        Self { failed: true, ..Self::answer(text) }
    }
}

impl From<&CallProblem> for Observation {
    fn from(problem: &CallProblem) -> Self {
        Self::failure(format!("error: {}", problem.text))
    }
}

/// What a model reads about a tool.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolSchema {
    pub name: String,
    pub description: String,
    /// A JSON Schema of the arguments, which are the properties of an object.
    pub parameters: Value,
}

impl ToolSchema {
    /// A tool whose arguments are strings, all of them required; each with its description.
    fn of_strings(name: &str, description: &str, parameters: &[(&str, &str)]) -> Self {
        let properties: Map<String, Value> = parameters
            .iter()
            .map(|(name, what)| ((*name).to_string(), json!({"type": "string", "description": what})))
            .collect();
        let required: Vec<&str> = parameters.iter().map(|(name, _)| *name).collect();
        let parameters = json!({"type": "object", "properties": properties, "required": required});
        Self { name: name.into(), description: description.into(), parameters }
    }

    /// The tool as an entry of a chat template's `tools`.
    fn to_json(&self) -> Value {
        json!({"type": "function", "function": {
            "name": self.name, "description": self.description, "parameters": self.parameters,
        }})
    }

    /// The names of the required arguments; of all arguments where none is required.
    fn names(&self) -> Vec<&str> {
        let required = self.parameters["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let required: Vec<&str> = required.collect();
        if !required.is_empty() {
            return required;
        }
        self.parameters["properties"]
            .as_object()
            .into_iter()
            .flat_map(Map::keys)
            .map(String::as_str)
            .collect()
    }
}

/// A tool. Threads may share a tool and call it at the same time.
pub trait Tool: Send + Sync {
    fn schema(&self) -> &ToolSchema;

    /// Answers a call. `earlier` holds the arguments of the episode's earlier calls of this tool, in order. What is wrong
    /// with the call is an observation; an error means that no call can be answered.
    fn call(
        &self,
        arguments: &Map<String, Value>,
        earlier: &[Map<String, Value>],
    ) -> Result<Observation, TaskError>;

    /// What the user should know about how the tool runs on this machine.
    fn warnings(&self) -> Vec<String> {
        Vec::new()
    }
}

/// The tools of a task, by their names.
pub struct ToolSet {
    tools: Vec<Box<dyn Tool>>,
}

impl ToolSet {
    /// Opens tools. Programs are started here, so that what is missing is found before sampling.
    pub fn from_spec(specs: &[ToolSpec], programs: Programs) -> Result<Self, TaskError> {
        let tools = specs.iter().map(|spec| spec.open(programs)).collect::<Result<Vec<_>, _>>()?;
        let mut names: Vec<&str> = tools.iter().map(|tool| tool.schema().name.as_str()).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find_map(|pair| (pair[0] == pair[1]).then_some(pair[0])) {
            let problem = format!("two tools are called {twice:?}");
            return Err(TaskError::setting("tools", problem, "give each tool a different name"));
        }
        Ok(Self { tools })
    }

    /// The schemas of all tools, as the variable `tools` of chat templates.
    pub fn schemas(&self) -> Value {
        self.tools.iter().map(|tool| tool.schema().to_json()).collect()
    }

    /// The schemas as text, for models without a chat template that shows tools.
    pub fn describe(&self) -> String {
        let line = |tool: &dyn Tool| {
            let schema = tool.schema();
            format!("{}({}): {}", schema.name, schema.names().join(", "), schema.description)
        };
        self.tools.iter().map(|tool| line(&**tool)).collect::<Vec<_>>().join("\n")
    }

    /// Answers a call that follows no other.
    pub fn call(&self, call: &Call) -> Result<Observation, TaskError> {
        self.call_after(&[], call)
    }

    /// Answers a call after the earlier calls of its episode, of all tools and in their order.
    pub fn call_after(&self, earlier: &[Call], call: &Call) -> Result<Observation, TaskError> {
        let start = Instant::now();
        let mut observation = match self.find(call).and_then(|tool| Ok((tool, call.bind(tool.schema())?))) {
            Ok((tool, arguments)) => {
                let earlier = earlier.iter().filter(|other| other.tool == call.tool);
                let earlier: Vec<_> = earlier.filter_map(|other| other.bind(tool.schema()).ok()).collect();
                tool.call(&arguments, &earlier)?
            }
            Err(problem) => Observation::from(&problem),
        };
        observation.seconds = start.elapsed().as_secs_f64();
        Ok(observation)
    }

    pub fn warnings(&self) -> Vec<String> {
        self.tools.iter().flat_map(|tool| tool.warnings()).collect()
    }

    fn find(&self, call: &Call) -> Result<&dyn Tool, CallProblem> {
        let names =
            || self.tools.iter().map(|tool| tool.schema().name.as_str()).collect::<Vec<_>>().join(", ");
        let found = self.tools.iter().find(|tool| tool.schema().name == call.tool);
        found.map(|tool| &**tool).ok_or_else(|| {
            CallProblem::new(format!("there is no tool {:?}; the tools are {}", call.tool, names()))
        })
    }
}
