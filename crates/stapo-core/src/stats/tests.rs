mod limits;
mod refused;

use super::distribution::{normal_cdf, normal_quantile, t_quantile, t_two_sided};
use super::*;
use crate::random::Key;

fn counts(pairs: &[(usize, usize)]) -> Vec<QuestionCount> {
    pairs.iter().map(|&(n, c)| QuestionCount::new(n, c).unwrap()).collect()
}

/// P(T <= t).
fn t_cdf(t: f64, freedom: f64) -> f64 {
    let tail = 0.5 * t_two_sided(t, freedom);
    if t > 0.0 { 1.0 - tail } else { tail }
}

fn holds(interval: Interval, value: f64) -> bool {
    interval.low <= value && value <= interval.high
}

/// A standard normal number (Box, Muller 1958).
fn normal(key: Key) -> f64 {
    let turn = std::f64::consts::TAU * key.with(1).uniform();
    (-2.0 * (1.0 - key.uniform()).ln()).sqrt() * turn.cos()
}

#[test]
fn distributions_are_total() {
    for x in [f64::NAN, f64::NEG_INFINITY, f64::INFINITY, f64::MAX, 5e-324, 0.0, -0.0] {
        for freedom in [f64::NAN, -1.0, 0.0, 1e-3, 1.0, 499.0, 501.0, 1e300, f64::INFINITY] {
            for p in [t_cdf(x, freedom), t_two_sided(x, freedom)] {
                let is_valid = !x.is_nan() && freedom > 0.0;
                assert_eq!((0.0..=1.0).contains(&p), is_valid, "t {x}, freedom {freedom}: {p}");
                assert_eq!(p.is_nan(), !is_valid);
            }
            for p in [x, 5e-324, f64::EPSILON, 0.5 + f64::EPSILON, 1.0 - f64::EPSILON] {
                let t = t_quantile(p, freedom);
                assert_eq!(t.is_nan(), !((0.0..=1.0).contains(&p) && freedom > 0.0), "{p}, {freedom}: {t}");
            }
        }
    }
    assert!(
        normal_quantile(-0.1).is_nan() && normal_quantile(f64::NAN).is_nan() && normal_cdf(f64::NAN).is_nan()
    );
    assert!((normal_quantile(5e-324) + 38.4).abs() < 0.1);
    assert_eq!((normal_quantile(0.0), normal_quantile(1.0)), (f64::NEG_INFINITY, f64::INFINITY));
}

#[test]
fn quantiles_invert_the_distribution_functions() {
    for i in 1..2000 {
        let p = f64::from(i) / 2000.0;
        assert!((normal_cdf(normal_quantile(p)) - p).abs() < 4e-16 + 1e-15 * p);
        for freedom in [0.7, 1.0, 4.0, 29.0, 499.9, 500.0, 1e5] {
            let back = t_cdf(t_quantile(p, freedom), freedom);
            assert!((back - p).abs() < 1e-13, "p {p}, freedom {freedom}: {back}");
        }
    }
}

#[test]
fn student_has_its_closed_forms() {
    for t in [-40.0_f64, -3.0, -0.2, 0.0, 0.7, 12.0] {
        let cauchy = 0.5 + t.atan() / std::f64::consts::PI;
        assert!((t_cdf(t, 1.0) - cauchy).abs() < 1e-15);
        assert!((t_cdf(t, 2.0) - 0.5 * (1.0 + t / (2.0 + t * t).sqrt())).abs() < 1e-15);
    }
}

#[test]
fn the_expansion_meets_the_continued_fraction() {
    for t in [0.01, 0.5, 1.0, 2.0, 5.0, 8.0] {
        let (below, above) = (t_cdf(-t, 499.999_999), t_cdf(-t, 500.0));
        assert!((below / above - 1.0).abs() < 1e-8, "t {t}: {below} against {above}");
    }
}

#[test]
fn avg_at_k_weighs_questions_not_samples() {
    let estimate = avg_at_k(&counts(&[(1, 1), (9, 0)])).unwrap();
    assert_eq!((estimate.value, estimate.n_questions, estimate.n_samples), (0.5, 2, 10));
    assert_eq!(estimate.interval.unwrap(), Interval { low: 0.0, high: 1.0, level: LEVEL });
}

