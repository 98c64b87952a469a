//! Several runs compared: arms with their seeds, means, and the statistics of `stapo report`.

use super::decimate::{Curve, decimate, decimate_means};
use super::http::{Refusal, Request, Response};
use super::question::{is_too_much, named_runs, number_or, one_run, unreadable};
use super::site::{Site, lock};
use crate::shared::chart::{ANY, Bounds, mean_over_seeds};
use crate::shared::study::differences::{self, are_seeds};
use crate::shared::study::table::{Cell, Table, text};
use crate::shared::study::{Study, benchmarks, summary};
use anyhow::Result as AnyResult;
use serde::Serialize;
use serde_json::{Value, json};
use stapo_core::record::catalogue::Metric;
use stapo_rl::lab::evaluation::EvalFolder;
use stapo_rl::lab::evaluation::compare;
use stapo_rl::run::columns::{Columns, XAxis};
use stapo_rl::run::part_files;
use stapo_rl::untrusted::read_text;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Statistics read whole runs; more runs, or more bytes, are drawn without them.
const MAX_RUNS_FOR_STATISTICS: usize = 64;
const MAX_BYTES: u64 = 512 << 20;

/// Runs that differ in nothing but their seed, or that an experiment calls one arm.
#[derive(Debug, Serialize)]
struct Arm {
    name: String,
    runs: Vec<String>,
}

/// The runs that a request names one by one or by their experiment.
fn runs_of(site: &Site, request: &Request) -> Result<Vec<(String, PathBuf)>, Refusal> {
    let Some(experiment) = request.value("experiment") else { return named_runs(site, request) };
    let index = site.index();
    let rows = index.rows().into_iter().filter(|row| row.experiment.as_deref() == Some(experiment));
    let found: Vec<_> = rows.filter_map(|row| Some((row.id.clone(), index.folder(&row.id)?))).collect();
    if found.is_empty() {
        return Err(Refusal::new(404, format!("experiment {experiment:?}: no runs here")));
    }
    Ok(found)
}

fn arms_of(site: &Site, runs: &[(String, PathBuf)]) -> Vec<Arm> {
    let named: BTreeMap<String, (String, String)> = {
        let index = site.index();
        let rows = index.rows().into_iter().filter(|row| runs.iter().any(|(id, _)| *id == row.id));
        rows.filter_map(|row| Some((row.id.clone(), (row.experiment.clone()?, row.arm.clone()?)))).collect()
    };
    // Arms of two experiments may have the same name.
    let experiments: BTreeSet<&String> = named.values().map(|(experiment, _)| experiment).collect();
    let is_mixed = experiments.len() > 1;
    let name_of = |(experiment, arm): &(String, String)| {
        if is_mixed { format!("{experiment}/{arm}") } else { arm.clone() }
    };
    let mut arms: Vec<(Arm, String)> = Vec::new();
    for (id, folder) in runs {
        let plan = read_text(&folder.join("plan.toml")).unwrap_or_default();
        let known_arm = named.get(id).map(name_of);
        let twin = arms.iter_mut().find(|(arm, other)| match &known_arm {
            Some(name) => arm.name == *name,
            None => !plan.is_empty() && are_seeds(other, &plan),
        });
        if let Some((arm, _)) = twin {
            arm.runs.push(id.clone());
        } else {
            let name = known_arm.unwrap_or_else(|| id.clone());
            arms.push((Arm { name, runs: vec![id.clone()] }, plan));
        }
    }
    arms.into_iter().map(|(arm, _)| arm).collect()
}

