//! Drafts change how many steps there are, and nothing else.

use crate::bitwise::{config, generate, policies, policy, policy_on, requests, settings};
use crate::cuda;
use crate::turns::episodes;
use stapo_model::decoder::Policy;
use stapo_model::generate::{
    Completion, Engine, EngineMemory, EngineSettings, Event, FinishReason, Request, SamplingRule,
    Speculation, StepCounts,
};
use stapo_model::{CpuOptions, Device, Family, ModelConfig};

/// The requests and then the same ones again, whose responses have the same draws: drafts from the first are right.
fn repeated() -> Vec<Request> {
    requests().into_iter().chain(requests()).collect()
}

fn drafting(settings: EngineSettings) -> EngineSettings {
    EngineSettings { speculation: Speculation::Always, ..settings }
}

fn plain(settings: EngineSettings) -> EngineSettings {
    EngineSettings { speculation: Speculation::Off, ..settings }
}

fn run(policy: &Policy, settings: EngineSettings, requests: &[Request]) -> (Vec<Completion>, StepCounts) {
    let mut memory = EngineMemory::new();
    let mut engine = Engine::new(policy, &mut memory, settings).unwrap();
    for request in requests {
        engine.submit(request.clone()).unwrap();
    }
    let mut n_events = 0;
    let mut completions = Vec::new();
    engine
        .run(|event| {
            match event {
                Event::Token { .. } => n_events += 1,
                Event::Finished(completion) => completions.push(completion),
            }
            true
        })
        .unwrap();
    completions.sort_by_key(|completion| (completion.ticket, completion.sample));
    assert_eq!(
        n_events,
        completions.iter().map(|c| c.tokens.len()).sum::<usize>(),
        "every token has one event"
    );
    (completions, engine.step_counts())
}

/// As [`run`] with drafts, with a model that drafts where no text does.
fn run_with_model(
    policy: &Policy,
    (drafting_policy, kv_bytes): (&Policy, usize),
    settings: EngineSettings,
    requests: &[Request],
) -> (Vec<Completion>, StepCounts) {
    let (mut memory, mut drafting_memory) = (EngineMemory::new(), EngineMemory::new());
    let mut engine = Engine::new(policy, &mut memory, drafting(settings)).unwrap();
    engine.draft_with(drafting_policy, &mut drafting_memory, kv_bytes).unwrap();
    for request in requests {
        engine.submit(request.clone()).unwrap();
    }
    (engine.generate().unwrap(), engine.step_counts())
}

#[test]
fn a_model_that_drafts_changes_nothing() {
    let policy = policy(Family::Qwen3);
    let other = Policy::random(policy.device(), policy.config(), 8, 0.2).unwrap();
    let few = EngineSettings { max_sequences: 4, ..settings() };
    for rule in [settings().rule, SamplingRule::Greedy, EngineSettings::default().rule] {
        let settings = EngineSettings { rule, ..few };
        let (expected, without) = run(&policy, plain(settings), &requests());
        for (name, drafting_policy) in [("the same", &policy), ("another", &other)] {
            // Memory for all sequences of the drafting model, and for few of them.
            for kv_bytes in [8 << 20, 200_000] {
                let (found, with) =
                    run_with_model(&policy, (drafting_policy, kv_bytes), settings, &requests());
                assert!(found == expected, "{name}, {rule:?}, {kv_bytes} bytes");
                assert!(with.n_drafted > 100, "{name}: {with:?}");
                // The model draws with the keys of the policy, so the same model drafts what the policy draws.
                let is_same = name == "the same";
                assert!(!is_same || 3 * with.n_accepted > 2 * with.n_drafted, "{with:?}");
                assert!(!is_same || 2 * with.n_steps < without.n_steps, "{with:?} {without:?}");
            }
        }
    }
}

/// Compares drafting with not drafting for every way to sample; returns the sum of the counts.
fn compare(name: &str, policy: &Policy, settings: EngineSettings, requests: &[Request]) -> StepCounts {
    let mut sum = StepCounts::default();
    for rule in [settings.rule, SamplingRule::Greedy, EngineSettings::default().rule] {
        let settings = EngineSettings { rule, n_alternatives: 2, ..settings };
        let (expected, without) = run(policy, plain(settings), requests);
        let (found, with) = run(policy, drafting(settings), requests);
        assert!(found == expected, "{name}, {rule:?}");
        assert_eq!((without.n_drafted, without.n_accepted), (0, 0));
        sum.n_steps += without.n_steps;
        sum.n_drafting_steps += with.n_steps;
        sum.n_drafted += with.n_drafted;
        sum.n_accepted += with.n_accepted;
    }
    sum
}