#[test]
fn avg_at_k_is_the_clustered_mean_of_zeros_and_ones() {
    let pairs = [(4, 1), (8, 6), (2, 2), (5, 0)];
    let questions = counts(&pairs);
    let scores: Vec<_> = pairs
        .iter()
        .map(|&(n, n_correct)| {
            let ones = (0..n).map(|i| f64::from(u8::from(i < n_correct))).collect::<Vec<_>>();
            QuestionScores::new(&ones).unwrap()
        })
        .collect();
    let (a, b) = (avg_at_k(&questions).unwrap(), clustered_mean(&scores).unwrap());
    assert_eq!((a.value, a.standard_error, a.n_samples), (b.value, b.standard_error, b.n_samples));
    let from_counts = questions.iter().map(QuestionCount::scores).collect::<Vec<_>>();
    let (a, b) = (variance_components(&from_counts).unwrap(), variance_components(&scores).unwrap());
    assert!((a.within - b.within).abs() < 1e-15 && (a.between - b.between).abs() < 1e-15);
}

#[test]
fn pass_at_one_is_the_average_and_pass_grows_with_k() {
    let questions = counts(&[(32, 0), (32, 1), (32, 9), (32, 31), (32, 32)]);
    let average = avg_at_k(&questions).unwrap();
    assert!((pass_at_k(&questions, 1).unwrap().value - average.value).abs() < 1e-15);
    let passes: Vec<f64> = (1..=32).map(|k| pass_at_k(&questions, k).unwrap().value).collect();
    assert!(passes.is_sorted());
    assert_eq!(passes[31], 0.8);
}

#[test]
fn a_benchmark_without_spread_still_has_an_interval() {
    let none_right = avg_at_k(&counts(&[(32, 0); 30])).unwrap();
    let interval = none_right.interval.unwrap();
    assert_eq!(interval, wilson(0, 30, LEVEL).unwrap());
    assert!(interval.high > 0.1);
    assert_eq!(avg_at_k(&counts(&[(4, 4); 30])).unwrap().interval.unwrap().high, 1.0);
}

/// The mean of three tenths is not a tenth in floating point.
#[test]
fn equal_questions_have_their_value_and_no_error() {
    let estimate = avg_at_k(&counts(&[(10, 1); 3])).unwrap();
    assert_ne!(mean(&[0.1; 3]).unwrap(), 0.1);
    assert_eq!((estimate.value, estimate.standard_error), (0.1, Some(0.0)));
    assert_eq!(counts(&[(10, 1)])[0].n_samples(), 10);
}

#[test]
fn one_question_has_a_value_and_no_interval() {
    let estimate = avg_at_k(&counts(&[(4, 3)])).unwrap();
    assert_eq!((estimate.value, estimate.standard_error, estimate.interval), (0.75, None, None));
}

#[test]
fn variance_components_are_recovered() {
    let key = Key::new(21);
    let questions: Vec<_> = (0..20_000)
        .map(|q| {
            let key = key.with(q);
            let center = 0.5 * normal(key.with(0));
            let scores: Vec<f64> = (0..2 + q % 5).map(|s| center + normal(key.with(1 + s))).collect();
            QuestionScores::new(&scores).unwrap()
        })
        .collect();
    let components = variance_components(&questions).unwrap();
    assert!((components.within - 1.0).abs() < 0.03, "{components:?}");
    assert!((components.between - 0.25).abs() < 0.03, "{components:?}");
}

/// The share of runs whose interval holds the truth, for questions that are answered with chance u^2, u uniform. The
/// truth is E[u^2] = 1/3.
fn coverage(n_runs: u64, n_questions: u64, n_samples: u64) -> f64 {
    let n_covered = (0..n_runs).filter(|&run| {
        let key = Key::new(77).with(n_questions).with(run);
        let questions: Vec<QuestionCount> = (0..n_questions)
            .map(|q| {
                let key = key.with(q);
                let chance = key.uniform().powi(2);
                let n_correct = (0..n_samples).filter(|&s| key.with(s).uniform() < chance).count();
                QuestionCount::new(n_samples as usize, n_correct).unwrap()
            })
            .collect();
        holds(avg_at_k(&questions).unwrap().interval.unwrap(), 1.0 / 3.0)
    });
    n_covered.count() as f64 / n_runs as f64
}

