//! How judge and rule agree over a run.

use crate::shared::study::table::{Table, text};
use crate::shared::study::{RunData, Study};
use stapo_core::record::catalogue::{ACCURACY, JUDGE_AGREEMENT, JUDGE_ASKED_SHARE, Metric, RULE_ACCURACY};

/// One row per run with a judge; `None` for a study without one.
pub fn table(study: &Study) -> Option<Table> {
    let mut table = Table::new(
        "judge",
        &[
            "run",
            "judge",
            "#asked, %",
            "#agreement, %",
            "#accuracy, first and last tenth, %",
            "#by the rule, %",
        ],
    );
    let judged = study.runs().filter(|(_, run)| run.metrics.iter().any(|m| m.judge.is_some()));
    for (_, run) in judged {
        let name = run.folder.strip_prefix(&study.folder).unwrap_or(&run.folder).display().to_string();
        let model = run.plan.judge().map_or(String::new(), |judge| judge.model.clone());
        let n = run.metrics.len();
        let tenth = n.div_ceil(10);
        let whole = |metric| shown(mean(run, 0..n, metric));
        let ends = |metric: Metric| {
            format!("{} → {}", shown(mean(run, 0..tenth, metric)), shown(mean(run, n - tenth..n, metric)))
        };
        table.push(vec![
            text(name),
            text(model),
            text(whole(JUDGE_ASKED_SHARE)),
            text(whole(JUDGE_AGREEMENT)),
            text(ends(ACCURACY)),
            text(ends(RULE_ACCURACY)),
        ]);
    }
    (!table.rows.is_empty()).then_some(table)
}

/// The mean of a metric over the steps that have it.
fn mean(run: &RunData, steps: std::ops::Range<usize>, metric: Metric) -> Option<f64> {
    let values: Vec<f64> = run.metrics[steps].iter().filter_map(metric.value).collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

fn shown(share: Option<f64>) -> String {
    share.map_or("–".to_string(), |share| format!("{:.1}", 100.0 * share))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::study::StudyKind;
    use crate::shared::study::table::Cell;
    use crate::shared::study::tests::{metrics, run, study};
    use serde_json::json;

    /// Twenty steps, of which the first two and the last two are a tenth.
    #[test]
    fn a_judge_is_compared_with_the_rule_over_all_steps_and_at_both_ends() {
        let step = |step: u64| {
            let judge = json!({"asked_share": 0.5, "agreement": if step < 11 { 0.5 } else { 1.0 }, "rule_accuracy": 1.0 - step as f64 / 100.0});
            metrics(step, &json!({"accuracy": step as f64 / 20.0, "judge": judge}))
        };
        let judged = run(
            "s/judged",
            &["task.verifier={kind=\"judge\",model=\"o/judge\"}"],
            (1..=20).map(step).collect(),
        );
        let plain = run("s/plain", &[], vec![metrics(1, &json!({}))]);
        let both = study(StudyKind::Runs, vec![("judged", vec![judged]), ("plain", vec![plain])]);
        let table = table(&both).unwrap();
        let cells: Vec<String> = table.rows[0].cells.iter().map(Cell::to_plain).collect();
        assert_eq!(cells, ["judged", "o/judge", "50.0", "75.0", "7.5 → 97.5", "98.5 → 80.5"]);
        assert_eq!(table.rows.len(), 1, "a run without a judge has no row");
        let alone = study(StudyKind::Run, vec![("plain", vec![run("s/plain", &[], Vec::new())])]);
        assert!(super::table(&alone).is_none());
        assert_eq!(shown(None), "–");
    }
}
