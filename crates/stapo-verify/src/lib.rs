//! A math grader: response text and reference answer in, a [`Verdict`] out.
//!
//! Total: any text gives a verdict; nothing panics, hangs or runs code. Bounded: steps, depth and number sizes have
//! fixed limits. Deterministic: exact and integer arithmetic only, so a verdict is the same on every machine.
//!
//! ```
//! use stapo_verify::{Mode, Verdict, grade};
//! let graded = grade(r"so the area is \boxed{\frac{\sqrt{8}}{2}}.", r"\sqrt2", Mode::Math);
//! assert_eq!(graded.verdict, Verdict::Right);
//! ```

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod answer;
mod approx;
mod budget;
mod equal;
mod exact_form;
mod explain;
mod expr;
mod extract;
mod lex;
mod modes;
mod number;
mod parse;
mod poly;
mod reason;
mod show;
mod text;
mod units;
mod worked_out;

pub use budget::MAX_INPUT_BYTES;
pub use extract::{Fallback, Order, extract};

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// What a grading found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Right,
    Wrong,
    /// The response marks no answer, or the answer is empty.
    NoAnswer,
    /// The answer (or the reference) looks like mathematics but cannot be read.
    Unparsable,
    /// A limit was reached before equality could be decided.
    OverBudget,
}

/// The rule by which answers are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Mathematical equality.
    #[default]
    Math,
    /// The training rule of `JustRL`: the last box lies within the last 100 characters, and the box holds exactly the
    /// text of the reference.
    BoxedExact,
    /// The training rule of DAPO: the last `Answer:` line and the reference are the same text after normalisation.
    Dapo,
    /// The letter of a multiple-choice answer.
    MultipleChoice,
    /// The extracted answer, or the whole response where none is marked, is the reference up to surrounding white
    /// space.
    Exact,
}

impl Mode {
    pub const ALL: [Self; 5] = [Self::Math, Self::BoxedExact, Self::Dapo, Self::MultipleChoice, Self::Exact];

    pub fn name(self) -> &'static str {
        match self {
            Self::Math => "math",
            Self::BoxedExact => "boxed-exact",
            Self::Dapo => "dapo",
            Self::MultipleChoice => "multiple-choice",
            Self::Exact => "exact",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|mode| mode.name() == name)
            .ok_or_else(|| format!("mode {name}: expected one of {}", Self::ALL.map(Self::name).join(", ")))
    }
}

/// How far a printed decimal may be from the value it stands for, in `math`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Rounding {
    /// The values agree to six decimals; a decimal in scientific notation with six digits or more equals what rounds to
    /// it at its own digits.
    #[default]
    SixDecimals,
    /// A decimal of three significant digits or more equals what rounds to it at its own digits: 0.333 is a third.
    ShownDigits,
}

/// In which form a right answer may be written, in `math`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// Any form of the right value: `60 + 180 + 126` is 366, and the grader does the sum.
    #[default]
    Any,
    /// The answer is worked out as far as the reference is: `60 + 180 + 126` is wrong if the reference is 366.
    WorkedOut,
}

/// A mode, how answers are extracted, how decimals are compared and in which form answers may be. Any [`Mode`] converts into its default rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Rules {
    pub mode: Mode,
    /// Used by `math`, `multiple-choice` and `exact`; the training rules `boxed-exact` and `dapo` fix what they
    /// extract.
    pub order: Order,
    pub fallback: Fallback,
    /// Used by `math`.
    pub rounding: Rounding,
    /// Used by `math`.
    pub form: Form,
}

impl From<Mode> for Rules {
    fn from(mode: Mode) -> Self {
        Self { mode, ..Self::default() }
    }
}

/// A verdict with its evidence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Graded {
    pub verdict: Verdict,
    /// The answer as the response writes it.
    pub extracted: Option<String>,
    /// The answer in one plain notation.
    pub answer: Option<String>,
    /// The reference in the same notation.
    pub reference: String,
    /// One line that says why, for people.
    pub reason: String,
}

/// What an answer is compared with. A string converts into a reference without a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reference<'a> {
    /// The right answer.
    pub answer: &'a str,
    /// The text of the question, if it is at hand: under [`Form::WorkedOut`] a formula that is copied from it is wrong,
    /// unless the right answer is that very text.
    pub problem: Option<&'a str>,
}

impl<'a> From<&'a str> for Reference<'a> {
    fn from(answer: &'a str) -> Self {
        Self { answer, problem: None }
    }
}

impl<'a> From<&'a String> for Reference<'a> {
    fn from(answer: &'a String) -> Self {
        Self::from(answer.as_str())
    }
}

/// Finds the answer in `response` and compares the answer with `reference`.
///
/// ```
/// use stapo_verify::{Form, Mode, Reference, Rules, Verdict, grade};
/// assert_eq!(grade("The answer is 1/2.", "0.5", Mode::Math).verdict, Verdict::Right);
///
/// let rules = Rules { form: Form::WorkedOut, ..Rules::default() };
/// let reference = Reference { answer: "240", problem: Some("What is $60+180$?") };
/// assert_eq!(grade(r"\boxed{60 + 180}", reference, rules).verdict, Verdict::Wrong);
/// ```
pub fn grade<'a>(response: &str, reference: impl Into<Reference<'a>>, rules: impl Into<Rules>) -> Graded {
    modes::grade(response, reference.into(), rules.into())
}

/// How `math` reads an answer or a reference: a tree in plain words, one node per line.
///
/// ```
/// assert_eq!(stapo_verify::reading("x=5"), "the name x stands for\n  the number 5");
/// ```
pub fn reading(text: &str) -> String {
    explain::reading(text)
}

/// Compares an answer that is already extracted with `reference`.
///
/// ```
/// use stapo_verify::{Mode, Verdict, grade_answer};
/// let graded = grade_answer("(x-1)(x+1)", "x^2-1", Mode::Math);
/// assert_eq!(graded.verdict, Verdict::Right);
/// assert_eq!(graded.reason, "both are exactly x^2 - 1");
/// ```
pub fn grade_answer<'a>(
    answer: &str,
    reference: impl Into<Reference<'a>>,
    rules: impl Into<Rules>,
) -> Graded {
    modes::grade_answer(answer, reference.into(), rules.into())
}
