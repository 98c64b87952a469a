//! Transcendental functions made of IEEE operations only, so that every level gives the same bits.

use super::{Lanes, Real};

/// `p * 2^n`, with `n` the integer held in the low bits of `shifted` = `n + SHIFT`.
pub(super) trait Scale2: Lanes<E = f32> {
    fn scale2(self, p: Self::V, shifted: Self::V) -> Self::V;
}

/// One lane of [`Scale2`].
#[inline(always)]
pub(super) fn scale2(p: f32, shifted: f32) -> f32 {
    f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// 1.5 * 2^23: adding this number rounds to an integer and leaves the integer in the low mantissa bits.
const SHIFT: f32 = 12582912.0;
const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 in two parts; the first has few bits, so that its multiples up to 127 are exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Below this argument the result would be subnormal and is set to 0.
const EXP_LOW: f32 = -87.33;
/// Above this argument the result saturates at about 2^127.5.
const EXP_HIGH: f32 = 88.37;
/// `exp(r) = 1 + r + r^2 q(r)` on `|r| <= ln 2 / 2`; weighted least squares driven to equal ripple, error 3e-9.
const EXP_Q: [f32; 5] = [0.499_999_94, 0.166_665_21, 0.041_668_393, 0.008_368_745, 0.001_381_453_5];

/// exp: error below 1 unit in the last place of f32; 0 below -87.33, saturated above 88.37, NaN for NaN.
#[inline(always)]
pub(super) fn exp_f32<L: Scale2>(l: L, x: L::V) -> L::V {
    let low = l.splat(EXP_LOW);
    let clamped = l.min(l.splat(EXP_HIGH), l.max(low, x));
    let shifted = l.fma(clamped, l.splat(LOG2_E), l.splat(SHIFT));
    let n = l.sub(shifted, l.splat(SHIFT));
    let r = l.fma(n, l.splat(-LN2_HIGH), clamped);
    let r = l.fma(n, l.splat(-LN2_LOW), r);
    let mut q = l.splat(EXP_Q[4]);
    q = l.fma(q, r, l.splat(EXP_Q[3]));
    q = l.fma(q, r, l.splat(EXP_Q[2]));
    q = l.fma(q, r, l.splat(EXP_Q[1]));
    q = l.fma(q, r, l.splat(EXP_Q[0]));
    let p = l.add(l.fma(l.mul(r, r), q, r), l.splat(1.0));
    l.select_lt(x, low, l.zero(), l.scale2(p, shifted))
}

/// `(sigmoid(x), silu(x))`.
#[inline(always)]
pub(crate) fn silu_parts<L: Lanes>(l: L, x: L::V) -> (L::V, L::V) {
    let one = l.splat(L::E::ONE);
    let sigmoid = l.div(one, l.add(one, l.exp(l.sub(l.zero(), x))));
    (sigmoid, l.mul(x, sigmoid))
}

/// `tanh(x)`, as `2 sigmoid(2 x) - 1`.
#[inline(always)]
pub(crate) fn tanh<L: Lanes>(l: L, x: L::V) -> L::V {
    let (sigmoid, _) = silu_parts(l, l.add(x, x));
    l.sub(l.add(sigmoid, sigmoid), l.splat(L::E::ONE))
}

/// Of the tanh form of GELU, `x / 2 (1 + tanh(u))` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`, which is `x sigmoid(2 u)`: its
/// slope and its value.
#[inline(always)]
pub(crate) fn gelu_parts<L: Lanes>(l: L, x: L::V) -> (L::V, L::V) {
    let twice = 2.0 * (2.0 / std::f64::consts::PI).sqrt();
    let (one, linear) = (l.splat(L::E::ONE), l.splat(L::E::from_f64(twice)));
    let cubic = 0.044_715 * twice;
    let square = l.mul(x, x);
    let (sigmoid, _) = silu_parts(l, l.mul(x, l.fma(l.splat(L::E::from_f64(cubic)), square, linear)));
    let inner = l.fma(l.splat(L::E::from_f64(3.0 * cubic)), square, linear);
    let value = l.mul(x, sigmoid);
    (l.fma(l.mul(value, l.sub(one, sigmoid)), inner, sigmoid), value)
}

/// `ln(1 + f) = f - f^2/2 + f^3 q(f)` for `1 + f` in `[sqrt 1/2, sqrt 2)`; fitted as [`EXP_Q`], error 8e-10.
const LN_Q: [f32; 9] = [
    0.333_333_13,
    -0.250_000_1,
    0.200_021_2,
    -0.166_679_95,
    0.142_195_5,
    -0.124_055_944,
    0.118_881_9,
    -0.116_756_28,
    0.067_465_514,
];

/// Natural logarithm of a positive normal f32, error below 1 unit in the last place; by std's rules for 0 (-inf),
/// negative (NaN) and infinite arguments.
#[inline(always)]
pub(crate) fn ln_f32(x: f32) -> f32 {
    if x <= 0.0 || !x.is_finite() {
        return if x == 0.0 {
            f32::NEG_INFINITY
        } else if x == f32::INFINITY {
            x
        } else {
            f32::NAN
        };
    }
    // The exact factor 2^24 makes a subnormal argument normal.
    let (x, bias) = if x < f32::MIN_POSITIVE { (x * 16777216.0, 24) } else { (x, 0) };
    // The exponent is chosen so that the mantissa lies in [sqrt 1/2, sqrt 2).
    let offset = x.to_bits().wrapping_sub(0x3f35_04f3);
    let exponent = (offset as i32) >> 23;
    let mantissa = f32::from_bits((offset & 0x007f_ffff).wrapping_add(0x3f35_04f3));
    let n = (exponent - bias) as f32;
    let f = mantissa - 1.0;
    let mut q = LN_Q[8];
    for c in LN_Q[..8].iter().rev() {
        q = q.mul_add(f, *c);
    }
    let f2 = f * f;
    let tail = (f2 * f).mul_add(q, n.mul_add(LN2_LOW, -0.5 * f2));
    n.mul_add(LN2_HIGH, f + tail)
}