#[test]
fn intervals_cover_the_truth_at_their_level() {
    for (n_runs, n_questions, n_samples) in [(3000, 10_000, 4), (8000, 30, 32), (5000, 500, 4)] {
        let share = coverage(n_runs, n_questions, n_samples);
        assert!((share - 0.95).abs() < 0.01, "{n_questions} questions, {n_samples} samples: {share}");
    }
}

#[test]
fn samples_taken_for_questions_would_not_cover() {
    // 32 samples of 30 questions counted as 960 independent trials give far too narrow an interval: the reason for
    // clustering.
    let n_runs = 2000;
    let n_covered = (0..n_runs).filter(|&run| {
        let key = Key::new(78).with(run);
        let n_correct = (0..30)
            .flat_map(|q| (0..32).map(move |s| (q, s)))
            .filter(|&(q, s)| key.with(q).with(s).uniform() < key.with(q).uniform().powi(2))
            .count();
        holds(wilson(n_correct, 960, LEVEL).unwrap(), 1.0 / 3.0)
    });
    let share = n_covered.count() as f64 / n_runs as f64;
    assert!(share < 0.5, "{share}");
}

#[test]
fn bootstrap_is_a_function_of_its_seed() {
    let values = [0.0, 0.25, 1.0, 0.5, 0.75, 0.125];
    let with_seed = |seed| {
        paired_bootstrap(&values, &Resampling { n_resamples: 500, seed, ..Resampling::default() }).unwrap()
    };
    assert_eq!(with_seed(1), with_seed(1));
    assert_ne!(with_seed(1), with_seed(2));
}

#[test]
fn bootstrap_takes_any_statistic_and_keeps_its_error() {
    let key = Key::new(5);
    let values: Vec<f64> = (0..400).map(|i| normal(key.with(i))).collect();
    let resampling = Resampling { n_resamples: 4000, ..Resampling::default() };
    let (mean, _) = paired_bootstrap(&values, &resampling).unwrap();
    let expected = mean_estimate(&values).unwrap().standard_error.unwrap();
    assert!((mean.standard_error / expected - 1.0).abs() < 0.05, "{mean:?}");
    let indexed = bootstrap(values.len(), &resampling, |questions| {
        questions.iter().map(|&q| values[q]).sum::<f64>() / questions.len() as f64
    })
    .unwrap();
    assert!((indexed.bca.low - mean.bca.low).abs() < 1e-12 && indexed.percentile == mean.percentile);
    let median = bootstrap(values.len(), &resampling, |questions| {
        quantile(&questions.iter().map(|&q| values[q]).collect::<Vec<_>>(), 0.5).unwrap()
    })
    .unwrap();
    assert_eq!(median.value, quantile(&values, 0.5).unwrap());
    assert!(holds(median.bca, median.value) && holds(median.percentile, median.value));
}

#[test]
fn bootstrap_without_spread_has_no_width() {
    let (bootstrapped, _) = paired_bootstrap(&[0.1; 7], &Resampling::default()).unwrap();
    assert_eq!((bootstrapped.bca.low, bootstrapped.bca.high), (bootstrapped.value, bootstrapped.value));
}

#[test]
fn bca_is_defined_where_the_value_lies_outside_its_replicates() {
    let replicates: Vec<f64> = (0..100).map(f64::from).collect();
    let interval = bca_interval(-5.0, &replicates, &[1.0, 2.0, 9.0], 0.999_999).unwrap();
    assert!(interval.low >= 0.0 && interval.high <= 99.0 && interval.low <= interval.high);
    // The share 1 is kept half a replicate away from 1: 2.90005 by mpmath.
    let above = bca_interval(5.0, &[1.0, 2.0, 3.0, 4.0], &[5.0, 5.0], 0.95).unwrap();
    assert!((above.low - 2.900_045_116_012).abs() < 1e-9 && above.high > 3.99, "{above:?}");
}

