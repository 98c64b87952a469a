//! "What these runs support": claims with their evidence, their assumptions and what would refute them; and the free
//! parameters of the numbers.

use super::survival::Pair;
use crate::shared::chart::number;
use crate::shared::study::Study;
use crate::shared::study::table::{Table, text};
use anyhow::Result;
use stapo_core::diagnostics::Quadrant;
use stapo_core::objective::{EntropyBonus, Mask};
use stapo_core::stats::{Estimate, PairedComparison, mean_estimate};
use stapo_rl::lab::experiment::{ArmSummary, Collapse, ExperimentSummary};
use stapo_rl::run::receipt;

/// What the runs say about a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reading {
    Supported,
    /// The runs show the opposite.
    Contradicted,
    /// The runs bear on the claim and do not decide it.
    Undecided,
    NotTested,
}

impl Reading {
    fn name(self) -> &'static str {
        match self {
            Self::Supported => "supported here",
            Self::Contradicted => "contradicted here",
            Self::Undecided => "undecided here",
            Self::NotTested => "not tested here",
        }
    }
}

/// A claim, the paper's or this program's own.
struct Claim {
    says: String,
    by: &'static str,
    reading: Reading,
    evidence: String,
    assumes: &'static str,
    refuted_by: &'static str,
}

const PAPER: &str = "paper";
const OURS: &str = "this program";

/// One row for each claim; `pairs` compare the method with each other one.
pub fn table(study: &Study, pairs: &[Pair]) -> Result<Table> {
    let summary = study.summary()?;
    let claims = [
        accuracy(study, &summary),
        stability(study, &summary),
        collapse(study, pairs),
        benchmarks(),
        few_tokens(study),
        gradient_order(study),
        spurious(),
        exactness(study),
        repeatable(study),
    ];
    let titles = ["claim", "whose", "reading", "evidence", "weakest assumption", "what would refute it"];
    let mut table = Table::new("claims", &titles);
    for claim in claims {
        table.push(vec![
            text(claim.says),
            text(claim.by),
            text(claim.reading.name()),
            text(claim.evidence),
            text(claim.assumes),
            text(claim.refuted_by),
        ]);
    }
    Ok(table)
}

/// Where the evidence of the table comes from.
pub fn note(study: &Study) -> String {
    let folder = study.folder.display();
    format!(
        "All numbers are of the runs in {folder}, receipt {}; stapo verify {folder} --replay checks files and steps. Differences are the method minus the arm, seed by seed, with 95 % intervals (Student's t) and p values of the permutation test, Holm-adjusted for accuracy. \"Not tested here\" says nothing about the claim.",
        receipt::short_of(&study.folder)
    )
}

/// Comparisons that are written out; the rest is counted.
const MAX_NAMED: usize = 5;

/// `justrl +0.2 (−2.1 to +2.6), p 0.81; ..`.
fn listed(
    found: &[(&ArmSummary, PairedComparison)],
    factor: f64,
    p: impl Fn(&ArmSummary, &PairedComparison) -> f64,
) -> String {
    let shown = |value: f64| {
        let sign = if value < 0.0 { "−" } else { "+" };
        format!("{sign}{}", number((factor * value).abs()))
    };
    let one = |(arm, paired): &(&ArmSummary, PairedComparison)| {
        format!(
            "{} {} ({} to {}), p {}, {} seeds",
            arm.name,
            shown(paired.difference),
            shown(paired.interval.low),
            shown(paired.interval.high),
            number(p(arm, paired)),
            paired.n_questions
        )
    };
    let mut parts: Vec<String> = found.iter().take(MAX_NAMED).map(one).collect();
    if let n_more @ 1.. = found.len().saturating_sub(MAX_NAMED) {
        parts.push(format!("{n_more} more arms"));
    }
    parts.join("; ")
}

/// Supported where every comparison is significant in its favour, contradicted where one is significant against it.
fn reading_of(found: &[(f64, f64)]) -> Reading {
    let is_significant = |(_, p): &&(f64, f64)| *p < 0.05;
    if found.is_empty() {
        Reading::NotTested
    } else if found.iter().filter(is_significant).any(|(difference, _)| *difference < 0.0) {
        Reading::Contradicted
    } else if found.iter().filter(is_significant).count() == found.len() {
        Reading::Supported
    } else {
        Reading::Undecided
    }
}

