//! The seconds of a rollout whose responses have given lengths: the engine's scheduler, run without a device.

use super::cost::{Costs, DecodeRows, Tokens};
use super::lengths::Lengths;
use stapo_core::random::Key;
use stapo_model::config::{KEPT_BEFORE_WINDOW, LayerSets};
use stapo_model::generate::{
    Capacity, EngineSettings, FinishReason, Request, SampledToken, Scheduler, Ticket, Windows, states_within,
};

/// What is sampled, and in how much memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingWork {
    pub n_groups: usize,
    pub group_size: usize,
    pub lengths: Lengths,
    /// Bytes for keys and values.
    pub kv_bytes: u64,
    /// Sequences that run at once, at most.
    pub max_sequences: usize,
}

/// A simulated rollout whose problems are dealt out to ranks.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SampledWork {
    /// Of the rank that takes longest.
    pub slowest_seconds: f64,
    /// On average over the ranks, those without a problem included.
    pub mean_seconds: f64,
    /// The most sequences that ran at once on a rank.
    pub most_running: usize,
}

/// Rollouts of several ranks that are simulated, at most, with lengths in another order each.
const MOST_DEALS: usize = 8;
/// Responses of one rank and of all ranks that are simulated, at most. Of more, only that many are simulated, and the seconds
/// multiplied.
const MOST_SIMULATED: usize = 1 << 13;
const MOST_DEALT: usize = 1 << 15;
/// Positions of the longest response, at most. The scheduler counts positions of several tokens where it is longer.
const MOST_POSITIONS: usize = 128;

/// Tokens of a block of the cache on a GPU; a CPU has smaller ones.
const BLOCK_TOKENS: usize = 32;

/// Simulates a rollout whose problems go to the ranks in turns. Nobody knows the lengths beforehand: on one rank long and
/// short ones alternate; on several they come in random orders, over which the seconds are averaged.
pub fn simulate(costs: &Costs, work: &SamplingWork, n_ranks: usize) -> SampledWork {
    // More samples of one prompt than run at once are as good as several prompts.
    let group_size = work.group_size.clamp(1, work.max_sequences.clamp(1, MOST_SIMULATED));
    let per_rank = work.n_groups.div_ceil(n_ranks).clamp(1, MOST_SIMULATED / group_size);
    let n_simulated = n_ranks.min((MOST_DEALT / (per_rank * group_size)).max(1));
    let is_whole = n_simulated == n_ranks && per_rank == work.n_groups.div_ceil(n_ranks);
    let n_groups = if is_whole { work.n_groups.max(1) } else { n_simulated * per_rank };
    let repeats = (work.n_groups as f64 * work.group_size as f64 / n_ranks as f64)
        / (n_groups as f64 * group_size as f64 / n_simulated as f64);
    let lengths = work.lengths.responses(n_groups * group_size);
    let n_deals = if n_ranks == 1 { 1 } else { (MOST_DEALT / (n_groups * group_size)).clamp(1, MOST_DEALS) };
    let mut sampled = SampledWork::default();
    for deal in 0..n_deals {
        let dealt = if n_ranks == 1 { mixed(&lengths) } else { shuffled(&lengths, Key::new(deal as u64)) };
        let mut slowest = 0.0_f64;
        for rank in 0..n_simulated.min(n_groups) {
            let groups: Vec<&[usize]> = dealt.chunks(group_size).skip(rank).step_by(n_simulated).collect();
            let scheduled = schedule(costs, work, &groups);
            let weight = repeats / n_deals as f64;
            slowest = slowest.max(weight * scheduled.seconds);
            sampled.mean_seconds += weight * scheduled.seconds / n_simulated as f64;
            sampled.most_running = sampled.most_running.max(scheduled.most_running);
        }
        sampled.slowest_seconds += slowest;
    }
    sampled
}

/// What the scheduler made of the responses of one rank.
struct Scheduled {
    seconds: f64,
    most_running: usize,
}

