//! Continuous batching: the scheduler decides which sequences run in the next step, and in which blocks of the cache.
//! Its choices change speed only, never a result.

mod drafting;
mod parking;
mod states;
mod windows;

use super::block::{Block, BlockPool, StateSlot};
use super::group::{Prefix, RequestGroup};
use super::running::RunningSequences;
use super::sequence::{Sequence, UnreadToken};
use super::{Completion, FinishReason, Request, SampledToken, Ticket};
pub use states::states_within;
use std::collections::{BTreeMap, VecDeque};
pub use windows::Windows;

/// The rows `tokens[n_cached..n_cached + n_rows]` of a running sequence.
#[derive(Clone, Debug)]
pub struct ScheduledRows {
    /// Index of the sequence among the running ones.
    pub running_idx: usize,
    pub n_rows: usize,
    /// The last row predicts a token to be drawn.
    pub draws: bool,
    /// Samples of the same request that wait for the prompt which these rows complete: their first tokens are drawn
    /// from the last row too.
    pub siblings: Vec<u32>,
    /// Tokens that may follow: each is a separate row, from which the token after it is drawn. See `drafting`.
    pub drafts: Vec<u32>,
}

/// One step's work. The `copies` (from, to) come first, in order: a block that several sequences share is copied for the
/// sequence that is about to write into it.
#[derive(Debug, Default)]
pub struct ScheduledStep {
    pub rows: Vec<ScheduledRows>,
    pub copies: Vec<(Block, Block)>,
    /// These come first too.
    pub state_copies: Vec<(StateSlot, StateSlot)>,
}

/// Which of the scheduler's lists holds a sequence, and at which index.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Held {
    Running(usize),
    Drained,
    /// Of the samples of its request that wait. A sequence waits if it was preempted before its token was read.
    Waiting(usize),
}

/// What bounds a step.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    pub n_blocks: usize,
    /// Sequences and prompts whose states can be kept; `None` for a model whose layers keep no states.
    pub n_states: Option<usize>,
    /// Positions in a block.
    pub block_tokens: usize,
    /// Rows in a step: longer prompts are cut into chunks.
    pub max_rows: usize,
    pub max_sequences: usize,
    /// Tokens drawn in a step.
    pub max_draws: usize,
}

#[derive(Debug)]
pub struct Scheduler {
    capacity: Capacity,
    windows: Windows,
    pool: BlockPool,
    /// Of the next step.
    state_copies: Vec<(StateSlot, StateSlot)>,
    groups: BTreeMap<Ticket, RequestGroup>,
    /// In the order of admission: the sequence admitted last is the first to be preempted.
    running: RunningSequences,
    /// Sequences all of whose tokens were drawn, the last one not yet read, by request and sample. They hold no blocks,
    /// unless turns are parked.
    drained: BTreeMap<(Ticket, u32), Sequence>,
    /// Sequences whose turn has ended, with their blocks until memory is short.
    parked: BTreeMap<(Ticket, u32), Sequence>,
    parks_turns: bool,
    n_preemptions: u64,
    /// Responses that ended, and their tokens.
    n_finished: usize,
    n_finished_tokens: usize,
}

impl Scheduler {
    pub fn new(capacity: Capacity, windows: Windows) -> Self {
        Self {
            capacity,
            windows,
            pool: BlockPool::new(capacity.n_blocks, capacity.n_states),
            state_copies: Vec::new(),
            groups: BTreeMap::new(),
            running: RunningSequences::default(),
            drained: BTreeMap::new(),
            parked: BTreeMap::new(),
            parks_turns: false,
            n_preemptions: 0,
            n_finished: 0,
            n_finished_tokens: 0,
        }
    }

    /// Takes a request; `max_tokens` gives the longest response of each of its samples.
    pub fn submit(&mut self, ticket: Ticket, request: Request, max_tokens: impl Fn(u32) -> usize) {
        let sequence = |i| Sequence::new(ticket, i, request.prompt.clone(), max_tokens(i));
        let waiting = (0..request.n_samples).map(sequence).collect();
        self.groups.insert(ticket, RequestGroup { waiting, ..RequestGroup::new(request) });
    }

    /// Whether nothing is left to run or to read; parked sequences may be left.
    pub fn is_idle(&self) -> bool {
        // A group without parked sequences has others, so that the first such group decides.
        self.groups.values().all(|group| group.n_running == 0 && group.waiting.is_empty())
    }

    pub fn n_preemptions(&self) -> u64 {
        self.n_preemptions
    }

    #[cfg(test)]
    pub fn n_free_blocks(&self) -> usize {
        self.pool.n_free()
    }

    /// The request of a sequence that is not finished.
    pub fn request(&self, ticket: Ticket) -> &Request {
        &self.groups[&ticket].request
    }