#[test]
fn comparison_points_from_baseline_to_candidate() {
    let baseline = [0.25, 0.5, 0.0, 1.0, 0.5];
    let candidate = [0.5, 0.75, 0.0, 0.75, 1.0];
    let comparison = compare_paired(&baseline, &candidate, &Resampling::default()).unwrap();
    assert_eq!(comparison.difference, 0.15);
    assert_eq!((comparison.n_better, comparison.n_worse, comparison.n_equal), (3, 1, 1));
    let mirrored = compare_paired(&candidate, &baseline, &Resampling::default()).unwrap();
    assert_eq!(mirrored.difference, -comparison.difference);
    assert_eq!(mirrored.p_permutation, comparison.p_permutation);
    assert_eq!(mirrored.p_wilcoxon, comparison.p_wilcoxon);
    assert_eq!(mirrored.p_t, comparison.p_t);
}

#[test]
fn an_arm_equals_itself() {
    let comparison = compare_paired(&[0.5, 1.0, 0.25], &[0.5, 1.0, 0.25], &Resampling::default()).unwrap();
    let p_values = [comparison.p_permutation, comparison.p_wilcoxon, comparison.p_t, comparison.p_bootstrap];
    assert_eq!(p_values, [1.0; 4]);
    assert_eq!((comparison.interval.low, comparison.interval.high), (0.0, 0.0));
}

#[test]
fn comparisons_survive_json() {
    let same_shift = compare_paired(&[0.0; 600], &[0.5; 600], &Resampling::default()).unwrap();
    assert_eq!(same_shift.p_t, 0.0);
    let estimate = avg_at_k(&counts(&[(4, 3)])).unwrap();
    let text = serde_json::to_string(&(same_shift, estimate)).unwrap();
    assert_eq!(serde_json::from_str::<(PairedComparison, Estimate)>(&text).unwrap(), (same_shift, estimate));
    let test = paired_t(&[0.5; 3]).unwrap();
    assert!(test.statistic.is_finite() && test.p_value == 0.0);
}

/// The share of runs that `reject` rejects. A run has two arms with 16 samples each on 40 questions whose true
/// difference spreads by 0.1 about `effect`.
fn rejection_share(effect: f64, n_runs: u64, reject: impl Fn(&[f64]) -> bool) -> f64 {
    let n_rejected = (0..n_runs).filter(|&run| {
        let key = Key::new(31).with(run);
        let differences: Vec<f64> = (0..40)
            .map(|q| {
                let key = key.with(q);
                let chance = 0.2 + 0.5 * key.uniform();
                let shifted = chance + effect + 0.1 * normal(key.with(100));
                let count = |arm: u64, chance: f64| {
                    (0..16).filter(|&s| key.with(arm).with(s).uniform() < chance).count() as f64
                };
                (count(1, shifted) - count(0, chance)) / 16.0
            })
            .collect();
        reject(&differences)
    });
    n_rejected.count() as f64 / n_runs as f64
}

#[test]
fn tests_keep_their_level_when_nothing_differs() {
    let n_runs = 4000;
    let alpha = 0.05;
    let permutation = rejection_share(0.0, n_runs, |d| {
        paired_permutation(d, &Resampling::default()).unwrap().p_value <= alpha
    });
    let wilcoxon = rejection_share(0.0, n_runs, |d| wilcoxon_signed_rank(d).unwrap().p_value <= alpha);
    let t = rejection_share(0.0, n_runs, |d| paired_t(d).unwrap().p_value <= alpha);
    for (name, share) in [("permutation", permutation), ("wilcoxon", wilcoxon), ("t", t)] {
        assert!((share - alpha).abs() < 0.012, "{name}: {share}");
    }
    // The bootstrap does not correct for degrees of freedom, so with 40 questions the test rejects a little too often.
    let resampling = Resampling { n_resamples: 400, ..Resampling::default() };
    let bootstrap = rejection_share(0.0, 2000, |d| paired_bootstrap(d, &resampling).unwrap().1 <= alpha);
    assert!(bootstrap > 0.04 && bootstrap < 0.07, "bootstrap: {bootstrap}");
}

#[test]
fn the_minimum_detectable_effect_is_detected_with_its_power() {
    // Chances in 0.2..0.7: mean of p (1 - p) = E p - E p^2 = 0.45 - 0.2025 - 1/48.
    let within = 0.45 - 0.2025 - 0.25 / 12.0;
    let design = PairedDesign {
        effect_variance: 0.01,
        within_a: within,
        within_b: within,
        samples_a: 16.0,
        samples_b: 16.0,
        alpha: 0.05,
        power: 0.8,
    };
    let effect = design.minimum_detectable_effect(40).unwrap();
    let power = rejection_share(effect, 4000, |d| paired_t(d).unwrap().p_value <= 0.05);
    assert!((power - 0.8).abs() < 0.03, "effect {effect}, power {power}");
}

