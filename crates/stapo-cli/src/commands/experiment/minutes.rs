//! `--minutes`: no run starts that would not end in time.

use anyhow::Result;
use serde_json::Value;
use stapo_core::record::{Arm, Experiment, Metrics};
use stapo_rl::run::{Run, restart};
use std::path::Path;
use std::time::{Duration, Instant};

/// When the experiment has to end.
pub struct TimeLimit<'a> {
    pub until: Instant,
    pub experiment: &'a Experiment,
    /// Runs at the same time.
    pub jobs: usize,
}

impl TimeLimit<'_> {
    /// The time that a run needs, if the run would not end in time: by the experiment's other runs or, before there is one, by `stapo
    /// plan`.
    pub fn too_long(&self, folder: &Path, arm: &Arm, n_steps: u64) -> Option<Duration> {
        let metrics: Vec<Metrics> = Run::read_metrics(&folder.join(&arm.run)).unwrap_or_default();
        let steps_left = n_steps.saturating_sub(metrics.last().map_or(0, |metrics| metrics.step));
        let cost = self.slowest(folder).or_else(|| self.planned(folder, arm).ok().flatten());
        let Some(cost) = cost else {
            eprintln!("{}: no estimate of its time; it starts", arm.run);
            return None;
        };
        let needed = cost.of_steps(steps_left);
        (!ends_in_time(Instant::now(), needed, self.until)).then_some(needed)
    }

    fn slowest(&self, folder: &Path) -> Option<Cost> {
        let runs = self.experiment.arms.iter().filter_map(|arm| {
            let metrics: Vec<Metrics> = Run::read_metrics(&folder.join(&arm.run)).ok()?;
            let (first, last) = (metrics.first()?, metrics.last()?);
            Some([(first.step, first.wall_seconds?), (last.step, last.wall_seconds?)])
        });
        Cost::of_slowest(runs)
    }

    /// The cost by `stapo plan`, which knows of one run alone: runs at the same time share the machine.
    fn planned(&self, folder: &Path, arm: &Arm) -> Result<Option<Cost>> {
        let mut command = restart::command()?;
        command.args(["plan", "--json", "--quiet"]).arg(folder.join("config.toml"));
        command.args(arm.settings.iter().flat_map(|setting| ["--set", setting]));
        let plan: Value = serde_json::from_slice(&command.output()?.stdout)?;
        let planned = plan["time"]["seconds"].as_f64().zip(plan["steps"].as_u64());
        Ok(planned.map(|(seconds, n_steps)| Cost::shared(seconds, n_steps, self.jobs)))
    }
}

fn ends_in_time(now: Instant, needed: Duration, until: Instant) -> bool {
    now.checked_add(needed).is_some_and(|end| end <= until)
}

/// Seconds of a run.
#[derive(Debug, PartialEq)]
struct Cost {
    /// Until its first step has ended: loading, compiling kernels, and the evaluation before training.
    start: f64,
    /// Of every later step.
    per_step: f64,
}

impl Cost {
    /// Of a run that takes so many seconds alone, where `jobs` runs share the machine.
    fn shared(seconds: f64, n_steps: u64, jobs: usize) -> Self {
        Self { start: 0.0, per_step: seconds / n_steps.max(1) as f64 * jobs as f64 }
    }

    fn of_steps(&self, n_steps: u64) -> Duration {
        let seconds = self.start + self.per_step * n_steps as f64;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    /// The larger of both parts over runs, each given as step and wall seconds of its first and its last metrics; `None` before
    /// one has made two steps.
    fn of_slowest(runs: impl Iterator<Item = [(u64, f64); 2]>) -> Option<Self> {
        let later = runs.filter(|[first, last]| last.0 > first.0);
        let costs = later.map(|[first, last]| Self {
            start: first.1,
            per_step: (last.1 - first.1) / (last.0 - first.0) as f64,
        });
        costs.reduce(|a, b| Self { start: a.start.max(b.start), per_step: a.per_step.max(b.per_step) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_costs_its_start_and_its_steps_as_the_slowest_did() {
        // A benchmark before the first step takes a minute, and later steps two seconds.
        let runs = [[(1, 60.0), (11, 80.0)], [(1, 6.0), (3, 8.0)], [(1, 90.0), (1, 90.0)]];
        assert_eq!(Cost::of_slowest(runs.into_iter()), Some(Cost { start: 60.0, per_step: 2.0 }));
        assert_eq!(Cost::of_slowest([[(1, 90.0), (1, 90.0)]].into_iter()), None);
        assert_eq!(Cost::shared(60.0, 30, 4), Cost { start: 0.0, per_step: 8.0 });
        assert_eq!(Cost::shared(60.0, 0, 1), Cost { start: 0.0, per_step: 60.0 });
    }

    #[test]
    fn a_run_starts_that_ends_at_the_last_moment() {
        let cost = Cost { start: 60.0, per_step: 2.0 };
        let (now, needed) = (Instant::now(), cost.of_steps(30));
        assert_eq!(needed, Duration::from_secs(120));
        assert!(ends_in_time(now, needed, now + needed));
        assert!(!ends_in_time(now, needed + Duration::from_nanos(1), now + needed));
        let endless = Cost { start: f64::INFINITY, per_step: 0.0 }.of_steps(1);
        assert!(!ends_in_time(now, endless, now + needed));
    }
}
