//! What an answer is: a number, a tuple, a set, an interval, a matrix, an equation, a word.

mod chain;
mod choice;
pub(crate) mod clean;
mod collection;
mod lines;
mod matrix;
mod parts;
mod prose;
pub(crate) mod quantity;
mod read;
pub(crate) mod region;
mod relation;

pub(crate) use collection::as_region;
pub(crate) use relation::{PARAMETER, real_region};

use crate::budget::{Bounded, Budget, Stop};
use crate::expr::Expr;
use crate::lex::token::{Bracket, Rel};
use crate::lex::{Notation, tokens};
use crate::{text, units};
use quantity::Quantity;
use region::Region;

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Answer {
    Scalar(Quantity),
    /// Ordered elements in brackets; two elements may also be the ends of an interval.
    Tuple {
        items: Vec<Answer>,
        open: Bracket,
        close: Bracket,
    },
    /// Elements separated by commas, without brackets.
    List(Vec<Answer>),
    Set(Vec<Answer>),
    Region(Region),
    Matrix(Vec<Vec<Expr>>),
    /// Values with the condition under which each holds.
    Cases(Vec<(Answer, Answer)>),
    /// `x = 5`, `f(x) = 3x - 2`: a name and its value.
    Named {
        name: String,
        left: Option<Expr>,
        value: Box<Answer>,
    },
    Equation(Expr, Quantity),
    Inequality(Expr, Rel, Expr),
    Ratio(Vec<Expr>),
    /// A multiple-choice letter and the value written after the letter.
    Choice {
        letter: char,
        rest: Option<Box<Answer>>,
    },
    /// Three letters alone: a word, an order of letters, or a product of variables.
    Run(String),
    /// The empty set, "no solution".
    Empty,
    /// Words. `broken` says why a text that looks like mathematics could not be read.
    Text {
        words: String,
        broken: Option<String>,
    },
}

/// Reads `text`. Only a limit makes reading fail; a text that is no mathematics is an [`Answer::Text`].
pub(crate) fn read(text: &str, notation: Notation, budget: &mut Budget) -> Bounded<Answer> {
    let cleaned = clean::cleaned(text);
    if let Some(answer) = phrase(cleaned) {
        return Ok(answer);
    }
    // Prose is compared by its words. A formula that cannot be read is compared sign by sign.
    let words = |broken: Option<String>| Answer::Text {
        words: if broken.is_some() { text::unspaced(cleaned) } else { text::plain(cleaned) },
        broken,
    };
    if let Some(parts) = numbered_parts(cleaned) {
        let items: Vec<Answer> =
            parts.into_iter().map(|part| read(part, notation, budget)).collect::<Bounded<_>>()?;
        return Ok(Answer::List(items));
    }
    let ungrouped = ungrouped(cleaned);
    let cleaned = ungrouped.as_deref().unwrap_or(cleaned);
    let tokens = match tokens(cleaned, notation) {
        Ok(tokens) => tokens,
        Err(Stop::Unreadable(why)) => return Ok(words(Some(why))),
        Err(stop) => return Err(stop),
    };
    if let Some(run) = prose::letter_run(&tokens) {
        return Ok(Answer::Run(run));
    }
    if let Some(measure) = quantity::compound(&tokens, budget)? {
        return Ok(Answer::Scalar(measure));
    }
    if prose::is_prose(&tokens) && choice::choice(&tokens).is_none() {
        return Ok(words(None));
    }
    match read::answer(&tokens, 0, budget) {
        Ok(answer) => Ok(answer),
        Err(Stop::OverBudget(why)) => Err(Stop::OverBudget(why)),
        Err(Stop::Unreadable(why)) => Ok(words((!prose::is_wordy(&tokens)).then_some(why))),
        Err(Stop::Undefined(why)) => Ok(words(Some(why.into()))),
    }
}

