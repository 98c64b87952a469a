//! Exact values: sums of fraction × roots of primes × π, e, i × powers of variables.
//!
//! Such a form is unique (roots of different square-free products are independent over the fractions), so two
//! answers that both have one are equal exactly when the forms are the same.

use crate::budget::{Bounded, Budget, MAX_TERMS, Stop};
use crate::number::exact;
use dashu_base::BitTest;
use dashu_int::{IBig, UBig};
use dashu_ratio::RBig;
use std::collections::BTreeMap;

/// Limit of trial division of a number under a root. A cofactor below the square of this limit is a prime; a larger
/// cofactor leaves the root to numerical evaluation.
const MAX_TRIAL: u32 = 1 << 14;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Atom {
    Var(String),
    Pi,
    E,
    /// A prime under a root; its power lies strictly between 0 and 1.
    Prime(u64),
    I,
}

/// A power `n/d` in lowest terms, `d` above zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Power {
    pub(crate) n: i64,
    pub(crate) d: i64,
}

/// Powers of atoms, sorted by atom.
pub(crate) type Monomial = Vec<(Atom, Power)>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Poly {
    pub(crate) terms: BTreeMap<Monomial, RBig>,
}

impl Power {
    pub(crate) fn new(n: i64, d: i64) -> Option<Self> {
        let (mut a, mut b) = (n.unsigned_abs(), d.unsigned_abs());
        while b != 0 {
            (a, b) = (b, a % b);
        }
        let g = i64::try_from(a).ok().filter(|g| *g != 0)?;
        let sign = d.signum();
        Some(Self { n: sign * (n / g), d: sign * (d / g) })
    }

    fn plus(self, other: Self) -> Option<Self> {
        let n = self.n.checked_mul(other.d)?.checked_add(other.n.checked_mul(self.d)?)?;
        Self::new(n, self.d.checked_mul(other.d)?)
    }

    fn times(self, other: Self) -> Option<Self> {
        Self::new(self.n.checked_mul(other.n)?, self.d.checked_mul(other.d)?)
    }
}

impl Poly {
    pub(crate) fn constant(value: RBig) -> Self {
        let mut terms = BTreeMap::new();
        if !value.is_zero() {
            terms.insert(Monomial::new(), value);
        }
        Self { terms }
    }

    pub(crate) fn atom(atom: Atom) -> Self {
        Self { terms: BTreeMap::from([(vec![(atom, Power { n: 1, d: 1 })], RBig::ONE)]) }
    }

    pub(crate) fn is_zero(&self) -> bool {
        self.terms.is_empty()
    }

    /// The fraction that the polynomial equals, if any.
    pub(crate) fn as_ratio(&self) -> Option<RBig> {
        match self.terms.len() {
            0 => Some(RBig::ZERO),
            1 => self.terms.get(&Monomial::new()).cloned(),
            _ => None,
        }
    }

    pub(crate) fn add(&mut self, other: Self, budget: &mut Budget) -> Bounded<()> {
        for (monomial, value) in other.terms {
            add_term(&mut self.terms, monomial, &value, budget)?;
        }
        if self.terms.len() > MAX_TERMS {
            return Err(Stop::OverBudget("a polynomial of more than 400 terms"));
        }
        Ok(())
    }

    pub(crate) fn neg(mut self) -> Self {
        for value in self.terms.values_mut() {
            *value = -std::mem::replace(value, RBig::ZERO);
        }
        self
    }

    /// `None` when a power does not fit.
    pub(crate) fn mul(&self, other: &Self, budget: &mut Budget) -> Bounded<Option<Self>> {
        if let (Some(a), Some(b)) = (self.as_ratio(), other.as_ratio()) {
            return Ok(Some(Self::constant(exact::mul(&a, &b, budget)?)));
        }
        let mut terms = BTreeMap::new();
        for (ma, va) in &self.terms {
            for (mb, vb) in &other.terms {
                budget.spend(20 + 10 * (ma.len() + mb.len()) as u64)?;
                let Some((monomial, factor)) = merged(ma, mb, budget)? else { return Ok(None) };
                let value = exact::mul(&exact::mul(va, vb, budget)?, &factor, budget)?;
                add_term(&mut terms, monomial, &value, budget)?;
                if terms.len() > MAX_TERMS {
                    return Ok(None);
                }
            }
        }
        Ok(Some(Self { terms }))
    }

