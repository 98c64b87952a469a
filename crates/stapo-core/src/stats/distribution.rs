//! The normal, Student's t and the chi-squared distribution.
//!
//! Written here on top of `libm` (erf, erfc, lgamma), because the t quantile of statrs 0.19 does not return at 10^8
//! degrees of freedom and is off by 6e-5 at 10^6. All functions return for every argument; NaN, a probability outside
//! 0..=1 or degrees of freedom not above 0 give NaN.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

/// Degrees of freedom from which [`normal_deviate`] is exact to f64, while the continued fraction begins to lose
/// digits.
const MANY_FREEDOM: f64 = 500.0;

/// P(Z <= x).
pub fn normal_cdf(x: f64) -> f64 {
    0.5 * libm::erfc(-x * FRAC_1_SQRT_2)
}

/// x with P(Z <= x) = p: a rational first guess (Abramowitz, Stegun 26.2.23), then Halley steps on the distribution
/// function. p = 0 and 1 give the infinities.
pub fn normal_quantile(p: f64) -> f64 {
    if !(0.0..=1.0).contains(&p) {
        return f64::NAN;
    }
    if p > 0.5 {
        return -normal_quantile(1.0 - p);
    }
    if p == 0.0 {
        return f64::NEG_INFINITY;
    }
    let r = (-2.0 * p.ln()).sqrt();
    let mut x = (2.515517 + r * (0.802853 + r * 0.010328))
        / (1.0 + r * (1.432788 + r * (0.189269 + r * 0.001308)))
        - r;
    for _ in 0..3 {
        // Near the middle the distance from 1/2 keeps the digits that the distance from p would lose.
        let miss = if p > 0.25 { 0.5 * libm::erf(x * FRAC_1_SQRT_2) - (p - 0.5) } else { normal_cdf(x) - p };
        // The inverse of the density overflows where p is subnormal, so `miss` is multiplied by its root twice.
        let half = (0.25 * x * x).exp();
        let step = miss * half * half * (2.0 * PI).sqrt();
        x -= step / (1.0 + 0.5 * x * step);
    }
    x
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
        let mut n = a;
        while term > 1e-17 * sum {
            n += 1.0;
            term *= y / n;
            sum += term;
        }
        return 1.0 - scale * sum;
    }
    // The modified Lentz method; no denominator is 0, since y >= a + 1.
    let mut b = y + 1.0 - a;
    let mut c = 1e300;
    let mut d = 1.0 / b;
    let mut value = d;
    for round in 1..10_000_u32 {
        let n = f64::from(round);
        let numerator = -n * (n - a);
        b += 2.0;
        d = 1.0 / (numerator * d + b);
        c = b + numerator / c;
        value *= d * c;
        if d * c == 1.0 {
            break;
        }
    }
    scale * value
}

/// P(|T| >= |t|) for Student's t with `freedom` degrees of freedom: the two-sided p value.
pub fn t_two_sided(t: f64, freedom: f64) -> f64 {
    2.0 * t_upper(t.abs(), freedom)
}

/// t with P(T <= t) = p, by Newton steps kept inside a shrinking bracket, so that the search always ends.
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
    if central == 0.0 {
        return 0.0;
    }
    if freedom.is_infinite() {
        return -normal_quantile(upper);
    }
    // Positive while t is too small. In the tail the logarithm is used: a power law is a straight line in ln t.
    let miss = |t: f64| {
        if upper > 0.25 {
            (central - t_central(t, freedom)) / upper
        } else {
            (t_upper(t, freedom) / upper).ln()
        }
    };
    let (mut low, mut high) = (0.0, 1.0);
    while miss(high) > 0.0 {
        low = high;
        high *= 2.0;
        if high > 1e150 {
            return f64::INFINITY;
        }
    }
    let mut t = if low == 0.0 { 0.5 } else { (low * high).sqrt() };
    for _ in 0..200 {
        let m = miss(t);
        if m > 0.0 {
            low = t;
        } else {
            high = t;
        }
        // Both forms of `miss` have the derivative -density / reference in t.
        let reference = if upper > 0.25 { upper } else { t_upper(t, freedom) };
        let slope = t * t_density(t, freedom) / reference;
        let mut next = t * (m / slope).clamp(-1.0, 1.0).exp();
        if !(next > low && next < high) {
            next = 0.5 * (low + high);
        }
        if (next - t).abs() <= 1e-16 * t || next == low || next == high {
            return next;
        }
        t = next;
    }
    t
}

