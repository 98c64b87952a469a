//! What the question says about the form of its answer: its formulas are no answers, and it may ask for factors or for a sum.

use crate::answer::Answer;
use crate::answer::clean::cleaned;
use crate::expr::Expr;
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

/// Whether the answer is factored or expanded as the question asks, where the reference is. Without such a question both are
/// fine.
pub(crate) fn is_as_asked(answer: &Answer, reference: &Answer, problem: &str) -> bool {
    let (Some(answer), Some(reference)) = (is_factored(answer), is_factored(reference)) else { return true };
    let says = |words: &[&str]| words.iter().any(|word| problem.contains(word));
    let asks_for_factors = says(&["Factor ", "factor ", "Factor:", "actorize", "actorise", "因式分解"]);
    let asks_for_sum = says(&["Expand", "expand ", "ultiply out", "展开"]);
    answer == reference || !((asks_for_factors && reference) || (asks_for_sum && !reference))
}

/// Whether a value is a product with a sum among its factors; `None` for other answers.
fn is_factored(answer: &Answer) -> Option<bool> {
    fn has_sum(expr: &Expr) -> bool {
        match expr {
            Expr::Mul(factors) => factors.iter().any(has_sum),
            Expr::Neg(x) => has_sum(x),
            Expr::Pow(base, _) => has_sum(base),
            other => matches!(other, Expr::Add(_)),
        }
    }
    match answer {
        Answer::Scalar(value) => Some(!matches!(value.expr, Expr::Add(_)) && has_sum(&value.expr)),
        Answer::Named { value, .. } => is_factored(value),
        _ => None,
    }
}

/// What is between the signs that set off a formula.
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
