//! Answers in JSON. A run is named by its id in the list; every other name is refused, so no request leaves the folder.

use super::compare;
use super::decimate::{Curve, decimate};
use super::http::{Refusal, Request, Response};
use super::index::Look;
use super::question::{is_too_much, named_runs, number, number_or, one_run};
use super::responses;
use super::samples;
use super::site::{Site, lock};
use crate::shared::machine::free_disk;
use crate::shared::study::differences::differing_by_kind;
use serde::Serialize;
use serde_json::json;
use stapo_rl::run::columns::{Point, XAxis};
use stapo_rl::run::{part_files, step_of};
use stapo_rl::untrusted::read_text;
use std::collections::BTreeMap;
use std::path::Path;
use std::path::PathBuf;

/// Points per curve that a page may ask for.
const MAX_POINTS: usize = 4000;
/// Curves in one answer.
const MAX_CURVES: u64 = 4000;

pub fn answer(site: &Site, request: &Request) -> Result<Response, Refusal> {
    match request.path.as_str() {
        "/api/runs" => Ok(runs(site)),
        "/api/run" => run(site, request),
        "/api/series" => series(site, request),
        "/api/differences" => differences(site, request),
        "/api/responses" => responses::list(&one_run(site, request)?, number(request, "step")?),
        "/api/samples" => samples::answer(&one_run(site, request)?, request),
        "/api/tokens" => responses::tokens(&one_run(site, request)?, number(request, "step")?),
        "/api/compare" => compare::overview(site, request),
        "/api/compare/curves" => compare::curves(site, request),
        "/api/evaluations" => compare::evaluations(site, request),
        path => Err(Refusal::new(404, format!("{path}: nothing here"))),
    }
}

fn runs(site: &Site) -> Response {
    // While a page listens, the list is kept up to date.
    if site.n_listeners() == 0 {
        site.refresh(Look::Everything);
    }
    Response::json(&site.news(0))
}

/// What a page about one run needs besides curves.
fn run(site: &Site, request: &Request) -> Result<Response, Refusal> {
    let folder = one_run(site, request)?;
    let id = request.value("run").unwrap_or_default();
    let open = site.open(id).ok_or_else(|| Refusal::new(404, format!("run {id:?}: gone")))?;
    let open = lock(&open);
    let columns = &open.columns;
    let axes = ["step", "updates", "tokens", "hours"];
    let axes =
        axes.into_iter().filter(|name| XAxis::parse(name).is_some_and(|axis| columns.axis(axis).is_some()));
    let recorded = part_files(&folder, "rollouts").unwrap_or_default();
    let silenced = part_files(&folder, "tokens").unwrap_or_default();
    let steps = |files: &[PathBuf]| files.iter().filter_map(|path| step_of(path)).collect::<Vec<_>>();
    Ok(Response::json(&json!({
        "id": id,
        "generation": open.generation,
        "last_step": columns.steps().last(),
        "keys": columns.keys().collect::<Vec<_>>(),
        "axes": axes.collect::<Vec<_>>(),
        "problem": columns.problem,
        "events": site.index().events(id),
        "plan": read_text(&folder.join("plan.toml")).unwrap_or_default(),
        "evaluations": site.index().evaluations(id).iter().map(|path| name_of(path)).collect::<Vec<_>>(),
        "disk_free": free_disk(&folder),
        "silent_seconds": silent(&folder),
        "recorded_steps": steps(&recorded),
        "silenced_steps": steps(&silenced),
    })))
}

/// The last two parts of a path, as `evals/20260101`.
fn name_of(path: &Path) -> String {
    let parts: Vec<_> = path.components().rev().take(2).collect();
    parts.into_iter().rev().collect::<PathBuf>().display().to_string()
}

/// Seconds since the last step was written.
fn silent(run: &Path) -> Option<f64> {
    let written = run.join("metrics.jsonl").symlink_metadata().ok()?.modified().ok()?;
    written.elapsed().ok().map(|since| since.as_secs_f64())
}

/// The curves of one run.
#[derive(Serialize)]
struct RunCurves {
    id: String,
    generation: u64,
    last_step: Option<f64>,
    curves: BTreeMap<String, Curve>,
}