/// The parts of an answer that numbers them: 5 and 7 of `(1) 5; (2) 7`. `None` for other texts.
fn numbered_parts(text: &str) -> Option<Vec<&str>> {
    const MAX_PARTS: usize = 9;
    let mut rest = text.strip_prefix("(1)")?;
    let mut parts = Vec::new();
    for n in 2..=MAX_PARTS + 1 {
        let mark = format!("({n})");
        let Some(at) = rest.find(&mark) else { break };
        // `(1)+f(2)` is no list: a part begins after a separator or a space.
        if !rest[..at].ends_with([' ', ',', ';', '\n', '；', '，', '$']) {
            return None;
        }
        parts.push(&rest[..at]);
        rest = &rest[at + mark.len()..];
    }
    parts.push(rest);
    let part = |part: &&'_ str| part.trim_matches([' ', ',', ';', '\n', '；', '，', '\\']).is_empty();
    if parts.len() < 2 || parts.iter().any(part) {
        return None;
    }
    Some(parts.into_iter().map(|part| part.trim_matches([' ', ',', ';', '\n', '；', '，', '\\'])).collect())
}

/// A whole number whose thousands are grouped by underscores, without them: `1_000`. `None` for other texts.
fn ungrouped(text: &str) -> Option<String> {
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    let mut groups = digits.split('_');
    let is_number = |group: &str| group.bytes().all(|b| b.is_ascii_digit());
    let starts = groups.next().is_some_and(|first| (1..=3).contains(&first.len()) && is_number(first));
    let is_grouped =
        starts && digits.contains('_') && groups.all(|group| group.len() == 3 && is_number(group));
    is_grouped.then(|| text.replace('_', ""))
}

/// Phrases with a mathematical meaning.
fn phrase(text: &str) -> Option<Answer> {
    if text.len() > 80 {
        return None;
    }
    let has_wrapped_colon = text.contains("\\!") || text.contains("{:}");
    let words = if has_wrapped_colon {
        text::plain(&text.replace("\\!", "").replace("{:}", ":"))
    } else {
        text::plain(text)
    };
    if text::is_time(&words) {
        return Some(Answer::Text { words, broken: None });
    }
    if let Some(words) = text::date(&words) {
        return Some(Answer::Text { words, broken: None });
    }
    if let Some(words) = text::named_date(&words) {
        return Some(Answer::Text { words, broken: None });
    }
    if let Some(value) = text::chinese_fraction(&words) {
        return Some(Answer::Scalar(Quantity::bare(Expr::Num { value, is_decimal: false })));
    }
    if let Some(value) = text::spelled_number(&words) {
        return Some(Answer::Scalar(Quantity::bare(Expr::int(value))));
    }
    if let Some(value) = units::spelled_fraction(&words) {
        return Some(Answer::Scalar(Quantity::bare(Expr::Num { value, is_decimal: false })));
    }
    match words.as_str() {
        "no solution"
        | "no solutions"
        | "none"
        | "no real solution"
        | "no real solutions"
        | "empty set"
        | "emptyset"
        | "there is no solution"
        | "there are no solutions"
        | "no such number exists"
        | "no answer exists"
        | "no roots"
        | "no real roots"
        | "no values"
        | "no value"
        | "null set"
        | "no integer solutions"
        | "no such integers exist"
        | "无解"
        | "方程无解"
        | "无实数解"
        | "没有解"
        | "空集" => Some(Answer::Empty),
        "all real numbers"
        | "all reals"
        | "any real number"
        | "real numbers"
        | "reals"
        | "every real number"
        | "all real x"
        | "set of real numbers" => Some(Answer::Region(Region::everything())),
        "all integers" | "any integer" | "every integer" | "set of integers" | "set of all integers" => {
            Some(Answer::Text { words: "integers".into(), broken: None })
        }
        "infinity" => Some(Answer::Scalar(Quantity::bare(Expr::Infinity))),
        "negative infinity" | "minus infinity" => {
            Some(Answer::Scalar(Quantity::bare(Expr::Neg(Box::new(Expr::Infinity)))))
        }
        "undefined" | "does not exist" | "dne" | "not defined" | "is undefined" => {
            Some(Answer::Text { words: "undefined".into(), broken: None })
        }
        _ => None,
    }
}
