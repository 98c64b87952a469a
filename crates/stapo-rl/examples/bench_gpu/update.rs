//! `bench_gpu update`: training steps as `stapo train` makes them, in a folder of their own, and where the time of their
//! updates goes.

use crate::{Failure, Options, used_gib};
use stapo_core::record::{Metrics, PhaseSeconds};
use stapo_rl::device::Device;
use stapo_rl::device::cuda::{CudaOptions, Training};
use stapo_rl::lab::evaluation::Evaluated;
use stapo_rl::policy::identity;
use stapo_rl::reward::Programs;
use stapo_rl::run::meter::{Meter, Part};
use stapo_rl::run::{Run, this_process};
use stapo_rl::train::{Trainer, Watch, train};
use stapo_rl::{Config, Plan};
use std::sync::Arc;
use std::time::Instant;

/// 128 problems x 8 responses in four mini-batches. Lengths are forced and spread; rewards fall with the length, so that
/// advantages differ; random weights solve nothing, so the share of unjudged responses may be any, and give every token a
/// probability of about 1e-5, so tau_p is far below: no token is a candidate, as nearly none is in a real run.
const CONFIG: &str = r#"
device = "cuda"
objective = { preset = "stapo", masks = [{ kind = "spurious", tau_p = 1e-9 }] }
[rollout]
problems_per_step = 128
group_size = 8
max_prompt_tokens = 512
max_response_tokens = 1024
lengths = { mean = 290.0, sigma = 0.5 }
overlong = { max_tokens = 1024, buffer_tokens = 1020 }
kv_mib = 16384
[update]
problems_per_minibatch = 32
learning_rate = 1e-6
[evaluation]
every_steps = 0
problems = 1
samples = 1
[canaries]
max_unjudged_share = 1.0
"#;

const PROGRAM: &str = "bench_gpu";

/// Prints a JSON object for every step.
struct Printed {
    shape: &'static str,
    meter: Arc<Meter>,
    device: Device,
    last: Instant,
}

impl Printed {
    /// Prints the seconds of a step's phases and of its update's parts.
    fn print(&mut self, step: u64, seconds: PhaseSeconds, n_tokens: usize) {
        let parts = self.meter.take_parts();
        let by_part = |seconds: [f64; Part::ALL.len()]| {
            let pairs = Part::ALL.iter().zip(seconds);
            let texts: Vec<String> =
                pairs.map(|(part, seconds)| format!("\"{}\": {seconds:.4}", part.name())).collect();
            texts.join(", ")
        };
        let wall = std::mem::replace(&mut self.last, Instant::now()).elapsed().as_secs_f64();
        println!(
            r#"{{"task": "update", "shape": "{}", "step": {step}, "seconds": {wall:.3}, "rollout": {:.3}, "grade": {:.3}, "calibrate": {:.3}, "update": {:.3}, "record": {:.3}, "evaluate": {:.3}, "checkpoint": {:.3}, "tokens": {n_tokens}, "busy_share": {:.4}, "device_wall": {:.4}, "host": {{{}}}, "device": {{{}}}, "gib": {:.1}}}"#,
            self.shape,
            seconds.rollout,
            seconds.grade,
            seconds.calibrate,
            seconds.update,
            seconds.record,
            seconds.evaluate,
            seconds.checkpoint,
            parts.busy_share(),
            parts.wall,
            by_part(parts.host),
            by_part(parts.device),
            used_gib(&self.device),
        );
    }
}

impl Watch for Printed {
    fn started(&mut self, _: &Evaluated) {}

    fn stepped(&mut self, metrics: &Metrics) {
        self.print(metrics.step, metrics.seconds.unwrap_or_default(), metrics.n_tokens);
    }

    fn warned(&mut self, _: &str) {}

    fn wants_stop(&mut self) -> bool {
        false
    }
}

/// The same steps without records, checkpoints and evaluations: `--folder=0`.
fn without_folder(plan: &Plan, trainer: &mut Trainer, mut printed: Printed) -> Result<(), Failure> {
    for step in 1..=plan.config.steps {
        let rolled = trainer.roll_out(plan)?;
        let learned = trainer.learn(plan, &rolled)?;
        let n_tokens = learned.iter().map(|update| update.tally.n_tokens).sum();
        let seconds = printed.meter.take();
        printed.print(step, seconds, n_tokens);
    }
    print_hash(trainer)
}

/// Hashes the state twice; the first time loads what is needed.
fn print_hash(trainer: &Trainer) -> Result<(), Failure> {
    for _ in 0..2 {
        let start = Instant::now();
        let hash = trainer.learner.state_hash()?;
        let seconds = start.elapsed().as_secs_f64();
        println!(r#"{{"task": "hash", "seconds": {seconds:.4}, "sha256": "{hash}"}}"#);
    }
    Ok(())
}

pub fn update(options: &Options) -> Result<(), Failure> {
    let shapes = ["qwen2.5-0.5b", "qwen3-1.7b"];
    let shape = shapes.get(options.get("shape", 0)).ok_or("--shape: expected 0 or 1")?;
    let steps = options.get("steps", 3);
    let set = [
        format!("model={{kind=\"random\", shape=\"{shape}\", seed=1}}"),
        format!("steps={steps}"),
        format!("rollout.problems_per_step={}", options.get("problems", 128)),
        format!("update.problems_per_minibatch={}", options.get("minibatch", 32)),
        format!("update.microbatch_tokens={}", options.get("microbatch", 16_384)),
        format!("update.share_prompts={}", options.get("share", 1) == 1),
        format!("record.state_hash_every_steps={}", options.get("hash", 1)),
        format!("record.checkpoint_every_steps={}", options.get("checkpoint", 1000)),
    ];
    let config = Config::from_toml(CONFIG, set.iter().map(String::as_str))?;
    let plan = Plan::resolve(config)?;
    let begin = Instant::now();
    let device = Device::cuda(CudaOptions { training: Training::F32, ..CudaOptions::default() })?;
    let opened = begin.elapsed().as_secs_f64();
    let mut trainer = Trainer::new(&plan, &device, Programs::Recorded)?;
    device.synchronize();
    let meter = trainer.meter();
    meter.watch_parts();
    if options.get("folder", 1) == 0 {
        return without_folder(&plan, &mut trainer, Printed { shape, meter, device, last: Instant::now() });
    }
    let folder = tempfile::tempdir()?;
    let identity = identity::of_plan(&plan, PROGRAM)?;
    let writer = this_process(PROGRAM, "cuda");
    let mut run = Run::create(&folder.path().join("run"), "", &plan.to_toml(), identity, &writer)?;
    println!(
        r#"{{"task": "opened", "device_s": {opened:.2}, "trainer_s": {:.2}}}"#,
        begin.elapsed().as_secs_f64() - opened
    );
    let mut watch = Printed { shape, meter, device, last: Instant::now() };
    train(&plan, &mut run, &mut trainer, &mut watch)?;
    println!(r#"{{"task": "closed", "seconds": {:.3}}}"#, watch.last.elapsed().as_secs_f64());
    print_hash(&trainer)
}