    /// Whether a response of the request is unfinished or parked.
    pub fn has_request(&self, ticket: Ticket) -> bool {
        self.groups.contains_key(&ticket)
    }

    pub fn running(&self) -> &RunningSequences {
        &self.running
    }

    /// Chooses the rows of the next step, first of running sequences, then of newly admitted ones, and gives them
    /// blocks.
    pub fn plan(&mut self) -> ScheduledStep {
        let mut step = ScheduledStep::default();
        let mut n_rows_left = self.capacity.max_rows;
        let mut running_idx = 0;
        while n_rows_left > 0 && (running_idx < self.running.len() || self.admit()) {
            let n_rows = self.n_rows_at_once(running_idx, n_rows_left);
            if !self.reserve(running_idx, n_rows, &mut step) {
                // The sequence was preempted itself, after every sequence after it: none is left to plan.
                break;
            }
            let draws = n_rows == self.running[running_idx].n_pending();
            let (siblings, drafts) = (Vec::new(), Vec::new());
            step.rows.push(ScheduledRows { running_idx, n_rows, draws, siblings, drafts });
            n_rows_left -= n_rows;
            running_idx += 1;
        }
        // Decode attention reads a common prompt once for sequences that are next to each other. They were admitted apart
        // where another prompt came between a prompt's first sample and its others.
        step.rows.sort_by_key(|rows| self.running[rows.running_idx].ticket);
        self.draw_for_siblings(&mut step.rows);
        step.state_copies = std::mem::take(&mut self.state_copies);
        step
    }

    /// Lets the row that completes a prompt draw the first token of waiting samples too, up to the limit of draws. A
    /// sample beyond the limit runs the prompt's last token itself.
    fn draw_for_siblings(&self, rows: &mut [ScheduledRows]) {
        let mut n_left = self.capacity.max_draws - rows.iter().filter(|rows| rows.draws).count();
        for rows in rows.iter_mut().filter(|rows| rows.draws) {
            let sequence = &self.running[rows.running_idx];
            let group = &self.groups[&sequence.ticket];
            if sequence.next_position() == 0 && group.is_filled_by(sequence) {
                let undrawn = group.waiting.iter().filter(|sibling| sibling.next_position() == 0);
                rows.siblings = undrawn.take(n_left).map(|sibling| sibling.sample).collect();
                n_left -= rows.siblings.len();
            }
        }
    }

    /// Marks the rows of a whole step as cached and returns the tokens drawn in it, in order. From here on the next step
    /// can be planned: a token drawn and not yet read takes part under the number of its draw.
    pub fn advance(&mut self, step: &[ScheduledRows]) -> Vec<UnreadToken> {
        let mut drawn = Vec::with_capacity(step.len());
        for rows in step {
            self.mark_cached(rows);
            let sequence = &mut self.running[rows.running_idx];
            let group = self.groups.get_mut(&sequence.ticket).expect("a running sequence has its group");
            if rows.draws {
                drawn.push(sequence.draw(drawn.len()));
            }
            for sample in &rows.siblings {
                let sibling = group.waiting.iter_mut().find(|sibling| sibling.sample == *sample);
                let sibling = sibling.expect("the sibling waited when the step was planned");
                drawn.push(sibling.draw(drawn.len()));
            }
            if let Some(&first) = drawn.last() {
                let after = |(draft, position)| UnreadToken { position, draft: Some(draft), ..first };
                drawn.extend(rows.drafts.iter().copied().zip(first.position + 1..).map(after));
            }
            // A sibling whose response is this one token has nothing to run.
            let is_complete =
                |sibling: &Sequence| sibling.max_tokens == 1 && rows.siblings.contains(&sibling.sample);
            if group.waiting.iter().any(is_complete) {
                let all = std::mem::take(&mut group.waiting).into_iter();
                let (complete, rest): (VecDeque<_>, _) = all.partition(is_complete);
                group.waiting = rest;
                group.n_running += complete.len();
                self.drained
                    .extend(complete.into_iter().map(|sibling| ((sibling.ticket, sibling.sample), sibling)));
            }
            group.drop_unneeded_prefix(&mut self.pool);
        }
        self.move_drained();
        drawn
    }

    /// Moves sequences with nothing left to run out of the running ones.
    fn move_drained(&mut self) {
        for idx in (0..self.running.len()).rev() {
            if self.running[idx].n_pending() == 0 {
                let mut sequence = self.running.remove(idx);
                if !self.parks_turns {
                    sequence.evict(&mut self.pool);
                }
                self.drained.insert((sequence.ticket, sequence.sample), sequence);
            }
        }
    }