/// The arms of the runs, the keys of their metrics, and what the statistics say.
pub fn overview(site: &Site, request: &Request) -> Result<Response, Refusal> {
    let runs = runs_of(site, request)?;
    let arms = arms_of(site, &runs);
    let mut keys = BTreeSet::new();
    for (id, _) in &runs {
        if let Some(open) = site.open(id) {
            keys.extend(lock(&open).columns.keys().map(String::from));
        }
    }
    let folders: Vec<PathBuf> =
        match request.value("experiment").and_then(|id| site.index().experiment_folder(id)) {
            Some(folder) => vec![folder],
            None => runs.iter().map(|(_, folder)| folder.clone()).collect(),
        };
    let statistics = if runs.len() > MAX_RUNS_FOR_STATISTICS {
        Err(format!("more than {MAX_RUNS_FOR_STATISTICS} runs: statistics are left to `stapo report`"))
    } else if n_bytes(runs.iter().map(|(_, folder)| folder), &["", "tokens", "explored", "eval"]) > MAX_BYTES
    {
        Err("records of more than 512 MiB: statistics are left to `stapo report`".to_string())
    } else {
        tables(&folders).map_err(|error| format!("{error:#}"))
    };
    let (tables, problem) =
        statistics.map_or_else(|problem| (Vec::new(), Some(problem)), |tables| (tables, None));
    Ok(Response::json(&json!({"arms": arms, "keys": keys, "tables": tables, "problem": problem})))
}

/// The tables of a report that compare arms.
fn tables(folders: &[PathBuf]) -> AnyResult<Vec<Value>> {
    let study = Study::open_all(folders)?;
    let mut found = Vec::new();
    if study.runs().all(|(_, run)| !run.metrics.is_empty()) {
        let summary = study.summary()?;
        found.push(shown(
            "Results: means over seeds, with 95 % intervals",
            &summary::arms_table(&study, &summary),
        ));
        found.extend(summary::paired_table(&summary).map(|table| shown("Paired by seed", &table)));
        found.extend(summary::cost_table(&summary).map(|table| shown("Cost", &table)));
    }
    found.extend(differences::table(&study).map(|table| shown("What differs", &table)));
    let scores = benchmarks::scores(&study)?;
    if !scores.is_empty() {
        found.push(shown("Benchmarks", &benchmarks::table(&study, &scores)));
    }
    if let [a, b] = study.arms.as_slice() {
        let evals = |runs: &[crate::shared::study::RunData]| {
            runs.iter().flat_map(|run| run.evals.clone()).collect::<Vec<_>>()
        };
        let compared = compare(&evals(&a.runs), &evals(&b.runs))?;
        if !compared.is_empty() {
            found
                .push(shown(&format!("{} minus {}, paired by question", b.name, a.name), &paired(&compared)));
        }
    }
    Ok(found)
}

fn paired(compared: &[stapo_rl::lab::evaluation::Compared]) -> Table {
    let titles = [
        "benchmark",
        "#difference, points (95 % interval)",
        "reading",
        "#p (Holm)",
        "#questions",
        "decoding",
    ];
    let mut table = Table::new("compared", &titles);
    for row in compared {
        let points = |value: f64| format!("{:+.1}", 100.0 * value).replacen('-', "−", 1);
        let interval = row.paired.interval;
        table.push(vec![
            text(&row.benchmark),
            text(format!(
                "{} ({} to {})",
                points(row.paired.difference),
                points(interval.low),
                points(interval.high)
            )),
            text(if row.is_detectable() { "detectable" } else { "no detectable difference" }),
            text(crate::shared::chart::number(row.p_adjusted)),
            text(row.paired.n_questions.to_string()),
            text(&row.decoding),
        ]);
    }
    table
}

/// A table as the page draws it.
pub fn shown(title: &str, table: &Table) -> Value {
    let head: Vec<Value> = table
        .head
        .iter()
        .map(|column| json!({"title": column.title, "is_number": column.is_number}))
        .collect();
    let rows: Vec<Vec<String>> =
        table.rows.iter().map(|row| row.cells.iter().map(Cell::to_plain).collect()).collect();
    json!({"title": title, "name": table.name, "head": head, "rows": rows})
}

/// One arm of one chart.
#[derive(Serialize)]
struct ArmCurves {
    name: String,
    /// The curve of each run, under its id.
    runs: BTreeMap<String, Curve>,
    /// The mean over the seeds, with its interval from four seeds on; empty for a lone run, and over axes on which the
    /// seeds share no x.
    mean: Curve,
}

