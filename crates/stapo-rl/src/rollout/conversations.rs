//! Conversations with tools that are not judged.

use super::answers::{EpisodeSet, RecordedAnswers};
use super::episodes::{Asked, EndedEpisode, EpisodeEvent, Episodes};
use crate::error::{Error, Result};
use crate::plan::config::{EpisodeConfig, PromptStyle};
use crate::policy::loaded::LoadedModel;
use crate::tasks::UnjudgedTools;
use stapo_core::Problem;
use stapo_model::generate::{Engine, EngineMemory, EngineSettings, Request};

/// How conversations are sampled.
#[derive(Debug, Clone, Copy)]
pub struct ConversationSampling<'a> {
    pub settings: EngineSettings,
    pub n_samples: u32,
    /// Tokens of a conversation after its prompt, at most.
    pub max_tokens: usize,
    pub style: &'a PromptStyle,
    pub limits: &'a EpisodeConfig,
}

/// Conversations from prompts, whose tools answer the policy; in the order of prompts and samples.
pub fn converse(
    model: &LoadedModel,
    memory: &mut EngineMemory,
    tools: &UnjudgedTools,
    problems: &[Problem],
    sampling: ConversationSampling,
) -> Result<Vec<EndedEpisode>> {
    let ConversationSampling { settings, n_samples, max_tokens, style, limits } = sampling;
    let mut engine = Engine::new(&model.policy, memory, settings)?;
    engine.stop_at(model.stop_texts(style)?);
    let prompting = model.prompting(style)?.with_tools(Some(tools.schemas()));
    let environment = tools.environment();
    let mut asked = Vec::with_capacity(problems.len());
    for (problem_idx, problem) in problems.iter().enumerate() {
        let prompt = prompting.conversation(&problem.id, &environment.begin(problem))?;
        let request = Request {
            problem: problem_idx as u64,
            prompt: prompt.clone(),
            n_samples,
            max_tokens: limits.turn_limit(max_tokens),
            stops: model.stops.clone(),
        };
        let refused = |source| Error::Request { problem_id: problem.id.clone(), source };
        engine.submit(request).map_err(refused)?;
        asked.push(Asked { problem_idx, problem, prompt });
    }
    let episodes = Episodes {
        environment: &*environment,
        prompting,
        tokenizer: model.tokenizer()?,
        stops: &model.stops,
        limits: limits.clone(),
        max_tokens,
        set: EpisodeSet { step: 0, is_evaluation: true, draw: 0 },
        recorded: &RecordedAnswers::default(),
        n_rewards: 1,
    };
    let mut ended = Vec::new();
    episodes.play(&mut engine, &asked, &mut |event| {
        if let EpisodeEvent::Ended(episode) = event {
            ended.push(*episode);
        }
        Ok(true)
    })?;
    ended.sort_by_key(|episode| (episode.ticket, episode.sample));
    Ok(ended)
}
