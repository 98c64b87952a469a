//! Packed sequences: one after another, no padding.

/// Token sequences whose tokens are scored or given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedBatch {
    /// `[T]`
    tokens: Vec<u32>,
    /// `[S + 1]`: sequence s is `tokens[starts[s]..starts[s + 1]]`.
    starts: Vec<usize>,
    /// `[R]`: the rows that predict a scored token, and the token each predicts.
    rows: Vec<u32>,
    targets: Vec<u32>,
    /// `[R]`: the tokens that each token was drawn from, in ascending order; empty where it was drawn from all.
    kept: Vec<Vec<u32>>,
}

impl Default for PackedBatch {
    fn default() -> Self {
        Self { tokens: Vec::new(), starts: vec![0], rows: Vec::new(), targets: Vec::new(), kept: Vec::new() }
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
        let (n_tokens, n_marks) = (tokens.len(), is_scored.len());
        assert_eq!(n_tokens, n_marks, "batch: {n_tokens} tokens, {n_marks} marks of scored ones");
        assert_eq!(is_scored.first(), Some(&false), "batch: the first token must be given");
        let start = self.tokens.len();
        for position in (1..n_tokens).filter(|&position| is_scored[position]) {
            self.rows.push((start + position - 1) as u32);
            self.targets.push(tokens[position]);
        }
        self.tokens.extend_from_slice(tokens);
        self.starts.push(self.tokens.len());
    }

    /// As [`PackedBatch::push`], with the tokens that each scored one was drawn from, if not from all: its numbers are those of
    /// the distribution over these. Either all sequences of a batch have such tokens or none.
    pub fn push_kept(&mut self, tokens: &[u32], is_scored: &[bool], kept: &[Vec<u32>]) {
        self.push(tokens, is_scored);
        self.kept.extend_from_slice(kept);
        let (n_kept, n_scored) = (self.kept.len(), self.n_scored());
        assert!(
            n_kept == 0 || n_kept == n_scored,
            "batch: kept tokens of {n_kept} of {n_scored} scored ones"
        );
    }

    /// The most tokens that a scored one was drawn from, and the tokens `[R, n]`, padded with `u32::MAX`; `None` where all
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
        let last = (self.tokens.len() - 1) as u32;
        self.rows.extend(choices.iter().map(|_| last));
        self.targets.extend_from_slice(choices);
    }

    pub fn n_tokens(&self) -> usize {
        self.tokens.len()
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
        self.starts.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or(0)
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

#[cfg(test)]
mod tests;