fn method(study: &Study) -> &str {
    study.method_name().unwrap_or("the method")
}

fn accuracy(study: &Study, summary: &ExperimentSummary) -> Claim {
    let found: Vec<(&ArmSummary, PairedComparison)> =
        summary.arms.iter().filter_map(|arm| Some((arm, arm.against?))).collect();
    let adjusted =
        |arm: &ArmSummary, paired: &PairedComparison| arm.p_adjusted.unwrap_or(paired.p_permutation);
    let read: Vec<(f64, f64)> =
        found.iter().map(|(arm, paired)| (paired.difference, adjusted(arm, paired))).collect();
    let evidence = if found.is_empty() {
        "no arm shares two seeds with the method".to_string()
    } else {
        format!("points of {}: {}", summary.measure.name(), listed(&found, 100.0, adjusted))
    };
    Claim {
        says: format!("{} is more accurate than every other arm", method(study)),
        by: PAPER,
        reading: reading_of(&read),
        evidence,
        assumes: "seeds are the unit of chance; one model, one task, the settings of this experiment; the last evaluation represents the run",
        refuted_by: "more seeds whose interval of the difference lies below 0 for some arm",
    }
}

fn stability(study: &Study, summary: &ExperimentSummary) -> Claim {
    let found: Vec<(&ArmSummary, PairedComparison)> =
        summary.arms.iter().filter_map(|arm| Some((arm, arm.stability_against?))).collect();
    let read: Vec<(f64, f64)> =
        found.iter().map(|(_, paired)| (paired.difference, paired.p_permutation)).collect();
    let evidence = if found.is_empty() {
        "no arm shares two seeds with the method".to_string()
    } else {
        format!("−max|ΔH|, nats: {}", listed(&found, 1.0, |_, paired| paired.p_permutation))
    };
    Claim {
        says: format!("{} keeps entropy more stable than every other arm", method(study)),
        by: PAPER,
        reading: reading_of(&read),
        evidence,
        assumes: "the largest change between two steps measures stability; p values are not adjusted over arms",
        refuted_by: "an arm whose entropy moves less, with an interval on one side of 0",
    }
}

/// Read by the method against each other one, in each sense of collapse.
fn collapse(study: &Study, pairs: &[Pair]) -> Claim {
    let n_runs = study.runs().count();
    let steps = study.runs().map(|(_, run)| run.metrics.len()).max().unwrap_or(0);
    let mut readings = Vec::new();
    let mut parts = Vec::new();
    for kind in Collapse::ALL {
        let of_kind: Vec<_> = pairs.iter().filter(|pair| pair.collapse == kind).collect();
        let Some(own) = of_kind.first().map(|pair| pair.own_runs) else { continue };
        let found: Vec<(f64, f64)> =
            of_kind.iter().map(|pair| (-pair.test.excess, pair.p_adjusted)).collect();
        let is_calm = of_kind.iter().all(|pair| pair.test.n_events == 0);
        readings.push(if is_calm { Reading::NotTested } else { reading_of(&found) });
        let others = of_kind.iter().map(|pair| {
            let (n, all) = pair.other_runs;
            format!("{} {n} of {all} (p {})", pair.other, number(pair.p_adjusted))
        });
        let others = others.collect::<Vec<_>>().join(", ");
        parts.push(format!("{}: {} of {} of the method's runs; {others}", kind.name(), own.0, own.1));
    }
    let has = |reading: Reading| readings.contains(&reading);
    let reading = match (has(Reading::Contradicted), has(Reading::Supported), has(Reading::Undecided)) {
        (true, _, _) => Reading::Contradicted,
        (_, true, _) => Reading::Supported,
        (_, _, true) => Reading::Undecided,
        _ => Reading::NotTested,
    };
    Claim {
        says: format!("{} prevents collapse, compared with every other arm", method(study)),
        by: PAPER,
        reading,
        evidence: format!(
            "{n_runs} runs of up to {steps} steps, log-rank tests of pairs within settings by permutation, Holm-adjusted; {}",
            parts.join("; ")
        ),
        assumes: "the three rules of collapse; runs beyond their last step are unknown; few collapses give wide curves",
        refuted_by: "an arm whose runs collapse later than the method's",
    }
}

