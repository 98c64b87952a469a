//! Rollouts from a file: responses that another engine sampled, with the log-probs it reported.

use super::{Sampled, pairs, scored, texts};
use crate::error::{Error, Result};
use crate::learn::scoring::{Sequence, score};
use crate::plan::config::{Behavior, Plan, RolloutSource};
use crate::policy::loaded::LoadedModel;
use crate::ranks::Transport;
use crate::reward::Judged;
use crate::tasks::{Split, Task, TaskError, read_json_lines};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use stapo_core::{Batch, Finish, Group, Problem, Rollout, Verdict};
use stapo_model::decoder::Pass;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// The groups of a file, one for each problem that the run draws.
#[derive(Debug)]
pub struct ForeignRollouts {
    path: PathBuf,
    behavior: Behavior,
    groups: Vec<ForeignGroup>,
    /// The index of the group of each position of the training problems.
    of_position: Vec<usize>,
}

/// The policy that scores the responses, the pass that it scores in, and the ranks that share the work.
pub struct PolicyScorer<'a> {
    pub pass: &'a mut Pass,
    pub model: &'a LoadedModel,
    pub ranks: &'a dyn Transport,
}

/// All responses to one problem.
#[derive(Debug)]
struct ForeignGroup {
    prompt_tokens: Vec<u32>,
    responses: Vec<ForeignResponse>,
}

/// A line of the file.
#[derive(Debug)]
struct ForeignResponse {
    line: u64,
    tokens: Vec<u32>,
    logp: Vec<f64>,
    reward: Option<f64>,
}

impl ForeignRollouts {
    /// Reads the rollouts of a plan, and checks that every problem that the run draws has a group of its own; `None` for
    /// a plan whose policy samples.
    pub fn open(plan: &Plan, model: &LoadedModel, task: &Task) -> Result<Option<Self>> {
        let Some(RolloutSource::Jsonl { path, behavior }) = &plan.config.rollout.source else {
            return Ok(None);
        };
        let file = File { plan, path, vocabulary: model.policy.config().vocabulary };
        let mut groups = Vec::new();
        let mut groups_of: HashMap<String, Vec<usize>> = HashMap::new();
        for (id, lines) in file.read()? {
            for group in file.groups(&id, lines)? {
                groups_of.entry(id.clone()).or_default().push(groups.len());
                groups.push(group);
            }
        }
        let of_position = file.positions(task, &groups_of)?;
        Ok(Some(ForeignRollouts { path: path.clone(), behavior: *behavior, groups, of_position }))
    }

    /// The rollout batch with problems from `position` on. The policy scores the responses, so that every response has
    /// entropies, and under [`Behavior::Policy`] the log-probs that ratios divide by.
    pub fn roll_out(
        &self,
        scorer: &mut PolicyScorer,
        task: &Task,
        plan: &Plan,
        step: u64,
        position: u64,
    ) -> Result<Sampled> {
        let model = scorer.model;
        let n_problems = plan.config.rollout.problems_per_step;
        let positions = position..position + n_problems as u64;
        let problems: Vec<Problem> = positions
            .clone()
            .map(|position| Ok(task.problem(plan.config.seed, Split::Train, position)?))
            .collect::<Result<_>>()?;
        let stop_texts = model.stop_texts(&plan.style)?;
        let is_stop = |last: u32, tokens: &[u32]| {
            model.stops.contains(&last) || stop_texts.is_complete(tokens.iter().copied())
        };
        let mut rollouts = Vec::new();
        let mut written = Vec::new();
        for (problem_idx, position) in positions.enumerate() {
            let group_idx = self.of_position.get(position as usize).copied();
            let Some(group) = group_idx.map(|idx| &self.groups[idx]) else {
                let problem = format!("has no group for position {position} of the training problems");
                return Err(Error::Rollouts { path: self.path.clone(), problem });
            };
            for (sample_idx, response) in group.responses.iter().enumerate() {
                let prompt_tokens = group.prompt_tokens.clone();
                rollouts.push(rollout(is_stop, response, (problem_idx, sample_idx), prompt_tokens, step - 1));
                written.push(response);
            }
        }
        self.add_scores(scorer, plan, &mut rollouts, &written)?;
        let judged = judge(model, task, &problems, &rollouts, &written)?;
        let n_responses = rollouts.len();
        let n_sampled = rollouts.iter().map(|rollout| rollout.tokens.len()).sum();
        let mut groups: Vec<Group> =
            problems.iter().map(|problem| Group { problem: problem.clone(), members: Vec::new() }).collect();
        for (rollout, judged) in rollouts.into_iter().zip(&judged) {
            let of_reward: Vec<&Judged> = judged.iter().collect();
            groups[rollout.problem_idx].members.push(scored(plan, rollout, &of_reward));
        }
        let sampler_logp = written.iter().map(|response| response.logp.clone()).collect();
        let n_drawn = n_problems as u64;
        Ok(Sampled { batch: Batch { groups }, sampler_logp, n_drawn, n_responses, n_sampled })
    }

