//! Responses of several turns: the same bits as a training forward over the whole response, whatever memory, delays and
//! neighbours the turns had.

use crate::bitwise::{bits, policies, policy, requests, scores, settings, token};
use crate::cuda;
use stapo_model::Family;
use stapo_model::decoder::Policy;
use stapo_model::generate::{
    Engine, EngineMemory, EngineSettings, Event, Request, RequestError, SampledToken, Ticket,
};
use std::collections::BTreeMap;

/// What an environment answers to a turn: a function of the response and the turn.
fn observation(response: (Ticket, u32), turn: usize) -> Vec<u32> {
    let n = 1 + (response.0.0 as usize * 5 + response.1 as usize * 3 + turn) % 19;
    (0..n).map(|i| token(i + 7 * turn + n) % 101).collect()
}

/// The tokens of a response in several turns, the positions of the sampled ones, and what was sampled.
pub type Episode = (Vec<u32>, Vec<usize>, Vec<SampledToken>);

/// Responses of four turns. The environment answers every turn after some steps: `delay` gives their number.
pub fn episodes(
    policy: &Policy,
    settings: EngineSettings,
    (ahead, delay): (bool, fn(usize) -> usize),
) -> (BTreeMap<(Ticket, u32), Episode>, u64) {
    let mut memory = EngineMemory::new();
    let mut engine = Engine::new(policy, &mut memory, settings).unwrap();
    engine.plan_ahead(ahead);
    engine.park_turns();
    let requests: Vec<Request> = requests()
        .into_iter()
        .map(|request| Request { max_tokens: request.max_tokens / 2, ..request })
        .collect();
    for request in &requests {
        engine.submit(request.clone()).unwrap();
    }
    let mut episodes: BTreeMap<(Ticket, u32), Episode> = BTreeMap::new();
    let mut n_turns: BTreeMap<(Ticket, u32), usize> = BTreeMap::new();
    let mut answers: Vec<(usize, Ticket, u32)> = Vec::new();
    for step in 0.. {
        let (due, rest) = answers.into_iter().partition(|(at, ..)| *at <= step);
        answers = rest;
        for (_, ticket, sample) in due {
            let key = (ticket, sample);
            if n_turns[&key] == 4 {
                engine.release(ticket, sample);
            } else {
                let given = observation(key, n_turns[&key]);
                engine.extend(key, &given, requests[ticket.0 as usize].max_tokens).unwrap();
                episodes.get_mut(&key).unwrap().0.extend(given);
            }
        }
        if engine.is_idle() && answers.is_empty() {
            break;
        }
        let mut turns = Vec::new();
        engine
            .step(|event| {
                if let Event::Finished(turn) = event {
                    turns.push(turn);
                }
            })
            .unwrap();
        for turn in turns {
            let key = (turn.ticket, turn.sample);
            let prompt = || (requests[turn.ticket.0 as usize].prompt.clone(), Vec::new(), Vec::new());
            let (tokens, positions, sampled) = episodes.entry(key).or_insert_with(prompt);
            for drawn in turn.tokens {
                positions.push(tokens.len());
                tokens.push(drawn.token);
                sampled.push(drawn);
            }
            let n = n_turns.entry(key).or_default();
            *n += 1;
            answers.push((step + delay(*n * 7 + turn.sample as usize * 3), turn.ticket, turn.sample));
        }
    }
    let n_preemptions = engine.n_preemptions();
    (episodes, n_preemptions)
}

#[test]
fn sampled_logp_over_turns_equals_training_forward() {
    for (family, policy) in policies() {
        let (episodes, _) = episodes(&policy, settings(), (false, |_| 0));
        let n_stopped = episodes.values().flat_map(|(.., sampled)| sampled).filter(|s| s.token < 2).count();
        assert!(n_stopped > 0, "{family}: no turn ends at a stop token");
        check_training(&family, &policy, &episodes);
    }
}

/// Compares what was sampled with a training forward over the whole response.
fn check_training(family: &str, policy: &Policy, episodes: &BTreeMap<(Ticket, u32), Episode>) {
    for (tokens, positions, sampled) in episodes.values() {
        let trained = scores(policy, &[(tokens.clone(), 1)]);
        let at = |values: &[f32]| positions.iter().map(|p| values[p - 1]).collect::<Vec<f32>>();
        let logp: Vec<f32> = sampled.iter().map(|t| t.logp).collect();
        let entropy: Vec<f32> = sampled.iter().map(|t| t.entropy).collect();
        assert_eq!(bits(&logp), bits(&at(&trained.logp)), "{family}");
        assert_eq!(bits(&entropy), bits(&at(&trained.entropy)), "{family}");
    }
}

