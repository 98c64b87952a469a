//! Steps until collapse: survival curves of the arms, and whether they differ.

use crate::shared::chart::{Curve, CurvePoint, Curves, Figure, Scale, number};
use crate::shared::study::table::{Table, text};
use crate::shared::study::{ArmData, Study};
use stapo_core::stats::{
    LEVEL, Lifetime, LogRank, Resampling, Subject, SurvivalStep, kaplan_meier, log_rank,
};
use stapo_rl::experiment::{Collapse, split_arm};

/// The runs of one method, under every setting of the experiment's matrix.
struct Method<'a> {
    name: &'a str,
    series: usize,
    arms: Vec<&'a ArmData>,
}

/// The methods of a study. The arms of a matrix are named `method,key=value`.
fn methods(study: &Study) -> Vec<Method<'_>> {
    let mut methods: Vec<Method> = Vec::new();
    for arm in &study.arms {
        let (name, _) = split_arm(&arm.name);
        match methods.iter_mut().find(|method| method.name == name) {
            Some(method) => method.arms.push(arm),
            None => methods.push(Method { name, series: arm.series, arms: vec![arm] }),
        }
    }
    methods
}

/// The test of whether methods differ in their time until collapse, each setting a stratum of its own; `None` where there
/// is one method alone.
pub fn test(study: &Study, collapse: Collapse) -> Option<LogRank> {
    let mut settings: Vec<&str> = Vec::new();
    let mut subjects = Vec::new();
    for (group, method) in methods(study).iter().enumerate() {
        for arm in &method.arms {
            let (_, setting) = split_arm(&arm.name);
            let known = settings.iter().position(|other| *other == setting);
            let stratum = known.unwrap_or(settings.len());
            if known.is_none() {
                settings.push(setting);
            }
            let lifetimes = arm.runs.iter().map(|run| collapse.lifetime(&run.of_seed()));
            subjects.extend(lifetimes.map(|lifetime| Subject { group, stratum, lifetime }));
        }
    }
    log_rank(&subjects, &Resampling { n_resamples: 9999, ..Resampling::default() }).ok()
}

/// `log-rank p 0.03 (chi-squared), 0.06 (permutation of runs), 12 collapses`.
pub fn shown(test: &LogRank) -> String {
    format!(
        "log-rank p {} (chi-squared), {} (permutation of runs), {} collapses",
        number(test.p_value),
        number(test.p_permutation),
        test.n_events
    )
}

/// Survival curves in both senses of collapse. A sense in which no run collapsed has a sentence in place of its figure.
pub fn figures(study: &Study) -> (Vec<Figure>, Vec<String>) {
    let mut figures = Vec::new();
    let mut missing = Vec::new();
    for collapse in Collapse::ALL {
        let name = collapse.name();
        let n_runs = study.runs().count();
        let n = study.runs().filter(|(_, run)| collapse.lifetime(&run.of_seed()).is_event).count();
        if n == 0 {
            missing
                .push(format!("Survival by {name}: none of {n_runs} runs collapsed, so there is no curve."));
        } else {
            figures.push(figure(study, collapse));
        }
    }
    (figures, missing)
}

fn figure(study: &Study, collapse: Collapse) -> Figure {
    let name = collapse.name();
    let lives = |method: &Method| -> Vec<Lifetime> {
        let runs = method.arms.iter().flat_map(|arm| &arm.runs);
        runs.map(|run| collapse.lifetime(&run.of_seed())).collect()
    };
    let methods = methods(study);
    let fitted: Vec<(&Method, Vec<SurvivalStep>)> = methods
        .iter()
        .filter_map(|method| Some((method, kaplan_meier(&lives(method), LEVEL).ok()?)))
        .collect();
    let last = methods.iter().flat_map(&lives).map(|life| life.time).fold(0.0, f64::max);
    let mut times: Vec<f64> = fitted.iter().flat_map(|(_, steps)| steps.iter().map(|s| s.time)).collect();
    times.extend([0.0, last]);
    times.sort_by(f64::total_cmp);
    times.dedup();
    let lines = fitted.iter().map(|(method, steps)| Curve {
        label: method.name.to_string(),
        series: method.series,
        points: times.iter().map(|&time| point(steps, time)).collect(),
        seeds: Vec::new(),
    });
    let rule = match collapse {
        Collapse::Entropy => "mean entropy below the plan's share of the first step's",
        Collapse::Accuracy => "training accuracy over 10 steps below half of its best",
    };
    let tested = test(study, collapse).map_or(String::new(), |test| format!(" · {}", shown(&test)));
    Figure {
        name: format!("survival-{name}"),
        title: format!("Runs without collapse of {name}"),
        note: format!(
            "Kaplan-Meier with 95 % intervals, all settings of a method together; collapse: {rule}. The test compares methods within each setting{tested}"
        ),
        scene: Curves {
            x_label: "training step".into(),
            unit: "%",
            y: Scale::around([0.0, 100.0]),
            bands: Vec::new(),
            lines: lines.collect(),
        }
        .draw_staircase(),
    }
}

/// The curve at a time: its last step up to then.
fn point(steps: &[SurvivalStep], time: f64) -> CurvePoint {
    let now = steps.iter().rev().find(|step| step.time <= time);
    CurvePoint {
        x: time,
        y: 100.0 * now.map_or(1.0, |step| step.survival),
        interval: now.and_then(|step| step.interval).map(|i| (100.0 * i.low, 100.0 * i.high)),
    }
}

/// One row for each arm: how many of its runs collapsed in each sense, and when.
pub fn table(study: &Study) -> Table {
    let titles = [
        "method",
        "setting",
        "#runs",
        "#steps of each",
        "#collapsed in entropy",
        "#at steps",
        "#collapsed in accuracy",
        "#at steps",
    ];
    let mut table = Table::new("survival", &titles);
    for method in methods(study) {
        for arm in method.arms {
            let mut cells = vec![text(method.name), text(split_arm(&arm.name).1)];
            cells.push(text(arm.runs.len().to_string()));
            cells.push(text(arm.runs.iter().map(|run| run.metrics.len()).max().unwrap_or(0).to_string()));
            for collapse in Collapse::ALL {
                let lives = arm.runs.iter().map(|run| collapse.lifetime(&run.of_seed()));
                let steps: Vec<String> =
                    lives.filter(|life| life.is_event).map(|life| format!("{:.0}", life.time)).collect();
                cells.push(text(steps.len().to_string()));
                cells.push(text(if steps.is_empty() { "–".to_string() } else { steps.join(", ") }));
            }
            table.push(cells);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_keeps_its_value_between_events() {
        let life = |time, is_event| Lifetime { time, is_event };
        let steps = kaplan_meier(&[life(2.0, true), life(5.0, true), life(9.0, false)], LEVEL).unwrap();
        let at = |time| point(&steps, time).y.round();
        assert_eq!([0.0, 2.0, 4.0, 5.0, 9.0].map(at), [100.0, 67.0, 67.0, 33.0, 33.0]);
    }
}