    /// Fills in entropies under the policy, and the log-probs of the behavior policy.
    fn add_scores(
        &self,
        scorer: &mut PolicyScorer,
        plan: &Plan,
        rollouts: &mut [Rollout],
        written: &[&ForeignResponse],
    ) -> Result<()> {
        let sequences: Vec<Sequence> = rollouts.iter().map(Sequence::of).collect();
        let PolicyScorer { pass, model, ranks } = scorer;
        let scores = score(pass, &model.policy, plan, *ranks, &sequences)?;
        for ((rollout, scores), response) in rollouts.iter_mut().zip(scores).zip(written) {
            let logp = match self.behavior {
                Behavior::Policy => &scores.logp,
                Behavior::Sampler => &response.logp,
            };
            rollout.logp = logp.iter().map(|&logp| logp as f32).collect();
            rollout.entropy = scores.entropy.iter().map(|&entropy| entropy as f32).collect();
        }
        Ok(())
    }
}

/// A response of the file as a rollout without scores. A response that does not end with a stop token or text was cut.
fn rollout(
    is_stop: impl Fn(u32, &[u32]) -> bool,
    response: &ForeignResponse,
    (problem_idx, sample_idx): (usize, usize),
    prompt_tokens: Vec<u32>,
    policy_version: u64,
) -> Rollout {
    let last = response.tokens.last().copied().filter(|&token| is_stop(token, &response.tokens));
    Rollout {
        problem_idx,
        sample_idx,
        prompt_tokens,
        tokens: response.tokens.clone(),
        logp: Vec::new(),
        entropy: Vec::new(),
        finish: last.map_or(Finish::LengthLimit, |token| Finish::Stop { token }),
        policy_version,
    }
}

/// For each response the judgement of every reward. A reward of the file stands for the judgement: `right` above 0, as
/// for verifiers that give rewards.
fn judge(
    model: &LoadedModel,
    task: &Task,
    problems: &[Problem],
    rollouts: &[Rollout],
    written: &[&ForeignResponse],
) -> Result<Vec<Vec<Judged>>> {
    let texts = texts(model, rollouts)?;
    let all = pairs(problems, rollouts, &texts);
    let unjudged: Vec<usize> = (0..written.len()).filter(|&idx| written[idx].reward.is_none()).collect();
    let samples: Vec<(&Problem, &str)> = unjudged.iter().map(|&idx| all[idx]).collect();
    let by_verifier = if samples.is_empty() { Vec::new() } else { task.judge_all(&samples)? };
    let mut judged: Vec<Vec<Judged>> = written
        .iter()
        .map(|response| response.reward.map(|reward| given(reward, response.line)).into_iter().collect())
        .collect();
    for of_reward in by_verifier {
        for (&idx, found) in unjudged.iter().zip(of_reward) {
            judged[idx].push(found);
        }
    }
    Ok(judged)
}

fn given(reward: f64, line: u64) -> Judged {
    let verdict = if reward > 0.0 { Verdict::Right } else { Verdict::Wrong };
    Judged { reward: Some(reward), ..Judged::new(verdict, None, format!("reward of line {line}")) }
}

/// The value of a field. Fields that are not asked for are allowed and not read.
fn field<T: DeserializeOwned>(row: &mut Map<String, Value>, name: &str) -> std::result::Result<T, String> {
    let value = row.remove(name).ok_or_else(|| format!("has no {name}"))?;
    serde_json::from_value(value).map_err(|error| format!("{name}: {error}"))
}

/// The most missing groups that a refusal names.
const MAX_NAMED: usize = 5;

/// The file of rollouts, and what its lines are checked against.
struct File<'a> {
    plan: &'a Plan,
    path: &'a Path,
    vocabulary: usize,
}

/// A line with the prompt that belongs to its group.
type PromptedLine = (Vec<u32>, ForeignResponse);

