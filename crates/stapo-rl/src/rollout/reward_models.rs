//! A reward model at work: responses as its tokens, and their scores.

use super::segments::{marks, split};
use super::verifier_model::{VerifierHome, VerifierModel, scoring_pass};
use crate::error::Result;
use crate::plan::config::ModelSource;
use crate::plan::memory::JUDGE_BATCH_TOKENS;
use crate::policy::loaded::LoadedModel;
use crate::reward::{RewardModelSpec, ScoreResponses};
use crate::tasks::TaskError;
use rayon::prelude::*;
use stapo_core::Problem;
use stapo_core::batch::pack_in_order;
use stapo_model::decoder::{PackedBatch, Pass};
use stapo_model::{ChatTemplate, Device, Message, ScoreHead, Segment};
use std::sync::{Mutex, PoisonError};

/// A loaded reward model. A score has the same bits whatever else is scored with it.
pub struct ModelScorer {
    spec: RewardModelSpec,
    model: VerifierModel,
    head: ScoreHead,
    chat: bool,
    /// The longest sequence.
    limit: usize,
    pass: Mutex<Pass>,
}

impl ModelScorer {
    pub fn open<'a>(spec: &RewardModelSpec, home: impl Into<VerifierHome<'a>>) -> Result<Self> {
        spec.check()?;
        let found = ModelSource::named(&spec.model).find()?;
        let open = |device: &Device| LoadedModel::open_reward_model(&found, device);
        let placed = (spec.device.as_deref(), spec.keep);
        let (model, (head, chat, limit, pass)) =
            VerifierModel::open(home.into(), placed, open, |model, memory| prepare(spec, model, memory))?;
        Ok(Self { spec: spec.clone(), model, head, chat, limit, pass: Mutex::new(pass) })
    }

    /// The tokens up to the one whose score is the response's: those of `stapo rm`, but for special tokens that the policy wrote,
    /// which are plain characters here.
    fn tokens(&self, problem: &Problem, response: &str) -> Result<Vec<u32>> {
        let model = self.model.read();
        let tokenizer = model.tokenizer()?;
        let tokens = match &model.template {
            Some(template) if self.chat => self.rendered(&model, template, problem, response)?,
            _ => {
                let stop = model.stops.first().copied();
                let response = tokenizer.encode_literally(response)?;
                [tokenizer.encode(&problem.prompt)?, response, Vec::from_iter(stop)].concat()
            }
        };
        Ok(self.head.scored(&tokens).to_vec())
    }

    /// A conversation that ends with the response and its stop token.
    fn rendered(
        &self,
        model: &LoadedModel,
        template: &ChatTemplate,
        problem: &Problem,
        response: &str,
    ) -> Result<Vec<u32>> {
        let tokenizer = model.tokenizer()?;
        let contents = [problem.prompt.as_str(), response, problem.reference.as_str()];
        let earlier = problem.earlier_turns.iter().map(|turn| (turn.role.as_str(), turn.content.as_str()));
        let system = self.spec.system.iter().map(|system| ("system", system.as_str()));
        let before: Vec<(&str, &str)> = system.chain(earlier).collect();
        let texts: Vec<&str> = before.iter().map(|(_, text)| *text).chain(contents).collect();
        let marks = marks(&texts);
        let asked = [("user", marks[0].as_str()), ("assistant", marks[1].as_str())];
        let message = |(role, content): (&str, &str)| Message { role: role.into(), content: content.into() };
        let messages: Vec<Message> = before.into_iter().chain(asked).map(message).collect();
        let text = template.render_all(&[(messages, false)], &self.spec.chat_arguments)?.concat();
        let segments = split(&text, &marks, contents);
        let is_response =
            |segment: &Segment| matches!(segment, Segment::Observation(text) if text == response);
        let Some(at) = segments.iter().rposition(is_response).filter(|_| text.contains(&marks[1])) else {
            let problem =
                format!("the template of the reward model {} does not show the response", self.spec.model);
            return Err(TaskError::setting("verifier.chat", problem, "chat = false reads plain text").into());
        };
        let (shown, behind) = segments.split_at(at + 1);
        let mut end = tokenizer.encode_segments(behind)?;
        // What a template adds after the token that ends the response is not part of it.
        let stop = end.iter().rposition(|token| model.stops.contains(token));
        end.truncate(stop.map_or(end.len(), |stop| stop + 1));
        Ok([tokenizer.encode_segments(shown)?, end].concat())
    }

    fn scores(&self, sequences: &[&[u32]]) -> Result<Vec<f64>> {
        let mut pass = self.pass.lock().unwrap_or_else(PoisonError::into_inner);
        let lengths: Vec<usize> = sequences.iter().map(|tokens| tokens.len()).collect();
        let mut scores = Vec::with_capacity(sequences.len());
        self.model.at_work(|model| {
            for microbatch in pack_in_order(&lengths, self.limit.max(JUDGE_BATCH_TOKENS))? {
                let mut batch = PackedBatch::new();
                for idx in microbatch.sequences {
                    batch.push_whole(sequences[idx]);
                }
                scores.extend(pass.forward_scores(&model.policy, &batch)?);
            }
            Ok(scores)
        })
    }

    fn failure(&self, place: &str, problem: &str) -> TaskError {
        let (problem, hint) =
            problem.split_once("\nhint: ").unwrap_or((problem, "stapo score asks the reward model alone"));
        TaskError::Verifier {
            program: format!("reward model {}", self.spec.model),
            place: place.into(),
            problem: problem.into(),
            remedy: hint.into(),
        }
    }
}

