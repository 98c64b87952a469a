//! The token viewer: the numbers of every token as JSON, and a script that draws, filters and evaluates what-if
//! settings.

use crate::shared::html::{escape, script_json};
use crate::shared::page::{self, THEME_BUTTON};
use crate::shared::run_folder;
use anyhow::{Result, bail};
use serde::Serialize;
use stapo_core::objective::{
    Mask, MaskKind, MaskSignals, QuantileOver, Select, Threshold, influence, logp_below,
};
use stapo_core::record::{Metrics, ResponseRecord};
use stapo_core::rollout::{Finish, Verdict};
use stapo_core::{EpisodeTurn, JudgeOpinion, ProgramRun, ToolCall};
use stapo_rl::Plan;
use stapo_rl::run::{Run, part_files, responses_of_file, step_of};
use std::path::Path;

pub const STYLE: &str = include_str!("viewer/viewer.css");
pub const SCRIPT: &str = concat!(include_str!("viewer/s2t.js"), include_str!("viewer/viewer.js"));
/// The controls and the place of the responses, as markup.
pub const BODY: &str = include_str!("viewer/viewer.html");

/// The recorded responses of one step, with the step's metrics and the run's plan.
pub struct Inspected {
    pub run: String,
    pub plan: Plan,
    pub step: u64,
    pub metrics: Option<Metrics>,
    pub responses: Vec<ResponseRecord>,
}

impl Inspected {
    /// The responses of a step; by default of the last step with a silenced token, else of the last with responses.
    pub fn open(run: &Path, step: Option<u64>) -> Result<Self> {
        let plan = run_folder::plan(run)?;
        let files = part_files(run, "rollouts")?;
        let steps: Vec<u64> = files.iter().filter_map(|path| step_of(path)).collect();
        let Some(&last) = steps.last() else {
            bail!(
                "run {}: no recorded responses\nhint: a run records them in step 1 and every record.responses_every_steps",
                run.display()
            );
        };
        let step = match step {
            Some(step) => step,
            None => last_silenced(run, &steps)?.unwrap_or(last),
        };
        let Some(path) = files.iter().find(|path| step_of(path) == Some(step)) else {
            let known: Vec<String> = steps.iter().map(u64::to_string).collect();
            bail!("--step {step}: no responses are recorded for it\nhint: steps {}", known.join(", "));
        };
        let responses = responses_of_file(path, &plan.objective)?;
        let metrics: Vec<Metrics> = Run::read_metrics(run)?;
        Ok(Inspected {
            run: run.file_name().map_or(plan.config.name.clone(), |name| name.to_string_lossy().into_owned()),
            plan,
            step,
            metrics: metrics.into_iter().find(|m| m.step == step),
            responses,
        })
    }
}

/// The last of the steps that silenced a token; a run writes a file of `tokens/` for such steps only.
fn last_silenced(run: &Path, steps: &[u64]) -> Result<Option<u64>> {
    let silenced = part_files(run, "tokens")?;
    Ok(silenced.iter().filter_map(|path| step_of(path)).rfind(|step| steps.contains(step)))
}

/// What the script of the viewer reads.
#[derive(Serialize)]
pub struct Recorded<'a> {
    step: u64,
    n_step_tokens: Option<usize>,
    settings: S2tSettings,
    /// The slider's values as (τp, ln τp), with the logarithms of `stapo-core`.
    tau_p: Vec<(f64, f64)>,
    responses: Vec<Shown<'a>>,
}

/// The settings of the run's first S2T mask, or the published settings if the run has none.
#[derive(Serialize)]
struct S2tSettings {
    tau_p: f64,
    q: f64,
    /// The kind of threshold in force.
    threshold: &'static str,
    /// The values of every kind of threshold: the run's own for the kind in force, else the defaults.
    thresholds: Vec<Threshold>,
    /// The constant C of the threshold `influence`.
    curvature: f64,
    select: Select,
    quantile_over: QuantileOver,
    /// False if the run has no S2T mask.
    in_force: bool,
    /// The masks that a what-if leaves out.
    other_masks: Vec<MaskKind>,
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
    /// One per token; empty if all tokens have the response's advantage.
    advantages: &'a [f64],
    finish: Finish,
    update: usize,
    tau_h: Option<f64>,
    text: &'a [String],
    /// Texts that the policy was given between its tokens, each with the number of tokens before it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    given: Vec<(usize, &'a str)>,
    logp: &'a [f64],
    entropy: &'a [f64],
    ratio: &'a [f64],
    norm: Option<Vec<f64>>,
    influence: Vec<f64>,
    silenced_by: &'a [Option<MaskKind>],
    clipped: &'a [bool],
    is_candidate: &'a [bool],
    alternatives: Vec<Vec<(&'a str, f64)>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    program: Option<&'a ProgramRun>,
    #[serde(skip_serializing_if = "Option::is_none")]
    judge: Option<String>,
    /// The turns of an episode. What follows a turn, but the last, is the entry of `given` of the same index.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    turns: Vec<ShownTurn<'a>>,
}

/// What the environment did about a turn.
#[derive(Serialize)]
struct ShownTurn<'a> {
    calls: &'a [ToolCall],
    reward: f64,
    /// The discounted rewards from the turn on.
    #[serde(rename = "return")]
    later_reward: Option<f64>,
    n_cut: usize,
}

