//! avg@k and pass@k from counts of correct samples.

use super::cluster::{QuestionScores, proportion_estimate};
use super::{Estimate, StatsError};

/// Correct samples of one question: `n_correct` of `n_samples`, at least one sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuestionCount {
    n_samples: usize,
    n_correct: usize,
}

impl QuestionCount {
    pub fn new(n_samples: usize, n_correct: usize) -> Result<Self, StatsError> {
        if n_samples == 0 || n_correct > n_samples {
            return Err(StatsError::Count { n_samples, n_correct });
        }
        Ok(Self { n_samples, n_correct })
    }

    pub fn n_samples(&self) -> usize {
        self.n_samples
    }

    /// Share of correct samples: this question's avg@k.
    pub fn share(&self) -> f64 {
        self.n_correct as f64 / self.n_samples as f64
    }

    /// The samples as scores 0 and 1.
    pub fn scores(&self) -> QuestionScores {
        QuestionScores::of_proportion(self.n_samples, self.n_correct)
    }
}

/// avg@k: mean over questions of the share of correct samples, k being the samples each question has (they may
/// differ). Standard error clustered by question as in [`clustered_mean`](super::clustered_mean), interval within
/// 0..1; where all questions have the same share, Wilson's interval with one trial per question.
pub fn avg_at_k(questions: &[QuestionCount]) -> Result<Estimate, StatsError> {
    let shares: Vec<f64> = questions.iter().map(QuestionCount::share).collect();
    proportion_estimate(&shares, n_samples(questions))
}

/// pass@k: the chance that at least one of k samples is correct, mean over questions of the unbiased estimate
/// `1 - C(n - c, k) / C(n, k)`: the share of k-subsets of n samples that hold one of the c correct ones (Chen et al.
/// 2021, eq. 1). Interval as in [`avg_at_k`]. Refuses k = 0 and k above any question's samples.
pub fn pass_at_k(questions: &[QuestionCount], k: usize) -> Result<Estimate, StatsError> {
    if let Some(question) = questions.iter().position(|q| k == 0 || k > q.n_samples) {
        return Err(StatsError::K { question, k, n_samples: questions[question].n_samples });
    }
    let values: Vec<f64> = questions.iter().map(|q| pass_of(*q, k)).collect();
    proportion_estimate(&values, n_samples(questions))
}

/// One question's pass@k. The quotient of binomials is a product of factors below 1 that can run over k or over c
/// factors; the shorter product is taken. A factor is 0 where fewer than k samples are wrong.
fn pass_of(question: QuestionCount, k: usize) -> f64 {
    let n = question.n_samples;
    let c = question.n_correct;
    let (rounds, other) = if c < k { (c, k) } else { (k, c) };
    let all_wrong: f64 = (0..rounds).map(|i| 1.0 - other as f64 / (n - i) as f64).product();
    1.0 - all_wrong
}

fn n_samples(questions: &[QuestionCount]) -> usize {
    questions.iter().map(|q| q.n_samples).sum()
}
