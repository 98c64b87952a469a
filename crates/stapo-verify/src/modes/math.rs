//! Mathematical equality.

use super::plain;
use crate::answer::clean::cleaned;
use crate::answer::{Answer, read};
use crate::budget::{Bounded, Budget, Stop};
use crate::equal::is_same;
use crate::lex::{Commas, Notation};
use crate::worked_out::{Written, is_as_asked, is_copied, is_in_same_base, is_worked_out};
use crate::{Form, Graded, Reference, Rounding, Rules, Verdict, reason, show};

pub(super) fn grade(answer: &str, reference: Reference, rules: Rules) -> Graded {
    let Reference { answer: reference, problem } = reference;
    if cleaned(answer) == cleaned(reference) {
        return same_text(answer, reference);
    }
    if let (Some(a), Some(r)) = (digits(answer), digits(reference)) {
        return by_digits(answer, &a, &r);
    }
    let mut budget = Budget::new();
    let decided = decide(answer, reference, rules.rounding, &mut budget).and_then(|decision| {
        formed(decision, answer, Reference { answer: reference, problem }, rules.form, &mut budget)
    });
    match decided {
        Ok(decision) => graded(answer, decision),
        Err(Stop::OverBudget(why)) => {
            plain(Verdict::OverBudget, Some(answer), reference, format!("gave up: {why}"))
        }
        Err(Stop::Unreadable(why)) => plain(Verdict::Unparsable, Some(answer), reference, why),
        Err(Stop::Undefined(why)) => plain(Verdict::Wrong, Some(answer), reference, why.into()),
    }
}

struct Decision {
    is_right: bool,
    /// False if the right value is not in the form that is asked for.
    is_worked_out: bool,
    answer: Answer,
    reference: Answer,
}

fn decide(answer: &str, reference: &str, rounding: Rounding, budget: &mut Budget) -> Bounded<Decision> {
    let notation = Notation { rounding, ..Notation::default() };
    let listing = Notation { commas: Commas::Separate, ..notation };
    let read_reference = read(reference, notation, budget)?;
    let read_answer = read(answer, notation, budget)?;
    let is_right = is_same(&read_answer, &read_reference, budget)?;
    let decision = Decision { is_right, is_worked_out: true, answer: read_answer, reference: read_reference };
    if is_right || !(answer.contains(',') || reference.contains(',')) {
        return Ok(decision);
    }
    // Where the other side is a collection, 1,234 may be a list too.
    if is_collection(&decision.reference) && answer.contains(',') {
        let listed = read(answer, listing, budget)?;
        if is_same(&listed, &decision.reference, budget)? {
            return Ok(Decision { is_right: true, answer: listed, ..decision });
        }
    }
    if is_collection(&decision.answer) && reference.contains(',') {
        let listed = read(reference, listing, budget)?;
        if is_same(&decision.answer, &listed, budget)? {
            return Ok(Decision { is_right: true, reference: listed, ..decision });
        }
    }
    Ok(decision)
}

/// The decision about a right value under the form that is asked for.
fn formed(
    decision: Decision,
    answer: &str,
    reference: Reference,
    form: Form,
    budget: &mut Budget,
) -> Bounded<Decision> {
    if !decision.is_right || form == Form::Any {
        return Ok(decision);
    }
    let Reference { answer: reference, problem } = reference;
    let ours = Written { answer: &decision.answer, text: answer };
    let theirs = Written { answer: &decision.reference, text: reference };
    let is_worked_out = is_in_same_base(answer, reference)
        && problem.is_none_or(|problem| {
            !is_copied(answer, reference, problem)
                && is_as_asked(&decision.answer, &decision.reference, problem)
        })
        && is_worked_out(ours, theirs, budget)?;
    Ok(Decision { is_worked_out, ..decision })
}

fn is_collection(answer: &Answer) -> bool {
    matches!(answer, Answer::List(_) | Answer::Set(_) | Answer::Tuple { .. })
}

fn graded(text: &str, decision: Decision) -> Graded {
    let Decision { is_right, is_worked_out, answer, reference } = decision;
    let mut budget = Budget::for_showing();
    let shown = show::answer(&answer, &mut budget);
    let wanted = show::answer(&reference, &mut budget);
    let (verdict, reason) = match (&answer, &reference, is_right) {
        (_, _, true) if !is_worked_out => {
            (Verdict::Wrong, format!("equals {wanted}, but the answer leaves a calculation to the grader"))
        }
        (_, _, true) => (Verdict::Right, reason::right(&answer, &reference, &shown, &wanted, &mut budget)),
        (_, Answer::Text { broken: Some(why), .. }, _) => {
            (Verdict::Unparsable, format!("the reference cannot be read: {why}"))
        }
        (Answer::Text { broken: Some(why), .. }, _, _) => {
            (Verdict::Unparsable, format!("the answer cannot be read: {why}"))
        }
        _ => (Verdict::Wrong, reason::wrong(&answer, &reference, &shown, &wanted, &mut budget)),
    };
    Graded { verdict, extracted: Some(text.to_owned()), answer: Some(shown), reference: wanted, reason }
}

fn same_text(answer: &str, reference: &str) -> Graded {
    let mut budget = Budget::for_showing();
    let shown = match read(reference, Notation::default(), &mut budget) {
        Ok(read) => show::answer(&read, &mut budget),
        Err(_) => show::shortened(cleaned(reference)),
    };
    Graded {
        verdict: Verdict::Right,
        extracted: Some(answer.to_owned()),
        answer: Some(shown.clone()),
        reference: shown,
        reason: "the answer is written exactly as the reference".into(),
    }
}

/// Sign and digits of a whole number of any length, separators and leading zeros taken out.
fn digits(text: &str) -> Option<(bool, String)> {
    let text = cleaned(text);
    let (is_negative, rest) = match text.strip_prefix(['-', '−']) {
        Some(rest) => (true, rest.trim_start()),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    if rest.is_empty() || !rest.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let significant = rest.trim_start_matches('0');
    Some((is_negative && !significant.is_empty(), significant.to_owned()))
}

fn by_digits(answer: &str, a: &(bool, String), r: &(bool, String)) -> Graded {
    let is_right = a == r;
    let shown = |(is_negative, digits): &(bool, String)| {
        let digits = if digits.is_empty() { "0" } else { digits };
        show::shortened(&format!("{}{digits}", if *is_negative { "-" } else { "" }))
    };
    let ours = shown(a);
    let wanted = shown(r);
    Graded {
        verdict: if is_right { Verdict::Right } else { Verdict::Wrong },
        extracted: Some(answer.to_owned()),
        reason: if is_right { format!("{ours} is the reference") } else { format!("{ours} is not {wanted}") },
        answer: Some(ours),
        reference: wanted,
    }
}