/// Keys and values of a turn are those of decode steps, replayed from CUDA graphs; the next turn's prompt follows on them.
#[test]
fn turns_on_a_gpu_have_the_bits_of_training_whatever_memory_and_time_they_had() {
    let Some(device) = cuda::gpu() else { return };
    for (family, policy) in cuda::policies(&device) {
        let large = EngineSettings { kv_bytes: 64 << 20, ..settings() };
        let (undisturbed, _) = episodes(&policy, large, (true, |_| 0));
        check_training(&family, &policy, &undisturbed);
        let block = policy
            .config()
            .attentions()
            .map(|attention| attention.heads)
            .fold(0, |sum, heads| sum + heads.kv * heads.dim);
        // About 20 blocks of 32 positions, keys and values in bf16; three states of sequences, where layers keep them.
        let kv_bytes = 20 * 32 * block * 4 + 6 * policy.config().state_bytes(2) as usize;
        let small = EngineSettings { kv_bytes, max_rows: 37, ..settings() };
        let delay: fn(usize) -> usize = |n| 31 * n % 83;
        let (disturbed, _) = episodes(&policy, small, (true, delay));
        assert!(disturbed == undisturbed, "{family}");
    }
}

#[test]
fn turns_do_not_depend_on_memory_or_on_the_time_that_an_environment_takes() {
    // Memory for 17 to 40 blocks of 16 positions; the longest response has up to 13 blocks.
    check_memory_and_time(&policy(Family::Qwen3), &[170_000, 250_000, 400_000, 8 << 20]);
    let hybrid = policy(Family::Qwen35);
    // Values are padded to 16 columns, which makes keys and values nearly twice as wide.
    let sequence_bytes = 2 * hybrid.config().sequence_bytes(13 * 16, 1, 4) as usize;
    check_memory_and_time(&hybrid, &[sequence_bytes, 5 * sequence_bytes]);
}

fn check_memory_and_time(policy: &Policy, kv_bytes: &[usize]) {
    let (undisturbed, n_preemptions) = episodes(policy, settings(), (false, |_| 0));
    assert_eq!(n_preemptions, 0);
    let delays: [fn(usize) -> usize; 3] = [|_| 0, |n| n % 5, |n| 31 * n % 83];
    let mut n_preempted = 0;
    for &kv_bytes in kv_bytes {
        for (ahead, delay) in delays.into_iter().flat_map(|delay| [(false, delay), (true, delay)]) {
            for max_rows in [7, 1024] {
                let settings = EngineSettings { kv_bytes, max_rows, ..settings() };
                let (found, n_preemptions) = episodes(policy, settings, (ahead, delay));
                n_preempted += n_preemptions;
                assert!(found == undisturbed, "{kv_bytes} bytes, {max_rows} rows, ahead: {ahead}");
            }
        }
    }
    assert!(n_preempted > 0, "the memory is too large to test preemption");
}

#[test]
fn an_extension_that_cannot_be_run_is_refused_and_leaves_the_turn_parked() {
    let policy = policy(Family::Qwen3);
    let mut memory = EngineMemory::new();
    let mut engine = Engine::new(&policy, &mut memory, settings()).unwrap();
    engine.park_turns();
    let request = Request { problem: 0, prompt: vec![5; 9], n_samples: 1, max_tokens: 4, stops: vec![] };
    let ticket = engine.submit(request).unwrap();
    assert_eq!(engine.generate().unwrap().len(), 1);
    let refused = |engine: &mut Engine, tokens: &[u32], max_tokens| {
        engine.extend((ticket, 0), tokens, max_tokens).unwrap_err()
    };
    assert_eq!(refused(&mut engine, &[], 4), RequestError::EmptyPrompt);
    assert!(matches!(refused(&mut engine, &[101], 4), RequestError::UnknownToken { token: 101, .. }));
    assert!(matches!(refused(&mut engine, &[1], 0), RequestError::NothingAsked { .. }));
    assert!(matches!(refused(&mut engine, &[1; 243], 4), RequestError::PromptTooLong { n_prompt: 256, .. }));
    engine.extend((ticket, 0), &[1; 242], 4).unwrap();
    let turns = engine.generate().unwrap();
    assert_eq!(turns[0].tokens.len(), 1, "the model's own limit ends the turn");
    engine.release(ticket, 0);
}
