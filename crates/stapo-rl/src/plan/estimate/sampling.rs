//! Continuous batching, simulated: the seconds of a rollout whose responses have given lengths.

use super::cost::{Costs, DecodeRows, Tokens};
use super::lengths::Lengths;
use stapo_core::random::Key;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

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

/// A simulated rollout.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampledWork {
    pub prefill_seconds: f64,
    pub decode_seconds: f64,
    pub n_tokens: f64,
    /// The most sequences that ran at once.
    pub most_running: usize,
}

impl SampledWork {
    pub fn seconds(&self) -> f64 {
        self.prefill_seconds + self.decode_seconds
    }
}

/// More responses than this are simulated by as many, and the seconds multiplied.
const MOST_SIMULATED: usize = 1 << 14;

/// Simulates a rollout. The oldest waiting response is admitted whenever the memory holds one more of the mean length;
/// none is ever preempted.
pub fn simulate(costs: &Costs, work: &SamplingWork) -> SampledWork {
    let group_size = work.group_size.clamp(1, MOST_SIMULATED);
    let n_groups = work.n_groups.min(MOST_SIMULATED / group_size).max(1);
    let n_responses = n_groups * group_size;
    let repeats = work.n_groups as f64 * work.group_size as f64 / n_responses as f64;
    let prompt_tokens = n_groups as f64 * work.lengths.prompt_mean;
    let prompts = Tokens { all: prompt_tokens, scored: n_groups as f64, length: work.lengths.prompt_mean };
    let lengths = mixed(&work.lengths.responses(n_responses));
    let (decode_seconds, most_running) = decode(costs, work, group_size, &lengths);
    SampledWork {
        prefill_seconds: repeats * costs.prefill(prompts),
        decode_seconds: repeats * decode_seconds,
        n_tokens: repeats * lengths.iter().sum::<usize>() as f64,
        most_running,
    }
}

/// A simulated rollout whose problems are dealt out to ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankedSampling {
    /// Of the rank that takes longest.
    pub slowest_seconds: f64,
    /// On average over the ranks, those without a problem included.
    pub mean_seconds: f64,
    /// The most sequences that ran at once on a rank.
    pub most_running: usize,
}

/// Rollouts that are simulated, with lengths in another order each.
const N_DEALS: u64 = 8;
/// Responses of one simulated rollout, at most. Of more, the ranks that have so many are simulated.
const MOST_DEALT: usize = 1 << 16;

/// Simulates a rollout whose problems go to the ranks in turns. Nobody knows the lengths beforehand, so they come in
/// random orders, over which the seconds are averaged.
pub fn simulate_ranks(costs: &Costs, work: &SamplingWork, n_ranks: usize) -> RankedSampling {
    if n_ranks == 1 {
        let alone = simulate(costs, work);
        let seconds = alone.seconds();
        let most_running = alone.most_running;
        return RankedSampling { slowest_seconds: seconds, mean_seconds: seconds, most_running };
    }
    let group_size = work.group_size.clamp(1, MOST_SIMULATED);
    let groups_per_rank = work.n_groups.div_ceil(n_ranks).min(MOST_SIMULATED / group_size).max(1);
    let n_simulated = n_ranks.min((MOST_DEALT / (groups_per_rank * group_size)).max(1));
    let is_whole = n_simulated == n_ranks && groups_per_rank == work.n_groups.div_ceil(n_ranks);
    let n_groups = if is_whole { work.n_groups.max(1) } else { n_simulated * groups_per_rank };
    let repeats = (work.n_groups as f64 * work.group_size as f64 / n_ranks as f64)
        / (n_groups as f64 * group_size as f64 / n_simulated as f64);
    let lengths = work.lengths.responses(n_groups * group_size);
    let (mut slowest, mut sum, mut most_running) = (0.0, 0.0, 0);
    for deal in 0..N_DEALS {
        let dealt = shuffled(&lengths, Key::new(deal));
        let mut longest = 0.0_f64;
        for rank in 0..n_simulated.min(n_groups) {
            let of_rank = dealt.chunks(group_size).skip(rank).step_by(n_simulated);
            let n_own = of_rank.len() as f64;
            let own: Vec<usize> = of_rank.flatten().copied().collect();
            let all = n_own * work.lengths.prompt_mean;
            let prompts = Tokens { all, scored: n_own, length: work.lengths.prompt_mean };
            let (decode_seconds, running) = decode(costs, work, group_size, &own);
            let seconds = costs.prefill(prompts) + decode_seconds;
            most_running = most_running.max(running);
            longest = longest.max(seconds);
            sum += seconds;
        }
        slowest += longest;
    }
    let n_deals = N_DEALS as f64;
    RankedSampling {
        slowest_seconds: repeats * slowest / n_deals,
        mean_seconds: repeats * sum / n_deals / n_simulated as f64,
        most_running,
    }
}

