//! The values of a config that fit what was found.

use super::found::{Found, Lengths};
use anyhow::{Result, bail};
use stapo_rl::device::{DeviceName, cuda};
use stapo_rl::plan::config::{Recompute, SizedDefaults};
use stapo_rl::plan::host::HostMemory;
use stapo_rl::plan::memory;
use stapo_rl::{Config, Plan};

/// The values that `init` chooses.
pub struct Choices {
    pub device: DeviceName,
    pub max_prompt_tokens: usize,
    /// True if a few prompts are so long that the others would pay for them.
    pub drops_long_prompts: bool,
    pub max_response_tokens: usize,
    pub problems_per_step: usize,
    pub group_size: usize,
    pub problems_per_minibatch: usize,
    pub microbatch_tokens: usize,
    pub recompute: Recompute,
    pub kv_mib: usize,
    pub learning_rate: f64,
    pub steps: u64,
    pub held_out_share: f64,
    pub evaluation_problems: usize,
    /// Bytes that the run needs.
    pub memory_needed: u64,
    /// Bytes that the device has; `None` if this machine does not report them.
    pub memory_here: Option<u64>,
}

/// Prompts longer than this many times the 99 % quantile are left out.
const OUTLIER: usize = 4;
/// The shortest response worth sampling.
const MIN_RESPONSE_TOKENS: usize = 16;

impl Choices {
    /// Chooses values; `write` makes the text of a config of them, whose memory is counted.
    pub fn fitting(
        found: &Found,
        device: DeviceName,
        write: impl Fn(&Found, &Self) -> String,
    ) -> Result<Self> {
        let is_gpu = device != DeviceName::Cpu;
        let (max_prompt_tokens, drops_long_prompts) =
            prompt_limit(&found.lengths, found.config.max_positions);
        let room = found.config.max_positions.saturating_sub(max_prompt_tokens);
        if room < MIN_RESPONSE_TOKENS {
            bail!(
                "data {}: prompts of {max_prompt_tokens} tokens leave {room} of the model's {} positions for a response\nhint: take a model with a longer context, or shorter problems",
                found.data.display(),
                found.config.max_positions
            );
        }
        let (held_out_share, n_train, n_held_out) = split(found)?;
        let problems_per_step = power_of_two_up_to(n_train.min(if is_gpu { 64 } else { 8 }));
        let sized = SizedDefaults::for_model(&found.config, device, false);
        let mut choices = Self {
            device,
            max_prompt_tokens,
            drops_long_prompts,
            max_response_tokens: room.min(SizedDefaults::response_limit(device)),
            problems_per_step,
            group_size: 8,
            problems_per_minibatch: problems_per_step.div_ceil(2),
            microbatch_tokens: 0,
            recompute: Recompute::Nothing,
            kv_mib: 0,
            learning_rate: sized.learning_rate,
            steps: (2 * n_train / problems_per_step).clamp(20, 200) as u64,
            held_out_share,
            evaluation_problems: n_held_out.min(if is_gpu { 256 } else { 64 }),
            memory_needed: 0,
            memory_here: available(device),
        };
        choices.kv_mib = choices.kv_mib_of_all(found).clamp(64, if is_gpu { 16384 } else { 1024 });
        choices.fit_memory(found, write)?;
        Ok(choices)
    }

    /// Memory for the keys and values of all responses of a step at once, MiB, as a power of two.
    fn kv_mib_of_all(&self, found: &Found) -> usize {
        let n_tokens = self.max_prompt_tokens + self.max_response_tokens;
        let number_bytes = if self.device == DeviceName::Cpu { 4 } else { 2 };
        let sequence = found.config.sequence_bytes(n_tokens, 1, number_bytes);
        let bytes = self.problems_per_step * self.group_size * sequence as usize;
        (bytes >> 20).next_power_of_two()
    }

    /// Takes the first setting that leaves a fifth of the memory free; the most sparing one where none does.
    fn fit_memory(&mut self, found: &Found, write: impl Fn(&Found, &Self) -> String) -> Result<()> {
        let longest = self.max_prompt_tokens + self.max_response_tokens;
        let tokens = longest.next_multiple_of(1024);
        let sparing = [
            (Recompute::Nothing, tokens.max(8192), self.kv_mib),
            (Recompute::Layers, tokens.max(8192), (self.kv_mib / 2).max(64)),
            (Recompute::Layers, longest, (self.kv_mib / 4).max(64)),
        ];
        for (recompute, microbatch_tokens, kv_mib) in sparing {
            (self.recompute, self.microbatch_tokens, self.kv_mib) = (recompute, microbatch_tokens, kv_mib);
            let text = write(found, self);
            let plan = Plan::resolve(Config::from_toml(&text, [])?)?;
            self.memory_needed = memory::resolve(&plan, &found.config, &[], None).peak_bytes();
            if self.memory_here.is_none_or(|here| self.memory_needed <= here / 5 * 4) {
                break;
            }
        }
        Ok(())
    }
}

