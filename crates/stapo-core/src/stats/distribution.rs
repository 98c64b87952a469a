//! The normal, Student's t and the chi-squared distribution.
//!
//! Written here on top of `libm` (erf, erfc, lgamma), because the t quantile of statrs 0.19 does not return at 10^8
//! degrees of freedom and is off by 6e-5 at 10^6. All functions return for every argument; NaN, a probability outside
//! 0..=1 or degrees of freedom not above 0 give NaN.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

/// Degrees of freedom from which [`normal_deviate`] is exact to f64, while the continued fraction begins to lose
/// digits.
const MANY_FREEDOM: f64 = 500.0;

/// Rounds of the fractions and of the series: enough for all digits of f64, of chi-squared up to thousands of degrees of
/// freedom and of Student's t from a tenth of one on.
const BETA_ROUNDS: u32 = 128;
const CHI_SQUARED_ROUNDS: u32 = 1000;
const SERIES_TERMS: u32 = 10_000;

/// P(Z <= x).
pub fn normal_cdf(x: f64) -> f64 {
    0.5 * libm::erfc(-x * FRAC_1_SQRT_2)
}

/// x with P(Z <= x) = p; 0 and 1 give the infinities.
pub fn normal_quantile(p: f64) -> f64 {
    t_quantile(p, f64::INFINITY)
}

/// NaN unless above 0.
fn positive(freedom: f64) -> f64 {
    if freedom > 0.0 { freedom } else { f64::NAN }
}

/// P(X > x) for the chi-squared distribution: the regularised upper incomplete gamma function of `freedom` / 2 and x / 2,
/// by its series below the mean and its continued fraction above (Abramowitz, Stegun 6.5.29 and 6.5.31).
pub fn chi_squared_upper(x: f64, freedom: f64) -> f64 {
    if x.is_nan() {
        return f64::NAN;
    }
    let (a, y) = (0.5 * positive(freedom), 0.5 * x.max(0.0));
    let scale = (a * y.ln() - y - libm::lgamma(a)).exp();
    if y < a + 1.0 {
        let mut term = 1.0 / a;
        let mut sum = term;
        for n in 1..SERIES_TERMS {
            term *= y / (a + f64::from(n));
            sum += term;
        }
        return 1.0 - scale * sum;
    }
    // From the innermost denominator outwards; none is 0, since y >= a + 1.
    let mut fraction = f64::MAX;
    for round in (1..CHI_SQUARED_ROUNDS).rev() {
        let n = f64::from(round);
        fraction = y - a + (2.0 * n - 1.0) - n * (n - a) / fraction;
    }
    scale / fraction
}

/// P(|T| >= |t|) for Student's t with `freedom` degrees of freedom: the two-sided p value.
pub fn t_two_sided(t: f64, freedom: f64) -> f64 {
    2.0 * beyond_and_within(t.abs(), positive(freedom)).0
}

/// t with P(T <= t) = p; 0 and 1 give the infinities. Below a hundredth of a degree of freedom, quantiles beyond 1e154 are
/// cut.
pub fn t_quantile(p: f64, freedom: f64) -> f64 {
    let freedom = positive(freedom);
    if !(0.0..=1.0).contains(&p) || freedom.is_nan() {
        return f64::NAN;
    }
    if p < 0.5 {
        return -upper_quantile(p, 0.5 - p, freedom);
    }
    upper_quantile(1.0 - p, p - 0.5, freedom)
}

/// t >= 0 with P(T > t) = `upper` = 1/2 - `central`, both given so that neither loses digits.
fn upper_quantile(upper: f64, central: f64, freedom: f64) -> f64 {
    if upper == 0.0 {
        return f64::INFINITY;
    }
    let is_below = |t: f64| {
        let (beyond, within) = beyond_and_within(t, freedom);
        if upper < 0.25 { beyond > upper } else { within < central }
    };
    // The bits of floats that are not negative are in the order of the floats: each is set unless t would be too large.
    (0..63).rev().fold(0.0, |t: f64, bit| {
        let candidate = f64::from_bits(t.to_bits() | 1 << bit);
        if is_below(candidate) { candidate } else { t }
    })
}

/// P(T > t) and P(0 < T < t) for t >= 0: halves of the regularised incomplete beta functions at freedom / (freedom + t^2)
/// and t^2 / (freedom + t^2) with parameters freedom / 2 and 1/2 (Abramowitz, Stegun 26.7.1), of which the smaller is
/// computed.
fn beyond_and_within(t: f64, freedom: f64) -> (f64, f64) {
    if freedom >= MANY_FREEDOM {
        let z = normal_deviate(t, freedom);
        return (normal_cdf(-z), 0.5 * libm::erf(z * FRAC_1_SQRT_2));
    }
    let a = 0.5 * freedom;
    let (x, y) = (1.0 / (1.0 + t * t / freedom), 1.0 / (1.0 + freedom / (t * t)));
    let power = (-a * libm::log1p(t * t / freedom) - ln_beta_half(a)).exp() * y.sqrt();
    if t > 1.0 {
        let beyond = 0.5 * power * beta_continued_fraction(a, 0.5, x) / a;
        (beyond, 0.5 - beyond)
    } else {
        // The division by the parameter 1/2 and the half for one side cancel.
        let within = power * beta_continued_fraction(0.5, a, y);
        (0.5 - within, within)
    }
}

/// The z with P(Z > z) = P(T > t), t >= 0, by an expansion in 1 / freedom (Hill 1970, algorithm 395): relative error of
/// the tail 1e-14 at 500 degrees of freedom and t = 8, falling with the sixth power.
fn normal_deviate(t: f64, freedom: f64) -> f64 {
    if freedom.is_infinite() {
        return t;
    }
    // The powers below must not overflow; the tail is 0 long before.
    let t = t.clamp(0.0, 1e50);
    let a = freedom - 0.5;
    let b = 48.0 * a * a;
    let y = a * libm::log1p(t * t / freedom);
    let correction = (((-0.4 * y - 3.3) * y - 24.0) * y - 85.5) / (0.8 * y * y + 100.0 + b);
    y.sqrt() * (1.0 + (correction + y + 3.0) / b)
}

/// ln B(a, 1/2) = ln Gamma(1/2) - (ln Gamma(a + 1/2) - ln Gamma(a)); for large a by the asymptotic series of the
/// difference, whose terms would otherwise cancel.
fn ln_beta_half(a: f64) -> f64 {
    let half_ln_pi = 0.5 * PI.ln();
    if a < 12.0 {
        return half_ln_pi + libm::lgamma(a) - libm::lgamma(a + 0.5);
    }
    let r = 1.0 / (a * a);
    let series =
        (-1.0 / 8.0 + r * (1.0 / 192.0 + r * (-1.0 / 640.0 + r * (17.0 / 14336.0 - r * 31.0 / 18432.0)))) / a;
    half_ln_pi - (0.5 * a.ln() + series)
}

/// Continued fraction of the incomplete beta (Abramowitz, Stegun 26.5.8), from the innermost denominator outwards.
fn beta_continued_fraction(a: f64, b: f64, x: f64) -> f64 {
    let mut fraction = 1.0;
    for round in (1..BETA_ROUNDS).rev() {
        let m = f64::from(round);
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        fraction = 1.0 + even / (1.0 + odd / fraction);
    }
    1.0 / (1.0 - (a + b) * x / ((a + 1.0) * fraction))
}
