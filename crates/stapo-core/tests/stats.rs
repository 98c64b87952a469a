//! The statistics against `SciPy`, mpmath, statsmodels and enumeration; `goldens/make_stats.py` writes the numbers.

use serde::de::DeserializeOwned;
use serde_json::Value;
use stapo_core::stats::distribution::{normal_cdf, normal_quantile, t_quantile, t_two_sided};
use stapo_core::stats::*;

fn golden<T: DeserializeOwned>(path: &str) -> T {
    let all: Value = serde_json::from_str(include_str!("goldens/stats.json")).expect("goldens are JSON");
    let part = all.pointer(path).expect("the golden exists").clone();
    serde_json::from_value(part).expect("the golden has the asked shape")
}

#[track_caller]
fn assert_close(got: f64, expected: f64, relative: f64, what: &str) {
    let allowed = relative * expected.abs().max(1e-300);
    assert!((got - expected).abs() <= allowed, "{what}: {got:e}, expected {expected:e}");
}

#[test]
fn normal_matches_scipy() {
    for [x, p] in golden::<Vec<[f64; 2]>>("/normal/cdf") {
        assert_close(normal_cdf(x), p, 1e-13, &format!("cdf({x})"));
    }
    for [p, x] in golden::<Vec<[f64; 2]>>("/normal/quantile") {
        assert_close(normal_quantile(p), x, 1e-14, &format!("quantile({p})"));
    }
}

#[test]
fn student_matches_mpmath() {
    for [t, freedom, p] in golden::<Vec<[f64; 3]>>("/student/cdf") {
        let tail = 0.5 * t_two_sided(t, freedom);
        let cdf = if t > 0.0 { 1.0 - tail } else { tail };
        assert_close(cdf, p, 1e-12, &format!("cdf({t}, {freedom})"));
    }
    for [p, freedom, t] in golden::<Vec<[f64; 3]>>("/student/quantile") {
        assert_close(t_quantile(p, freedom), t, 1e-11, &format!("quantile({p}, {freedom})"));
    }
}

#[test]
fn quantile_matches_numpy() {
    let values: Vec<f64> = golden("/quantiles/values");
    for [q, expected] in golden::<Vec<[f64; 2]>>("/quantiles/quantile") {
        assert_close(quantile(&values, q).unwrap(), expected, 1e-15, &format!("quantile {q}"));
    }
}

#[test]
fn wilson_matches_scipy() {
    for [success, trials, level, low, high] in golden::<Vec<[f64; 5]>>("/wilson") {
        let interval = wilson(success as usize, trials as usize, level).unwrap();
        assert!((interval.low - low).abs() < 1e-14, "{success}/{trials}: {interval:?}, expected {low}");
        assert!((interval.high - high).abs() < 1e-14, "{success}/{trials}: {interval:?}, expected {high}");
    }
}

#[test]
fn pass_at_k_is_the_share_of_subsets_with_a_hit() {
    for [n, c, k, expected] in golden::<Vec<[f64; 4]>>("/pass_at_k") {
        let question = QuestionCount::new(n as usize, c as usize).unwrap();
        let value = pass_at_k(&[question], k as usize).unwrap().value;
        assert!((value - expected).abs() < 1e-13, "pass@{k} of {c}/{n}: {value}, expected {expected}");
    }
}

#[test]
fn maj_at_k_is_the_share_of_subsets_whose_vote_is_right() {
    for case in golden::<Vec<Value>>("/maj_at_k") {
        let answers: Vec<[usize; 2]> = serde_json::from_value(case["answers"].clone()).unwrap();
        let answers =
            answers.iter().map(|&[n_votes, n_correct]| AnswerVotes { n_votes, n_correct }).collect();
        let silent = case["silent"].as_u64().unwrap() as usize;
        let votes = QuestionVotes::new(answers, silent).unwrap();
        let value = maj_at_k(&[votes], case["k"].as_u64().unwrap() as usize).unwrap().value;
        assert!((value - case["value"].as_f64().unwrap()).abs() < 1e-13, "{case}: {value}");
    }
}