/// What a reward model works with: its head, whether texts are rendered, the longest of them, and a pass.
fn prepare(
    spec: &RewardModelSpec,
    model: &mut LoadedModel,
    memory: Option<&Device>,
) -> Result<(ScoreHead, bool, usize, Pass)> {
    model.tokenizer()?;
    let refuse =
        |problem: String, remedy: &str| Err(TaskError::setting("verifier.chat", problem, remedy).into());
    let chat = spec.chat.unwrap_or(model.template.is_some());
    if chat && model.template.is_none() {
        let problem = format!("true, but the reward model {} has no chat template", spec.model);
        return refuse(problem, "leave it out");
    }
    if !chat && (spec.system.is_some() || !spec.chat_arguments.is_empty()) {
        let problem = format!("the reward model {} reads plain text", spec.model);
        return refuse(problem, "leave verifier.system and verifier.chat_arguments out");
    }
    model.policy.fit_longest(spec.max_tokens);
    let limit = spec.max_tokens.min(model.policy.config().position_limit());
    let head = model.policy.config().score.unwrap_or_default();
    Ok((head, chat, limit, scoring_pass(&model.policy, memory, limit)?))
}

impl ScoreResponses for ModelScorer {
    fn score(&self, samples: &[(&Problem, &str)]) -> std::result::Result<Vec<Option<f64>>, TaskError> {
        let tokens = |&(problem, response): &(&Problem, &str)| {
            let tokens = self.tokens(problem, response);
            tokens.map_err(|error| self.failure(&format!("problem {:?}", problem.id), &error.to_string()))
        };
        let sequences: Vec<Vec<u32>> =
            samples.par_iter().map(tokens).collect::<std::result::Result<_, _>>()?;
        let fits = |tokens: &&[u32]| !tokens.is_empty() && tokens.len() <= self.limit;
        let fitting: Vec<&[u32]> = sequences.iter().map(Vec::as_slice).filter(fits).collect();
        let scores = self.scores(&fitting).map_err(|error| self.failure("a batch", &error.to_string()))?;
        if let Some(score) = scores.iter().find(|score| !score.is_finite()) {
            return Err(self.failure("a batch", &format!("a score is {score}, expected a finite number")));
        }
        let mut scores = scores.into_iter();
        Ok(sequences
            .iter()
            .map(|tokens| if fits(&tokens.as_slice()) { scores.next() } else { None })
            .collect())
    }
}

#[cfg(test)]
mod tests;
