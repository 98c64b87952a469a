//! Steps until collapse: survival curves of the arms, and whether they differ.

use crate::shared::chart::{Curve, CurvePoint, Curves, Figure, Scale, number};
use crate::shared::study::table::{Table, text};
use crate::shared::study::{ArmData, Study, series_of};
use stapo_core::stats::{
    LEVEL, Lifetime, LogRank, Resampling, Subject, SurvivalStep, holm, kaplan_meier, log_rank,
};
use stapo_rl::lab::experiment::{Collapse, split_arm};

/// The runs of one method, under every setting of the experiment's matrix.
struct Method<'a> {
    name: &'a str,
    arms: Vec<&'a ArmData>,
}

impl Method<'_> {
    /// When each run collapsed.
    fn lives(&self, collapse: Collapse) -> Vec<Lifetime> {
        self.arms.iter().flat_map(|arm| lives(arm, collapse)).collect()
    }
}

/// When each run of an arm collapsed.
fn lives(arm: &ArmData, collapse: Collapse) -> impl Iterator<Item = Lifetime> {
    arm.runs.iter().map(move |run| collapse.lifetime(&run.of_seed()))
}

/// The methods of a study. The arms of a matrix are named `method,key=value`.
fn methods(study: &Study) -> Vec<Method<'_>> {
    let mut methods: Vec<Method> = Vec::new();
    for arm in &study.arms {
        let (name, _) = split_arm(&arm.name);
        match methods.iter_mut().find(|method| method.name == name) {
            Some(method) => method.arms.push(arm),
            None => methods.push(Method { name, arms: vec![arm] }),
        }
    }
    methods
}

/// The test of whether these methods differ in their time until collapse, each setting a separate stratum; `None` for one
/// method alone.
fn test(methods: &[&Method<'_>], collapse: Collapse) -> Option<LogRank> {
    let mut settings: Vec<&str> = Vec::new();
    let mut subjects = Vec::new();
    for (group, method) in methods.iter().enumerate() {
        for arm in &method.arms {
            let (_, setting) = split_arm(&arm.name);
            let known = settings.iter().position(|other| *other == setting);
            let stratum = known.unwrap_or(settings.len());
            if known.is_none() {
                settings.push(setting);
            }
            subjects.extend(lives(arm, collapse).map(|lifetime| Subject { group, stratum, lifetime }));
        }
    }
    log_rank(&subjects, &Resampling { n_resamples: 9999, ..Resampling::default() }).ok()
}

/// The study's method against another one.
pub struct Pair<'a> {
    pub other: &'a str,
    pub collapse: Collapse,
    /// The collapsed and all runs of the method, and of the other one.
    pub own_runs: (usize, usize),
    pub other_runs: (usize, usize),
    pub test: LogRank,
    /// By permutation of runs, adjusted over all pairs and senses of collapse.
    pub p_adjusted: f64,
}

/// The study's method against every other one, in every sense of collapse; empty for a study without a method.
pub fn pairs(study: &Study) -> Vec<Pair<'_>> {
    let methods = methods(study);
    let Some(own) = methods.iter().find(|method| Some(method.name) == study.method_name()) else {
        return Vec::new();
    };
    let count = |method: &Method, collapse| {
        let lives = method.lives(collapse);
        (lives.iter().filter(|life| life.is_event).count(), lives.len())
    };
    let mut pairs = Vec::new();
    for collapse in Collapse::ALL {
        for other in methods.iter().filter(|other| other.name != own.name) {
            let Some(test) = test(&[own, other], collapse) else { continue };
            let (own_runs, other_runs) = (count(own, collapse), count(other, collapse));
            pairs.push(Pair { other: other.name, collapse, own_runs, other_runs, test, p_adjusted: 1.0 });
        }
    }
    // Of a pair without a collapse nothing can be found, whichever its runs are, so that it does not count.
    let is_tested = |pair: &Pair| pair.test.n_events > 0;
    let found: Vec<f64> =
        pairs.iter().filter(|pair| is_tested(pair)).map(|pair| pair.test.p_permutation).collect();
    let adjusted = holm(&found).unwrap_or_default();
    for (pair, p) in pairs.iter_mut().filter(|pair| is_tested(pair)).zip(adjusted) {
        pair.p_adjusted = p;
    }
    pairs
}

/// `log-rank p 0.03 (chi-squared), 0.06 (permutation of runs), 12 collapses`.
fn shown(test: &LogRank) -> String {
    format!(
        "log-rank p {} (chi-squared), {} (permutation of runs), {} collapses",
        number(test.p_value),
        number(test.p_permutation),
        test.n_events
    )
}

/// Survival curves in each sense of collapse. A sense in which no run collapsed has a sentence instead of its figure.
pub fn figures(study: &Study) -> (Vec<Figure>, Vec<String>) {
    let mut figures = Vec::new();
    let mut missing = Vec::new();
    for collapse in Collapse::ALL {
        let name = collapse.name();
        let n_runs = study.runs().count();
        let n = study.arms.iter().flat_map(|arm| lives(arm, collapse)).filter(|life| life.is_event).count();
        if n == 0 {
            missing
                .push(format!("Survival by {name}: none of {n_runs} runs collapsed, so there is no curve."));
        } else {
            figures.push(figure(study, collapse));
        }
    }
    (figures, missing)
}

/// The most curves whose intervals can be distinguished where they overlap.
const MAX_BANDS: usize = 4;

