//! The sequences that run, in the order of admission.

use super::Ticket;
use super::sequence::Sequence;
use std::collections::BTreeMap;
use std::ops::{Index, IndexMut};

/// Running sequences in the order of admission, found by request and sample.
#[derive(Debug, Default)]
pub struct RunningSequences {
    /// Each with the number of its admission, in ascending order.
    admitted: Vec<(u64, Sequence)>,
    /// The number under which each running sequence was admitted.
    numbers: BTreeMap<(Ticket, u32), u64>,
    n_admitted: u64,
}

impl RunningSequences {
    pub fn len(&self) -> usize {
        self.admitted.len()
    }

    pub fn is_empty(&self) -> bool {
        self.admitted.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.admitted.iter().map(|(_, sequence)| sequence)
    }

    /// The index of a sample that runs.
    pub fn position(&self, ticket: Ticket, sample: u32) -> Option<usize> {
        let number = self.numbers.get(&(ticket, sample))?;
        self.admitted.binary_search_by_key(number, |(number, _)| *number).ok()
    }

    /// Admits a sequence after all others.
    pub fn push(&mut self, sequence: Sequence) {
        self.numbers.insert((sequence.ticket, sequence.sample), self.n_admitted);
        self.admitted.push((self.n_admitted, sequence));
        self.n_admitted += 1;
    }

    /// Removes the sequence admitted last.
    pub fn pop(&mut self) -> Option<Sequence> {
        self.len().checked_sub(1).map(|last| self.remove(last))
    }

    pub fn remove(&mut self, idx: usize) -> Sequence {
        let (_, sequence) = self.admitted.remove(idx);
        self.numbers.remove(&(sequence.ticket, sequence.sample));
        sequence
    }
}

impl Index<usize> for RunningSequences {
    type Output = Sequence;

    fn index(&self, idx: usize) -> &Sequence {
        &self.admitted[idx].1
    }
}

impl IndexMut<usize> for RunningSequences {
    fn index_mut(&mut self, idx: usize) -> &mut Sequence {
        &mut self.admitted[idx].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_is_found_at_its_index_while_others_leave_and_return() {
        let mut running = RunningSequences::default();
        for (ticket, sample) in [(3, 0), (1, 1), (3, 1), (1, 0), (2, 0)] {
            running.push(Sequence::new(Ticket(ticket), sample, vec![7], 1));
        }
        running.remove(1);
        let preempted = running.pop().unwrap();
        running.remove(0);
        running.push(preempted);
        for (idx, key) in [(3, 1), (1, 0), (2, 0)].into_iter().enumerate() {
            assert_eq!(running.position(Ticket(key.0), key.1), Some(idx), "{key:?}");
            assert_eq!((running[idx].ticket.0, running[idx].sample), key);
        }
        for gone in [(3, 0), (1, 1), (2, 1)] {
            assert_eq!(running.position(Ticket(gone.0), gone.1), None, "{gone:?}");
        }
        assert_eq!((running.len(), running.numbers.len()), (3, 3));
    }
}
