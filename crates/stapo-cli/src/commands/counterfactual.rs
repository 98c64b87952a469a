//! `stapo counterfactual`

use crate::shared::allow_command::{self, AllowCommand};
use crate::shared::clock::{span, time_left};
use crate::shared::option::positive;
use crate::shared::run_folder::{self, Use};
use crate::shared::stop::{self, Asked, Stop};
use anyhow::{Context, Result, bail};
use stapo_core::record::TokenRecord;
use stapo_core::stats::{Estimate, Resampling};
use stapo_rl::Plan;
use stapo_rl::lab::counterfactual::{
    Counterfactual, GradientEffect, GradientSummary, KindSummary, RolledOut, Settings, counterfactuals,
    gradient_effect, gradient_summary, summaries,
};
use stapo_rl::run::{Checkpoint, part_files, records_of_file};
use stapo_rl::train::Trainer;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Tests whether silenced tokens matter: continues responses from the sampled token and from the token that the policy
/// preferred there, and compares how often the answers are right.
#[derive(clap::Args)]
pub struct Args {
    /// The run folder.
    run: PathBuf,

    /// Continuations of each token.
    #[arg(long, default_value_t = 16, value_parser = positive)]
    samples: usize,

    /// Tokens of each kind in one step, at most.
    #[arg(long, default_value_t = 16, value_parser = positive)]
    tokens: usize,

    /// The first step to look at; steps between checkpoints are replayed.
    #[arg(long, default_value_t = 1)]
    from: u64,

    /// The last step to look at; by default the run's last one.
    #[arg(long)]
    to: Option<u64>,

    /// Seed of sampling.
    #[arg(long, default_value_t = 0)]
    seed: u64,

    /// Measures the gradient instead: the silenced tokens' share of its squared norm, and what their part of a step would do
    /// to the log-prob of right answers to held-out problems.
    #[arg(long)]
    gradient: bool,

    /// Held-out problems that are answered for --gradient.
    #[arg(long, default_value_t = 64, value_parser = positive, requires = "gradient")]
    problems: usize,

    /// Writes one JSON line for each token, or with --gradient for each step, to this file.
    #[arg(long)]
    out: Option<PathBuf>,

    /// Prints the summaries as JSON lines.
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    allow: AllowCommand,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if let Some(to) = args.to.filter(|to| *to < args.from) {
        bail!(
            "--from {} --to {to}: no step lies between these\nhint: --from names the first step, --to the last",
            args.from
        );
    }
    let plan = run_folder::plan(&args.run)?;
    let wanted = |step: &u64| *step >= args.from && args.to.is_none_or(|last| *step <= last);
    let mut silenced = by_step(&args.run, "tokens")?;
    silenced.retain(|step, tokens| wanted(step) && !tokens.is_empty());
    let kept = by_step(&args.run, "explored")?;
    if silenced.is_empty() {
        bail!(
            "run {}: no silenced token is recorded in these steps\nhint: an objective with a mask silences tokens; widen --from and --to",
            args.run.display()
        );
    }
    let settings = Settings { n_samples: args.samples, max_tokens: args.tokens, seed: args.seed };
    let mut to = args.out.as_ref().map(|path| create(path)).transpose()?;
    let mut replay = Replay::start(&args.run, &plan, args)?;
    let mut course = Course::start(silenced.len())?;
    if args.gradient {
        let steps: Vec<u64> = silenced.into_keys().collect();
        return gradients(args, &mut replay, &steps, course, to);
    }
    let mut all: Vec<Counterfactual> = Vec::new();
    for (step, silenced) in &silenced {
        if course.is_stopped() {
            break;
        }
        eprintln!("step {step}: {} silenced tokens", silenced.len());
        let kept = kept.get(step).map_or(&[][..], Vec::as_slice);
        let found = replay.step(*step, |trainer, plan, rolled| {
            Ok(counterfactuals(trainer, plan, rolled, silenced, kept, settings)?)
        })?;
        if let Some(to) = &mut to {
            for own in &found {
                to.write_all(format!("{}\n", serde_json::to_string(own)?).as_bytes())?;
            }
        }
        all.extend(found);
        course.done();
    }
    let summaries = summaries(&all, &Resampling { seed: args.seed, ..Resampling::default() })?;
    if args.json {
        for summary in &summaries {
            println!("{}", serde_json::to_string(summary)?);
        }
    } else {
        print(&summaries, args.samples);
    }
    Ok(course.end())
}

