//! Progress and summary of an experiment on a terminal.

use crate::shared::terminal::is_quiet;
use crate::shared::units::{percent, scientific};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use stapo_core::record::catalogue::{ACCURACY, ENTROPY_MEAN};
use stapo_core::record::{Arm, Experiment, Metrics};
use stapo_rl::lab::experiment::{ArmSummary, Collapse, ExperimentSummary};
use std::collections::HashMap;
use std::sync::Mutex;

/// One progress line for the experiment, and one for each run in progress.
pub struct Progress {
    bars: MultiProgress,
    whole: ProgressBar,
    runs: Mutex<HashMap<String, ProgressBar>>,
}

impl Progress {
    pub fn new(n_runs: usize) -> Self {
        let bars = MultiProgress::new();
        if is_quiet() {
            bars.set_draw_target(ProgressDrawTarget::hidden());
        }
        let whole = bars.add(ProgressBar::new(n_runs as u64));
        whole.set_style(style("{bar:20} {pos}/{len} runs  {elapsed} so far  {eta} left"));
        whole.tick();
        Self { bars, whole, runs: Mutex::new(HashMap::new()) }
    }

    pub fn stepped(&self, arm: &Arm, metrics: &Metrics) {
        let Ok(mut runs) = self.runs.lock() else { return };
        let bar = runs.entry(arm.run.clone()).or_insert_with(|| {
            let bar = self.bars.add(ProgressBar::new_spinner());
            bar.set_style(style("{spinner} {msg}"));
            bar
        });
        bar.set_message(format!(
            "{} step {}  {} {:.1} %  {} {:.3} nats",
            arm.run,
            metrics.step,
            ACCURACY.short,
            100.0 * metrics.accuracy,
            ENTROPY_MEAN.short,
            metrics.entropy_mean
        ));
        bar.tick();
    }

    pub fn done(&self, arm: &Arm) {
        self.end(arm);
        self.whole.inc(1);
        if self.bars.is_hidden() {
            eprintln!("{} done", arm.run);
        }
    }

    pub fn failed(&self, arm: &Arm, error: &anyhow::Error) {
        self.lost(arm, &format!("error: {} failed: {error:#}", arm.run));
    }

    pub fn stopped(&self, arm: &Arm) {
        let run = &arm.run;
        self.lost(arm, &format!("warning: {run} was stopped by a signal; the same command continues it"));
    }

    fn lost(&self, arm: &Arm, text: &str) {
        self.end(arm);
        self.whole.inc(1);
        if self.bars.is_hidden() {
            eprintln!("{text}");
        } else {
            self.whole.println(text);
        }
    }

    fn end(&self, arm: &Arm) {
        if let Some(bar) = self.runs.lock().ok().and_then(|mut runs| runs.remove(&arm.run)) {
            bar.finish_and_clear();
        }
    }

