//! Numbers as printed: digits, separators, a fraction, a repeating block, a power of ten.

use crate::Rounding;
use crate::budget::{Bounded, Stop};
use dashu_int::{IBig, UBig};
use dashu_ratio::RBig;

/// Most digits of one number that takes part in arithmetic.
const MAX_DIGITS: usize = 19_000;
/// Largest power of ten a number may carry (`1e400` is read, `1e999999999` is over budget).
const MAX_POWER_OF_TEN: i64 = 9_000;

#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Numeral {
    /// Digits before the point, separators taken out.
    pub(crate) whole: String,
    /// Digits after the point, if there is a point.
    pub(crate) fraction: Option<String>,
    /// The block of digits that repeats after `fraction`.
    pub(crate) repeating: Option<String>,
    pub(crate) power_of_ten: i64,
    /// Plain commas group the thousands; such commas could also separate a list.
    pub(crate) has_commas: bool,
    /// The base of a number whose digits include letters.
    pub(crate) base: Option<u32>,
    /// How far the number may be rounded.
    pub(crate) rounding: Rounding,
}

impl Numeral {
    pub(crate) fn is_plain_whole(&self) -> bool {
        self.fraction.is_none() && self.power_of_ten == 0 && self.base.is_none()
    }

    /// Whether the number is printed with a point or a power of ten, and so may be rounded.
    pub(crate) fn is_decimal(&self) -> bool {
        (self.fraction.as_ref().is_some_and(|digits| !digits.is_empty()) && self.repeating.is_none())
            || self.power_of_ten != 0
    }

    /// Digits from the first one that is not zero.
    pub(crate) fn n_significant(&self) -> usize {
        let digits = self.whole.bytes().chain(self.fraction.iter().flat_map(|digits| digits.bytes()));
        digits.skip_while(|digit| *digit == b'0').count()
    }

    /// The number in one plain notation that keeps every digit.
    pub(crate) fn spelled(&self) -> String {
        let mut text = self.whole.clone();
        for (opening, part, closing) in [(".", &self.fraction, ""), ("(", &self.repeating, ")")] {
            if let Some(digits) = part {
                text = format!("{text}{opening}{digits}{closing}");
            }
        }
        if self.power_of_ten != 0 {
            text = format!("{text}e{}", self.power_of_ten);
        }
        text
    }

    pub(crate) fn value(&self) -> Bounded<RBig> {
        let fraction = self.fraction.as_deref().unwrap_or("");
        let repeating = self.repeating.as_deref().unwrap_or("");
        if self.whole.len() + fraction.len() + repeating.len() > MAX_DIGITS {
            return Err(Stop::OverBudget("a number of more than 19,000 digits"));
        }
        if self.power_of_ten.abs() > MAX_POWER_OF_TEN {
            return Err(Stop::OverBudget("a power of ten beyond 9,000"));
        }
        if let Some(base) = self.base {
            return based(&self.whole, base);
        }
        let mut value = RBig::from_parts(digits(&[&self.whole, fraction])?, ten_to(fraction.len()));
        if !repeating.is_empty() {
            let nines = ten_to(repeating.len()) - UBig::ONE;
            value += RBig::from_parts(digits(&[repeating])?, nines * ten_to(fraction.len()));
        }
        let scale = RBig::from(ten_to(self.power_of_ten.unsigned_abs() as usize));
        Ok(match self.power_of_ten {
            0 => value,
            p if p > 0 => value * scale,
            _ => value / scale,
        })
    }

    /// The same digits read in another base.
    pub(crate) fn in_base(&self, base: u32) -> Bounded<RBig> {
        if self.whole.len() > MAX_DIGITS {
            return Err(Stop::OverBudget("a number of more than 19,000 digits"));
        }
        let mut value = based(&self.whole, base)?;
        if let Some(fraction) = self.fraction.as_ref().filter(|f| !f.is_empty()) {
            if fraction.len() > 300 {
                return Err(Stop::OverBudget("a fraction of more than 300 digits in another base"));
            }
            value += based(fraction, base)? / RBig::from(UBig::from(base).pow(fraction.len()));
        }
        Ok(value)
    }
}

