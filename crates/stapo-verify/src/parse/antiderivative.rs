//! Antiderivatives of elementary functions: powers, logarithms, exponentials, sines and cosines of a linear term, the
//! latter three with a polynomial before them, squares of sines and cosines, and reciprocals of `cx^2 + d`.

use crate::budget::{Bounded, Budget};
use crate::equal::value::sign_of;
use crate::exact_form::{affordable_form, ratio_of};
use crate::expr::{Expr, Func};
use crate::poly::{Atom, Monomial, Power};
use dashu_ratio::RBig;
use std::cmp::Ordering;

/// Highest degree of a polynomial before an exponential, a sine or a cosine.
const MAX_DEGREE: i64 = 12;

/// An antiderivative, and where it holds.
pub(super) struct Antiderivative<'a> {
    variable: &'a str,
    /// Linear terms that must be positive between the bounds; at a bound they may be zero where the flag says so.
    positive: Vec<(Expr, bool)>,
    /// Whether every term tends to zero at infinity.
    vanishes: bool,
}

/// The integral of `integrand` from `low` to `high`; `None` if this module knows no antiderivative that holds between
/// the bounds.
pub(super) fn integrated(
    integrand: &Expr,
    variable: &str,
    (low, high): (&Expr, &Expr),
    budget: &mut Budget,
) -> Bounded<Option<Expr>> {
    let mut found = Antiderivative { variable, positive: Vec::new(), vanishes: true };
    let Some(value) = found.antiderivative(integrand, budget)? else { return Ok(None) };
    let is_infinite = *high == Expr::Infinity;
    if is_infinite && !found.vanishes {
        return Ok(None);
    }
    for (term, may_be_zero) in &found.positive {
        let ends = [Some(low), Some(high).filter(|_| !is_infinite)];
        for end in ends.into_iter().flatten() {
            match sign_of(&found.at(term, end), budget)? {
                Some(Ordering::Greater) => {}
                Some(Ordering::Equal) if *may_be_zero => {}
                _ => return Ok(None),
            }
        }
    }
    // The value is written down once for each bound, so that integrals in integrals double it.
    budget.spend(10 * value.n_nodes() * (low.n_nodes() + high.n_nodes()))?;
    let mut ends = vec![found.at(&value, low).negated()];
    if !is_infinite {
        ends.push(found.at(&value, high));
    }
    Ok(Some(Expr::sum(ends)))
}

