//! The top of a report: what came out, with intervals and paired tests over seeds.

use super::study::{ArmData, RunData, Study};
use super::table::{RowKind, Table, text};
use crate::shared::chart::number;
use crate::shared::page::escape;
use anyhow::Result;
use stapo_core::stats::{
    AgainstArm, Estimate, LEVEL, Resampling, area_under_curve, compare_by_seed, entropy_stability,
    mean_estimate, wilson,
};

/// Whether results are held-out accuracies or, where a run has none, those of its last steps of training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    HeldOut,
    Training,
}

impl Measure {
    pub fn of(study: &Study) -> Self {
        if study.runs().all(|(_, run)| run.metrics.iter().any(|m| m.eval_accuracy.is_some())) {
            Measure::HeldOut
        } else {
            Measure::Training
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Measure::HeldOut => "held-out accuracy",
            Measure::Training => "training accuracy",
        }
    }

    /// The curve of a run.
    pub fn curve(self, run: &RunData) -> Vec<(f64, f64)> {
        match self {
            Measure::HeldOut => run.held_out(),
            Measure::Training => run.metrics.iter().map(|m| (m.step as f64, m.accuracy)).collect(),
        }
    }

    /// Where a run ended: its last evaluation, or the mean of the last tenth of its steps.
    pub fn result(self, run: &RunData) -> f64 {
        let curve = self.curve(run);
        let n = match self {
            Measure::HeldOut => 1,
            Measure::Training => curve.len().div_ceil(10).max(1),
        };
        let last = &curve[curve.len().saturating_sub(n)..];
        last.iter().map(|(_, accuracy)| accuracy).sum::<f64>() / last.len().max(1) as f64
    }

    /// Mean height of the curve: its area by steps.
    fn mean_height(self, run: &RunData) -> Option<f64> {
        let (x, y): (Vec<f64>, Vec<f64>) = self.curve(run).into_iter().unzip();
        let span = x.last()? - x.first()?;
        let area = area_under_curve(&x, &y).ok()?;
        (span > 0.0).then(|| area / span)
    }
}

fn stability(run: &RunData) -> Option<f64> {
    let entropies: Vec<f64> = run.metrics.iter().map(|m| m.entropy_mean).collect();
    entropy_stability(&entropies).ok()
}

/// `55.9 (49.8 to 61.8)`.
fn shown(estimate: &Estimate, factor: f64, decimals: usize) -> String {
    let number = |value: f64| format!("{:.decimals$}", factor * value).replacen('-', "−", 1);
    match estimate.interval {
        Some(interval) => {
            format!("{} ({} to {})", number(estimate.value), number(interval.low), number(interval.high))
        }
        None => number(estimate.value),
    }
}

fn over_seeds(arm: &ArmData, of: impl Fn(&RunData) -> Option<f64>) -> Option<Estimate> {
    let values: Option<Vec<f64>> = arm.runs.iter().map(of).collect();
    mean_estimate(&values?).ok()
}

/// [`over_seeds`] of a share: its interval ends at 0 and 1.
fn share_over_seeds(arm: &ArmData, of: impl Fn(&RunData) -> Option<f64>) -> Option<Estimate> {
    let estimate = over_seeds(arm, of)?;
    Some(Estimate { interval: estimate.interval.map(|i| i.within(0.0, 1.0)), ..estimate })
}

/// One row per arm.
pub fn arms_table(study: &Study) -> Table {
    let measure = Measure::of(study);
    let accuracy = format!("#{}, %", measure.name());
    let titles = [
        "arm",
        "#seeds",
        accuracy.as_str(),
        "#mean height of its curve, %",
        "#entropy at the end, nats",
        "#entropy stability −max|ΔH|, nats",
        "#silenced share",
        "#collapsed seeds",
    ];
    let mut table = Table::new("arms", &titles);
    for (idx, arm) in study.arms.iter().enumerate() {
        let cell = |estimate: Option<Estimate>, factor: f64, decimals: usize| {
            text(estimate.map_or("–".to_string(), |e| shown(&e, factor, decimals)))
        };
        let silenced = over_seeds(arm, |run| Some(run.n_silenced() as f64 / run.n_tokens().max(1) as f64));
        let n_collapsed = arm.runs.iter().filter(|run| run.collapsed_at().is_some()).count();
        let kind = if study.method == Some(idx) { RowKind::Best } else { RowKind::Plain };
        table.push_as(
            kind,
            vec![
                text(&arm.name),
                text(arm.runs.len().to_string()),
                cell(
                    share_over_seeds(arm, |run| Some(measure.result(run)).filter(|r| r.is_finite())),
                    100.0,
                    1,
                ),
                cell(share_over_seeds(arm, |run| measure.mean_height(run)), 100.0, 1),
                cell(over_seeds(arm, |run| run.metrics.last().map(|m| m.entropy_mean)), 1.0, 3),
                cell(over_seeds(arm, stability), 1.0, 3),
                text(silenced.map_or("–".to_string(), |e| number(e.value))),
                text(format!("{n_collapsed} of {}", arm.runs.len())),
            ],
        );
    }
    table
}

