//! The scheduler against a cache that remembers what was written where.

use super::scheduler::{Capacity, ScheduledRows, ScheduledStep, Scheduler, Windows};
use super::sequence::{Sequence, UnreadToken};
use super::{FinishReason, Request, SampledToken, Ticket};
use stapo_ops::sampling;

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
    /// The most blocks in use at once.
    most_blocks: usize,
}

/// What a cache remembers of a position: the set of layers that wrote it, and the token.
type Slot = (usize, u32);

/// One set of layers that sees all keys.
const PLAIN: &[Option<usize>] = &[None];
/// Positions in front of a window that are kept.
const N_BEFORE: usize = 2;

fn sets_with(windows: &[Option<usize>], n_rewound: usize) -> Windows {
    Windows { of_sets: windows.to_vec(), n_before: N_BEFORE, n_rewound }
}

/// Turns of every response, and how many steps its environment takes to answer: a function of the response and the turn.
#[derive(Clone, Copy)]
struct Turns {
    n: usize,
    delay: fn(u32) -> usize,
}

const ONE_TURN: Turns = Turns { n: 1, delay: |_| 0 };

/// When the tokens of a step are read.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Reading {
    AtOnce,
    /// After the next step was planned.
    Ahead,
    /// At once, and the steps have drafts of which every so many tokens is wrong.
    Drafting(usize),
}

const READINGS: [Reading; 4] =
    [Reading::AtOnce, Reading::Ahead, Reading::Drafting(1000), Reading::Drafting(3)];

/// The next tokens of a sequence, except that each whose index divides by `wrong_every` is another one.
fn draft_tokens(sequence: &Sequence, n: usize, wrong_every: usize) -> Vec<u32> {
    let mut tokens = sequence.tokens.clone();
    for _ in 0..n {
        let is_wrong = tokens.len().is_multiple_of(wrong_every);
        tokens.push(next_token(&tokens, sequence.sample) + u32::from(is_wrong));
    }
    tokens.split_off(sequence.tokens.len())
}

/// What the policy is given after a turn.
fn given(ticket: u64, sample: u32, turn: usize) -> Vec<u32> {
    let n = 1 + (ticket as usize * 3 + sample as usize + turn * 5) % 7;
    (0..n).map(|i| (i * 17 + turn * 3 + sample as usize) as u32).collect()
}

/// A step at which the environment answers, with the request and the sample.
type DueAnswer = (usize, Ticket, u32);

/// Lets sequences whose environment has answered continue, or releases them after their last turn. Returns the other answers.
fn answer_due(
    scheduler: &mut Scheduler,
    requests: &[Request],
    turns: Turns,
    answers: Vec<DueAnswer>,
    outcome: &Outcome,
) -> Vec<DueAnswer> {
    let (due, rest): (Vec<DueAnswer>, Vec<DueAnswer>) =
        answers.into_iter().partition(|(step, ..)| *step <= outcome.n_steps);
    for (_, ticket, sample) in due {
        let key = (ticket.0, sample);
        let n_turns = outcome.responses.iter().filter(|(turn, _)| *turn == key).count();
        if n_turns < turns.n {
            let max_tokens = requests[ticket.0 as usize].max_tokens;
            scheduler.extend(ticket, sample, &given(ticket.0, sample, n_turns), max_tokens);
        } else {
            scheduler.release(ticket, sample);
        }
    }
    rest
}

/// Writes rows to the cache and draws from what the cache then holds; of a set of layers with a window, from what the first row
/// sees. `known` gives the token of a draw.
fn run_rows(
    scheduler: &Scheduler,
    windows: &[Option<usize>],
    step: &[ScheduledRows],
    cache: &mut [[Slot; BLOCK_TOKENS]],
    known: impl Fn(u32) -> u32,
) -> Vec<u32> {
    let mut tokens = vec![];
    for rows in step {
        let s = &scheduler.running()[rows.running_idx];
        let context = s.n_cached + rows.n_rows;
        for (set, window) in windows.iter().enumerate() {
            let slot = |p: usize| (s.tables[set].blocks()[p / BLOCK_TOKENS].0 as usize, p % BLOCK_TOKENS);
            let new = s.tokens[s.n_cached..context].iter().map(|token| known(*token));
            for (position, token) in (s.n_cached..).zip(new.chain(rows.drafts.iter().copied())) {
                let (block, at) = slot(position);
                cache[block][at] = (set, token);
            }
            let first = window.map_or(0, |window| (s.n_cached + 1).saturating_sub(window + N_BEFORE));
            let is_kept = |p: usize| cache[slot(p).0][slot(p).1] == (set, known(s.tokens[p]));
            assert!((first..context).all(is_kept), "the blocks hold another sequence's tokens");
        }
        let mut past: Vec<u32> = s.tokens[..context].iter().map(|token| known(*token)).collect();
        assert_eq!(rows.draws, past.len() == s.tokens.len());
        tokens.extend(rows.draws.then(|| next_token(&past, s.sample)));
        tokens.extend(rows.siblings.iter().map(|sample| next_token(&past, *sample)));
        for draft in &rows.drafts {
            past.push(*draft);
            tokens.push(next_token(&past, s.sample));
        }
    }
    tokens
}