/// The gradient side: the parts of the gradient of every step with a silenced token.
fn gradients(
    args: &Args,
    replay: &mut Replay,
    steps: &[u64],
    mut course: Course,
    mut to: Option<File>,
) -> Result<ExitCode> {
    let mut all: Vec<GradientEffect> = Vec::new();
    for step in steps {
        if course.is_stopped() {
            break;
        }
        let found = replay.step(*step, |trainer, plan, rolled| {
            Ok(gradient_effect(trainer, plan, rolled, args.problems, args.seed)?)
        })?;
        eprintln!("step {step}: {} silenced tokens in the first mini-batch", found.n_silenced);
        if let Some(to) = &mut to {
            to.write_all(format!("{}\n", serde_json::to_string(&found)?).as_bytes())?;
        }
        all.push(found);
        course.done();
    }
    // A mini-batch without a silenced token has no part of theirs to look at.
    all.retain(|own| own.n_silenced > 0);
    if all.is_empty() {
        println!("no first mini-batch of these steps has a silenced token");
        return Ok(course.end());
    }
    let summary = gradient_summary(&all)?;
    if args.json {
        println!("{}", serde_json::to_string(&summary)?);
    } else {
        print_gradients(&summary);
    }
    Ok(course.end())
}

/// How far the command has come. A signal ends it behind the step at work, and the summary is that of the steps that are done;
/// before a step is done, a signal ends it at once.
struct Course {
    stop: Stop,
    began: Instant,
    n_done: usize,
    n_steps: usize,
}

impl Course {
    fn start(n_steps: usize) -> Result<Self> {
        let stop = stop::on_signals()?;
        stop.show_by(|asked, _| {
            if asked == Asked::Once {
                eprintln!("\nfinishing this step; Ctrl-C again ends at once");
            }
        });
        stop.prepare();
        Ok(Self { stop, began: Instant::now(), n_done: 0, n_steps })
    }

    fn is_stopped(&self) -> bool {
        self.stop.is_raised()
    }

    fn done(&mut self) {
        self.n_done += 1;
        self.stop.begin_work();
        let n_left = self.n_steps - self.n_done;
        if n_left > 0 {
            let left = time_left(self.began.elapsed(), self.n_done as u64, n_left as u64);
            eprintln!("{} of {} steps, {} left", self.n_done, self.n_steps, span(left));
        }
    }

    fn end(&self) -> ExitCode {
        if self.n_done == self.n_steps {
            return ExitCode::SUCCESS;
        }
        eprintln!("stopped by {} after {} of {} steps", self.stop.name(), self.n_done, self.n_steps);
        ExitCode::from(self.stop.exit_status())
    }
}

fn print_gradients(summary: &GradientSummary) {
    let shown = |estimate: Option<Estimate>| match estimate {
        None => "no right answer".to_string(),
        Some(own) => {
            let ends =
                own.interval.map_or(String::new(), |i| format!(" ({:+.3e} to {:+.3e})", i.low, i.high));
            format!("{:+.3e}{ends}", own.value)
        }
    };
    println!(
        "{} silenced of {} tokens in the first mini-batches of {} steps; means over steps (95 % interval)",
        summary.n_silenced, summary.n_tokens, summary.n_steps
    );
    let rows = [
        ("share of the squared gradient norm, silenced", Some(summary.silenced_share)),
        ("cosine of silenced and kept tokens' gradients", summary.cosine_with_kept),
        ("log-prob of held-out right answers, by silenced", summary.answers_by_silenced),
        ("log-prob of held-out right answers, by kept", summary.answers_by_kept),
        ("cosine with their steepest rise, silenced", summary.answers_cosine_silenced),
        ("cosine with their steepest rise, kept", summary.answers_cosine_kept),
    ];
    for (name, estimate) in rows {
        println!("{name:<50} {}", shown(estimate));
    }
    println!("log-probs: first-order change in nats per response by one plain step of the learning rate");
}

