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
