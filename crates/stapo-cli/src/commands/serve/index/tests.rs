//! The list of the runs of a folder that changes.

use super::*;
use stapo_core::record::Record;
use stapo_rl::lab::experiment::ExperimentSpec;
use std::fs;

/// Writes a run of `n` steps of 2 s each, every fifth of which is evaluated.
fn write_run(folder: &Path, n: u64) {
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("plan.toml"), "steps = 100\nseed = 7\n[evaluation]\nevery_steps = 5\n").unwrap();
    let line = |step: u64| {
        let evaluated = format!(", \"eval_accuracy\": {}", step as f64 / 1000.0);
        let evaluated = if step.is_multiple_of(5) { evaluated } else { String::new() };
        let accuracy = step as f64 / 100.0;
        format!(
            "{{\"schema\": 1, \"step\": {step}, \"accuracy\": {accuracy}, \"seconds\": {{\"step\": 2.0}}{evaluated}}}\n"
        )
    };
    fs::write(folder.join("metrics.jsonl"), (1..=n).map(line).collect::<String>()).unwrap();
}

/// The rows that changed.
fn changed(index: &mut Index) -> Vec<Row> {
    let changes = index.refresh(Look::Everything);
    assert!(changes.gone.is_empty());
    changes.rows
}

#[test]
fn a_row_sums_a_run_up_and_comes_again_only_when_something_changed() {
    let folder = tempfile::tempdir().unwrap();
    let (root, run) = (folder.path().join("runs"), folder.path().join("runs/a"));
    write_run(&run, 60);
    for (name, seconds) in [("plan.toml", 1000), ("metrics.jsonl", 2000)] {
        let file = fs::File::options().append(true).open(run.join(name)).unwrap();
        file.set_modified(UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
    }
    let mut index = Index::new(&root, "here".into());
    let row = changed(&mut index).remove(0);
    assert_eq!((row.id.as_str(), row.step, row.steps, row.seed), ("a", 60, Some(100), Some(7)));
    assert_eq!((row.written, row.n_warnings, row.is_evaluated), (2000, 0, false));
    assert_eq!((row.status.kind, row.seconds_left), (StatusKind::Stopped, None));
    assert_eq!((row.last["accuracy"], row.last["eval_accuracy"]), (0.6, 0.06));
    // Every third of 60 values, the last included, and all of 12.
    let [all, evaluated] = ["accuracy", "eval_accuracy"].map(|key| &row.sparks[key]);
    assert_eq!((all.len(), all[0], all[19]), (20, 0.03, 0.6));
    assert_eq!((evaluated.len(), evaluated[0], evaluated[11]), (12, 0.005, 0.06));
    assert_eq!(changed(&mut index), []);

    write_run(&run, 250);
    let row = changed(&mut index).remove(0);
    assert_eq!((row.step, row.sparks["eval_accuracy"].len()), (250, 17), "every third of 50 evaluations");
    fs::write(run.join("plan.toml"), "steps = 300").unwrap();
    assert_eq!(changed(&mut index)[0].steps, Some(300));
    assert!(index.refresh(Look::Active).rows.is_empty());
    let lock = stapo_rl::run::FolderLock::take(&run).unwrap();
    let row = changed(&mut index).remove(0);
    assert_eq!((row.status.kind, row.seconds_left), (StatusKind::Running, Some(100.0)));
    drop(lock);
    assert_eq!(changed(&mut index)[0].seconds_left, None);
    let start = r#"{"schema": 1, "time": "2026-01-01T00:00:00Z", "step": 1, "event": "start", "writer": {"pid": 7, "host": "there", "command": "", "started": "", "program": "", "device": "", "world": 1}}"#;
    let warning =
        r#"{"schema": 1, "time": "2026-01-01T00:00:00Z", "step": 1, "event": "warning", "text": "w"}"#;
    fs::write(run.join("events.jsonl"), format!("{start}\n{warning}\n")).unwrap();
    let row = changed(&mut index).remove(0);
    assert_eq!((row.status.text.as_str(), row.n_warnings), ("on there, as far as its files show", 1));
    fs::remove_dir_all(&run).unwrap();
    assert_eq!(index.refresh(Look::Active).gone, Vec::<String>::new());
    assert_eq!(index.refresh(Look::Everything).gone, ["a"]);
}

#[test]
fn a_run_that_could_not_be_read_is_read_when_its_files_change() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("a");
    fs::create_dir(&run).unwrap();
    fs::write(run.join("metrics.jsonl"), "{\"step\": 1}\n").unwrap();
    let mut index = Index::new(folder.path(), "here".into());
    let row = changed(&mut index).remove(0);
    assert_eq!(row.status.kind, StatusKind::Broken);
    assert!(row.status.text.starts_with("plan.toml: "), "{}", row.status.text);
    fs::write(run.join("plan.toml"), "steps = 9").unwrap();
    fs::write(run.join("metrics.jsonl"), "no record\n").unwrap();
    assert_eq!(changed(&mut index)[0].status.text, "metrics.jsonl: its last lines are no records");
    fs::write(run.join("plan.toml"), "steps = 10").unwrap();
    assert_eq!(changed(&mut index)[0].status.kind, StatusKind::Broken, "the metrics are as they were");
    fs::write(run.join("metrics.jsonl"), "{\"step\": 1}\n").unwrap();
    let row = changed(&mut index).remove(0);
    assert_eq!((row.status.kind, row.step, row.steps), (StatusKind::Stopped, 1, Some(10)));
}