impl Antiderivative<'_> {
    fn antiderivative(&mut self, integrand: &Expr, budget: &mut Budget) -> Bounded<Option<Expr>> {
        budget.spend(20)?;
        match integrand {
            Expr::Add(terms) => {
                let mut parts = Vec::new();
                for term in terms {
                    match self.antiderivative(term, budget)? {
                        Some(part) => parts.push(part),
                        None => return Ok(None),
                    }
                }
                Ok(Some(Expr::Add(parts)))
            }
            Expr::Neg(x) => Ok(self.antiderivative(x, budget)?.map(Expr::negated)),
            _ => self.of_product(integrand, budget),
        }
    }

    /// Constants come out of the integral; a polynomial `P` before `f` is integrated by parts, as P F₁ - P' F₂ + P'' F₃ - …
    /// with the repeated antiderivatives F₁, F₂, … of `f`.
    fn of_product(&mut self, product: &Expr, budget: &mut Budget) -> Bounded<Option<Expr>> {
        let mut constants = Vec::new();
        let mut polynomial = vec![Expr::int(1)];
        let mut functions = Vec::new();
        for factor in factors(product) {
            if !self.depends(&factor) {
                constants.push(factor);
            } else if self.coefficients(&factor, budget)?.is_some() {
                polynomial.push(factor);
            } else {
                functions.push(factor);
            }
        }
        let Some(coefficients) = self.coefficients(&Expr::Mul(polynomial), budget)? else { return Ok(None) };
        let repeated = match functions.as_slice() {
            [] => Some(self.powers(coefficients.len())),
            [function] => self.repeated(function, coefficients.len(), budget)?,
            _ => None,
        };
        let Some(repeated) = repeated else { return Ok(None) };
        let mut terms = Vec::new();
        for (k, antiderivative) in repeated.into_iter().enumerate() {
            let term = Expr::Mul(vec![self.derivative(&coefficients, k), antiderivative]);
            terms.push(if k % 2 == 0 { term } else { term.negated() });
        }
        constants.push(Expr::Add(terms));
        Ok(Some(Expr::Mul(constants)))
    }

    /// The first `n` repeated antiderivatives of one: `x`, `x^2/2`, `x^3/6`, …
    fn powers(&mut self, n: usize) -> Vec<Expr> {
        self.vanishes = false;
        let mut factorial = RBig::ONE;
        let mut power = |k: usize| {
            factorial *= RBig::from(k);
            let power = Expr::Pow(Box::new(self.unknown()), Box::new(Expr::int(k as i64)));
            Expr::Mul(vec![power, number(RBig::ONE / &factorial)])
        };
        (1..=n).map(&mut power).collect()
    }

    /// The first `n` repeated antiderivatives of a function that is no polynomial.
    fn repeated(&mut self, function: &Expr, n: usize, budget: &mut Budget) -> Bounded<Option<Vec<Expr>>> {
        let call = |func: Func, x: &Expr| Expr::Call(func, vec![x.clone()]);
        let (inner, cycle) = match function {
            Expr::Call(Func::Sin, args) => {
                let (sine, cosine) = (call(Func::Sin, &args[0]), call(Func::Cos, &args[0]));
                (&args[0], vec![cosine.clone().negated(), sine.clone().negated(), cosine, sine])
            }
            Expr::Call(Func::Cos, args) => {
                let (sine, cosine) = (call(Func::Sin, &args[0]), call(Func::Cos, &args[0]));
                (&args[0], vec![sine.clone(), cosine.clone().negated(), sine.negated(), cosine])
            }
            Expr::Call(Func::Exp, args) => (&args[0], vec![function.clone()]),
            Expr::Pow(base, power) if !self.depends(base) => (&**power, vec![function.clone()]),
            _ if n == 1 => return Ok(self.single(function, budget)?.map(|found| vec![found])),
            _ => return Ok(None),
        };
        let Some(slope) = self.slope(inner, budget)? else { return Ok(None) };
        let mut slope = vec![slope];
        if let Expr::Pow(base, _) = function
            && **base != Expr::E
        {
            self.positive.push(((**base).clone(), false));
            slope.push(Expr::Call(Func::Ln, vec![(**base).clone()]));
        }
        let slope = Expr::product(slope);
        self.vanishes &= cycle.len() == 1 && sign_of(&slope, budget)? == Some(Ordering::Less);
        let divided_by_power =
            |k: usize| Expr::Pow(Box::new(slope.clone()), Box::new(Expr::int(-(k as i64))));
        Ok(Some(
            (1..=n)
                .map(|k| Expr::Mul(vec![cycle[(k - 1) % cycle.len()].clone(), divided_by_power(k)]))
                .collect(),
        ))
    }

    /// An antiderivative of a power or a logarithm of a linear term, of a square of a sine or cosine, or of the reciprocal
    /// of `cx^2 + d`.
    fn single(&mut self, function: &Expr, budget: &mut Budget) -> Bounded<Option<Expr>> {
        self.vanishes = false;
        if let Expr::Call(Func::Ln, args) = function {
            let Some(slope) = self.slope(&args[0], budget)? else { return Ok(None) };
            self.positive.push((args[0].clone(), false));
            let logarithm = Expr::Add(vec![function.clone(), Expr::int(-1)]);
            return Ok(Some(Expr::Mul(vec![args[0].clone(), logarithm, Expr::Inv(Box::new(slope))])));
        }
        let Some((base, power)) = raised(function, budget)? else { return Ok(None) };
        if let Expr::Call(func @ (Func::Sin | Func::Cos), args) = base
            && power == RBig::from(2)
        {
            let Some(slope) = self.slope(&args[0], budget)? else { return Ok(None) };
            let twice = Expr::Call(Func::Sin, vec![Expr::Mul(vec![Expr::int(2), args[0].clone()])]);
            let wave = Expr::Mul(vec![twice, Expr::Inv(Box::new(Expr::Mul(vec![Expr::int(4), slope])))]);
            let wave = if *func == Func::Sin { wave.negated() } else { wave };
            let half = Expr::Mul(vec![number(RBig::ONE / RBig::from(2)), self.unknown()]);
            return Ok(Some(Expr::Add(vec![half, wave])));
        }
        let Some(slope) = self.slope(base, budget)? else {
            return if power == -RBig::ONE { self.arctangent(base, budget) } else { Ok(None) };
        };
        self.positive.push((base.clone(), power > RBig::ZERO));
        let raised = &power + RBig::ONE;
        let value = if raised.is_zero() {
            Expr::Call(Func::Ln, vec![base.clone()])
        } else {
            let power = Expr::Pow(Box::new(base.clone()), Box::new(number(raised.clone())));
            Expr::Mul(vec![power, number(RBig::ONE / raised)])
        };
        Ok(Some(Expr::Mul(vec![value, Expr::Inv(Box::new(slope))])))
    }

    /// The integral of `1/(cx^2 + d)` with positive c and d: `\arctan(x\sqrt{c/d})/\sqrt{cd}`.
    fn arctangent(&self, quadratic: &Expr, budget: &mut Budget) -> Bounded<Option<Expr>> {
        let Some(coefficients) = self.coefficients(quadratic, budget)? else { return Ok(None) };
        let [start, middle, square] = coefficients.as_slice() else { return Ok(None) };
        let is_positive = |expr: &Expr, budget: &mut Budget| {
            Ok(ratio_of(expr, budget)?.is_some_and(|value| value > RBig::ZERO))
        };
        let has_middle = ratio_of(middle, budget)? != Some(RBig::ZERO);
        if has_middle || !is_positive(start, budget)? || !is_positive(square, budget)? {
            return Ok(None);
        }
        let root = |x: Expr| Expr::Root(Box::new(x), Box::new(Expr::int(2)));
        let scale = root(Expr::Mul(vec![square.clone(), Expr::Inv(Box::new(start.clone()))]));
        let angle = Expr::Call(Func::Atan, vec![Expr::Mul(vec![self.unknown(), scale])]);
        let size = root(Expr::Mul(vec![square.clone(), start.clone()]));
        Ok(Some(Expr::Mul(vec![angle, Expr::Inv(Box::new(size))])))
    }

    fn unknown(&self) -> Expr {
        Expr::Var(self.variable.to_owned())
    }

    fn depends(&self, expr: &Expr) -> bool {
        expr.any(|node| matches!(node, Expr::Var(name) if name == self.variable))
    }

    /// `expr` with `value` for the variable.
    fn at(&self, expr: &Expr, value: &Expr) -> Expr {
        expr.map(&mut |node| match &node {
            Expr::Var(name) if name == self.variable => value.clone(),
            _ => node,
        })
    }

    /// The slope of a linear term; `None` for other terms.
    fn slope(&self, expr: &Expr, budget: &mut Budget) -> Bounded<Option<Expr>> {
        Ok(match self.coefficients(expr, budget)?.as_deref() {
            Some([_, slope]) => Some(slope.clone()),
            _ => None,
        })
    }

    /// The coefficients of a polynomial in the variable, the constant one first; `None` for other expressions.
    fn coefficients(&self, expr: &Expr, budget: &mut Budget) -> Bounded<Option<Vec<Expr>>> {
        let Some(form) = affordable_form(expr, budget)? else { return Ok(None) };
        let is_variable = |atom: &Atom| matches!(atom, Atom::Var(name) if name == self.variable);
        let mut sums: Vec<Vec<Expr>> = vec![Vec::new()];
        for (monomial, value) in &form.terms {
            let power =
                monomial.iter().find(|(atom, _)| is_variable(atom)).map_or(Power { n: 0, d: 1 }, |(_, p)| *p);
            if power.d != 1 || !(0..=MAX_DEGREE).contains(&power.n) {
                return Ok(None);
            }
            let mut factors = vec![number(value.clone())];
            factors.extend(without_variable(monomial, is_variable));
            let degree = power.n as usize;
            sums.resize(sums.len().max(degree + 1), Vec::new());
            sums[degree].push(Expr::product(factors));
        }
        let sum = |terms: Vec<Expr>| if terms.is_empty() { Expr::int(0) } else { Expr::sum(terms) };
        Ok(Some(sums.into_iter().map(sum).collect()))
    }

    /// The k-th derivative of a polynomial.
    fn derivative(&self, coefficients: &[Expr], k: usize) -> Expr {
        let terms = coefficients.iter().enumerate().skip(k).map(|(degree, coefficient)| {
            let scale = (degree - k + 1..=degree).fold(RBig::ONE, |product, n| product * RBig::from(n));
            let power = Expr::Pow(Box::new(self.unknown()), Box::new(Expr::int((degree - k) as i64)));
            let power = if degree == k { Expr::int(1) } else { power };
            Expr::Mul(vec![number(scale), coefficient.clone(), power])
        });
        Expr::sum(terms.collect())
    }
}

