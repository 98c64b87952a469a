//! The scheduler against a cache that remembers what was written where.

use super::scheduler::{Capacity, Scheduler};
use super::sequence::Sequence;
use super::{Finish, Request, Sampled, Ticket};

const BLOCK_TOKENS: usize = 4;

/// The "model": the next token is a function of all tokens so far, read back from the cache.
fn next_token(tokens: &[u32], sample: u32) -> u32 {
    tokens.iter().fold(sample + 1, |hash, t| hash.wrapping_mul(31).wrapping_add(t * 7 + 1)) % 1000
}

fn request(n_prompt: usize, n_samples: u32, max_tokens: usize) -> Request {
    let prompt = (0..n_prompt as u32).map(|i| i * 13 + n_prompt as u32).collect();
    Request { problem: n_prompt as u64, prompt, n_samples, max_tokens, stops: vec![] }
}

struct Outcome {
    /// (request, sample) -> response
    responses: Vec<((u64, u32), Vec<u32>)>,
    n_preemptions: u64,
    n_steps: usize,
    n_rows: usize,
}

/// Runs requests to the end; every row reads its whole past through its blocks, so a block lost, shared when written,
/// or not copied shows as a wrong response or a failed check.
fn simulate(n_blocks: usize, max_rows: usize, max_sequences: usize, requests: &[Request]) -> Outcome {
    let capacity = Capacity { n_blocks, block_tokens: BLOCK_TOKENS, max_rows, max_sequences };
    let mut scheduler = Scheduler::new(capacity);
    for (i, request) in requests.iter().enumerate() {
        scheduler.submit(Ticket(i as u64), request.clone());
    }
    let mut cache = vec![[u32::MAX; BLOCK_TOKENS]; n_blocks];
    let mut outcome = Outcome { responses: vec![], n_preemptions: 0, n_steps: 0, n_rows: 0 };
    while !scheduler.is_idle() {
        let step = scheduler.plan();
        assert!(!step.runs.is_empty(), "a step without rows would run for ever");
        outcome.n_steps += 1;
        assert!(outcome.n_steps < 100_000, "no progress");
        for (from, to) in step.copies {
            cache[to.0 as usize] = cache[from.0 as usize];
        }
        for run in &step.runs {
            let s = &scheduler.running()[run.slot];
            for position in s.n_cached..s.n_cached + run.n_rows {
                let block = s.blocks[position / BLOCK_TOKENS];
                cache[block.0 as usize][position % BLOCK_TOKENS] = s.tokens[position];
            }
            outcome.n_rows += run.n_rows;
        }
        assert!(step.runs.iter().map(|r| r.n_rows).sum::<usize>() <= max_rows);
        for run in step.runs {
            let wants_token = scheduler.advance(run);
            let s = &scheduler.running()[run.slot];
            let read = |p: usize| cache[s.blocks[p / BLOCK_TOKENS].0 as usize][p % BLOCK_TOKENS];
            let past: Vec<u32> = (0..s.n_cached).map(read).collect();
            assert_eq!(past, s.tokens[..s.n_cached], "the cache holds someone else's tokens");
            if wants_token {
                let token = next_token(&past, s.sample);
                let s = scheduler.running_mut(run.slot);
                s.tokens.push(token);
                s.sampled.push(Sampled { token, logp: 0.0, entropy: 0.0, alternatives: vec![] });
            }
        }
        let finish =
            |s: &Sequence, r: &Request| (s.sampled.len() >= r.max_tokens).then_some(Finish::LengthLimit);
        for (s, _) in scheduler.retire(finish) {
            let response = s.sampled.iter().map(|t| t.token).collect();
            outcome.responses.push(((s.ticket.0, s.sample), response));
        }
    }
    outcome.n_preemptions = scheduler.n_preemptions();
    assert_eq!(scheduler.n_free_blocks(), n_blocks, "memory was not given back");
    outcome.responses.sort();
    outcome
}

fn expected(requests: &[Request]) -> Vec<((u64, u32), Vec<u32>)> {
    let mut all = vec![];
    for (i, request) in requests.iter().enumerate() {
        for sample in 0..request.n_samples {
            let mut tokens = request.prompt.clone();
            for _ in 0..request.max_tokens {
                tokens.push(next_token(&tokens, sample));
            }
            all.push(((i as u64, sample), tokens[request.prompt.len()..].to_vec()));
        }
    }
    all
}

#[test]
fn responses_do_not_depend_on_memory_rows_or_seats() {
    let requests =
        [request(1, 3, 9), request(9, 5, 14), request(14, 1, 3), request(5, 2, 30), request(8, 4, 1)];
    let wanted = expected(&requests);
    let mut some_preempted = false;
    for n_blocks in [9, 10, 13, 20, 37, 200] {
        for max_rows in [1, 3, 7, 64, 1000] {
            for max_sequences in [1, 2, 5, 100] {
                let outcome = simulate(n_blocks, max_rows, max_sequences, &requests);
                assert_eq!(
                    outcome.responses, wanted,
                    "{n_blocks} blocks, {max_rows} rows, {max_sequences} seats"
                );
                some_preempted |= outcome.n_preemptions > 0;
            }
        }
    }
    assert!(some_preempted, "the case is too roomy to test preemption");
}

#[test]
fn a_prompt_is_computed_once_for_all_its_samples() {
    let (n_prompt, n_samples, max_tokens) = (41, 8, 3);
    let outcome = simulate(200, 1000, 100, &[request(n_prompt, n_samples, max_tokens)]);
    // The first sample runs the whole prompt, the others its last token; then everyone all but the last sampled.
    let n_samples = n_samples as usize;
    assert_eq!(outcome.n_rows, (n_prompt - 1) + n_samples + n_samples * (max_tokens - 1));
}

#[test]
fn requests_of_one_sample_all_start_in_the_first_step() {
    let requests: Vec<Request> = (0..50).map(|_| request(6, 1, 4)).collect();
    assert_eq!(simulate(500, 1000, 100, &requests).n_steps, 4);
}

#[test]
fn a_sequence_that_fills_the_whole_cache_finishes() {
    let outcome = simulate(6, 64, 8, &[request(10, 3, 15)]);
    assert_eq!(outcome.responses, expected(&[request(10, 3, 15)]));
}