/// P(T > t) for t >= 0: half the regularised incomplete beta function at x = freedom / (freedom + t^2)
/// with parameters freedom / 2 and 1/2 (Abramowitz, Stegun 26.7.1).
fn t_upper(t: f64, freedom: f64) -> f64 {
    let freedom = positive(freedom);
    if freedom >= MANY_FREEDOM {
        return normal_cdf(-normal_deviate(t, freedom));
    }
    if beta_fraction_is_fast(t, freedom) {
        tail_by_fraction(t, freedom)
    } else {
        0.5 - central_by_fraction(t, freedom)
    }
}

/// P(0 < T < t) for t >= 0.
fn t_central(t: f64, freedom: f64) -> f64 {
    if freedom >= MANY_FREEDOM {
        return 0.5 * libm::erf(normal_deviate(t, freedom) * FRAC_1_SQRT_2);
    }
    if beta_fraction_is_fast(t, freedom) {
        0.5 - tail_by_fraction(t, freedom)
    } else {
        central_by_fraction(t, freedom)
    }
}

/// The z with P(Z > z) = P(T > t), t >= 0, by an expansion in 1 / freedom (Hill 1970, algorithm 395): relative error of
/// the tail 1e-14 at 500 degrees of freedom and t = 8, falling with the sixth power.
fn normal_deviate(t: f64, freedom: f64) -> f64 {
    // Where t^2 would overflow the tail is 0 anyway.
    if freedom.is_infinite() || t > 1e150 {
        return t;
    }
    let a = freedom - 0.5;
    let b = 48.0 * a * a;
    let y = a * libm::log1p(t * t / freedom);
    let correction = (((-0.4 * y - 3.3) * y - 24.0) * y - 85.5) / (0.8 * y * y + 100.0 + b);
    y.sqrt() * (1.0 + (correction + y + 3.0) / b)
}

/// Whether x = freedom / (freedom + t^2) lies below (a + 1) / (a + b + 2) with a = freedom / 2, b = 1/2.
fn beta_fraction_is_fast(t: f64, freedom: f64) -> bool {
    let a = 0.5 * freedom;
    t * t * (a + 1.0) > 1.5 * freedom
}

fn tail_by_fraction(t: f64, freedom: f64) -> f64 {
    let a = 0.5 * freedom;
    let x = freedom / (freedom + t * t);
    0.5 * beta_power(t, freedom) * beta_continued_fraction(a, 0.5, x) / a
}

fn central_by_fraction(t: f64, freedom: f64) -> f64 {
    let a = 0.5 * freedom;
    let y = 1.0 / (1.0 + freedom / (t * t));
    // The division by the parameter 1/2 and the half for one side cancel.
    beta_power(t, freedom) * beta_continued_fraction(0.5, a, y)
}

/// x^a (1 - x)^(1/2) / B(a, 1/2) with a = freedom / 2 and x = freedom / (freedom + t^2).
fn beta_power(t: f64, freedom: f64) -> f64 {
    let a = 0.5 * freedom;
    let ln_x = -libm::log1p(t * t / freedom);
    (a * ln_x - ln_beta_half(a)).exp() * (1.0 / (1.0 + freedom / (t * t))).sqrt()
}

/// Density of Student's t.
fn t_density(t: f64, freedom: f64) -> f64 {
    let a = 0.5 * freedom;
    (-(a + 0.5) * libm::log1p(t * t / freedom) - ln_beta_half(a)).exp() / freedom.sqrt()
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

/// Continued fraction of the incomplete beta (Abramowitz, Stegun 26.5.8) by the modified Lentz method
/// (Thompson, Barnett 1986). Quick where x < (a + 1) / (a + b + 2).
fn beta_continued_fraction(a: f64, b: f64, x: f64) -> f64 {
    const TINY: f64 = 1e-300;
    let guard = |v: f64| if v.abs() < TINY { TINY } else { v };
    let mut c = 1.0;
    let mut d = 1.0 / guard(1.0 - (a + b) * x / (a + 1.0));
    let mut value = d;
    for round in 1..1000_u32 {
        let m = f64::from(round);
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        let mut change = 1.0;
        for term in [even, odd] {
            d = 1.0 / guard(1.0 + term * d);
            c = guard(1.0 + term / c);
            change *= d * c;
        }
        value *= change;
        if (change - 1.0).abs() < 1e-15 {
            break;
        }
    }
    value
}
