//! The math grader as a verifier.

use super::judged::Judged;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stapo_core::{Problem, Verdict};
use stapo_verify::{Fallback, Form, Mode, Order, Reference, Rounding, Rules, grade};

/// The grader's settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RuleSpec {
    /// The rule by which answers are compared.
    pub mode: Mode,
    /// Which of several marked answers counts.
    pub order: Order,
    /// What counts as the answer if a response marks none.
    pub fallback: Fallback,
    // The next two are absent where the config does not name them, so that a config is written back as it was.
    /// How far a printed decimal may be from the value it stands for, in mode `math`; `six-decimals` by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rounding: Option<Rounding>,
    /// In which form a right answer may be written, in mode `math`; `any` by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub form: Option<Form>,
}

impl From<RuleSpec> for Rules {
    fn from(spec: RuleSpec) -> Self {
        let RuleSpec { mode, order, fallback, rounding, form } = spec;
        let (rounding, form) = (rounding.unwrap_or_default(), form.unwrap_or_default());
        Self { mode, order, fallback, rounding, form }
    }
}

pub(crate) fn by_rule(problem: &Problem, response: &str, rules: Rules) -> Judged {
    let reference = Reference { answer: &problem.reference, problem: Some(&problem.prompt) };
    let graded = grade(response, reference, rules);
    Judged {
        canonical: graded.answer,
        ..Judged::new(verdict(graded.verdict), graded.extracted, graded.reason)
    }
}

/// The grader's verdict, as records name verdicts.
fn verdict(found: stapo_verify::Verdict) -> Verdict {
    match found {
        stapo_verify::Verdict::Right => Verdict::Right,
        stapo_verify::Verdict::Wrong => Verdict::Wrong,
        stapo_verify::Verdict::NoAnswer => Verdict::NoAnswer,
        stapo_verify::Verdict::Unparsable => Verdict::Unparsable,
        stapo_verify::Verdict::OverBudget => Verdict::OverBudget,
    }
}