/// The values that a key of the metrics can have; keys that the catalogue does not know can have any.
fn bounds_of(key: &str) -> Bounds {
    Metric::by_key(key).map_or(ANY, Metric::bounds)
}

/// The curves of every arm for each key.
pub fn curves(site: &Site, request: &Request) -> Result<Response, Refusal> {
    let runs = runs_of(site, request)?;
    let arms = arms_of(site, &runs);
    let axis = XAxis::parse(request.value("x").unwrap_or("step"))
        .ok_or_else(|| Refusal::new(400, "x: no such axis"))?;
    let n_most = number_or(request, "points", 400)?.clamp(2, 2000);
    let (from, to) =
        (number_or(request, "from", f64::NEG_INFINITY)?, number_or(request, "to", f64::INFINITY)?);
    let points = |columns: &Columns, key: &str| -> Vec<stapo_rl::run::columns::Point> {
        columns.points(key, axis).into_iter().filter(|p| p.x >= from && p.x <= to).collect()
    };
    let mut answer: BTreeMap<String, Vec<ArmCurves>> = BTreeMap::new();
    for key in request.values("key").take(64) {
        let mut of_key = Vec::new();
        for arm in &arms {
            let mut curves = BTreeMap::new();
            let mut seeds = Vec::new();
            for id in &arm.runs {
                let Some(open) = site.open(id) else { continue };
                let found = points(&lock(&open).columns, key);
                curves.insert(id.clone(), decimate(&found, n_most));
                seeds.push(found.iter().map(|p| (p.x, p.y)).collect::<Vec<_>>());
            }
            seeds.retain(|seed| !seed.is_empty());
            let mean = if seeds.len() > 1 { mean_over_seeds(&seeds, &bounds_of(key)) } else { Vec::new() };
            of_key.push(ArmCurves {
                name: arm.name.clone(),
                runs: curves,
                mean: decimate_means(&mean, n_most),
            });
        }
        answer.insert(key.to_string(), of_key);
    }
    Ok(Response::json(&answer))
}

/// Bytes of the JSON lines in some parts of runs, one folder deep.
fn n_bytes<'a>(runs: impl Iterator<Item = &'a PathBuf>, parts: &[&str]) -> u64 {
    let files = |folder: &PathBuf| {
        let inner =
            std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok).map(|entry| entry.path());
        let inner = inner.filter(|path| folder.ends_with("eval") && path.is_dir());
        let folders: Vec<PathBuf> = inner.chain([folder.clone()]).collect();
        folders.into_iter().flat_map(|folder| part_files(&folder, "").unwrap_or_default()).collect::<Vec<_>>()
    };
    let folders = runs.flat_map(|run| parts.iter().map(move |part| run.join(part)));
    let sizes =
        folders.flat_map(|folder| files(&folder)).map(|path| path.symlink_metadata().map_or(0, |m| m.len()));
    sizes.sum()
}

/// The evaluations of one run.
pub fn evaluations(site: &Site, request: &Request) -> Result<Response, Refusal> {
    let id = request.value("run").unwrap_or_default();
    let folder = one_run(site, request)?;
    if is_too_much(n_bytes([&folder].into_iter(), &["eval"]), MAX_BYTES) {
        return Err(Refusal::new(413, "evaluations of more than 512 MiB: `stapo compare` reads them"));
    }
    let elsewhere = site.index().evaluations(id).to_vec();
    let read = |path: &PathBuf| EvalFolder::read_samples(path).map_err(|error| unreadable(&error.into()));
    let mut records = crate::shared::study::evals(&folder).map_err(|error| unreadable(&error))?;
    for path in &elsewhere {
        records.extend(read(path)?);
    }
    let answer = super::evaluations::of_run(id, &records).map_err(|error| unreadable(&error))?;
    Ok(Response::json(&answer))
}

#[cfg(test)]
mod tests {
    use super::super::http::tests::request;
    use super::super::index::Look;
    use super::*;
    use std::fs;
    use std::path::Path;

