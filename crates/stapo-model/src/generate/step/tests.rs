//! Groups of a decode step, and where the sequences with many rows begin.

use super::*;
use crate::generate::{Capacity, Request, Scheduler, Windows};

const BLOCK: usize = 32;

/// A decode step of sequences given as (prompt, blocks of it that are shared with the same prompt, keys).
fn decode_step(sequences: &[(u32, usize, usize)]) -> StepRows {
    let table_width = sequences.iter().map(|(.., keys)| keys.div_ceil(BLOCK)).max().unwrap_or(0);
    let sets = vec![SetRows::default()];
    let mut rows =
        StepRows { offsets: vec![0], sets, table_width, block_tokens: BLOCK, ..StepRows::default() };
    for (s, &(prompt, n_shared, n_keys)) in sequences.iter().enumerate() {
        let block = |b: usize| {
            if b < n_shared { prompt * 1000 + b as u32 } else { (s * 1000 + b + 90_000) as u32 }
        };
        rows.sets[0].tables.extend((0..table_width).map(block));
        rows.contexts.push(n_keys as u32);
        rows.tokens.push(0);
        rows.drawing.push(s as u32);
        rows.offsets.push(s as u32 + 1);
    }
    rows
}

#[test]
fn each_split_of_each_sequence_is_in_one_group_of_sequences_that_share_it() {
    let whole = SPLIT_KEYS / BLOCK;
    let sequences = [
        (1, 2 * whole + 3, 2 * SPLIT_KEYS + 200),
        (1, 2 * whole + 3, 2 * SPLIT_KEYS + 100),
        (1, 2 * whole + 3, 3 * SPLIT_KEYS + 1),
        (2, whole, SPLIT_KEYS + 1),
        (2, whole, SPLIT_KEYS + 77),
        (3, 4, 150),
        (3, 4, 130),
        (4, 1, 33),
    ];
    for limits in [(8, 1), (8, 2), (2, 4), (1, 1)] {
        let mut rows = decode_step(&sequences);
        rows.group(GroupLimits { whole_splits: limits.0, split_parts: limits.1 });
        let mut covered = Vec::new();
        for group in rows.groups.chunks_exact(4) {
            let [first, count, common, split] = [0, 1, 2, 3].map(|i| group[i] as usize);
            let (from, end) = (split * SPLIT_KEYS, (split + 1) * SPLIT_KEYS);
            let common = common * GROUPED_KEYS;
            assert!(sequences[first].2 > from, "the first sequence has keys in split {split}");
            assert!(count <= if common >= end { limits.0 } else { limits.1 }, "{limits:?} {group:?}");
            for (s, sequence) in sequences.iter().enumerate().skip(first).take(count) {
                assert!(count == 1 || common > from && common <= sequence.1 * BLOCK, "{group:?}");
                assert!(sequence.0 == sequences[first].0 && sequence.2 > from, "{group:?}");
                covered.push((s, split));
            }
        }
        covered.sort_unstable();
        let splits = |(s, sequence): (usize, &(u32, usize, usize))| {
            (0..sequence.2.div_ceil(SPLIT_KEYS)).map(move |split| (s, split))
        };
        let all: Vec<_> = sequences.iter().enumerate().flat_map(splits).collect();
        assert_eq!(covered, all, "{limits:?}");
        // Room for the splits of the sequences that have several: 3, 3, 4, 2 and 2.
        assert_eq!((&rows.first_partials[..6], rows.n_partials), (&[0, 3, 6, 10, 12, 14][..], 14));
    }
    let mut rows = decode_step(&sequences);
    rows.group(GroupLimits { whole_splits: 8, split_parts: 2 });
    let groups: Vec<&[u32]> = rows.groups.chunks_exact(4).collect();
    let shared = (2 * SPLIT_KEYS + 64) / GROUPED_KEYS;
    // Whole splits are read once for all sequences of a prompt, the rest for two at most.
    assert!(
        groups.contains(&&[0, 3, shared as u32, 0][..]) && groups.contains(&&[0, 3, shared as u32, 1][..])
    );
    assert!(groups.contains(&&[0, 2, shared as u32, 2][..]) && groups.contains(&&[5, 2, 2, 0][..]));
    assert!(groups.contains(&&[3, 2, (SPLIT_KEYS / GROUPED_KEYS) as u32, 0][..]));
}