    /// Whole power; `None` when the result has no such form (the inverse of a sum) or is too long.
    pub(crate) fn powi(&self, power: i64, budget: &mut Budget) -> Bounded<Option<Self>> {
        if let Some(value) = self.as_ratio() {
            return Ok(Some(Self::constant(exact::powi(&value, power, budget)?)));
        }
        if self.terms.len() == 1 {
            return self.pow_term(Power { n: power, d: 1 }, budget);
        }
        if power < 0 || power > MAX_TERMS as i64 {
            return Ok(None);
        }
        let mut result = Self::constant(RBig::ONE);
        for _ in 0..power {
            match result.mul(self, budget)? {
                Some(next) => result = next,
                None => return Ok(None),
            }
        }
        Ok(Some(result))
    }

    /// Fractional power of a single term.
    pub(crate) fn powq(&self, power: Power, budget: &mut Budget) -> Bounded<Option<Self>> {
        if power.d == 1 {
            return self.powi(power.n, budget);
        }
        if self.is_zero() {
            return if power.n > 0 {
                Ok(Some(self.clone()))
            } else {
                Err(Stop::Undefined("a division by zero"))
            };
        }
        self.pow_term(power, budget)
    }

    fn pow_term(&self, power: Power, budget: &mut Budget) -> Bounded<Option<Self>> {
        let mut terms = self.terms.iter();
        let (Some((monomial, value)), None) = (terms.next(), terms.next()) else { return Ok(None) };
        let mut raised = Monomial::new();
        for (atom, old) in monomial {
            let is_root_safe = matches!(atom, Atom::Prime(_) | Atom::Pi | Atom::E);
            if power.d != 1 && !is_root_safe {
                return Ok(None);
            }
            match old.times(power) {
                Some(new) => raised.push((atom.clone(), new)),
                None => return Ok(None),
            }
        }
        let Some((monomial, factor)) = normalised(raised, budget)? else { return Ok(None) };
        let rest = Self { terms: BTreeMap::from([(monomial, factor)]) };
        match root_of_ratio(value, power, budget)? {
            Some(root) => root.mul(&rest, budget),
            None => Ok(None),
        }
    }

    /// The factor `c` with `self = c · other`, if there is one.
    pub(crate) fn ratio_to(&self, other: &Self, budget: &mut Budget) -> Bounded<Option<RBig>> {
        let Some((monomial, a)) = self.terms.iter().next() else { return Ok(None) };
        let Some(b) = other.terms.get(monomial) else { return Ok(None) };
        let factor = exact::mul(a, &exact::inverse(b)?, budget)?;
        if self.terms.len() != other.terms.len() {
            return Ok(None);
        }
        for (monomial, value) in &other.terms {
            let expected = exact::mul(value, &factor, budget)?;
            if self.terms.get(monomial) != Some(&expected) {
                return Ok(None);
            }
        }
        Ok(Some(factor))
    }
}

fn add_term(
    terms: &mut BTreeMap<Monomial, RBig>,
    monomial: Monomial,
    value: &RBig,
    budget: &mut Budget,
) -> Bounded<()> {
    budget.spend(10)?;
    let sum = match terms.get(&monomial) {
        Some(old) => exact::add(old, value, budget)?,
        None => value.clone(),
    };
    if sum.is_zero() {
        terms.remove(&monomial);
    } else {
        terms.insert(monomial, sum);
    }
    Ok(())
}

/// The product of two monomials, and the fraction that whole powers of primes and of i amount to.
fn merged(a: &Monomial, b: &Monomial, budget: &mut Budget) -> Bounded<Option<(Monomial, RBig)>> {
    let mut powers: BTreeMap<Atom, Power> = a.iter().cloned().collect();
    for (atom, power) in b {
        let sum = match powers.get(atom) {
            Some(old) => match old.plus(*power) {
                Some(sum) => sum,
                None => return Ok(None),
            },
            None => *power,
        };
        powers.insert(atom.clone(), sum);
    }
    normalised(powers.into_iter().collect(), budget)
}

