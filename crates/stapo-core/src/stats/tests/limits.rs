//! Exact values where a rule changes, and what small numbers do.

use super::super::distribution::{chi_squared_upper, t_quantile, t_two_sided};
use super::super::power::PairedDesign;
use super::super::*;

#[test]
fn distributions_at_their_edges() {
    for (x, freedom) in [(f64::NAN, 5.0), (4.0, f64::NAN), (4.0, 0.0), (4.0, -1.0), (1.0, -3.0)] {
        assert!(chi_squared_upper(x, freedom).is_nan(), "chi {x}, {freedom}");
        assert!(t_two_sided(x, freedom).is_nan(), "t {x}, {freedom}");
    }
    assert_eq!([0.0, -2.0].map(|x| chi_squared_upper(x, 3.0)), [1.0, 1.0]);
    // mpmath: the regularised upper incomplete gamma function of 3/2 and 2.
    assert!((chi_squared_upper(4.0, 3.0) - 0.261_464_129_949_110_6).abs() < 1e-14);
    assert_eq!(t_quantile(0.5, 4.0).to_bits(), 0, "the middle is 0, not -0");
    // mpmath, 40 digits; the expansion of many degrees of freedom in the far tail.
    for (t, freedom, expected) in [
        (8.0, 600.0, 6.443_320_486_084_861e-15),
        (8.0, 500.0, 8.729_662_793_880_191e-15),
        (5.0, 500.0, 7.946_415_047_909_558e-7),
    ] {
        assert!((t_two_sided(t, freedom) / expected - 1.0).abs() < 1e-12, "{t}, {freedom}");
    }
}

/// Differences 1, 2, 3 and 6: mean 3, variance 14/3, and t at 0.975 with 3 degrees of freedom is 3.18245.
#[test]
fn the_interval_of_a_comparison_is_that_of_the_t_distribution() {
    let found = compare_paired(&[0.0; 4], &[1.0, 2.0, 3.0, 6.0], &Resampling::default()).unwrap();
    assert!((found.standard_error - 1.080_123_449_734_643_5).abs() < 1e-12);
    assert!((found.interval.high - 6.437_434_881_858_908).abs() < 1e-9, "{:?}", found.interval);
    assert!((found.interval.low + 0.437_434_881_858_908).abs() < 1e-9);
}

#[test]
fn a_permutation_test_does_not_depend_on_the_unit() {
    let differences = [0.123_456_789, -0.234_567_891, 0.345_678_912, 0.456_789_123, 0.031_415_926];
    let p = |unit: f64| {
        let scaled = differences.map(|difference| difference * unit);
        paired_permutation(&scaled, &Resampling::default()).unwrap().p_value
    };
    assert_eq!(p(1.0), p(1e-9));
    assert!(p(1.0) < 0.5);
}

#[test]
fn a_planned_design_has_the_variance_that_the_correlation_leaves() {
    let components = VarianceComponents { between: 0.3, within: 0.2, inverse_samples: 1.0 };
    let design = PairedDesign::planned(&components, 0.5, 1).unwrap();
    assert!((design.effect_variance - 0.3).abs() < 1e-15);
    assert!((design.difference_variance() - 0.7).abs() < 1e-15);
    let certain = PairedDesign { effect_variance: 0.0, within_a: 0.0, within_b: 0.0, ..design };
    assert_eq!(certain.questions_needed(0.1).unwrap(), 2);
    for effect in [0.0, -1.0, f64::NAN] {
        assert!(certain.questions_needed(effect).is_err(), "{effect}");
    }
}

#[test]
fn fewer_wrong_samples_than_drawn_ones_pass_for_certain() {
    let question = |n, c| [QuestionCount::new(n, c).unwrap()];
    for (n, c, k) in [(8, 6, 3), (8, 3, 6), (4, 4, 1), (4, 1, 4)] {
        assert_eq!(pass_at_k(&question(n, c), k).unwrap().value, 1.0, "{n} {c} {k}");
    }
    assert!((pass_at_k(&question(4, 2), 2).unwrap().value - 5.0 / 6.0).abs() < 1e-15);
}
