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
    /// Whether a run would end in time, by the pace of the experiment's other runs or, before there is one, by `stapo plan`.
    pub fn allows(&self, folder: &Path, arm: &Arm, n_steps: u64) -> bool {
        let metrics: Vec<Metrics> = Run::read_metrics(&folder.join(&arm.run)).unwrap_or_default();
        let steps_left = n_steps.saturating_sub(metrics.last().map_or(0, |metrics| metrics.step));
        let pace = self.slowest_pace(folder).or_else(|| self.planned_pace(folder, arm).ok().flatten());
        let Some(pace) = pace else {
            eprintln!("{}: no estimate of its time; it starts", arm.run);
            return true;
        };
        let needed = Duration::try_from_secs_f64(pace * steps_left as f64).unwrap_or(Duration::MAX);
        Instant::now().checked_add(needed).is_some_and(|end| end <= self.until)
    }

    /// Seconds per step of the slowest run that has made two steps. The first step is left out, which compiles kernels.
    fn slowest_pace(&self, folder: &Path) -> Option<f64> {
        let paces = self.experiment.arms.iter().filter_map(|arm| {
            let metrics: Vec<Metrics> = Run::read_metrics(&folder.join(&arm.run)).ok()?;
            let (first, last) = (metrics.first()?, metrics.last()?);
            let seconds = last.wall_seconds? - first.wall_seconds?;
            (last.step > first.step).then(|| seconds / (last.step - first.step) as f64)
        });
        paces.reduce(f64::max)
    }

    /// Seconds per step by `stapo plan`, which knows of one run alone: runs at the same time share the machine.
    fn planned_pace(&self, folder: &Path, arm: &Arm) -> Result<Option<f64>> {
        let mut command = restart::command()?;
        command.args(["plan", "--json", "--quiet"]).arg(folder.join("config.toml"));
        command.args(arm.settings.iter().flat_map(|setting| ["--set", setting]));
        let plan: Value = serde_json::from_slice(&command.output()?.stdout)?;
        let seconds = plan["time"]["seconds"].as_f64().zip(plan["steps"].as_f64());
        Ok(seconds.map(|(seconds, steps)| seconds / steps.max(1.0) * self.jobs as f64))
    }
}