/// The lengths in a random order (Fisher and Yates).
pub fn shuffled(lengths: &[usize], key: Key) -> Vec<usize> {
    let mut shuffled = lengths.to_vec();
    for i in (1..shuffled.len()).rev() {
        shuffled.swap(i, key.with(i as u64).below(i as u64 + 1) as usize);
    }
    shuffled
}

/// Sequences that fit the memory at once, each with its share of the group's prompt and a response of mean length.
fn capacity(costs: &Costs, work: &SamplingWork, group_size: usize) -> usize {
    let keys = work.lengths.response_mean + work.lengths.prompt_mean / group_size as f64;
    let fitting = work.kv_bytes as f64 / (keys.max(1.0) * costs.key_bytes());
    (fitting as usize).clamp(1, work.max_sequences.max(1))
}

/// The seconds of all decode steps, and the most sequences that ran at once.
fn decode(costs: &Costs, work: &SamplingWork, group_size: usize, lengths: &[usize]) -> (f64, usize) {
    let capacity = capacity(costs, work, group_size);
    let mut group_running = vec![0_usize; lengths.len().div_ceil(group_size)];
    // The step after which each running response ends, with the response's place.
    let mut ends: BinaryHeap<Reverse<(usize, usize)>> = BinaryHeap::new();
    let mut n_admitted = 0;
    let mut step = 0;
    let mut own_keys = 0.0;
    let mut n_groups_running = 0_usize;
    let mut seconds = 0.0;
    let mut most_running = 0;
    loop {
        while n_admitted < lengths.len() && ends.len() < capacity {
            ends.push(Reverse((step + lengths[n_admitted], n_admitted)));
            let running = &mut group_running[n_admitted / group_size];
            n_groups_running += usize::from(*running == 0);
            *running += 1;
            n_admitted += 1;
        }
        most_running = most_running.max(ends.len());
        let Some(Reverse((end, _))) = ends.peek() else { return (seconds, most_running) };
        let n_steps = (end - step) as f64;
        let n_sequences = ends.len() as f64;
        // Keys grow by one a step, so the middle step costs the mean of all.
        let rows = DecodeRows {
            n_sequences,
            own_keys: own_keys + n_sequences * n_steps / 2.0,
            shared_keys: n_groups_running as f64 * work.lengths.prompt_mean,
        };
        seconds += n_steps * costs.decode_step(rows);
        own_keys += n_sequences * n_steps;
        step = *end;
        while let Some(&Reverse((end, place))) = ends.peek()
            && end == step
        {
            ends.pop();
            own_keys -= lengths[place] as f64;
            let running = &mut group_running[place / group_size];
            *running -= 1;
            n_groups_running -= usize::from(*running == 0);
        }
    }
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
        let model = ModelConfig::known("qwen3-1.7b").unwrap();
        simulate(
            &Costs {
                model: &model,
                n_adapter: None,
                quantised: None,
                machine: &Machine::by_name("h200").unwrap(),
            },
            work,
        )
    }

    /// All responses 128 tokens long, as in the table of docs/performance.md: 512 sequences of 64 prompts at 87,903
    /// tokens/s, 64 of 8 prompts at 35,228.
    #[test]
    fn equal_lengths_give_the_rates_of_the_benchmark() {
        let lengths = Lengths { prompt_mean: 128.0, response_mean: 128.0, response_limit: 128, spread: 0.5 };
        for (n_groups, rate) in [(64, 87_903.0), (8, 35_228.0)] {
            let done = simulated(&work(n_groups, 8, lengths));
            assert_eq!((done.n_tokens, done.most_running), ((n_groups * 8 * 128) as f64, n_groups * 8));
            let error = done.n_tokens / done.seconds() / rate - 1.0;
            assert!(error.abs() < 0.05, "{n_groups} prompts: {error:+.3}");
        }
    }

    #[test]
    fn less_memory_runs_fewer_at_once_and_takes_longer() {
        let lengths =
            Lengths { prompt_mean: 200.0, response_mean: 4000.0, response_limit: 15360, spread: 0.5 };
        let ample = simulated(&work(64, 8, lengths));
        let tight = simulated(&SamplingWork { kv_bytes: 8 << 30, ..work(64, 8, lengths) });
        assert_eq!(ample.n_tokens, tight.n_tokens);
        // 8 GiB hold 74,898 keys: 18 responses of 4,000 tokens with an eighth of a prompt each.
        assert_eq!((ample.most_running, tight.most_running), (148, 18));
        assert!(tight.seconds() > 1.5 * ample.seconds());
        let one = SamplingWork { kv_bytes: 1, ..work(1, 2, lengths) };
        assert_eq!(simulated(&one).most_running, 1);
    }

    #[test]
    fn the_tail_of_spread_lengths_takes_longer_than_equal_ones() {
        let spread = Lengths { prompt_mean: 100.0, response_mean: 290.0, response_limit: 1024, spread: 0.5 };
        let equal = Lengths { response_limit: 290, ..spread };
        assert!(simulated(&work(64, 8, spread)).seconds() > 1.3 * simulated(&work(64, 8, equal)).seconds());
    }

    #[test]
    fn many_responses_are_simulated_by_fewer() {
        let lengths = Lengths { prompt_mean: 10.0, response_mean: 20.0, response_limit: 40, spread: 0.5 };
        let n_groups = 1 << 20;
        let done = simulated(&work(n_groups, 1 << 16, lengths));
        assert!((done.n_tokens / (n_groups as f64 * 65_536.0 * 20.0) - 1.0).abs() < 0.02);
        assert!(done.seconds().is_finite());
    }

    fn on_ranks(work: &SamplingWork, n_ranks: usize) -> RankedSampling {
        let model = ModelConfig::known("qwen3-1.7b").unwrap();
        let machine = Machine::by_name("h200").unwrap();
        simulate_ranks(
            &Costs { model: &model, n_adapter: None, quantised: None, machine: &machine },
            work,
            n_ranks,
        )
    }

    #[test]
    fn ranks_share_the_work_and_wait_for_the_longest_response() {
        let lengths =
            Lengths { prompt_mean: 200.0, response_mean: 3867.0, response_limit: 15360, spread: 0.8 };
        let work = work(256, 8, lengths);
        let [one, eight, many, more] = [1, 8, 64, 256].map(|n_ranks| on_ranks(&work, n_ranks));
        assert_eq!(
            (one.slowest_seconds, one.mean_seconds),
            (simulated(&work).seconds(), one.slowest_seconds)
        );
        assert!(eight.slowest_seconds < one.slowest_seconds / 4.0);
        assert!(many.slowest_seconds < eight.slowest_seconds);
        assert!(eight.mean_seconds < eight.slowest_seconds && many.mean_seconds < 0.9 * many.slowest_seconds);
        // A response of 15,360 tokens takes as long however few share its rank: 1.6 ms a token at least.
        assert!(more.slowest_seconds > 15_360.0 * 1.6e-3, "{more:?}");
        // Problems stay whole: ranks beyond their number have nothing to do.
        let idle = on_ranks(&work, 512);
        assert!((idle.slowest_seconds / more.slowest_seconds - 1.0).abs() < 1e-9);
        assert!((idle.mean_seconds / more.mean_seconds - 0.5).abs() < 1e-9);
    }

    #[test]
    fn a_batch_too_large_to_simulate_is_simulated_in_part() {
        let lengths = Lengths { prompt_mean: 10.0, response_mean: 20.0, response_limit: 40, spread: 0.5 };
        let small = on_ranks(&work(1 << 10, 1 << 3, lengths), 16);
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
