//! Progress of a training run: a live view on a terminal, plain lines elsewhere, JSON lines, or nothing but the end.

use super::progress::{Heartbeat, bar, left_text};
use crate::shared::clock::{span, time_left};
use crate::shared::stop::{Asked, Stop};
use crate::shared::terminal::{is_quiet, plain};
use crate::shared::units::scientific;
use anyhow::{Result, bail};
use indicatif::ProgressBar;
use stapo_core::record::catalogue::{
    ACCURACY, ENTROPY_MEAN, EVAL_ACCURACY, GRADIENT_NORM, KL_BEHAVIOR, N_CANDIDATES, N_SILENCED, REWARD_MEAN,
};
use stapo_core::record::{BenchmarkScore, Best, Metrics, Record};
use stapo_rl::Plan;
use stapo_rl::lab::evaluation::Evaluated;
use stapo_rl::run::meter::Meter;
use stapo_rl::train::{Outcome, Watch};
use std::collections::BTreeMap;
use std::io::{ErrorKind, IsTerminal, Write, stderr, stdout};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

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
    Lines(Heartbeat),
    Json,
    Quiet,
}

impl Screen {
    pub fn new(
        plan: &Plan,
        folder: &Path,
        history: &[Metrics],
        meter: Arc<Meter>,
        json: bool,
        stop: Stop,
    ) -> Self {
        let steps = plan.config.steps;
        let mode = match (json, stderr().is_terminal()) {
            (true, _) => ScreenMode::Json,
            (false, _) if is_quiet() => ScreenMode::Quiet,
            (false, true) => ScreenMode::Live(live(steps, history.len() as u64, meter, &stop)),
            (false, false) => ScreenMode::Lines(Heartbeat::start(meter)),
        };
        let mut screen = Screen {
            mode,
            stop,
            folder: folder.to_owned(),
            steps,
            first_step: history.last().map_or(0, |metrics| metrics.step),
            started: Instant::now(),
            start_accuracy: history.first().and_then(|metrics| metrics.eval_accuracy_before),
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

    pub fn say(&self, text: &str) {
        let text = plain(text);
        match &self.mode {
            ScreenMode::Live(bar) => bar.println(text),
            ScreenMode::Lines(heartbeat) => heartbeat.say(&text),
            ScreenMode::Quiet => {}
            ScreenMode::Json if is_quiet() => {}
            ScreenMode::Json => {
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

    /// A step on one line of at most 80 columns.
    fn line(&self, metrics: &Metrics) -> String {
        format!(
            "step {:>width$}/{}  {} {:>7}  {} {}  {} {:.2}  {} left",
            metrics.step,
            self.steps,
            ACCURACY.short,
            percent(metrics.accuracy),
            ENTROPY_MEAN.short,
            nats(metrics.entropy_mean),
            GRADIENT_NORM.short,
            metrics.gradient_norm,
            left_text(self.left(metrics.step)),
            width = self.steps.to_string().len(),
        )
    }

    /// The curves and the last step, as lines of at most 80 columns.
    fn curves(&self, metrics: &Metrics) -> String {
        format!(
            "{:<8} {}\n{:<8} {}\n{:<8} {}\nlast     {} {:.3}  {} {} of {} {}  {} {:.2}  {} {}",
            ACCURACY.short,
            curve(&self.accuracy, &percent),
            EVAL_ACCURACY.short,
            curve(&self.eval, &percent),
            ENTROPY_MEAN.short,
            curve(&self.entropy, &nats),
            REWARD_MEAN.short,
            metrics.reward_mean,
            N_SILENCED.short,
            metrics.n_silenced,
            metrics.n_candidates,
            N_CANDIDATES.short,
            GRADIENT_NORM.short,
            metrics.gradient_norm,
            KL_BEHAVIOR.short,
            scientific(metrics.kl_behavior.unwrap_or(0.0)),
        )
    }

    fn left(&self, step: u64) -> Duration {
        let n_done = step.saturating_sub(self.first_step);
        time_left(self.started.elapsed(), n_done, self.steps.saturating_sub(step))
    }

    fn say_evaluation(
        &self,
        when: &str,
        held_out: Option<f64>,
        benchmarks: &BTreeMap<String, BenchmarkScore>,
    ) {
        if let Some(held_out) = held_out {
            self.say(&format!("{when}: {} {}", EVAL_ACCURACY.label.to_lowercase(), percent(held_out)));
        }
        for (name, score) in benchmarks {
            self.say(&format!("{when}: {name} {}", benchmark_text(score)));
        }
    }

    /// Prints the summary of the run.
    pub fn finish(&self, outcome: Outcome, best: Option<&Best>) -> Result<()> {
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
        let n_steps = self.accuracy.len();
        let time = span(self.started.elapsed());
        let headline = headline(outcome, best, n_steps, &time);
        let row = |label: &str, value: &str| format!("{:<18} {value}", label.to_lowercase());
        let mut rows = vec![
            row(EVAL_ACCURACY.label, &held_out_text(self.start_accuracy, self.eval.last().copied())),
            row(ACCURACY.label, &curve(&self.accuracy, &percent)),
            row(ENTROPY_MEAN.label, &curve(&self.entropy, &nats)),
            row(N_SILENCED.label, &silenced_text(self.n_silenced, self.n_tokens)),
        ];
        rows.extend(best.map(best_row));
        rows.push(format!("run folder         {}", self.folder.display()));
        rows.extend(next_commands(&self.folder, outcome, n_steps, best));
        let said = plain(&format!("{headline}\n  {}\n", rows.join("\n  ")));
        match self.mode {
            ScreenMode::Quiet => {
                let last = plain(&format!("{headline}, {}\n", self.folder.display()));
                stdout().write_all(last.as_bytes())?;
            }
            ScreenMode::Json if is_quiet() => {}
            ScreenMode::Json => stderr().write_all(said.as_bytes())?,
            ScreenMode::Live(_) | ScreenMode::Lines(_) => stdout().write_all(said.as_bytes())?,
        }
        Ok(())
    }
}

/// How a run ended, in one line.
fn headline(outcome: Outcome, best: Option<&Best>, n_steps: usize, time: &str) -> String {
    match (outcome, best) {
        (Outcome::Done, _) => format!("done: {n_steps} steps in {time}"),
        (Outcome::TargetReached, _) => format!("target reached after {n_steps} steps in {time}"),
        (Outcome::NoImprovement, Some(best)) => {
            format!("ended after {n_steps} steps in {time}: no better evaluation since step {}", best.step)
        }
        (Outcome::NoImprovement, None) => format!("ended after {n_steps} steps in {time}"),
        (Outcome::NothingLearned, _) => {
            format!("ended after {n_steps} steps in {time}: every group has equal rewards")
        }
        (Outcome::Stopped, _) if n_steps == 0 => "stopped before the first step".to_string(),
        (Outcome::Stopped, _) => format!("stopped after {n_steps} steps; saved"),
    }
}

fn benchmark_text(score: &BenchmarkScore) -> String {
    let error = score.standard_error.map_or(String::new(), |e| format!(" ± {:.1}", 100.0 * e));
    format!("{:.1}{error} %, {} questions x {}", 100.0 * score.accuracy, score.n_questions, score.n_samples)
}

/// Held-out accuracy before training, where it was evaluated, and in the last evaluation.
fn held_out_text(before: Option<f64>, last: Option<f64>) -> String {
    let before = before.map_or(String::new(), |accuracy| format!("{} -> ", percent(accuracy)));
    before + &last.map_or("-".to_string(), percent)
}

fn silenced_text(n_silenced: usize, n_tokens: usize) -> String {
    let share = n_silenced as f64 / n_tokens.max(1) as f64;
    format!("{n_silenced} of {n_tokens} ({share:.1e})")
}

/// The best checkpoint, or that no evaluation was better than the one before training.
fn best_row(best: &Best) -> String {
    let row = format!("best checkpoint    step {}, {} {}", best.step, best.metric, percent(best.value));
    if best.step > 0 { row } else { row + ": no evaluation was better than before training" }
}

/// The commands that one may want next, with the paths of this run. The untrained model is never worth an export: where it is the
/// best, the last checkpoint is named, and where there is no other, none.
fn next_commands(folder: &Path, outcome: Outcome, n_steps: usize, best: Option<&Best>) -> Vec<String> {
    let run = shell_word(folder);
    // Beside the run: a folder inside that has no receipt is an extra file to stapo verify.
    let model = folder.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy() + "-model");
    let step = if best.is_some_and(|best| best.step > 0) { " --step best" } else { "" };
    let mut commands = Vec::new();
    if outcome == Outcome::Stopped {
        commands.push(format!("continue with      stapo train --resume {run}"));
    }
    if n_steps == 0 {
        return commands;
    }
    commands.extend([
        format!("see the report     stapo report {run}"),
        format!("look at tokens     stapo inspect {run}"),
        format!("evaluate           stapo eval --model {run} --out {}", shell_word(&folder.join("eval"))),
        format!(
            "export             stapo export {run}{step} --out {}",
            shell_word(&folder.with_file_name(&*model))
        ),
    ]);
    commands
}

/// A path as a word of a shell command.
fn shell_word(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+=:,@%".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        text
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// The live view. Signals are shown in it, so that no line of another origin breaks it.
fn live(steps: u64, done: u64, meter: Arc<Meter>, stop: &Stop) -> ProgressBar {
    let bar = bar(steps, done, meter);
    let shown = bar.clone();
    stop.show_by(move |asked, text| match asked {
        Asked::Once | Asked::Urgently => shown.println(text),
        Asked::AtOnce => shown.finish_and_clear(),
    });
    bar
}

impl Watch for Screen {
    fn started(&mut self, before: &Evaluated) {
        self.start_accuracy = before.held_out;
        self.say_evaluation("before training", before.held_out, &before.benchmarks);
    }

    fn stepped(&mut self, metrics: &Metrics) {
        self.take(metrics);
        match &self.mode {
            ScreenMode::Json => {
                // A failed write does not end the run; a full disk is reported at its end, a reader that left is not.
                let written = stdout().write_all(metrics.to_line().as_bytes());
                let failed = written.err().filter(|error| error.kind() != ErrorKind::BrokenPipe);
                self.output_error = self.output_error.take().or(failed);
                return;
            }
            ScreenMode::Quiet => return,
            ScreenMode::Lines(_) => self.say(&self.line(metrics)),
            ScreenMode::Live(bar) => {
                bar.set_position(metrics.step);
                bar.set_prefix(format!("{} left", left_text(self.left(metrics.step))));
                bar.set_message(format!("{}\n", self.curves(metrics)));
            }
        }
        self.say_evaluation(&format!("step {}", metrics.step), metrics.eval_accuracy, &metrics.benchmarks);
    }

    fn warned(&mut self, text: &str) {
        self.say(&format!("warning: {text}"));
    }

    fn wants_stop(&mut self) -> bool {
        self.stop.is_raised()
    }

    fn waits_for_checkpoint(&mut self, step: u64) {
        if self.stop.is_raised() {
            self.say(&format!("stopping when the checkpoint of step {step} is written"));
        }
    }

    fn stop_reason(&self) -> String {
        self.stop.name()
    }
}

impl Drop for Screen {
    /// Leaves no bar when an error ends the run.
    fn drop(&mut self) {
        if let ScreenMode::Live(bar) = &self.mode {
            bar.finish_and_clear();
        }
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn nats(entropy: f64) -> String {
    format!("{entropy:.3} nats")
}

const CURVE_WIDTH: usize = 40;

/// A series as a sparkline with its first and last value.
fn curve(values: &[f64], shown: &dyn Fn(f64) -> String) -> String {
    let (Some(&first), Some(&last)) = (values.first(), values.last()) else { return "-".to_string() };
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
    format!("{} {} {}", shown(first), columns.iter().map(glyph).collect::<String>(), shown(last))
}

#[cfg(test)]
mod tests;