fn benchmarks() -> Claim {
    Claim {
        says: "STAPO is 11.49 % better than the best baseline on six benchmarks, over Qwen3 1.7B, 8B and 14B".into(),
        by: PAPER,
        reading: Reading::NotTested,
        evidence: "configs qwen3-1.7b, qwen3-8b and qwen3-14b have the recipe, stapo eval --benchmarks all the evaluation".into(),
        assumes: "one run of each arm and size, as published",
        refuted_by: "the recipe with several seeds and an interval that holds 0",
    }
}

fn few_tokens(study: &Study) -> Claim {
    let masked = study.runs().filter(|(_, run)| run.n_silenced() > 0);
    let shares: Vec<f64> =
        masked.map(|(_, run)| run.n_silenced() as f64 / run.n_tokens().max(1) as f64).collect();
    let evidence = mean_estimate(&shares).ok().map(|share| {
        let interval = share
            .interval
            .map_or(String::new(), |i| format!(" ({} to {})", number(i.low.max(0.0)), number(i.high)));
        format!(
            "share of silenced tokens {}{interval}, {} runs with a mask",
            number(share.value),
            shares.len()
        )
    });
    let reading = match shares.iter().copied().fold(0.0, f64::max) {
        _ if shares.is_empty() => Reading::NotTested,
        most if most < 1e-3 => Reading::Supported,
        _ => Reading::Undecided,
    };
    Claim {
        says: "fewer than one token in 1,000 is silenced (the paper has 1.6e-4 to 7e-4)".into(),
        by: PAPER,
        reading,
        evidence: evidence.unwrap_or_else(|| "no run silenced a token".into()),
        assumes: "the share depends on the model's typos and on its temperature; masks of other sizes are among the arms",
        refuted_by: "a run of the recipe with a larger share",
    }
}

fn gradient_order(study: &Study) -> Claim {
    let mean = |quadrant: Quadrant| {
        let steps = study.runs().flat_map(|(_, run)| &run.metrics).filter(|m| m.tau_h.is_some());
        let rows =
            steps.flat_map(|m| &m.quadrants).filter(|row| row.quadrant == quadrant && row.n_tokens > 0);
        let norms: Vec<f64> = rows.map(|row| row.mean_gradient_norm).collect();
        mean_estimate(&norms).ok().map(|estimate| (quadrant, estimate))
    };
    let found: Vec<(Quadrant, Estimate)> = Quadrant::ALL.into_iter().filter_map(mean).collect();
    let shown = |(quadrant, estimate): &(Quadrant, Estimate)| {
        let ends = estimate
            .interval
            .map_or(String::new(), |i| format!(" ({} to {})", number(i.low.max(0.0)), number(i.high)));
        format!("{} {}{ends}", quadrant.words(), number(estimate.value))
    };
    let evidence = found.iter().map(shown).collect::<Vec<_>>().join("; ");
    Claim {
        says: "improbable tokens of low entropy have the largest gradient norm".into(),
        by: PAPER,
        reading: reading_of_norms(&found),
        evidence: if evidence.is_empty() {
            "no step had a candidate".into()
        } else {
            format!("mean norms over steps: {evidence}")
        },
        assumes: "the norm at the logits represents the norm of the weights' gradient; steps are the unit of chance",
        refuted_by: "another quadrant whose interval lies above",
    }
}

/// Supported where the interval of the quadrant that S2T silences lies above all others, contradicted where one lies above
/// it.
fn reading_of_norms(found: &[(Quadrant, Estimate)]) -> Reading {
    let spurious = |quadrant: &Quadrant| *quadrant == Quadrant::ImprobableLowEntropy;
    let Some((_, own)) = found.iter().find(|(quadrant, _)| spurious(quadrant)) else {
        return Reading::NotTested;
    };
    let others: Vec<&Estimate> =
        found.iter().filter(|(quadrant, _)| !spurious(quadrant)).map(|(_, estimate)| estimate).collect();
    let is_above =
        |a: &Estimate, b: &Estimate| a.interval.zip(b.interval).is_some_and(|(a, b)| a.low > b.high);
    if others.is_empty() {
        Reading::NotTested
    } else if others.iter().any(|other| is_above(other, own)) {
        Reading::Contradicted
    } else if others.iter().all(|other| is_above(own, other)) {
        Reading::Supported
    } else {
        Reading::Undecided
    }
}

