//! Progress of a training run: a live view on a terminal, plain lines elsewhere, or JSON lines.

use crate::shared::clock::span;
use crate::shared::stop::Stop;
use crate::shared::terminal::plain;
use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use stapo_core::record::{Metrics, Record};
use stapo_rl::Plan;
use stapo_rl::train::{Outcome, Watch};
use std::io::{ErrorKind, IsTerminal, Write, stderr, stdout};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Shows the progress of one run.
pub struct Screen {
    mode: ScreenMode,
    stop: Stop,
    folder: PathBuf,
    steps: u64,
    first_step: u64,
    started: Instant,
    start_accuracy: Option<f64>,
    eval: Vec<f64>,
    accuracy: Vec<f64>,
    entropy: Vec<f64>,
    n_silenced: usize,
    n_tokens: usize,
    /// The first failure to write metrics on standard output.
    output_error: Option<std::io::Error>,
}

enum ScreenMode {
    Live(ProgressBar),
    Lines,
    Json,
}

impl Screen {
    pub fn new(plan: &Plan, folder: &Path, history: &[Metrics], json: bool, stop: Stop) -> Self {
        let steps = plan.config.steps;
        let mode = match (json, stderr().is_terminal()) {
            (true, _) => ScreenMode::Json,
            (false, true) => ScreenMode::Live(bar(steps, history.len() as u64)),
            (false, false) => ScreenMode::Lines,
        };
        let mut screen = Screen {
            mode,
            stop,
            folder: folder.to_owned(),
            steps,
            first_step: history.last().map_or(0, |metrics| metrics.step),
            started: Instant::now(),
            start_accuracy: None,
            eval: Vec::new(),
            accuracy: Vec::new(),
            entropy: Vec::new(),
            n_silenced: 0,
            n_tokens: 0,
            output_error: None,
        };
        for metrics in history {
            screen.take(metrics);
        }
        screen.say(&format!("run {}", folder.display()));
        screen
    }

    fn say(&self, text: &str) {
        let text = plain(text);
        match &self.mode {
            ScreenMode::Live(bar) => bar.println(text),
            ScreenMode::Lines | ScreenMode::Json => {
                // A failed write is ignored: a closed standard error must not end the run.
                let _ = writeln!(stderr(), "{text}");
            }
        }
    }

    fn take(&mut self, metrics: &Metrics) {
        self.accuracy.push(metrics.accuracy);
        self.entropy.push(metrics.entropy_mean);
        self.eval.extend(metrics.eval_accuracy);
        self.n_silenced += metrics.n_silenced;
        self.n_tokens += metrics.n_tokens;
    }

    fn line(&self, metrics: &Metrics) -> String {
        let held_out =
            metrics.eval_accuracy.map_or(String::new(), |a| format!("  held-out {:.1} %", 100.0 * a));
        let rates = metrics.tokens_per_second;
        format!(
            "step {:>4}/{}  accuracy {:>5.1} %  entropy {:.3} nats  silenced {}/{} candidates  grad {:.2}  {:.0}+{:.0} tokens/s  {} left{held_out}",
            metrics.step,
            self.steps,
            100.0 * metrics.accuracy,
            metrics.entropy_mean,
            metrics.n_silenced,
            metrics.n_candidates,
            metrics.gradient_norm,
            rates.rollout,
            rates.update,
            span(self.left(metrics.step)),
        )
    }

    /// Time left at the mean pace since this process started.
    fn left(&self, step: u64) -> std::time::Duration {
        let done = step.saturating_sub(self.first_step).max(1) as u32;
        self.started.elapsed() / done * (self.steps - step.min(self.steps)) as u32
    }

