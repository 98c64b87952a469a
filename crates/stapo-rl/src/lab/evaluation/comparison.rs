//! The comparison of two evaluations of the same questions.

use super::folder::EvalFolder;
use super::table::by_question;
use crate::error::{Error, Result};
use crate::policy::found::is_run;
use serde::Serialize;
use stapo_core::Verdict;
use stapo_core::record::EvalRecord;
use stapo_core::stats::{PairedComparison, Resampling, StatsError, compare_paired, holm};
use std::collections::BTreeMap;
use std::path::Path;

/// The comparison of evaluation B with evaluation A on one benchmark under one decoding.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Compared {
    pub benchmark: String,
    pub decoding: String,
    /// avg@k of A and B over the shared questions.
    pub a: f64,
    pub b: f64,
    pub paired: PairedComparison,
    /// The permutation p value, adjusted over all rows (Holm).
    pub p_adjusted: f64,
    /// Questions that only one of the evaluations has.
    pub n_unshared: usize,
}

impl Compared {
    /// True if the adjusted p value is below 5 %.
    pub fn is_detectable(&self) -> bool {
        self.p_adjusted < 0.05
    }
}

/// Compares the evaluations in two folders, which share at least two questions.
pub fn compare_folders(a: &Path, b: &Path) -> Result<Vec<Compared>> {
    let compared = compare(&samples(a)?, &samples(b)?)?;
    if compared.is_empty() {
        return Err(Error::NothingShared { a: a.to_owned(), b: b.to_owned() });
    }
    Ok(compared)
}

fn samples(folder: &Path) -> Result<Vec<EvalRecord>> {
    if !folder.join("eval.json").exists() {
        let model = if is_run(folder) { folder.display().to_string() } else { "MODEL".to_string() };
        return Err(Error::NoEvaluation { folder: folder.to_owned(), model });
    }
    EvalFolder::read_plan(folder)?;
    EvalFolder::read_samples(folder)
}

/// Compares by question; benchmarks with fewer than two shared questions are left out.
pub fn compare(a: &[EvalRecord], b: &[EvalRecord]) -> std::result::Result<Vec<Compared>, StatsError> {
    let a = by_benchmark(a);
    let b = by_benchmark(b);
    let mut found = Vec::new();
    for (key, of_a) in &a {
        let Some(of_b) = b.get(key) else { continue };
        let of_a = shares(of_a);
        let of_b = shares(of_b);
        let shared: Vec<(f64, f64)> =
            of_a.iter().filter_map(|(id, &x)| of_b.get(id).map(|&y| (x, y))).collect();
        if shared.len() < 2 {
            continue;
        }
        let (x, y): (Vec<f64>, Vec<f64>) = shared.iter().copied().unzip();
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        found.push(Compared {
            benchmark: key.1.to_string(),
            decoding: key.0.to_string(),
            a: mean(&x),
            b: mean(&y),
            paired: compare_paired(&x, &y, &Resampling::default())?,
            p_adjusted: 1.0,
            n_unshared: of_a.len() + of_b.len() - 2 * shared.len(),
        });
    }
    if !found.is_empty() {
        let p: Vec<f64> = found.iter().map(|row| row.paired.p_permutation).collect();
        for (row, p_adjusted) in found.iter_mut().zip(holm(&p)?) {
            row.p_adjusted = p_adjusted;
        }
    }
    Ok(found)
}

fn by_benchmark(records: &[EvalRecord]) -> BTreeMap<(&str, &str), Vec<&EvalRecord>> {
    let mut groups: BTreeMap<(&str, &str), Vec<&EvalRecord>> = BTreeMap::new();
    for record in records {
        groups.entry((&record.decoding, &record.benchmark)).or_default().push(record);
    }
    groups
}

/// The share of right samples by question.
fn shares<'a>(records: &[&'a EvalRecord]) -> BTreeMap<&'a str, f64> {
    let share = |samples: Vec<&EvalRecord>| {
        samples.iter().filter(|r| r.verdict == Verdict::Right).count() as f64 / samples.len() as f64
    };
    by_question(records).into_iter().map(|(id, samples)| (id, share(samples))).collect()
}