fn spurious() -> Claim {
    Claim {
        says: "silenced tokens did not earn their reward".into(),
        by: PAPER,
        reading: Reading::NotTested,
        evidence: "stapo counterfactual RUN measures it on a run of this experiment".into(),
        assumes: "the token was chosen because its response was right",
        refuted_by: "continuations that are right more often after the silenced token than after the preferred one",
    }
}

fn exactness(study: &Study) -> Claim {
    let most =
        study.runs().flat_map(|(_, run)| &run.metrics).map(|m| m.exactness_max_abs).fold(0.0, f64::max);
    let n_steps: usize = study.runs().map(|(_, run)| run.metrics.len()).sum();
    Claim {
        says: "the policy that is trained is, to the bit, the one that sampled".into(),
        by: OURS,
        reading: if most == 0.0 { Reading::Supported } else { Reading::Contradicted },
        evidence: format!("max |logp − behavior_logp| = {} over {n_steps} steps", number(most)),
        assumes: "the first mini-batch of every step is looked at, later ones are off-policy by design",
        refuted_by: "one step with a difference",
    }
}

fn repeatable(study: &Study) -> Claim {
    let n_runs = study.runs().count();
    let n_sealed = study.runs().filter(|(_, run)| receipt::of_folder(&run.folder).is_some()).count();
    Claim {
        says: "these numbers can be made again, bit for bit".into(),
        by: OURS,
        reading: if n_sealed == n_runs { Reading::Undecided } else { Reading::NotTested },
        evidence: format!(
            "{n_sealed} of {n_runs} runs have a receipt; stapo verify with --replay makes steps again"
        ),
        assumes: "the same program on the same kind of device",
        refuted_by: "a replayed step with another state hash",
    }
}

