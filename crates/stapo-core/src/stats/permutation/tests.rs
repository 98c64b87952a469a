use super::*;

fn test(differences: &[f64]) -> Test {
    paired_permutation(differences, &Resampling::default()).unwrap()
}

#[test]
fn shares_of_samples_lie_on_a_lattice_despite_rounding() {
    let differences = [7.0 / 32.0 - 9.0 / 32.0, 1.0 / 3.0 - 2.0 / 32.0, 0.0];
    assert_eq!(lattice(&differences), Some(vec![-3, 13, 0]));
    assert_eq!(lattice(&[0.1 + 0.2 - 0.3 + 0.5, 0.25]), Some(vec![2, 1]));
    assert_eq!(lattice(&[]), Some(vec![]));
}

#[test]
fn numbers_off_any_lattice_are_not_forced_onto_one() {
    assert_eq!(lattice(&[std::f64::consts::PI, std::f64::consts::E]), None);
    assert_eq!(lattice(&[1e-12, 0.5]), None);
    assert_eq!(lattice(&[1e300, 1.0]), None);
    assert_eq!(lattice(&[1e9, 1.0]), None);
    assert_eq!(
        test(&[1e9, 1.0, 2.0]),
        Test { statistic: 1000000003.0 / 3.0, p_value: 0.25, method: Method::Exact }
    );
}

#[test]
fn convolution_equals_enumeration() {
    let key = Key::new(3);
    for n in 1..14_u64 {
        let differences: Vec<f64> =
            (0..n).map(|i| (key.with(n).with(i).below(17) as f64 - 7.0) / 16.0).collect();
        let steps = lattice(&differences).unwrap();
        let (convolved, enumerated) = (exact_on_lattice(&steps).unwrap(), enumerated(&differences));
        assert!((convolved - enumerated).abs() < 1e-14, "n {n}: {convolved} against {enumerated}");
    }
}

#[test]
fn random_signs_agree_with_the_exact_p_value() {
    let key = Key::new(8);
    let differences: Vec<f64> = (0..200).map(|i| (key.with(i).below(65) as f64 - 30.0) / 32.0).collect();
    let exact = test(&differences);
    assert_eq!(exact.method, Method::Exact);
    assert!(exact.p_value > 0.001 && exact.p_value < 0.9, "{exact:?}");
    let p = drawn(&differences, &Resampling { n_resamples: 40_000, ..Resampling::default() });
    let error = (exact.p_value * (1.0 - exact.p_value) / 40_000.0).sqrt();
    assert!((p - exact.p_value).abs() < 5.0 * error, "{p} against {exact:?}");
}

#[test]
fn many_irregular_differences_take_random_signs_and_never_reach_zero() {
    let differences: Vec<f64> = (0..100).map(|i| (f64::from(i) + 1.0).sqrt()).collect();
    let resampling = Resampling { n_resamples: 99, seed: 1, ..Resampling::default() };
    let test = paired_permutation(&differences, &resampling).unwrap();
    assert_eq!(test, Test { statistic: test.statistic, p_value: 0.01, method: Method::MonteCarlo });
}

#[test]
fn thousands_of_questions_are_exact() {
    let differences: Vec<f64> =
        (0..3000).map(|i| f64::from(i % 9 - 4) / 4.0 + f64::from(i % 2) / 32.0).collect();
    let test = test(&differences);
    assert_eq!(test.method, Method::Exact);
    // The normal limit: sum / sqrt(sum of squares).
    let squares: f64 = differences.iter().map(|d| d * d).sum();
    let z = differences.iter().sum::<f64>() / squares.sqrt();
    let limit = 2.0 * super::super::distribution::normal_cdf(-z.abs());
    assert!((test.p_value - limit).abs() < 0.02, "{} against {limit}", test.p_value);
}

#[test]
fn zeros_change_nothing_and_all_zero_is_certain() {
    assert_eq!(test(&[0.5, -0.25, 0.75]).p_value, test(&[0.5, 0.0, -0.25, 0.75, 0.0]).p_value);
    assert_eq!(test(&[0.0, 0.0]).p_value, 1.0);
    assert_eq!(test(&[0.3]).p_value, 1.0);
}

#[test]
fn the_smallest_p_value_is_two_over_all_signs() {
    assert_eq!(test(&[1.0; 20]).p_value, 2.0 / f64::from(1 << 20));
    let p = test(&vec![1.0; 5000]).p_value;
    assert!(p > 0.0 && p < 1e-300, "{p}");
}

/// Without the common divisor, counting would take more than [`EXACT_COST`] additions.
#[test]
fn differences_with_a_common_divisor_are_counted_in_units_of_it() {
    assert_eq!(exact_on_lattice(&[400_000_000, 400_000_000, 400_000_000]), Some(0.25));
    assert_eq!(exact_on_lattice(&[400_000_000, 400_000_001, 400_000_000]), None);
}
