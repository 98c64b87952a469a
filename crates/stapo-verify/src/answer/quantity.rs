//! A value with its unit.

use crate::Rounding;
use crate::budget::{Bounded, Budget, unreadable};
use crate::exact_form::ratio_of;
use crate::expr::Expr;
use crate::lex::numeral::Numeral;
use crate::lex::token::{Bracket, Tok, Token};
use crate::parse;
use crate::units::{self, Unit};
use dashu_base::Abs;
use dashu_ratio::RBig;

/// Most units of one measure, such as days, hours, minutes and seconds.
const MAX_PARTS: usize = 4;

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Quantity {
    pub(crate) expr: Expr,
    pub(crate) unit: Option<Unit>,
    /// The second reading of a value whose last letter is apart: `5 m` as five metres, not five times m.
    pub(crate) as_measure: Option<(Box<Expr>, Unit)>,
    /// Half a unit of the last digit of a printed decimal that stands for all values which round to it.
    pub(crate) half_digit: Option<RBig>,
}

impl Quantity {
    pub(crate) fn bare(expr: Expr) -> Self {
        Self { expr, unit: None, as_measure: None, half_digit: None }
    }

    /// The value with percent signs dropped, if there are any.
    pub(crate) fn without_percent(&self) -> Option<Expr> {
        drop_signs(&self.expr, |node| match node {
            Expr::Percent(x) => Some(x),
            _ => None,
        })
    }

    /// The value with degree signs outside trigonometry dropped, if there are any.
    pub(crate) fn without_degrees(&self) -> Option<Expr> {
        drop_signs(&self.expr, |node| match node {
            Expr::Degrees(x) => Some(x),
            _ => None,
        })
    }
}

/// `expr` with every sign that `inside` recognises replaced by the expression under the sign; the arguments of calls
/// stay as they are.
fn drop_signs(expr: &Expr, inside: fn(&Expr) -> Option<&Expr>) -> Option<Expr> {
    if let Some(inner) = inside(expr) {
        return Some(inner.clone());
    }
    match expr {
        Expr::Neg(x) => Some(Expr::Neg(Box::new(drop_signs(x, inside)?))),
        Expr::Add(list) | Expr::Mul(list) => {
            let dropped: Vec<Option<Expr>> = list.iter().map(|x| drop_signs(x, inside)).collect();
            dropped.iter().any(Option::is_some).then(|| {
                let parts =
                    dropped.into_iter().zip(list).map(|(new, old)| new.unwrap_or_else(|| old.clone()));
                if matches!(expr, Expr::Add(_)) {
                    Expr::Add(parts.collect())
                } else {
                    Expr::Mul(parts.collect())
                }
            })
        }
        _ => None,
    }
}

/// Reads a value with an optional currency sign in front and an optional unit after.
pub(crate) fn quantity(tokens: &[Token], budget: &mut Budget) -> Bounded<Quantity> {
    let mut money = None;
    let kept: Vec<Token> = tokens
        .iter()
        .enumerate()
        .filter(|(i, token)| match &token.tok {
            Tok::Currency(name) => {
                money = Some(*name);
                false
            }
            // `US\$18`
            Tok::Word(word) if word == "US" => {
                tokens.get(i + 1).is_none_or(|next| next.tok != Tok::Currency("dollar"))
            }
            _ => true,
        })
        .map(|(_, token)| token.clone())
        .collect();
    let mut kept = kept;
    if matches!(kept.as_slice(), [Token { tok: Tok::Word(code), .. }, Token { tok: Tok::Num(_), .. }, ..] if units::is_currency_code(code))
    {
        kept.rotate_left(1);
    }
    let end = unit_start(&kept);
    let (value, tail) = kept.split_at(end);
    let (scale, tail) = scale_words(tail);
    let mut expr = parse::expression(value, budget)?;
    if let Some(scale) = scale {
        // `6 dozen` is a number as it is printed, and `6 \cdot 12` is not.
        expr = match expr {
            Expr::Num { value, is_decimal } => Expr::Num { value: value * scale, is_decimal },
            other => Expr::Mul(vec![other, Expr::Num { value: scale, is_decimal: false }]),
        };
    }
    let mut unit = unit(tail)?;
    if money.is_some() && unit.as_ref().is_some_and(Unit::is_kelvin) {
        return unreadable("money with a K, which may be thousands");
    }
    if let (Some(name), None) = (money, &unit) {
        unit = units::lookup(name).or_else(|| Some(Unit::word(name)));
    }
    let as_measure = if unit.is_none() { letter_unit(value, budget) } else { None };
    let half_digit = match rounded_numeral(value) {
        Some(numeral) => half_digit(&expr, numeral, budget)?,
        None => None,
    };
    Ok(Quantity { expr, unit, as_measure, half_digit })
}