fn figure(study: &Study, collapse: Collapse) -> Figure {
    let name = collapse.name();
    let methods = methods(study);
    let fitted: Vec<(&Method, Vec<SurvivalStep>)> = methods
        .iter()
        .filter_map(|method| Some((method, kaplan_meier(&method.lives(collapse), LEVEL).ok()?)))
        .collect();
    let has_bands = fitted.len() <= MAX_BANDS;
    let names: Vec<&str> = fitted.iter().map(|(method, _)| method.name).collect();
    let series = series_of(&names, study.method_name());
    let last =
        methods.iter().flat_map(|method| method.lives(collapse)).map(|life| life.time).fold(0.0, f64::max);
    let mut times: Vec<f64> = fitted.iter().flat_map(|(_, steps)| steps.iter().map(|s| s.time)).collect();
    times.extend([0.0, last]);
    times.sort_by(f64::total_cmp);
    times.dedup();
    let line = |((method, steps), &series): (&(&Method, Vec<SurvivalStep>), &usize)| {
        let mut points: Vec<CurvePoint> = times.iter().map(|&time| point(steps, time)).collect();
        points.iter_mut().filter(|_| !has_bands).for_each(|point| point.interval = None);
        Curve { label: method.name.to_string(), series, points, seeds: Vec::new() }
    };
    let lines = fitted.iter().zip(&series).map(line).collect();
    let rule = match collapse {
        Collapse::Entropy => "mean entropy below the plan's share of the first step's",
        Collapse::Accuracy => "training accuracy over 10 steps below half of its best",
        Collapse::Endings => {
            "half of the responses or more, over 10 steps, cut at their limit, and more than twice the first step's"
        }
    };
    let tested = test(&methods.iter().collect::<Vec<_>>(), collapse)
        .map_or(String::new(), |test| format!(" · {}", shown(&test)));
    let with_intervals = if has_bands { " with 95 % intervals" } else { "" };
    Figure {
        name: format!("survival-{name}"),
        title: format!("Runs without collapse of {name}"),
        note: format!(
            "Kaplan-Meier{with_intervals}, all settings of a method together; collapse: {rule}. The test compares methods within each setting{tested}"
        ),
        scene: Curves {
            x_label: "training step".into(),
            unit: "%",
            y: Scale::around([0.0, 100.0]),
            bands: Vec::new(),
            lines,
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
        "#collapsed in endings",
        "#at steps",
    ];
    let mut table = Table::new("survival", &titles);
    for method in methods(study) {
        for arm in method.arms {
            let mut cells = vec![text(method.name), text(split_arm(&arm.name).1)];
            cells.push(text(arm.runs.len().to_string()));
            cells.push(text(arm.runs.iter().map(|run| run.metrics.len()).max().unwrap_or(0).to_string()));
            for collapse in Collapse::ALL {
                let events = lives(arm, collapse).filter(|life| life.is_event);
                let steps: Vec<String> = events.map(|life| format!("{:.0}", life.time)).collect();
                cells.push(text(steps.len().to_string()));
                cells.push(text(if steps.is_empty() { "–".to_string() } else { steps.join(", ") }));
            }
            table.push(cells);
        }
    }
    table
}

/// One row for the method against each other one, in each sense of collapse.
pub fn pairs_table(pairs: &[Pair]) -> Table {
    let titles = [
        "the method against",
        "collapse of",
        "#the method's runs that collapsed",
        "#expected if alike",
        "#the other's",
        "#log-rank p, permutation",
        "#p Holm",
    ];
    let mut table = Table::new("survival-pairs", &titles);
    let share = |(n, all): (usize, usize)| format!("{n} of {all}");
    for pair in pairs {
        table.push(vec![
            text(pair.other),
            text(pair.collapse.name()),
            text(share(pair.own_runs)),
            text(format!("{:.1}", pair.own_runs.0 as f64 - pair.test.excess)),
            text(share(pair.other_runs)),
            text(number(pair.test.p_permutation)),
            text(number(pair.p_adjusted)),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of two settings the second collapses later; in both, the runs of `a` collapse before those of `b`. By hand: one half is
    /// expected of the first event of each setting, with a variance of a quarter, and nothing of the second event.
    #[test]
    fn each_setting_is_a_stratum() {
        use crate::shared::study::StudyKind;
        use crate::shared::study::tests::{metrics, run, study};
        use serde_json::json;
        let collapsing = |step: u64| {
            let entropy = |at: u64| json!({"entropy_mean": if at < step { 1.0 } else { 0.001 }});
            vec![run("s/r", &[], (1..=9).map(|at| metrics(at, &entropy(at))).collect())]
        };
        let arms = [("a,x=1", 2), ("b,x=1", 4), ("a,x=2", 6), ("b,x=2", 8)];
        let arms = arms.into_iter().map(|(name, step)| (name, collapsing(step))).collect();
        let study = study(StudyKind::Experiment, arms);
        let methods = methods(&study);
        let found = test(&methods.iter().collect::<Vec<_>>(), Collapse::Entropy).unwrap();
        assert_eq!((found.excess, found.n_events), (1.0, 4));
        assert!((found.statistic - 2.0).abs() < 1e-12, "{found:?}");
    }

    #[test]
    fn a_curve_keeps_its_value_between_events() {
        let life = |time, is_event| Lifetime { time, is_event };
        let steps = kaplan_meier(&[life(2.0, true), life(5.0, true), life(9.0, false)], LEVEL).unwrap();
        let at = |time| point(&steps, time).y.round();
        assert_eq!([0.0, 2.0, 4.0, 5.0, 9.0].map(at), [100.0, 67.0, 67.0, 33.0, 33.0]);
        let interval = steps[0].interval.unwrap();
        assert_eq!(point(&steps, 4.0).interval, Some((100.0 * interval.low, 100.0 * interval.high)));
        assert_eq!(point(&steps, 0.0).interval, None);
    }
}
