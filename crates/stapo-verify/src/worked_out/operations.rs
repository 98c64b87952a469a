//! The operations that an expression leaves to be done.

use super::is_logarithm;
use crate::budget::{Bounded, Budget};
use crate::exact_form::affordable_form;
use crate::expr::{Expr, Func};
use crate::poly::{Monomial, Poly};
use dashu_base::{Abs, Gcd};
use dashu_int::UBig;
use dashu_ratio::RBig;
use std::collections::BTreeSet;

/// An operation that could be carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Operation {
    /// Like terms are added: `3x+4x`, `9\pi-4\pi`, `3\sqrt2-\sqrt2`, `60+180`.
    Sum,
    /// Numbers or powers of one base are multiplied, or a fraction is reduced: `2\cdot 3`, `e^2 e^3`, `\frac64`.
    Product,
    /// A number, a product or a power is raised to a whole power: `2^{10}`, `(2x^3)^3`.
    Power,
    /// A root is taken in part, or two roots are multiplied: `\sqrt{12}`, `\sqrt2\sqrt3`.
    Root,
    /// A root in a denominator is cleared: `\frac{1}{\sqrt2}`.
    RationalDenominator,
    /// A root of an irrational number is resolved: `\sqrt{3+2\sqrt2}`.
    NestedRoot,
    /// Complex numbers are multiplied, divided or raised to a power: `(1+i)^2`, `\frac{5}{1+2i}`, `i^7`.
    Complex,
    /// Logarithms are added: `\ln2+\ln3`.
    LogarithmSum,
    /// Fractions with different denominators are added: `\frac{1}{x}+\frac{1}{x+1}`.
    FractionSum,
    /// Two minus signs cancel: `-(-5)`.
    Sign,
    /// A function has a value that could be written down: `\arcsin\frac12`, `\log_2 8`, `\binom73`, `|2-8|`.
    Logarithm,
    Trigonometry,
    Counting,
    OtherFunction,
    /// A sum or product over an index is written in closed form.
    Series,
    /// What only the text shows, since reading carries it out.
    Integral,
    Union,
    Intersection,
    Matrix,
}

/// What the expressions of an answer leave to do.
#[derive(Debug, Default)]
pub(super) struct Left {
    pub(super) operations: BTreeSet<Operation>,
    /// The highest degree of a denominator.
    pub(super) denominator_degree: u64,
    /// Terms of sums beyond the first of each, and functions, all together.
    pub(super) n_terms: usize,
    pub(super) n_calls: usize,
}

pub(super) fn left_in(list: &[Expr], budget: &mut Budget) -> Bounded<Left> {
    let mut left = Left::default();
    for value in list {
        let mut nodes = Vec::new();
        value.walk(&mut |node| nodes.push(node));
        for node in nodes {
            budget.spend(4)?;
            left.look_at(node, budget)?;
        }
    }
    Ok(left)
}

impl Left {
    fn add(&mut self, operation: Operation, is_left: bool) {
        if is_left {
            self.operations.insert(operation);
        }
    }

    fn look_at(&mut self, node: &Expr, budget: &mut Budget) -> Bounded<()> {
        match node {
            Expr::Add(terms) => {
                self.n_terms += terms.len() - 1;
                self.add(Operation::Sum, has_like_terms(terms, budget)?);
                let n_logarithms = terms.iter().filter(|term| is_logarithm_term(term)).count();
                self.add(Operation::LogarithmSum, n_logarithms > 1);
                self.add(Operation::FractionSum, has_fractions(terms));
            }
            Expr::Mul(_) => self.product(&Factors::new(node), budget)?,
            Expr::Neg(x) => self.add(Operation::Sign, is_negative(x)),
            Expr::Pow(base, power) => self.power(node, base, power, budget)?,
            Expr::Root(x, degree) => self.root(node, x, degree, budget)?,
            Expr::Series { .. } => self.add(Operation::Series, true),
            Expr::Call(func, args) if *func != Func::Exp => {
                self.n_calls += 1;
                self.add(value_of(*func), args.iter().all(is_constant));
            }
            _ => {}
        }
        Ok(())
    }

    fn product(&mut self, factors: &Factors, budget: &mut Budget) -> Bounded<()> {
        let degree = factors.under.iter().map(|x| degree(x)).sum();
        self.denominator_degree = self.denominator_degree.max(degree);
        self.add(Operation::Product, factors.has_numbers_left(budget)? || factors.has_like_factors());
        let has_i = |x: &&&Expr| is_constant(x) && x.any(|node| *node == Expr::I);
        self.add(
            Operation::Complex,
            factors.over.iter().filter(has_i).count() > 1 || factors.under.iter().any(|x| has_i(&x)),
        );
        self.add(Operation::RationalDenominator, factors.under.iter().any(|x| is_irrational(x)));
        self.add(Operation::Root, has_roots_to_multiply(&factors.over));
        let n_sums = factors.over.iter().filter(|x| matches!(x, Expr::Add(_)) && is_constant(x)).count();
        self.add(Operation::Product, n_sums > 1);
        // A fraction in a denominator.
        self.add(
            Operation::FractionSum,
            factors
                .under
                .iter()
                .any(|x| matches!(x, Expr::Add(_)) && x.any(|node| matches!(node, Expr::Inv(_)))),
        );
        Ok(())
    }

