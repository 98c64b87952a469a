//! Arguments without a statistic: each is named, and none gives a number.

use super::super::*;

const NAN: [f64; 2] = [1.0, f64::NAN];

#[track_caller]
fn refuses<T: std::fmt::Debug>(result: Result<T, StatsError>, named: &str) {
    let message = result.expect_err("must be refused").to_string();
    assert!(message.starts_with(named), "{message}");
}

#[test]
fn summaries_refuse_what_has_none() {
    refuses(mean(&[]), "values: 0 given, expected at least 1");
    refuses(mean(&NAN), "values[1]: NaN");
    refuses(quantile(&[], 0.5), "values: 0 given");
    refuses(quantile(&NAN, 0.5), "values[1]: NaN");
    refuses(quantile(&[1.0], 1.5), "q: 1.5");
    refuses(area_under_curve(&[1.0], &[]), "x and y: 1 against 0");
    refuses(area_under_curve(&[], &[]), "x: 0 given");
    refuses(area_under_curve(&NAN, &[1.0, 2.0]), "x[1]: NaN");
    refuses(area_under_curve(&[1.0, 2.0], &NAN), "y[1]: NaN");
    refuses(area_under_curve(&[2.0, 1.0], &[0.0; 2]), "x[1]: 1 after 2");
    refuses(entropy_stability(&[1.0]), "entropies: 1 given, expected at least 2");
    refuses(entropy_stability(&NAN), "entropies[1]: NaN");
    refuses(spearman(&[1.0], &[]), "x and y: 1 against 0");
    refuses(spearman(&[1.0], &[1.0]), "pairs: 1 given, expected at least 2");
    refuses(spearman(&NAN, &[1.0, 2.0]), "x[1]: NaN");
    refuses(spearman(&[1.0, 2.0], &NAN), "y[1]: NaN");
    let contest =
        |method, baselines: &[f64]| headline_gain(&[Contest { method, baselines: baselines.to_vec() }]);
    refuses(headline_gain(&[]), "contests: 0 given");
    refuses(contest(1.0, &[]), "baselines: 0 given");
    refuses(contest(1.0, &NAN), "baselines[1]: NaN");
    refuses(contest(f64::NAN, &[1.0]), "method[0]: NaN");
    refuses(contest(1.0, &[0.0]), "best baseline: 0");
}

#[test]
fn intervals_refuse_levels_and_counts_that_have_none() {
    refuses(QuestionScores::new(&[]), "scores: 0 given");
    refuses(QuestionScores::new(&NAN), "scores[1]: NaN");
    refuses(mean_estimate(&[]), "values: 0 given");
    refuses(mean_estimate(&NAN), "values[1]: NaN");
    refuses(t_interval(f64::NAN, 1.0, 1.0, 0.95), "value[0]: NaN");
    refuses(t_interval(0.0, -1.0, 1.0, 0.95), "standard_error: -1");
    refuses(t_interval(0.0, f64::INFINITY, 1.0, 0.95), "standard_error: inf");
    refuses(t_interval(0.0, 1.0, 0.0, 0.95), "freedom: 0");
    refuses(t_interval(0.0, 1.0, f64::NAN, 0.95), "freedom: NaN");
    for level in [0.0, 1.0, f64::NAN] {
        refuses(t_interval(0.0, 1.0, 1.0, level), "level: ");
        refuses(wilson(1, 2, level), "level: ");
        refuses(percentile_interval(&[1.0, 2.0], level), "level: ");
        refuses(bca_interval(1.0, &[1.0, 2.0], &[1.0, 2.0], level), "level: ");
    }
    refuses(wilson(0, 0, 0.95), "question has 0 correct of 0 samples");
    refuses(wilson(3, 2, 0.95), "question has 3 correct of 2 samples");
    let one = QuestionScores::new(&[1.0]).unwrap();
    refuses(variance_components(&[one]), "questions: 1 given, expected at least 2");
    refuses(variance_components(&[one; 2]), "samples beyond the first of a question: 0 given");
}