#[test]
fn questions_needed_inverts_the_detectable_effect() {
    let components = VarianceComponents { between: 0.1, within: 0.15, inverse_samples: 0.25 };
    let design = PairedDesign::planned(&components, 0.8, 4).unwrap();
    for effect in [0.5, 0.1, 0.02, 1e-3] {
        let n = design.questions_needed(effect).unwrap();
        assert!(design.minimum_detectable_effect(n).unwrap() <= effect);
        assert!(
            n == 2 || design.minimum_detectable_effect(n - 1).unwrap() > effect,
            "effect {effect}, n {n}"
        );
    }
    let certain = PairedDesign { effect_variance: 0.0, within_a: 0.0, within_b: 0.0, ..design };
    assert_eq!(certain.questions_needed(1e-9).unwrap(), 2);
    assert!(design.questions_needed(1e-12).is_err());
}

#[test]
fn a_measured_design_splits_the_variance_of_differences() {
    let key = Key::new(55);
    let mut a = vec![];
    let mut b = vec![];
    for q in 0..20_000 {
        let key = key.with(q);
        let center = normal(key.with(0));
        let shift = 0.3 * normal(key.with(1));
        let draw = |arm: u64, n: u64, center: f64| {
            let scores: Vec<f64> = (0..n).map(|s| center + normal(key.with(arm).with(s))).collect();
            QuestionScores::new(&scores).unwrap()
        };
        a.push(draw(2, 4, center));
        b.push(draw(3, 8, center + shift));
    }
    let design = PairedDesign::measured(&a, &b).unwrap();
    assert!((design.effect_variance - 0.09).abs() < 0.02, "{design:?}");
    assert_eq!((design.samples_a, design.samples_b), (4.0, 8.0));
    assert!((design.difference_variance() - (0.09 + 0.25 + 0.125)).abs() < 0.02, "{design:?}");
}

#[test]
fn wilcoxon_ignores_the_rounding_of_shares() {
    // 0.3 - 0.1 and 0.2 differ in the last bit, yet share one rank.
    let test = wilcoxon_signed_rank(&[0.3 - 0.1, -0.2, 0.4]).unwrap();
    assert_eq!((test.statistic, test.p_value), (1.5, 0.75));
    assert_eq!(wilcoxon_signed_rank(&[0.0, 0.0]).unwrap().p_value, 1.0);
}

#[test]
fn summaries_of_a_series() {
    assert_eq!(quantile_sorted(&[1.0_f32, 2.0, 4.0], 0.75), 3.0);
    assert_eq!(quantile_sorted(&[7_u8], 0.3), 7.0);
    assert_eq!(area_under_curve(&[0.0, 1.0, 3.0], &[0.0, 1.0, 0.5]).unwrap(), 2.0);
    assert_eq!(area_under_curve(&[5.0], &[1.0]).unwrap(), 0.0);
    assert_eq!(entropy_stability(&[1.0, 0.75, 1.25, 1.0]).unwrap(), -0.5);
}

#[test]
fn invalid_input_is_named() {
    let say = |error: StatsError| error.to_string();
    assert_eq!(say(mean(&[]).unwrap_err()), "values: 0 given, expected at least 1");
    assert_eq!(say(mean(&[1.0, f64::NAN]).unwrap_err()), "values[1]: NaN, expected a finite number");
    assert_eq!(
        say(compare_paired(&[0.5], &[0.5, 1.0], &Resampling::default()).unwrap_err()),
        "baseline and candidate: 1 against 2 entries, expected one pair per question"
    );
    assert_eq!(
        say(pass_at_k(&counts(&[(8, 1), (4, 1)]), 8).unwrap_err()),
        "question 1: k = 8, expected 1 to 4, its number of samples\nhint: lower k or draw more samples"
    );
    assert_eq!(
        say(area_under_curve(&[0.0, 2.0, 1.0], &[0.0; 3]).unwrap_err()),
        "x[2]: 1 after 2, expected no step back along the curve"
    );
    assert_eq!(say(holm(&[0.5, 1.5]).unwrap_err()), "p value: 1.5, expected a number from 0 to 1");
}