/// The limit on prompts, and whether longer ones are left out.
fn prompt_limit(lengths: &Lengths, max_positions: usize) -> (usize, bool) {
    let limit = |n: usize| n.next_multiple_of(16);
    let half = (max_positions / 2).max(1);
    if lengths.max > OUTLIER * lengths.p99 || limit(lengths.max) > half && limit(lengths.p99) <= half {
        return (limit(lengths.p99), true);
    }
    (limit(lengths.max), false)
}

/// The share of held-out problems, and the sizes of both splits: about a hundred held-out problems, and of a small file a
/// fifth. Shares are tried until both splits have problems, because the split follows the hash of each problem.
fn split(found: &Found) -> Result<(f64, usize, usize)> {
    let n = found.rows.n_problems;
    let first = (100.0 / n as f64).clamp(0.02, 0.2);
    let rounded = (first * 100.0).round() / 100.0;
    for share in [rounded, 0.2, 0.3, 0.5, 0.7] {
        if let Ok(census) = found.split(share)
            && census.n_train > 0
            && census.n_held_out > 0
        {
            return Ok((share, census.n_train as usize, census.n_held_out as usize));
        }
    }
    bail!(
        "data {}: {n} problems are too few to hold some out of training\nhint: give at least a few dozen problems",
        found.data.display()
    )
}

fn power_of_two_up_to(n: usize) -> usize {
    1 << n.max(1).ilog2()
}

/// Available main memory, or all memory of the GPU, in bytes.
fn available(device: DeviceName) -> Option<u64> {
    match device {
        DeviceName::Cpu => HostMemory::find().map(|memory| memory.available),
        DeviceName::Cuda { ordinal } => cuda::probe().gpus.get(ordinal).map(|gpu| gpu.memory_bytes as u64),
    }
}

#[cfg(test)]
mod tests {
    use super::super::text;
    use super::*;

    #[test]
    fn long_prompts_are_left_out_where_few_of_them_would_cost_all_others() {
        let limit = |p99, max, positions| prompt_limit(&Lengths { median: 1, p99, max }, positions);
        assert_eq!(limit(100, 400, 4096), (400, false));
        assert_eq!(limit(100, 401, 4096), (112, true));
        // More than half of the positions, where nearly all prompts need at most half.
        assert_eq!(limit(512, 513, 1024), (512, true));
        assert_eq!(limit(500, 512, 1024), (512, false));
        assert_eq!(limit(513, 600, 1024), (608, false));
        assert_eq!([0, 1, 2, 3, 64, 65].map(power_of_two_up_to), [1, 1, 2, 2, 64, 64]);
    }

    /// What is found of the built-in model and a file of `n` problems.
    fn found(folder: &std::path::Path, n: usize) -> Found {
        let data = folder.join("rows.jsonl");
        let row = |i: usize| format!("{{\"problem\": \"{i}+{}\", \"answer\": \"{}\"}}\n", i % 7, i + i % 7);
        std::fs::write(&data, (0..n).map(row).collect::<String>()).unwrap();
        let wanted = crate::commands::init::found::Wanted {
            model: stapo_rl::plan::config::ModelSource::Builtin,
            data,
            problem_field: None,
            answer_field: None,
        };
        Found::look(&wanted).unwrap()
    }

    /// The built-in model has 256 positions, and no prompt has more than 16 tokens.
    #[test]
    fn the_choices_fit_the_model_the_data_and_the_device() {
        let folder = tempfile::tempdir().unwrap();
        let chosen = |n: usize, device| {
            let found = found(folder.path(), n);
            let Choices {
                max_prompt_tokens,
                max_response_tokens,
                problems_per_step,
                problems_per_minibatch,
                steps,
                held_out_share,
                evaluation_problems,
                learning_rate,
                ..
            } = Choices::fitting(&found, device, text::config).unwrap();
            let sizes = [max_prompt_tokens, max_response_tokens, problems_per_step, problems_per_minibatch];
            (sizes, steps, held_out_share, evaluation_problems, learning_rate)
        };
        let (cpu, gpu) = (DeviceName::Cpu, DeviceName::Cuda { ordinal: 63 });
        assert_eq!(chosen(60, cpu), ([16, 240, 8, 4], 20, 0.2, 16, 1e-4));
        assert_eq!(chosen(1000, cpu), ([16, 240, 8, 4], 200, 0.1, 64, 1e-4));
        assert_eq!(chosen(60, gpu), ([16, 240, 32, 16], 20, 0.2, 16, 1e-4));
        assert_eq!(chosen(1000, gpu), ([16, 240, 64, 32], 28, 0.1, 96, 1e-4));
    }

