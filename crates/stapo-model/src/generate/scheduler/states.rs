//! Sequences of models whose layers keep a state of fixed size besides keys and values. A state cannot be cut back to fewer tokens,
//! so a sequence that shares a prompt gets a copy of the state at the prompt's end.

use super::{Prefix, Scheduler, Sequence, StateSlot};
use crate::generate::group::RequestGroup;

/// States of `state_bytes` that an engine keeps within the memory for keys and values: they take half of it at most, and no more than
/// all sequences and as many prompts need. `None` for a model without states.
pub fn states_within(kv_bytes: u64, state_bytes: u64, max_sequences: usize) -> Option<usize> {
    let n_states = (kv_bytes / 2).checked_div(state_bytes)? as usize;
    Some(n_states.clamp(1, 2 * max_sequences.max(1)))
}

impl Scheduler {
    /// The most rows of a sequence in the next step: the sequence that computes the prompt of its group stops at the prompt's end, where
    /// its state is saved.
    pub(super) fn n_rows_at_once(&self, running_idx: usize, n_rows_left: usize) -> usize {
        let sequence = &self.running[running_idx];
        let n_rows = sequence.n_pending().min(n_rows_left);
        let saves_state = self.pool.has_states() && self.groups[&sequence.ticket].is_filled_by(sequence);
        match sequence.n_prompt.checked_sub(sequence.n_cached) {
            Some(n_left) if saves_state && n_left > 0 => n_rows.min(n_left),
            _ => n_rows,
        }
    }

    /// Whether the next sequence to be admitted has or finds a slot for its state. Where nothing runs, idle sequences and prompts
    /// give theirs up.
    pub(super) fn has_room_for_state(&mut self) -> bool {
        loop {
            let Some(group) = self.groups.values().find(|group| group.can_admit()) else { return true };
            let has_state = group.waiting.front().is_some_and(|next| next.state.is_some());
            if has_state || !self.pool.lacks_states() {
                return true;
            }
            if !self.running.is_empty() || !self.free_idle_blocks() {
                return false;
            }
        }
    }

    /// Gives an admitted sequence its state: a copy of the prompt's where the sequence continues after the prompt.
    pub(super) fn give_state(&mut self, sequence: &mut Sequence, of_prompt: Option<StateSlot>) {
        if sequence.state.is_none() {
            sequence.state = self.pool.take_state();
        }
        if let (Some(from), Some(to)) = (of_prompt, sequence.state) {
            self.state_copies.push((from, to));
        }
    }
}

impl RequestGroup {
    /// Whether a waiting sequence can continue after the prompt that was computed for its group. With states it can only continue at the
    /// prompt's very end.
    pub(super) fn shares_prefix(&self, sequence: &Sequence) -> bool {
        match &self.prefix {
            Prefix::Ready { state, .. } => state.is_none() || sequence.n_found() == sequence.n_prompt,
            Prefix::Absent | Prefix::Filling(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::states_within;

    #[test]
    fn states_take_half_of_the_memory_and_no_more_than_all_sequences_need() {
        assert_eq!(states_within(1000, 100, 8), Some(5));
        assert_eq!(states_within(1199, 100, 8), Some(5));
        // Each sequence has one, and so may its prompt.
        assert_eq!(states_within(1_000_000, 100, 8), Some(16));
        assert_eq!(states_within(100, 100, 8), Some(1), "one sequence can always run");
        assert_eq!(states_within(1_000_000, 100, 0), Some(2));
        assert_eq!(states_within(1000, 0, 8), None, "a model without states");
    }
}