/// Runs the scheduler of the engine over groups of responses, step by step, and adds up what the steps cost. Prompts, and
/// sequences that were preempted, are computed at the speed of a prefill.
fn schedule(costs: &Costs, work: &SamplingWork, groups: &[&[usize]]) -> Scheduled {
    let unit = work.lengths.response_limit.div_ceil(MOST_POSITIONS).max(1);
    // The step that completes a prompt draws the first token of its responses, so the first position is that one token.
    let positions = |tokens: usize| 1 + (tokens.saturating_sub(1) as f64 / unit as f64).round() as usize;
    let limit = positions(work.lengths.response_limit);
    let prompt = ((work.lengths.prompt_mean / unit as f64).round() as usize).max(1);
    let mut scheduler = Scheduler::new(
        capacity(costs, work, unit, prompt + limit),
        Windows { of_sets: windows(costs, unit), n_before: KEPT_BEFORE_WINDOW / unit, n_rewound: 0 },
    );
    for (number, group) in groups.iter().enumerate() {
        let n_samples = group.len() as u32;
        let request =
            Request { problem: 0, prompt: vec![0; prompt], n_samples, max_tokens: limit, stops: Vec::new() };
        scheduler.submit(Ticket(number as u64), request, |_| limit);
    }
    let token =
        SampledToken { token: 0, logp: 0.0, entropy: 0.0, alternatives: Vec::new(), kept: Vec::new() };
    let mut n_filled = 0;
    let mut done = Scheduled { seconds: 0.0, most_running: 0 };
    while !scheduler.is_idle() {
        let step = scheduler.plan();
        let mut rows = DecodeRows { n_sequences: 0.0, own_keys: 0.0, shared_keys: 0.0 };
        let mut last_prompt = None;
        for planned in &step.rows {
            let sequence = &scheduler.running()[planned.running_idx];
            if planned.n_rows > 1 || sequence.n_cached < sequence.n_prompt {
                n_filled += planned.n_rows;
                continue;
            }
            rows.n_sequences += 1.0;
            // In the middle of the tokens of a position.
            rows.own_keys += unit as f64 * ((sequence.n_cached - sequence.n_prompt) as f64 + 0.5);
            // The rows of one prompt are next to each other, and its keys are read once.
            let is_new = last_prompt.replace(sequence.ticket) != Some(sequence.ticket);
            rows.shared_keys += if is_new { work.lengths.prompt_mean } else { 0.0 };
        }
        done.most_running = done.most_running.max(scheduler.running().len());
        if rows.n_sequences > 0.0 {
            done.seconds += unit as f64 * costs.decode_step(rows);
        }
        for drawn in scheduler.advance(&step.rows) {
            let length = positions(groups[drawn.ticket.0 as usize][drawn.sample as usize]);
            let is_last = |n_sampled: usize| (n_sampled >= length).then_some(FinishReason::LengthLimit);
            scheduler.receive(drawn, token.clone(), |sequence, _| is_last(sequence.sampled.len()));
        }
    }
    let scored = groups.len() as f64;
    let all = n_filled as f64 * work.lengths.prompt_mean / prompt as f64;
    let prompts = Tokens { all, scored, length: work.lengths.prompt_mean };
    done.seconds += costs.prefill(prompts);
    done
}

/// The bounds of the engine in positions of `unit` tokens. One sequence of `longest` positions always fits: the engine
/// refuses a request for which that is not so.
fn capacity(costs: &Costs, work: &SamplingWork, unit: usize, longest: usize) -> Capacity {
    let block_tokens = (BLOCK_TOKENS / unit).max(1);
    let block_bytes = (block_tokens * unit) as f64 * costs.set_key_bytes();
    let n_sets = windows(costs, unit).len();
    let max_sequences = work.max_sequences.max(1);
    let state_bytes = costs.model.state_bytes(costs.compute_bytes() as usize);
    let n_states = states_within(work.kv_bytes, state_bytes, max_sequences);
    let left = work.kv_bytes.saturating_sub(n_states.unwrap_or(0) as u64 * state_bytes);
    let n_blocks = (left as f64 / block_bytes) as usize;
    let max_rows = EngineSettings::default().max_rows;
    Capacity {
        n_blocks: n_blocks.max(n_sets * (longest.div_ceil(block_tokens) + 1)),
        n_states,
        block_tokens,
        max_rows,
        max_sequences,
        max_draws: max_rows.min(max_sequences),
    }
}

