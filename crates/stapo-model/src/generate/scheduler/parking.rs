//! Sequences between two turns. A sequence whose turn has ended is parked with its blocks; the next turn then computes
//! keys and values of the new tokens alone. Blocks of parked sequences are given up where a running sequence needs them,
//! and computed again, with the same bits, when the sequence continues.

use super::{Request, RequestGroup, Scheduler, Sequence, Ticket};

impl Scheduler {
    /// Parks every sequence whose turn ends, until [`Scheduler::extend`] or [`Scheduler::release`].
    pub fn park_turns(&mut self) {
        self.parks_turns = true;
    }

    /// The tokens of a parked sequence; `None` if it is not parked.
    pub fn parked_tokens(&self, ticket: Ticket, sample: u32) -> Option<&[u32]> {
        self.parked.get(&(ticket, sample)).map(|sequence| sequence.tokens.as_slice())
    }

    /// Lets a parked sequence continue after given tokens with a turn of at most `max_tokens`. The sequence comes before
    /// samples of its request that have not begun, so that begun responses end first and free their memory.
    pub fn extend(&mut self, ticket: Ticket, sample: u32, given: &[u32], max_tokens: usize) {
        let mut sequence = self.parked.remove(&(ticket, sample)).expect("extend of a parked sequence");
        sequence.begin_turn(given, max_tokens);
        let group = self.groups.get_mut(&ticket).expect("a parked sequence has its group");
        group.n_parked -= 1;
        group.waiting.push_front(sequence);
    }

    /// Lets a sequence continue as `leader`, one of another engine, does, for at most `max_tokens`: on the keys and values of
    /// the tokens that both have in common from the last time.
    pub fn follow(&mut self, leader: &Sequence, request: &Request, max_tokens: usize) {
        let Sequence { ticket, sample, tokens, n_prompt, .. } = leader;
        let request = || Request { n_samples: 0, stops: Vec::new(), ..request.clone() };
        let group = self.groups.entry(*ticket).or_insert_with(|| RequestGroup::new(request()));
        let mut sequence = match self.parked.remove(&(*ticket, *sample)) {
            Some(parked) => {
                group.n_parked -= 1;
                parked
            }
            None => Sequence::new(*ticket, *sample, tokens[..*n_prompt].to_vec(), max_tokens),
        };
        let n_cached = sequence.n_cached;
        sequence.rewind(tokens);
        // A state cannot be cut back, and keys further back than the last drafts may lie in blocks that were given back.
        let has_other_state = sequence.state.is_some() && sequence.n_cached < n_cached;
        if has_other_state || !self.windows.are_held(&sequence, self.capacity.block_tokens) {
            sequence.evict(&mut self.pool);
        }
        sequence.begin_turn(&tokens[sequence.tokens.len()..], max_tokens);
        group.waiting.push_front(sequence);
    }

    /// Gives the memory of a parked sequence back: its response has ended.
    pub fn release(&mut self, ticket: Ticket, sample: u32) {
        let mut sequence = self.parked.remove(&(ticket, sample)).expect("release of a parked sequence");
        sequence.evict(&mut self.pool);
        self.groups.get_mut(&ticket).expect("a parked sequence has its group").n_parked -= 1;
        self.drop_group_if_over(ticket);
    }

    /// Takes the blocks of one sequence that does not run: of a parked one, of one whose last token is not yet read, or
    /// of one that waits for its next turn. False: no such sequence has blocks.
    pub(super) fn evict_between_turns(&mut self) -> bool {
        let parked = self.parked.values_mut().rev();
        let drained = self.drained.values_mut().rev();
        let waiting = self.groups.values_mut().rev().flat_map(|group| group.waiting.iter_mut().rev());
        let mut idle = parked.chain(drained).chain(waiting);
        let Some(sequence) = idle.find(|sequence| sequence.holds_blocks()) else { return false };
        sequence.evict(&mut self.pool);
        self.n_preemptions += 1;
        true
    }
}
