//! Evaluation of a tree at a point, to hundreds of bits with a proven error.

mod series;

use crate::budget::{Bounded, Budget, Stop};
use crate::exact_form::ratio_of;
use crate::expr::{Expr, Func, INDEX};
use crate::number::complex::Complex;
use crate::number::elementary;
use crate::number::real::Real;
use crate::poly::small_power;
use dashu_int::IBig;
use dashu_ratio::RBig;
use series::{finite, infinite};
use std::cmp::Ordering;

/// The base of a logarithm that is written without one. Both conventions exist; one base holds throughout a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogBase {
    Ten,
    E,
}

/// A function of whole numbers has an argument that is too large for all its digits to be known.
pub(crate) const HIDDEN_WHOLE: Stop =
    Stop::OverBudget("a whole number too large for its last digits to be known");

/// Where an expression is evaluated.
pub(crate) struct SamplePoint<'a> {
    pub(crate) values: &'a [(&'a str, RBig)],
    pub(crate) log_base: LogBase,
    pub(crate) bits: usize,
    pub(crate) domain: Domain,
}

/// Which intermediate values are allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Domain {
    Complex,
    /// A root or logarithm of a negative number has no value.
    Real,
}

/// The value of `expr` at `point`; the principal value where there are several.
pub(crate) fn evaluate(expr: &Expr, point: &SamplePoint, budget: &mut Budget) -> Bounded<Complex> {
    let value = evaluate_node(expr, point, budget)?;
    if point.domain == Domain::Real && !value.is_real() {
        return Err(Stop::Undefined("a complex value on the way"));
    }
    Ok(value)
}

fn evaluate_node(expr: &Expr, point: &SamplePoint, budget: &mut Budget) -> Bounded<Complex> {
    let bits = point.bits;
    budget.spend(15 + bits as u64 / 32)?;
    match expr {
        Expr::Num { value, .. } => Ok(Complex::real(Real::from_ratio(value, bits)?)),
        Expr::Var(name) => match point.values.iter().find(|(n, _)| n == name) {
            Some((_, value)) => Ok(Complex::real(Real::from_ratio(value, bits)?)),
            None if name.contains(INDEX) => Err(Stop::Unreadable("a sum over a sequence".into())),
            None => Err(Stop::Undefined("a variable without a value")),
        },
        Expr::Pi => Ok(Complex::real(elementary::pi(bits)?)),
        Expr::E => Complex::int(1, bits)?.exp(bits),
        Expr::I => Complex::i(bits),
        Expr::Infinity => Err(Stop::Undefined("an infinite value")),
        Expr::PlusMinus(..) => Err(Stop::Undefined("a sign that was not chosen")),
        Expr::Add(terms) => {
            let mut sum = Complex::real(Real::zero());
            for term in terms {
                sum = sum.add(&evaluate(term, point, budget)?, bits)?;
            }
            Ok(sum)
        }
        Expr::Mul(factors) => {
            let mut product = Complex::int(1, bits)?;
            for factor in factors {
                product = product.mul(&evaluate(factor, point, budget)?, bits)?;
            }
            Ok(product)
        }
        Expr::Neg(x) => Ok(evaluate(x, point, budget)?.neg()),
        Expr::Inv(x) => Complex::int(1, bits)?.div(&evaluate(x, point, budget)?, bits),
        Expr::Percent(x) => evaluate(x, point, budget)?.div(&Complex::int(100, bits)?, bits),
        Expr::Degrees(x) => {
            let turn = Complex::real(elementary::pi(bits)?).div(&Complex::int(180, bits)?, bits)?;
            evaluate(x, point, budget)?.mul(&turn, bits)
        }
        Expr::Pow(base, power) => {
            if **base == Expr::E {
                spend_series(budget, bits)?;
                return evaluate(power, point, budget)?.exp(bits);
            }
            let base = evaluate(base, point, budget)?;
            raise(&base, power, point, budget)
        }
        Expr::Root(base, degree) => {
            let base = evaluate(base, point, budget)?;
            raise(&base, &Expr::Inv(degree.clone()), point, budget)
        }
        Expr::Series { is_sum, index, parts } => match (parts.as_slice(), is_sum) {
            ([term, from, to], _) => finite(term, index, (from, to), *is_sum, point, budget),
            ([term, from], true) => infinite(term, index, from, point, budget),
            _ => Err(Stop::Unreadable("a product without end".into())),
        },
        Expr::Call(func, args) => {
            let mut values = Vec::with_capacity(args.len());
            for arg in args {
                values.push(evaluate(arg, point, budget)?);
            }
            if func.needs_series() {
                spend_series(budget, bits)?;
            } else {
                budget.spend(200)?;
            }
            call(*func, &values, point, budget)
        }
    }
}

/// One series costs about as many products as the precision has digits.
fn spend_series(budget: &mut Budget, bits: usize) -> Bounded<()> {
    budget.spend(bits as u64 * bits as u64 / 64)
}

