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
    /// What judges the answer; `None` if nothing does.
    pub judge: Option<(&'a Task, Rewards)>,
}

impl Environment for Calling<'_> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::tools::{CallFormat, ToolSpec};
    use crate::tasks::{ArithmeticSpec, EnvironmentSpec, Split, TaskSpec};

    fn task() -> Task {
        let tools = vec![ToolSpec::Calculator, ToolSpec::Finish];
        let spec = EnvironmentSpec::Tools(ToolsSpec { tools, format: CallFormat::Plain, role: None });
        let arithmetic = TaskSpec::Arithmetic(ArithmeticSpec::default());
        Task::with_environment(&arithmetic, [], Some(&spec), Programs::Never).unwrap()
    }

    #[test]
    fn calls_are_answered_in_order_and_a_turn_without_one_is_judged() {
        let task = task();
        let problem = task.problem(1, Split::Train, 0).unwrap();
        let environment = task.environment(Rewards::All);
        assert!(!environment.judges(), "the verifiers of the task judge");
        for answer in ["5", "\\boxed{5}"] {
            assert_eq!(task.as_marked_answer(answer), "\\boxed{5}");
        }
        let answer = |texts: &[&str]| {
            let texts: Vec<String> = texts.iter().map(ToString::to_string).collect();
            environment
                .answer(&[PolicyTurn { episode: 0, problem: &problem, texts: &texts }])
                .unwrap()
                .remove(0)
        };
        let called = answer(&["CALL calculator(6*7)\nCALL calculator(1/0)\nCALL abacus(1)"]);
        let Reply::Continue(observations) = &called.reply else { panic!("the episode ended") };
        assert_eq!((observations.len(), observations[0].content.as_str()), (3, "42"));
        assert_eq!(called.calls.iter().map(|call| call.failed).collect::<Vec<_>>(), [false, true, true]);
        let hashes: Vec<String> =
            observations.iter().map(|turn| super::super::sha256(&turn.content)).collect();
        assert_eq!(called.calls.iter().map(|call| call.sha256.clone()).collect::<Vec<_>>(), hashes);
        let verdict = |texts: &[&str]| match answer(texts).reply {
            Reply::Done(judged) => judged[0].verdict,
            Reply::Continue(_) => panic!("the episode goes on"),
        };
        let right = format!("\\boxed{{{}}}", problem.reference);
        assert_eq!(verdict(&[&right]), Verdict::Right);
        // Only the last turn is judged: a box in an earlier turn, as one that a tool's answer was copied to, is none.
        assert_eq!(verdict(&[&format!("CALL calculator(1)\n{right}"), "no"]), Verdict::NoAnswer);
        assert_eq!(verdict(&[&format!("CALL finish({})", problem.reference)]), Verdict::Right);
        assert_eq!(verdict(&["CALL finish(-77777)"]), Verdict::Wrong);
    }
}
