//! Experiments: a matrix of runs from one file, and the summary of the runs.
//!
//! Arms differ only by the settings that the file gives to them: for the same seed, all arms see the same problems in
//! the same order and sample with the same random numbers.

mod collapse;
mod cost;
mod distribution;
mod runs;
mod summary;

pub use collapse::Collapse;
pub use cost::Cost;
pub use distribution::{ComparedRuns, NGramDivergence, QuadrantShare, RunResponses, compare_runs};
pub use runs::{ArmRuns, SeedRun, held_out};
pub use summary::{ArmSummary, ExperimentSummary, Measure, summarise};

use crate::error::{Error, Result};
use crate::plan::config::{Config, FileKind, FreeTable, Plan, PlanError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stapo_core::record::{Arm, Experiment, Extra, SCHEMA};
use stapo_core::settings;
use std::collections::BTreeMap;
use toml::{Table, Value};

/// An experiment as written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExperimentSpec {
    /// The name of the experiment, which its folder has.
    pub name: String,
    /// The seeds; every arm runs once with each.
    pub seeds: Vec<u64>,
    /// The name of the proposed arm, with which the others are compared; the first arm by default.
    pub method: Option<String>,
    /// The name of an arm: what every arm spends until it has the accuracy at which this one ended is compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reach: Option<String>,
    /// The training config that all arms share.
    #[serde(default)]
    #[schemars(with = "Config")]
    pub config: Table,
    /// What is compared.
    pub arms: Vec<ArmSpec>,
    /// Keys with a list of values each. Every arm runs with every combination of values.
    #[serde(default)]
    #[schemars(with = "FreeTable")]
    pub matrix: Table,
    /// `KEY=VALUE` each, for all arms; an arm's own settings are applied after these.
    #[serde(skip)]
    pub overrides: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ArmSpec {
    /// The name of the arm.
    pub name: String,
    /// Settings of the arm, `KEY=VALUE` each.
    #[serde(default)]
    pub set: Vec<String>,
}

impl ExperimentSpec {
    pub fn from_toml(text: &str) -> Result<Self> {
        let table = settings::parse(text).map_err(PlanError::from)?;
        FileKind::Experiment.check("experiment", &table).map_err(PlanError::from)?;
        let spec: Self = settings::read("experiment", table).map_err(PlanError::from)?;
        let refuse =
            |key, problem: &str, remedy| Err(Error::Misfit { key, problem: problem.to_string(), remedy });
        if spec.seeds.is_empty() || spec.arms.is_empty() {
            return refuse(
                "seeds, arms",
                "expected at least one of each",
                "seeds = [0, 1, 2], [[arms]] name = \"stapo\"",
            );
        }
        for (key, named) in [("method", &spec.method), ("reach", &spec.reach)] {
            if let Some(name) = named.as_ref().filter(|name| !spec.arms.iter().any(|arm| arm.name == **name))
            {
                return refuse(key, &format!("{name} is no arm"), "name one of the arms, or leave it out");
            }
        }
        Ok(spec)
    }

    /// The config that all arms share, as TOML.
    pub fn config_text(&self) -> String {
        self.config.to_string()
    }

    /// Every arm with every seed. The config of each is checked, so that a wrong value is found before the first run.
    pub fn expand(&self) -> Result<Experiment> {
        self.check_names()?;
        let mut arms = Vec::new();
        for arm in &self.arms {
            for combination in self.combinations()? {
                let name = [std::slice::from_ref(&arm.name), &combination[..]].concat().join(",");
                for &seed in &self.seeds {
                    let mut settings = [&self.overrides[..], &arm.set[..], &combination[..]].concat();
                    settings.extend([format!("seed={seed}"), format!("name={}", folder_name(&name))]);
                    let set = settings.iter().map(String::as_str);
                    Plan::resolve(Config::from_toml(&self.config_text(), set)?)?;
                    let run = format!("{}/seed-{seed}", folder_name(&name));
                    arms.push(Arm { name: name.clone(), seed, run, settings, error: None });
                }
            }
        }
        refuse_shared_folders(&arms)?;
        let (name, method, reach) = (self.name.clone(), self.method.clone(), self.reach.clone());
        Ok(Experiment { schema: SCHEMA, name, method, reach, arms, extra: Extra::new() })
    }

    /// Refuses names that are no names of folders, and arms and seeds that are there twice.
    fn check_names(&self) -> Result<()> {
        let refuse = |key, problem, remedy| Err(Error::Misfit { key, problem, remedy });
        let all =
            std::iter::once(("name", &self.name)).chain(self.arms.iter().map(|arm| ("arms.name", &arm.name)));
        for (key, name) in all {
            let is_path = name.contains(['/', '\\']) || name.trim_matches('.').is_empty();
            if name.trim().is_empty() || is_path || name.chars().any(char::is_control) {
                let remedy = "it names a folder: letters, digits, spaces and signs, but no / and no control characters";
                return refuse(key, format!("{name:?} is no name"), remedy);
            }
        }
        for (idx, arm) in self.arms.iter().enumerate() {
            if self.arms[..idx].iter().any(|earlier| earlier.name == arm.name) {
                let problem = format!("two arms are named {:?}", arm.name);
                return refuse("arms.name", problem, "give each arm a different name");
            }
        }
        match self.seeds.iter().enumerate().find(|(idx, seed)| self.seeds[..*idx].contains(seed)) {
            None => Ok(()),
            Some((_, seed)) => refuse(
                "seeds",
                format!("{seed} is there twice"),
                "a seed twice is one run twice, not two runs",
            ),
        }
    }

    fn combinations(&self) -> Result<Vec<Vec<String>>> {
        let mut all = vec![Vec::new()];
        for (key, values) in &self.matrix {
            let Value::Array(values) = values else {
                let problem = format!("{key} is not a list");
                return Err(Error::Misfit { key: "matrix", problem, remedy: "\"KEY\" = [VALUE, VALUE]" });
            };
            all = all
                .iter()
                .flat_map(|before| values.iter().map(move |value| (before, value)))
                .map(|(before, value)| [&before[..], &[format!("{key}={value}")]].concat())
                .collect();
        }
        Ok(all)
    }
}

/// The arm of the file and the setting of the matrix that the name of an expanded arm is made of: `stapo` and
/// `update.learning_rate=0.001`. The setting is empty where the experiment has no matrix.
pub fn split_arm(name: &str) -> (&str, &str) {
    let is_setting =
        |place: &usize| name[place + 1..].split(',').next().is_some_and(|part| part.contains('='));
    let comma = name.match_indices(',').map(|(comma, _)| comma).find(is_setting);
    comma.map_or((name, ""), |comma| (&name[..comma], &name[comma + 1..]))
}

/// Refuses runs that would share a folder, also on file systems that ignore case.
fn refuse_shared_folders(arms: &[Arm]) -> Result<()> {
    let mut taken: BTreeMap<String, &Arm> = BTreeMap::new();
    for arm in arms {
        if let Some(other) = taken.insert(arm.run.to_lowercase(), arm) {
            let problem = format!("{:?} and {:?} share the folder {}", other.name, arm.name, arm.run);
            let remedy =
                "name one of them differently: letters, digits, - _ . stay as they are in a folder's name";
            return Err(Error::Misfit { key: "arms.name", problem, remedy });
        }
    }
    Ok(())
}

fn folder_name(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    name.chars().map(plain).collect()
}

#[cfg(test)]
mod tests;
