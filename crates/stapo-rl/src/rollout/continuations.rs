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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::config::{Config, ModelSource};
    use stapo_model::{CpuOptions, Device};

    #[test]
    fn a_beginning_goes_on_to_the_limit_of_a_response_unless_it_has_ended() {
        let device = Device::cpu(CpuOptions { threads: 1, ..CpuOptions::default() });
        let model = LoadedModel::open(&ModelSource::Builtin, &device).unwrap();
        let set = ["rollout.max_response_tokens=8", "rollout.temperature=5"];
        let plan = Plan::resolve(Config::from_toml("", set).unwrap()).unwrap();
        let encode = |text: &str| model.tokenizer().unwrap().encode(text).unwrap();
        let (prompt, begun, stop) = (encode("1+2*3="), encode("so 2"), model.stops[0]);
        let beginning =
            |number, tokens: Vec<u32>| Beginning { number, problem_id: "p", prompt: &prompt, tokens };
        let ended = [&begun[..], &[stop]].concat();
        let full = vec![begun[0]; 8];
        let beginnings = [
            beginning(0, begun.clone()),
            beginning(1, ended.clone()),
            beginning(2, full.clone()),
            beginning(0, begun.clone()),
            beginning(3, Vec::new()),
        ];
        let mut memory = SamplingMemory::small();
        let key = (Key::new(5), 6);
        let all = continuations(&model, &mut memory, &plan, &beginnings, key, &Meter::default()).unwrap();
        assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [6; 5]);
        assert_eq!((&all[1], &all[2]), (&vec![ended; 6], &vec![full; 6]));
        assert_eq!(all[0], all[3], "the same number draws the same");
        for continued in &all[0] {
            assert!(continued.starts_with(&begun) && continued.len() <= 8, "{continued:?}");
            assert!(continued.len() == 8 || continued.last() == Some(&stop), "{continued:?}");
        }
        assert!(all[4].iter().all(|response| !response.is_empty() && response.len() <= 8));
        assert!(all[0].iter().any(|continued| continued != &all[0][0]), "samples differ");
    }
}
