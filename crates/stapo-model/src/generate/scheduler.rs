//! Who runs in the next step, and in which memory. Results do not depend on any choice made here, only speed does.

use super::block::{Block, BlockPool};
use super::sequence::Sequence;
use super::{Finish, Request, Ticket};
use std::collections::{BTreeMap, VecDeque};

/// Rows `tokens[n_cached..n_cached + n_rows]` of the running sequence `slot`.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    pub slot: usize,
    pub n_rows: usize,
}

/// One step's work. `copies` (from, to), in order, come first: blocks shared until someone had to write into them.
#[derive(Debug, Default)]
pub struct Step {
    pub runs: Vec<Run>,
    pub copies: Vec<(Block, Block)>,
}

/// What bounds a step.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    pub n_blocks: usize,
    /// Positions in a block.
    pub block_tokens: usize,
    /// Rows in a step: longer prompts are cut in chunks.
    pub max_rows: usize,
    pub max_sequences: usize,
}

#[derive(Debug)]
pub struct Scheduler {
    capacity: Capacity,
    pool: BlockPool,
    groups: BTreeMap<Ticket, Group>,
    /// In the order they came in: the last to come is the first to give way.
    running: Vec<Sequence>,
    n_preemptions: u64,
}

/// The samples of one request.
#[derive(Debug)]
struct Group {
    request: Request,
    prefix: Prefix,
    waiting: VecDeque<Sequence>,
    n_running: usize,
}

/// The shareable part of a request's prompt.
#[derive(Debug)]
enum Prefix {
    Absent,
    /// This sample is computing it; the others wait for it.
    Filling(u32),
    /// Held for those that wait.
    Ready(Vec<Block>),
}

impl Scheduler {
    pub fn new(capacity: Capacity) -> Self {
        let pool = BlockPool::new(capacity.n_blocks);
        Self { capacity, pool, groups: BTreeMap::new(), running: Vec::new(), n_preemptions: 0 }
    }

    /// The most tokens one sequence can ever hold in the cache.
    pub fn max_sequence_tokens(&self) -> usize {
        self.capacity.n_blocks * self.capacity.block_tokens
    }

    pub fn submit(&mut self, ticket: Ticket, request: Request) {
        let waiting =
            (0..request.n_samples).map(|i| Sequence::new(ticket, i, request.prompt.clone())).collect();
        self.groups.insert(ticket, Group { request, prefix: Prefix::Absent, waiting, n_running: 0 });
    }

    pub fn is_idle(&self) -> bool {
        self.groups.is_empty()
    }

    pub fn n_preemptions(&self) -> u64 {
        self.n_preemptions
    }

    #[cfg(test)]
    pub fn n_free_blocks(&self) -> usize {
        self.pool.n_free()
    }

    /// Of a sequence that waits or runs.
    pub fn request(&self, ticket: Ticket) -> &Request {
        &self.groups[&ticket].request
    }

    pub fn running(&self) -> &[Sequence] {
        &self.running
    }

    pub fn running_mut(&mut self, slot: usize) -> &mut Sequence {
        &mut self.running[slot]
    }

    /// Chooses the rows of the next step, first of those that run, then of newcomers, and gives them memory.
    pub fn plan(&mut self) -> Step {
        let mut step = Step::default();
        let mut n_rows_left = self.capacity.max_rows;
        let mut slot = 0;
        while n_rows_left > 0 && (slot < self.running.len() || self.admit()) {
            let n_rows = self.running[slot].n_pending().min(n_rows_left);
            if !self.reserve(slot, n_rows, &mut step) {
                // Sent back itself, and so was everyone after it: nobody is left to plan.
                break;
            }
            step.runs.push(Run { slot, n_rows });
            n_rows_left -= n_rows;
            slot += 1;
        }
        step
    }

    /// Marks the rows of `run` as cached; a prompt completed this way is shared with the samples that wait for it.
    /// True when the run's last row predicts a token yet to be sampled.
    pub fn advance(&mut self, run: Run) -> bool {
        let sequence = &mut self.running[run.slot];
        sequence.n_cached += run.n_rows;
        let group = self.groups.get_mut(&sequence.ticket).expect("a running sequence has its group");
        let n_shareable = sequence.n_shareable();
        if matches!(group.prefix, Prefix::Filling(sample) if sample == sequence.sample)
            && sequence.n_cached >= n_shareable
        {
            let n_blocks = n_shareable.div_ceil(self.capacity.block_tokens);
            let blocks = sequence.blocks[..n_blocks].iter().map(|&block| self.pool.share(block)).collect();
            group.prefix = Prefix::Ready(blocks);
            group.drop_unneeded_prefix(&mut self.pool);
        }
        sequence.n_pending() == 0
    }