    fn add_run(root: &Path, name: &str, plan: &str) {
        fs::create_dir_all(root.join(name)).unwrap();
        fs::write(root.join(name).join("plan.toml"), plan).unwrap();
    }

    /// Two experiments with an arm of the same name, and runs by themselves, of which two are seeds of each other.
    fn site(root: &Path) -> Site {
        for name in ["e", "f"] {
            add_run(root, &format!("{name}/s-0"), "seed = 0\nsteps = 1\n");
            let arms = json!([{"name": "s", "seed": 0, "run": "s-0", "settings": []}]);
            let experiment = json!({"schema": 1, "name": name, "method": null, "arms": arms});
            fs::write(root.join(name).join("experiment.json"), experiment.to_string()).unwrap();
        }
        for (name, seed, steps) in [("l-0", 0, 1), ("l-1", 1, 1), ("m", 0, 2)] {
            add_run(root, name, &format!("seed = {seed}\nsteps = {steps}\n"));
        }
        let site = Site::new(root, "here".into());
        site.refresh(Look::Everything);
        site
    }

    #[test]
    fn an_arm_has_the_name_of_its_experiment_where_two_are_compared() {
        let folder = tempfile::tempdir().unwrap();
        let site = site(folder.path());
        let arms = |query: &str| {
            let request = request(&format!("GET /api/compare?{query} HTTP/1.1\r\nHost: h"));
            let runs = runs_of(&site, &request).map_err(|refusal| refusal.status)?;
            let arms = arms_of(&site, &runs).into_iter();
            Ok(arms.map(|arm| format!("{}: {}", arm.name, arm.runs.join(" "))).collect::<Vec<_>>())
        };
        assert_eq!(arms("experiment=e"), Ok(vec!["s: e/s-0".to_string()]));
        let both = ["e/s: e/s-0", "f/s: f/s-0"].map(String::from).to_vec();
        assert_eq!(arms("run=e/s-0&run=f/s-0"), Ok(both));
        let lone = ["l-0: l-0 l-1", "m: m"].map(String::from).to_vec();
        assert_eq!(arms("run=l-0&run=m&run=l-1"), Ok(lone));
        assert_eq!([arms("experiment=g"), arms("run=g"), arms("")], [Err(404), Err(404), Err(400)]);
    }

    #[test]
    fn the_bytes_of_records_count_those_of_evaluations_inside_too() {
        let folder = tempfile::tempdir().unwrap();
        for (file, n) in [
            ("metrics.jsonl", 100),
            ("tokens/step-000001.jsonl", 20),
            ("eval/step-000001.jsonl", 3),
            ("eval/later/samples.jsonl", 4),
            ("rollouts/step-000001.jsonl", 1000),
            ("tokens/inner/step-000001.jsonl", 5000),
        ] {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x".repeat(n)).unwrap();
        }
        let run = folder.path().to_owned();
        assert_eq!(n_bytes([&run].into_iter(), &["", "tokens", "explored", "eval"]), 127);
        assert_eq!(n_bytes([&run, &run].into_iter(), &["eval"]), 14);
    }

    /// The mirror image of a comparison whose numbers a test of the served page has.
    #[test]
    fn a_loss_has_a_minus_in_the_difference_and_at_both_ends() {
        let record = |question: usize, n_right: usize| -> stapo_core::record::EvalRecord {
            let verdict = if question < n_right { "right" } else { "wrong" };
            let record = json!({"schema": 1, "benchmark": "b", "decoding": "greedy", "problem_id": question.to_string(),
                "sample_idx": 0, "text": "", "n_tokens": 3, "finish": {"kind": "length_limit"}, "answer": null,
                "verdict": verdict, "reason": ""});
            serde_json::from_value(record).unwrap()
        };
        let [all, one] = [6, 1].map(|n_right| (0..6).map(|idx| record(idx, n_right)).collect::<Vec<_>>());
        let table = shown("", &paired(&compare(&all, &one).unwrap()));
        let cells = ["b", "−83.3 (−126.2 to −40.5)", "no detectable difference", "0.0625", "6", "greedy"];
        assert_eq!(table["rows"], json!([cells]));
    }
}
