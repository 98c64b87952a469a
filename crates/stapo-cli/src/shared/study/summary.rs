//! The headline of a report: results with intervals, and paired tests over seeds.

use super::table::{RowKind, Table, text};
use super::{RunData, Study};
use crate::shared::chart::number;
use crate::shared::html::escape;
use stapo_core::record::catalogue::{ACCURACY, ENTROPY_MEAN, EVAL_ACCURACY, N_SILENCED};
use stapo_core::stats::{Estimate, LEVEL, entropy_stability, wilson};
use stapo_rl::lab::experiment::{ExperimentSummary, split_arm};

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

/// A share and its interval in percent; the interval ends at 0 and 100.
fn percent_shown(share: &Estimate) -> String {
    shown(&Estimate { interval: share.interval.map(|i| i.within(0.0, 1.0)), ..*share }, 100.0, 1)
}

/// One row per arm.
pub fn arms_table(study: &Study, summary: &ExperimentSummary) -> Table {
    let accuracy = format!("#{}, %", summary.measure.name());
    let titles = [
        "arm",
        accuracy.as_str(),
        "#seeds",
        "#mean height of its curve, %",
        "#entropy at the end, nats",
        "#entropy stability −max|ΔH|, nats",
        "#silenced share",
        "#seeds collapsed in entropy",
        "#in accuracy",
        "#in endings",
    ];
    let mut table = Table::new("arms", &titles);
    for arm in &summary.arms {
        let is_method = Some(split_arm(&arm.name).0) == study.method_name();
        let kind = if is_method { RowKind::Best } else { RowKind::Plain };
        table.push_as(
            kind,
            vec![
                text(&arm.name),
                text(percent_shown(&arm.accuracy)),
                text(arm.n_runs.to_string()),
                text(percent_shown(&arm.area)),
                text(shown(&arm.entropy_last, 1.0, 3)),
                text(shown(&arm.entropy_stability, 1.0, 3)),
                text(number(arm.silenced_share.value)),
                text(format!("{} of {}", arm.n_collapsed, arm.n_runs)),
                text(format!("{} of {}", arm.n_collapsed_accuracy, arm.n_runs)),
                text(format!("{} of {}", arm.n_collapsed_endings, arm.n_runs)),
            ],
        );
    }
    table
}

/// The method against each baseline, paired by seed, p values adjusted over the baselines (Holm). `None` without a
/// pair.
pub fn paired_table(summary: &ExperimentSummary) -> Option<Table> {
    if summary.arms.iter().all(|arm| arm.against.is_none()) {
        return None;
    }
    let titles = [
        "against",
        "#difference, points (95 % interval)",
        "reading",
        "#p (Holm)",
        "#p (permutation)",
        "#p (Wilcoxon)",
        "#seeds in both",
        "#smallest difference such seeds would find, points",
    ];
    let mut table = Table::new("paired", &titles);
    for arm in &summary.arms {
        let Some((paired, p)) = arm.against.as_ref().zip(arm.p_adjusted) else { continue };
        let points = |value: f64| format!("{:+.1}", 100.0 * value).replacen('-', "−", 1);
        let low = points(paired.interval.low);
        let high = points(paired.interval.high);
        let reading = reading(p, paired.difference, paired.n_questions);
        table.push(vec![
            text(&arm.name),
            text(format!("{} ({low} to {high})", points(paired.difference))),
            text(reading),
            text(number(p)),
            text(number(paired.p_permutation)),
            text(number(paired.p_wilcoxon)),
            text(paired.n_questions.to_string()),
            text(format!("{:.1}", 100.0 * paired.minimum_detectable_effect)),
        ]);
    }
    Some(table)
}

/// What an adjusted p value of a difference between seeds says.
fn reading(p: f64, difference: f64, n_seeds: usize) -> &'static str {
    // The smallest p value of a sign permutation over n seeds is 2 / 2^n; Holm's adjustment can only raise it.
    let least = 0.5f64.powi(n_seeds as i32 - 1);
    match (p < 0.05, difference > 0.0) {
        (true, true) => "better",
        (true, false) => "worse",
        (false, _) if least >= 0.05 => "too few seeds to say",
        (false, _) => "no detectable difference",
    }
}

/// What each arm spent until it had the accuracy at which one arm ended. `None` if the experiment compares no costs.
pub fn cost_table(summary: &ExperimentSummary) -> Option<Table> {
    let first = summary.arms.iter().find_map(|arm| arm.cost.as_ref())?;
    let target = format!("to {:.1} %", 100.0 * first.target_accuracy);
    let titles = [
        "arm".to_string(),
        "#responses".to_string(),
        "#seconds".to_string(),
        format!("#responses {target}"),
        format!("#seconds {target}"),
        format!("#held-out accuracy after {:.0} s, %", first.equal_seconds),
    ];
    let mut table = Table::new("costs", &titles.each_ref().map(String::as_str));
    let shown = |value: Option<f64>| text(value.map_or("never".to_string(), |value| format!("{value:.0}")));
    for arm in &summary.arms {
        let Some(cost) = &arm.cost else { continue };
        table.push(vec![
            text(&arm.name),
            shown(Some(cost.responses)),
            shown(Some(cost.seconds)),
            shown(cost.responses_to_target),
            shown(cost.seconds_to_target),
            text(format!("{:.1}", 100.0 * cost.accuracy_at_equal_seconds)),
        ]);
    }
    Some(table)
}

