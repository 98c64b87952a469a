//! Reports on invented runs, of which no file exists: their numbers are pinned, without a run that has to be trained.

use super::contents::{ContentBlock, Contents};
use super::*;
use crate::shared::chart::to_svg;
use crate::shared::study::table::Table;
use crate::shared::study::tests::{metrics, run, study};
use crate::shared::study::{RunData, StudyKind};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::fmt::Write as _;

/// A step of a run whose numbers move with the step, the seed and the arm.
fn step(step: u64, seed: u64, arm: u64) -> Value {
    let t = step as f64;
    let wave = ((step * 7 + seed * 3 + arm * 5) % 11) as f64 / 11.0;
    let quadrant = |quadrant: &str, n: usize, norm: f64| json!({"quadrant": quadrant, "n_tokens": n, "mean_gradient_norm": norm + 0.1 * wave, "gradient_share": 0.25});
    let mut keys = json!({
        "reward_mean": -0.5 + 0.05 * t, "reward_std": 0.5 + 0.01 * t, "rewards": {"rule": 0.1 * wave, "length": -0.2 * wave},
        "accuracy": 0.2 + 0.03 * t + 0.1 * wave, "response_tokens_mean": 30.0 + t,
        "truncated_share": if step > 8 { 0.5 } else { 0.05 * wave }, "entropy_mean": 0.4 * 0.8f64.powf(t) + 0.01 * wave,
        "n_candidates": 20 + step, "n_silenced": 2 + (step + seed) % 3, "clip_fraction": 0.01 * wave,
        "kl_behavior": 1e-3 * wave, "loss": 0.1 * wave, "gradient_norm": 0.5 + wave, "silenced_gradient_share": 0.01,
        "quadrants": [
            quadrant("probable_high_entropy", 500, 0.2), quadrant("probable_low_entropy", 400, 0.1),
            quadrant("improbable_high_entropy", 90, 0.8), quadrant("improbable_low_entropy", 10, 1.2),
        ],
        "entropy_change": {"predicted": 1e-3 * (wave - 0.5), "measured": 2e-3 * (wave - 0.4)},
        "judge": {"asked_share": 0.5, "agreement": 0.9 - 0.01 * t, "rule_accuracy": 0.2 + 0.02 * t},
        "n_responses": 64, "n_sampled": 1900, "tokens_per_second": {"rollout": 800.0, "update": 400.0},
    });
    if step.is_multiple_of(4) {
        keys["eval_accuracy"] = json!(0.25 + 0.02 * t + 0.05 * wave - 0.04 * arm as f64);
    }
    keys
}

fn token(step: u64, text: &str, logp: f64, likelier: &str) -> Value {
    json!({
        "schema": 1, "step": step, "problem_id": "p", "sample_idx": 1, "token_idx": 4, "id": 7, "text": text,
        "silenced_by": "spurious", "logp": logp, "entropy": 0.2, "advantage": 0.75, "gradient_norm": 1.1,
        "context_before": "so ", "context_after": " 3",
        "alternatives": [{"id": 1, "text": likelier, "logp": -0.1}, {"id": 7, "text": text, "logp": logp}],
    })
}

/// A run of twelve steps, or of eleven, with silenced and explored tokens.
fn invented(folder: &str, objective: &str, seed: u64, arm: u64) -> RunData {
    let n_steps = if arm == 0 { 12 } else { 11 };
    let settings =
        [format!("objective={{preset=\"{objective}\"}}"), format!("seed={seed}"), "steps=12".into()];
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let steps = (1..=n_steps).map(|n| metrics(n, &step(n, seed, arm))).collect();
    let tokens = |list: &[(&str, f64)]| {
        let tokens = (1..).zip(list).map(|(n, (text, logp))| token(n, text, *logp, "the"));
        tokens.map(|token| serde_json::from_value(token).unwrap()).collect()
    };
    let silenced: &[(&str, f64)] =
        if arm == 0 { &[("x", -7.0), ("7", -9.0), ("x", -8.0), (" then", -6.5)] } else { &[] };
    let change = |event: &str, n: u64| {
        let event =
            json!({"schema": 1, "time": "2026-01-01T00:00:00Z", "event": event, "step": n, "text": "text"});
        serde_json::from_value(event).unwrap()
    };
    RunData {
        silenced: tokens(silenced),
        explored: tokens(&[("y", -7.5), ("z", -8.5)]),
        events: vec![change("warning", 3), change("canary", 5)],
        settings: vec![format!("seed={seed}")],
        ..run(folder, &settings, steps)
    }
}

/// The words with digits of a text.
fn digits(text: &str) -> String {
    let words = text.split_whitespace().filter(|word| word.contains(|c: char| c.is_ascii_digit()));
    words.collect::<Vec<_>>().join(" ")
}

fn csv(table: &Table) -> String {
    format!("{}.csv\n{}", table.name, table.to_csv())
}

