//! Environments of the user's: a class of a Python file, or a program.

use super::spec::{ClassSpec, ProgramSpec};
use super::{Answer, Environment, PolicyTurn, Reply};
use crate::reward::dialogue::{Dialogue, NoAnswer};
use crate::reward::{Judged, Programs, driver_greeting};
use crate::tasks::{Task, TaskError};
use serde::Deserialize;
use serde_json::json;
use stapo_core::{Problem, ToolCall, Turn, Verdict};

/// A running program.
pub(in crate::tasks) struct Program {
    dialogue: Dialogue,
    name: String,
    /// The seconds that an answer may take.
    limit: f64,
}

impl Program {
    pub fn class(spec: &ClassSpec, programs: Programs) -> Result<Self, TaskError> {
        let name = format!("{}:{}", spec.file.display(), spec.class);
        let (dialogue, _) = Dialogue::start(spec.command(), Some(driver_greeting()), spec.workers, programs)?;
        Ok(Self { dialogue, name, limit: spec.limits.sample_seconds })
    }

    pub fn command(spec: &ProgramSpec, programs: Programs) -> Result<Self, TaskError> {
        let (dialogue, _) = Dialogue::start(spec.command(), None, spec.workers, programs)?;
        Ok(Self { dialogue, name: spec.program.display().to_string(), limit: spec.limits.sample_seconds })
    }

    pub fn warnings(&self) -> Vec<String> {
        self.dialogue.warnings()
    }
}

/// The answer of a program.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    episode: Option<u64>,
    observation: Option<String>,
    reward: Option<f64>,
    #[serde(default)]
    done: bool,
    verdict: Option<Verdict>,
    answer: Option<String>,
    reason: Option<String>,
    error: Option<String>,
}

pub(super) struct Played<'a> {
    pub program: &'a Program,
    pub task: &'a Task,
}

impl Environment for Played<'_> {
    fn answer(&self, turns: &[PolicyTurn]) -> Result<Vec<Answer>, TaskError> {
        turns.iter().map(|turn| self.answer_turn(turn)).collect()
    }

    fn judges(&self) -> bool {
        true
    }
}

impl Played<'_> {
    fn answer_turn(&self, turn: &PolicyTurn) -> Result<Answer, TaskError> {
        let Problem { id, prompt, reference, .. } = turn.problem;
        let row = self.task.row(id);
        let request = json!({
            "episode": turn.episode, "id": id, "prompt": prompt, "reference": reference, "row": row, "turns": turn.texts,
        });
        let refuse = |problem: String| self.refuse(turn, problem);
        let line = match self.program.dialogue.ask(&request)? {
            Ok(line) => line,
            Err(NoAnswer::TimedOut) => return Ok(self.late(turn)),
            Err(NoAnswer::Failed(problem)) => return Err(refuse(problem)),
        };
        let line: Line =
            serde_json::from_value(line).map_err(|error| refuse(format!("wrote a wrong line: {error}")))?;
        if let Some(error) = line.error {
            return Err(refuse(error));
        }
        if line.episode.is_some_and(|other| other != turn.episode) {
            return Err(refuse("answered another episode".into()));
        }
        if let Some(reward) = line.reward.filter(|reward| !reward.is_finite()) {
            return Err(refuse(format!("gave the reward {reward}")));
        }
        if !line.done {
            let observation =
                line.observation.ok_or_else(|| refuse("gave neither an observation nor done".into()))?;
            let observations = vec![Turn { role: "user".into(), content: observation }];
            let reply = Reply::Continue(observations);
            return Ok(Answer { calls: Vec::new(), reward: line.reward.unwrap_or(0.0), reply });
        }
        let by_reward = |reward: f64| if reward > 0.0 { Verdict::Right } else { Verdict::Wrong };
        let verdict = line.verdict.or_else(|| line.reward.map(by_reward));
        let verdict =
            verdict.ok_or_else(|| refuse("ended an episode with neither reward nor verdict".into()))?;
        let reason = line.reason.unwrap_or_else(|| "by the environment".into());
        let judged = Judged { reward: line.reward, ..Judged::new(verdict, line.answer, reason) };
        Ok(Reply::Done(vec![judged]).into())
    }

    /// The answer that stands for one which did not come in time.
    fn late(&self, turn: &PolicyTurn) -> Answer {
        let content = format!("error: no answer within {} s", self.program.limit);
        let call = ToolCall {
            tool: self.program.name.clone(),
            arguments: turn.text().to_string(),
            sha256: super::sha256(&content),
            failed: true,
            timed_out: true,
        };
        let reply = Reply::Continue(vec![Turn { role: "user".into(), content }]);
        Answer { calls: vec![call], reward: 0.0, reply }
    }

    fn refuse(&self, turn: &PolicyTurn, problem: String) -> TaskError {
        TaskError::Verifier {
            program: self.program.name.clone(),
            place: format!("turn {} of problem {:?}", turn.texts.len(), turn.problem.id),
            problem,
            remedy:
                "an environment answers every turn with an observation, or with done and a reward or verdict"
                    .into(),
        }
    }
}
