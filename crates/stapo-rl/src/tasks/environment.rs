//! What answers a policy: an environment begins a conversation, replies to every turn of the policy and ends it with a
//! judgement.

use super::{Task, TaskError};
use crate::reward::Judged;
use stapo_core::{Problem, Turn};

/// The other side of a conversation with a policy. Threads may share an environment.
pub trait Environment {
    /// The messages that the policy answers first.
    fn begin(&self, problem: &Problem) -> Vec<Turn>;

    /// The replies to turns of the policy, in their order. All turns that wait are given at once, so that verifiers work
    /// side by side.
    fn reply(&self, turns: &[PolicyTurn]) -> Result<Vec<Reply>, TaskError>;
}

/// A finished turn of the policy.
#[derive(Debug, Clone, Copy)]
pub struct PolicyTurn<'a> {
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

/// What follows a turn of the policy.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    /// The conversation goes on with these messages, which the policy answers next.
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
    fn begin(&self, problem: &Problem) -> Vec<Turn> {
        problem.messages()
    }

    fn reply(&self, turns: &[PolicyTurn]) -> Result<Vec<Reply>, TaskError> {
        let samples: Vec<(&Problem, &str)> = turns.iter().map(|turn| (turn.problem, turn.text())).collect();
        let by_reward = match self.rewards {
            Rewards::All => self.task.judge_all(&samples)?,
            Rewards::First => vec![self.task.judge(&samples)?],
        };
        let mut by_turn: Vec<Vec<Judged>> = turns.iter().map(|_| Vec::new()).collect();
        for judged in by_reward {
            by_turn.iter_mut().zip(judged).for_each(|(turn, judged)| turn.push(judged));
        }
        Ok(by_turn.into_iter().map(Reply::Done).collect())
    }
}

impl Task {
    /// What answers the policy's turns in conversations about the task's problems.
    pub fn environment(&self, rewards: Rewards) -> Box<dyn Environment + '_> {
        Box::new(OneTurn { task: self, rewards })
    }
}
