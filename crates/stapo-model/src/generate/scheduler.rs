//! Who runs in the next step, and in which memory. Results do not depend on any choice made here, only speed does.

use super::block::{Block, BlockPool};
use super::sequence::Sequence;
use super::{Finish, Request, Sampled, Ticket};
use std::collections::{BTreeMap, VecDeque};

/// Rows `tokens[n_cached..n_cached + n_rows]` of the running sequence `slot`.
#[derive(Clone, Debug)]
pub struct Run {
    pub slot: usize,
    pub n_rows: usize,
    /// Its last row predicts a token to be drawn.
    pub draws: bool,
    /// Samples of the same request that wait for the prompt, which this run completes: their first tokens are drawn from
    /// its last row too.
    pub others: Vec<u32>,
}

/// One step's work. `copies` (from, to), in order, come first: blocks shared until someone had to write into them.
#[derive(Debug, Default)]
pub struct Step {
    pub runs: Vec<Run>,
    pub copies: Vec<(Block, Block)>,
}

/// A token drawn for a sequence: which of its response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    pub ticket: Ticket,
    pub sample: u32,
    pub position: u32,
    /// Where it ran; those who left since have moved it to the front.
    pub slot: usize,
}

/// Where a sequence is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum List {
    Running,
    Leaving,
    Waiting,
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
    /// Tokens drawn in a step.
    pub max_draws: usize,
}

