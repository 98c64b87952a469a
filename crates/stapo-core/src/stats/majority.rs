//! maj@k: is the most frequent of k answers right?

use std::collections::BTreeMap;

use super::cluster::proportion_estimate;
use super::{Estimate, StatsError};
use crate::random::Key;

/// Multiply-adds per question above which the exact sum gives way to random draws.
const EXACT_COST: f64 = 2e8;
/// Random draws per question above [`EXACT_COST`]: a standard error of at most 0.002.
const N_DRAWS: u64 = 1 << 16;
const DRAW_SEED: u64 = 0x006d_616a_6f72_6974;

/// Samples of one question that gave one canonical answer. Usually `n_correct` is 0 or `n_votes`; where a verifier
/// judged equal answers differently, a win of this answer counts by its share of correct samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerVotes {
    pub n_votes: usize,
    pub n_correct: usize,
}

/// The samples of one question, by answer. Samples without an answer are drawn like any other but do not vote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuestionVotes {
    answers: Vec<AnswerVotes>,
    n_silent: usize,
}

impl QuestionVotes {
    /// Refuses a question without samples and an answer with more correct samples than votes.
    pub fn new(answers: Vec<AnswerVotes>, n_silent: usize) -> Result<Self, StatsError> {
        if let Some(odd) = answers.iter().find(|a| a.n_correct > a.n_votes) {
            return Err(StatsError::Count { n_samples: odd.n_votes, n_correct: odd.n_correct });
        }
        let votes = Self { answers, n_silent };
        if votes.n_samples() == 0 {
            return Err(StatsError::Count { n_samples: 0, n_correct: 0 });
        }
        Ok(votes)
    }

    /// From (canonical answer if any, correct) per sample.
    pub fn from_samples<A: Ord>(
        samples: impl IntoIterator<Item = (Option<A>, bool)>,
    ) -> Result<Self, StatsError> {
        let mut by_answer = BTreeMap::new();
        let mut n_silent = 0;
        for (answer, correct) in samples {
            let Some(answer) = answer else {
                n_silent += 1;
                continue;
            };
            let votes = by_answer.entry(answer).or_insert(AnswerVotes { n_votes: 0, n_correct: 0 });
            votes.n_votes += 1;
            votes.n_correct += usize::from(correct);
        }
        Self::new(by_answer.into_values().collect(), n_silent)
    }

    pub fn n_samples(&self) -> usize {
        self.n_silent + self.answers.iter().map(|a| a.n_votes).sum::<usize>()
    }
}

/// maj@k: mean over questions of the chance that the majority answer of k samples, drawn from the question's samples
/// without replacement, is correct. Ties fall to each of the tied answers equally often; no vote at all is wrong.
/// Unbiased for k fresh samples, and for k = n the vote itself. Interval as in [`avg_at_k`](super::avg_at_k).
///
/// Exact while the sum is affordable (always for a few hundred samples), else the mean of 65536 fixed random draws.
pub fn maj_at_k(questions: &[QuestionVotes], k: usize) -> Result<Estimate, StatsError> {
    let mut values = Vec::with_capacity(questions.len());
    for (question, votes) in questions.iter().enumerate() {
        let n_samples = votes.n_samples();
        if k == 0 || k > n_samples {
            return Err(StatsError::K { question, k, n_samples });
        }
        values.push(majority_of(votes, k));
    }
    proportion_estimate(&values, questions.iter().map(QuestionVotes::n_samples).sum())
}

fn majority_of(votes: &QuestionVotes, k: usize) -> f64 {
    if k == votes.n_samples() {
        let drawn: Vec<usize> = votes.answers.iter().map(|a| a.n_votes).collect();
        winner_share(&votes.answers, &drawn)
    } else if exact_cost(votes, k) <= EXACT_COST {
        exact_majority(votes, k)
    } else {
        drawn_majority(votes, k, N_DRAWS)
    }
}

/// Mean correctness of the answers with the most drawn votes; 0 without any vote.
fn winner_share(answers: &[AnswerVotes], drawn: &[usize]) -> f64 {
    let most = drawn.iter().copied().max().unwrap_or(0);
    if most == 0 {
        return 0.0;
    }
    let mut n_tied = 0.0;
    let mut right = 0.0;
    for (answer, _) in answers.iter().zip(drawn).filter(|&(_, &n)| n == most) {
        n_tied += 1.0;
        right += answer.n_correct as f64 / answer.n_votes as f64;
    }
    right / n_tied
}