fn raise(base: &Complex, power: &Expr, point: &SamplePoint, budget: &mut Budget) -> Bounded<Complex> {
    let bits = point.bits;
    let ratio = if power.any(|node| matches!(node, Expr::Var(_))) { None } else { ratio_of(power, budget)? };
    if let Some(ratio) = ratio.as_ref().and_then(small_power) {
        if ratio.d <= 2 && ratio.n.unsigned_abs() <= 1 << 20 {
            budget.spend(200)?;
            let root = if ratio.d == 1 { base.clone() } else { base.sqrt(bits)? };
            return root.powi(ratio.n, bits);
        }
        let is_odd_root = ratio.d % 2 != 0 && base.is_real() && base.re.sign() == Some(Ordering::Less);
        if is_odd_root {
            spend_series(budget, 2 * bits)?;
            let power = Complex::real(Real::from_ratio(
                &RBig::from_parts_signed(ratio.n.into(), ratio.d.into()),
                bits,
            )?);
            let size = base.neg().pow(&power, bits)?;
            return Ok(if ratio.n % 2 == 0 { size } else { size.neg() });
        }
    }
    let power = evaluate(power, point, budget)?;
    if power.is_real()
        && let Some(whole) = power.re.as_whole().filter(|_| power.re.is_exact())
        && let Ok(n) = i64::try_from(&whole)
        && n.unsigned_abs() <= 1 << 20
    {
        budget.spend(200)?;
        return base.powi(n, bits);
    }
    spend_series(budget, 2 * bits)?;
    base.pow(&power, bits)
}

fn call(func: Func, args: &[Complex], point: &SamplePoint, budget: &mut Budget) -> Bounded<Complex> {
    let bits = point.bits;
    let one = Complex::int(1, bits)?;
    let two = Complex::int(2, bits)?;
    match (func, args) {
        (Func::Sin, [x]) => Ok(x.sin_cos(bits)?.0),
        (Func::Cos, [x]) => Ok(x.sin_cos(bits)?.1),
        (Func::Tan, [x]) => {
            let (sine, cosine) = x.sin_cos(bits)?;
            sine.div(&cosine, bits)
        }
        (Func::Cot, [x]) => {
            let (sine, cosine) = x.sin_cos(bits)?;
            cosine.div(&sine, bits)
        }
        (Func::Sec, [x]) => one.div(&x.sin_cos(bits)?.1, bits),
        (Func::Csc, [x]) => one.div(&x.sin_cos(bits)?.0, bits),
        (Func::Asin, [x]) => x.asin(bits),
        (Func::Acos, [x]) => {
            let quarter = Complex::real(elementary::pi(bits)?).div(&two, bits)?;
            quarter.sub(&x.asin(bits)?, bits)
        }
        (Func::Atan, [x]) => x.atan(bits),
        (Func::Sinh | Func::Cosh | Func::Tanh, [x]) => {
            let up = x.exp(bits)?;
            let down = x.neg().exp(bits)?;
            let sine = up.sub(&down, bits)?;
            let cosine = up.add(&down, bits)?;
            match func {
                Func::Sinh => sine.div(&two, bits),
                Func::Cosh => cosine.div(&two, bits),
                _ => sine.div(&cosine, bits),
            }
        }
        (Func::Exp, [x]) => x.exp(bits),
        (Func::Ln, [x]) => x.ln(bits),
        (Func::Log, [x]) => match point.log_base {
            LogBase::E => x.ln(bits),
            LogBase::Ten => x.ln(bits)?.div(&Complex::int(10, bits)?.ln(bits)?, bits),
        },
        (Func::LogBase, [base, x]) => x.ln(bits)?.div(&base.ln(bits)?, bits),
        (Func::Abs, [x]) => Ok(Complex::real(x.abs(bits)?)),
        (Func::Floor, [x]) => whole_result(&real(x)?.floor()?, bits),
        (Func::Ceil, [x]) => whole_result(&-(real(x)?.neg().floor()?), bits),
        (Func::Max, [first, rest @ ..]) => extreme(first, rest, Ordering::Greater, bits),
        (Func::Min, [first, rest @ ..]) => extreme(first, rest, Ordering::Less, bits),
        _ => discrete(func, args, bits, budget),
    }
}

/// Functions of whole numbers: the arguments must be whole, the value is computed exactly.
fn discrete(func: Func, args: &[Complex], bits: usize, budget: &mut Budget) -> Bounded<Complex> {
    let mut exprs = Vec::with_capacity(args.len());
    for arg in args {
        let arg = real(arg)?;
        if arg.hides_whole() {
            return Err(HIDDEN_WHOLE);
        }
        let value = arg.as_whole().ok_or(Stop::Undefined("a whole number was expected"))?;
        exprs.push(Expr::Num { value: RBig::from(value), is_decimal: false });
    }
    match ratio_of(&Expr::Call(func, exprs), budget)? {
        Some(value) => Ok(Complex::real(Real::from_ratio(&value, bits)?)),
        None => Err(Stop::Undefined("a function with the wrong number of arguments")),
    }
}

fn real(x: &Complex) -> Bounded<&Real> {
    if x.is_real() { Ok(&x.re) } else { Err(Stop::Undefined("a real number was expected")) }
}

fn whole_result(value: &IBig, bits: usize) -> Bounded<Complex> {
    Ok(Complex::real(Real::from_int(value, bits)?))
}

fn extreme(first: &Complex, rest: &[Complex], wanted: Ordering, bits: usize) -> Bounded<Complex> {
    let mut best = real(first)?.clone();
    for x in rest {
        let x = real(x)?;
        if x.sub(&best, bits)?.sign() == Some(wanted) {
            best = x.clone();
        }
    }
    Ok(Complex::real(best))
}