/// The rows of the next step, with drafts where these are read.
fn plan(scheduler: &mut Scheduler, reading: Reading) -> ScheduledStep {
    let mut step = scheduler.plan();
    if let Reading::Drafting(wrong_every) = reading {
        let n_free = scheduler.n_free_blocks();
        let drafts: Vec<Vec<u32>> =
            step.decoding(scheduler.running()).map(|s| draft_tokens(s, 7, wrong_every)).collect();
        scheduler.add_drafts(&mut step, 20, drafts);
        assert!(scheduler.n_free_blocks() <= n_free, "drafts take no block from a sequence");
    }
    step
}

/// Gives back what was taken for drafts, and checks that nothing of them is left.
fn settle(scheduler: &mut Scheduler, reading: Reading, drafted: &[UnreadToken]) {
    for token in drafted {
        scheduler.release_unused_blocks(token.ticket, token.sample);
    }
    for s in scheduler.running().iter().filter(|_| reading != Reading::Ahead) {
        let n_used = s.n_cached.div_ceil(BLOCK_TOKENS).max(s.n_prompt.div_ceil(BLOCK_TOKENS));
        assert!(s.tables.iter().all(|table| table.len() <= n_used), "blocks of drafts were not given back");
    }
}

/// Runs requests to the end; every row reads its whole past through its blocks, so a block lost, shared when written,
/// or not copied shows as a wrong response or a failed check.
fn simulate(
    n_blocks: usize,
    max_rows: usize,
    max_sequences: usize,
    requests: &[Request],
    (reading, turns): (Reading, Turns),
) -> Outcome {
    simulate_windows(PLAIN, (n_blocks, max_rows, max_sequences), requests, (reading, turns))
}

