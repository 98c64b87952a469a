//! Packed sequences: one after another, no padding. Sequences that begin with the same prompt may share its rows.

use std::ops::Range;

/// Token sequences whose tokens are scored or given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedBatch {
    /// `[T]`
    tokens: Vec<u32>,
    /// `[S + 1]`: the rows `starts[s]..starts[s + 1]` are those of sequence s alone.
    starts: Vec<usize>,
    /// `[S]`: the rows in front of them that the sequence shares with an earlier one.
    shared: Vec<Range<usize>>,
    /// `[R]`: the rows that predict a scored token, and the token each predicts.
    rows: Vec<u32>,
    targets: Vec<u32>,
    /// `[R]`: the tokens that each token was drawn from, in ascending order; empty if it was drawn from all.
    kept: Vec<Vec<u32>>,
}

impl Default for PackedBatch {
    fn default() -> Self {
        Self {
            tokens: Vec::new(),
            starts: vec![0],
            shared: Vec::new(),
            rows: Vec::new(),
            targets: Vec::new(),
            kept: Vec::new(),
        }
    }
}

impl PackedBatch {
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a sequence; `is_scored` has one entry per token. A given token is read by the tokens after it, and has no
    /// score and no derivative.
    ///
    /// # Panics
    /// Unless there is a first token and it is given: nothing predicts it.
    pub fn push(&mut self, tokens: &[u32], is_scored: &[bool]) {
        self.push_behind(0..0, tokens, is_scored);
    }

    /// As [`PackedBatch::push`] of a sequence whose first `n_shared` tokens, all given, are those of the last sequence that shares
    /// none: the rows of these tokens are computed once. The row of the last of them predicts the first token of several sequences.
    ///
    /// # Panics
    /// As [`PackedBatch::push`], and unless the sequences begin alike and this one continues.
    pub fn push_sharing(&mut self, n_shared: usize, tokens: &[u32], is_scored: &[bool]) {
        let whole = self.shared.iter().rposition(Range::is_empty).expect("batch: no sequence to share with");
        let rows = self.starts[whole]..self.starts[whole] + n_shared;
        let is_prefix = rows.end <= self.starts[whole + 1] && self.tokens[rows.clone()] == tokens[..n_shared];
        let is_given = is_scored[..n_shared].iter().all(|is_scored| !is_scored);
        assert!(
            is_prefix && is_given && n_shared < tokens.len(),
            "batch: {n_shared} of {} tokens are no prompt of the sequence that they are shared with",
            tokens.len()
        );
        self.push_behind(rows, tokens, is_scored);
    }

    /// A sequence of which the rows of the first tokens are there.
    fn push_behind(&mut self, shared: Range<usize>, tokens: &[u32], is_scored: &[bool]) {
        let (n_tokens, n_marks) = (tokens.len(), is_scored.len());
        assert_eq!(n_tokens, n_marks, "batch: {n_tokens} tokens, {n_marks} marks of scored ones");
        assert_eq!(is_scored.first(), Some(&false), "batch: the first token must be given");
        let start = self.tokens.len();
        let n_shared = shared.len();
        let row_at = |position| {
            if position < n_shared { shared.start + position } else { start + position - n_shared }
        };
        for position in (1..n_tokens).filter(|&position| is_scored[position]) {
            self.rows.push(row_at(position - 1) as u32);
            self.targets.push(tokens[position]);
        }
        self.tokens.extend_from_slice(&tokens[n_shared..]);
        self.starts.push(self.tokens.len());
        self.shared.push(shared);
    }

    /// With the tokens that each scored one of the last sequence was drawn from, if not from all: its numbers are those of the
    /// distribution over these. Either all sequences of a batch have such tokens or none.
    pub fn keep(&mut self, kept: &[Vec<u32>]) {
        self.kept.extend_from_slice(kept);
        let (n_kept, n_scored) = (self.kept.len(), self.n_scored());
        assert!(
            n_kept == 0 || n_kept == n_scored,
            "batch: kept tokens of {n_kept} of {n_scored} scored ones"
        );
    }

    /// The most tokens that a scored one was drawn from, and the tokens `[R, n]`, padded with `u32::MAX`; `None` if all
    /// were possible.
    pub fn kept(&self) -> Option<(usize, Vec<u32>)> {
        let n = self.kept.iter().map(Vec::len).max()?;
        let mut ids = Vec::with_capacity(n * self.kept.len());
        for (row, kept) in self.kept.iter().enumerate() {
            ids.extend_from_slice(kept);
            ids.resize((row + 1) * n, u32::MAX);
        }
        Some((n, ids))
    }