#[test]
fn drafts_change_no_token_and_no_number() {
    for (family, policy) in policies() {
        // Three run at once, so that the first responses have ended when the same ones are sampled again.
        let few = EngineSettings { max_sequences: 3, ..settings() };
        let counts = compare(&family, &policy, few, &repeated());
        if policy.config().state_bytes(4) > 0 {
            // A state that rejected drafts have moved cannot be moved back.
            assert_eq!(counts.n_drafted, 0, "{family}");
            continue;
        }
        assert!(counts.n_accepted > 100 && counts.n_accepted < counts.n_drafted, "{family}: {counts:?}");
        assert!(counts.n_drafting_steps < counts.n_steps, "{family}: {counts:?}");
    }
}

#[test]
fn drafts_end_at_stop_tokens_and_at_the_longest_response() {
    let policy = policy(Family::Qwen3);
    // Each token of a response in turn is the stop token or the last one allowed, also those in the middle of a draft.
    let request = Request { stops: vec![], n_samples: 1, ..requests()[2].clone() };
    let full = &run(&policy, plain(settings()), std::slice::from_ref(&request)).0[0];
    let sampled: Vec<u32> = full.tokens.iter().map(|t| t.token).collect();
    let (mut n_stopped, mut n_cut) = (0, 0);
    for (i, token) in sampled.iter().enumerate() {
        let stopped = Request { stops: vec![*token], ..request.clone() };
        let cut = Request { max_tokens: i + 1, ..request.clone() };
        let one = EngineSettings { max_sequences: 1, ..settings() };
        let (found, counts) = run(&policy, drafting(one), &[request.clone(), stopped, cut]);
        assert_eq!(found[0].tokens, full.tokens);
        let end = sampled.iter().position(|t| t == token).unwrap();
        assert_eq!(
            (&found[1].tokens[..], found[1].finish),
            (&full.tokens[..=end], FinishReason::Stop(*token))
        );
        assert_eq!((&found[2].tokens[..], found[2].finish), (&full.tokens[..=i], FinishReason::LengthLimit));
        assert!(counts.n_accepted > 0 || i < 3, "{counts:?}");
        n_stopped += found[1].tokens.len();
        n_cut += found[2].tokens.len();
    }
    assert!(n_stopped > 0 && n_cut > n_stopped);
}

#[test]
fn drafts_change_nothing_whatever_memory_rows_and_threads_there_are() {
    let long = |request: Request| Request { max_tokens: 100, stops: vec![], ..request };
    let requests: Vec<Request> = repeated().into_iter().map(long).collect();
    let policy = policy(Family::Qwen2);
    let expected = run(&policy, plain(settings()), &requests).0;
    let mut n_preempted = 0;
    for kv_bytes in [200_000, 400_000, 8 << 20] {
        for (max_rows, max_sequences) in [(5, 2), (1024, 4), (1024, 1024)] {
            let settings = drafting(EngineSettings { kv_bytes, max_rows, max_sequences, ..settings() });
            let (found, n_preemptions) = generate(&policy, settings, &requests);
            assert!(found == expected, "{kv_bytes} bytes, {max_rows} rows, {max_sequences} sequences");
            n_preempted += n_preemptions;
        }
    }
    assert!(n_preempted > 0, "the memory is too large to test preemption");
    for threads in [1, 2, 7] {
        let policy = policy_on(CpuOptions { threads, ..CpuOptions::default() }, Family::Qwen2);
        let few = EngineSettings { max_sequences: 4, ..settings() };
        assert!(run(&policy, drafting(few), &requests).0 == expected, "{threads} threads");
    }
}