    /// Takes out and returns the sequences that `finish` finds finished, in running order.
    pub fn retire(
        &mut self,
        finish: impl Fn(&Sequence, &Request) -> Option<Finish>,
    ) -> Vec<(Sequence, Finish)> {
        let mut finished = Vec::new();
        for mut sequence in std::mem::take(&mut self.running) {
            let group = self.groups.get_mut(&sequence.ticket).expect("a running sequence has its group");
            let Some(finish) = finish(&sequence, &group.request) else {
                self.running.push(sequence);
                continue;
            };
            sequence.evict(&mut self.pool);
            group.n_running -= 1;
            if group.n_running == 0 && group.waiting.is_empty() {
                self.groups.remove(&sequence.ticket);
            }
            finished.push((sequence, finish));
        }
        finished
    }

    /// Lets the next sequence in, of the oldest request that has one. False: nobody may come in.
    fn admit(&mut self) -> bool {
        let may_come =
            |group: &&mut Group| !group.waiting.is_empty() && !matches!(group.prefix, Prefix::Filling(_));
        let Some(group) = self.groups.values_mut().find(may_come) else { return false };
        let next = group.waiting.front().expect("someone waits");
        let block_tokens = self.capacity.block_tokens;
        let n_shared_blocks = match &group.prefix {
            Prefix::Ready(_) => next.n_shareable() / block_tokens,
            Prefix::Absent | Prefix::Filling(_) => 0,
        };
        // A newcomer that leaves no room for those inside to grow would soon be sent back.
        let n_needed = next.tokens.len().div_ceil(block_tokens) - n_shared_blocks + self.running.len();
        let is_full = self.running.len() >= self.capacity.max_sequences || self.pool.n_free() < n_needed;
        if is_full && !self.running.is_empty() {
            return false;
        }
        let mut sequence = group.waiting.pop_front().expect("someone waits");
        match &group.prefix {
            Prefix::Ready(blocks) => {
                sequence.blocks = blocks.iter().map(|&block| self.pool.share(block)).collect();
                sequence.n_cached = sequence.n_shareable();
            }
            Prefix::Absent | Prefix::Filling(_) if sequence.n_shareable() > 0 => {
                group.prefix = Prefix::Filling(sequence.sample);
            }
            Prefix::Absent | Prefix::Filling(_) => {}
        }
        group.drop_unneeded_prefix(&mut self.pool);
        group.n_running += 1;
        self.running.push(sequence);
        true
    }

    /// Gives `slot` memory of its own for its next `n_rows` positions; others give way if need be.
    /// False: it had to give way itself.
    fn reserve(&mut self, slot: usize, n_rows: usize, step: &mut Step) -> bool {
        let n_cached = self.running[slot].n_cached;
        let block_tokens = self.capacity.block_tokens;
        for place in n_cached / block_tokens..(n_cached + n_rows).div_ceil(block_tokens) {
            if self.running[slot].blocks.len() == place {
                let Some(fresh) = self.take_block(slot) else { return false };
                self.running[slot].blocks.push(fresh);
                continue;
            }
            // Making room may leave this sequence the only holder, so look again each time.
            while self.pool.is_shared(self.running[slot].blocks[place]) {
                let Some(fresh) = self.pool.take() else {
                    if self.make_room(slot) {
                        continue;
                    }
                    return false;
                };
                let shared = std::mem::replace(&mut self.running[slot].blocks[place], fresh);
                self.pool.release([shared]);
                step.copies.push((shared, fresh));
            }
        }
        true
    }

    fn take_block(&mut self, slot: usize) -> Option<Block> {
        loop {
            if let Some(block) = self.pool.take() {
                return Some(block);
            }
            if !self.make_room(slot) {
                return None;
            }
        }
    }

    /// Frees memory for `slot`: prompts held for those that wait go first, then the youngest that runs.
    /// False: that was `slot` itself.
    fn make_room(&mut self, slot: usize) -> bool {
        for group in self.groups.values_mut().rev() {
            if let Prefix::Ready(_) = group.prefix {
                group.drop_prefix(&mut self.pool);
                return true;
            }
        }
        let last = self.running.len() - 1;
        assert!(last > 0, "a sequence alone has room: submit checked its length");
        let mut sequence = self.running.pop().expect("someone runs");
        self.n_preemptions += 1;
        sequence.evict(&mut self.pool);
        let group = self.groups.get_mut(&sequence.ticket).expect("a running sequence has its group");
        if matches!(group.prefix, Prefix::Filling(sample) if sample == sequence.sample) {
            group.prefix = Prefix::Absent;
        }
        group.n_running -= 1;
        group.waiting.push_front(sequence);
        last != slot
    }
}

impl Group {
    fn drop_prefix(&mut self, pool: &mut BlockPool) {
        if let Prefix::Ready(blocks) = std::mem::replace(&mut self.prefix, Prefix::Absent) {
            pool.release(blocks);
        }
    }

    fn drop_unneeded_prefix(&mut self, pool: &mut BlockPool) {
        if self.waiting.is_empty() {
            self.drop_prefix(pool);
        }
    }
}
