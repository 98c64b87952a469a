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

/// Groups of sequences that share a prompt: its tokens, and the lengths of the responses.
fn groups(groups: &[(usize, &[usize])]) -> Vec<SequenceLength> {
    let of_group = |(prompt, responses): &(usize, &[usize])| {
        let prompt = *prompt;
        let length = move |(idx, response): (usize, &usize)| SequenceLength {
            n_tokens: prompt + response,
            n_shared: if idx == 0 { 0 } else { prompt },
        };
        responses.iter().enumerate().map(length).collect::<Vec<_>>()
    };
    groups.iter().flat_map(of_group).collect()
}

fn shared(lengths: &[SequenceLength], budget_tokens: usize, budget_keys: usize) -> Vec<(Vec<usize>, usize)> {
    let packing = Packing { budget_tokens, budget_keys: Some(budget_keys) };
    let packed = pack(lengths, packing).unwrap();
    packed.into_iter().map(|microbatch| (microbatch.sequences, microbatch.n_tokens)).collect()
}

#[test]
fn a_prompt_counts_once_and_its_sequences_stay_together() {
    let lengths = groups(&[(10, &[1, 2, 3]), (20, &[4, 5]), (5, &[30])]);
    assert_eq!(shared(&lengths, 100, 1000), [(vec![0, 1, 2, 3, 4, 5], 16 + 29 + 35)]);
    // The second group would fit in part, and begins the next micro-batch as a whole.
    assert_eq!(shared(&lengths, 42, 1000), [(vec![0, 1, 2], 16), (vec![3, 4], 29), (vec![5], 35)]);
    let alone = pack(&lengths, Packing::whole(42)).unwrap();
    assert_eq!(alone.iter().map(|microbatch| microbatch.n_tokens).collect::<Vec<_>>(), [36, 24, 25, 35]);
}

#[test]
fn a_group_above_a_budget_computes_its_prompt_once_in_each_part() {
    let lengths = groups(&[(2, &[3]), (10, &[5, 5, 5, 5]), (1, &[1])]);
    let parts = [(vec![0], 5), (vec![1, 2], 20), (vec![3, 4], 20), (vec![5], 2)];
    assert_eq!(shared(&lengths, 20, 1000), parts);
    // Rows of keys: 30 of two sequences of 15.
    assert_eq!(shared(&lengths, 100, 30), [(vec![0], 5), (vec![1, 2], 20), (vec![3, 4], 20), (vec![5], 2)]);
    assert_eq!(shared(&lengths, 100, 1).len(), 6, "a sequence is never cut");
    // Rows of 15 + 5 fit exactly, those of one more token do not.
    let pair = groups(&[(10, &[5, 5]), (1, &[1])]);
    assert_eq!(shared(&pair, 20, 1000), [(vec![0, 1], 20), (vec![2], 2)]);
    assert_eq!(shared(&pair, 22, 1000), [(vec![0, 1, 2], 22)]);
    let error = pack(&lengths, Packing { budget_tokens: 14, budget_keys: Some(1000) }).unwrap_err();
    assert_eq!((error.sequence_idx, error.n_tokens), (1, 15));
}

#[test]
fn minibatches_are_whole_groups_and_never_empty() {
    let problem = |id: &str| crate::rollout::Problem {
        id: id.into(),
        earlier_turns: Vec::new(),
        prompt: String::new(),
        reference: String::new(),
    };
    let group = |id| Group { problem: problem(id), members: Vec::new() };
    let batch = Batch { groups: ["a", "b", "c"].map(group).to_vec() };
    for (size, expected) in [(2, vec![2, 1]), (1, vec![1; 3]), (0, vec![1; 3]), (5, vec![3])] {
        let sizes: Vec<usize> = batch.minibatches(size).map(<[Group]>::len).collect();
        assert_eq!(sizes, expected, "{size}");
    }
}

#[test]
fn a_prompt_of_a_group_counts_once_against_the_budget() {
    let sequences = groups(&[(2, &[3]), (10, &[5, 5])]);
    assert_eq!(shared(&sequences, 25, 1000), [(vec![0, 1, 2], 25)]);
    assert_eq!(shared(&sequences, 24, 1000), [(vec![0], 5), (vec![1, 2], 20)]);
}