/// Curves of some keys of some runs over an axis: in the window from `from` to `to`, of the steps after `after`.
fn series(site: &Site, request: &Request) -> Result<Response, Refusal> {
    let axis = XAxis::parse(request.value("x").unwrap_or("step"))
        .ok_or_else(|| Refusal::new(400, "x: expected step, updates, tokens or hours"))?;
    let n_most = number_or(request, "points", 500)?.clamp(2, MAX_POINTS);
    let from = number_or(request, "from", f64::NEG_INFINITY)?;
    let to = number_or(request, "to", f64::INFINITY)?;
    let after = number_or(request, "after", f64::NEG_INFINITY)?;
    let keys: Vec<&str> = request.values("key").collect();
    let runs = named_runs(site, request)?;
    if is_too_much((keys.len() * runs.len()) as u64, MAX_CURVES) {
        return Err(Refusal::new(400, format!("more than {MAX_CURVES} curves at once")));
    }
    let mut answers = Vec::new();
    for (id, _) in runs {
        let Some(open) = site.open(&id) else { continue };
        let open = lock(&open);
        let curve = |key: &str| {
            let mut points: Vec<Point> = open.columns.points(key, axis);
            points.retain(|p| p.x >= from && p.x <= to && p.step > after);
            decimate(&points, n_most)
        };
        answers.push(RunCurves {
            generation: open.generation,
            last_step: open.columns.steps().last().copied(),
            curves: keys.iter().map(|key| ((*key).to_string(), curve(key))).collect(),
            id,
        });
    }
    Ok(Response::json(&json!({ "runs": answers })))
}

/// For each run the settings in which it differs from others of its kind, those that decide most first.
fn differences(site: &Site, request: &Request) -> Result<Response, Refusal> {
    let runs = named_runs(site, request)?;
    let plan = |folder: &Path| read_text(&folder.join("plan.toml")).unwrap_or_default();
    let plans: Vec<String> = runs.iter().map(|(_, folder)| plan(folder)).collect();
    let settings = differing_by_kind(&plans.iter().map(String::as_str).collect::<Vec<_>>());
    let found =
        runs.iter().zip(settings).map(|((id, _), settings)| json!({ "id": id, "settings": settings }));
    Ok(Response::json(&json!({ "runs": found.collect::<Vec<_>>() })))
}

#[cfg(test)]
mod tests {
    use super::super::http::tests::request;
    use super::*;
    use serde_json::Value;

    /// A run of two steps under an address, and the answer to a question about it.
    fn ask(query: &str) -> Result<Value, (u16, String)> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("a")).unwrap();
        std::fs::write(folder.path().join("a/plan.toml"), "steps = 2\n").unwrap();
        let lines = "{\"step\": 1, \"loss\": 2.0}\n{\"step\": 2, \"loss\": 4.0}\n";
        std::fs::write(folder.path().join("a/metrics.jsonl"), lines).unwrap();
        let site = Site::new(folder.path(), "here".into());
        site.refresh(Look::Everything);
        let asked = answer(&site, &request(&format!("GET /api/{query} HTTP/1.1\r\nHost: h")));
        let body = asked.map_err(|refusal| (refusal.status, refusal.reason))?.body;
        Ok(serde_json::from_slice(&body).unwrap())
    }

    #[test]
    fn as_many_curves_as_the_limit_are_answered_at_once() {
        let query = |n_runs: usize, n_keys: usize| {
            let names = ["&run=a".repeat(n_runs), "&key=loss".repeat(n_keys)].concat();
            ask(&format!("series?x=step{names}")).map(|found| found["runs"].as_array().unwrap().len())
        };
        assert_eq!(query(200, 20), Ok(200));
        assert_eq!(query(200, 21), Err((400, "more than 4000 curves at once".to_string())));
        assert_eq!(query(201, 1).unwrap_err().0, 400);
    }

    #[test]
    fn a_curve_has_the_points_in_its_window_after_a_step() {
        let points = |query: &str| {
            let found = ask(&format!("series?run=a&key=loss{query}")).unwrap();
            let curve = &found["runs"][0]["curves"]["loss"];
            assert_eq!(found["runs"][0]["last_step"], 2.0);
            (curve["x"].clone(), curve["y"].clone())
        };
        let all = (json!([1.0, 2.0]), json!([2.0, 4.0]));
        let [first, second] = [(json!([1.0]), json!([2.0])), (json!([2.0]), json!([4.0]))];
        assert_eq!([points(""), points("&from=1&to=2")], [all.clone(), all]);
        assert_eq!([points("&to=1"), points("&to=1.5")], [first.clone(), first]);
        assert_eq!([points("&from=2"), points("&after=1")], [second.clone(), second]);
        assert_eq!(points("&after=2").0, json!([]));
        assert_eq!(ask("series?run=a&key=loss&x=day").unwrap_err().0, 400);
        let run = ask("run?run=a").unwrap();
        assert_eq!(
            (&run["last_step"], &run["generation"], &run["id"]),
            (&json!(2.0), &json!(0), &json!("a"))
        );
        assert!(run["keys"].as_array().unwrap().contains(&json!("loss")) && run["plan"] == "steps = 2\n");
    }
}
