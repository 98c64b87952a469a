//! Drafted rows. The row of a drafted token runs in the step of the token before it. What the row draws counts only if the
//! drafted token is the one that was drawn in its place, which is known when the step is read.

use super::{RunningSequences, ScheduledRows, ScheduledStep, Scheduler, Sequence, Ticket, UnreadToken};

impl ScheduledRows {
    /// Whether the row follows on a response and draws its next token.
    fn is_decoding(&self, running: &RunningSequences) -> bool {
        let sequence = &running[self.running_idx];
        self.n_rows == 1 && self.draws && sequence.n_cached >= sequence.n_prompt
    }
}

impl ScheduledStep {
    /// The sequences that may have drafts.
    pub fn decoding<'a>(&'a self, running: &'a RunningSequences) -> impl Iterator<Item = &'a Sequence> {
        let decoding = self.rows.iter().filter(|rows| rows.is_decoding(running));
        decoding.map(|rows| &running[rows.running_idx])
    }
}

impl Scheduler {
    /// Whether no sequence waits and at most `n` run.
    pub fn is_tail(&self, n: usize) -> bool {
        let n_running = self.running.len();
        n_running > 0 && n_running <= n && self.groups.values().all(|group| group.waiting.is_empty())
    }

    /// Adds rows of drafted tokens, at most `n_left` in all: as many as there is memory for without taking any from a
    /// sequence. There is a draft for each sequence of [`ScheduledStep::decoding`]. Returns the number of rows.
    pub fn add_drafts(
        &mut self,
        step: &mut ScheduledStep,
        n_left: usize,
        drafts: impl IntoIterator<Item = Vec<u32>>,
    ) -> usize {
        let n_rows: usize = step.rows.iter().map(|rows| rows.n_rows).sum();
        let n_draws: usize = step.rows.iter().map(|rows| usize::from(rows.draws) + rows.siblings.len()).sum();
        let n_free = (self.capacity.max_rows - n_rows).min(self.capacity.max_draws - n_draws);
        let n_most = n_left.min(n_free);
        let mut n_left = n_most;
        let block_tokens = self.capacity.block_tokens;
        let decoding = step.rows.iter_mut().filter(|rows| rows.is_decoding(&self.running));
        let decoding: Vec<&mut ScheduledRows> = decoding.collect();
        for (rows, mut draft) in decoding.into_iter().zip(drafts) {
            let sequence = &mut self.running[rows.running_idx];
            // The token after the last drafted one is drawn too.
            draft.truncate(n_left.min((sequence.max_tokens - 1).saturating_sub(sequence.n_drawn)));
            let tables = &mut sequence.tables;
            let n_blocks = (sequence.n_cached + 1 + draft.len()).div_ceil(block_tokens);
            // All sets of layers have a block for a position, or none has.
            while tables[0].len() < n_blocks && self.pool.n_free() >= tables.len() {
                for table in tables.iter_mut() {
                    table.push(self.pool.take().expect("a block of those counted as free"));
                }
            }
            draft.truncate(tables[0].len() * block_tokens - sequence.n_cached - 1);
            n_left -= draft.len();
            rows.drafts = draft;
        }
        n_most - n_left
    }

    /// Whether what was drawn after a drafted token counts: its sequence has not ended and drew that token. The row of the
    /// drafted token then is cached.
    pub fn confirm(&mut self, token: UnreadToken, draft: u32) -> bool {
        let UnreadToken { ticket, sample, position, .. } = token;
        let Some(idx) = self.running.position(ticket, sample) else { return false };
        let sequence = &mut self.running[idx];
        let is_last = sequence.next_unread() == position && sequence.next_position() == position;
        if !is_last || sequence.sampled.last().is_none_or(|last| last.token != draft) {
            return false;
        }
        sequence.n_cached += 1;
        sequence.draw(0);
        true
    }

    /// Gives back blocks in which a sequence has nothing: they were taken for drafts that it did not draw.
    pub fn release_unused_blocks(&mut self, ticket: Ticket, sample: u32) {
        let running = self.running.position(ticket, sample);
        let sequence = match running {
            Some(idx) => Some(&mut self.running[idx]),
            None => self.parked.get_mut(&(ticket, sample)),
        };
        if let Some(sequence) = sequence {
            let n_used = sequence.n_cached.div_ceil(self.capacity.block_tokens);
            sequence.tables.iter_mut().for_each(|table| table.truncate(n_used, &mut self.pool));
        }
    }
}