    /// Prints the summary of the run.
    pub fn finish(&self, outcome: Outcome) -> Result<()> {
        if let Some(error) = &self.output_error {
            let metrics = self.folder.join("metrics.jsonl");
            bail!(
                "standard output: {error}\nhint: nothing of the run is lost; its metrics are in {}",
                metrics.display()
            );
        }
        if let ScreenMode::Live(bar) = &self.mode {
            bar.finish_and_clear();
        }
        let folder = self.folder.display();
        let percent = |value: Option<f64>| value.map_or("-".to_string(), |v| format!("{:.1} %", 100.0 * v));
        let n_steps = self.accuracy.len();
        let time = span(self.started.elapsed());
        let headline = match outcome {
            Outcome::Done => format!("done: {n_steps} steps in {time}"),
            Outcome::TargetReached => format!("target reached after {n_steps} steps in {time}"),
            Outcome::Stopped => format!("stopped after {n_steps} steps; saved"),
        };
        let silenced = self.n_silenced as f64 / self.n_tokens.max(1) as f64;
        let next = match outcome {
            Outcome::Stopped => format!("go on with         stapo train --resume {folder}"),
            _ => format!("export with        stapo export {folder} --to DIR"),
        };
        let rows = [
            format!(
                "held-out accuracy  {} -> {}",
                percent(self.start_accuracy),
                percent(self.eval.last().copied())
            ),
            format!("training accuracy  {}", curve(&self.accuracy)),
            format!("entropy, nats      {}", curve(&self.entropy)),
            format!("silenced tokens    {} of {} ({silenced:.1e})", self.n_silenced, self.n_tokens),
            format!("run folder         {folder}"),
            next,
        ];
        let said = plain(&format!("{headline}\n  {}\n", rows.join("\n  ")));
        match self.mode {
            ScreenMode::Json => stderr().write_all(said.as_bytes())?,
            ScreenMode::Live(_) | ScreenMode::Lines => stdout().write_all(said.as_bytes())?,
        }
        Ok(())
    }
}

impl Watch for Screen {
    fn started(&mut self, accuracy: f64) {
        self.start_accuracy = Some(accuracy);
        self.say(&format!("held-out accuracy before training {:.1} %", 100.0 * accuracy));
    }

    fn stepped(&mut self, metrics: &Metrics) {
        self.take(metrics);
        match &self.mode {
            ScreenMode::Json => {
                // A failed write does not end the run; a full disk is told at its end, a reader that left is not.
                let written = stdout().write_all(metrics.to_line().as_bytes());
                let failed = written.err().filter(|error| error.kind() != ErrorKind::BrokenPipe);
                self.output_error = self.output_error.take().or(failed);
            }
            ScreenMode::Lines => self.say(&self.line(metrics)),
            ScreenMode::Live(bar) => {
                bar.set_position(metrics.step);
                let curves = format!(
                    "accuracy {}\nentropy  {}\nheld-out {}\n{}",
                    curve(&self.accuracy),
                    curve(&self.entropy),
                    curve(&self.eval),
                    self.line(metrics)
                );
                bar.set_message(curves);
            }
        }
    }

    fn warned(&mut self, text: &str) {
        self.say(&format!("warning: {text}"));
    }

    fn wants_stop(&mut self) -> bool {
        self.stop.is_raised()
    }

    fn stop_reason(&self) -> String {
        self.stop.name()
    }
}

fn bar(steps: u64, done: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} steps, {elapsed}\n{msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(steps).with_style(style).with_position(done)
}

const CURVE_WIDTH: usize = 48;

/// A series as a sparkline with its first and last value.
fn curve(values: &[f64]) -> String {
    let (Some(first), Some(last)) = (values.first(), values.last()) else { return "-".to_string() };
    let n_columns = values.len().min(CURVE_WIDTH);
    let column = |i: usize| {
        let part = &values[i * values.len() / n_columns..(i + 1) * values.len() / n_columns];
        part.iter().sum::<f64>() / part.len().max(1) as f64
    };
    let columns: Vec<f64> = (0..n_columns).map(column).collect();
    let low = columns.iter().copied().fold(f64::INFINITY, f64::min);
    let high = columns.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let glyphs = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let glyph = |value: &f64| {
        let height = if high > low { (value - low) / (high - low) } else { 0.5 };
        glyphs[((height * 8.0) as usize).min(7)]
    };
    format!("{:.3} {} {:.3}", first, columns.iter().map(glyph).collect::<String>(), last)
}