/// A new file. Lines are written one by one, so that those of a command that was interrupted are there.
fn create(path: &Path) -> Result<File> {
    File::create_new(path).with_context(|| format!("file {}", path.display()))
}

/// The recorded tokens of one part by step.
fn by_step(run: &Path, part: &str) -> Result<BTreeMap<u64, Vec<TokenRecord>>> {
    let mut found: BTreeMap<u64, Vec<TokenRecord>> = BTreeMap::new();
    for path in part_files(run, part)? {
        for record in records_of_file::<TokenRecord>(&path)? {
            found.entry(record.step).or_default().push(record);
        }
    }
    Ok(found)
}

/// A run that is replayed from its checkpoints.
struct Replay<'a> {
    plan: &'a Plan,
    checkpoints: Vec<Checkpoint>,
    trainer: Trainer,
}

impl<'a> Replay<'a> {
    fn start(run: &Path, plan: &'a Plan, args: &Args) -> Result<Self> {
        let paths = Checkpoint::list(run)?;
        let checkpoints: Vec<Checkpoint> =
            paths.iter().filter_map(|path| Checkpoint::open(path).ok()).collect();
        let device = run_folder::device(plan.device(), None, Use::for_plan(plan))?;
        let trainer = Trainer::new(plan, &device, args.allow.of_run())?;
        allow_command::warn(&trainer.task);
        Ok(Self { plan, checkpoints, trainer })
    }

    /// Replays up to `step`, samples its batch with the weights that sampled it, and looks at the batch before the step is
    /// made.
    fn step<T>(
        &mut self,
        step: u64,
        look: impl FnOnce(&mut Trainer, &Plan, &RolledOut) -> Result<T>,
    ) -> Result<T> {
        let before = step - 1;
        let nearest = self.checkpoints.iter().rev().find(|checkpoint| checkpoint.counters.step <= before);
        if let Some(checkpoint) = nearest.filter(|own| own.counters.step > self.trainer.learner.counters.step)
        {
            self.trainer.learner.restore(checkpoint)?;
        }
        while self.trainer.learner.counters.step < before {
            let rolled = self.trainer.roll_out(self.plan)?;
            self.trainer.learn(self.plan, &rolled)?;
        }
        let rolled = self.trainer.roll_out(self.plan)?;
        let found = look(&mut self.trainer, self.plan, &rolled)?;
        self.trainer.learn(self.plan, &rolled)?;
        Ok(found)
    }
}

/// A table: one line for each kind, rates in per cent, the difference in points.
fn print(summaries: &[KindSummary], n_samples: usize) {
    println!(
        "right answers of {n_samples} continuations, %: from the token as sampled, from the preferred token"
    );
    println!(
        "{:<25} {:>6} {:>8} {:>8} {:>9}  difference, points (95 % interval), p",
        "token", "tokens", "problems", "sampled", "preferred"
    );
    for own in summaries {
        let difference = own.paired.map_or("needs two problems".to_string(), |paired| {
            let points = |value: f64| format!("{:+.1}", 100.0 * value);
            let ends = (points(paired.interval.low), points(paired.interval.high));
            let p = paired.p_permutation;
            format!("{} ({} to {}), p = {p:.3}", points(paired.difference), ends.0, ends.1)
        });
        println!(
            "{:<25} {:>6} {:>8} {:>8.1} {:>9.1}  {difference}",
            own.kind.words(),
            own.n_tokens,
            own.n_problems,
            100.0 * own.right_sampled,
            100.0 * own.right_preferred,
        );
    }
}
