//! The folder of an experiment: a new one, or one that goes on and may get more seeds and arms.

use crate::shared::program::writer;
use anyhow::{Context, Result, bail};
use stapo_core::record::{Arm, Experiment, Record};
use stapo_rl::lab::experiment::ExperimentSpec;
use stapo_rl::run::disk::write_whole;
use stapo_rl::run::{FolderLock, NewFolder, check_tree, is_free, receipt};
use std::path::Path;

/// Makes the folder as a whole, or adds what was asked for to the runs of an existing one. Returns the experiment with all runs of
/// the folder.
pub fn prepare(folder: &Path, spec: &ExperimentSpec, asked: Experiment) -> Result<(FolderLock, Experiment)> {
    check_tree(folder)?;
    let path = folder.join("experiment.json");
    if !path.exists() {
        if !is_free(folder) {
            bail!(
                "folder {}: is not empty and holds no experiment\nhint: choose another with --out",
                folder.display()
            );
        }
        let mut new = NewFolder::begin(folder)?;
        write_whole(&new.path().join("config.toml"), spec.config_text().as_bytes())?;
        write_whole(&new.path().join("experiment.json"), asked.to_line().as_bytes())?;
        new.lock.sign(&writer("experiment"))?;
        return Ok((new.appear()?, asked));
    }
    let mut lock = FolderLock::take(folder)?;
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let before: Experiment = stapo_core::record::parse(&text).context(path.display().to_string())?;
    let config = std::fs::read_to_string(folder.join("config.toml")).unwrap_or_default();
    let difference = match grown(spec, &before)? {
        _ if config != spec.config_text() => "the config that all runs share is not that of the file".into(),
        Ok(experiment) => {
            lock.sign(&writer("experiment"))?;
            receipt::withdraw_with_manifest(folder)?;
            write_whole(&path, experiment.to_line().as_bytes())?;
            return Ok((lock, experiment));
        }
        Err(difference) => difference,
    };
    let at = folder.display();
    bail!("folder {at}: holds another experiment: {difference}\nhint: choose another with --out")
}

/// The runs of the folder and those that `spec` adds to them, or what makes a run of the folder none of the file's.
fn grown(spec: &ExperimentSpec, before: &Experiment) -> Result<Result<Experiment, String>> {
    let mut spec = spec.clone();
    let added = std::mem::take(&mut spec.seeds);
    for seed in before.arms.iter().map(|arm| arm.seed).chain(added) {
        if !spec.seeds.contains(&seed) {
            spec.seeds.push(seed);
        }
    }
    let mut experiment = spec.expand()?;
    for old in &before.arms {
        let Some(arm) = experiment.arms.iter_mut().find(|arm| arm.run == old.run && arm.name == old.name)
        else {
            return Ok(Err(format!("the file has no arm for its run {}", old.run)));
        };
        if arm.settings != old.settings {
            return Ok(Err(format!("its run {} was made {}", old.run, changes(old, arm))));
        }
        arm.error.clone_from(&old.error);
    }
    Ok(Ok(experiment))
}

/// The settings that only one of two runs has.
fn changes(old: &Arm, new: &Arm) -> String {
    let only = |of: &Arm, other: &Arm, sign: &str| {
        let missing = of.settings.iter().filter(|setting| !other.settings.contains(setting));
        missing.map(|setting| format!("{sign} {setting}")).collect::<Vec<_>>()
    };
    let all = [only(old, new, "with"), only(new, old, "without")].concat();
    if all.is_empty() { "with its settings in another order".to_string() } else { all.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> ExperimentSpec {
        ExperimentSpec::from_toml(text).unwrap()
    }

    #[test]
    fn seeds_and_arms_are_added_and_what_is_there_keeps_its_order_and_errors() {
        let text = "name = \"m\"\nseeds = [7, 3]\n[[arms]]\nname = \"a\"\nset = [\"steps=5\"]\n";
        let mut before = spec(text).expand().unwrap();
        before.arms[1].error = Some("full disk".into());
        let mut more = spec(&format!("{text}[[arms]]\nname = \"b\"\n"));
        more.seeds = vec![3, 9];
        let runs = |experiment: &Experiment| -> Vec<(String, Option<String>)> {
            experiment.arms.iter().map(|arm| (arm.run.clone(), arm.error.clone())).collect()
        };
        let all = ["a/seed-7", "a/seed-3", "a/seed-9", "b/seed-7", "b/seed-3", "b/seed-9"];
        let failed = |run: &str| (run == "a/seed-3").then(|| "full disk".to_string());
        let expected: Vec<_> = all.iter().map(|run| (run.to_string(), failed(run))).collect();
        assert_eq!(runs(&grown(&more, &before).unwrap().unwrap()), expected);
        assert_eq!(runs(&grown(&spec(text), &before).unwrap().unwrap()), runs(&before));
    }

    #[test]
    fn runs_that_the_file_does_not_have_make_another_experiment() {
        let text = "name = \"m\"\nseeds = [0]\n[[arms]]\nname = \"a\"\nset = [\"steps=5\", \"evaluation.problems=9\"]\n";
        let before = spec(text).expand().unwrap();
        let said = |text: &str| grown(&spec(text), &before).unwrap().unwrap_err();
        assert_eq!(said(&text.replace("\"a\"", "\"b\"")), "the file has no arm for its run a/seed-0");
        let other = text.replace("steps=5", "steps=6");
        assert_eq!(said(&other), "its run a/seed-0 was made with steps=5, without steps=6");
        let turned =
            text.replace("\"steps=5\", \"evaluation.problems=9\"", "\"evaluation.problems=9\", \"steps=5\"");
        assert_eq!(said(&turned), "its run a/seed-0 was made with its settings in another order");
    }
}