#[derive(Debug)]
pub struct Scheduler {
    capacity: Capacity,
    pool: BlockPool,
    groups: BTreeMap<Ticket, Group>,
    /// In the order they came in: the last to come is the first to give way.
    running: Vec<Sequence>,
    /// Every token drawn, the last not yet read; they hold no memory.
    leaving: Vec<Sequence>,
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
        Self {
            capacity,
            pool,
            groups: BTreeMap::new(),
            running: Vec::new(),
            leaving: Vec::new(),
            n_preemptions: 0,
        }
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
            let draws = n_rows == self.running[slot].n_pending();
            step.runs.push(Run { slot, n_rows, draws, others: Vec::new() });
            n_rows_left -= n_rows;
            slot += 1;
        }
        self.draw_for_others(&mut step.runs);
        step
    }

    /// As far as there is room; who is left out runs the prompt's last token itself.
    fn draw_for_others(&self, runs: &mut [Run]) {
        let mut n_left = self.capacity.max_draws - runs.iter().filter(|run| run.draws).count();
        for run in runs.iter_mut().filter(|run| run.draws) {
            let sequence = &self.running[run.slot];
            let group = &self.groups[&sequence.ticket];
            if sequence.n_drawn == 0 && group.is_filled_by(sequence) {
                let undrawn = group.waiting.iter().filter(|other| other.n_drawn == 0);
                run.others = undrawn.take(n_left).map(|other| other.sample).collect();
                n_left -= run.others.len();
            }
        }
    }

    /// Marks the rows of `runs`, a whole step, as cached and returns the tokens drawn in it, in order. From here on the
    /// next step can be planned: a token drawn and not yet read takes part under the number of its draw.
    pub fn advance(&mut self, runs: &[Run]) -> Vec<Draw> {
        let mut draws = Vec::with_capacity(runs.len());
        for run in runs {
            self.mark_cached(run);
            let sequence = &mut self.running[run.slot];
            let group = self.groups.get_mut(&sequence.ticket).expect("a running sequence has its group");
            let max_tokens = group.request.max_tokens;
            if run.draws {
                draws.push(sequence.draw(draws.len(), run.slot, max_tokens));
            }
            for sample in &run.others {
                let other = group.waiting.iter_mut().find(|other| other.sample == *sample);
                let other = other.expect("it waited when the step was planned");
                draws.push(other.draw(draws.len(), run.slot, max_tokens));
            }
            if max_tokens == 1 {
                group.n_running += run.others.len();
                let all = std::mem::take(&mut group.waiting).into_iter();
                let (over, rest): (VecDeque<_>, _) =
                    all.partition(|other| run.others.contains(&other.sample));
                group.waiting = rest;
                self.leaving.extend(over);
            }
            group.drop_unneeded_prefix(&mut self.pool);
        }
        for at in (0..self.running.len()).rev() {
            if self.running[at].n_pending() == 0 {
                let mut sequence = self.running.remove(at);
                sequence.evict(&mut self.pool);
                self.leaving.push(sequence);
            }
        }
        draws
    }

    /// A prompt completed by `run` is shared with the samples that wait for it.
    fn mark_cached(&mut self, run: &Run) {
        let sequence = &mut self.running[run.slot];
        sequence.n_cached += run.n_rows;
        let group = self.groups.get_mut(&sequence.ticket).expect("a running sequence has its group");
        if group.is_filled_by(sequence) && sequence.n_cached >= sequence.n_prompt {
            let n_blocks = sequence.n_prompt.div_ceil(self.capacity.block_tokens);
            let blocks = sequence.blocks[..n_blocks].iter().map(|&block| self.pool.share(block)).collect();
            group.prefix = Prefix::Ready(blocks);
        }
    }

    /// Whether the sequence of `draw` is still there; after a stop token it is not.
    pub fn expects(&self, draw: Draw) -> bool {
        self.find(draw).is_some()
    }

    fn find(&self, draw: Draw) -> Option<(List, usize)> {
        let is_it = |s: &Sequence| (s.ticket, s.sample) == (draw.ticket, draw.sample);
        let near = &self.running[..self.running.len().min(draw.slot + 1)];
        let running = near.iter().rposition(is_it).or_else(|| self.running.iter().position(is_it));
        let leaving = || self.leaving.iter().position(is_it).map(|at| (List::Leaving, at));
        // Sent back before its token was read.
        let waiting =
            || Some((List::Waiting, self.groups.get(&draw.ticket)?.waiting.iter().position(is_it)?));
        running.map(|at| (List::Running, at)).or_else(leaving).or_else(waiting)
    }

    /// Hands the token of `draw` to its sequence and takes that out once `finish` finds it finished.
    pub fn receive(
        &mut self,
        draw: Draw,
        sampled: Sampled,
        finish: impl Fn(&Sequence, &Request) -> Option<Finish>,
    ) -> Option<(Sequence, Finish)> {
        let (list, at) = self.find(draw)?;
        let group = self.groups.get_mut(&draw.ticket).expect("a sequence has its group");
        let sequence = match list {
            List::Running => &mut self.running[at],
            List::Leaving => &mut self.leaving[at],
            List::Waiting => &mut group.waiting[at],
        };
        assert_eq!(sequence.sampled.len(), draw.position as usize, "tokens are read in order");
        sequence.receive(sampled);
        let finish = finish(sequence, &group.request)?;
        let mut sequence = match list {
            List::Running => self.running.remove(at),
            List::Leaving => self.leaving.remove(at),
            List::Waiting => group.waiting.remove(at)?,
        };
        sequence.evict(&mut self.pool);
        if list == List::Waiting {
            group.drop_unneeded_prefix(&mut self.pool);
        } else {
            group.n_running -= 1;
        }
        if group.n_running == 0 && group.waiting.is_empty() {
            self.groups.remove(&draw.ticket);
        }
        Some((sequence, finish))
    }

    /// Lets the next sequence in, of the oldest request that has one. False: nobody may come in.
    fn admit(&mut self) -> bool {
        let may_come =
            |group: &&mut Group| !group.waiting.is_empty() && !matches!(group.prefix, Prefix::Filling(_));
        let Some(group) = self.groups.values_mut().find(may_come) else { return false };
        let next = group.waiting.front().expect("someone waits");
        let block_tokens = self.capacity.block_tokens;
        let n_shared_blocks = match &group.prefix {
            Prefix::Ready(_) => next.n_found() / block_tokens,
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
                sequence.n_cached = sequence.n_found();
            }
            Prefix::Absent | Prefix::Filling(_) => group.prefix = Prefix::Filling(sequence.sample),
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
        if group.is_filled_by(&sequence) {
            group.prefix = Prefix::Absent;
        }
        group.n_running -= 1;
        group.waiting.push_front(sequence);
        last != slot
    }
}

impl Group {
    fn is_filled_by(&self, sequence: &Sequence) -> bool {
        matches!(self.prefix, Prefix::Filling(sample) if sample == sequence.sample)
    }

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