    pub fn finish(&self) {
        self.whole.finish_and_clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// The runs that an experiment would start.
pub fn planned<'a>(arms: impl ExactSizeIterator<Item = &'a Arm>) {
    let n_runs = arms.len();
    for arm in arms {
        println!("{:<40} {}", arm.run, arm.settings.join(" "));
    }
    println!("{n_runs} runs, none started");
}

/// How many seeds collapsed and in which sense; nothing where none did.
fn collapses(arm: &ArmSummary) -> String {
    let senses = [
        (arm.n_collapsed, Collapse::Entropy),
        (arm.n_collapsed_accuracy, Collapse::Accuracy),
        (arm.n_collapsed_endings, Collapse::Endings),
    ];
    let counts: Vec<String> =
        senses.iter().filter(|(n, _)| *n > 0).map(|(n, sense)| format!("{n} in {}", sense.name())).collect();
    if counts.is_empty() { String::new() } else { format!("  collapsed: {}", counts.join(", ")) }
}

/// The table at the end.
pub fn summary(experiment: &Experiment, summary: &ExperimentSummary) {
    let arms = &summary.arms;
    println!(
        "{:<24} {:>5}  {:<22} {:<22} {:>9} {:>9} {:>9} {:>9}",
        "arm",
        "seeds",
        format!("{}, %", summary.measure.name()),
        "method - arm, points",
        "p Holm",
        "area, %",
        "-max|dH|",
        "silenced"
    );
    for arm in arms {
        let difference = arm.against.as_ref().map_or("-".to_string(), |paired| {
            format!(
                "{:+.1} [{:+.1}, {:+.1}]",
                100.0 * paired.difference,
                100.0 * paired.interval.low,
                100.0 * paired.interval.high
            )
        });
        println!(
            "{:<24} {:>5}  {:<22} {:<22} {:>9} {:>9.1} {:>9.3} {:>9}{}",
            arm.name,
            arm.n_runs,
            percent(&arm.accuracy),
            difference,
            arm.p_adjusted.map_or("-".to_string(), |p| format!("{p:.3}")),
            100.0 * arm.area.value,
            arm.entropy_stability.value,
            scientific(arm.silenced_share.value),
            collapses(arm)
        );
    }
    let undecided = arms.iter().filter(|arm| arm.p_adjusted.is_some_and(|p| p >= 0.05)).count();
    if undecided > 0 {
        println!("no detectable difference from the method at 5 %: {undecided} arms");
    }
    for line in cost_lines(experiment.reach.as_deref().unwrap_or_default(), arms) {
        println!("{line}");
    }
    for arm in experiment.arms.iter().filter(|arm| arm.error.is_some()) {
        println!("failed: {} {}", arm.run, arm.error.as_deref().unwrap_or_default());
    }
}

/// What the arms spent until they had the accuracy at which the arm `reach` ended, where the experiment compares costs.
fn cost_lines(reach: &str, arms: &[ArmSummary]) -> Vec<String> {
    let Some(first) = arms.iter().find_map(|arm| arm.cost.as_ref()) else { return Vec::new() };
    let target = 100.0 * first.target_accuracy;
    let mut lines = vec![
        format!(
            "\ncost to {target:.1} %, the accuracy at which {reach} ended; equal time is {:.0} s",
            first.equal_seconds
        ),
        format!(
            "{:<24} {:>10} {:>9} {:>14} {:>12} {:>18}",
            "arm", "responses", "seconds", "responses to", "seconds to", "at equal time, %"
        ),
    ];
    let shown = |value: Option<f64>| value.map_or("never".to_string(), |value| format!("{value:.0}"));
    for arm in arms {
        let Some(cost) = &arm.cost else { continue };
        lines.push(format!(
            "{:<24} {:>10.0} {:>9.0} {:>14} {:>12} {:>18.1}",
            arm.name,
            cost.responses,
            cost.seconds,
            shown(cost.responses_to_target),
            shown(cost.seconds_to_target),
            100.0 * cost.accuracy_at_equal_seconds
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::study::summary::tests::costly;

    #[test]
    fn costs_are_listed_where_an_experiment_compares_them() {
        let mut study = costly();
        let lines = cost_lines("a", &study.summary().unwrap().arms);
        assert_eq!(lines[0], "\ncost to 50.0 %, the accuracy at which a ended; equal time is 20 s");
        let cells = |line: &String| line.split_whitespace().map(String::from).collect::<Vec<_>>();
        assert_eq!(cells(&lines[2]), ["a", "200", "20", "200", "20", "50.0"]);
        assert_eq!(cells(&lines[3]), ["b", "400", "40", "300", "30", "37.5"]);
        assert_eq!(cells(&lines[4]), ["c", "200", "20", "never", "never", "20.0"]);
        study.reach = None;
        assert_eq!(cost_lines("", &study.summary().unwrap().arms), [""; 0]);
    }

    #[test]
    fn a_collapse_is_told_with_its_sense() {
        let mut arm = costly().summary().unwrap().arms.remove(0);
        (arm.n_collapsed, arm.n_collapsed_accuracy, arm.n_collapsed_endings) = (0, 0, 0);
        assert_eq!(collapses(&arm), "");
        (arm.n_collapsed, arm.n_collapsed_endings) = (2, 1);
        assert_eq!(collapses(&arm), "  collapsed: 2 in entropy, 1 in endings");
    }
}
