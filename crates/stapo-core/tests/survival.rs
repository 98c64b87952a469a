//! Survival curves, log-rank tests, the chi-squared distribution and Spearman's correlation against `SciPy`, lifelines and
//! statsmodels; `goldens/make_survival.py` writes the numbers.

use serde_json::Value;
use stapo_core::stats::distribution::chi_squared_upper;
use stapo_core::stats::{Lifetime, Resampling, Subject, kaplan_meier, log_rank, spearman};

fn golden(part: &str) -> Vec<Value> {
    let all: Value = serde_json::from_str(include_str!("goldens/survival.json")).expect("goldens are JSON");
    all[part].as_array().expect("the golden exists").clone()
}

#[track_caller]
fn assert_close(got: f64, expected: &Value, relative: f64) {
    let expected = expected.as_f64().expect("a number");
    assert!(
        (got - expected).abs() <= relative * expected.abs().max(1e-300),
        "{got:e}, expected {expected:e}"
    );
}

fn lifetimes(case: &Value) -> Vec<Lifetime> {
    let times = case["times"].as_array().unwrap().iter().map(|time| time.as_f64().unwrap());
    let events = case["events"].as_array().unwrap().iter().map(|event| event == 1);
    times.zip(events).map(|(time, is_event)| Lifetime { time, is_event }).collect()
}

#[test]
fn survival_curves_match_lifelines() {
    for case in golden("curves") {
        let found = kaplan_meier(&lifetimes(&case), 0.95).unwrap();
        let expected = case["steps"].as_array().unwrap();
        assert_eq!(found.len(), expected.len());
        for (step, expected) in found.iter().zip(expected) {
            assert_eq!(step.time, expected[0].as_f64().unwrap());
            assert!((step.survival - expected[1].as_f64().unwrap()).abs() < 1e-12, "{step:?}");
            match step.interval {
                Some(interval) => {
                    assert_close(interval.low, &expected[2], 1e-9);
                    assert_close(interval.high, &expected[3], 1e-9);
                }
                None => assert!(expected[2].is_null(), "{step:?}, expected {expected}"),
            }
        }
    }
}

fn subjects(case: &Value) -> Vec<Subject> {
    let rows = case["subjects"].as_array().unwrap().iter();
    rows.map(|row| {
        let number = |idx: usize| row[idx].as_u64().unwrap() as usize;
        let lifetime = Lifetime { time: number(0) as f64, is_event: number(1) == 1 };
        Subject { group: number(2), stratum: number(3), lifetime }
    })
    .collect()
}

#[test]
fn log_rank_tests_match_lifelines_and_statsmodels() {
    for case in golden("log_rank") {
        let test = log_rank(&subjects(&case), &Resampling::default()).unwrap();
        assert_close(test.statistic, &case["test"][0], 1e-9);
        assert_close(test.p_value, &case["test"][1], 1e-9);
        // With these numbers of events the distribution is near its limit, and the two p values near each other.
        assert!((test.p_permutation - test.p_value).abs() < 0.05, "{test:?}");
    }
}

#[test]
fn groups_that_never_meet_have_the_least_p_and_no_event_gives_one() {
    let subject =
        |group, time, is_event| Subject { group, stratum: 0, lifetime: Lifetime { time, is_event } };
    let apart: Vec<Subject> =
        (0..4).flat_map(|idx| [subject(0, 1.0 + f64::from(idx), true), subject(1, 100.0, false)]).collect();
    let test = log_rank(&apart, &Resampling::default()).unwrap();
    // Of the 70 ways to deal four of eight, two are as far apart as this one.
    assert!((test.p_permutation - 2.0 / 70.0).abs() < 0.01, "{test:?}");
    // Four events of group 0, of which 4/8 + 3/7 + 2/6 + 1/5 were to be expected.
    assert!((test.excess - (4.0 - 4.0 / 8.0 - 3.0 / 7.0 - 2.0 / 6.0 - 1.0 / 5.0)).abs() < 1e-12, "{test:?}");
    let calm = [subject(0, 5.0, false), subject(1, 5.0, false)];
    let test = log_rank(&calm, &Resampling::default()).unwrap();
    assert_eq!((test.p_value, test.p_permutation, test.n_events), (1.0, 1.0, 0));
    assert!(
        log_rank(&[subject(0, 1.0, true)], &Resampling::default()).is_err(),
        "one group is no comparison"
    );
    assert!(kaplan_meier(&[Lifetime { time: -1.0, is_event: true }], 0.95).is_err());
}

#[test]
fn chi_squared_matches_scipy() {
    for case in golden("chi_squared") {
        let found = chi_squared_upper(case[0].as_f64().unwrap(), case[1].as_f64().unwrap());
        assert_close(found, &case[2], 1e-12);
    }
    assert_eq!(chi_squared_upper(0.0, 3.0), 1.0);
    assert!(chi_squared_upper(1.0, 0.0).is_nan());
}

#[test]
fn spearman_matches_scipy() {
    for case in golden("spearman") {
        let column = |idx: usize| -> Vec<f64> { serde_json::from_value(case[idx].clone()).unwrap() };
        let found = spearman(&column(0), &column(1)).unwrap().unwrap();
        assert!((found - case[2].as_f64().unwrap()).abs() < 1e-14, "{found}");
    }
    assert_eq!(spearman(&[1.0, 1.0], &[1.0, 2.0]).unwrap(), None, "equal values have no order");
}
