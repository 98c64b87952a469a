//! Truncated sampling: log-probs over the tokens that could be drawn, the same bits in sampling and training.

use crate::bitwise::{bits, policies, policy, requests, settings};
use stapo_model::Family;
use stapo_model::decoder::{HeadOptions, PackedBatch, Pass, Policy, TokenScores};
use stapo_model::generate::{
    Completion, Engine, EngineMemory, EngineSettings, Filter, SamplingRule, Speculation,
};

const FILTERS: [Filter; 4] = [
    Filter { top_k: Some(12), top_p: 1.0, min_p: 0.0 },
    Filter { top_k: Some(40), top_p: 0.8, min_p: 0.0 },
    Filter { top_k: Some(128), top_p: 1.0, min_p: 0.02 },
    Filter { top_k: Some(1), top_p: 1.0, min_p: 0.0 },
];

fn truncated(filter: Filter) -> EngineSettings {
    let rule = SamplingRule::Draw { temperature: 1.2, filter };
    EngineSettings { rule, n_kept: filter.top_k.unwrap(), n_alternatives: 3, ..settings() }
}

fn sample(policy: &Policy, settings: EngineSettings) -> Vec<Completion> {
    let mut memory = EngineMemory::new();
    let mut engine = Engine::new(policy, &mut memory, settings).unwrap();
    for request in requests() {
        engine.submit(request).unwrap();
    }
    engine.generate().unwrap()
}

/// A training forward over whole responses with the tokens that each was drawn from.
fn trained(policy: &Policy, responses: &[Completion]) -> TokenScores {
    let mut batch = PackedBatch::new();
    for response in responses {
        let mut tokens = requests()[response.ticket.0 as usize].prompt.clone();
        let mut is_scored = vec![false; tokens.len()];
        tokens.extend(response.tokens.iter().map(|t| t.token));
        is_scored.resize(tokens.len(), true);
        let kept: Vec<Vec<u32>> = response.tokens.iter().map(|t| t.kept.clone()).collect();
        batch.push(&tokens, &is_scored);
        batch.keep(&kept);
    }
    let options = HeadOptions { temperature: 1.2, n_alternatives: 3, has_entropy_gradient: true };
    Pass::scoring(policy).unwrap().forward(policy, &batch, options).unwrap()
}

#[test]
fn log_probs_over_kept_tokens_are_those_of_training_bit_for_bit() {
    for (family, policy) in policies() {
        for filter in FILTERS {
            let responses = sample(&policy, truncated(filter));
            let trained = trained(&policy, &responses);
            let sampled: Vec<_> = responses.iter().flat_map(|r| &r.tokens).collect();
            for token in &sampled {
                let is_ascending = token.kept.is_sorted_by(|a, b| a < b);
                let n = token.kept.len();
                assert!(is_ascending && n <= filter.top_k.unwrap(), "{family} {filter:?}");
                assert!(token.kept.contains(&token.token), "{family} {filter:?}");
                assert!(token.entropy <= (n as f32).ln() + 1e-5 && token.logp <= 0.0, "{token:?}");
            }
            let logp: Vec<f32> = sampled.iter().map(|t| t.logp).collect();
            let entropy: Vec<f32> = sampled.iter().map(|t| t.entropy).collect();
            assert_eq!(bits(&logp), bits(&trained.logp), "{family} {filter:?}");
            assert_eq!(bits(&entropy), bits(&trained.entropy), "{family} {filter:?}");
            let sums: f64 = trained.alternatives[0].iter().map(|(_, logp)| f64::from(logp.exp())).sum();
            assert!(sums < 1.0 + 1e-5 && (filter.top_k != Some(1) || (sums - 1.0).abs() < 1e-6), "{sums}");
        }
    }
}

#[test]
fn the_filter_decides_over_tokens_as_without_their_list() {
    let policy = policy(Family::Qwen3);
    for filter in FILTERS {
        let listed = sample(&policy, truncated(filter));
        let unlisted = sample(&policy, EngineSettings { n_kept: 0, ..truncated(filter) });
        let tokens = |all: &[Completion]| -> Vec<Vec<u32>> {
            all.iter().map(|r| r.tokens.iter().map(|t| t.token).collect()).collect()
        };
        assert_eq!(tokens(&listed), tokens(&unlisted), "{filter:?}");
        let drafted =
            sample(&policy, EngineSettings { speculation: Speculation::Always, ..truncated(filter) });
        assert!(drafted == listed, "{filter:?}: drafts change nothing");
        // A token is likelier among those that could be drawn than among all.
        for (a, b) in listed.iter().flat_map(|r| &r.tokens).zip(unlisted.iter().flat_map(|r| &r.tokens)) {
            assert!(a.logp >= b.logp - 1e-5 && b.kept.is_empty(), "{a:?} {b:?}");
        }
    }
}