fn based(text: &str, base: u32) -> Bounded<RBig> {
    let bad = || Stop::Unreadable(format!("{text} is not a number in base {base}"));
    if !(2..=36).contains(&base) || text.is_empty() {
        return Err(bad());
    }
    UBig::from_str_radix(text, base).map(RBig::from).map_err(|_| bad())
}

fn digits(parts: &[&str]) -> Bounded<IBig> {
    let text: String = parts.concat();
    if text.len() <= 18 {
        return Ok(IBig::from(text.bytes().fold(0u64, |n, digit| n * 10 + u64::from(digit - b'0'))));
    }
    UBig::from_str_radix(&text, 10)
        .map(IBig::from)
        .map_err(|_| Stop::Unreadable(format!("the number {text}")))
}

fn ten_to(power: usize) -> UBig {
    UBig::from(10u8).pow(power)
}

/// Reads a number at the start of `chars[at..]`: `(numeral, next position)`. `commas_group` says whether a plain
/// comma before three digits belongs to the number.
pub(crate) fn scan(chars: &[char], at: usize, commas_group: bool) -> Option<(Numeral, usize)> {
    let mut numeral = Numeral::default();
    let mut pos = take_digits(chars, at, &mut numeral.whole);
    if pos > at && numeral.whole.len() <= 3 && !numeral.whole.starts_with('0') {
        pos = take_groups(chars, pos, commas_group, &mut numeral);
    }
    let has_point =
        chars.get(pos) == Some(&'.') || (chars.get(pos) == Some(&'{') && starts(chars, pos, "{.}"));
    if has_point {
        let after = pos + if chars[pos] == '.' { 1 } else { 3 };
        let mut fraction = String::new();
        let end = take_digits(chars, after, &mut fraction);
        let repeating = take_repeating(chars, end, &fraction);
        // "5." ends a sentence; "5./3" and "-1./3" are numbers.
        let is_sentence_end = end == after && repeating.is_none() && chars.get(end) != Some(&'/');
        if (!is_sentence_end && !numeral.whole.is_empty()) || end > after {
            pos = end;
            numeral.fraction = Some(fraction);
            if let Some((fraction, block, next)) = repeating {
                numeral.fraction = Some(fraction);
                numeral.repeating = Some(block);
                pos = next;
            }
        }
    }
    if pos == at {
        return None;
    }
    if numeral.whole.is_empty() {
        numeral.whole.push('0');
    }
    if let Some((power, next)) = take_exponent(chars, pos) {
        numeral.power_of_ten = power;
        pos = next;
    }
    Some((numeral, pos))
}

fn take_digits(chars: &[char], mut at: usize, into: &mut String) -> usize {
    while let Some(digit) = chars.get(at).filter(|c| c.is_ascii_digit()) {
        into.push(*digit);
        at += 1;
    }
    at
}

fn starts(chars: &[char], at: usize, text: &str) -> bool {
    text.chars().enumerate().all(|(i, c)| chars.get(at + i) == Some(&c))
}

/// Separators that only ever group thousands, longest first.
const FIRM_SEPARATORS: [&str; 12] =
    ["{,}\\!", " {, }", "{, }", ",\\!\\!", ",\\!", "{,}", "\\,", "\\;", "\\ ", "~", "\u{2009}", "\u{202f}"];

fn take_groups(chars: &[char], start: usize, commas_group: bool, numeral: &mut Numeral) -> usize {
    let mut pos = start;
    let mut separator: Option<&str> = None;
    let mut digits = numeral.whole.clone();
    loop {
        let candidates = FIRM_SEPARATORS.iter().copied().chain(commas_group.then_some(",")).chain([" ", "'"]);
        let found = candidates.into_iter().find_map(|sep| {
            let mut after = pos + sep.chars().count();
            let mut group = String::new();
            if !starts(chars, pos, sep) {
                return None;
            }
            if sep.contains("\\!") {
                while chars.get(after) == Some(&' ') {
                    after += 1;
                }
            }
            let end = take_digits(chars, after, &mut group);
            (group.len() == 3).then_some((sep, group, end))
        });
        let Some((sep, group, end)) = found else { break };
        if separator.is_some_and(|old| old != sep && (old == "," || sep == ",")) {
            return start;
        }
        separator = Some(sep);
        digits.push_str(&group);
        pos = end;
    }
    // A comma and digits after the last group make the whole a list and not a number.
    let list_follows = separator == Some(",")
        && chars.get(pos) == Some(&',')
        && chars.get(pos + 1).is_some_and(char::is_ascii_digit);
    if separator.is_none() || list_follows {
        return start;
    }
    numeral.whole = digits;
    numeral.has_commas = separator == Some(",");
    pos
}

