//! Rollouts from a file: responses that another engine sampled, with the log-probs it reported.

use super::{JudgedRollout, RolloutContext, RolloutSource, Sampled, judge, scored};
use crate::error::{Error, Result};
use crate::learn::scoring::{Sequence, score};
use crate::plan::config::{Behavior, Plan, RolloutSourceSpec};
use crate::policy::loaded::LoadedModel;
use crate::reward::Judged;
use crate::tasks::{Rewards, Split, Task, TaskError, read_json_lines};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use stapo_core::{Batch, Finish, Group, Problem, Rollout, Verdict};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// The groups of a file, one for each problem that the run draws.
#[derive(Debug)]
pub struct ForeignRollouts {
    path: PathBuf,
    behavior: Behavior,
    groups: Vec<ForeignGroup>,
    /// The index of the group of each position of the training problems.
    group_at: Vec<usize>,
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
    /// Reads the rollouts of a plan, and checks that every problem that the run draws has a group.
    pub fn open(source: &RolloutSourceSpec, plan: &Plan, model: &LoadedModel, task: &Task) -> Result<Self> {
        let RolloutSourceSpec::Jsonl { path, behavior } = source;
        let file = File { plan, path, vocabulary: model.policy.config().vocabulary };
        let mut groups = Vec::new();
        let mut groups_by_id: HashMap<String, Vec<usize>> = HashMap::new();
        for (id, lines) in file.read()? {
            for group in file.groups(&id, lines)? {
                groups_by_id.entry(id.clone()).or_default().push(groups.len());
                groups.push(group);
            }
        }
        let group_at = file.group_at_positions(task, &groups_by_id)?;
        Ok(ForeignRollouts { path: path.clone(), behavior: *behavior, groups, group_at })
    }

    /// The groups of the problems from `position` on.
    fn groups_from(&self, position: u64, n_problems: usize) -> Result<Vec<&ForeignGroup>> {
        let positions = position..position + n_problems as u64;
        let group = |position: u64| {
            let group_idx = self.group_at.get(position as usize).ok_or_else(|| Error::Rollouts {
                path: self.path.clone(),
                problem: format!("has no group for position {position} of the training problems"),
            })?;
            Ok(&self.groups[*group_idx])
        };
        positions.map(group).collect()
    }

