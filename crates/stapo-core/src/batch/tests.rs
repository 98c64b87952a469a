use super::*;
use crate::random::Key;

fn bits(key: u64, counter: &[u64]) -> u64 {
    counter.iter().fold(Key::new(key), |key, &word| key.with(word)).bits()
}

fn lengths(case: u64) -> Vec<usize> {
    let n = 1 + bits(1, &[case]) % 60;
    (0..n).map(|i| 1 + (bits(2, &[case, i]) % 100) as usize).collect()
}

#[test]
fn every_sequence_is_packed_once_whole_and_under_the_budget() {
    for case in 0..300 {
        let lengths = lengths(case);
        for packed in [pack_tight(&lengths, 128).unwrap(), pack_in_order(&lengths, 128).unwrap()] {
            let mut seen: Vec<usize> = packed.iter().flat_map(|m| m.sequences.clone()).collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..lengths.len()).collect::<Vec<_>>());
            for microbatch in &packed {
                let sum: usize = microbatch.sequences.iter().map(|&i| lengths[i]).sum();
                assert_eq!(sum, microbatch.n_tokens);
                assert!(sum <= 128);
            }
        }
    }
}

#[test]
fn tight_packing_is_near_the_lower_bound() {
    let (mut used, mut bound) = (0, 0);
    for case in 0..300 {
        let lengths = lengths(case);
        used += pack_tight(&lengths, 128).unwrap().len();
        // No packing beats the total over the budget, nor the number of sequences above half of it.
        let total: usize = lengths.iter().sum();
        bound += total.div_ceil(128).max(lengths.iter().filter(|&&len| len > 64).count());
    }
    assert!(used as f64 <= 1.05 * bound as f64, "{used} micro-batches, lower bound {bound}");
}

#[test]
fn tight_packing_finds_the_optimum_of_a_known_case() {
    let packed = pack_tight(&[6, 5, 5, 4, 4, 3, 3, 2], 8).unwrap();
    assert_eq!(packed.len(), 4);
}

#[test]
fn packing_in_order_keeps_the_order_for_every_budget() {
    let lengths = lengths(5);
    for budget in [100, 128, 1000, usize::MAX] {
        let packed = pack_in_order(&lengths, budget).unwrap();
        let seen: Vec<usize> = packed.iter().flat_map(|m| m.sequences.clone()).collect();
        assert_eq!(seen, (0..lengths.len()).collect::<Vec<_>>());
    }
}

#[test]
fn a_sequence_over_the_budget_is_named() {
    let error = pack_tight(&[3, 9, 4], 8).unwrap_err();
    assert_eq!(error, SequenceTooLong { sequence_idx: 1, n_tokens: 9, budget_tokens: 8 });
    assert!(error.to_string().contains("sequence 1: 9 tokens"));
    assert_eq!(pack_in_order(&[], 8).unwrap(), vec![]);
}
