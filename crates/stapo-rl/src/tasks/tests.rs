mod files;
mod formats;
mod generated;
mod parquet;
mod shared;

use super::*;
use crate::reward::{CommandSpec, CountdownRule, NumberUse, RuleSpec};
use stapo_core::Verdict;
use std::path::{Path, PathBuf};

/// Writes a file to a folder and returns the path.
fn file(folder: &Path, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, content).unwrap();
    path
}

/// The error message of a spec that is refused. Every such message has a remedy.
fn refusal(spec: &TaskSpec) -> String {
    let message = match Task::open(spec) {
        Ok(_) => panic!("opened: {spec:?}"),
        Err(error) => error.to_string(),
    };
    assert!(message.contains("\nhint: "), "no remedy: {message}");
    message
}

fn verdicts(task: &Task, samples: &[(&Problem, &str)]) -> Vec<Verdict> {
    task.judge(samples).unwrap().into_iter().map(|judged| judged.verdict).collect()
}