pub fn recorded(inspected: &Inspected) -> Recorded<'_> {
    let settings = settings(inspected);
    Recorded {
        step: inspected.step,
        n_step_tokens: inspected.metrics.as_ref().map(|m| m.n_tokens),
        tau_p: slider(settings.tau_p),
        settings,
        responses: inspected.responses.iter().map(shown).collect(),
    }
}

/// The viewer as a separate page.
pub fn to_html(inspected: &Inspected) -> String {
    let title = format!("{}, step {}", inspected.run, inspected.step);
    let n = inspected.responses.len();
    let body = format!(
        "<header><h1>{}</h1><p>STAPO token viewer · {n} recorded responses</p>{THEME_BUTTON}</header>\n<main id=\"viewer\">{BODY}</main>\n\
         <script type=\"application/json\" id=\"recorded\">{}</script>",
        escape(&title),
        script_json(&recorded(inspected))
    );
    let start = "stapo.viewer(document.getElementById('viewer'), JSON.parse(document.getElementById('recorded').textContent));\n";
    page::page(&format!("{title} – STAPO tokens"), STYLE, &body, &format!("{SCRIPT}{start}"))
}

fn settings(inspected: &Inspected) -> S2tSettings {
    let objective = &inspected.plan.objective;
    let is_s2t = |mask: &&Mask| mask.kind() == MaskKind::Spurious;
    let first = objective.masks.iter().position(|mask| is_s2t(&mask));
    let mask = first.map_or_else(Mask::spurious, |idx| objective.masks[idx]);
    let Mask::Spurious { tau_p, threshold, q, select, quantile_over, .. } = mask else {
        unreachable!("the masks of this kind are S2T")
    };
    let others = objective.masks.iter().enumerate().filter(|(idx, _)| Some(*idx) != first);
    let with_values =
        |default: Threshold| if default.kind() == threshold.kind() { threshold } else { default };
    S2tSettings {
        tau_p,
        q,
        threshold: threshold.kind(),
        thresholds: Threshold::defaults().map(with_values).to_vec(),
        curvature: threshold.curvature(),
        select,
        quantile_over,
        in_force: first.is_some(),
        other_masks: others.map(|(_, mask)| mask.kind()).collect(),
        signals: objective.mask_signals,
    }
}

/// Round values from 1e-5 to 0.8, and the value of the run.
fn slider(of_run: f64) -> Vec<(f64, f64)> {
    let rounds = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0];
    let decades = ["e-5", "e-4", "e-3", "e-2", "e-1"];
    let mut values: Vec<f64> = decades
        .iter()
        .flat_map(|decade| rounds.iter().filter_map(move |round| format!("{round}{decade}").parse().ok()))
        .chain([of_run])
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
        advantages: &tokens.advantage,
        finish: response.finish,
        update: response.update_idx,
        tau_h: response.tau_h,
        text: &tokens.text,
        given: response.given.iter().map(|given| (given.after, given.text.as_str())).collect(),
        logp: &tokens.logp,
        entropy: &tokens.entropy,
        ratio: &tokens.ratio,
        norm: (0..n).map(|t| gradient_norm(response, t)).collect(),
        influence: tokens
            .logp
            .iter()
            .zip(&tokens.collision)
            .map(|(logp, sum)| influence(*logp, *sum))
            .collect(),
        silenced_by: &tokens.silenced_by,
        clipped: &tokens.clipped,
        is_candidate: &tokens.is_candidate,
        alternatives: tokens
            .alternatives
            .iter()
            .map(|list| list.iter().map(|a| (a.text.as_str(), a.logp)).collect())
            .collect(),
        program: response.program.as_deref(),
        judge: response.judge.as_deref().map(opinion),
        turns: response.episode.iter().flat_map(|episode| &episode.turns).map(shown_turn).collect(),
    }
}

/// The judgement of a judge or a reward model on a response, in addition to the rule's.
pub fn opinion(opinion: &JudgeOpinion) -> String {
    let word = |verdict: Verdict| serde_json::to_value(verdict).unwrap_or_default();
    let word = |verdict| word(verdict).as_str().unwrap_or("?").replace('_', " ");
    let said = match (opinion.score, opinion.verdict, opinion.margin) {
        (Some(score), ..) => format!("reward model: score {score:+.3}"),
        (None, Some(verdict), Some(margin)) => format!("judge: {} by {margin:+.3} nats", word(verdict)),
        (None, Some(verdict), None) => format!("judge: {}", word(verdict)),
        (None, None, _) => "judge or reward model: not asked".to_string(),
    };
    let text = opinion.text.as_ref().map_or(String::new(), |text| format!("; it wrote {text:?}"));
    format!("{said}; rule: {}{text}", word(opinion.rule))
}

fn shown_turn(turn: &EpisodeTurn) -> ShownTurn<'_> {
    let EpisodeTurn { calls, reward, n_cut, returns, .. } = turn;
    ShownTurn { calls, reward: *reward, later_reward: returns.first().copied(), n_cut: *n_cut }
}

/// Gradient norm of a token at the logits, computed as if no mask silenced it; `None` if the run recorded no weights.
pub fn gradient_norm(response: &ResponseRecord, t: usize) -> Option<f64> {
    let tokens = &response.tokens;
    let weight = *tokens.weight.get(t)?;
    let squared = stapo_core::diagnostics::theory::gradient_norm_squared(
        tokens.logp[t].exp(),
        tokens.collision[t],
        weight,
    );
    Some(squared.sqrt())
}
