//! The viewer page: the numbers of every token as JSON, and a script that draws, filters and evaluates what-if
//! settings.

use super::{Inspected, gradient_norm};
use crate::shared::html::{escape, script_json};
use crate::shared::page::{self, THEME_BUTTON};
use serde::Serialize;
use stapo_core::objective::{Mask, MaskKind, MaskSignals, QuantileOver, Select, logp_below};
use stapo_core::record::ResponseRecord;
use stapo_core::rollout::{Finish, Verdict};

const STYLE: &str = include_str!("viewer.css");
const SCRIPT: &str = include_str!("viewer.js");
const BODY: &str = include_str!("viewer.html");

#[derive(Serialize)]
struct Page<'a> {
    step: u64,
    n_step_tokens: Option<usize>,
    settings: S2tSettings,
    /// The slider's values as (τp, ln τp), with the logarithms of `stapo-core`.
    tau_p: Vec<(f64, f64)>,
    responses: Vec<Shown<'a>>,
}

/// The settings of the run's S2T mask, or the published settings if the run has none.
#[derive(Serialize)]
struct S2tSettings {
    tau_p: f64,
    q: f64,
    select: Select,
    over: QuantileOver,
    /// False if the run has no S2T mask.
    in_force: bool,
    signals: MaskSignals,
}

#[derive(Serialize)]
struct Shown<'a> {
    problem: &'a str,
    sample: usize,
    prompt: &'a str,
    reference: &'a str,
    verdict: Verdict,
    reward: f64,
    advantage: f64,
    finish: Finish,
    update: usize,
    tau_h: Option<f64>,
    text: &'a [String],
    logp: &'a [f64],
    entropy: &'a [f64],
    ratio: &'a [f64],
    norm: Option<Vec<f64>>,
    silenced_by: &'a [Option<MaskKind>],
    clipped: &'a [bool],
    is_candidate: &'a [bool],
    alternatives: Vec<Vec<(&'a str, f64)>>,
}

pub fn to_html(inspected: &Inspected) -> String {
    let settings = settings(inspected);
    let page = Page {
        step: inspected.step,
        n_step_tokens: inspected.metrics.as_ref().map(|m| m.n_tokens),
        tau_p: slider(settings.tau_p),
        settings,
        responses: inspected.responses.iter().map(shown).collect(),
    };
    let title = format!("{}, step {}", inspected.run, inspected.step);
    let n = inspected.responses.len();
    let body = format!(
        "<header><h1>{}</h1><p>STAPO token viewer · {n} recorded responses</p>{THEME_BUTTON}</header>\n{BODY}\n\
         <script type=\"application/json\" id=\"recorded\">{}</script>",
        escape(&title),
        script_json(&page)
    );
    page::page(&format!("{title} – STAPO tokens"), STYLE, &body, SCRIPT)
}

fn settings(inspected: &Inspected) -> S2tSettings {
    let objective = &inspected.plan.objective;
    let own = objective.masks.iter().find_map(s2t);
    let published = || s2t(&Mask::spurious()).expect("the published mask is S2T");
    let (tau_p, q, select, over) = own.unwrap_or_else(published);
    S2tSettings { tau_p, q, select, over, in_force: own.is_some(), signals: objective.mask_signals }
}

fn s2t(mask: &Mask) -> Option<(f64, f64, Select, QuantileOver)> {
    match *mask {
        Mask::Spurious { tau_p, q, select, quantile_over, .. } => Some((tau_p, q, select, quantile_over)),
        _ => None,
    }
}

/// Round values from 1e-5 to 0.8, and the run's own value.
fn slider(own: f64) -> Vec<(f64, f64)> {
    let rounds = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0];
    let decades = ["e-5", "e-4", "e-3", "e-2", "e-1"];
    let mut values: Vec<f64> = decades
        .iter()
        .flat_map(|decade| rounds.iter().filter_map(move |round| format!("{round}{decade}").parse().ok()))
        .chain([own])
        .collect();
    values.sort_by(f64::total_cmp);
    values.dedup();
    values.into_iter().map(|tau_p| (tau_p, logp_below(tau_p))).collect()
}

fn shown(response: &ResponseRecord) -> Shown<'_> {
    let tokens = &response.tokens;
    let n = tokens.id.len();
    Shown {
        problem: &response.problem_id,
        sample: response.sample_idx,
        prompt: &response.prompt,
        reference: &response.reference,
        verdict: response.verdict,
        reward: response.reward,
        advantage: response.advantage,
        finish: response.finish,
        update: response.update_idx,
        tau_h: response.tau_h,
        text: &tokens.text,
        logp: &tokens.logp,
        entropy: &tokens.entropy,
        ratio: &tokens.ratio,
        norm: (0..n).map(|t| gradient_norm(response, t)).collect(),
        silenced_by: &tokens.silenced_by,
        clipped: &tokens.clipped,
        is_candidate: &tokens.is_candidate,
        alternatives: tokens
            .alternatives
            .iter()
            .map(|list| list.iter().map(|a| (a.text.as_str(), a.logp)).collect())
            .collect(),
    }
}
