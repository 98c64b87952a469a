//! Where the queries and the keys of packed sequences lie.

use std::ops::Range;

use crate::heads::Heads;
use crate::{Float, View, check};

/// Packed sequences: which rows are the queries of each, and where its keys and values lie.
#[derive(Clone, Copy)]
pub struct Sequences<'a, T: Float> {
    /// `[sequences + 1]`, rising from 0 to T: the queries of sequence s are the rows `offsets[s]..offsets[s + 1]`.
    pub offsets: View<'a, u32>,
    /// `None`: every row of qkv is a query, a key and a value of its sequence.
    pub keys: Option<Keys<'a, T>>,
}

impl<'a, T: Float> From<View<'a, u32>> for Sequences<'a, T> {
    fn from(offsets: View<'a, u32>) -> Self {
        Self { offsets, keys: None }
    }
}

/// Keys and values that lie apart from the queries. A sequence has at least as many keys as queries, and its queries are those of
/// its last positions: the keys in front of them were computed elsewhere, as those of a prompt that several responses share.
#[derive(Clone, Copy)]
pub struct Keys<'a, T: Float> {
    /// `[E, 2 kv heads, dim]`: the keys of a row, and after them its values.
    pub rows: View<'a, T>,
    /// `[sequences + 1]`, rising from 0 to E: sequence s has the keys `offsets[s]..offsets[s + 1]`.
    pub offsets: View<'a, u32>,
}

impl<T: Float> Keys<'_, T> {
    /// Rows of keys.
    pub(super) fn n_rows(&self, heads: Heads) -> usize {
        self.rows.len() / (2 * heads.kv * heads.dim)
    }
}

impl<'a, T: Float> Sequences<'a, T> {
    #[track_caller]
    pub(super) fn check(&self, op: &str, n_sequences: usize, heads: Heads) {
        check(op, "offsets", self.offsets.len(), n_sequences + 1);
        if let Some(keys) = &self.keys {
            check(op, "key offsets", keys.offsets.len(), n_sequences + 1);
            check(op, "keys", keys.rows.len(), keys.n_rows(heads) * 2 * heads.kv * heads.dim);
        }
    }

    /// On the host, where the offsets can be read.
    #[track_caller]
    pub(super) fn host(&self, op: &str, n_tokens: usize, heads: Heads) -> HostSequences<'a, T> {
        let n_sequences = self.offsets.len() - 1;
        check_offsets(op, self.offsets, n_sequences, n_tokens);
        if let Some(keys) = self.keys {
            check_offsets(op, keys.offsets, n_sequences, keys.n_rows(heads));
            let lens = |offsets: View<'a, u32>| offsets.host().windows(2).map(|ends| ends[1] - ends[0]);
            let fewer = lens(self.offsets).zip(lens(keys.offsets)).position(|(queries, keys)| queries > keys);
            assert!(fewer.is_none(), "{op}: sequence {fewer:?} has more queries than keys");
        }
        let keys = self.keys.map(|keys| (keys.rows.host(), keys.offsets.host()));
        HostSequences { offsets: self.offsets.host(), keys }
    }
}

#[track_caller]
pub(super) fn check_offsets(op: &str, offsets: View<'_, u32>, sequences: usize, tokens: usize) {
    let offsets = offsets.host();
    let rises = offsets.is_sorted() && offsets[0] == 0 && offsets[sequences] as usize == tokens;
    assert!(rises, "{op}: offsets must rise from 0 to {tokens}, got {offsets:?}");
}

/// [`Sequences`] on the host.
#[derive(Clone, Copy)]
pub(crate) struct HostSequences<'a, E> {
    offsets: &'a [u32],
    keys: Option<(&'a [E], &'a [u32])>,
}

/// One sequence on the host.
#[derive(Clone, Copy)]
pub(super) struct HostSequence<'a, E> {
    /// The first query, as a row of qkv.
    pub start: usize,
    /// Position of the first query.
    pub first: usize,
    /// The first key, as a row of what holds the keys, and the number of keys.
    pub key_start: usize,
    pub len: usize,
    pub keys: KeyRows<'a, E>,
}

/// Rows that hold keys and values.
#[derive(Clone, Copy)]
pub(super) struct KeyRows<'a, E> {
    pub rows: &'a [E],
    pub columns: KeyColumns,
}

/// Where keys and values lie in rows that hold them.
#[derive(Clone, Copy)]
pub(super) struct KeyColumns {
    /// Elements of a row, and heads in front of the first key.
    pub width: usize,
    n_before: usize,
}

impl KeyColumns {
    /// In rows of qkv.
    pub fn fused(heads: Heads) -> Self {
        Self { width: heads.qkv_width(), n_before: heads.query }
    }

    /// In [`Keys`].
    pub fn apart(heads: Heads) -> Self {
        Self { width: 2 * heads.kv * heads.dim, n_before: 0 }
    }

    /// Where the key and the value of a head start.
    pub fn of_head(self, heads: Heads, kv_head: usize) -> (usize, usize) {
        let key = (self.n_before + kv_head) * heads.dim;
        (key, key + heads.kv * heads.dim)
    }
}

impl<E> KeyRows<'_, E> {
    /// Those of a range of positions.
    pub fn range(self, positions: Range<usize>) -> Self {
        let width = self.columns.width;
        Self { rows: &self.rows[positions.start * width..positions.end * width], ..self }
    }
}

impl<'a, E> HostSequences<'a, E> {
    /// Sequence `s`, whose queries are rows of `qkv`.
    pub(super) fn sequence(&self, heads: Heads, qkv: &'a [E], s: usize) -> HostSequence<'a, E> {
        let range = |offsets: &[u32]| offsets[s] as usize..offsets[s + 1] as usize;
        let queries = range(self.offsets);
        let (rows, keys, columns) = match self.keys {
            Some((rows, offsets)) => (rows, range(offsets), KeyColumns::apart(heads)),
            None => (qkv, queries.clone(), KeyColumns::fused(heads)),
        };
        HostSequence {
            start: queries.start,
            first: keys.len() - queries.len(),
            key_start: keys.start,
            len: keys.len(),
            keys: KeyRows { rows, columns }.range(keys),
        }
    }
}