/// What a report has, section by section, with its numbers.
fn shown(study: &Study) -> String {
    let contents = Contents::gather(study).unwrap();
    let page = contents.to_html();
    let mut out = format!("{}\n", page.split("<p>").nth(1).unwrap().split("</p>").next().unwrap());
    for (id, blocks) in contents.blocks() {
        writeln!(out, "-- {id}").unwrap();
        for block in blocks {
            match block {
                ContentBlock::Note(text) => writeln!(out, "note {}", digits(text)).unwrap(),
                ContentBlock::Missing(text) => {
                    writeln!(out, "missing {}", text.split(':').next().unwrap()).unwrap();
                }
                ContentBlock::Figures(figures) => figures.iter().for_each(|figure| {
                    let drawn = format!("{:x}", Sha256::digest(to_svg(&figure.scene, "")));
                    writeln!(out, "{} {} {}", figure.name, &drawn[..16], digits(&figure.note)).unwrap();
                }),
                ContentBlock::Table(_, table) => out += &csv(table),
                ContentBlock::Folded(_, table) => write!(out, "folded {}", csv(table)).unwrap(),
                ContentBlock::Markup(markup) => writeln!(out, "markup {} bytes", markup.len()).unwrap(),
            }
        }
    }
    let overview = curves::overview(&contents.figures().cloned().collect::<Vec<_>>(), study);
    writeln!(
        out,
        "overview {}",
        overview.iter().map(|figure| figure.name.as_str()).collect::<Vec<_>>().join(" ")
    )
    .unwrap();
    out
}

/// The numbers come from the program itself, which only shows that nothing changed; STAPO_WRITE_GOLDENS=1 writes them again.
#[test]
fn every_mark_and_number_of_a_report_on_invented_runs_is_as_it_was() {
    let method = || (0..3).map(|seed| invented(&format!("s/stapo-{seed}"), "stapo", seed, 0)).collect();
    let other = || (0..3).map(|seed| invented(&format!("s/grpo-{seed}"), "grpo", seed, 1)).collect();
    let experiment = Study {
        method: Some(0),
        reach: Some("stapo".into()),
        failed: vec!["none/seed-0 error: gone".into()],
        ..study(StudyKind::Experiment, vec![("stapo", method()), ("grpo", other())])
    };
    let runs = study(StudyKind::Runs, vec![("stapo", method()), ("grpo", other())]);
    let alone = study(StudyKind::Run, vec![("stapo", vec![invented("s/stapo-0", "stapo", 0, 0)])]);
    let empty = study(StudyKind::Run, vec![("stapo", vec![run("s/a", &[], Vec::new())])]);
    let mut found = String::new();
    for (name, study) in [("experiment", &experiment), ("runs", &runs), ("run", &alone), ("no step", &empty)]
    {
        write!(found, "== {name}\n{}", shown(study)).unwrap();
    }
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens/report.txt"));
    if std::env::var_os("STAPO_WRITE_GOLDENS").is_some() {
        std::fs::write(path, &found).unwrap();
    }
    let golden = std::fs::read_to_string(path).unwrap();
    for (n, (found, expected)) in found.lines().zip(golden.lines()).enumerate() {
        assert_eq!(found, expected, "line {} of report.txt", n + 1);
    }
    assert_eq!(found.lines().count(), golden.lines().count());
}

/// One file for each table, and one with every number of every step.
#[test]
fn tables_and_pictures_go_to_the_folders_that_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let study = study(StudyKind::Run, vec![("stapo", vec![invented("s/stapo-0", "stapo", 0, 0)])]);
    let contents = Contents::gather(&study).unwrap();
    write_csv(&at("csv"), &study, &contents).unwrap();
    for table in contents.tables() {
        assert_eq!(
            std::fs::read_to_string(at("csv").join(format!("{}.csv", table.name))).unwrap(),
            table.to_csv()
        );
    }
    let text = std::fs::read_to_string(at("csv/metrics.csv")).unwrap();
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split(',').collect()).collect();
    let column = |key: &str| rows[0].iter().position(|name| *name == key).unwrap();
    assert_eq!(
        (rows.len(), &rows[1][..3], &rows[12][..3]),
        (13, &["stapo", "0", "1"][..], &["stapo", "0", "12"][..])
    );
    assert_eq!(
        (rows[4][column("eval_accuracy")], rows[5][column("eval_accuracy")]),
        ("0.3572727272727273", "")
    );
    let (one, several) = (at("a.png"), at("a"));
    let choose = |path, figure: &str| Pictures::choose(path, figure, &study, &contents);
    let names =
        |pictures: &Pictures| pictures.figures.iter().map(|figure| figure.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&choose(&one, "entropy").unwrap()), ["entropy"]);
    let overview = names(&choose(&one, "overview").unwrap());
    assert!(overview.len() > 1 && overview.len() < contents.figures().count(), "{overview:?}");
    assert_eq!(names(&choose(&several, "overview").unwrap()).len(), contents.figures().count());
    let said = choose(&one, "none").err().unwrap().to_string();
    assert!(said.contains("--figure none: no such figure here\nhint: overview, "), "{said}");
    choose(&one, "entropy").unwrap().write().unwrap();
    assert!(tiny_skia::Pixmap::load_png(&one).unwrap().width() > 400);
}
