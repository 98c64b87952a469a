//! The files of the page, inside the program.

use super::http::Response;
use super::index::LISTED;
use crate::shared::html::script_json;
use crate::shared::{page, viewer};
use serde_json::{Value, json};
use stapo_core::record::catalogue::{ALL, Metric};
use std::sync::LazyLock;

const SCRIPT: &str = "text/javascript; charset=utf-8";

/// The scripts in the order in which the page loads them.
const SCRIPTS: [(&str, &str); 12] = [
    ("page.js", page::SCRIPT),
    ("viewer.js", viewer::SCRIPT),
    ("chart.js", include_str!("page/chart.js")),
    ("app.js", include_str!("page/app.js")),
    ("charts.js", include_str!("page/charts.js")),
    ("runs.js", include_str!("page/runs.js")),
    ("run.js", include_str!("page/run.js")),
    ("responses.js", include_str!("page/responses.js")),
    ("samples.js", include_str!("page/samples.js")),
    ("compare.js", include_str!("page/compare.js")),
    ("evaluations.js", include_str!("page/evaluations.js")),
    ("start.js", include_str!("page/start.js")),
];

static PAGE: LazyLock<String> = LazyLock::new(|| {
    let scripts = SCRIPTS.map(|(name, _)| format!("<script src=\"/{name}\" defer></script>\n")).concat();
    include_str!("page/page.html")
        .replace("{scripts}", &scripts)
        .replace("{theme}", page::THEME_BUTTON)
        .replace("{viewer}", viewer::BODY)
        .replace("{catalogue}", &script_json(&catalogue()))
});

/// What the page calls the numbers of a run, with the keys of those that the list of runs shows.
fn catalogue() -> Value {
    let metric = |metric: &Metric| {
        let (unit, scale) = metric.unit.shown();
        json!({"key": metric.key, "label": metric.label, "short": metric.short, "about": metric.about, "unit": unit,
            "scale": scale})
    };
    json!({"metrics": ALL.iter().map(metric).collect::<Vec<_>>(), "listed": LISTED.map(|metric| metric.key)})
}

static STYLE: LazyLock<String> =
    LazyLock::new(|| page::series_colors() + page::STYLE + viewer::STYLE + include_str!("page/serve.css"));

/// The file of a path.
pub fn find(path: &str) -> Option<Response> {
    match path {
        "/" => Some(Response::new("text/html; charset=utf-8", PAGE.as_bytes())),
        "/style.css" => Some(Response::new("text/css; charset=utf-8", STYLE.as_bytes())),
        _ => {
            let name = path.strip_prefix('/')?;
            let (_, text) = SCRIPTS.iter().find(|(known, _)| *known == name)?;
            Some(Response::new(SCRIPT, *text))
        }
    }
}