/// Sum, over each winner g and its number of votes m, of
/// `P(g drawn m times, the others at most m times, t of them m times) / (t + 1)`.
///
/// Draws without replacement are independent binomial draws with one chance k / n, given that they add up to k; so the
/// joint chance is a product of rows of [`binomial_row`], convolved over answers, divided by the binomial chance of k
/// out of n. Every term is positive and at most 1: nothing cancels or overflows.
fn exact_majority(votes: &QuestionVotes, k: usize) -> f64 {
    let n = votes.n_samples();
    let chance = k as f64 / n as f64;
    let rows: Vec<Vec<f64>> = votes.answers.iter().map(|a| binomial_row(a.n_votes, chance)).collect();
    let silent = binomial_row(votes.n_silent, chance);
    let mut value = 0.0;
    for (winner, answer) in votes.answers.iter().enumerate().filter(|(_, a)| a.n_correct > 0) {
        let correctness = answer.n_correct as f64 / answer.n_votes as f64;
        for m in 1..=answer.n_votes.min(k) {
            value += correctness * rows[winner][m] * tied_chance(&rows, &silent, winner, m, k - m);
        }
    }
    (value / binomial_row(n, chance)[k]).clamp(0.0, 1.0)
}

/// Sum over t of P(the answers other than `winner` and the silent ones draw `rest` in all, none more than m, t of them
/// exactly m) / (t + 1).
fn tied_chance(rows: &[Vec<f64>], silent: &[f64], winner: usize, m: usize, rest: usize) -> f64 {
    let width = rows.len().min(rest / m + 1);
    // Laid out as chances[drawn * width + t].
    let mut chances = vec![0.0; (rest + 1) * width];
    for (drawn, &chance) in silent.iter().enumerate().take(rest + 1) {
        chances[drawn * width] = chance;
    }
    let mut next = vec![0.0; chances.len()];
    for row in rows.iter().enumerate().filter(|(other, _)| *other != winner).map(|(_, row)| row) {
        next.fill(0.0);
        for (votes, &chance) in row.iter().enumerate().take(m.min(rest) + 1) {
            let shift = votes * width + usize::from(votes == m);
            for (to, from) in next[shift..].iter_mut().zip(&chances) {
                *to += chance * from;
            }
        }
        std::mem::swap(&mut chances, &mut next);
    }
    chances[rest * width..].iter().enumerate().map(|(t, chance)| chance / (t + 1) as f64).sum()
}

/// Multiply-adds of [`exact_majority`].
fn exact_cost(votes: &QuestionVotes, k: usize) -> f64 {
    let most = votes.answers.iter().filter(|a| a.n_correct > 0).map(|a| a.n_votes).max().unwrap_or(0);
    let n_winners = votes.answers.iter().filter(|a| a.n_correct > 0).count();
    let per_winner: f64 = (1..=most.min(k))
        .map(|m| {
            let terms: usize = votes.answers.iter().map(|a| a.n_votes.min(m) + 1).sum();
            let n_tied = ((k - m) / m).min(votes.answers.len() - 1) + 1;
            terms as f64 * (k - m + 1) as f64 * n_tied as f64
        })
        .sum();
    n_winners as f64 * per_winner
}

/// Chances of 0..=n successes: ratios of neighbours outward from the mode, then scaled to sum 1, so that no chance of
/// notable size under- or overflows, whatever n and `chance` are.
fn binomial_row(n: usize, chance: f64) -> Vec<f64> {
    let mut row = vec![0.0; n + 1];
    let mode = (((n + 1) as f64 * chance) as usize).min(n);
    row[mode] = 1.0;
    let odds = chance / (1.0 - chance);
    for j in mode..n {
        row[j + 1] = row[j] * odds * (n - j) as f64 / (j + 1) as f64;
    }
    for j in (0..mode).rev() {
        row[j] = row[j + 1] / odds * (j + 1) as f64 / (n - j) as f64;
    }
    let total: f64 = row.iter().sum();
    for p in &mut row {
        *p /= total;
    }
    row
}

/// Mean of [`winner_share`] over `n_draws` random k-subsets.
fn drawn_majority(votes: &QuestionVotes, k: usize, n_draws: u64) -> f64 {
    let mut samples: Vec<Option<usize>> = vec![None; votes.n_silent];
    for (answer, a) in votes.answers.iter().enumerate() {
        samples.extend(std::iter::repeat_n(Some(answer), a.n_votes));
    }
    let mut drawn = vec![0; votes.answers.len()];
    let mut total = 0.0;
    for draw in 0..n_draws {
        let key = Key::new(DRAW_SEED).with(draw);
        drawn.fill(0);
        // The first k places of a Fisher-Yates shuffle are a random subset, whatever order the shuffle starts from.
        for i in 0..k {
            let j = i + key.with(i as u64).below((samples.len() - i) as u64) as usize;
            samples.swap(i, j);
            if let Some(answer) = samples[i] {
                drawn[answer] += 1;
            }
        }
        total += winner_share(&votes.answers, &drawn);
    }
    total / n_draws as f64
}

#[cfg(test)]
mod tests;