    fn power(&mut self, node: &Expr, base: &Expr, power: &Expr, budget: &mut Budget) -> Bounded<()> {
        let has_i = |x: &Expr| is_constant(x) && x.any(|node| *node == Expr::I);
        if *base == Expr::E {
            self.add(Operation::Complex, has_i(power));
            let is_log = |node: &Expr| matches!(node, Expr::Call(func, _) if is_logarithm(*func));
            self.add(Operation::Logarithm, power.any(is_log));
        }
        let Expr::Num { value, .. } = power else {
            // A fraction as a power is a root.
            if is_number(base) && is_number(power) {
                let form = affordable_form(node, budget)?;
                self.add(Operation::Root, form.is_some_and(|form| can_be_taken(&form)));
                // 3^(-1/3) has a root in its denominator.
                let sign = if let Expr::Mul(factors) = power { factors.first() } else { Some(power) };
                self.add(Operation::RationalDenominator, sign.is_some_and(is_negative));
            }
            return Ok(());
        };
        if !value.is_int() {
            return Ok(());
        }
        let is_trivial = value.is_zero() || value.is_one();
        let is_raised = match base {
            Expr::Mul(_) => Factors::new(base).is_raised_by_parts(),
            Expr::Pow(..) | Expr::Neg(_) | Expr::Root(..) => true,
            Expr::Add(_) => is_constant(base) && !has_i(base),
            _ => is_number(base) && !is_power_of_ten(node),
        };
        self.add(Operation::Power, is_trivial || is_raised);
        self.add(Operation::Complex, has_i(base));
        Ok(())
    }

    fn root(&mut self, node: &Expr, x: &Expr, degree: &Expr, budget: &mut Budget) -> Bounded<()> {
        if !is_constant(x) {
            let degree = match degree {
                Expr::Num { value, .. } => value.clone(),
                _ => return Ok(()),
            };
            for factor in Factors::new(x).over {
                let is_taken = match factor {
                    Expr::Num { .. } => {
                        let root = Expr::Root(Box::new(factor.clone()), Box::new(int(&degree)));
                        affordable_form(&root, budget)?.is_some_and(|form| can_be_taken(&form))
                            && !is_one(factor)
                    }
                    Expr::Pow(base, power) => {
                        matches!(**base, Expr::Var(_))
                            && matches!(&**power, Expr::Num { value, .. } if *value >= degree && value.is_int())
                    }
                    _ => false,
                };
                self.add(Operation::Root, is_taken);
            }
            return Ok(());
        }
        let is_irrational = x.any(|node| matches!(node, Expr::Root(..)));
        self.add(Operation::NestedRoot, is_irrational);
        if !is_irrational {
            let form = affordable_form(node, budget)?;
            self.add(Operation::Root, form.is_some_and(|form| can_be_taken(&form)));
        }
        Ok(())
    }
}

fn int(value: &RBig) -> Expr {
    Expr::Num { value: value.clone(), is_decimal: false }
}

fn is_one(expr: &Expr) -> bool {
    matches!(expr, Expr::Num { value, .. } if value.is_one())
}

fn value_of(func: Func) -> Operation {
    match func {
        func if is_logarithm(func) => Operation::Logarithm,
        func if func.takes_angle() || func.gives_angle() => Operation::Trigonometry,
        Func::Factorial | Func::DoubleFactorial | Func::Binomial => Operation::Counting,
        _ => Operation::OtherFunction,
    }
}

fn is_constant(expr: &Expr) -> bool {
    !expr.any(|node| matches!(node, Expr::Var(_)))
}

fn is_negative(expr: &Expr) -> bool {
    match expr {
        Expr::Num { value, .. } => *value < RBig::ZERO,
        Expr::Neg(_) => true,
        _ => false,
    }
}

/// Whether a constant has a root in it.
fn is_irrational(expr: &Expr) -> bool {
    is_constant(expr)
        && expr.any(|node| match node {
            Expr::Root(..) => true,
            Expr::Pow(base, power) => is_number(base) && !is_whole(power),
            _ => false,
        })
}

