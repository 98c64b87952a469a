//! The exact form of an expression, where it has one.

use crate::budget::{Bounded, Budget, Stop};
use crate::expr::{Expr, Func};
use crate::number::exact;
use crate::poly::{Atom, Poly, Power, small_power};
use dashu_base::Abs;
use dashu_int::IBig;
use dashu_ratio::RBig;

/// The exact form of `expr`; `None` for an expression without one (a sine, a sum under a root), which must be evaluated
/// numerically.
pub(crate) fn exact_form(expr: &Expr, budget: &mut Budget) -> Bounded<Option<Poly>> {
    budget.spend(4)?;
    Ok(match expr {
        Expr::Num { value, .. } => Some(Poly::constant(value.clone())),
        Expr::Var(name) => Some(Poly::atom(Atom::Var(name.clone()))),
        Expr::Pi => Some(Poly::atom(Atom::Pi)),
        Expr::E => Some(Poly::atom(Atom::E)),
        Expr::I => Some(Poly::atom(Atom::I)),
        Expr::Infinity | Expr::PlusMinus(..) | Expr::Series { .. } => None,
        Expr::Add(terms) => {
            let mut sum = Poly::constant(RBig::ZERO);
            for term in terms {
                match exact_form(term, budget)? {
                    Some(form) => sum.add(form, budget)?,
                    None => return Ok(None),
                }
            }
            Some(sum)
        }
        Expr::Mul(factors) => {
            let mut product = Poly::constant(RBig::ONE);
            for factor in factors {
                let Some(form) = exact_form(factor, budget)? else { return Ok(None) };
                match product.mul(&form, budget)? {
                    Some(next) => product = next,
                    None => return Ok(None),
                }
            }
            Some(product)
        }
        Expr::Neg(x) => exact_form(x, budget)?.map(Poly::neg),
        Expr::Inv(x) => match exact_form(x, budget)? {
            Some(form) => form.powi(-1, budget)?,
            None => None,
        },
        Expr::Percent(x) => match exact_form(x, budget)? {
            Some(form) => form.mul(&Poly::constant(RBig::ONE / RBig::from(100)), budget)?,
            None => None,
        },
        Expr::Degrees(x) => match exact_form(x, budget)? {
            Some(form) => {
                let turn = Poly::atom(Atom::Pi).mul(&Poly::constant(RBig::ONE / RBig::from(180)), budget)?;
                match turn {
                    Some(turn) => form.mul(&turn, budget)?,
                    None => None,
                }
            }
            None => None,
        },
        Expr::Pow(base, power) => power_form(base, power, budget)?,
        Expr::Root(base, degree) => {
            let Some(degree) = ratio_of(degree, budget)?.as_ref().and_then(small_power) else {
                return Ok(None);
            };
            let (Some(inverse), true) = (Power::new(degree.d, degree.n), degree.n > 0) else {
                return Err(Stop::Undefined("a root of a degree that is not positive"));
            };
            match exact_form(base, budget)? {
                Some(form) => form.powq(inverse, budget)?,
                None => None,
            }
        }
        Expr::Call(func, args) => call_form(*func, args, budget)?,
    })
}

/// [`exact_form`], but `None` where the exact form is too expensive: numerical evaluation may still decide.
pub(crate) fn affordable_form(expr: &Expr, budget: &mut Budget) -> Bounded<Option<Poly>> {
    match budget.attempt(|budget| exact_form(expr, budget)) {
        Err(Stop::OverBudget(_)) => Ok(None),
        other => other,
    }
}

/// The fraction that `expr` equals, if any.
pub(crate) fn ratio_of(expr: &Expr, budget: &mut Budget) -> Bounded<Option<RBig>> {
    Ok(exact_form(expr, budget)?.and_then(|form| form.as_ratio()))
}

fn power_form(base: &Expr, power: &Expr, budget: &mut Budget) -> Bounded<Option<Poly>> {
    let Some(power) = ratio_of(power, budget)? else { return Ok(None) };
    let Some(form) = exact_form(base, budget)? else { return Ok(None) };
    let trivial = form.as_ratio().filter(|value| value.is_one() || value.is_zero());
    match small_power(&power) {
        Some(power) => form.powq(power, budget),
        None => match trivial {
            Some(value) if power > RBig::ZERO => Ok(Some(Poly::constant(value))),
            _ => Err(Stop::OverBudget("a power grows past 20,000 digits")),
        },
    }
}

fn call_form(func: Func, args: &[Expr], budget: &mut Budget) -> Bounded<Option<Poly>> {
    let mut values = Vec::with_capacity(args.len());
    for arg in args {
        match ratio_of(arg, budget)? {
            Some(value) => values.push(value),
            None => return Ok(None),
        }
    }
    let value = match (func, values.as_slice()) {
        (Func::Abs, [x]) => x.clone().abs(),
        (Func::Floor, [x]) => RBig::from(x.floor()),
        (Func::Ceil, [x]) => RBig::from(x.ceil()),
        (Func::Factorial, [x]) => RBig::from(exact::factorial(small_whole(x)?, budget)?),
        (Func::DoubleFactorial, [x]) => {
            let mut product = RBig::ONE;
            let mut k = small_whole(x)?;
            while k > 1 {
                product = exact::mul(&product, &RBig::from(k), budget)?;
                k -= 2;
            }
            product
        }
        (Func::Binomial, [n, k]) => {
            let mirrored = n - k;
            let is_shorter = mirrored >= RBig::ZERO && mirrored < *k;
            let k = small_whole(if is_shorter { &mirrored } else { k })?;
            RBig::from(exact::binomial(&whole(n)?, k, budget)?)
        }
        (Func::Gcd, [first, rest @ ..]) => {
            let mut value = whole(first)?;
            for x in rest {
                value = exact::gcd(&value, &whole(x)?, budget)?;
            }
            RBig::from(value.abs())
        }
        (Func::Lcm, [first, rest @ ..]) => {
            let mut value = first.clone();
            for x in rest {
                let shared = exact::gcd(&whole(&value)?, &whole(x)?, budget)?;
                if shared.is_zero() {
                    return Ok(Some(Poly::constant(RBig::ZERO)));
                }
                value = exact::mul(&value, &(x.clone() / RBig::from(shared)), budget)?;
            }
            value.abs()
        }
        (Func::Max, [first, rest @ ..]) => rest.iter().fold(first.clone(), |a, b| a.max(b.clone())),
        (Func::Min, [first, rest @ ..]) => rest.iter().fold(first.clone(), |a, b| a.min(b.clone())),
        (Func::Mod, [a, b]) => {
            if b.is_zero() {
                return Err(Stop::Undefined("a remainder by zero"));
            }
            let quotient = RBig::from((a.clone() / b).floor());
            a - exact::mul(&quotient, b, budget)?
        }
        _ => return Ok(None),
    };
    Ok(Some(Poly::constant(value)))
}

fn whole(x: &RBig) -> Bounded<IBig> {
    if x.is_int() { Ok(x.numerator().clone()) } else { Err(Stop::Undefined("a whole number was expected")) }
}

fn small_whole(x: &RBig) -> Bounded<u32> {
    let value = whole(x)?;
    if value < IBig::ZERO {
        return Err(Stop::Undefined("a factorial of a negative number"));
    }
    u32::try_from(&value).map_err(|_| Stop::OverBudget("a factorial grows past 20,000 digits"))
}
