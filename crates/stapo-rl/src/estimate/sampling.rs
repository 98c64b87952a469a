//! Continuous batching, simulated: the seconds of a rollout whose responses have given lengths.

use super::cost::{Costs, DecodeRows, Tokens};
use super::lengths::Lengths;
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
        simulate(&Costs { model: &model, n_adapter: None, machine: &Machine::by_name("h200").unwrap() }, work)
    }

    /// All responses 128 tokens long, as in the table of docs/performance.md: 512 sequences of 64 prompts at 87,903
    /// tokens/s, 64 of 8 prompts at 35,228.
    #[test]
    fn equal_lengths_give_the_rates_of_the_benchmark() {
        let lengths = Lengths { prompt_mean: 128.0, response_mean: 128.0, response_limit: 128 };
        for (n_groups, rate) in [(64, 87_903.0), (8, 35_228.0)] {
            let done = simulated(&work(n_groups, 8, lengths));
            assert_eq!((done.n_tokens, done.most_running), ((n_groups * 8 * 128) as f64, n_groups * 8));
            let error = done.n_tokens / done.seconds() / rate - 1.0;
            assert!(error.abs() < 0.05, "{n_groups} prompts: {error:+.3}");
        }
    }

    #[test]
    fn less_memory_runs_fewer_at_once_and_takes_longer() {
        let lengths = Lengths { prompt_mean: 200.0, response_mean: 4000.0, response_limit: 15360 };
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
        let spread = Lengths { prompt_mean: 100.0, response_mean: 290.0, response_limit: 1024 };
        let equal = Lengths { response_limit: 290, ..spread };
        assert!(simulated(&work(64, 8, spread)).seconds() > 1.3 * simulated(&work(64, 8, equal)).seconds());
    }

    #[test]
    fn many_responses_are_simulated_by_fewer() {
        let lengths = Lengths { prompt_mean: 10.0, response_mean: 20.0, response_limit: 40 };
        let n_groups = 1 << 20;
        let done = simulated(&work(n_groups, 1 << 16, lengths));
        assert!((done.n_tokens / (n_groups as f64 * 65_536.0 * 20.0) - 1.0).abs() < 0.02);
        assert!(done.seconds().is_finite());
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
