//! `bench_gpu step`: whole training steps as `stapo train` makes them, of a random model, with forced lengths.

use crate::{Failure, Options, used_gib};
use stapo_rl::device::Device;
use stapo_rl::device::cuda::{CudaOptions, Training};
use stapo_rl::ranks::{Flags, Membership, Nccl, Ranks, Solo, Tcp};
use stapo_rl::reward::Programs;
use stapo_rl::train::Trainer;
use stapo_rl::{Config, Plan};
use std::time::Instant;

/// The settings of `configs/qwen3-*.toml` that decide over time and memory. Rewards fall with the length of a response, so
/// that advantages differ; canaries are off, since random weights solve nothing.
const CONFIG: &str = r#"
steps = 1
device = "cuda"
[rollout]
max_prompt_tokens = 1024
max_response_tokens = 15360
lengths = { mean = 4000.0, sigma = 0.8 }
overlong = { max_tokens = 15360, buffer_tokens = 15360 }
[update]
learning_rate = 1e-6
[evaluation]
problems = 1
[canaries]
enabled = false
"#;

/// A short step of the shape of Qwen3-1.7B with several micro-batches, whose state hash is compared between numbers of
/// ranks: `--short=1`.
const SHORT: &str = r#"
steps = 2
device = "cuda"
model = { kind = "random", shape = "qwen3-1.7b", seed = 0 }
[rollout]
problems_per_step = 4
group_size = 4
max_response_tokens = 1024
lengths = { mean = 250.0, sigma = 0.5 }
overlong = { max_tokens = 1024, buffer_tokens = 1000 }
kv_mib = 1024
[update]
problems_per_minibatch = 4
microbatch_tokens = 1200
recompute = "layers"
[evaluation]
every_steps = 0
problems = 2
[record]
responses = 0
alternatives = 0
[canaries]
max_unjudged_share = 1.0
"#;

/// The ranks that this process is one of, by the variables of launchers.
fn ranks(device: &Device) -> Result<Ranks, Failure> {
    let Some(membership) = Membership::find(&Flags::default())? else { return Ok(Solo::ranks()) };
    let tcp = Tcp::connect(&membership, &|_| ())?;
    Ok(Nccl::of_devices(&tcp, device)?.unwrap_or(tcp))
}

pub fn step(options: &Options) -> Result<(), Failure> {
    let shape = ["qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "qwen3-14b", "qwen2.5-0.5b", "qwen3-32b"];
    let shape = shape.get(options.get("shape", 1)).ok_or("--shape: expected 0 to 5")?;
    let is_8bit = options.get("8bit", 0) == 1;
    let problems = options.get("problems", 8);
    let mut set = vec![
        format!("model={{kind=\"random\", shape=\"{shape}\", seed=1}}"),
        format!("rollout.problems_per_step={problems}"),
        format!("rollout.group_size={}", options.get("samples", 8)),
        format!("rollout.lengths.mean={}.0", options.get("mean", 4000)),
        format!("rollout.max_response_tokens={}", options.get("longest", 15_360)),
        format!("update.problems_per_minibatch={}", options.get("minibatch", problems)),
        format!("update.microbatch_tokens={}", options.get("microbatch", 16_384)),
        format!("update.states={}", if is_8bit { "8bit" } else { "f32" }),
    ];
    if let rank @ 1.. = options.get("lora", 0) {
        set.push(format!("model.lora={{rank={rank}}}"));
    }
    if let kv_gib @ 1.. = options.get("kv-gib", 0) {
        set.push(format!("rollout.kv_mib={}", kv_gib << 10));
    }
    let config = match options.get("short", 0) {
        0 => Config::from_toml(CONFIG, set.iter().map(String::as_str))?,
        _ => Config::from_toml(SHORT, [])?,
    };
    let plan = Plan::resolve(config)?;
    let training = if is_8bit { Training::EightBit } else { Training::F32 };
    let device = Device::cuda(CudaOptions { training, ..CudaOptions::default() })?;
    let start = Instant::now();
    let mut trainer = Trainer::on_ranks(&plan, &device, Programs::Recorded, ranks(&device)?)?;
    device.synchronize();
    let opened = start.elapsed().as_secs_f64();
    let planned = trainer.memory().clone();
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    for number in 0..options.get("steps", 1) {
        let start = Instant::now();
        let rolled = trainer.roll_out(&plan)?;
        let sampled = start.elapsed().as_secs_f64();
        let start = Instant::now();
        let learned = trainer.learn(&plan, &rolled)?;
        device.synchronize();
        let updated = start.elapsed().as_secs_f64();
        let n_updated: usize = learned.iter().map(|update| update.tally.n_tokens).sum();
        drop(learned);
        if trainer.ranks().world() > 1 {
            println!("rank {}: {:?}", trainer.ranks().rank(), trainer.learner.take_exchanged());
        }
        println!(
            r#"{{"task": "step", "shape": "{shape}", "number": {number}, "open_s": {opened:.1}, "sample_s": {sampled:.2}, "update_s": {updated:.2}, "sampled_tokens": {}, "updated_tokens": {n_updated}, "kv_gib": {:.1}, "recompute": "{:?}", "gib": {:.1}, "planned_gib": {:.1}}}"#,
            rolled.n_sampled,
            gib(planned.kv_bytes),
            planned.recompute,
            used_gib(&device),
            gib(planned.peak_bytes()),
        );
    }
    if options.get("hash", 0) == 1 {
        let start = Instant::now();
        let hash = trainer.learner.state_hash()?;
        println!(
            r#"{{"task": "hash", "seconds": {:.1}, "sha256": "{hash}"}}"#,
            start.elapsed().as_secs_f64()
        );
    }
    Ok(())
}
