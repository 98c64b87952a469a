use super::theory::*;
use super::*;
use crate::TokenEffect;
use crate::random::Key;

fn bits(key: u64, counter: &[u64]) -> u64 {
    counter.iter().fold(Key::new(key), |key, &word| key.with(word)).bits()
}

fn uniform(key: u64, counter: &[u64]) -> f64 {
    counter.iter().fold(Key::new(key), |key, &word| key.with(word)).uniform()
}

/// A softmax over `v` random logits. A small `spread` gives a nearly uniform, a large one a nearly one-hot
/// distribution.
fn distribution(case: u64, v: usize, spread: f64) -> Vec<f64> {
    let logits: Vec<f64> = (0..v as u64).map(|i| spread * (uniform(7, &[case, i]) - 0.5)).collect();
    softmax(&logits)
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|a| (a - top).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|w| w / sum).collect()
}

fn entropy(p: &[f64]) -> f64 {
    -p.iter().filter(|p| **p > 0.0).map(|p| p * p.ln()).sum::<f64>()
}

fn collision(p: &[f64]) -> f64 {
    p.iter().map(|p| p * p).sum()
}

#[test]
fn gradient_norm_is_that_of_the_logit_gradient() {
    for case in 0..1000 {
        let v = 2 + (case % 37) as usize;
        let p = distribution(case, v, 0.1 + (case % 50) as f64);
        let sampled = bits(1, &[case]) as usize % v;
        let w = 4.0 * uniform(2, &[case]) - 2.0;
        // d(w ln p_s)/da_k = w (1[k = s] - p_k)
        let by_hand: f64 = (0..v).map(|k| (w * (f64::from(u8::from(k == sampled)) - p[k])).powi(2)).sum();
        let ours = gradient_norm_squared(p[sampled], collision(&p), w);
        assert!((ours - by_hand).abs() <= 1e-12 * (1.0 + by_hand), "case {case}: {ours} {by_hand}");
    }
}

#[test]
fn both_gradient_norm_bounds_hold_on_100000_random_distributions() {
    for case in 0..100_000u64 {
        let v = 2 + (bits(3, &[case]) % 60) as usize;
        let p = distribution(case, v, 10f64.powf(4.0 * uniform(4, &[case]) - 2.0));
        let sampled = bits(5, &[case]) as usize % v;
        let w = 3.0 * uniform(6, &[case]) - 1.5;
        let exact = gradient_norm_squared(p[sampled], collision(&p), w);
        let (low, high) = gradient_norm_squared_bounds(p[sampled], entropy(&p), w, v);
        let slack = 1e-12 * w * w;
        assert!(low <= exact + slack && exact <= high + slack, "case {case}: {low} {exact} {high}");
    }
}

#[test]
fn bounds_are_tight_for_uniform_and_one_hot_and_loose_between() {
    for v in [2usize, 3, 10, 1000] {
        let p = vec![1.0 / v as f64; v];
        let exact = gradient_norm_squared(p[0], collision(&p), 1.0);
        let (low, high) = gradient_norm_squared_bounds(p[0], entropy(&p), 1.0, v);
        assert!((exact - low).abs() < 1e-12 && (exact - high).abs() < 1e-12, "uniform over {v}");
    }
    // One-hot, with the improbable token sampled: the norm has its largest value, sqrt 2.
    assert_eq!(gradient_norm_squared(0.0, 1.0, 1.0), 2.0);
    assert_eq!(gradient_norm_squared_bounds(0.0, 0.0, 1.0, 100), (2.0, 2.0));
    assert_eq!(gradient_norm_squared(1.0, 1.0, 1.0), 0.0);
    assert_eq!(gradient_norm_squared_bounds(1.0, 0.0, 1.0, 100), (0.0, 0.0));
    let p = softmax(&[2.0, 1.0, 0.0, -1.0]);
    let (low, high) = gradient_norm_squared_bounds(p[2], entropy(&p), 1.0, 4);
    let exact = gradient_norm_squared(p[2], collision(&p), 1.0);
    assert!(low + 1e-3 < exact && exact + 1e-3 < high);
}

