//! What only the text of an answer shows, because reading it carries the operation out or changes its base.

use super::Written;
use super::operations::Operation;
use crate::answer::Answer;
use crate::answer::region::Interval;
use crate::budget::{Bounded, Budget};
use crate::equal::region::order;
use crate::parse::base_named;
use std::cmp::Ordering;
use std::collections::BTreeSet;

/// The operations that reading an answer carries out: integrals, intersections, unions of points or of intervals that
/// meet, and arithmetic of matrices.
pub(super) fn operations_of_text(written: Written, budget: &mut Budget) -> Bounded<BTreeSet<Operation>> {
    let Written { answer, text } = written;
    let mut found = BTreeSet::new();
    let mut add = |operation, is_left: bool| {
        if is_left {
            found.insert(operation);
        }
    };
    let has = |marks: &[&str]| marks.iter().any(|mark| text.contains(mark));
    add(Operation::Integral, has(&["\\int", "∫"]));
    add(Operation::Series, has(&["\\sum", "∑", "\\prod", "∏"]));
    add(Operation::Intersection, has(&["\\cap", "∩"]));
    if has(&["\\cup", "∪"])
        && let Answer::Region(region) = answer
    {
        add(Operation::Union, can_be_joined(&region.pieces, budget)?);
    }
    if has(&["matrix}", "\\det"]) {
        add(Operation::Matrix, !is_plain_matrix(text));
    }
    Ok(found)
}

/// Whether a union of intervals can be written with fewer: all are points, or two of them meet.
fn can_be_joined(pieces: &[Interval], budget: &mut Budget) -> Bounded<bool> {
    if pieces.iter().all(|piece| piece.low == piece.high) {
        return Ok(true);
    }
    for (i, a) in pieces.iter().enumerate() {
        for b in &pieces[..i] {
            let is_first = order(&a.low.at, &b.low.at, budget)? == Some(Ordering::Less);
            let (first, second) = if is_first { (a, b) } else { (b, a) };
            let meets = match order(&second.low.at, &first.high.at, budget)? {
                Some(Ordering::Less) => true,
                Some(Ordering::Equal) => first.high.is_closed || second.low.is_closed,
                _ => false,
            };
            if meets {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Whether a text is one matrix and nothing else, or one behind a name: `A=\begin{pmatrix}1\\2\end{pmatrix}`.
fn is_plain_matrix(text: &str) -> bool {
    let text = crate::answer::clean::cleaned(text.rsplit('=').next().unwrap_or(text));
    let text = text
        .trim_start_matches(['{', ' '])
        .trim_start_matches("\\left")
        .trim_start_matches(['(', '['])
        .trim();
    text.starts_with("\\begin{")
        && text.matches("\\begin{").count() == 1
        && {
            let behind = text.rsplit("matrix}").next().unwrap_or("").trim();
            behind.trim_start_matches("\\right").trim_matches([')', ']', ' ', '$', '}']).is_empty()
        }
        && !text.starts_with("\\begin{vmatrix}")
}

/// Whether the last side of the answer is written in the base of the reference: `555_{10}` is not for `4210_5`.
pub(crate) fn is_in_same_base(answer: &str, reference: &str) -> bool {
    let last_side = answer.rsplit('=').next().unwrap_or(answer);
    bases(last_side) == bases(reference)
}

/// The bases other than ten that are after digits, each once: of `245_8`, `(1011)_2`, `1011_{\text{two}}`.
fn bases(text: &str) -> BTreeSet<u32> {
    let is_behind_digits = |at: usize| {
        let before = text[..at].trim_end();
        let inside =
            before.strip_suffix(')').map_or(before, |rest| rest.strip_suffix("\\right").unwrap_or(rest));
        inside.ends_with(|c: char| c.is_ascii_digit())
    };
    let base = |at: usize| {
        let rest = text[at + 1..].trim_start_matches(['{', ' ']);
        let rest = ["\\text", "\\mathrm", "\\textrm"]
            .iter()
            .find_map(|name| rest.strip_prefix(name))
            .map_or(rest, |rest| rest.trim_start_matches(['{', ' ']));
        let word = rest.find(|c: char| !c.is_ascii_alphanumeric()).map_or(rest, |end| &rest[..end]);
        if let Some(base) = base_named(word) {
            return Some(base).filter(|base| *base != 10);
        }
        let digits = word.find(|c: char| !c.is_ascii_digit()).map_or(word, |end| &word[..end]);
        // `1_000` and `12_345` are grouped thousands.
        digits.parse().ok().filter(|base| digits.len() < 3 && *base != 10)
    };
    let marks = text.match_indices('_').map(|(at, _)| at);
    marks.filter(|at| is_behind_digits(*at)).filter_map(base).collect()
}
