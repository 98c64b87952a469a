//! Responses that continue from given tokens.

use super::sampler::generate;
use crate::error::{Error, Result};
use crate::learn::memory::SamplingMemory;
use crate::plan::config::Plan;
use crate::policy::loaded::LoadedModel;
use crate::run::Abandon;
use crate::run::meter::Meter;
use stapo_core::random::Key;
use stapo_model::generate::{Engine, EngineSettings, Filter, Request, SamplingRule};

/// The beginning of a response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beginning<'a> {
    /// Keys the randomness: beginnings with the same number draw the same random numbers.
    pub number: u64,
    /// Names the problem in errors.
    pub problem_id: &'a str,
    pub prompt: &'a [u32],
    /// At least one token.
    pub tokens: Vec<u32>,
}

/// `n_samples` responses from each beginning, as the plan samples; the beginning is a part of the response. A beginning
/// that ends in a stop token, or is as long as a response may be, is the response; an empty one is none of it yet.
pub fn continuations(
    model: &LoadedModel,
    memory: &mut SamplingMemory,
    plan: &Plan,
    beginnings: &[Beginning],
    (key, n_samples): (Key, usize),
    meter: &Meter,
) -> Result<Vec<Vec<Vec<u32>>>> {
    let rollout = &plan.config.rollout;
    let settings = EngineSettings {
        seed: key.bits(),
        rule: SamplingRule::Draw { temperature: rollout.temperature, filter: Filter::NONE },
        ..memory.settings()
    };
    let mut engine = Engine::new(&model.policy, &mut memory.engine, settings)?;
    engine.stop_at(model.stop_texts(&plan.style)?);
    let mut all: Vec<Vec<Vec<u32>>> =
        beginnings.iter().map(|beginning| vec![beginning.tokens.clone(); n_samples]).collect();
    let mut going = Vec::new();
    for (idx, beginning) in beginnings.iter().enumerate() {
        let has_ended = beginning.tokens.last().is_some_and(|last| model.stops.contains(last));
        if has_ended || beginning.tokens.len() >= rollout.max_response_tokens {
            continue;
        }
        let request = Request {
            problem: beginning.number,
            prompt: beginning.prompt.iter().chain(&beginning.tokens).copied().collect(),
            n_samples: n_samples as u32,
            max_tokens: rollout.max_response_tokens - beginning.tokens.len(),
            stops: model.stops.clone(),
        };
        let refuse = |source| Error::Request { problem_id: beginning.problem_id.to_string(), source };
        engine.submit(request).map_err(refuse)?;
        going.push(idx);
    }
    for response in generate(&mut engine, meter, &Abandon::default())? {
        let continued = &mut all[going[response.ticket.0 as usize]][response.sample as usize];
        continued.extend(response.tokens.iter().map(|sampled| sampled.token));
    }
    Ok(all)
}
