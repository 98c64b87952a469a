//! Tools as an environment: the calls of a turn are answered, and a turn without calls is the answer to the problem.

use super::spec::ToolsSpec;
use super::{Answer, Environment, PolicyTurn, Reply, Rewards};
use crate::reward::{Judged, Programs};
use crate::tasks::tools::{Arguments, Call, CallProblem, Observation, ToolSet};
use crate::tasks::{Task, TaskError};
use serde_json::Value;
use stapo_core::{Problem, ToolCall, Turn, Verdict};

/// Open tools.
pub(in crate::tasks) struct Tools {
    spec: ToolsSpec,
    set: ToolSet,
    pub schemas: Value,
}

impl Tools {
    pub fn open(spec: &ToolsSpec, programs: Programs) -> Result<Self, TaskError> {
        if spec.tools.is_empty() {
            return Err(TaskError::setting("environment.tools", "an empty list", "name at least one tool"));
        }
        let set = ToolSet::from_spec(&spec.tools, programs)?;
        Ok(Self { spec: spec.clone(), schemas: set.schemas(), set })
    }

    pub fn warnings(&self) -> Vec<String> {
        self.set.warnings()
    }
}

pub(super) struct Calling<'a> {
    pub tools: &'a Tools,
    /// What judges the answer; `None` where nobody does.
    pub judge: Option<(&'a Task, Rewards)>,
}

impl Environment for Calling<'_> {
    fn begin(&self, problem: &Problem) -> Vec<Turn> {
        problem.messages()
    }

    fn answer(&self, turns: &[PolicyTurn]) -> Result<Vec<Answer>, TaskError> {
        turns.iter().map(|turn| self.answer_turn(turn)).collect()
    }
}

impl Calling<'_> {
    fn answer_turn(&self, turn: &PolicyTurn) -> Result<Answer, TaskError> {
        let format = self.tools.spec.format;
        let parsed = format.parse(turn.text());
        if let Some(answer) = &parsed.answer {
            let marked = self.judge.map(|(task, _)| task.as_marked_answer(answer));
            return self.judge(turn.problem, &marked.unwrap_or_else(|| answer.clone()));
        }
        if parsed.calls.is_empty() {
            return self.judge(turn.problem, turn.text());
        }
        let (_, before) = turn.texts.split_last().unwrap_or((&String::new(), &[]));
        let mut earlier: Vec<Call> =
            before.iter().flat_map(|text| format.parse(text).calls).flatten().collect();
        let mut calls = Vec::new();
        let mut observations = Vec::new();
        for call in parsed.calls {
            let observation = match &call {
                Ok(call) => self.tools.set.call_after(&earlier, call)?,
                Err(problem) => Observation::from(problem),
            };
            calls.push(record(&call, &observation));
            observations.push(Turn { role: self.tools.spec.role().into(), content: observation.text });
            earlier.extend(call);
        }
        Ok(Answer { calls, reward: 0.0, reply: Reply::Continue(observations) })
    }

    fn judge(&self, problem: &Problem, text: &str) -> Result<Answer, TaskError> {
        let judged = match self.judge {
            Some((task, rewards)) => task.judge_for(rewards, &[(problem, text)])?.pop().unwrap_or_default(),
            None => vec![Judged::new(Verdict::NoAnswer, Some(text.to_string()), "not judged".into())],
        };
        Ok(Reply::Done(judged).into())
    }
}

/// A call as records have it.
fn record(call: &Result<Call, CallProblem>, observation: &Observation) -> ToolCall {
    let (tool, arguments) = match call {
        Ok(Call { tool, arguments: Arguments::Named(named) }) => {
            (tool.clone(), Value::from(named.clone()).to_string())
        }
        Ok(Call { tool, arguments: Arguments::Text(text) }) => (tool.clone(), text.clone()),
        Err(_) => (String::new(), String::new()),
    };
    let sha256 = super::sha256(&observation.text);
    ToolCall { tool, arguments, sha256, failed: observation.failed, timed_out: observation.timed_out }
}
