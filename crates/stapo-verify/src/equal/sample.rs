//! Where two expressions with variables are compared: fixed values of the variables, the same for every grading.

use crate::approx::Domain;
use crate::expr::{Expr, Func};
use dashu_ratio::RBig;

const N_POSITIVE: u64 = 3;
const N_SIGNED: u64 = 3;
const N_WHOLE: u64 = 40;
const N_SMALL: u64 = 3;
/// The sizes of far values, as powers of two, each with both signs. An expression that grows fast is compared at the
/// first size only.
const FAR_SIZES: [usize; 3] = [4, 12, 40];
/// The denominator of sample values. A prime one keeps multiples of a power of two from being whole by chance.
const DYADIC: u32 = 1024;
const PRIME: u32 = 1021;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SampleKind {
    /// Between 0.2 and 2.6.
    Positive,
    /// The same sizes with either sign.
    Signed,
    /// Whole numbers, small and large in turn.
    Whole,
    /// One whole number after the other from 1: roundings and remainders may differ at a few of them only.
    Counted,
    /// Sizes from 16 to 2^41, with either sign.
    Far,
    /// Sizes from 0.1 to 0.5, with either sign, where power series converge.
    Small,
}

impl SampleKind {
    pub(crate) fn domain(self) -> Domain {
        match self {
            Self::Signed | Self::Far => Domain::Real,
            Self::Positive | Self::Whole | Self::Counted | Self::Small => Domain::Complex,
        }
    }
}

/// The sample points for `a` against `b`: whole values where a function takes integers only or where both sides round.
pub(crate) fn points(a: &Expr, b: &Expr) -> Vec<(SampleKind, u64)> {
    let rounds = |node: &Expr| matches!(node, Expr::Call(Func::Floor | Func::Ceil, args) if !args[0].variables().is_empty());
    let is_discrete = |node: &Expr| match node {
        Expr::Call(func, args) => func.is_discrete() && args.iter().any(|arg| !arg.variables().is_empty()),
        Expr::Series { parts, .. } => parts[1..].iter().any(|bound| !bound.variables().is_empty()),
        _ => false,
    };
    // ⌊x⌋ and ⌈x⌉ agree at every whole x, so whole points only distinguish roundings of fractions.
    let rounds_whole = |node: &Expr| rounds(node) && node.children().iter().all(is_whole);
    let both_round = a.any(rounds) && b.any(rounds) && !a.any(rounds_whole) && !b.any(rounds_whole);
    let divides = |node: &Expr| matches!(node, Expr::Call(Func::Mod | Func::Gcd | Func::Lcm, _));
    if both_round || (a.any(divides) && b.any(divides)) {
        return (0..N_WHOLE).map(|k| (SampleKind::Counted, k)).collect();
    }
    if a.any(is_discrete) || b.any(is_discrete) {
        return (0..N_WHOLE).map(|k| (SampleKind::Whole, k)).collect();
    }
    let is_endless = |node: &Expr| matches!(node, Expr::Series { parts, .. } if parts.len() == 2 && !node.variables().is_empty());
    if a.any(is_endless) || b.any(is_endless) {
        return (0..N_SMALL).map(|k| (SampleKind::Small, k)).collect();
    }
    let n_far = match (a.any(has_break) || b.any(has_break), a.any(grows) || b.any(grows)) {
        (false, _) => 0,
        (true, true) => 2,
        (true, false) => 2 * FAR_SIZES.len() as u64,
    };
    let positive = (0..N_POSITIVE).map(|k| (SampleKind::Positive, k));
    let signed = (0..N_SIGNED).map(|k| (SampleKind::Signed, k));
    positive.chain(signed).chain((0..n_far).map(|k| (SampleKind::Far, k))).collect()
}

/// Whether a function changes its law at some place, so that points on one side do not decide: |x - 9| is 9 - x up to nine.
fn has_break(node: &Expr) -> bool {
    let varies = |x: &Expr| !x.variables().is_empty();
    match node {
        Expr::Call(Func::Abs | Func::Max | Func::Min | Func::Floor | Func::Ceil, args) => {
            args.iter().any(varies)
        }
        Expr::Root(base, _) => varies(base),
        Expr::Pow(base, power) => {
            varies(base) && !varies(power) && !matches!(&**power, Expr::Num { value, .. } if value.is_int())
        }
        _ => false,
    }
}

/// Whether a function of a variable is too large, or too costly, far away.
fn grows(node: &Expr) -> bool {
    match node {
        Expr::Call(func, args) => {
            !matches!(func, Func::Abs | Func::Max | Func::Min | Func::Floor | Func::Ceil)
                && args.iter().any(|arg| !arg.variables().is_empty())
        }
        Expr::Pow(_, power) => !power.variables().is_empty(),
        _ => false,
    }
}

/// Values of the variables at sample point `k`.
pub(crate) fn sample<'a>(names: &[&'a str], k: u64, kind: SampleKind) -> Vec<(&'a str, RBig)> {
    let value = |j: usize| {
        let random = scrambled(k.wrapping_mul(1_000_003).wrapping_add(j as u64 + 17));
        let near = |denominator: u32| RBig::from_parts((230 + random % 2400).into(), denominator.into());
        match kind {
            SampleKind::Positive => near(if k == 0 { PRIME } else { DYADIC }),
            SampleKind::Signed => {
                let size = near(DYADIC);
                if (random >> 40) & 1 == 0 || k == 0 { -size } else { size }
            }
            // Every third point is larger, beyond what small cases show.
            SampleKind::Whole if k % 3 == 2 => RBig::from(17 + random % 44),
            // One variable takes distinct values, small and large in turn.
            SampleKind::Whole if names.len() == 1 && k < 13 => RBig::from(1 + 7 * k % 13),
            SampleKind::Counted if names.len() == 1 => RBig::from(k + 1),
            SampleKind::Counted => RBig::from(1 + random % 24),
            SampleKind::Whole => RBig::from(1 + random % 11),
            SampleKind::Small => {
                let size = RBig::from_parts((100 + random % 400).into(), DYADIC.into());
                if k == 1 { -size } else { size }
            }
            SampleKind::Far => {
                let size = FAR_SIZES[(k / 2) as usize % FAR_SIZES.len()];
                let scale = RBig::from(2u8).pow(size as isize);
                let value = scale * RBig::from_parts((1021 + random % 1021).into(), PRIME.into());
                if k.is_multiple_of(2) { value } else { -value }
            }
        }
    };
    names.iter().enumerate().map(|(j, name)| (*name, value(j))).collect()
}

/// A fixed mixing of the bits of `x` (splitmix64), the same everywhere.
fn scrambled(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Whether `expr` is whole wherever its variables are.
fn is_whole(expr: &Expr) -> bool {
    match expr {
        Expr::Num { value, .. } => value.is_int(),
        Expr::Var(_) => true,
        Expr::Add(_) | Expr::Mul(_) | Expr::Neg(_) => expr.children().iter().all(is_whole),
        Expr::Pow(base, power) => is_whole(base) && matches!(**power, Expr::Num { .. }) && is_whole(power),
        _ => false,
    }
}
