//! The results of an evaluation, from its records.

use super::agreement::Agreement;
use crate::reward::left_to_grader;
use serde::Serialize;
use stapo_core::record::EvalRecord;
use stapo_core::stats::{
    Estimate, QuestionCount, QuestionVotes, StatsError, avg_at_k, maj_at_k, mean, mean_estimate, pass_at_k,
};
use stapo_core::{ProgramEnd, Verdict};
use stapo_verify::Rules;
use std::collections::BTreeMap;

/// The results of one benchmark under one decoding.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EvalRow {
    pub benchmark: String,
    pub decoding: String,
    pub n_questions: usize,
    /// Samples per question; the lowest number where questions differ.
    pub n_samples: usize,
    /// avg@k: the mean share of right samples, with an interval clustered by question.
    pub avg: Estimate,
    /// (k, pass@k) for the powers of two up to `n_samples`.
    pub pass: Vec<(usize, Estimate)>,
    /// maj@k over all samples of a question; absent for programs, of which no two that are right need be equal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub maj: Option<Estimate>,
    /// How many programs ended in which way; absent if answers are not programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub programs: Option<BTreeMap<ProgramEnd, usize>>,
    pub truncated_share: f64,
    pub no_answer_share: f64,
    /// Share of responses with the verdict unparsable or over budget; a program that went over a limit has been judged.
    pub unjudged_share: f64,
    /// Right samples that are right only because the grader does the calculation which they leave to it; absent where
    /// there are none.
    #[serde(skip_serializing_if = "is_zero")]
    pub n_left_to_grader: usize,
    pub response_tokens_mean: f64,
    /// Absent for an evaluation with one verifier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agreement: Option<Agreement>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(n: &usize) -> bool {
    *n == 0
}

/// One row per decoding and benchmark, in order of first appearance.
pub fn rows(records: &[EvalRecord]) -> Result<Vec<EvalRow>, StatsError> {
    let mut order: Vec<(&str, &str)> = Vec::new();
    let mut groups: BTreeMap<(&str, &str), Vec<&EvalRecord>> = BTreeMap::new();
    for record in records {
        let key = (record.decoding.as_str(), record.benchmark.as_str());
        groups
            .entry(key)
            .or_insert_with(|| {
                order.push(key);
                Vec::new()
            })
            .push(record);
    }
    order.iter().map(|key| row(&groups[key])).collect()
}

/// Samples by question, sorted by question id, so that results do not depend on the order of the records.
pub fn by_question<'a>(records: &[&'a EvalRecord]) -> BTreeMap<&'a str, Vec<&'a EvalRecord>> {
    let mut questions: BTreeMap<&str, Vec<&EvalRecord>> = BTreeMap::new();
    for &record in records {
        questions.entry(&record.problem_id).or_default().push(record);
    }
    questions
}

fn row(records: &[&EvalRecord]) -> Result<EvalRow, StatsError> {
    let questions = by_question(records);
    let is_right = |record: &&EvalRecord| record.verdict == Verdict::Right;
    let counts: Vec<QuestionCount> = questions
        .values()
        .map(|samples| {
            QuestionCount::new(samples.len(), samples.iter().copied().filter(|r| is_right(r)).count())
        })
        .collect::<Result<_, _>>()?;
    let programs = program_ends(records);
    let votes: Vec<QuestionVotes> = questions
        .values()
        .map(|samples| {
            QuestionVotes::from_samples(samples.iter().map(|r| (r.answer.as_deref(), is_right(r))))
        })
        .collect::<Result<_, _>>()?;
    let n_samples = counts.iter().map(QuestionCount::n_samples).min().unwrap_or(0);
    let ks = std::iter::successors(Some(1), |k| Some(2 * k)).take_while(|k| *k <= n_samples);
    let share = |is: &dyn Fn(&EvalRecord) -> bool| {
        records.iter().filter(|record| is(record)).count() as f64 / records.len() as f64
    };
    let lengths: Vec<f64> = records.iter().map(|record| record.n_tokens as f64).collect();
    Ok(EvalRow {
        benchmark: records[0].benchmark.clone(),
        decoding: records[0].decoding.clone(),
        n_questions: counts.len(),
        n_samples,
        avg: avg_at_k(&counts)?,
        pass: ks.map(|k| Ok((k, pass_at_k(&counts, k)?))).collect::<Result<_, StatsError>>()?,
        maj: programs.is_none().then(|| maj_at_k(&votes, n_samples)).transpose()?,
        programs,
        truncated_share: share(&|r| r.is_truncated()),
        no_answer_share: share(&|r| r.verdict == Verdict::NoAnswer),
        unjudged_share: share(&|r| {
            r.program.is_none() && matches!(r.verdict, Verdict::Unparsable | Verdict::OverBudget)
        }),
        n_left_to_grader: records.iter().filter(|r| is_left_to_grader(r)).count(),
        response_tokens_mean: mean(&lengths)?,
        agreement: Agreement::from_records(records.iter().copied()),
    })
}

/// The programs of samples by how they ended; `None` if answers are not programs.
fn program_ends(records: &[&EvalRecord]) -> Option<BTreeMap<ProgramEnd, usize>> {
    let mut ends = BTreeMap::new();
    for program in records.iter().filter_map(|record| record.program.as_ref()) {
        *ends.entry(program.end).or_default() += 1;
    }
    (!ends.is_empty()).then_some(ends)
}

/// Whether a right sample leaves a calculation to the grader.
fn is_left_to_grader(record: &EvalRecord) -> bool {
    record.verdict == Verdict::Right
        && record.program.is_none()
        && left_to_grader(&record.text, &record.reference, Rules::default()).is_some()
}

/// The mean of several benchmarks' avg@k. The standard error follows from the benchmarks' errors, because questions are
/// independent.
pub fn average(rows: &[&EvalRow]) -> Option<Estimate> {
    let values: Vec<f64> = rows.iter().map(|row| row.avg.value).collect();
    let n = rows.len() as f64;
    let variance: Option<f64> = rows.iter().map(|row| row.avg.standard_error.map(|e| e * e)).sum();
    let base = mean_estimate(&values).ok()?;
    // Where all samples are right or all are wrong the variance is 0, which does not mean certainty: then there is no
    // interval.
    let standard_error = variance.filter(|v| *v > 0.0).map(|v| v.sqrt() / n);
    let interval = standard_error.and_then(|error| {
        // The degrees of freedom are those of the questions. With dozens of questions, t is close to the normal
        // distribution.
        let freedom = rows.iter().map(|row| row.n_questions.saturating_sub(1)).sum::<usize>().max(1) as f64;
        stapo_core::stats::t_interval(base.value, error, freedom, stapo_core::stats::LEVEL).ok()
    });
    Some(Estimate {
        value: base.value,
        standard_error,
        interval: interval.map(|i| i.within(0.0, 1.0)),
        n_questions: rows.iter().map(|row| row.n_questions).sum(),
        n_samples: rows.iter().map(|row| row.avg.n_samples).sum(),
    })
}