#[test]
fn entropy_change_is_the_derivative_of_entropy_along_the_advantages() {
    // Logits move by eta * A_v (a natural-gradient step): dH is the sum of the per-token changes.
    for case in 0..200 {
        let v = 2 + (case % 9) as usize;
        let logits: Vec<f64> = (0..v as u64).map(|i| 6.0 * uniform(8, &[case, i])).collect();
        let advantages: Vec<f64> = (0..v as u64).map(|i| 2.0 * uniform(9, &[case, i]) - 1.0).collect();
        let p = softmax(&logits);
        let mean_advantage: f64 = p.iter().zip(&advantages).map(|(p, a)| p * a).sum();
        let eta = 1e-6;
        let moved = |sign: f64| {
            let logits: Vec<f64> = logits.iter().zip(&advantages).map(|(l, a)| l + sign * eta * a).collect();
            entropy(&softmax(&logits))
        };
        let measured = (moved(1.0) - moved(-1.0)) / 2.0;
        let predicted: f64 =
            (0..v).map(|k| entropy_change(eta, p[k].ln(), entropy(&p), advantages[k], mean_advantage)).sum();
        assert!((measured - predicted).abs() < 1e-6 * eta + 1e-14, "case {case}: {measured} {predicted}");
    }
}

#[test]
fn rewarding_an_improbable_token_raises_entropy_and_a_probable_one_lowers_it() {
    let h = 0.5;
    assert!(entropy_change_of_sample(1e-3, 0.001f64.ln(), h, 1.0) > 0.0);
    assert!(entropy_change_of_sample(1e-3, 0.9f64.ln(), h, 1.0) < 0.0);
    // The mean advantage is that of the token alone, 0.25 * 2.
    let expected = -1e-3 * 0.25 * (0.25f64.ln() + h) * (2.0 - 0.5);
    assert!((entropy_change_of_sample(1e-3, 0.25f64.ln(), h, 2.0) - expected).abs() < 1e-15);
}

#[test]
fn quadrants_follow_the_table_of_the_paper() {
    let thresholds = Thresholds { tau_p: 0.002, tau_h: 1.0 };
    let at = |p: f64, h| Quadrant::at(libm::log(p), h, thresholds);
    assert_eq!(at(0.002, 1.0), Quadrant::ProbableHighEntropy, "both thresholds are strict");
    assert_eq!(at(0.5, 0.2), Quadrant::ProbableLowEntropy);
    assert_eq!(at(0.001, 1.0), Quadrant::ImprobableHighEntropy);
    assert_eq!(at(0.001, 0.2), Quadrant::ImprobableLowEntropy);
    assert_eq!(Quadrant::ALL.map(Quadrant::spurious_risk), [Risk::Low, Risk::Low, Risk::Medium, Risk::High]);
    let norms = Quadrant::ALL.map(Quadrant::published_gradient_norm);
    assert_eq!(norms, [1.230, 1.296, 1.289, 1.436], "table of arXiv 2602.15620");
    let moves = Quadrant::ALL.map(Quadrant::entropy_move);
    assert_eq!(moves, [EntropyMove::Down, EntropyMove::Down, EntropyMove::Up, EntropyMove::Up]);
}

#[test]
fn census_counts_norms_and_shares_by_quadrant() {
    let mut census = Census::new(Thresholds { tau_p: 0.002, tau_h: 1.0 });
    let token = |p: f64, entropy, collision, weight, kept| Observed {
        logp: p.ln(),
        entropy,
        collision,
        effect: TokenEffect { kept, weight, ..TokenEffect::default() },
    };
    census.add(&token(0.5, 1.5, 0.3, 1.0, true)); // 1 - 1 + 0.3 = 0.3
    census.add(&token(0.9, 0.1, 0.82, 2.0, true)); // 4 (1 - 1.8 + 0.82) = 0.08
    census.add(&token(0.001, 0.1, 0.998, 1.0, false)); // 1 - 0.002 + 0.998 = 1.996
    let rows = census.rows();
    assert_eq!(rows.map(|row| row.n_tokens), [1, 1, 0, 1]);
    let total = 0.3 + 0.08 + 1.996;
    let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
    close(rows[0].mean_gradient_norm, 0.3f64.sqrt());
    close(rows[1].gradient_share, 0.08 / total);
    close(rows[2].mean_gradient_norm, 0.0);
    close(rows[3].mean_gradient_norm, 1.996f64.sqrt());
    close(census.silenced_share(), 1.0 / 3.0);
    close(census.silenced_gradient_share(), 1.996 / total);
}

#[test]
fn histogram_counts_every_value_once() {
    let mut histogram = Histogram::new(-1.0, 1.0, 4);
    for value in [-2.0, -1.0, -0.51, 0.0, 0.49, 0.999_999_999, 1.0, 5.0] {
        histogram.add(value);
    }
    assert_eq!((histogram.n_below, histogram.counts, histogram.n_above), (1, vec![2, 0, 2, 1], 2));
}