/// As [`simulate`], for sets of layers with these windows.
fn simulate_windows(
    windows: &[Option<usize>],
    (n_blocks, max_rows, max_sequences): (usize, usize, usize),
    requests: &[Request],
    (reading, turns): (Reading, Turns),
) -> Outcome {
    let max_draws = max_rows.min(max_sequences);
    let capacity =
        Capacity { n_blocks, n_states: None, block_tokens: BLOCK_TOKENS, max_rows, max_sequences, max_draws };
    let mut scheduler = Scheduler::new(capacity, sets_with(windows, 0));
    if turns.n > 1 {
        scheduler.park_turns();
    }
    let mut answers: Vec<DueAnswer> = vec![];
    for (i, request) in requests.iter().enumerate() {
        scheduler.submit(Ticket(i as u64), request.clone(), |_| request.max_tokens);
    }
    let mut cache = vec![[(0, u32::MAX); BLOCK_TOKENS]; n_blocks];
    let mut outcome = Outcome { responses: vec![], n_preemptions: 0, n_steps: 0, n_rows: 0, most_blocks: 0 };
    let mut unread: Vec<(UnreadToken, u32)> = vec![];
    while !scheduler.is_idle() || !answers.is_empty() {
        answers = answer_due(&mut scheduler, requests, turns, answers, &outcome);
        let step = plan(&mut scheduler, reading);
        let is_working = !step.rows.is_empty() || !unread.is_empty();
        assert!(
            is_working || !answers.is_empty() || scheduler.is_idle(),
            "a step without rows would run for ever"
        );
        outcome.n_steps += 1;
        assert!(outcome.n_steps < 100_000, "no progress");
        for (from, to) in step.copies {
            cache[to.0 as usize] = cache[from.0 as usize];
        }
        let known = |token: u32| match token.checked_sub(sampling::drawn(0)) {
            Some(number) => unread[number as usize].1,
            None => token,
        };
        let tokens = run_rows(&scheduler, windows, &step.rows, &mut cache, known);
        outcome.most_blocks = outcome.most_blocks.max(n_blocks - scheduler.n_free_blocks());
        let n_rows = step.rows.iter().map(|rows| rows.n_rows + rows.drafts.len()).sum::<usize>();
        outcome.n_rows += n_rows;
        assert!(n_rows <= max_rows);
        let ticket = |rows: &ScheduledRows| scheduler.running()[rows.running_idx].ticket;
        assert!(step.rows.is_sorted_by_key(ticket), "the rows of a request do not stand side by side");
        let drawn = scheduler.advance(&step.rows);
        assert_eq!(drawn.len(), tokens.len());
        assert!(drawn.len() <= max_draws);
        let mut read = std::mem::replace(&mut unread, drawn.into_iter().zip(tokens).collect());
        if reading != Reading::Ahead {
            read.append(&mut unread);
        }
        let finish = |s: &Sequence, r: &Request| {
            let last = s.sampled.last()?.token;
            let is_over = s.sampled.len() >= r.max_tokens || r.stops.contains(&last);
            is_over.then_some(FinishReason::LengthLimit)
        };
        let drafted: Vec<UnreadToken> =
            read.iter().map(|(token, _)| *token).filter(|t| t.draft.is_some()).collect();
        for (unread_token, token) in read {
            if unread_token.draft.is_some_and(|draft| !scheduler.confirm(unread_token, draft)) {
                continue;
            }
            let sampled = SampledToken { token, logp: 0.0, entropy: 0.0, alternatives: vec![], kept: vec![] };
            if let Some(turn) = scheduler.receive(unread_token, sampled, finish) {
                let response = turn.tokens.iter().map(|t| t.token).collect();
                outcome.responses.push(((turn.ticket.0, turn.sample), response));
                if turns.n > 1 {
                    let number = outcome.responses.len() as u32 + turn.sample;
                    answers.push((outcome.n_steps + (turns.delay)(number), turn.ticket, turn.sample));
                }
            }
        }
        settle(&mut scheduler, reading, &drafted);
    }
    outcome.n_preemptions = scheduler.n_preemptions();
    assert_eq!(scheduler.n_free_blocks(), n_blocks, "memory was not given back");
    // The turns of a response stay in their order.
    outcome.responses.sort_by_key(|(key, _)| *key);
    outcome
}

fn expected(requests: &[Request], n_turns: usize) -> Vec<((u64, u32), Vec<u32>)> {
    let mut all = vec![];
    for (i, request) in requests.iter().enumerate() {
        for sample in 0..request.n_samples {
            let mut tokens = request.prompt.clone();
            for turn in 0..n_turns {
                if turn > 0 {
                    tokens.extend(given(i as u64, sample, turn));
                }
                let start = tokens.len();
                for _ in 0..request.max_tokens {
                    tokens.push(next_token(&tokens, sample));
                    if request.stops.contains(&tokens[tokens.len() - 1]) {
                        break;
                    }
                }
                all.push(((i as u64, sample), tokens[start..].to_vec()));
            }
        }
    }
    all
}