#[test]
fn notes_evaluations_and_experiments_reach_their_runs() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("runs");
    write_run(&root.join("a"), 3);
    write_run(&root.join("exp/b/seed-7"), 3);
    let write_experiment = |arm: &str| {
        let text = format!("name = \"m\"\nseeds = [7]\n[[arms]]\nname = \"{arm}\"");
        let mut experiment = ExperimentSpec::from_toml(&text).unwrap().expand().unwrap();
        experiment.arms[0].run = "b/seed-7".into();
        fs::write(root.join("exp/experiment.json"), experiment.to_line()).unwrap();
    };
    write_experiment("b");
    let mut index = Index::new(&root, "here".into());
    let rows = changed(&mut index);
    assert_eq!((rows[0].arm.as_deref(), rows[1].arm.as_deref(), rows[1].seed), (None, Some("b"), Some(7)));
    assert_eq!(changed(&mut index), []);
    write_experiment("another");
    assert_eq!(changed(&mut index)[0].arm.as_deref(), Some("another"));
    for note in ["good", "better"] {
        fs::write(root.join("notes.json"), format!("{{\"runs\": {{\"a\": {{\"note\": \"{note}\"}}}}}}"))
            .unwrap();
        let rows = changed(&mut index);
        assert_eq!((rows.len(), rows[0].note.note.as_str()), (1, note));
        assert_eq!(changed(&mut index), []);
    }
    // An evaluation below the folder and one beside it name the run; another names none.
    let evals = [root.join("first"), folder.path().join("evals/second"), root.join("third")];
    for (eval, text) in
        evals.iter().zip(["{\"prompting_of\": \"runs/a\"}", "{\"prompting_of\": \"a\"}", "{}"])
    {
        fs::create_dir_all(eval).unwrap();
        fs::write(eval.join("eval.json"), text).unwrap();
        let rows = changed(&mut index);
        let is_named = text != "{}";
        assert_eq!(
            rows.iter().map(|row| row.is_evaluated).collect::<Vec<_>>(),
            [true][..usize::from(is_named)]
        );
    }
    assert_eq!(index.evaluations("a").len(), 2);
    evals[..2].iter().for_each(|eval| fs::remove_dir_all(eval).unwrap());
    assert!(!changed(&mut index)[0].is_evaluated && index.evaluations("a").is_empty());
    fs::create_dir(root.join("a/eval")).unwrap();
    assert!(changed(&mut index)[0].is_evaluated);
}