/// The parameters of the numbers: given by the paper, chosen by this experiment, or fitted to data.
pub fn parameters(study: &Study) -> Table {
    let (_, run) = study.shown();
    let (plan, config) = (&run.plan, &run.plan.config);
    let mut table = Table::new("parameters", &["parameter", "#value", "origin", "the recipe's"]);
    let mut row = |name: &str, value: String, paper: &str| {
        let origin = if value == paper { "given" } else { "chosen" };
        table.push(vec![text(name), text(value), text(origin), text(paper)]);
    };
    for mask in &plan.objective.masks {
        if let Mask::Spurious { tau_p, q, .. } = mask {
            row("tau_p", number(*tau_p), "0.002");
            row("q of the entropy quantile", number(*q), "0.75");
        }
    }
    row("responses per problem", config.rollout.group_size.to_string(), "8");
    row("problems per step", config.rollout.problems_per_step.to_string(), "256");
    row("problems per mini-batch", config.update.problems_per_minibatch.to_string(), "64");
    row("temperature", number(config.rollout.temperature), "1");
    row("learning rate", number(config.update.learning_rate), &number(1e-6));
    row("weight decay", number(config.update.weight_decay), "0.1");
    row("gradient clip", number(config.update.max_gradient_norm), "1");
    row(
        "rewards, right and wrong",
        format!("{} and {}", number(config.reward.right), number(config.reward.wrong)),
        "1 and -1",
    );
    row("steps of rollouts", config.steps.to_string(), "750");
    let mut fitted = |name: &str, value: &str| {
        table.push(vec![text(name), text("–"), text("fitted"), text(value)]);
    };
    if plan.objective.masks.iter().any(Mask::needs_calibration) {
        fitted("tau_h", "a quantile of the entropies of every mini-batch");
    }
    if matches!(plan.objective.entropy_bonus, EntropyBonus::Target { .. }) {
        fitted("coefficient of the entropy bonus", "adapts to the target, step by step");
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::study::StudyKind;
    use crate::shared::study::tests::{metrics, run, study};
    use serde_json::json;

    #[test]
    fn a_claim_needs_every_comparison_and_falls_with_one() {
        assert_eq!(reading_of(&[]), Reading::NotTested);
        assert_eq!(reading_of(&[(0.1, 0.01), (0.2, 0.04)]), Reading::Supported);
        assert_eq!(reading_of(&[(0.1, 0.01), (0.2, 0.3)]), Reading::Undecided);
        assert_eq!(reading_of(&[(0.1, 0.01), (-0.2, 0.01)]), Reading::Contradicted);
        assert_eq!(reading_of(&[(-0.1, 0.6)]), Reading::Undecided);
        assert_eq!(reading_of(&[(0.0, 0.01)]), Reading::Supported);
        assert_eq!(reading_of(&[(0.1, 0.05)]), Reading::Undecided);
    }

    #[test]
    fn norms_are_ordered_by_their_intervals() {
        let estimate = |values: &[f64]| mean_estimate(values).unwrap();
        let (low, wide, high) =
            (estimate(&[1.0, 1.1, 0.9]), estimate(&[0.0, 9.0]), estimate(&[2.0, 2.1, 1.9]));
        let read = |improbable, probable| {
            reading_of_norms(&[
                (Quadrant::ProbableHighEntropy, probable),
                (Quadrant::ImprobableLowEntropy, improbable),
            ])
        };
        assert_eq!(read(high, low), Reading::Supported);
        assert_eq!(read(low, high), Reading::Contradicted);
        assert_eq!(read(high, wide), Reading::Undecided);
        assert_eq!(reading_of_norms(&[]), Reading::NotTested);
        let among = |own, others: [Estimate; 2]| {
            let [a, b] = others;
            reading_of_norms(&[
                (Quadrant::ProbableHighEntropy, a),
                (Quadrant::ImprobableLowEntropy, own),
                (Quadrant::ProbableLowEntropy, b),
            ])
        };
        assert_eq!(among(high, [low, wide]), Reading::Undecided);
        assert_eq!(among(low, [wide, high]), Reading::Contradicted);
    }

    /// Of one token in a thousand the claim is no longer true.
    #[test]
    fn few_tokens_are_fewer_than_one_in_a_thousand_in_every_run() {
        let silencing = |n_silenced: usize| {
            let step = metrics(1, &json!({"n_silenced": n_silenced, "n_tokens": 10_000}));
            run("s/a", &[], vec![step.clone(), metrics(2, &json!({"n_silenced": 0, "n_tokens": 10_000}))])
        };
        let read = |counts: &[usize]| {
            let runs = counts.iter().map(|n| silencing(*n)).collect();
            few_tokens(&study(StudyKind::Runs, vec![("a", runs)])).reading
        };
        assert_eq!(read(&[19, 1]), Reading::Supported);
        assert_eq!([read(&[20, 1]), read(&[1, 21])], [Reading::Undecided; 2]);
        assert_eq!(read(&[0, 0]), Reading::NotTested);
        assert_eq!(read(&[0, 19]), Reading::Supported, "a run without a mask says nothing");
    }

    #[test]
    fn one_difference_between_sampling_and_training_contradicts_exactness() {
        let read = |distances: &[f64]| {
            let steps =
                (1..).zip(distances).map(|(step, far)| metrics(step, &json!({"exactness_max_abs": far})));
            let claim =
                exactness(&study(StudyKind::Run, vec![("a", vec![run("s/a", &[], steps.collect())])]));
            (claim.reading, claim.evidence)
        };
        let all = (Reading::Supported, "max |logp − behavior_logp| = 0 over 3 steps".to_string());
        assert_eq!(read(&[0.0, 0.0, 0.0]), all);
        let one = (Reading::Contradicted, "max |logp − behavior_logp| = 0.5 over 3 steps".to_string());
        assert_eq!(read(&[0.0, 0.5, 0.0]), one);
    }

    #[test]
    fn what_a_run_fits_as_it_goes_is_among_its_parameters() {
        let fitted = |entropy_bonus: EntropyBonus| {
            let mut trained = run("s/a", &["objective.preset=stapo"], vec![metrics(1, &json!({}))]);
            trained.plan.objective.entropy_bonus = entropy_bonus;
            let csv = parameters(&study(StudyKind::Run, vec![("a", vec![trained])])).to_csv();
            csv.lines().filter(|line| line.contains(",fitted,")).count()
        };
        let adaptive = EntropyBonus::Target { initial: 0.0, target: 0.3, step: 0.01, min: 0.0, max: 1.0 };
        assert_eq!((fitted(EntropyBonus::None), fitted(adaptive)), (1, 2));
    }
}
