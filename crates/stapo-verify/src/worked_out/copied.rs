//! Whether an answer is a formula of the question.

use crate::answer::clean::cleaned;
use crate::text::unspaced;

/// Longest answer that is looked for in the question.
const MAX_COPY_BYTES: usize = 1 << 12;

/// Whether the answer is a formula of the question, white space and formatting left out, and the reference is not that
/// very text.
pub(crate) fn is_copied(answer: &str, reference: &str, problem: &str) -> bool {
    let answer = cleaned(answer);
    if answer.len() > MAX_COPY_BYTES {
        return false;
    }
    let wanted = unspaced(answer);
    wanted != unspaced(cleaned(reference))
        && formulas(problem).any(|formula| unspaced(cleaned(formula)) == wanted)
}

/// What stands between the signs that set off a formula.
fn formulas(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (start, close) = [("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$")]
            .into_iter()
            .filter_map(|(open, close)| rest.find(open).map(|at| (at, at + open.len(), close)))
            .min_by_key(|(at, _, _)| *at)
            .map(|(_, start, close)| (start, close))?;
        let inside = &rest[start..];
        let end = inside.find(close)?;
        rest = &inside[end + close.len()..];
        Some(&inside[..end])
    })
}