/// The decimal that `value` prints, where the decimal may be rounded at its own digits: in scientific notation from six
/// digits on, or under [`Rounding::ShownDigits`] from three.
fn rounded_numeral(value: &[Token]) -> Option<&Numeral> {
    let numeral = printed_numeral(value).filter(|numeral| numeral.is_decimal())?;
    let is_scientific =
        numeral.power_of_ten != 0 || value.iter().any(|token| matches!(token.tok, Tok::Times | Tok::Caret));
    let is_rounded = match numeral.rounding {
        Rounding::SixDecimals => is_scientific && numeral.n_significant() >= 6,
        Rounding::ShownDigits => numeral.n_significant() >= 3,
    };
    is_rounded.then_some(numeral)
}

/// The first number of tokens that are one number: with a sign, a power of ten, a percent or degree sign, or a unit.
pub(super) fn printed_numeral(tokens: &[Token]) -> Option<&Numeral> {
    let is_plain = tokens.iter().all(|token| {
        matches!(
            token.tok,
            Tok::Num(_)
                | Tok::Minus
                | Tok::Times
                | Tok::Caret
                | Tok::Percent
                | Tok::Degree
                | Tok::Word(_)
                | Tok::Currency(_)
                | Tok::Open(Bracket::Brace)
                | Tok::Close(Bracket::Brace)
        )
    });
    let mut numerals = tokens.iter().filter_map(|token| match &token.tok {
        Tok::Num(numeral) => Some(numeral),
        _ => None,
    });
    let first = numerals.next().filter(|numeral| is_plain && numeral.repeating.is_none())?;
    // A second number is the ten of a power of ten.
    numerals.next().is_none_or(|ten| ten.whole == "10" && ten.is_plain_whole()).then_some(first)
}

/// Half a unit of the last digit of `numeral`, which is printed as `expr` together with a power of ten or a percent sign.
pub(super) fn half_digit(expr: &Expr, numeral: &Numeral, budget: &mut Budget) -> Bounded<Option<RBig>> {
    let printed = Numeral { power_of_ten: 0, ..numeral.clone() }.value()?;
    let Some(value) = ratio_of(expr, budget)? else { return Ok(None) };
    if printed.is_zero() {
        return Ok(None);
    }
    let n_digits = numeral.fraction.as_ref().map_or(0, String::len).min(1000);
    let digit = RBig::ONE / RBig::from(10u8).pow(n_digits as isize);
    Ok(Some((value / printed).abs() * digit / RBig::from(2)))
}

