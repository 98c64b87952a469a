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
        let packed = pack_in_order(&lengths, 128).unwrap();
        let seen: Vec<usize> = packed.iter().flat_map(|m| m.sequences.clone()).collect();
        assert_eq!(seen, (0..lengths.len()).collect::<Vec<_>>());
        for microbatch in &packed {
            let sum: usize = microbatch.sequences.iter().map(|&i| lengths[i]).sum();
            assert_eq!(sum, microbatch.n_tokens);
            assert!(sum <= 128);
        }
    }
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
    let error = pack_in_order(&[3, 9, 4], 8).unwrap_err();
    assert_eq!(error, SequenceTooLong { sequence_idx: 1, n_tokens: 9, budget_tokens: 8 });
    assert!(error.to_string().contains("sequence 1: 9 tokens"));
    assert_eq!(pack_in_order(&[], 8).unwrap(), vec![]);
}
