//! What answers a policy: an environment begins a conversation, answers every turn of the policy and ends the conversation
//! with a judgement.

mod calling;
mod guess;
mod programs;
mod spec;

pub use spec::{ClassSpec, EnvironmentSpec, GuessWords, ProgramSpec, ToolsSpec};

use super::{Task, TaskError};
use crate::reward::{Judged, Programs};
use calling::{Calling, Tools};
use guess::GuessGame;
use programs::{Played, Program};
use serde_json::Value;
use sha2::{Digest, Sha256};
use stapo_core::{Problem, ToolCall, Turn};

/// The other side of a conversation with a policy. Threads share an environment. An answer depends on the problem and on
/// the texts of the turns so far, not on other episodes.
pub trait Environment: Sync {
    /// The messages that the policy answers first.
    fn begin(&self, problem: &Problem) -> Vec<Turn> {
        problem.messages()
    }

    /// The answers to turns of the policy, in their order. Turns that wait may be given at once, so that verifiers work
    /// side by side.
    fn answer(&self, turns: &[PolicyTurn]) -> Result<Vec<Answer>, TaskError>;

    /// Whether the environment judges episodes, and not the task's verifiers.
    fn judges(&self) -> bool {
        false
    }
}

/// A finished turn of the policy.
#[derive(Debug, Clone, Copy)]
pub struct PolicyTurn<'a> {
    /// Different for every episode that is going on.
    pub episode: u64,
    pub problem: &'a Problem,
    /// The texts of the policy's turns so far; the last one is to be answered.
    pub texts: &'a [String],
}

impl<'a> PolicyTurn<'a> {
    /// The text to be answered.
    pub fn text(&self) -> &'a str {
        self.texts.last().map_or("", String::as_str)
    }
}

/// What an environment did about a turn of the policy.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The calls of tools in the turn. Each is answered by the observation of the same index.
    pub calls: Vec<ToolCall>,
    /// The reward of the turn, besides that of the judgement.
    pub reward: f64,
    pub reply: Reply,
}

impl From<Reply> for Answer {
    fn from(reply: Reply) -> Self {
        Self { calls: Vec::new(), reward: 0.0, reply }
    }
}

/// What follows a turn of the policy.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    /// The conversation continues with these messages, which the policy answers next.
    Continue(Vec<Turn>),
    /// The conversation has ended: one judgement per reward.
    Done(Vec<Judged>),
}

/// Which rewards of a task judge a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rewards {
    /// All, as training needs them.
    All,
    /// The first, whose verdict says whether an answer is right.
    First,
}

/// A task whose verifiers judge the first turn of the policy.
struct OneTurn<'a> {
    task: &'a Task,
    rewards: Rewards,
}

impl Environment for OneTurn<'_> {
    fn answer(&self, turns: &[PolicyTurn]) -> Result<Vec<Answer>, TaskError> {
        let samples: Vec<(&Problem, &str)> = turns.iter().map(|turn| (turn.problem, turn.text())).collect();
        let judged = self.task.judge_for(self.rewards, &samples)?;
        Ok(judged.into_iter().map(|judged| Reply::Done(judged).into()).collect())
    }
}

/// An environment of several turns whose tools and programs have been started.
pub(super) enum OpenEnvironment {
    Tools(Tools),
    Program(Program),
    Guess(GuessWords),
}

impl OpenEnvironment {
    pub(super) fn open(spec: &EnvironmentSpec, programs: Programs) -> Result<Self, TaskError> {
        Ok(match spec {
            EnvironmentSpec::Tools(spec) => Self::Tools(Tools::open(spec, programs)?),
            EnvironmentSpec::Python(spec) => Self::Program(Program::class(spec, programs)?),
            EnvironmentSpec::Command(spec) => Self::Program(Program::command(spec, programs)?),
            EnvironmentSpec::Guess(words) => Self::Guess(words.clone()),
        })
    }

    pub(super) fn warnings(&self) -> Vec<String> {
        match self {
            Self::Tools(tools) => tools.warnings(),
            Self::Program(program) => program.warnings(),
            Self::Guess(_) => Vec::new(),
        }
    }
}

impl Task {
    /// What answers the policy's turns in conversations about the task's problems.
    pub fn environment(&self, rewards: Rewards) -> Box<dyn Environment + '_> {
        match &self.environment {
            None => Box::new(OneTurn { task: self, rewards }),
            Some(OpenEnvironment::Tools(tools)) => Box::new(Calling { tools, judge: Some((self, rewards)) }),
            Some(OpenEnvironment::Program(program)) => Box::new(Played { program, task: self }),
            Some(OpenEnvironment::Guess(words)) => Box::new(GuessGame { words }),
        }
    }

    /// Whether an environment answers the policy between its turns.
    pub fn has_episodes(&self) -> bool {
        self.environment.is_some()
    }

    /// The schemas of the task's tools, which chat templates show to the policy; `None` for a task without tools.
    pub fn tool_schemas(&self) -> Option<&Value> {
        match &self.environment {
            Some(OpenEnvironment::Tools(tools)) => Some(&tools.schemas),
            _ => None,
        }
    }

    /// For each sample, the judgements of the rewards.
    fn judge_for(
        &self,
        rewards: Rewards,
        samples: &[(&Problem, &str)],
    ) -> Result<Vec<Vec<Judged>>, TaskError> {
        let by_reward = match rewards {
            Rewards::All => self.judge_all(samples)?,
            Rewards::First => vec![self.judge(samples)?],
        };
        let mut by_sample: Vec<Vec<Judged>> = samples.iter().map(|_| Vec::new()).collect();
        for judged in by_reward {
            by_sample.iter_mut().zip(judged).for_each(|(sample, judged)| sample.push(judged));
        }
        Ok(by_sample)
    }
}

/// Tools without a task, whose conversations are not judged.
pub struct UnjudgedTools(Tools);

impl UnjudgedTools {
    /// Opens the tools of an environment of kind `tools`.
    pub fn open(spec: &EnvironmentSpec, programs: Programs) -> Result<Self, TaskError> {
        match spec {
            EnvironmentSpec::Tools(spec) => Ok(Self(Tools::open(spec, programs)?)),
            other => {
                let problem = format!("kind {:?} plays the problems of a task", other.kind());
                Err(TaskError::setting("environment", problem, "name tools, or kind = \"tools\""))
            }
        }
    }

    pub fn schemas(&self) -> &Value {
        &self.0.schemas
    }

    pub fn environment(&self) -> Box<dyn Environment + '_> {
        Box::new(Calling { tools: &self.0, judge: None })
    }

    /// What the user should know about how the tools run on this machine.
    pub fn warnings(&self) -> Vec<String> {
        self.0.warnings()
    }
}

/// SHA-256 of a text, in hexadecimal.
pub(crate) fn sha256(text: &str) -> String {
    format!("{:x}", Sha256::digest(text))
}