/// The digit under a dot, `\dot{3}` or `\dot3`, and the next position.
fn dotted(chars: &[char], at: usize) -> Option<(char, usize)> {
    let after = starts(chars, at, "\\dot").then_some(at + "\\dot".len())?;
    let is_group = chars.get(after) == Some(&'{');
    let at = after + usize::from(is_group);
    let digit = *chars.get(at).filter(|c| c.is_ascii_digit())?;
    let is_closed = !is_group || chars.get(at + 1) == Some(&'}');
    is_closed.then_some((digit, at + 1 + usize::from(is_group)))
}

/// `\overline{3}`, `\bar{3}`, `\dot{3}`, `\dot{1}4285\dot{7}`, `(3)` or `333...` after the fraction's digits: the digits
/// that stay, the block that repeats, the next position.
fn take_repeating(chars: &[char], at: usize, fraction: &str) -> Option<(String, String, usize)> {
    if let Some((first, end)) = dotted(chars, at) {
        let mut block = String::from(first);
        let last_dot = take_digits(chars, end, &mut block);
        return match dotted(chars, last_dot) {
            Some((last, end)) => Some((fraction.to_owned(), block + &last.to_string(), end)),
            None => (block.len() == 1).then(|| (fraction.to_owned(), block, end)),
        };
    }
    for opening in ["\\overline{", "\\bar{", "\\dot{", "("] {
        if !starts(chars, at, opening) {
            continue;
        }
        let mut block = String::new();
        let end = take_digits(chars, at + opening.len(), &mut block);
        let closing = if opening == "(" { ')' } else { '}' };
        if block.is_empty() || chars.get(end) != Some(&closing) {
            return None;
        }
        // 0.5(3) could be a product, so parentheses must end the number.
        if opening == "("
            && !fraction.is_empty()
            && chars[end + 1..].iter().any(|c| !c.is_whitespace() && *c != '$')
        {
            return None;
        }
        return Some((fraction.to_owned(), block, end + 1));
    }
    let dots = ["...", "\\ldots", "\\dots", "\\cdots", "…"].iter().find(|dots| starts(chars, at, dots))?;
    let last = fraction.chars().last()?;
    let run = fraction.chars().rev().take_while(|c| *c == last).count();
    if run >= 3 {
        let kept = fraction[..fraction.len() - run].to_owned();
        return Some((kept, last.to_string(), at + dots.chars().count()));
    }
    let half = fraction.len() / 2;
    let is_doubled = fraction.len().is_multiple_of(2) && half >= 2 && fraction[..half] == fraction[half..];
    is_doubled.then(|| (String::new(), fraction[..half].to_owned(), at + dots.chars().count()))
}

/// `e-19` or `E5` directly after the digits.
fn take_exponent(chars: &[char], at: usize) -> Option<(i64, usize)> {
    if !matches!(chars.get(at), Some('e' | 'E')) {
        return None;
    }
    let mut pos = at + 1;
    let is_negative = matches!(chars.get(pos), Some('-' | '−'));
    if is_negative || chars.get(pos) == Some(&'+') {
        pos += 1;
    }
    let mut digits = String::new();
    let end = take_digits(chars, pos, &mut digits);
    let is_decimal = chars.get(end) == Some(&'.') && chars.get(end + 1).is_some_and(char::is_ascii_digit);
    if digits.is_empty() || is_decimal || chars.get(end).is_some_and(|c| c.is_alphabetic()) {
        return None;
    }
    let power = digits.parse::<i64>().unwrap_or(i64::MAX / 2);
    Some((if is_negative { -power } else { power }, end))
}
