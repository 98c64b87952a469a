use super::*;

fn votes(answers: &[(usize, usize)], n_silent: usize) -> QuestionVotes {
    let answers = answers.iter().map(|&(n_votes, n_correct)| AnswerVotes { n_votes, n_correct }).collect();
    QuestionVotes::new(answers, n_silent).unwrap()
}

#[test]
fn samples_are_grouped_by_answer_and_silent_ones_counted() {
    let samples = [(Some("4"), true), (None, false), (Some("5"), false), (Some("4"), true)];
    assert_eq!(QuestionVotes::from_samples(samples).unwrap(), votes(&[(2, 2), (1, 0)], 1));
}

#[test]
fn the_vote_of_all_samples_is_the_plain_majority() {
    assert_eq!(majority_of(&votes(&[(3, 3), (2, 0)], 9), 14), 1.0);
    assert_eq!(majority_of(&votes(&[(2, 2), (3, 0)], 0), 5), 0.0);
    assert_eq!(majority_of(&votes(&[(2, 2), (2, 0), (2, 0)], 0), 6), 1.0 / 3.0);
    assert_eq!(majority_of(&votes(&[], 6), 6), 0.0);
}

#[test]
fn one_sample_votes_for_itself() {
    let question = votes(&[(5, 5), (4, 0), (2, 2)], 3);
    assert!((majority_of(&question, 1) - 7.0 / 14.0).abs() < 1e-14);
}

#[test]
fn all_but_one_of_the_samples_agrees_with_leaving_each_out() {
    // Leaving out a right vote makes the wrong answer win, leaving out a vote for the wrong answer makes the right one
    // win; otherwise the two tie.
    let question = votes(&[(7, 7), (7, 0), (6, 0)], 12);
    let expected = (7.0 * 0.0 + 7.0 * 1.0 + 6.0 * 0.5 + 12.0 * 0.5) / 32.0;
    assert!((majority_of(&question, 31) - expected).abs() < 1e-13);
}

#[test]
fn random_draws_agree_with_the_exact_sum() {
    for (question, k) in [
        (votes(&[(7, 7), (6, 0), (3, 0), (2, 1), (1, 0), (1, 1)], 12), 16),
        (votes(&[(20, 20), (25, 0), (1, 0), (1, 0), (1, 0)], 16), 9),
    ] {
        let (exact, drawn) = (exact_majority(&question, k), drawn_majority(&question, k, N_DRAWS));
        assert!((exact - drawn).abs() < 5.0 * 0.002, "{exact} against {drawn}");
    }
}

#[test]
fn thousands_of_samples_are_answered_within_the_unit_range() {
    let many: Vec<(usize, usize)> =
        (0..400).map(|i| (1 + i % 7, if i % 50 == 0 { 1 + i % 7 } else { 0 })).collect();
    let question = votes(&many, 1000);
    assert!(exact_cost(&question, 800) > EXACT_COST);
    let drawn = drawn_majority(&question, 800, 200);
    assert!((0.0..=1.0).contains(&drawn));
    let two_sided = votes(&[(2100, 2100), (1900, 0)], 96);
    let exact = exact_majority(&two_sided, 101);
    assert!(exact > 0.6 && exact < 0.75, "{exact}");
}

#[test]
fn more_votes_help_the_more_frequent_answer() {
    let question = votes(&[(20, 20), (12, 0)], 0);
    let mut last = 0.0;
    for k in (1..32).step_by(2) {
        let value = majority_of(&question, k);
        assert!(value >= last - 1e-12, "k {k}: {value} after {last}");
        last = value;
    }
}

#[test]
fn binomial_rows_sum_to_one_without_underflow() {
    for (n, chance) in [(0, 0.5), (1, 0.25), (5000, 1e-3), (5000, 0.9999), (64, 0.5)] {
        let row = binomial_row(n, chance);
        let mean: f64 = row.iter().enumerate().map(|(j, p)| j as f64 * p).sum();
        assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        assert!((mean - n as f64 * chance).abs() < 1e-9 * (1.0 + mean), "{n}, {chance}: {mean}");
    }
}

#[test]
fn questions_without_samples_and_impossible_k_are_refused() {
    assert_eq!(QuestionVotes::new(vec![], 0), Err(StatsError::Count { n_samples: 0, n_correct: 0 }));
    let odd = vec![AnswerVotes { n_votes: 1, n_correct: 2 }];
    assert_eq!(QuestionVotes::new(odd, 0), Err(StatsError::Count { n_samples: 1, n_correct: 2 }));
    let questions = [votes(&[(4, 4)], 0), votes(&[(2, 0)], 1)];
    assert_eq!(maj_at_k(&questions, 4), Err(StatsError::K { question: 1, k: 4, n_samples: 3 }));
    assert_eq!(maj_at_k(&questions, 0), Err(StatsError::K { question: 0, k: 0, n_samples: 4 }));
}

/// By hand: 4 terms × 4 × 2 with one vote, 6 × 3 × 2 with two, 7 × 2 × 1 with three.
#[test]
fn the_cost_of_the_exact_sum_is_counted() {
    assert_eq!(exact_cost(&votes(&[(3, 3), (2, 0)], 1), 4), 82.0);
    assert_eq!(exact_cost(&votes(&[(3, 3), (2, 1)], 1), 4), 164.0);
    // A wrong answer never wins, so its votes cost only as those of another answer.
    assert_eq!(exact_cost(&votes(&[(3, 0), (2, 2)], 1), 4), 68.0);
}
