//! Measuring steps of the plan here, with a clock. Ctrl-C ends it, and the simulated plan stays.

use super::planned::Planned;
use super::{Args, json};
use crate::shared::allow_command;
use crate::shared::clock::span;
use crate::shared::run_folder::{self, Use};
use crate::shared::stop;
use anyhow::Result;
use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use stapo_rl::Plan;
use stapo_rl::plan::estimate::{self, Measurement, RunShape};
use stapo_rl::train::Trainer;
use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

/// How often the clock is redrawn.
const TICK: Duration = Duration::from_millis(250);

pub fn run(args: &Args, shape: &RunShape, estimate: &Planned) -> Result<Measurement> {
    let clock = Clock::start();
    keep_on_signals(args, estimate, &clock)?;
    clock.show("measuring: loading the model; Ctrl-C keeps the simulated plan");
    let plan = shape.plan;
    let device = run_folder::device(plan.device(), args.threads, Use::for_plan(plan))?;
    let programs = args.allow.of_config(args.config.as_deref());
    let trainer = Trainer::new(plan, &device, programs)?;
    allow_command::warn(&trainer.task);
    let measured = estimate::measure(shape, trainer, |step| clock.show(&step_text(step)));
    clock.bar.finish_and_clear();
    Ok(measured?)
}

/// Every step runs twice, and the second time counts.
fn step_text(step: &Plan) -> String {
    let rollout = &step.config.rollout;
    let (n_problems, limit) = (rollout.problems_per_step, rollout.max_response_tokens);
    format!("measuring: a step of {n_problems} problems with responses to {limit} tokens, twice")
}

/// Lets a signal end the command with the simulated plan, which is on the screen or, as JSON, printed then.
fn keep_on_signals(args: &Args, estimate: &Planned, clock: &Clock) -> Result<()> {
    let stop = stop::on_signals()?;
    let unprinted = args.json.then(|| format!("{:#}", json::object(estimate)));
    let bar = clock.bar.clone();
    stop.show_by(move |_, _| {
        bar.finish_and_clear();
        if let Some(text) = &unprinted {
            println!("{text}");
        }
        eprintln!("measuring was stopped; the times of the plan are simulated");
    });
    stop.prepare();
    Ok(())
}

/// What is being measured and for how long: a line that is redrawn on a terminal, and a line for each step elsewhere.
struct Clock {
    bar: ProgressBar,
    began: Instant,
}

impl Clock {
    fn start() -> Self {
        let clock = |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            // Writing to a string in memory does not fail.
            let _ = out.write_str(&span(state.elapsed()));
        };
        let style = ProgressStyle::with_template("{msg}  {clock}")
            .unwrap_or_else(|_| ProgressStyle::default_spinner());
        let bar = ProgressBar::new_spinner().with_style(style.with_key("clock", clock));
        bar.enable_steady_tick(TICK);
        Self { bar, began: Instant::now() }
    }

    fn show(&self, text: &str) {
        if stderr().is_terminal() {
            self.bar.set_message(text.to_string());
        } else {
            eprintln!("{text}  {}", span(self.began.elapsed()));
        }
    }
}