/// 4 blocks of heads of 128 fit on a multiprocessor and 2 of heads of 256: groups are as large as leaves none without a block.
#[test]
fn groups_of_wide_heads_leave_half_as_many_blocks() {
    let split_parts = |name: &str, n_sequences| {
        let config = ModelConfig::known(name).expect("a known shape");
        GroupLimits::new(&config, n_sequences).split_parts
    };
    assert_eq!([64, 128, 512].map(|n| split_parts("qwen3-4b", n)), [1, 2, 2]);
    assert_eq!([64, 128, 512].map(|n| split_parts("gemma-3-4b", n)), [1, 2, 8]);
}

fn scheduler_of(prompts: &[usize], max_rows: usize) -> Scheduler {
    let capacity = Capacity {
        n_blocks: 1000,
        n_states: None,
        block_tokens: BLOCK,
        max_rows,
        max_sequences: 9,
        max_draws: 9,
    };
    let windows = Windows { of_sets: vec![None], n_before: 0, n_rewound: 0 };
    let mut scheduler = Scheduler::new(capacity, windows);
    for (ticket, n_prompt) in prompts.iter().enumerate() {
        let prompt = vec![0; *n_prompt];
        let request = Request { problem: 0, prompt, n_samples: 1, max_tokens: 9, stops: vec![] };
        scheduler.submit(Ticket(ticket as u64), request, |_| 9);
    }
    scheduler
}

#[test]
fn the_mean_of_keys_counts_the_rows_that_read_them() {
    let mut scheduler = scheduler_of(&[600, 1800], 2400);
    let mut step = scheduler.plan();
    let n_prefill = put_prefill_last(&mut step, scheduler.running());
    let prefill = StepRows::new(&step, scheduler.running(), BLOCK, n_prefill).shape().prefill;
    let mean_keys = (600 * 600 + 1800 * 1800) / 2400;
    assert_eq!(prefill, Some(Prefill { n_sequences_before: 0, n_tokens_before: 0, mean_keys }));
}

#[test]
fn sequences_with_many_rows_and_keys_come_last_in_their_order() {
    let mut scheduler = scheduler_of(&[600, 5, 511, 700], 1200);
    // The rows of each step and its prompts: 84 rows are too few for the kernel of prefill, 511 keys too. The chunk of 616 rows
    // that follows them is after the rows of all other sequences.
    let expected = [
        (
            &[5, 511, 84, 600][..],
            Some(Prefill { n_sequences_before: 3, n_tokens_before: 600, mean_keys: 600 }),
        ),
        (&[1, 1, 1, 616], Some(Prefill { n_sequences_before: 3, n_tokens_before: 3, mean_keys: 700 })),
        (&[1, 1, 1, 1], None),
    ];
    for (lens, prefill) in expected {
        let mut step = scheduler.plan();
        let n_prefill = put_prefill_last(&mut step, scheduler.running());
        let rows = StepRows::new(&step, scheduler.running(), BLOCK, n_prefill);
        let found: Vec<u32> = rows.offsets.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!((&found[..], rows.shape().prefill), (lens, prefill));
        let drawn = scheduler.advance(&step.rows);
        assert_eq!(drawn.len(), rows.draws.len(), "draws are in the order of the rows");
        let draws = rows.draws.iter().map(|(ticket, ..)| *ticket);
        assert!(drawn.iter().map(|unread| unread.ticket).eq(draws));
    }
}