/// A measure in two or more units of one kind, as a number of the smallest: `3 hours 20 minutes`, `5 feet and 6 inches`.
/// Every part but the last is whole, and every part is less than one unit of the part before it.
pub(super) fn compound(tokens: &[Token], budget: &mut Budget) -> Bounded<Option<Quantity>> {
    let is_and = |token: &Token| matches!(&token.tok, Tok::Word(word) if word == "and");
    let mut rest = tokens;
    let mut parts: Vec<(RBig, bool, Unit)> = Vec::new();
    loop {
        budget.spend(4)?;
        let [Token { tok: Tok::Num(number), .. }, Token { tok: Tok::Word(name), .. }, tail @ ..] = rest
        else {
            return Ok(None);
        };
        let Some(unit) = units::lookup(name) else { return Ok(None) };
        parts.push((number.value()?, number.is_plain_whole(), unit));
        rest = match tail {
            [] => break,
            [joint, more @ ..] if is_and(joint) => more,
            more => more,
        };
        if parts.len() > MAX_PARTS {
            return Ok(None);
        }
    }
    let fits = parts.windows(2).all(|pair| {
        let [(_, is_whole, large), (n, _, small)] = pair else { return false };
        *is_whole && large.is_same_kind(small) && n * &small.scale < large.scale
    });
    let Some((_, _, unit)) = parts.last().filter(|_| parts.len() > 1 && fits).cloned() else {
        return Ok(None);
    };
    let value = parts.iter().fold(RBig::ZERO, |sum, (n, _, part)| sum + n * &part.scale) / &unit.scale;
    let is_decimal = parts.iter().any(|(_, is_whole, _)| !is_whole);
    Ok(Some(Quantity { unit: Some(unit), ..Quantity::bare(Expr::Num { value, is_decimal }) }))
}

/// Where the unit starts: at the first word outside brackets that only unit-like tokens follow.
fn unit_start(tokens: &[Token]) -> usize {
    let mut n_open = 0usize;
    for (i, token) in tokens.iter().enumerate() {
        match &token.tok {
            Tok::Open(_) | Tok::Begin => n_open += 1,
            Tok::Close(_) | Tok::End => n_open = n_open.saturating_sub(1),
            Tok::Word(word) if n_open == 0 && i > 0 => {
                let starts = token.is_text
                    || units::is_word(word)
                    || word.len() > 4
                    || !word.is_ascii()
                    || is_short_noun(tokens, i);
                let is_subscript = matches!(tokens[i - 1].tok, Tok::Under);
                if starts && !is_subscript && tokens[i..].iter().all(is_unit_token) {
                    return i;
                }
            }
            _ => {}
        }
    }
    tokens.len()
}

/// Whether a run of three or four letters is apart after a number and has a letter that is seldom a variable:
/// `5 dogs`.
fn is_short_noun(tokens: &[Token], at: usize) -> bool {
    let Tok::Word(run) = &tokens[at].tok else { return false };
    run.len() >= 3
        && tokens[at].is_spaced
        && matches!(tokens[at - 1].tok, Tok::Num(_))
        && run.bytes().all(|b| b.is_ascii_lowercase())
        && run.contains(['e', 'f', 'g', 'i', 'j', 'l', 'o'])
}

fn is_unit_token(token: &Token) -> bool {
    match &token.tok {
        Tok::Word(_) | Tok::Letter(_) | Tok::Caret | Tok::Num(_) | Tok::Minus | Tok::Slash | Tok::Times => {
            true
        }
        Tok::Open(bracket) | Tok::Close(bracket) => matches!(bracket, Bracket::Brace | Bracket::Round),
        Tok::Other(sign) => sign == ".",
        _ => false,
    }
}

/// The factor of the scale words in front of a unit, such as `million` and `hundred thousand`, and the tokens after them.
fn scale_words(mut tail: &[Token]) -> (Option<RBig>, &[Token]) {
    let mut product: Option<RBig> = None;
    while let [Token { tok: Tok::Word(word), .. }, rest @ ..] = tail
        && let Some(scale) = units::scale(word)
    {
        product = Some(product.map_or(scale.clone(), |product| product * scale));
        tail = rest;
    }
    (product, tail)
}