impl File<'_> {
    /// The lines of each id, in the order of the file.
    fn read(&self) -> Result<BTreeMap<String, Vec<PromptedLine>>> {
        let mut lines: BTreeMap<String, Vec<PromptedLine>> = BTreeMap::new();
        read_json_lines(self.path, &mut |line, row| {
            let (id, read) = self.line(line, row).map_err(|problem| self.refuse_line(line, problem))?;
            lines.entry(id).or_default().push(read);
            Ok(())
        })?;
        Ok(lines)
    }

    fn refuse_line(&self, number: u64, problem: String) -> TaskError {
        TaskError::Row {
            path: self.path.to_owned(),
            unit: "line",
            number,
            problem,
            remedy: "a rollout is {\"id\", \"prompt_tokens\", \"tokens\", \"logp\", \"reward\"}, the reward optional"
                .into(),
        }
    }

    /// A line that has been checked, or what is wrong with it.
    fn line(
        &self,
        line: u64,
        mut row: Map<String, Value>,
    ) -> std::result::Result<(String, PromptedLine), String> {
        let id = match field(&mut row, "id")? {
            Value::String(id) if !id.is_empty() => id,
            Value::Number(id) => id.to_string(),
            other => return Err(format!("id is {other}, expected a text or a number")),
        };
        let prompt_tokens: Vec<u32> = field(&mut row, "prompt_tokens")?;
        let tokens: Vec<u32> = field(&mut row, "tokens")?;
        let logp: Vec<f64> = field(&mut row, "logp")?;
        let has_reward = row.get("reward").is_some_and(|reward| !reward.is_null());
        let reward: Option<f64> = if has_reward { Some(field(&mut row, "reward")?) } else { None };
        let limits = &self.plan.config.rollout;
        for (field, tokens, limit, key) in [
            ("prompt_tokens", &prompt_tokens, limits.max_prompt_tokens, "rollout.max_prompt_tokens"),
            ("tokens", &tokens, limits.max_response_tokens, "rollout.max_response_tokens"),
        ] {
            if tokens.is_empty() || tokens.len() > limit {
                return Err(format!("{field} has {} entries, expected 1 to {limit} ({key})", tokens.len()));
            }
            if let Some(place) = tokens.iter().position(|&token| token as usize >= self.vocabulary) {
                let n = self.vocabulary;
                return Err(format!(
                    "{field}[{place}] is {}, the model has tokens 0 to {}",
                    tokens[place],
                    n - 1
                ));
            }
        }
        if logp.len() != tokens.len() {
            return Err(format!("logp has {} entries, tokens has {}", logp.len(), tokens.len()));
        }
        if let Some(place) = logp.iter().position(|logp| *logp > 0.0) {
            return Err(format!("logp[{place}] is {}, expected a log-prob, at most 0", logp[place]));
        }
        if reward.is_some() && !self.plan.config.rewards.is_empty() {
            return Err(
                "has a reward, and the config has [[rewards]], which judge every response".to_string()
            );
        }
        Ok((id, (prompt_tokens, ForeignResponse { line, tokens, logp, reward })))
    }

    /// The groups of one id. A group that is not whole, or whose prompts differ, is refused.
    fn groups(&self, id: &str, lines: Vec<PromptedLine>) -> Result<Vec<ForeignGroup>> {
        let size = self.plan.config.rollout.group_size;
        let n_lines = lines.len();
        let mut groups: Vec<ForeignGroup> = Vec::new();
        for (place, (prompt_tokens, response)) in lines.into_iter().enumerate() {
            if place % size == 0 {
                groups.push(ForeignGroup { prompt_tokens, responses: vec![response] });
                continue;
            }
            let Some(group) = groups.last_mut() else { continue };
            if group.prompt_tokens != prompt_tokens {
                let first = group.responses[0].line;
                let problem =
                    format!("id {id:?}: prompt_tokens differ from those of line {first}, of the same group");
                return Err(self.refuse_line(response.line, problem).into());
            }
            group.responses.push(response);
        }
        match groups.last() {
            Some(last) if last.responses.len() < size => {
                let problem = format!(
                    "id {id:?} has {n_lines} responses, the last group from line {} on has {}, expected {size} (rollout.group_size)",
                    last.responses[0].line,
                    last.responses.len()
                );
                Err(Error::Rollouts { path: self.path.to_owned(), problem })
            }
            _ => Ok(groups),
        }
    }

    /// The group of every position of the run's training problems: a problem that is drawn again takes the next group of
    /// its id.
    fn positions(&self, task: &Task, groups_of: &HashMap<String, Vec<usize>>) -> Result<Vec<usize>> {
        let config = &self.plan.config;
        let n_positions = config.steps * config.rollout.problems_per_step as u64;
        let mut n_taken: HashMap<String, usize> = HashMap::new();
        let mut of_position = Vec::new();
        let mut missing = Vec::new();
        for position in 0..n_positions {
            let id = task.problem(config.seed, Split::Train, position)?.id;
            let taken = n_taken.entry(id.clone()).or_default();
            match groups_of.get(&id).and_then(|groups| groups.get(*taken)) {
                Some(&group) => of_position.push(group),
                None => missing.push(id),
            }
            *taken += 1;
        }
        if missing.is_empty() {
            return Ok(of_position);
        }
        let named: Vec<String> = missing.iter().take(MAX_NAMED).map(|id| format!("{id:?}")).collect();
        let more = if missing.len() > MAX_NAMED { ", .." } else { "" };
        let problem = format!(
            "{} of the {n_positions} groups that the run draws are missing: {}{more}",
            missing.len(),
            named.join(", ")
        );
        Err(Error::Rollouts { path: self.path.to_owned(), problem })
    }
}
