//! Drafted rows. The row of a drafted token runs in the step of the token before it. What the row draws counts only if the
//! drafted token is the one that was drawn in its place, which is known when the step is read.

use super::{ScheduledStep, Scheduler, Sequence, Ticket, UnreadToken};

impl Scheduler {
    /// Whether no sequence waits and at most `n` run.
    pub fn is_tail(&self, n: usize) -> bool {
        let n_running = self.running.len();
        n_running > 0 && n_running <= n && self.groups.values().all(|group| group.waiting.is_empty())
    }

    /// Adds rows of drafted tokens to the sequences that decode, at most `n_left` in all: as many as there is memory for
    /// without taking any from a sequence. `draft` gives the next tokens of a sequence, at most as many as it is asked for.
    pub fn add_drafts(
        &mut self,
        step: &mut ScheduledStep,
        n_left: usize,
        mut draft: impl FnMut(&Sequence, usize) -> Vec<u32>,
    ) {
        let n_rows: usize = step.rows.iter().map(|rows| rows.n_rows).sum();
        let n_draws: usize = step.rows.iter().map(|rows| usize::from(rows.draws) + rows.siblings.len()).sum();
        let n_free = (self.capacity.max_rows - n_rows).min(self.capacity.max_draws - n_draws);
        let mut n_left = n_left.min(n_free);
        for rows in &mut step.rows {
            let sequence = &mut self.running[rows.running_idx];
            let is_decoding = rows.n_rows == 1 && rows.draws && sequence.n_cached >= sequence.n_prompt;
            // The token after the last draft is drawn too.
            let n_most = n_left.min(sequence.max_tokens - sequence.n_drawn.min(sequence.max_tokens - 1) - 1);
            if !is_decoding || n_most == 0 {
                continue;
            }
            let mut drafts = draft(sequence, n_most);
            drafts.truncate(n_most);
            let block_tokens = self.capacity.block_tokens;
            let n_blocks = (sequence.n_cached + 1 + drafts.len()).div_ceil(block_tokens);
            while sequence.blocks.len() < n_blocks {
                let Some(block) = self.pool.take() else { break };
                sequence.blocks.push(block);
            }
            drafts.truncate(sequence.blocks.len() * block_tokens - sequence.n_cached - 1);
            n_left -= drafts.len();
            rows.drafts = drafts;
        }
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
            self.pool.release(sequence.blocks.drain(n_used.min(sequence.blocks.len())..));
        }
    }
}