/// The windows of the model's sets of layers, in positions of `unit` tokens.
fn windows(costs: &Costs, unit: usize) -> Vec<Option<usize>> {
    let windows = LayerSets::new(costs.model).windows;
    windows.into_iter().map(|window| window.map(|window| window.div_ceil(unit))).collect()
}

/// The lengths in a random order (Fisher and Yates).
pub fn shuffled(lengths: &[usize], key: Key) -> Vec<usize> {
    let mut shuffled = lengths.to_vec();
    for i in (1..shuffled.len()).rev() {
        shuffled.swap(i, key.with(i as u64).below(i as u64 + 1) as usize);
    }
    shuffled
}

/// The lengths in an order in which long and short ones alternate: steps of about the golden section around a circle.
fn mixed(lengths: &[usize]) -> Vec<usize> {
    let n = lengths.len();
    let is_coprime = |stride: usize| {
        let (mut a, mut b) = (n, stride);
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a == 1
    };
    let first = (n as f64 * 0.618) as usize;
    let stride = (first.max(1)..=n).find(|stride| is_coprime(*stride)).unwrap_or(1);
    (0..n).map(|i| lengths[i * stride % n]).collect()
}

#[cfg(test)]
mod tests {
    use super::super::machine::Machine;
    use super::*;
    use stapo_model::ModelConfig;

    fn work(n_groups: usize, group_size: usize, lengths: Lengths) -> SamplingWork {
        SamplingWork { n_groups, group_size, lengths, kv_bytes: 64 << 30, max_sequences: 1024 }
    }

    fn simulated(work: &SamplingWork) -> SampledWork {
        on_ranks(work, 1)
    }

    /// All responses 128 tokens long, as in the table of docs/performance.md: 512 sequences of 64 prompts at 87,903
    /// tokens/s, 64 of 8 prompts at 35,228.
    #[test]
    fn equal_lengths_give_the_rates_of_the_benchmark() {
        let lengths = Lengths { prompt_mean: 128.0, response_mean: 128.0, response_limit: 128, spread: 0.5 };
        for (n_groups, rate) in [(64, 87_903.0), (8, 35_228.0)] {
            let done = simulated(&work(n_groups, 8, lengths));
            assert_eq!(done.most_running, n_groups * 8);
            let error = (n_groups * 8 * 128) as f64 / done.mean_seconds / rate - 1.0;
            assert!(error.abs() < 0.05, "{n_groups} prompts: {error:+.3}");
        }
    }

    #[test]
    fn less_memory_runs_fewer_at_once_and_takes_longer() {
        let lengths =
            Lengths { prompt_mean: 200.0, response_mean: 4000.0, response_limit: 15360, spread: 0.5 };
        let ample = simulated(&work(64, 8, lengths));
        let tight = simulated(&SamplingWork { kv_bytes: 8 << 30, ..work(64, 8, lengths) });
        // 64 GiB hold all 512 as they grow. 8 GiB hold 74,898 keys: 18 responses of the mean length, and more while they
        // are short.
        assert!(ample.most_running == 512 && (100..200).contains(&tight.most_running), "{ample:?} {tight:?}");
        assert!(tight.mean_seconds > 1.4 * ample.mean_seconds, "{ample:?} {tight:?}");
        // The longest sequence always fits, and two run in its memory while they are short.
        let one = SamplingWork { kv_bytes: 1, ..work(1, 2, lengths) };
        assert_eq!(simulated(&one).most_running, 2);
    }