    /// Fills in entropies under the policy, and the log-probs of the behavior policy.
    fn add_scores(
        &self,
        training: &mut RolloutContext,
        rollouts: &mut [Rollout],
        written: &[&ForeignResponse],
    ) -> Result<()> {
        let sequences: Vec<Sequence> = rollouts.iter().map(Sequence::from).collect();
        let RolloutContext { model, plan, ranks, .. } = *training;
        let scores = score(training.memory.score(), &model.policy, plan, ranks, &sequences)?;
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

impl RolloutSource for ForeignRollouts {
    /// The policy scores the responses, so that every response has entropies, and under [`Behavior::Policy`] the log-probs
    /// that ratios divide by.
    fn next(&mut self, training: &mut RolloutContext) -> Result<Sampled> {
        let RolloutContext { model, task, plan, counters, .. } = *training;
        let n_problems = plan.config.rollout.problems_per_step;
        let problems: Vec<Problem> = (counters.position..counters.position + n_problems as u64)
            .map(|position| Ok(task.problem(plan.config.seed, Split::Train, position)?))
            .collect::<Result<_>>()?;
        let stop_texts = model.stop_texts(&plan.style)?;
        let is_stop = |last: u32, tokens: &[u32]| {
            model.stops.contains(&last) || stop_texts.is_complete(tokens.iter().copied())
        };
        let policy_version = match self.behavior {
            Behavior::Policy => Some(counters.n_updates),
            Behavior::Sampler => None,
        };
        let mut rollouts = Vec::new();
        let mut written = Vec::new();
        for (problem_idx, group) in self.groups_from(counters.position, n_problems)?.into_iter().enumerate() {
            for (sample_idx, response) in group.responses.iter().enumerate() {
                let unscored = rollout(is_stop, response, &group.prompt_tokens);
                rollouts.push(Rollout { problem_idx, sample_idx, policy_version, ..unscored });
                written.push(response);
            }
        }
        self.add_scores(training, &mut rollouts, &written)?;
        let judged = judge_unrewarded(model, task, &problems, &rollouts, &written)?;
        let n_responses = rollouts.len();
        let n_sampled = rollouts.iter().map(Rollout::n_sampled).sum();
        let mut groups: Vec<Group> =
            problems.into_iter().map(|problem| Group { problem, members: Vec::new() }).collect();
        for (rollout, judged) in rollouts.into_iter().zip(judged) {
            let judged = JudgedRollout { rollout, judged, episode: None };
            groups[judged.rollout.problem_idx].members.push(scored(plan, judged));
        }
        let sampler_logp = written.iter().map(|response| response.logp.clone()).collect();
        let n_drawn = n_problems as u64;
        let episodes = Vec::new();
        Ok(Sampled { batch: Batch { groups }, sampler_logp, n_drawn, n_responses, n_sampled, episodes })
    }
}

/// A response of the file as a rollout without scores. A response that does not end with a stop token or text was cut.
fn rollout(is_stop: impl Fn(u32, &[u32]) -> bool, response: &ForeignResponse, prompt: &[u32]) -> Rollout {
    let last = response.tokens.last().copied().filter(|&token| is_stop(token, &response.tokens));
    let (tokens, is_sampled) = Rollout::one_turn(prompt, &response.tokens);
    Rollout {
        problem_idx: 0,
        sample_idx: 0,
        tokens,
        is_sampled,
        logp: Vec::new(),
        entropy: Vec::new(),
        kept: Vec::new(),
        finish: last.map_or(Finish::LengthLimit, |token| Finish::Stop { token }),
        policy_version: None,
    }
}

/// For each response the judgement of every reward. A reward of the file stands for the judgement: `right` above 0, as
/// for verifiers that give rewards.
fn judge_unrewarded(
    model: &LoadedModel,
    task: &Task,
    problems: &[Problem],
    rollouts: &[Rollout],
    written: &[&ForeignResponse],
) -> Result<Vec<Vec<Judged>>> {
    let pairs = rollouts.iter().zip(written);
    let unrewarded: Vec<&Rollout> =
        pairs.filter(|(_, response)| response.reward.is_none()).map(|(rollout, _)| rollout).collect();
    let by_verifier = if unrewarded.is_empty() {
        Vec::new()
    } else {
        judge(&*task.environment(Rewards::All), model, problems, &unrewarded)?
    };
    let mut by_verifier = by_verifier.into_iter();
    let judgements = written.iter().map(|response| match response.reward {
        Some(reward) => vec![given(reward, response.line)],
        None => by_verifier.next().expect("the environment judges every response without a reward"),
    });
    Ok(judgements.collect())
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
            if let Some(at) = tokens.iter().position(|&token| token as usize >= self.vocabulary) {
                let n = self.vocabulary;
                return Err(format!("{field}[{at}] is {}, the model has tokens 0 to {}", tokens[at], n - 1));
            }
        }
        if logp.len() != tokens.len() {
            return Err(format!("logp has {} entries, tokens has {}", logp.len(), tokens.len()));
        }
        if let Some(at) = logp.iter().position(|logp| *logp > 0.0) {
            return Err(format!("logp[{at}] is {}, expected a log-prob, at most 0", logp[at]));
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
        for (idx, (prompt_tokens, response)) in lines.into_iter().enumerate() {
            if idx % size == 0 {
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
    fn group_at_positions(
        &self,
        task: &Task,
        groups_by_id: &HashMap<String, Vec<usize>>,
    ) -> Result<Vec<usize>> {
        let config = &self.plan.config;
        let n_positions = config.steps * config.rollout.problems_per_step as u64;
        let mut n_taken: HashMap<String, usize> = HashMap::new();
        let mut group_at = Vec::new();
        let mut missing = Vec::new();
        for position in 0..n_positions {
            let id = task.problem(config.seed, Split::Train, position)?.id;
            let taken = n_taken.entry(id.clone()).or_default();
            match groups_by_id.get(&id).and_then(|groups| groups.get(*taken)) {
                Some(&group) => group_at.push(group),
                None => missing.push(id),
            }
            *taken += 1;
        }
        if missing.is_empty() {
            return Ok(group_at);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_reward_above_zero_is_right() {
        let verdicts = [-1.0, 0.0, f64::MIN_POSITIVE, 1.0].map(|reward| given(reward, 3).verdict);
        assert_eq!(verdicts, [Verdict::Wrong, Verdict::Wrong, Verdict::Right, Verdict::Right]);
        let given = given(0.25, 3);
        assert_eq!((given.reward, given.reason.as_str()), (Some(0.25), "reward of line 3"));
    }

    #[test]
    fn a_response_that_does_not_end_with_a_stop_was_cut() {
        let response = |tokens: &[u32]| ForeignResponse {
            line: 1,
            tokens: tokens.to_vec(),
            logp: vec![-0.5; tokens.len()],
            reward: None,
        };
        let is_stop = |last: u32, tokens: &[u32]| last == 7 || tokens.ends_with(&[1, 2]);
        for (tokens, finish) in [
            (&[3, 7][..], Finish::Stop { token: 7 }),
            (&[1, 2], Finish::Stop { token: 2 }),
            (&[7, 3], Finish::LengthLimit),
        ] {
            let rollout = rollout(is_stop, &response(tokens), &[5, 6]);
            assert_eq!((rollout.finish, rollout.prompt(), rollout.response()), (finish, &[5, 6][..], tokens));
        }
    }
}
