//! Answers written in one plain notation, for people.

use crate::answer::Answer;
use crate::answer::quantity::Quantity;
use crate::answer::region::Interval;
use crate::budget::Budget;
use crate::exact_form::exact_form;
use crate::expr::{Expr, INDEX, Sign, UNIT};
use crate::lex::token::Bracket;
use crate::poly::{Atom, Monomial, Poly, Power};
use dashu_ratio::RBig;

/// Longest form shown; the rest becomes an ellipsis.
const MAX_SHOWN: usize = 160;

pub(crate) fn answer(answer: &Answer, budget: &mut Budget) -> String {
    shortened(&whole(answer, budget))
}

fn whole(answer: &Answer, budget: &mut Budget) -> String {
    let mut join = |items: &[Answer], sep: &str| {
        items.iter().take(64).map(|item| whole(item, budget)).collect::<Vec<_>>().join(sep)
    };
    match answer {
        Answer::Scalar(value) => quantity(value, budget),
        Answer::Tuple { items, open, close } => {
            format!("{}{}{}", bracket(*open).0, join(items, ", "), bracket(*close).1)
        }
        Answer::List(items) => join(items, ", "),
        Answer::Set(items) => format!("{{{}}}", join(items, ", ")),
        Answer::Region(region) => {
            if region.pieces.is_empty() {
                return "{}".into();
            }
            let pieces: Vec<String> =
                region.pieces.iter().take(64).map(|piece| interval(piece, budget)).collect();
            match &region.variable {
                Some(variable) => format!("{variable} in {}", pieces.join(" U ")),
                None => pieces.join(" U "),
            }
        }
        Answer::Matrix(rows) => {
            let row = |cells: &Vec<Expr>, budget: &mut Budget| {
                format!("[{}]", cells.iter().map(|x| expr(x, budget)).collect::<Vec<_>>().join(", "))
            };
            format!("[{}]", rows.iter().map(|cells| row(cells, budget)).collect::<Vec<_>>().join(", "))
        }
        Answer::Cases(cases) => {
            let case = |(value, condition): &(Answer, Answer), budget: &mut Budget| {
                format!("{} if {}", whole(value, budget), whole(condition, budget))
            };
            cases.iter().take(64).map(|pair| case(pair, budget)).collect::<Vec<_>>().join("; ")
        }
        Answer::Named { name, value, .. } => format!("{name} = {}", whole(value, budget)),
        Answer::Equation(left, right) => format!("{} = {}", expr(left, budget), quantity(right, budget)),
        Answer::Inequality(left, rel, right) => {
            format!("{} {} {}", expr(left, budget), rel.sign(), expr(right, budget))
        }
        Answer::Ratio(parts) => parts.iter().map(|x| expr(x, budget)).collect::<Vec<_>>().join(":"),
        Answer::Choice { letter, rest } => match rest {
            Some(rest) => format!("({letter}) {}", whole(rest, budget)),
            None => format!("({letter})"),
        },
        Answer::Empty => "{}".into(),
        Answer::Text { words, .. } | Answer::Run(words) => words.clone(),
    }
}

fn quantity(value: &Quantity, budget: &mut Budget) -> String {
    let degrees = value.without_degrees();
    let (number, sign) = match (&degrees, value.without_percent()) {
        (Some(degrees), _) => (expr(degrees, budget), "°"),
        (None, Some(percent)) => (expr(&percent, budget), "%"),
        (None, None) => (expr(&value.expr, budget), ""),
    };
    match &value.unit {
        Some(unit) => format!("{number}{sign} {}", unit.shown),
        None => format!("{number}{sign}"),
    }
}

fn interval(piece: &Interval, budget: &mut Budget) -> String {
    let open = if piece.low.is_closed { '[' } else { '(' };
    let close = if piece.high.is_closed { ']' } else { ')' };
    format!("{open}{}, {}{close}", expr(&piece.low.at, budget), expr(&piece.high.at, budget))
}

fn bracket(bracket: Bracket) -> (&'static str, &'static str) {
    match bracket {
        Bracket::Square => ("[", "]"),
        Bracket::Angle => ("<", ">"),
        _ => ("(", ")"),
    }
}

/// The exact form where there is one, else the expression as read.
pub(crate) fn expr(value: &Expr, budget: &mut Budget) -> String {
    match exact_form(value, budget) {
        Ok(Some(form)) if form.terms.len() <= 32 => poly(&form),
        _ => shortened(&tree(value)),
    }
}

