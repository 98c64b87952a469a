//! Packed sequences: one after another, no padding.

/// Token sequences, each with a prompt and a response whose tokens are scored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedBatch {
    /// `[T]`
    tokens: Vec<u32>,
    /// `[S + 1]`: sequence s is `tokens[starts[s]..starts[s + 1]]`.
    starts: Vec<usize>,
    /// `[R]`: the rows that predict a response token, and the token each predicts.
    rows: Vec<u32>,
    targets: Vec<u32>,
}

impl Default for PackedBatch {
    fn default() -> Self {
        Self { tokens: Vec::new(), starts: vec![0], rows: Vec::new(), targets: Vec::new() }
    }
}

impl PackedBatch {
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a sequence; its tokens from `n_prompt` on are scored.
    ///
    /// # Panics
    /// Unless `1 <= n_prompt <= tokens.len()`: the first token of all has no prediction.
    pub fn push(&mut self, tokens: &[u32], n_prompt: usize) {
        assert!(
            (1..=tokens.len()).contains(&n_prompt),
            "batch: prompt of {n_prompt} tokens, expected 1 to {}",
            tokens.len()
        );
        let start = self.tokens.len();
        self.rows.extend((n_prompt - 1..tokens.len() - 1).map(|position| (start + position) as u32));
        self.targets.extend_from_slice(&tokens[n_prompt..]);
        self.tokens.extend_from_slice(tokens);
        self.starts.push(self.tokens.len());
    }

    pub fn n_tokens(&self) -> usize {
        self.tokens.len()
    }

    pub fn n_sequences(&self) -> usize {
        self.starts.len() - 1
    }

    /// Response tokens of all sequences.
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