#[test]
fn every_entrance_refuses_bad_values() {
    let resampling = Resampling::default();
    let nan = [0.5, f64::NAN];
    assert!(QuestionCount::new(0, 0).is_err() && QuestionCount::new(3, 4).is_err());
    assert!(QuestionScores::new(&[]).is_err() && QuestionScores::new(&nan).is_err());
    assert!(avg_at_k(&[]).is_err() && pass_at_k(&[], 1).is_err() && maj_at_k(&[], 1).is_err());
    assert!(clustered_mean(&[]).is_err() && variance_components(&[]).is_err());
    assert!(wilson(1, 0, 0.95).is_err() && wilson(2, 1, 0.95).is_err() && wilson(1, 2, 1.0).is_err());
    assert!(t_interval(0.0, -1.0, 3.0, 0.95).is_err() && t_interval(0.0, 1.0, 0.0, 0.95).is_err());
    assert!(paired_bootstrap(&nan, &resampling).is_err() && paired_bootstrap(&[1.0], &resampling).is_err());
    assert!(paired_bootstrap(&[1.0, 2.0], &Resampling { n_resamples: 0, ..resampling }).is_err());
    assert!(paired_bootstrap(&[1.0, 2.0], &Resampling { level: f64::NAN, ..resampling }).is_err());
    assert!(bootstrap(3, &resampling, |_| f64::NAN).is_err());
    assert!(paired_permutation(&[], &resampling).is_err() && paired_permutation(&nan, &resampling).is_err());
    assert!(wilcoxon_signed_rank(&[]).is_err() && wilcoxon_signed_rank(&nan).is_err());
    assert!(paired_t(&[1.0]).is_err() && paired_t(&nan).is_err());
    assert!(compare_paired(&nan, &[0.0, 0.0], &resampling).is_err());
    assert!(holm(&[f64::NAN]).is_err() && holm(&[]).unwrap().is_empty());
    assert!(quantile(&[1.0], 1.1).is_err() && quantile(&[], 0.5).is_err() && quantile(&nan, 0.5).is_err());
    assert!(entropy_stability(&[1.0]).is_err());
    let components = VarianceComponents { between: 0.1, within: 0.15, inverse_samples: 0.25 };
    assert!(PairedDesign::planned(&components, 1.5, 4).is_err());
    assert!(PairedDesign::planned(&components, 0.5, 0).is_err());
    let design = PairedDesign::planned(&components, 0.5, 4).unwrap();
    assert!(design.questions_needed(0.0).is_err() && design.questions_needed(f64::NAN).is_err());
    assert!(design.minimum_detectable_effect(1).is_err());
    assert!(PairedDesign { power: 0.3, ..design }.minimum_detectable_effect(10).is_err());
    assert!(PairedDesign { within_a: -1.0, ..design }.minimum_detectable_effect(10).is_err());
}

#[test]
fn arms_are_paired_by_seed_and_adjusted_over_those_compared() {
    let method = [(0, 0.9), (1, 0.8), (2, 0.85), (3, 0.7)];
    let arms = [
        // Out of order, with a seed that the method does not have.
        vec![(9, 0.1), (2, 0.80), (0, 0.85), (1, 0.75), (3, 0.65)],
        vec![(0, 0.5)],
        vec![(1, 0.81), (0, 0.89)],
    ];
    let resampling = Resampling::default();
    let found = compare_by_seed(&method, &arms, &resampling).unwrap();
    assert!(found[1].is_none(), "one seed cannot be compared");
    let (first, last) = (found[0].as_ref().unwrap(), found[2].as_ref().unwrap());
    assert_eq!((first.paired.n_questions, first.paired.n_better), (4, 4));
    assert!((first.paired.difference - 0.05).abs() < 1e-12 && last.paired.difference.abs() < 1e-12);
    let p = holm(&[first.paired.p_permutation, last.paired.p_permutation]).unwrap();
    assert_eq!([first.p_adjusted, last.p_adjusted], p[..]);
    assert_eq!(
        first.paired,
        compare_paired(&[0.80, 0.85, 0.75, 0.65], &[0.85, 0.9, 0.8, 0.7], &resampling).unwrap()
    );
}