/// Whether the expression is a number as it is printed: digits, a fraction in lowest terms, a power of ten and what
/// is before it, with a sign, percent and degrees.
pub(super) fn is_number(expr: &Expr) -> bool {
    match expr {
        Expr::Num { .. } | Expr::Infinity => true,
        Expr::Neg(x) => !is_negative(x) && is_number(x),
        Expr::Percent(x) | Expr::Degrees(x) => is_number(x),
        Expr::Pow(..) => is_power_of_ten(expr),
        Expr::Mul(factors) => match factors.as_slice() {
            [over, Expr::Inv(under)] => match (over, &**under) {
                (Expr::Num { value: over, .. }, Expr::Num { value: under, .. }) => {
                    is_in_lowest_terms(over, under)
                }
                _ => false,
            },
            [Expr::Num { .. }, power] => is_power_of_ten(power),
            _ => false,
        },
        _ => false,
    }
}

fn is_in_lowest_terms(over: &RBig, under: &RBig) -> bool {
    let is_signed_twice = *over < RBig::ZERO && *under < RBig::ZERO;
    // A quotient is kept in lowest terms.
    !under.is_zero()
        && !is_signed_twice
        && RBig::from((over / under).denominator().clone()) == under.clone().abs()
}

fn is_whole(expr: &Expr) -> bool {
    matches!(expr, Expr::Num { value, .. } if value.is_int())
}

fn is_power_of_ten(expr: &Expr) -> bool {
    matches!(expr, Expr::Pow(base, power) if **base == Expr::int(10) && is_whole(power))
}

/// Whether the form of a root has a factor before the root, or is a number: `11\sqrt2`, 4.
fn can_be_taken(form: &Poly) -> bool {
    form.terms.iter().any(|(atoms, factor)| atoms.is_empty() || !factor.is_one())
}

/// The factors of a product over and under its fraction bar, products in it taken apart; ones are left out.
struct Factors<'a> {
    over: Vec<&'a Expr>,
    under: Vec<&'a Expr>,
    n_signs: usize,
}

impl<'a> Factors<'a> {
    fn new(expr: &'a Expr) -> Self {
        let mut factors = Self { over: Vec::new(), under: Vec::new(), n_signs: 0 };
        factors.take(expr, false);
        factors
    }

    fn take(&mut self, expr: &'a Expr, is_under: bool) {
        match expr {
            Expr::Mul(list) => list.iter().for_each(|x| self.take(x, is_under)),
            Expr::Inv(x) => self.take(x, !is_under),
            Expr::Neg(x) => {
                self.n_signs += 1;
                self.take(x, is_under);
            }
            one if is_one(one) => {}
            other if is_under => self.under.push(other),
            other => self.over.push(other),
        }
    }