/// The method against each baseline, paired by seed, p values adjusted over the baselines (Holm).
pub fn paired_table(study: &Study) -> Result<Option<Table>> {
    let Some(method) = study.method else { return Ok(None) };
    let measure = Measure::of(study);
    let results = |arm: &ArmData| -> Vec<(u64, f64)> {
        arm.runs.iter().map(|run| (run.seed, measure.result(run))).collect()
    };
    let others: Vec<&ArmData> =
        study.arms.iter().enumerate().filter(|(idx, _)| *idx != method).map(|(_, arm)| arm).collect();
    let arms: Vec<Vec<(u64, f64)>> = others.iter().map(|arm| results(arm)).collect();
    let compared = compare_by_seed(&results(&study.arms[method]), &arms, &Resampling::default())?;
    if compared.iter().all(Option::is_none) {
        return Ok(None);
    }
    let titles = [
        "against",
        "#seeds in both",
        "#difference, points (95 % interval)",
        "#p (permutation)",
        "#p (Holm)",
        "#smallest difference such seeds would find, points",
        "reading",
    ];
    let mut table = Table::new("paired", &titles);
    for (arm, against) in others.iter().zip(&compared) {
        let Some(AgainstArm { paired, p_adjusted: p }) = against else { continue };
        let points = |value: f64| format!("{:+.1}", 100.0 * value).replacen('-', "−", 1);
        let (low, high) = (points(paired.interval.low), points(paired.interval.high));
        // The smallest p that so many signs can give; adjusting it for the other baselines only raises it.
        let least = 0.5f64.powi(paired.n_questions as i32 - 1);
        let reading = match (*p < 0.05, paired.difference > 0.0) {
            (true, true) => "better",
            (true, false) => "worse",
            (false, _) if least >= 0.05 => "too few seeds to say",
            (false, _) => "no detectable difference",
        };
        table.push(vec![
            text(&arm.name),
            text(paired.n_questions.to_string()),
            text(format!("{} ({low} to {high})", points(paired.difference))),
            text(number(paired.p_permutation)),
            text(number(*p)),
            text(format!("{:.1}", 100.0 * paired.minimum_detectable_effect)),
            text(reading),
        ]);
    }
    Ok(Some(table))
}

/// The figures of one run, as cards.
pub fn cards(run: &RunData) -> String {
    let (Some(first), Some(last)) = (run.metrics.first(), run.metrics.last()) else { return String::new() };
    let percent = |value: f64| format!("{:.1} %", 100.0 * value);
    let mut cards = Vec::new();
    let held_out = run.held_out();
    if let Some((_, accuracy)) = held_out.last() {
        let start =
            if held_out.len() > 1 { format!("{:.1} → ", 100.0 * held_out[0].1) } else { String::new() };
        let interval = interval_of(run, *accuracy)
            .map_or(String::new(), |(low, high)| format!("95 %: {} to {}", percent(low), percent(high)));
        let n = run.plan.config.evaluation.problems;
        cards.push((
            format!("{start}{}", percent(*accuracy)),
            "held-out accuracy",
            format!("{interval}, {n} problems"),
        ));
    }
    cards.push((
        format!("{:.1} → {}", 100.0 * first.accuracy, percent(last.accuracy)),
        "training accuracy",
        format!("first and last of {} steps", run.metrics.len()),
    ));
    cards.push((
        format!("{} → {}", number(first.entropy_mean), number(last.entropy_mean)),
        "mean entropy, nats per token",
        stability(run)
            .map_or(String::new(), |s| format!("stability −max|ΔH| = {}", number(s).replacen('-', "−", 1))),
    ));
    let share = run.n_silenced() as f64 / run.n_tokens().max(1) as f64;
    cards.push((
        format!("{} of {}", run.n_silenced(), run.n_tokens()),
        "tokens silenced",
        format!("share {}, {} candidates", number(share), run.n_candidates()),
    ));
    let distance = run.metrics.iter().map(|m| m.exactness_max_abs).fold(0.0, f64::max);
    cards.push((
        number(distance),
        "max |logp − behavior_logp|, nats",
        "0: rollout and training agree to the bit".to_string(),
    ));
    let card = |(value, name, note): &(String, &str, String)| {
        format!(
            "<div class=\"card\"><b>{}</b><span>{}</span><span>{}</span></div>",
            escape(value),
            escape(name),
            escape(note.trim_start_matches(", "))
        )
    };
    format!("<div class=\"cards\">{}</div>", cards.iter().map(card).collect::<String>())
}

/// Wilson's interval of a held-out accuracy; it needs one sample per problem, since samples of a problem are alike.
pub fn interval_of(run: &RunData, accuracy: f64) -> Option<(f64, f64)> {
    let evaluation = &run.plan.config.evaluation;
    let n = evaluation.problems;
    if evaluation.samples != 1 || n == 0 {
        return None;
    }
    let n_right = (accuracy * n as f64).round() as usize;
    let interval = wilson(n_right.min(n), n, LEVEL).ok()?;
    Some((interval.low, interval.high))
}
