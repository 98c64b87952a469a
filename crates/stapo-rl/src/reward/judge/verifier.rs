//! A judge as a verifier, in addition to the grader's rule.

use super::{AskJudge, JudgeAnswer, JudgeQuestion, JudgeSpec};
use crate::reward::judged::Judged;
use crate::reward::rule::by_rule;
use crate::reward::verdict::lines::RowOf;
use crate::tasks::error::TaskError;
use rayon::prelude::*;
use stapo_core::{JudgeOpinion, Problem};

/// The verifier of a judge: which responses it is asked about, and how its verdicts join those of the rule.
pub(crate) struct JudgeVerifier {
    spec: JudgeSpec,
    /// The model; `None` until it is loaded.
    judge: Option<Box<dyn AskJudge>>,
}

impl JudgeVerifier {
    pub fn open(spec: &JudgeSpec) -> Result<Self, TaskError> {
        spec.check()?;
        Ok(Self { spec: spec.clone(), judge: None })
    }

    pub fn spec(&self) -> &JudgeSpec {
        &self.spec
    }

    pub fn is_loaded(&self) -> bool {
        self.judge.is_some()
    }

    pub fn set(&mut self, judge: Box<dyn AskJudge>) {
        self.judge = Some(judge);
    }

    pub fn judge(&self, samples: &[(&Problem, &str)], row_of: &RowOf) -> Result<Vec<Judged>, TaskError> {
        let Some(judge) = &self.judge else {
            let problem = format!("the judge {} was not loaded, so it can judge nothing", self.spec.model);
            let remedy = "stapo train, eval and judge-test load judges; other commands need a rule";
            return Err(TaskError::setting("verifier", problem, remedy));
        };
        let rules = self.spec.rule.into();
        let by_rule: Vec<Judged> =
            samples.par_iter().map(|&(problem, text)| by_rule(problem, text, rules)).collect();
        let is_asked = |judged: &Judged| self.spec.decides.decides(judged.verdict);
        let questions: Vec<JudgeQuestion> = samples
            .iter()
            .zip(&by_rule)
            .filter(|(_, judged)| is_asked(judged))
            .map(|(&(problem, response), _)| JudgeQuestion { problem, response, row: row_of(&problem.id) })
            .collect();
        let mut answers = judge.ask(&questions)?.into_iter();
        let judged = by_rule.into_iter().map(|by_rule| {
            let answer = if is_asked(&by_rule) { answers.next() } else { None };
            joined(by_rule, answer)
        });
        Ok(judged.collect())
    }
}

/// The verdict of the judge where it was asked, and else that of the rule; with both in the opinion.
fn joined(by_rule: Judged, answer: Option<JudgeAnswer>) -> Judged {
    let rule = by_rule.verdict;
    let Some(JudgeAnswer { verdict, margin, text, reason }) = answer else {
        let opinion = JudgeOpinion::of_rule(rule);
        return Judged { judge: Some(Box::new(opinion)), ..by_rule };
    };
    let opinion = JudgeOpinion { verdict: Some(verdict), margin, text, ..JudgeOpinion::of_rule(rule) };
    Judged { verdict, reason, judge: Some(Box::new(opinion)), ..by_rule }
}