    /// Whether numbers can be multiplied, or a number over the fraction bar and one under it have a common factor.
    fn has_numbers_left(&self, budget: &mut Budget) -> Bounded<bool> {
        let mut parts = [RBig::ONE, RBig::ONE];
        let mut n_negative = self.n_signs;
        for (side, part) in [&self.over, &self.under].into_iter().zip(&mut parts) {
            let mut numbers = side.iter().filter(|x| is_number(x) && !is_power_of_ten(x));
            if let Some(Expr::Num { value, .. }) = numbers.next() {
                n_negative += usize::from(*value < RBig::ZERO);
                part.clone_from(value);
            }
            let n_powers = side.iter().filter(|x| is_power_of_ten(x)).count();
            if numbers.next().is_some() || n_powers > 1 {
                return Ok(true);
            }
        }
        let [numerator, denominator] = parts;
        if n_negative > 1 || !is_in_lowest_terms(&numerator, &denominator) {
            return Ok(true);
        }
        // What all terms of a sum have in common can be reduced too: (6 + 2√3)/4.
        for sum in self.over.iter().filter(|x| matches!(x, Expr::Add(_))) {
            let content = content(sum, budget)?;
            let shared = denominator.numerator().clone().into_parts().1.gcd(&content);
            if !content.is_zero() && !shared.is_one() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether two factors are powers of one base. Two equal sums are a factored form, unless one divides the other.
    fn has_like_factors(&self) -> bool {
        fn base(x: &Expr) -> Option<(&Expr, bool)> {
            match x {
                Expr::Pow(base, power) => Some((base, is_constant(power))),
                Expr::Num { .. } | Expr::Percent(_) | Expr::Degrees(_) | Expr::Root(..) | Expr::Infinity => {
                    None
                }
                other => Some((other, true)),
            }
        }
        let all: Vec<(&Expr, bool, bool)> = self
            .over
            .iter()
            .map(|x| (x, false))
            .chain(self.under.iter().map(|x| (x, true)))
            .filter_map(|(x, is_under)| base(x).map(|(base, is_fixed)| (base, is_fixed, is_under)))
            .collect();
        all.iter().enumerate().any(|(i, (x, is_fixed, is_under))| {
            all[..i].iter().any(|(y, other_fixed, other_under)| {
                x == y
                    && is_fixed == other_fixed
                    && (is_under != other_under || !matches!(x, Expr::Add(_) | Expr::Call(..)))
            })
        })
    }

    /// Whether a power of the product is worked out factor by factor: `(2x)^3`, but not `(xy)^2`.
    fn is_raised_by_parts(&self) -> bool {
        let is_part = |x: &&Expr| is_number(x) || matches!(x, Expr::Pow(..) | Expr::Root(..));
        self.n_signs > 0 || self.over.iter().chain(&self.under).any(is_part)
    }
}

/// The greatest number that divides every term of a sum; zero where a term has no whole factor.
fn content(sum: &Expr, budget: &mut Budget) -> Bounded<UBig> {
    let Some(form) = affordable_form(sum, budget)? else { return Ok(UBig::ZERO) };
    let mut content = UBig::ZERO;
    for factor in form.terms.values() {
        if !factor.is_int() {
            return Ok(UBig::ZERO);
        }
        let size = factor.numerator().clone().into_parts().1;
        content = if content.is_zero() { size } else { content.gcd(&size) };
    }
    Ok(content)
}

/// Whether two roots of one degree are next to each other, both of numbers or both of variables.
fn has_roots_to_multiply(factors: &[&Expr]) -> bool {
    let roots: Vec<(&Expr, bool)> = factors
        .iter()
        .filter_map(|x| match x {
            Expr::Root(inside, degree) => Some((&**degree, is_constant(inside))),
            _ => None,
        })
        .collect();
    roots.iter().enumerate().any(|(i, root)| roots[..i].contains(root))
}

/// Whether two terms of a sum can be added. A square and a number, as in `2(x-1)^2+3`, are a separate form.
fn has_like_terms(terms: &[Expr], budget: &mut Budget) -> Bounded<bool> {
    let is_power_of_sum = |term: &Expr| {
        let factors = Factors::new(term).over;
        factors
            .iter()
            .all(|x| is_number(x) || matches!(x, Expr::Pow(base, _) if matches!(**base, Expr::Add(_))))
    };
    if let [a, b] = terms
        && ((!is_constant(a) && is_power_of_sum(a) && is_constant(b))
            || (!is_constant(b) && is_power_of_sum(b) && is_constant(a)))
    {
        return Ok(false);
    }
    let mut monomials: BTreeSet<Monomial> = BTreeSet::new();
    let mut unlike: Vec<Vec<&Expr>> = Vec::new();
    for term in terms {
        if let Some(form) = affordable_form(term, budget)? {
            if form.is_zero() || form.terms.keys().any(|monomial| monomials.contains(monomial)) {
                return Ok(true);
            }
            monomials.extend(form.terms.into_keys());
            continue;
        }
        // Without an exact form, terms are alike that differ in a number only.
        let mut factors = Factors::new(term);
        factors.over.retain(|x| !is_number(x));
        if unlike.contains(&factors.over) && factors.under.iter().all(|x| is_number(x)) {
            return Ok(true);
        }
        budget.spend(unlike.len() as u64)?;
        unlike.push(factors.over);
    }
    Ok(false)
}

fn is_logarithm_term(term: &Expr) -> bool {
    let factors = Factors::new(term);
    let is_call = |x: &&&Expr| matches!(x, Expr::Call(func, _) if is_logarithm(*func));
    factors.over.iter().filter(is_call).count() == 1
        && factors.over.iter().all(|x| is_number(x) || is_call(&x))
}

/// Whether terms have different denominators with variables, or one has a sum as its denominator.
fn has_fractions(terms: &[Expr]) -> bool {
    let mut names: BTreeSet<Vec<&str>> = BTreeSet::new();
    for term in terms {
        let factors = Factors::new(term);
        let under: Vec<&str> = factors.under.iter().flat_map(|x| x.variables()).collect();
        let is_sum = |x: &&&Expr| {
            matches!(x, Expr::Add(_)) || matches!(x, Expr::Pow(base, _) if matches!(**base, Expr::Add(_)))
        };
        if factors.under.iter().any(|x| is_sum(&x) && !is_constant(x)) {
            return true;
        }
        if !under.is_empty() {
            names.insert(under);
        }
    }
    names.len() > 1
}

/// The degree of a denominator in all its variables together.
fn degree(expr: &Expr) -> u64 {
    match expr {
        Expr::Var(_) => 1,
        Expr::Mul(list) => list.iter().map(degree).sum(),
        Expr::Add(list) => list.iter().map(degree).max().unwrap_or(0),
        Expr::Neg(x) => degree(x),
        Expr::Pow(base, power) => match &**power {
            Expr::Num { value, .. } if value.is_int() => {
                degree(base).saturating_mul(u64::try_from(value.numerator()).unwrap_or(1))
            }
            _ => degree(base),
        },
        _ => 0,
    }
}