/// The factors of a product, also under `1/…` and after a minus.
fn factors(expr: &Expr) -> Vec<Expr> {
    match expr {
        Expr::Mul(list) => list.iter().flat_map(factors).collect(),
        Expr::Neg(x) => [vec![Expr::int(-1)], factors(x)].concat(),
        Expr::Inv(x) => match &**x {
            Expr::Pow(base, power) => vec![Expr::Pow(base.clone(), Box::new((**power).clone().negated()))],
            Expr::Mul(list) => list.iter().flat_map(|x| factors(&Expr::Inv(Box::new(x.clone())))).collect(),
            _ => vec![expr.clone()],
        },
        _ => vec![expr.clone()],
    }
}

/// The base and the power of a power, a root or a reciprocal.
fn raised<'a>(expr: &'a Expr, budget: &mut Budget) -> Bounded<Option<(&'a Expr, RBig)>> {
    Ok(match expr {
        Expr::Pow(base, power) => ratio_of(power, budget)?.map(|power| (&**base, power)),
        Expr::Root(base, degree) => {
            ratio_of(degree, budget)?.filter(|n| *n > RBig::ZERO).map(|n| (&**base, RBig::ONE / n))
        }
        Expr::Inv(x) => Some(raised(x, budget)?.map_or((&**x, -RBig::ONE), |(base, power)| (base, -power))),
        _ => None,
    })
}

pub(super) fn number(value: RBig) -> Expr {
    Expr::Num { value, is_decimal: false }
}

/// The powers of a monomial other than those of the variable.
pub(super) fn without_variable(monomial: &Monomial, is_variable: impl Fn(&Atom) -> bool) -> Vec<Expr> {
    let power = |power: &Power| number(RBig::from_parts_signed(power.n.into(), power.d.into()));
    let base = |atom: &Atom| match atom {
        Atom::Var(name) => Expr::Var(name.clone()),
        Atom::Pi => Expr::Pi,
        Atom::E => Expr::E,
        Atom::I => Expr::I,
        Atom::Prime(prime) => number(RBig::from(*prime)),
    };
    let kept = monomial.iter().filter(|(atom, _)| !is_variable(atom));
    kept.map(|(atom, p)| Expr::Pow(Box::new(base(atom)), Box::new(power(p)))).collect()
}