fn unit(tail: &[Token]) -> Bounded<Option<Unit>> {
    let mut unit = Unit::one();
    let mut prefix_power = 1;
    let mut direction = 1;
    let mut pos = 0;
    while let Some(token) = tail.get(pos) {
        pos += 1;
        let name = match &token.tok {
            Tok::Slash => {
                direction = -1;
                continue;
            }
            Tok::Word(word) | Tok::Letter(word) => word,
            Tok::Num(_) => return unreadable("a number behind a unit"),
            _ => continue,
        };
        match name.to_lowercase().as_str() {
            "per" | "an" if name != "AN" => {
                direction = -1;
                continue;
            }
            word @ ("squared" | "cubed") if pos > 1 && !unit.shown.is_empty() => {
                let last = unit.clone();
                unit = unit.times(&last, if word == "squared" { 1 } else { 2 });
                continue;
            }
            "square" | "sq" => {
                prefix_power = 2;
                continue;
            }
            "cubic" | "cu" => {
                prefix_power = 3;
                continue;
            }
            "of" | "the" | "total" | "in" if tail.len() > 1 && name != "in" => continue,
            word if units::is_plain_adjective(word) && pos < tail.len() => continue,
            word if units::changes_value(word) => return unreadable("a word that changes the value"),
            // `5 deaths per thousand` names a rate; `5 cm thousand` and `5 per thousand` are other numbers.
            word if units::scale(word).is_some() && (direction == 1 || unit.shown.is_empty()) => {
                return unreadable("a factor behind the unit");
            }
            _ => {}
        }
        let part = match units::lookup(name) {
            Some(part) => part,
            // `5 \text{i}` is no number of things called i.
            None if name.chars().count() == 1 && !units::is_chinese(name) => {
                return unreadable("a letter behind a number");
            }
            None => Unit::word(name),
        };
        let (power, next) = unit_power(tail, pos)?;
        pos = next;
        unit = unit.times(&part, direction * prefix_power * power);
        prefix_power = 1;
    }
    if prefix_power != 1 {
        return unreadable("a power without a unit");
    }
    Ok((!unit.shown.is_empty()).then_some(unit))
}

/// The power after a unit: `^2`, `^{2}`, `^{-1}`.
fn unit_power(tail: &[Token], mut pos: usize) -> Bounded<(i32, usize)> {
    if tail.get(pos).map(|token| &token.tok) != Some(&Tok::Caret) {
        return Ok((1, pos));
    }
    pos += 1;
    let mut sign = 1;
    while let Some(token) = tail.get(pos) {
        pos += 1;
        match &token.tok {
            Tok::Open(_) => {}
            Tok::Minus => sign = -1,
            Tok::Num(numeral) => {
                let power: i32 = numeral.whole.parse().unwrap_or(0);
                if !(1..=6).contains(&power) || !numeral.is_plain_whole() {
                    return unreadable("a strange power of a unit");
                }
                return Ok((sign * power, pos));
            }
            _ => break,
        }
    }
    unreadable("a unit's power is missing")
}

/// `5 m` and `10 m/s`: a value, a space, and letters that are symbols of units.
fn letter_unit(tokens: &[Token], budget: &mut Budget) -> Option<(Box<Expr>, Unit)> {
    let is_symbol = |token: &Token| matches!(&token.tok, Tok::Letter(name) if matches!(name.as_str(), "m" | "g" | "s" | "h" | "L" | "N" | "J" | "W" | "V" | "K"));
    // `12 ways`: a run of letters apart after a number.
    if let [value @ .., Token { tok: Tok::Num(_), .. }, Token { tok: Tok::Word(run), is_spaced: true, .. }] =
        tokens
        && run.len() >= 3
    {
        return measure(&tokens[..=value.len()], &tokens[value.len() + 1..], budget);
    }
    let start = tokens.iter().position(|token| token.is_spaced && is_symbol(token))?;
    let (value, tail) = tokens.split_at(start);
    if !tail
        .iter()
        .all(|token| is_symbol(token) || matches!(token.tok, Tok::Slash | Tok::Caret | Tok::Num(_)))
    {
        return None;
    }
    measure(value, tail, budget)
}

/// A constant and its unit.
fn measure(value: &[Token], tail: &[Token], budget: &mut Budget) -> Option<(Box<Expr>, Unit)> {
    let expr = parse::expression(value, budget).ok()?;
    if expr.any(|node| matches!(node, Expr::Var(_))) {
        return None;
    }
    Some((Box::new(expr), unit(tail).ok()??))
}