    /// Marks rows as cached; a prompt that they complete is shared with the samples that wait for it.
    fn mark_cached(&mut self, rows: &ScheduledRows) {
        let sequence = &mut self.running[rows.running_idx];
        sequence.n_cached += rows.n_rows;
        let group = self.groups.get_mut(&sequence.ticket).expect("a running sequence has its group");
        if group.is_filled_by(sequence) && sequence.n_cached >= sequence.n_prompt {
            let state = self.pool.take_state();
            if let (Some(from), Some(to)) = (sequence.state, state) {
                self.state_copies.push((from, to));
            } else if self.pool.has_states() {
                // Without a slot for the prompt's state, the next sample computes the prompt again.
                group.prefix = Prefix::Absent;
                return;
            }
            let n_blocks = sequence.n_prompt.div_ceil(self.capacity.block_tokens);
            let pool = &mut self.pool;
            let tables = sequence.tables.iter().map(|table| table.share(n_blocks, pool)).collect();
            group.prefix = Prefix::Ready { tables, state };
        }
    }

    /// Whether the turn of `token` is unfinished; after a stop token it is not, and what was drawn for it ahead of time
    /// is dropped.
    pub fn expects(&self, token: UnreadToken) -> bool {
        self.find(token).is_some()
    }

    fn find(&self, token: UnreadToken) -> Option<Held> {
        let UnreadToken { ticket, sample, position, .. } = token;
        // A token drawn ahead of time for a turn that has ended is before the next turn's first.
        let expects = |sequence: &Sequence| position >= sequence.next_unread();
        if let Some(idx) = self.running.position(ticket, sample) {
            return Some(Held::Running(idx)).filter(|_| expects(&self.running[idx]));
        }
        if let Some(drained) = self.drained.get(&(ticket, sample)) {
            return Some(Held::Drained).filter(|_| expects(drained));
        }
        let waiting = &self.groups.get(&ticket)?.waiting;
        let idx = waiting.iter().position(|sequence| sequence.sample == sample)?;
        Some(Held::Waiting(idx)).filter(|_| expects(&waiting[idx]))
    }

    /// Hands a token to its sequence. Returns the response, or its turn where turns are parked, if `finish` finds it
    /// finished.
    pub fn receive(
        &mut self,
        token: UnreadToken,
        sampled: SampledToken,
        finish: impl Fn(&Sequence, &Request) -> Option<FinishReason>,
    ) -> Option<Completion> {
        let held = self.find(token)?;
        let UnreadToken { ticket, sample, position, .. } = token;
        let group = self.groups.get_mut(&ticket).expect("a sequence has its group");
        let sequence = match held {
            Held::Running(idx) => &mut self.running[idx],
            Held::Drained => self.drained.get_mut(&(ticket, sample))?,
            Held::Waiting(idx) => &mut group.waiting[idx],
        };
        assert_eq!(sequence.next_unread(), position, "tokens are read in order");
        sequence.receive(sampled);
        let finish = finish(sequence, &group.request)?;
        self.n_finished += 1;
        self.n_finished_tokens += sequence.sampled.len();
        let mut sequence = match held {
            Held::Running(idx) => self.running.remove(idx),
            Held::Drained => self.drained.remove(&(ticket, sample))?,
            Held::Waiting(idx) => group.waiting.remove(idx)?,
        };
        match held {
            Held::Waiting(_) => group.drop_unneeded_prefix(&mut self.pool),
            Held::Running(_) | Held::Drained => group.n_running -= 1,
        }
        let tokens = sequence.end_turn();
        if self.parks_turns {
            group.n_parked += 1;
            self.parked.insert((ticket, sample), sequence);
        } else {
            sequence.evict(&mut self.pool);
            self.drop_group_if_over(ticket);
        }
        Some(Completion { ticket, sample, tokens, finish })
    }

    fn drop_group_if_over(&mut self, ticket: Ticket) {
        if self.groups.get(&ticket).is_some_and(RequestGroup::is_over) {
            self.groups.remove(&ticket);
        }
    }

    /// Admits the next sequence, of the oldest request that has one. False: no sequence may be admitted.
    fn admit(&mut self) -> bool {
        if !self.has_room_for_state() {
            return false;
        }
        let n_reserved = self.reserved_blocks();
        let Some(n_missing) = self.n_missing() else { return false };
        let Some(group) = self.groups.values_mut().find(|group| group.can_admit()) else { return false };
        let n_needed = n_missing + n_reserved;
        let is_full = self.running.len() >= self.capacity.max_sequences || self.pool.n_free() < n_needed;
        if is_full && !self.running.is_empty() {
            return false;
        }
        let mut sequence = group.waiting.pop_front().expect("a group that can admit has a waiting sequence");
        let mut of_prompt = None;
        match &group.prefix {
            _ if sequence.holds_blocks() => (),
            Prefix::Ready { tables, state } if group.shares_prefix(&sequence) => {
                let pool = &mut self.pool;
                sequence.tables = tables.iter().map(|table| table.share(table.len(), pool)).collect();
                sequence.n_cached = sequence.n_found();
                of_prompt = *state;
            }
            Prefix::Ready { .. } => (),
            Prefix::Absent | Prefix::Filling(_) => group.prefix = Prefix::Filling(sequence.sample),
        }
        group.n_running += 1;
        // Before the prompt's slot is given back, so that the sequence gets another.
        self.give_state(&mut sequence, of_prompt);
        let group = self.groups.get_mut(&sequence.ticket).expect("the group that admits");
        group.drop_unneeded_prefix(&mut self.pool);
        self.running.push(sequence);
        true
    }