#[test]
fn drafts_change_no_turn() {
    let policy = policy(Family::Qwen3);
    let (expected, _) = episodes(&policy, plain(settings()), (false, |_| 0));
    for rule in [settings().rule, SamplingRule::Greedy] {
        for (kv_bytes, delay) in [(8 << 20, 0), (170_000, 0), (250_000, 1)] {
            let settings = EngineSettings { rule, kv_bytes, ..settings() };
            let delay: fn(usize) -> usize = if delay == 0 { |_| 0 } else { |n| 31 * n % 83 };
            let (undrafted, _) = episodes(&policy, plain(settings), (true, delay));
            let (found, _) = episodes(&policy, drafting(settings), (false, delay));
            assert!(found == undrafted, "{rule:?}, {kv_bytes} bytes");
            assert!(rule == SamplingRule::Greedy || found == expected, "{kv_bytes} bytes");
        }
    }
}

/// Responses much longer than the windows, in memory that would not hold one of them in all layers: blocks are given back while
/// drafts are right or wrong, of a text and of models.
#[test]
fn drafts_change_nothing_behind_windows() {
    let long = Request { n_samples: 1, max_tokens: 600, stops: vec![], ..requests()[0].clone() };
    let requests = [long.clone(), long];
    for family in [Family::Gemma3, Family::GptOss] {
        let config = ModelConfig { max_positions: 1024, ..config(family) };
        let random = |seed| Policy::random(&Device::cpu(CpuOptions::default()), &config, seed, 0.2).unwrap();
        let (policy, other) = (random(7), random(8));
        // Values are padded to 16 columns.
        let kv_bytes = 600 * config.layers.len() * 2 * (10 + 16) * 4 - 1;
        let one = EngineSettings { max_sequences: 1, max_rows: 40, kv_bytes, ..settings() };
        let (expected, _) = run(&policy, plain(one), &requests);
        // The second response repeats the first.
        let (found, with) = run(&policy, drafting(one), &requests);
        assert!(found == expected && with.n_accepted > 400, "{family:?}: {with:?}");
        for (drafting_policy, n_right) in [(&policy, 800), (&other, 400)] {
            let (found, with) = run_with_model(&policy, (drafting_policy, kv_bytes), one, &requests);
            assert!(found == expected && with.n_accepted > n_right, "{family:?}: {with:?}");
            assert!(with.n_accepted < with.n_drafted, "{family:?}: {with:?}");
        }
    }
}

/// Drafted rows are rows of a decode step, which is replayed from a CUDA graph.
#[test]
fn drafts_on_a_gpu_change_no_token_and_no_number() {
    let Some(device) = cuda::gpu() else { return };
    // Random models repeat little.
    let mut n_accepted = 0;
    for (family, policy) in cuda::policies(&device) {
        for (kv_bytes, max_sequences) in [(64 << 20, 3), (64 << 20, 1024), (4 << 20, 1024)] {
            let settings = EngineSettings { kv_bytes, max_sequences, ..settings() };
            n_accepted += compare(&family, &policy, settings, &repeated()).n_accepted;
        }
        let (expected, _) = episodes(&policy, plain(settings()), (true, |_| 0));
        let (found, _) = episodes(&policy, drafting(settings()), (true, |_| 0));
        assert!(found == expected, "{family}");
    }
    assert!(n_accepted > 100, "{n_accepted}");
}

/// Contexts of several splits of the keys, whose common part is read once for all rows of a sequence.
#[test]
fn drafts_of_long_sequences_on_a_gpu_change_nothing() {
    let Some(device) = cuda::gpu() else { return };
    for family in Family::ALL {
        let config = ModelConfig { max_positions: 4096, ..cuda::config(family) };
        // Models with states take no drafts.
        if config.state_bytes(4) > 0 {
            continue;
        }
        let policy = Policy::random(&device, &config, 7, 0.1).unwrap();
        let request = |n: usize| Request {
            problem: n as u64,
            prompt: (0..n as u32).map(|i| i * 31 % 97).collect(),
            n_samples: 2,
            max_tokens: 90,
            stops: vec![],
        };
        let requests = [990, 2020, 3000, 1, 2020, 990].map(request);
        let settings = EngineSettings { kv_bytes: 256 << 20, max_sequences: 3, ..settings() };
        let counts = compare(&format!("{family:?}"), &policy, settings, &requests);
        assert!(counts.n_accepted > 0, "{family:?}: {counts:?}");
    }
}