    /// As [`PackedBatch::push`] of a prompt of `n_prompt` tokens and a response whose tokens are all scored.
    pub fn push_response(&mut self, tokens: &[u32], n_prompt: usize) {
        let is_scored: Vec<bool> = (0..tokens.len()).map(|position| position >= n_prompt).collect();
        self.push(tokens, &is_scored);
    }

    /// Appends a sequence whose last row is scored as a whole, by a reward model.
    ///
    /// # Panics
    /// If the sequence is empty.
    pub fn push_whole(&mut self, tokens: &[u32]) {
        // No token is predicted: the target is not read.
        self.push_choices(tokens, &[0]);
    }

    /// Appends a prompt and scores each of `choices` as the token after it, by one forward pass. Nothing may go back from
    /// such a batch.
    ///
    /// # Panics
    /// If the prompt is empty.
    pub fn push_choices(&mut self, prompt: &[u32], choices: &[u32]) {
        assert!(!prompt.is_empty(), "batch: an empty prompt predicts nothing");
        self.tokens.extend_from_slice(prompt);
        self.starts.push(self.tokens.len());
        self.shared.push(0..0);
        let last = (self.tokens.len() - 1) as u32;
        self.rows.extend(choices.iter().map(|_| last));
        self.targets.extend_from_slice(choices);
    }

    /// Rows, of which sequences may share some.
    pub fn n_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Rows of keys of all sequences, with those that they share; 0 if none share any.
    pub fn n_key_rows(&self) -> usize {
        let n_shared: usize = self.shared.iter().map(Range::len).sum();
        if n_shared == 0 { 0 } else { self.tokens.len() + n_shared }
    }

    pub fn n_sequences(&self) -> usize {
        self.starts.len() - 1
    }

    /// Scored tokens of all sequences.
    pub fn n_scored(&self) -> usize {
        self.rows.len()
    }

    /// Tokens of the longest sequence.
    pub fn longest(&self) -> usize {
        self.sequences().map(|(shared, alone)| shared.len() + alone.len()).max().unwrap_or(0)
    }

    /// The rows that each sequence shares with an earlier one, and those of the sequence alone.
    fn sequences(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        self.shared.iter().cloned().zip(self.starts.windows(2).map(|ends| ends[0]..ends[1]))
    }

    /// `[T]`: the position of each row in its sequence.
    pub fn positions(&self) -> Vec<u32> {
        self.sequences()
            .flat_map(|(shared, rows)| (0..rows.len()).map(move |at| (shared.len() + at) as u32))
            .collect()
    }

    /// The rows of keys of all sequences, one sequence after another; `None` if none share any.
    pub fn key_rows(&self) -> Option<KeyRows> {
        if self.n_key_rows() == 0 {
            return None;
        }
        let rows: Vec<u32> =
            self.sequences().flat_map(|(shared, rows)| shared.chain(rows)).map(|row| row as u32).collect();
        let mut offsets = vec![0];
        let mut starts = vec![0; self.tokens.len() + 1];
        let mut list = vec![0; rows.len()];
        for (shared, rows) in self.sequences() {
            offsets.push(offsets[offsets.len() - 1] + (shared.len() + rows.len()) as u32);
        }
        for &row in &rows {
            starts[row as usize + 1] += 1;
        }
        for row in 0..self.tokens.len() {
            starts[row + 1] += starts[row];
        }
        let mut next = starts.clone();
        for (copy, &row) in (0..).zip(&rows) {
            list[next[row as usize] as usize] = copy;
            next[row as usize] += 1;
        }
        Some(KeyRows { rows, offsets, starts, list })
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub fn starts(&self) -> &[usize] {
        &self.starts
    }

    pub fn rows(&self) -> &[u32] {
        &self.rows
    }

    pub fn targets(&self) -> &[u32] {
        &self.targets
    }
}

/// Which rows of a batch are keys of which sequence, as `attention::Keys` and `attention::key_copies` take them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyRows {
    /// `[E]`: the row of the batch that each row of keys is a copy of.
    pub rows: Vec<u32>,
    /// `[S + 1]`: the keys of sequence s are `offsets[s]..offsets[s + 1]`.
    pub offsets: Vec<u32>,
    /// `[T + 1]` and `[E]`: the copies of row t are `list[starts[t]..starts[t + 1]]`, in their order.
    pub starts: Vec<u32>,
    pub list: Vec<u32>,
}

#[cfg(test)]
mod tests;