    /// Blocks that the sequence to be admitted next lacks; `None` if there is no such sequence.
    fn n_missing(&self) -> Option<usize> {
        let group = self.groups.values().find(|group| group.can_admit())?;
        let next = group.waiting.front()?;
        let n_found = next.n_found() / self.capacity.block_tokens;
        let n_kept = |set: usize| match &group.prefix {
            _ if next.holds_blocks() => next.tables[set].n_held(),
            Prefix::Ready { tables, .. } if group.shares_prefix(next) => n_found.min(tables[set].n_held()),
            Prefix::Ready { .. } | Prefix::Absent | Prefix::Filling(_) => 0,
        };
        let missing = |(set, needed): (usize, usize)| needed.saturating_sub(n_kept(set));
        Some(self.n_needed(next.tokens.len()).enumerate().map(missing).sum())
    }

    /// Gives a running sequence its blocks for its next `n_rows` positions, preempting others if need be. False:
    /// the sequence was preempted itself.
    fn reserve(&mut self, running_idx: usize, n_rows: usize, step: &mut ScheduledStep) -> bool {
        let n_cached = self.running[running_idx].n_cached;
        let block_tokens = self.capacity.block_tokens;
        self.drop_hidden_blocks(running_idx);
        let n_sets = self.windows.of_sets.len();
        let blocks = n_cached / block_tokens..(n_cached + n_rows).div_ceil(block_tokens);
        blocks
            .flat_map(|idx| (0..n_sets).map(move |set| (set, idx)))
            .all(|(set, block_idx)| self.reserve_block(running_idx, (set, block_idx), step))
    }

    /// Gives a running sequence a block in one set of layers. False: the sequence was preempted itself.
    fn reserve_block(
        &mut self,
        running_idx: usize,
        (set, block_idx): (usize, usize),
        step: &mut ScheduledStep,
    ) -> bool {
        if self.running[running_idx].tables[set].len() == block_idx {
            let Some(fresh) = self.take_block(running_idx) else { return false };
            self.running[running_idx].tables[set].push(fresh);
            return true;
        }
        // Freeing blocks may leave this sequence the only holder, so sharing is looked at again each time.
        while self.pool.is_shared(self.running[running_idx].tables[set].blocks()[block_idx]) {
            let Some(fresh) = self.pool.take() else {
                if self.free_blocks(running_idx) {
                    continue;
                }
                return false;
            };
            let shared = self.running[running_idx].tables[set].replace(block_idx, fresh);
            self.pool.release([shared]);
            step.copies.push((shared, fresh));
        }
        true
    }

    /// A free block for a running sequence; `None` if the sequence was preempted instead.
    fn take_block(&mut self, running_idx: usize) -> Option<Block> {
        loop {
            if let Some(block) = self.pool.take() {
                return Some(block);
            }
            if !self.free_blocks(running_idx) {
                return None;
            }
        }
    }

    /// Frees blocks of a prompt held for waiting samples, or else of a sequence between two turns. False: there are none.
    fn free_idle_blocks(&mut self) -> bool {
        let held = |group: &&mut RequestGroup| matches!(group.prefix, Prefix::Ready { .. });
        if let Some(group) = self.groups.values_mut().rev().find(held) {
            group.drop_prefix(&mut self.pool);
            return true;
        }
        self.evict_between_turns()
    }

    /// Frees blocks for a running sequence: prompts held for waiting samples go first, then blocks of sequences between
    /// two turns, then the sequence admitted last is preempted. False: that was the sequence itself.
    fn free_blocks(&mut self, running_idx: usize) -> bool {
        if self.free_idle_blocks() {
            return true;
        }
        let last = self.running.len() - 1;
        assert!(last > 0, "a sequence alone has room: submit checked its length");
        let mut sequence = self.running.pop().expect("at least one sequence runs");
        self.n_preemptions += 1;
        sequence.evict(&mut self.pool);
        let group = self.groups.get_mut(&sequence.ticket).expect("a running sequence has its group");
        if group.is_filled_by(&sequence) {
            group.prefix = Prefix::Absent;
        }
        group.n_running -= 1;
        group.waiting.push_front(sequence);
        last != running_idx
    }
}
