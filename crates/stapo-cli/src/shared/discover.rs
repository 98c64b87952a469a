//! The runs and experiments below a folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Folders inside each other that are searched; runs of an experiment lie two below it.
const MAX_DEPTH: usize = 4;
/// Folders looked at; a folder with more is no folder of runs.
const MAX_FOLDERS: usize = 20_000;

/// A folder that is a run or looks like one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub folder: PathBuf,
    /// The experiment that the run belongs to, by its id.
    pub experiment: Option<String>,
}

/// What lies below a folder.
#[derive(Debug, Default)]
pub struct Below {
    pub runs: BTreeMap<String, Found>,
    /// Folders that `stapo eval` wrote, outside of runs.
    pub evaluations: Vec<PathBuf>,
}

/// The runs below a folder by their ids. See [`below`].
pub fn runs_below(root: &Path) -> BTreeMap<String, Found> {
    below(root).runs
}

/// The runs below a folder by their ids, which are their paths from that folder with `/` between the parts. A folder that
/// is itself a run has the id `.`. Links are not followed, and folders whose names begin with a dot are in the making.
pub fn below(root: &Path) -> Below {
    let mut found = Below::default();
    let Below { runs, evaluations } = &mut found;
    if is_run(root) {
        runs.insert(".".to_string(), Found { folder: root.to_owned(), experiment: None });
        return found;
    }
    let here = root.join("experiment.json").is_file().then(|| ".".to_string());
    let mut open = vec![(root.to_owned(), String::new(), here, 1)];
    let mut n_folders = 0;
    while let Some((folder, prefix, experiment, depth)) = open.pop() {
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        for entry in entries.filter_map(Result::ok) {
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let name = entry.file_name();
            let Some(name) = name.to_str().filter(|name| is_folder && !name.starts_with('.')) else {
                continue;
            };
            n_folders += 1;
            if n_folders > MAX_FOLDERS {
                return found;
            }
            let path = entry.path();
            let id = if prefix.is_empty() { name.to_string() } else { format!("{prefix}/{name}") };
            if is_run(&path) {
                runs.insert(id, Found { folder: path, experiment: experiment.clone() });
            } else if path.join("eval.json").symlink_metadata().is_ok() {
                evaluations.push(path);
            } else if depth < MAX_DEPTH {
                let here = path.join("experiment.json").is_file().then(|| id.clone());
                open.push((path, id, here.or_else(|| experiment.clone()), depth + 1));
            }
        }
    }
    found
}

/// A folder with a plan, or with metrics and so the rest of a run.
pub fn is_run(folder: &Path) -> bool {
    ["plan.toml", "metrics.jsonl"].iter().any(|file| folder.join(file).symlink_metadata().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_found_in_experiments_and_links_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        for run in [
            "a",
            "exp/arm/seed-0",
            "exp/arm/seed-1",
            ".making",
            "deep/1/2/3/4",
            "a/checkpoints/b",
            "elsewhere",
        ] {
            std::fs::create_dir_all(at.join(run)).unwrap();
            std::fs::write(at.join(run).join("plan.toml"), "").unwrap();
        }
        std::fs::create_dir_all(at.join("rest")).unwrap();
        std::fs::write(at.join("rest/metrics.jsonl"), "").unwrap();
        std::fs::write(at.join("exp/experiment.json"), "").unwrap();
        let runs = at.join("runs");
        std::fs::create_dir(&runs).unwrap();
        for name in ["a", "exp", ".making", "deep", "rest"] {
            std::fs::rename(at.join(name), runs.join(name)).unwrap();
        }
        #[cfg(unix)]
        std::os::unix::fs::symlink(at.join("elsewhere"), runs.join("link")).unwrap();
        let found = runs_below(&runs);
        let ids: Vec<&String> = found.keys().collect();
        assert_eq!(ids, ["a", "exp/arm/seed-0", "exp/arm/seed-1", "rest"]);
        assert_eq!(found["exp/arm/seed-0"].experiment.as_deref(), Some("exp"));
        assert_eq!(found["a"].experiment, None);
        assert_eq!(runs_below(&runs.join("a")).keys().collect::<Vec<_>>(), ["."]);
        assert_eq!(runs_below(&runs.join("exp"))["arm/seed-0"].experiment.as_deref(), Some("."));
    }
}