    #[test]
    fn memory_decides_what_is_computed_again() {
        let folder = tempfile::tempdir().unwrap();
        let found = found(folder.path(), 60);
        let mut choices = Choices::fitting(&found, DeviceName::Cpu, text::config).unwrap();
        // Keys and values of 64 responses of 256 tokens, 4 bytes each.
        assert_eq!(choices.kv_mib, 64);
        (choices.kv_mib, choices.memory_here) = (64, Some(1));
        choices.fit_memory(&found, text::config).unwrap();
        assert_eq!(choices.kv_mib, 64, "less than 64 MiB are never chosen");
        let mut fitted = |memory_here: Option<u64>| {
            (choices.kv_mib, choices.memory_here) = (1024, memory_here);
            choices.fit_memory(&found, text::config).unwrap();
            (choices.recompute, choices.microbatch_tokens, choices.kv_mib, choices.memory_needed)
        };
        let (recompute, tokens, kv_mib, needed) = fitted(None);
        assert_eq!((recompute, tokens, kv_mib), (Recompute::Nothing, 8192, 1024));
        // A fifth stays free.
        assert_eq!(fitted(Some(needed.div_ceil(4) * 5)).0, Recompute::Nothing);
        let (recompute, tokens, kv_mib, _) = fitted(Some(needed.div_ceil(4) * 5 - 5));
        assert_eq!((recompute, tokens, kv_mib), (Recompute::Layers, 8192, 512));
        let (recompute, tokens, kv_mib, _) = fitted(Some(1));
        assert_eq!((recompute, tokens, kv_mib), (Recompute::Layers, 256, 256));
    }

    /// Every value of the file is the one that was chosen for its key.
    #[test]
    fn a_config_has_each_choice_under_its_key() {
        let folder = tempfile::tempdir().unwrap();
        let mut found = found(folder.path(), 60);
        let mut choices = Choices::fitting(&found, DeviceName::Cpu, text::config).unwrap();
        found.lengths = Lengths { median: 5, p99: 6, max: 7 };
        (choices.max_prompt_tokens, choices.max_response_tokens) = (32, 48);
        (choices.problems_per_step, choices.group_size, choices.problems_per_minibatch) = (12, 3, 6);
        (choices.microbatch_tokens, choices.recompute, choices.kv_mib) = (1000, Recompute::Layers, 77);
        (choices.learning_rate, choices.steps, choices.held_out_share) = (2e-5, 33, 0.3);
        (choices.evaluation_problems, choices.drops_long_prompts) = (9, true);
        let text = text::config(&found, &choices);
        let config = Config::from_toml(&text, []).unwrap();
        let (rollout, update) = (&config.rollout, &config.update);
        assert_eq!((rollout.max_prompt_tokens, rollout.max_response_tokens), (32, 48));
        assert_eq!((rollout.problems_per_step, rollout.group_size), (12, 3));
        assert_eq!((update.problems_per_minibatch, update.microbatch_tokens), (6, 1000));
        assert_eq!(update.learning_rate, 2e-5);
        assert_eq!((config.steps, config.evaluation.problems, config.evaluation.samples), (33, 9, 1));
        assert_eq!((config.task.held_out_share(), config.name.as_str()), (0.3, "rows"));
        for line in [
            "kv_mib = 77",
            "recompute = \"layers\"",
            "# Prompts have 5 tokens at the median, 6 at 99 %, 7 at most.",
            "# The model takes 256 positions for prompt and response together.",
            "long_prompts = \"drop\"",
            "problem_field = \"problem\"",
            "answer_field = \"answer\"",
        ] {
            assert!(text.lines().any(|own| own == line), "{line} is not in {text}");
        }
        choices.drops_long_prompts = false;
        assert!(text::config(&found, &choices).contains("\nlong_prompts = \"refuse\"\n"));
    }
}
