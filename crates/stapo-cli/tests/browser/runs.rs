//! Runs of the built-in model for pages to show, and their files.

use crate::common::{ok, parsed_lines, stapo};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

/// The folders (`None`) and files of a run, in an order in which a folder comes before what is in it.
type Contents = BTreeMap<PathBuf, Option<Vec<u8>>>;

/// Runs by objective and seed.
type Runs = BTreeMap<(String, u64), Arc<OnceLock<Contents>>>;

/// The runs that tests have asked for: each is trained once.
static TRAINED: Mutex<Runs> = Mutex::new(Runs::new());

/// A run of its own in `folder` that records every response. Its τp is high enough that the small model has candidates.
pub fn train(folder: &Path, out: &str, objective: &str, seed: u64) {
    let trained = TRAINED.lock().unwrap().entry((objective.to_string(), seed)).or_default().clone();
    let contents = trained.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        train_anew(folder.path(), "run", objective, seed);
        contents(&folder.path().join("run"))
    });
    for (name, bytes) in contents {
        let path = folder.join(out).join(name);
        match bytes {
            None => std::fs::create_dir_all(path).unwrap(),
            Some(bytes) => std::fs::write(path, bytes).unwrap(),
        }
    }
}

fn contents(run: &Path) -> Contents {
    let mut found = Contents::new();
    let mut open = vec![run.to_owned()];
    while let Some(path) = open.pop() {
        let is_folder = path.is_dir();
        if is_folder {
            open.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        let bytes = (!is_folder).then(|| std::fs::read(&path).unwrap());
        found.insert(path.strip_prefix(run).unwrap().to_owned(), bytes);
    }
    found
}

fn train_anew(folder: &Path, out: &str, objective: &str, seed: u64) {
    let objective = format!("objective={objective}");
    let seed = format!("seed={seed}");
    let settings = [
        "steps=4",
        &seed,
        &objective,
        "rollout.problems_per_step=6",
        "update.problems_per_minibatch=3",
        "evaluation.problems=16",
        "evaluation.every_steps=2",
        "record.responses=1000",
        "record.responses_every_steps=2",
    ];
    let mut args = vec!["train", "--out", out];
    args.extend(settings.iter().flat_map(|setting| ["--set", setting]));
    ok(&stapo(folder, &args));
}

pub const STAPO: &str = r#"{preset="stapo", masks=[{kind="spurious", tau_p=0.2}]}"#;

pub fn read(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(path.as_ref()).unwrap_or_else(|e| panic!("{}: {e}", path.as_ref().display()))
}

pub fn json_lines(values: impl Iterator<Item = Value>) -> String {
    values.fold(String::new(), |text, value| text + &value.to_string() + "\n")
}

pub fn lines(path: impl AsRef<Path>) -> Vec<Value> {
    parsed_lines(&read(path))
}

/// Trains a run and replaces its texts by markup and control characters.
pub fn hostile(folder: &Path) {
    train(folder, "bad", STAPO, 1);
    let evil = "</script><script>problems.push('ran')</script><img src=x onerror=problems.push('ran')>\"'&\u{2028}\u{1b}[2J";
    for part in ["rollouts", "tokens", "explored"] {
        for entry in std::fs::read_dir(folder.join("bad").join(part)).unwrap() {
            let path = entry.unwrap().path();
            let rewritten = lines(&path).into_iter().map(|mut record| {
                for key in ["prompt", "reference", "text", "problem_id", "context_before", "context_after"] {
                    if !record[key].is_null() {
                        record[key] = json!(evil);
                    }
                }
                for text in record["tokens"]["text"].as_array_mut().into_iter().flatten() {
                    *text = json!(evil);
                }
                let lists = record["tokens"]["alternatives"].as_array_mut().into_iter().flatten();
                for alternative in lists.flat_map(|list| list.as_array_mut().unwrap()) {
                    alternative["text"] = json!(evil);
                }
                record
            });
            std::fs::write(&path, json_lines(rewritten)).unwrap();
        }
    }
}