#[test]
fn resampling_refuses_what_cannot_be_resampled() {
    let with = |n_resamples, level| Resampling { n_resamples, level, ..Resampling::default() };
    let good = Resampling::default();
    let first = |questions: &[usize]| questions[0] as f64;
    refuses(bootstrap(1, &good, first), "questions: 1 given, expected at least 2");
    refuses(bootstrap(2, &with(1, 0.95), first), "n_resamples: 1 given, expected at least 2");
    refuses(bootstrap(2, &with(9, 2.0), first), "level: 2");
    refuses(paired_bootstrap(&[1.0], &good), "questions: 1 given");
    refuses(paired_bootstrap(&NAN, &good), "values[1]: NaN");
    refuses(paired_bootstrap(&[1.0, 2.0], &with(1, 0.95)), "n_resamples: 1 given");
    refuses(percentile_interval(&[], 0.95), "replicates: 0 given");
    refuses(percentile_interval(&NAN, 0.95), "replicates[1]: NaN");
    refuses(bca_interval(f64::NAN, &[1.0], &[1.0; 2], 0.95), "value[0]: NaN");
    refuses(bca_interval(1.0, &[1.0], &[1.0], 0.95), "jackknife: 1 given, expected at least 2");
    refuses(bca_interval(1.0, &[1.0], &NAN, 0.95), "jackknife[1]: NaN");
    refuses(paired_permutation(&[], &good), "differences: 0 given");
    refuses(paired_permutation(&NAN, &good), "differences[1]: NaN");
    refuses(paired_permutation(&[1.0], &with(0, 0.95)), "n_resamples: 0 given, expected at least 1");
    refuses(paired_permutation(&[1.0], &with(9, 0.0)), "level: 0");
}

#[test]
fn comparisons_refuse_what_cannot_be_paired() {
    let good = Resampling::default();
    refuses(compare_paired(&[1.0], &[], &good), "baseline and candidate: 1 against 0");
    refuses(compare_paired(&[1.0], &[1.0], &good), "questions: 1 given, expected at least 2");
    refuses(compare_paired(&NAN, &[1.0; 2], &good), "baseline[1]: NaN");
    refuses(compare_paired(&[1.0; 2], &NAN, &good), "candidate[1]: NaN");
    refuses(paired_t(&[1.0]), "differences: 1 given, expected at least 2");
    refuses(paired_t(&NAN), "differences[1]: NaN");
    refuses(paired_t(&[1e308, 1e308, 0.0]), "mean and standard error[0]: inf");
    refuses(wilcoxon_signed_rank(&[]), "differences: 0 given");
    refuses(wilcoxon_signed_rank(&NAN), "differences[1]: NaN");
}

#[test]
fn designs_refuse_impossible_settings() {
    let components = VarianceComponents { between: 0.3, within: 0.2, inverse_samples: 1.0 };
    let design = PairedDesign::planned(&components, 0.5, 4).unwrap();
    refuses(PairedDesign::planned(&components, 1.5, 4), "correlation: 1.5");
    refuses(PairedDesign::planned(&components, 0.5, 0), "samples_a: 0, expected at least 1");
    let changed: [(&str, PairedDesign); 8] = [
        ("effect_variance: -1", PairedDesign { effect_variance: -1.0, ..design }),
        ("within_a: inf", PairedDesign { within_a: f64::INFINITY, ..design }),
        ("within_b: NaN", PairedDesign { within_b: f64::NAN, ..design }),
        ("samples_a: NaN", PairedDesign { samples_a: f64::NAN, ..design }),
        ("samples_b: 0.5", PairedDesign { samples_b: 0.5, ..design }),
        ("alpha: 0", PairedDesign { alpha: 0.0, ..design }),
        ("power: 0.4", PairedDesign { power: 0.4, ..design }),
        ("power: 1", PairedDesign { power: 1.0, ..design }),
    ];
    for (named, design) in changed {
        refuses(design.minimum_detectable_effect(9), named);
        refuses(design.questions_needed(0.1), named);
    }
    refuses(design.minimum_detectable_effect(1), "questions: 1 given, expected at least 2");
    let scores = [QuestionScores::new(&[0.0, 1.0]).unwrap(); 2];
    refuses(PairedDesign::measured(&scores, &scores[..1]), "arms: 2 against 1");
}

#[test]
fn survival_refuses_times_that_are_none() {
    let life = |time| Lifetime { time, is_event: true };
    refuses(kaplan_meier(&[], 0.95), "lifetimes: 0 given");
    refuses(kaplan_meier(&[life(1.0), life(f64::NAN)], 0.95), "lifetimes[1]: NaN");
    refuses(kaplan_meier(&[life(-1.0)], 0.95), "lifetimes: -1");
    refuses(kaplan_meier(&[life(1.0)], 1.0), "level: 1");
    let subjects = [0, 1].map(|group| Subject { group, stratum: 0, lifetime: life(1.0) });
    let good = Resampling::default();
    refuses(log_rank(&[], &good), "lifetimes: 0 given");
    refuses(log_rank(&subjects[..1], &good), "groups: 1 given, expected at least 2");
    refuses(log_rank(&subjects, &Resampling { n_resamples: 0, ..good }), "n_resamples: 0 given");
}
