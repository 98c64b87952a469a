//! What the generation engine promises beyond the bits.

use crate::testing::{tiny_config, tiny_layers};
use stapo_model::decoder::Policy;
use stapo_model::generate::{
    Engine, EngineMemory, EngineSettings, Event, FinishReason, ForcedLengths, Request, RequestError,
    SamplingRule,
};
use stapo_model::{CpuOptions, Device, Family, Heads, ModelConfig};

fn policy() -> Policy {
    let config = ModelConfig {
        vocabulary: 50,
        max_positions: 100,
        layers: tiny_layers(Family::Llama, Heads { query: 4, kv: 2, dim: 8 }, 11, 2),
        ..tiny_config(Family::Llama)
    };
    Policy::random(&Device::cpu(CpuOptions::default()), &config, 2, 0.2).unwrap()
}

fn request(prompt: &[u32], max_tokens: usize) -> Request {
    Request { problem: 0, prompt: prompt.to_vec(), n_samples: 1, max_tokens, stops: vec![] }
}

#[test]
fn greedy_takes_the_first_alternative_every_time() {
    let policy = policy();
    let settings =
        EngineSettings { rule: SamplingRule::Greedy, n_alternatives: 4, ..EngineSettings::default() };
    let mut memory = EngineMemory::new();
    let mut engine = Engine::new(&policy, &mut memory, settings).unwrap();
    engine.submit(Request { n_samples: 2, ..request(&[1, 2, 3], 30) }).unwrap();
    let responses = engine.generate().unwrap();
    assert_eq!(responses[0].tokens, responses[1].tokens, "nothing is drawn");
    for sampled in &responses[0].tokens {
        assert_eq!(sampled.alternatives.len(), 4);
        assert_eq!(
            (sampled.alternatives[0].token, sampled.alternatives[0].logp),
            (sampled.token, sampled.logp)
        );
        assert!(sampled.alternatives.is_sorted_by(|a, b| a.logp >= b.logp));
    }
}

#[test]
fn samples_become_as_long_as_the_submission_says_whatever_they_stop_with() {
    let policy = policy();
    let mut memory = EngineMemory::new();
    let mut engine = Engine::new(&policy, &mut memory, EngineSettings::default()).unwrap();
    let all: Vec<u32> = (0..50).collect();
    let asked = Request { n_samples: 4, stops: all, ..request(&[1, 2, 3], 30) };
    engine.submit_with_lengths(asked, &[5, 1, 99, 17]).unwrap();
    let lengths: Vec<usize> = engine.generate().unwrap().iter().map(|r| r.tokens.len()).collect();
    assert_eq!(lengths, [5, 1, 30, 17]);
}

/// Runs of benchmarks are compared with earlier ones, so the lengths must stay.
#[test]
fn forced_lengths_depend_on_seed_problem_and_sample_alone() {
    let lengths = ForcedLengths { mean: 48.0, sigma: 0.8 };
    assert_eq!(lengths.draw(7, 3, 5), [31, 59, 13, 70, 263]);
    assert_eq!(lengths.draw(7, 3, 2), lengths.draw(7, 3, 5)[..2]);
    assert_ne!(lengths.draw(8, 3, 5), lengths.draw(7, 3, 5));
}

#[test]
fn a_stop_token_ends_the_response_and_is_its_last() {
    let policy = policy();
    let mut memory = EngineMemory::new();
    let mut engine = Engine::new(&policy, &mut memory, EngineSettings::default()).unwrap();
    engine.submit(Request { n_samples: 50, stops: vec![4, 9], ..request(&[1, 2, 3], 60) }).unwrap();
    let responses = engine.generate().unwrap();
    let n_stopped = responses.iter().filter(|r| r.finish != FinishReason::LengthLimit).count();
    assert!(n_stopped > 0 && n_stopped < 50, "{n_stopped} of 50 stopped");
    for response in responses {
        let tokens: Vec<u32> = response.tokens.iter().map(|t| t.token).collect();
        let stop = tokens.iter().position(|t| [4, 9].contains(t));
        match response.finish {
            FinishReason::Stop(token) => {
                assert_eq!((stop, tokens.last()), (Some(tokens.len() - 1), Some(&token)));
            }
            FinishReason::LengthLimit => assert_eq!((stop, tokens.len()), (None, 60)),
        }
    }
}

#[test]
fn responses_end_where_the_model_ends() {
    let policy = policy();
    let mut memory = EngineMemory::new();
    let mut engine = Engine::new(&policy, &mut memory, EngineSettings::default()).unwrap();
    engine.submit(request(&[7; 99], 1000)).unwrap();
    engine.submit(request(&[7; 90], 1000)).unwrap();
    let lengths: Vec<usize> = engine.generate().unwrap().iter().map(|r| r.tokens.len()).collect();
    assert_eq!(lengths, [1, 10]);
}

#[test]
fn impossible_requests_are_refused() {
    let policy = policy();
    let small = EngineSettings { kv_bytes: 4 * 16 * 32 * 4 * 2, ..EngineSettings::default() };
    let mut memory = EngineMemory::new();
    let mut engine = Engine::new(&policy, &mut memory, small).unwrap();
    let refused = |engine: &mut Engine<'_>, request| engine.submit(request).unwrap_err();
    assert_eq!(refused(&mut engine, request(&[], 1)), RequestError::EmptyPrompt);
    let unknown = RequestError::UnknownToken { token: 50, vocabulary: 50 };
    assert_eq!(refused(&mut engine, request(&[1, 50], 1)), unknown);
    let too_long = RequestError::PromptTooLong { n_prompt: 100, max_positions: 100 };
    assert_eq!(refused(&mut engine, request(&[1; 100], 1)), too_long);
    let too_small = RequestError::CacheTooSmall { n_tokens: 33, n_cache_tokens: 32 };
    assert_eq!(refused(&mut engine, request(&[1], 33)), too_small);
    let nothing = RequestError::NothingAsked { n_samples: 1, max_tokens: 0 };
    assert_eq!(refused(&mut engine, request(&[1], 0)), nothing);
    // The last token is never run, so this response fills the cache exactly.
    engine.submit(request(&[1], 32)).unwrap();
    assert_eq!(engine.generate().unwrap()[0].tokens.len(), 32);
}

#[test]
fn events_tell_every_token_before_its_response_and_a_listener_may_stop() {
    let policy = policy();
    let mut memory = EngineMemory::new();
    let mut engine = Engine::new(&policy, &mut memory, EngineSettings::default()).unwrap();
    engine.submit(Request { n_samples: 3, ..request(&[5, 6], 12) }).unwrap();
    let mut delivered = vec![Vec::new(); 3];
    let mut n_finished = 0;
    engine
        .run(|event| {
            match event {
                Event::Token { sample, sampled, .. } => delivered[sample as usize].push(sampled.clone()),
                Event::Finished(response) => {
                    n_finished += 1;
                    assert_eq!(response.tokens, delivered[response.sample as usize]);
                }
            }
            true
        })
        .unwrap();
    assert_eq!(n_finished, 3);
    engine.submit(request(&[5, 6], 12)).unwrap();
    let mut n_events = 0;
    engine
        .run(|_| {
            n_events += 1;
            n_events < 3
        })
        .unwrap();
    assert_eq!(n_events, 3);
}