    #[test]
    fn the_tail_of_spread_lengths_takes_longer_than_equal_ones() {
        let spread = Lengths { prompt_mean: 100.0, response_mean: 290.0, response_limit: 1024, spread: 0.5 };
        let equal = Lengths { response_limit: 290, ..spread };
        assert!(
            simulated(&work(64, 8, spread)).mean_seconds > 1.3 * simulated(&work(64, 8, equal)).mean_seconds
        );
    }

    #[test]
    fn many_responses_are_simulated_by_fewer() {
        let lengths = Lengths { prompt_mean: 10.0, response_mean: 20.0, response_limit: 40, spread: 0.5 };
        let n_groups = 1 << 20;
        let done = simulated(&work(n_groups, 1 << 16, lengths));
        let part = simulated(&work(n_groups / 2, 1 << 16, lengths));
        assert!((done.mean_seconds / part.mean_seconds - 2.0).abs() < 1e-6);
    }

    fn on_ranks(work: &SamplingWork, n_ranks: usize) -> SampledWork {
        let model = ModelConfig::known("qwen3-1.7b").unwrap();
        let machine = Machine::by_name("h200").unwrap();
        simulate(&Costs { model: &model, n_adapter: None, quantised: None, machine: &machine }, work, n_ranks)
    }

    #[test]
    fn ranks_share_the_work_and_wait_for_the_longest_response() {
        let lengths =
            Lengths { prompt_mean: 200.0, response_mean: 3867.0, response_limit: 15360, spread: 0.8 };
        let large = work(128, 8, lengths);
        let [one, eight] = [1, 8].map(|n_ranks| on_ranks(&large, n_ranks));
        assert_eq!(one.slowest_seconds, one.mean_seconds);
        assert!(eight.slowest_seconds < one.slowest_seconds / 4.0);
        let small = work(32, 8, lengths);
        let [eight, many, more] = [8, 16, 32].map(|n_ranks| on_ranks(&small, n_ranks));
        assert!(many.slowest_seconds < eight.slowest_seconds);
        assert!(eight.mean_seconds < eight.slowest_seconds && many.mean_seconds < 0.9 * many.slowest_seconds);
        // A response of 15,360 tokens takes as long however few share its rank: 1.6 ms a token at least.
        assert!(more.slowest_seconds > 15_360.0 * 1.6e-3, "{more:?}");
        // Problems stay whole: ranks beyond their number have nothing to do.
        let idle = on_ranks(&small, 64);
        assert!((idle.slowest_seconds / more.slowest_seconds - 1.0).abs() < 1e-9);
        assert!((idle.mean_seconds / more.mean_seconds - 0.5).abs() < 1e-9);
    }

    #[test]
    fn a_batch_too_large_to_simulate_is_simulated_in_part() {
        let lengths = Lengths { prompt_mean: 10.0, response_mean: 20.0, response_limit: 40, spread: 0.5 };
        let small = on_ranks(&work(1 << 6, 1 << 3, lengths), 16);
        let large = on_ranks(&work(1 << 20, 1 << 10, lengths), 16);
        let growth = large.mean_seconds / small.mean_seconds;
        assert!(growth.is_finite() && growth > 2e4, "{growth}");
    }

    #[test]
    fn shuffling_keeps_every_length() {
        let lengths: Vec<usize> = (0..100).collect();
        let [a, b] = [0, 1].map(|seed| shuffled(&lengths, Key::new(seed)));
        assert!(a != b && a != lengths);
        let sorted = |mut all: Vec<usize>| {
            all.sort_unstable();
            all
        };
        assert_eq!((sorted(a), sorted(b)), (lengths.clone(), lengths));
    }

    #[test]
    fn mixing_keeps_every_length() {
        for n in [1, 2, 3, 8, 64, 1023] {
            let lengths: Vec<usize> = (0..n).collect();
            let mut all = mixed(&lengths);
            assert!(n < 8 || !all.is_sorted());
            all.sort_unstable();
            assert_eq!(all, lengths);
        }
    }
}