fn normalised(powers: Monomial, budget: &mut Budget) -> Bounded<Option<(Monomial, RBig)>> {
    let mut factor = RBig::ONE;
    let mut kept = Monomial::new();
    for (atom, power) in powers {
        let mut left = power;
        match atom {
            Atom::I => {
                if power.d != 1 {
                    return Ok(None);
                }
                let quarter_turns = power.n.rem_euclid(4);
                if quarter_turns >= 2 {
                    factor = -factor;
                }
                left.n = quarter_turns % 2;
            }
            Atom::Prime(prime) => {
                let whole = power.n.div_euclid(power.d);
                left.n = power.n.rem_euclid(power.d);
                let part = exact::powi(&RBig::from(prime), whole, budget)?;
                factor = exact::mul(&factor, &part, budget)?;
            }
            _ => {}
        }
        if left.n != 0 {
            kept.push((atom, left));
        }
    }
    Ok(Some((kept, factor)))
}

/// `value ^ power` for a fraction: whole part times roots of primes; a negative number has an imaginary square root
/// and a negative odd root.
fn root_of_ratio(value: &RBig, power: Power, budget: &mut Budget) -> Bounded<Option<Poly>> {
    if power.d == 1 {
        return Ok(Some(Poly::constant(exact::powi(value, power.n, budget)?)));
    }
    let is_negative = *value < RBig::ZERO;
    let mut monomial: BTreeMap<Atom, Power> = BTreeMap::new();
    let magnitude = value.numerator().clone().into_parts().1;
    for (part, sign) in [(magnitude, 1), (value.denominator().clone(), -1)] {
        let Some(primes) = factored(part, budget)? else { return Ok(None) };
        for (prime, count) in primes {
            let Some(raised) = power.times(Power { n: sign * count, d: 1 }) else { return Ok(None) };
            monomial.insert(Atom::Prime(prime), raised);
        }
    }
    if is_negative && power.d == 2 {
        monomial.insert(Atom::I, Power { n: power.n, d: 1 });
    } else if is_negative && power.d % 2 == 0 {
        return Ok(None);
    }
    let Some((monomial, mut factor)) = normalised(monomial.into_iter().collect(), budget)? else {
        return Ok(None);
    };
    if is_negative && power.d % 2 != 0 && power.n % 2 != 0 {
        factor = -factor;
    }
    Ok(Some(Poly { terms: BTreeMap::from([(monomial, factor)]) }))
}

/// Prime factors with their counts, or `None` where trial division does not find all of them.
fn factored(mut n: UBig, budget: &mut Budget) -> Bounded<Option<Vec<(u64, i64)>>> {
    let mut primes = Vec::new();
    let mut p = 2u32;
    while !n.is_one() && p < MAX_TRIAL {
        let small = u64::try_from(&n).ok();
        if let Some(small) = small
            && u64::from(p) * u64::from(p) > small
        {
            break;
        }
        let mut count = 0;
        budget.spend(1 + n.bit_len() as u64 / 64)?;
        while (&n % p) == 0 {
            n /= p;
            count += 1;
            budget.spend(1 + n.bit_len() as u64 / 64)?;
        }
        if count > 0 {
            primes.push((u64::from(p), count));
        }
        p += if p == 2 { 1 } else { 2 };
    }
    if n.is_one() {
        return Ok(Some(primes));
    }
    match u64::try_from(&n) {
        Ok(rest) if rest < u64::from(MAX_TRIAL) * u64::from(MAX_TRIAL) => {
            primes.push((rest, 1));
            Ok(Some(primes))
        }
        _ => Ok(None),
    }
}

/// A fraction with small parts, as a power.
pub(crate) fn small_power(value: &RBig) -> Option<Power> {
    let n = i64::try_from(value.numerator()).ok()?;
    let d = i64::try_from(&IBig::from(value.denominator().clone())).ok()?;
    Power::new(n, d)
}