fn poly(form: &Poly) -> String {
    if form.is_zero() {
        return "0".into();
    }
    // Highest powers first, constants last.
    let mut terms: Vec<_> = form.terms.iter().collect();
    terms.sort_by_key(|(monomial, _)| {
        let degree: i64 =
            monomial.iter().filter(|(atom, _)| matches!(atom, Atom::Var(_))).map(|(_, p)| p.n).sum();
        std::cmp::Reverse(degree)
    });
    let mut shown = String::new();
    for (monomial, value) in terms {
        let is_negative = *value < RBig::ZERO;
        let sign = match (shown.is_empty(), is_negative) {
            (true, true) => "-",
            (true, false) => "",
            (false, true) => " - ",
            (false, false) => " + ",
        };
        shown.push_str(sign);
        let size = if is_negative { -value.clone() } else { value.clone() };
        let mut factors = atoms(monomial);
        if factors.is_empty() || !size.is_one() {
            factors.insert(0, ratio(&size));
        }
        shown.push_str(&factors.join("*"));
    }
    shown
}

/// A fraction; a long fraction is shown without its middle.
pub(crate) fn ratio(value: &RBig) -> String {
    shortened(&value.to_string())
}

/// The factors of a monomial; square roots of primes are joined under one root.
fn atoms(monomial: &Monomial) -> Vec<String> {
    let mut shown = Vec::new();
    let mut radicand = 1u128;
    for (atom, power) in monomial {
        match atom {
            Atom::Prime(prime) if *power == (Power { n: 1, d: 2 }) => {
                match radicand.checked_mul(u128::from(*prime)) {
                    Some(product) => radicand = product,
                    None => shown.push(format!("sqrt({prime})")),
                }
            }
            _ => shown.push(atom_power(atom, *power)),
        }
    }
    if radicand > 1 {
        shown.push(format!("sqrt({radicand})"));
    }
    shown
}

fn atom_power(atom: &Atom, power: Power) -> String {
    let name = match atom {
        Atom::Var(name) => variable(name),
        Atom::Pi => "pi".into(),
        Atom::E => "e".into(),
        Atom::I => "i".into(),
        Atom::Prime(prime) => prime.to_string(),
    };
    match (power.n, power.d) {
        (1, 1) => name,
        (n, 1) => format!("{name}^{n}"),
        (n, d) => format!("{name}^({n}/{d})"),
    }
}

/// The name of a variable; units without the word that marks them, the indices of sums as k0, k1, ….
fn variable(name: &str) -> String {
    name.strip_prefix(UNIT).unwrap_or(name).replace(INDEX, "k")
}

fn tree(value: &Expr) -> String {
    let join = |list: &[Expr], sep: &str| list.iter().map(tree).collect::<Vec<_>>().join(sep);
    match value {
        Expr::Num { value, .. } => ratio(value),
        Expr::Var(name) => variable(name),
        Expr::Pi => "pi".into(),
        Expr::E => "e".into(),
        Expr::I => "i".into(),
        Expr::Infinity => "inf".into(),
        Expr::Add(terms) => format!("({})", join(terms, " + ")),
        Expr::Mul(factors) => quotient(factors),
        Expr::Neg(x) => format!("-{}", tree(x)),
        Expr::Inv(_) => quotient(std::slice::from_ref(value)),
        Expr::Pow(a, b) => format!("{}^({})", tree(a), tree(b)),
        Expr::Root(x, n) if **n == Expr::int(2) => format!("sqrt({})", tree(x)),
        Expr::Root(x, n) => format!("root({}, {})", tree(n), tree(x)),
        Expr::Call(func, args) => format!("{}({})", func.name(), join(args, ", ")),
        Expr::Series { is_sum, index, parts } => {
            let name = if *is_sum { "sum" } else { "product" };
            let to = parts.get(2).map_or_else(|| "inf".into(), tree);
            format!("{name}({}, {} = {}..{to})", tree(&parts[0]), variable(index), tree(&parts[1]))
        }
        Expr::PlusMinus(Sign::Same, x) => format!("±{}", tree(x)),
        Expr::PlusMinus(Sign::Opposite, x) => format!("∓{}", tree(x)),
        Expr::Degrees(x) => format!("{}°", tree(x)),
        Expr::Percent(x) => format!("{}%", tree(x)),
    }
}

/// The factors over the divisors among them.
fn quotient(factors: &[Expr]) -> String {
    let mut denominator = Vec::new();
    let mut under = Vec::new();
    for factor in factors {
        match factor {
            Expr::Inv(x) => under.push(tree(x)),
            x if *x == Expr::int(1) => {}
            x => denominator.push(tree(x)),
        }
    }
    let denominator = if denominator.is_empty() { "1".into() } else { denominator.join("*") };
    match under.as_slice() {
        [] => denominator,
        [one] if one.chars().all(char::is_alphanumeric) || one.starts_with('(') => {
            format!("{denominator}/{one}")
        }
        _ => format!("{denominator}/({})", under.join("*")),
    }
}

/// `text`; a long text is shown without its middle.
pub(crate) fn shortened(text: &str) -> String {
    if text.len() <= MAX_SHOWN {
        return text.to_owned();
    }
    let chars: Vec<char> = text.chars().take(MAX_SHOWN / 2).collect();
    let tail: Vec<char> = text.chars().rev().take(MAX_SHOWN / 4).collect();
    format!("{}…{}", chars.iter().collect::<String>(), tail.iter().rev().collect::<String>())
}