/// The headline numbers of one run, as cards.
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
            EVAL_ACCURACY.label.to_lowercase(),
            format!("{interval}, {n} problems"),
        ));
    }
    cards.push((
        format!("{:.1} → {}", 100.0 * first.accuracy, percent(last.accuracy)),
        ACCURACY.label.to_lowercase(),
        format!("first and last of {} steps", run.metrics.len()),
    ));
    let entropies: Vec<f64> = run.metrics.iter().map(|m| m.entropy_mean).collect();
    cards.push((
        format!("{} → {}", number(first.entropy_mean), number(last.entropy_mean)),
        format!("mean {}, nats per token", ENTROPY_MEAN.short),
        entropy_stability(&entropies)
            .map_or(String::new(), |s| format!("stability −max|ΔH| = {}", number(s).replacen('-', "−", 1))),
    ));
    let share = run.n_silenced() as f64 / run.n_tokens().max(1) as f64;
    cards.push((
        format!("{} of {}", run.n_silenced(), run.n_tokens()),
        N_SILENCED.label.to_lowercase(),
        format!("share {}, {} candidates", number(share), run.n_candidates()),
    ));
    let distance = run.metrics.iter().map(|m| m.exactness_max_abs).fold(0.0, f64::max);
    cards.push((
        number(distance),
        "max |logp − behavior_logp|, nats".to_string(),
        "0: rollout and training agree to the bit".to_string(),
    ));
    let card = |(value, name, note): &(String, String, String)| {
        format!(
            "<div class=\"card\"><b>{}</b><span>{}</span><span>{}</span></div>",
            escape(value),
            escape(name),
            escape(note.trim_start_matches(", "))
        )
    };
    format!("<div class=\"cards\">{}</div>", cards.iter().map(card).collect::<String>())
}

/// Wilson's interval of a held-out accuracy. It assumes independent samples, so it needs one sample per problem.
pub fn interval_of(run: &RunData, accuracy: f64) -> Option<(f64, f64)> {
    let evaluation = &run.plan.config.evaluation;
    (evaluation.samples == 1).then(|| wilson_of(accuracy, evaluation.problems)).flatten()
}

fn wilson_of(accuracy: f64, n: usize) -> Option<(f64, f64)> {
    let n_right = (accuracy * n as f64).round() as usize;
    let interval = wilson(n_right.min(n), n, LEVEL).ok()?;
    Some((interval.low, interval.high))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::shared::study::StudyKind;
    use crate::shared::study::tests::{metrics, run, study};
    use serde_json::json;

    /// Three arms whose steps sample 100 responses and take 10 s each. The method `a` ends at one half after two steps, `b` is
    /// slower, and `c` never comes so far.
    pub fn costly() -> Study {
        let arm = |folder: &str, accuracies: &[f64]| {
            let steps = (1..).zip(accuracies).map(|(step, accuracy)| {
                let rates = json!({"rollout": 1.0, "update": 100.0});
                let keys = json!({"eval_accuracy": accuracy, "n_responses": 100, "n_sampled": 0, "tokens_per_second": rates});
                metrics(step, &keys)
            });
            vec![run(folder, &[], steps.collect())]
        };
        let arms = vec![
            ("a", arm("s/a", &[0.25, 0.5])),
            ("b", arm("s/b", &[0.25, 0.375, 0.5, 0.625])),
            ("c", arm("s/c", &[0.1, 0.2])),
        ];
        Study { method: Some(0), reach: Some("a".into()), ..study(StudyKind::Experiment, arms) }
    }

    #[test]
    fn costs_have_a_table_where_an_experiment_compares_them() {
        let mut study = costly();
        let csv = cost_table(&study.summary().unwrap()).unwrap().to_csv();
        let lines: Vec<&str> = csv.lines().collect();
        assert!(lines[0].contains("responses to 50.0 %") && lines[0].contains("after 20 s"), "{csv}");
        assert_eq!(lines[1..], ["a,200,20,200,20,50.0", "b,400,40,300,30,37.5", "c,200,20,never,never,20.0"]);
        study.reach = None;
        assert!(cost_table(&study.summary().unwrap()).is_none());
    }

    /// Of five seeds the smallest p value is 0.0625, of six 0.03125.
    #[test]
    fn few_seeds_say_nothing() {
        assert_eq!([reading(0.04, 0.1, 6), reading(0.04, -0.1, 6)], ["better", "worse"]);
        assert_eq!(reading(0.05, 0.1, 6), "no detectable difference");
        assert_eq!(reading(0.0625, 0.1, 5), "too few seeds to say");
    }

    /// Five of ten: 0.2366 to 0.7634 (Wilson 1927).
    #[test]
    fn a_held_out_accuracy_has_wilsons_interval() {
        let (low, high) = wilson_of(0.5, 10).unwrap();
        assert!((low - 0.2366).abs() < 1e-4 && (high - 0.7634).abs() < 1e-4, "{low} {high}");
        assert_eq!(wilson_of(1.2, 10), wilson_of(1.0, 10));
        assert_eq!(wilson_of(0.5, 0), None);
    }
}