#[test]
fn responses_do_not_depend_on_memory_rows_or_seats() {
    let mut requests =
        [request(1, 3, 9), request(9, 5, 14), request(14, 1, 3), request(5, 2, 30), request(8, 4, 1)];
    // Two requests have a stop token that does come up, so some of their responses end before the length limit.
    let second = |responses: Vec<((u64, u32), Vec<u32>)>, ticket| {
        responses
            .iter()
            .find(|(key, _)| *key == (ticket, 1))
            .map_or(0, |(_, tokens)| tokens[tokens.len() / 3])
    };
    requests[1].stops = vec![second(expected(&requests, 1), 1)];
    requests[3].stops = vec![second(expected(&requests, 1), 3)];
    let wanted = expected(&requests, 1);
    assert!(wanted.iter().any(|((ticket, _), tokens)| tokens.len() < requests[*ticket as usize].max_tokens));
    let mut some_preempted = false;
    for n_blocks in [9, 10, 13, 20, 37, 200] {
        for max_rows in [1, 3, 7, 64, 1000] {
            for (max_sequences, reading) in [1, 2, 5, 100].into_iter().flat_map(|n| READINGS.map(|r| (n, r)))
            {
                let outcome = simulate(n_blocks, max_rows, max_sequences, &requests, (reading, ONE_TURN));
                assert_eq!(
                    outcome.responses, wanted,
                    "{n_blocks} blocks, {max_rows} rows, {max_sequences} seats, {reading:?}"
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
    let outcome =
        simulate(200, 1000, 100, &[request(n_prompt, n_samples, max_tokens)], (Reading::AtOnce, ONE_TURN));
    // Then everyone runs all but the last sampled token.
    assert_eq!(outcome.n_rows, n_prompt + n_samples as usize * (max_tokens - 1));
}

#[test]
fn requests_of_one_sample_all_start_in_the_first_step() {
    let requests: Vec<Request> = (0..50).map(|_| request(6, 1, 4)).collect();
    assert_eq!(simulate(500, 1000, 100, &requests, (Reading::AtOnce, ONE_TURN)).n_steps, 4);
}

#[test]
fn a_sequence_that_fills_the_whole_cache_finishes() {
    let outcome = simulate(6, 64, 8, &[request(10, 3, 15)], (Reading::Ahead, ONE_TURN));
    assert_eq!(outcome.responses, expected(&[request(10, 3, 15)], 1));
}

#[test]
fn turns_do_not_depend_on_memory_or_on_the_time_that_an_environment_takes() {
    let mut requests = [request(1, 3, 5), request(9, 4, 7), request(14, 1, 3), request(8, 4, 1)];
    let some = |responses: Vec<((u64, u32), Vec<u32>)>| responses[13].1[2];
    requests[1].stops = vec![some(expected(&requests, 4))];
    let wanted = expected(&requests, 4);
    assert!(wanted.iter().any(|((ticket, _), turn)| turn.len() < requests[*ticket as usize].max_tokens));
    let delays: [fn(u32) -> usize; 3] =
        [|_| 0, |number| number as usize % 5, |number| 37 * number as usize % 60];
    let mut some_preempted = false;
    for n_blocks in [15, 16, 24, 60, 300] {
        for max_rows in [1, 5, 1000] {
            for max_sequences in [1, 3, 100] {
                for (reading, delay) in delays.into_iter().flat_map(|delay| READINGS.map(|r| (r, delay))) {
                    let turns = (reading, Turns { n: 4, delay });
                    let outcome = simulate(n_blocks, max_rows, max_sequences, &requests, turns);
                    assert_eq!(
                        outcome.responses, wanted,
                        "{n_blocks} blocks, {max_rows} rows, {max_sequences} seats, {reading:?}"
                    );
                    some_preempted |= outcome.n_preemptions > 0;
                }
            }
        }
    }
    assert!(some_preempted, "the case is too roomy to test preemption");
}

/// Sets of layers of several kinds, of which some keep all keys or none does.
const WINDOWED: [&[Option<usize>]; 4] =
    [&[None, Some(5)], &[Some(9), None, Some(9)], &[Some(6)], &[Some(3), Some(12)]];

#[test]
fn responses_and_turns_do_not_depend_on_windows() {
    let mut requests = [request(1, 3, 9), request(9, 4, 24), request(34, 3, 3), request(8, 4, 1)];
    requests[1].stops = vec![expected(&requests, 3)[9].1[4]];
    let wanted = expected(&requests, 3);
    let turns = Turns { n: 3, delay: |number| 7 * number as usize % 11 };
    let mut some_preempted = false;
    for (windows, n_blocks) in
        WINDOWED.into_iter().flat_map(|windows| [31, 40, 64, 400].map(|n| (windows, n)))
    {
        // So many blocks as the longest sequence may need in each set of layers.
        let n_blocks = n_blocks * windows.len();
        for (max_rows, max_sequences) in [(1, 3), (5, 100), (64, 3), (64, 100)] {
            for reading in READINGS {
                let bounds = (n_blocks, max_rows, max_sequences);
                let outcome = simulate_windows(windows, bounds, &requests, (reading, turns));
                assert_eq!(
                    outcome.responses, wanted,
                    "{windows:?}, {n_blocks} blocks, {max_rows} rows, {max_sequences} seats, {reading:?}"
                );
                some_preempted |= outcome.n_preemptions > 0;
            }
        }
    }
    assert!(some_preempted, "the case is too roomy to test preemption");
}

/// A response of 400 tokens in two sets of layers with a window of 16 and one without.
#[test]
fn a_long_sequence_holds_the_blocks_of_its_windows_alone() {
    let requests = [request(10, 1, 400)];
    let all = 409_usize.div_ceil(BLOCK_TOKENS);
    let of_window = (16 + N_BEFORE).div_ceil(BLOCK_TOKENS) + 1;
    for (windows, most) in
        [(&[None, Some(16), Some(16)][..], all + 2 * of_window), (&[Some(16)], of_window), (PLAIN, all)]
    {
        let outcome = simulate_windows(windows, (500, 64, 8), &requests, (Reading::Ahead, ONE_TURN));
        assert_eq!(outcome.responses, expected(&requests, 1));
        assert!((most - windows.len()..=most).contains(&outcome.most_blocks), "{windows:?}");
    }
    // Where every set has a window, a few blocks hold a sequence of any length.
    let outcome = simulate_windows(&[Some(16)], (9, 10, 8), &requests, (Reading::Ahead, ONE_TURN));
    assert_eq!(outcome.responses, expected(&requests, 1));
}

#[test]
fn a_turn_computes_the_new_tokens_alone() {
    let (n_prompt, n_samples, max_tokens) = (41, 8, 3);
    let requests = [request(n_prompt, n_samples, max_tokens)];
    let outcome =
        simulate(300, 1000, 100, &requests, (Reading::AtOnce, Turns { n: 3, delay: |n| n as usize % 4 }));
    let n_given: usize = (0..n_samples).flat_map(|s| [1, 2].map(|turn| given(0, s, turn).len())).sum();
    // The last token of a turn is run with the tokens that follow it, the last of the response never.
    let n_sampled = n_samples as usize * (3 * max_tokens - 1);
    assert_eq!(outcome.n_rows, n_prompt + n_given + n_sampled);
}

#[test]
fn right_drafts_save_steps_and_wrong_ones_cost_none() {
    let requests = [request(9, 2, 64)];
    let run = |reading| simulate(200, 1000, 100, &requests, (reading, ONE_TURN)).n_steps;
    let plain = run(Reading::AtOnce);
    assert_eq!(plain, 64);
    // The first step ends the prompt; each of the others draws up to eight tokens.
    assert_eq!(run(Reading::Drafting(1000)), 1 + 63_usize.div_ceil(8));
    assert_eq!(run(Reading::Drafting(1)), plain);
}

/// A model that drafts follows a text that changes far back, which is in front of windows, or close to its end.
#[test]
fn a_sequence_cut_back_to_before_a_window_is_computed_again() {
    let windows = [None, Some(5)];
    let capacity = Capacity {
        n_blocks: 64,
        n_states: None,
        block_tokens: BLOCK_TOKENS,
        max_rows: 64,
        max_sequences: 2,
        max_draws: 2,
    };
    let mut scheduler = Scheduler::new(capacity, sets_with(&windows, 6));
    scheduler.park_turns();
    let mut cache = vec![[(0, u32::MAX); BLOCK_TOKENS]; 64];
    let request = request(10, 1, 4);
    let mut leader = Sequence::new(Ticket(0), 0, request.prompt.clone(), 400);
    // The tokens that the text is cut back to, how many come after these, and rows in all that the model then computes.
    for (n_kept, n_new, n_rows) in [(10, 40, 53), (50, 1, 4), (47, 2, 5), (20, 3, 26), (3, 30, 36)] {
        leader.tokens.truncate(n_kept);
        let changed = (0..n_new).map(|i| 900 + 3 * i + n_kept as u32);
        leader.tokens.extend(changed);
        scheduler.follow(&leader, &request, request.max_tokens);
        let mut n_computed = 0;
        let mut drafted = vec![];
        while !scheduler.is_idle() {
            let step = scheduler.plan();
            for (from, to) in &step.copies {
                cache[to.0 as usize] = cache[from.0 as usize];
            }
            n_computed += step.rows.iter().map(|rows| rows.n_rows).sum::<usize>();
            let tokens = run_rows(&scheduler, &windows, &step.rows, &mut cache, |token| token);
            for (unread, token) in scheduler.advance(&step.rows).into_iter().zip(tokens) {
                drafted.push(token);
                let sampled =
                    SampledToken { token, logp: 0.0, entropy: 0.0, alternatives: vec![], kept: vec![] };
                let is_last = |s: &Sequence| s.sampled.len() == s.max_tokens;
                scheduler.receive(unread, sampled, |s, _| is_last(s).then_some(FinishReason::LengthLimit));
            }
        }
        assert_eq!(drafted, draft_tokens(&leader, request.max_tokens, 1000));
        assert_eq!(n_computed, n_rows, "cut back to {n_kept} tokens");
    }
    scheduler.release(Ticket(0), 0);
    assert_eq!(scheduler.n_free_blocks(), 64);
}

#[test]
fn recorded_steps_have_few_sizes() {
    let sizes = [1, 3, 8, 9, 17, 100, 300, 1000, 1030, 2000].map(super::engine::padded_rows);
    assert_eq!(sizes, [1, 4, 8, 16, 24, 104, 320, 1024, 1088, 2048]);
}
