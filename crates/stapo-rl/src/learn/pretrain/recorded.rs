//! Responses that a training run recorded, as texts: rejection sampling and best-of-n.

use super::file_rows::Place;
use super::rows::TextRow;
use super::sequence::TextSequence;
use crate::error::{Error, Result};
use crate::plan::config::{Config, Plan};
use crate::policy::loaded::LoadedModel;
use crate::reward::Programs;
use crate::run::{RunKind, check_tree, part_files, plan_text, responses_of_file};
use crate::tasks::prompting::Prompting;
use crate::tasks::{EnvironmentSpec, Task};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stapo_core::record::ResponseRecord;
use stapo_core::{Problem, Turn, Verdict};
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Responses in `rollouts/` of a run of `stapo train`. The tokens are learned as they were sampled, and each different
/// response to a prompt once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RecordedTexts {
    /// The run folder.
    pub path: PathBuf,
    /// Which responses are learned.
    #[serde(rename = "where", default)]
    pub which: Which,
    /// The share of problems, chosen by the hash of their prompts, whose responses are not learned.
    #[serde(default)]
    pub held_out_share: f64,
}

/// Which recorded responses are learned.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Which {
    /// Those with the verdict `right`: rejection sampling.
    #[default]
    Right,
    /// The one with the highest reward of each group, the first of equals: best-of-n. A group without a right response
    /// whose rewards are all equal has no best one.
    Best,
}

impl RecordedTexts {
    /// The files of the responses.
    pub fn files(&self) -> Result<Vec<PathBuf>> {
        check_tree(&self.path)?;
        RunKind::Training.check(&self.path)?;
        part_files(&self.path, "rollouts")
    }

    /// The chosen responses and their places.
    pub(super) fn read(&self, model: &LoadedModel) -> Result<(Vec<Place>, Vec<TextRow>)> {
        let files = self.files()?;
        let plan = Plan::resolve(Config::from_toml(&plan_text(&self.path)?, [])?)?;
        if plan.style.chat && matches!(plan.config.environment, Some(EnvironmentSpec::Tools(_))) {
            return Err(Error::Misfit {
                key: "data.path",
                problem: format!(
                    "{} has prompts that list tools, which records leave out",
                    self.path.display()
                ),
                remedy: "take a run without tools, or one without rollout.chat",
            });
        }
        let prompting = model.prompting(&plan.style)?;
        let earlier = earlier_turns(&plan)?;
        let (mut places, mut rows, mut seen) = (Vec::new(), Vec::new(), BTreeSet::new());
        for file in files {
            let responses = responses_of_file(&file, &plan.objective)?;
            let path: Arc<Path> = Arc::from(file.as_path());
            for number in self.chosen(&responses) {
                let response = &responses[number];
                let sequence = sequence(model, &prompting, &earlier, response).map_err(|source| {
                    Error::TextRow { path: file.clone(), number: number as u64 + 1, source: Box::new(source) }
                })?;
                if seen.insert(sequence.tokens.clone()) {
                    let TextSequence { tokens, is_learned, .. } = sequence;
                    rows.push(TextRow::Recorded { prompt: response.prompt.clone(), tokens, is_learned });
                    places.push(Place { path: path.clone(), number: number as u64 + 1 });
                }
            }
        }
        if rows.is_empty() {
            return Err(Error::NoRun {
                folder: self.path.clone(),
                problem: format!("no recorded response is {:?}", self.which).to_lowercase(),
                remedy: "name a run whose rollouts/ has such responses; record.responses and record.responses_every_steps say how many are recorded".into(),
            });
        }
        Ok((places, rows))
    }

    /// The indexes of the responses of one step that are learned.
    fn chosen(&self, responses: &[ResponseRecord]) -> Vec<usize> {
        let is_right = |idx: &usize| responses[*idx].verdict == Verdict::Right;
        if self.which == Which::Right {
            return (0..responses.len()).filter(is_right).collect();
        }
        let mut groups: Vec<Vec<usize>> = Vec::new();
        let mut group_of: HashMap<(Option<usize>, &str), usize> = HashMap::new();
        for (idx, response) in responses.iter().enumerate() {
            let key = (response.group_idx, response.problem_id.as_str());
            let group = *group_of.entry(key).or_insert_with(|| {
                groups.push(Vec::new());
                groups.len() - 1
            });
            groups[group].push(idx);
        }
        let best_of = |group: &Vec<usize>| {
            let reward = |idx: &usize| responses[*idx].reward;
            // Of several best responses `max_by` gives the last, so that the search runs backwards.
            let best = *group.iter().rev().max_by(|a, b| reward(a).total_cmp(&reward(b)))?;
            let is_above = group.iter().any(|idx| reward(idx) < reward(&best));
            (is_above || is_right(&best)).then_some(best)
        };
        groups.iter().filter_map(best_of).collect()
    }
}

/// The turns before the prompt, by the id of the problem; records have the prompt alone.
fn earlier_turns(plan: &Plan) -> Result<HashMap<String, Vec<Turn>>> {
    if plan.task.rows().is_none() {
        return Ok(HashMap::new());
    }
    let task = Task::open_with(&plan.task, Programs::Never)?;
    let known = task.known_problems();
    Ok(known.into_iter().map(|problem| (problem.id.clone(), problem.earlier_turns.clone())).collect())
}

/// The tokens of a prompt and those that were recorded after it.
fn sequence(
    model: &LoadedModel,
    prompting: &Prompting,
    earlier: &HashMap<String, Vec<Turn>>,
    response: &ResponseRecord,
) -> Result<TextSequence> {
    let tokens = &response.tokens;
    let tokenizer = model.tokenizer()?;
    let n_rows = model.policy.config().vocabulary as u32;
    for (&id, text) in tokens.id.iter().zip(&tokens.text) {
        let here = match tokenizer.token_of(id) {
            Some(_) => tokenizer.decode_all(&[id]).ok(),
            // Many embeddings have rows for which the tokenizer has no token; one that was sampled has no text.
            None => (id < n_rows).then(String::new),
        };
        if here.as_ref() != Some(text) {
            return Err(Error::Misfit {
                key: "model",
                problem: format!(
                    "token {id} is {}, the run recorded {text:?}",
                    here.map_or("nothing".to_string(), |here| format!("{here:?}"))
                ),
                remedy: "train the run's own model, or one with the same tokenizer",
            });
        }
    }
    let problem = Problem {
        id: response.problem_id.clone(),
        earlier_turns: earlier.get(&response.problem_id).cloned().unwrap_or_default(),
        prompt: response.prompt.clone(),
        reference: response.reference.clone(),
    };
    let mut sequence = TextSequence::default();
    sequence.push(&prompting.tokens(&problem)?, false);
    let mut n_done = 0;
    for given in &response.given {
        sequence.push(&tokens.id[n_done..given.after], true);
        sequence.push(&given.id, false);
        n_done = given.after;
    }
    sequence.push(&tokens.id[n_done..], true);
    Ok(sequence)
}