#[test]
fn clustered_errors_match_statsmodels() {
    for case in golden::<Vec<Value>>("/clustered") {
        let questions: Vec<Vec<f64>> = serde_json::from_value(case["questions"].clone()).unwrap();
        let scores: Vec<_> = questions.iter().map(|q| QuestionScores::new(q).unwrap()).collect();
        let estimate = clustered_mean(&scores).unwrap();
        let interval = estimate.interval.unwrap();
        let got = [estimate.value, estimate.standard_error.unwrap(), interval.low, interval.high];
        let expected: [f64; 4] = serde_json::from_value(case["clustered"].clone()).unwrap();
        for (got, expected) in got.into_iter().zip(expected) {
            assert_close(got, expected, 1e-11, "clustered");
        }
        assert_eq!(estimate.n_samples, questions.iter().map(Vec::len).sum::<usize>());
        assert_eq!(estimate.n_questions, questions.len());
    }
}

#[test]
fn bootstrap_intervals_match_scipy_on_its_replicates() {
    for case in golden::<Vec<Value>>("/bca") {
        let numbers = |name: &str| serde_json::from_value::<Vec<f64>>(case[name].clone()).unwrap();
        let values = numbers("values");
        let replicates = numbers("replicates");
        let n = values.len() as f64;
        let total: f64 = values.iter().sum();
        let jackknife: Vec<f64> = values.iter().map(|v| (total - v) / (n - 1.0)).collect();
        let bca = bca_interval(mean(&values).unwrap(), &replicates, &jackknife, 0.95).unwrap();
        let percentile = percentile_interval(&replicates, 0.95).unwrap();
        for (interval, name) in [(bca, "bca"), (percentile, "percentile")] {
            assert_close(interval.low, numbers(name)[0], 1e-12, name);
            assert_close(interval.high, numbers(name)[1], 1e-12, name);
        }
        // SciPy's draws and ours have only their distribution in common: 1e5 replicates put the ends of the intervals
        // within a few hundredths of a standard error.
        let resampling = Resampling { n_resamples: 100_000, ..Resampling::default() };
        let (ours, _) = paired_bootstrap(&values, &resampling).unwrap();
        let long = numbers("bca_long");
        assert!((ours.bca.low - long[0]).abs() < 0.05 * ours.standard_error, "{ours:?}, {long:?}");
        assert!((ours.bca.high - long[1]).abs() < 0.05 * ours.standard_error, "{ours:?}, {long:?}");
    }
}

#[test]
fn paired_tests_match_scipy() {
    for case in golden::<Vec<Value>>("/paired") {
        let name = case["name"].as_str().unwrap();
        let differences: Vec<f64> = serde_json::from_value(case["differences"].clone()).unwrap();
        let wilcoxon = wilcoxon_signed_rank(&differences).unwrap();
        let expected: [f64; 2] = serde_json::from_value(case["wilcoxon"].clone()).unwrap();
        assert_eq!(wilcoxon.statistic, expected[0], "{name}");
        assert_close(wilcoxon.p_value, expected[1], 1e-12, name);
        if let Ok([t, p]) = serde_json::from_value::<[f64; 2]>(case["t"].clone()) {
            let test = paired_t(&differences).unwrap();
            assert_close(test.statistic, t, 1e-12, name);
            assert_close(test.p_value, p, 1e-12, name);
        }
        if let Some(p) = case["permutation"].as_f64() {
            let test = paired_permutation(&differences, &Resampling::default()).unwrap();
            assert_eq!(test.method, Method::Exact, "{name}");
            assert_close(test.p_value, p, 1e-14, name);
        }
    }
}

#[test]
fn holm_matches_statsmodels() {
    for (p_values, expected) in golden::<Vec<(Vec<f64>, Vec<f64>)>>("/holm") {
        for (got, expected) in holm(&p_values).unwrap().into_iter().zip(expected) {
            assert_close(got, expected, 1e-15, "holm");
        }
    }
}

#[test]
fn detectable_effect_is_within_two_thousandths_of_the_noncentral_t() {
    for [n, alpha, power, effect] in golden::<Vec<[f64; 4]>>("/power") {
        let design = PairedDesign {
            effect_variance: 0.5,
            within_a: 1.0,
            within_b: 2.0,
            samples_a: 4.0,
            samples_b: 8.0,
            alpha,
            power,
        };
        assert_eq!(design.difference_variance(), 1.0);
        let got = design.minimum_detectable_effect(n as u64).unwrap();
        assert_close(got, effect, 2e-3, &format!("n {n}, alpha {alpha}, power {power}"));
    }
}
