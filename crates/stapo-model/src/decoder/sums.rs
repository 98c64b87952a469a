//! Gradients summed micro-batch by micro-batch, each element by the rank that owns it.

use super::gradients::Gradients;
use super::policy::Policy;
use super::weights::{DecoderWeights, ParameterSpec};
use crate::config::TensorSpec;
use crate::ranks::{RankError, Ranks, Share};
use stapo_ops::{Buffer, Device, OutOfMemory, View, ViewMut, reduce, residual};
use std::ops::Range;

/// The sums of the gradients of micro-batches, not yet divided by anything. The gradient of each micro-batch starts from
/// zero, and the gradients are added in the order of the micro-batches whichever rank computed them, so the number of
/// ranks changes no bit. A rank holds the sums of the elements that it owns.
pub struct GradientSums {
    device: Device,
    ranks: Ranks,
    /// `None` for a frozen parameter.
    tree: DecoderWeights<Option<OwnedSum>>,
    /// The gradient of a tied embedding as a table of inputs, until [`GradientSums::join`].
    lookup: Option<OwnedSum>,
    /// What other ranks send, until it is added.
    received: Buffer<f32>,
    /// Micro-batches since the last [`GradientSums::clear`]; the first overwrites.
    n_added: usize,
}

/// The sum of the elements of one parameter that this rank owns.
struct OwnedSum {
    spec: ParameterSpec,
    share: Share,
    sum: Buffer<f32>,
}

/// Elements that one exchange moves at most, unless a single parameter has more.
const EXCHANGED_AT_ONCE: usize = 1 << 26;

impl GradientSums {
    /// No sums yet, for gradients of this shape; `memory` is where the sums lie.
    pub fn new(gradients: &Gradients, memory: &Device, ranks: &Ranks) -> Result<Self, OutOfMemory> {
        let mut place = 0;
        let owned = |spec: &ParameterSpec, at: usize| {
            let share = Share { len: spec.n_elements(), place: at, world: ranks.world() };
            let sum = memory.zeros(share.of(ranks.rank()).len())?;
            Ok(OwnedSum { spec: spec.clone(), share, sum })
        };
        let tree = gradients.tree.try_map(&mut |gradient| {
            let Some(gradient) = gradient else { return Ok(None) };
            place += 1;
            owned(gradient.spec(), place - 1).map(Some)
        })?;
        let tied = tree.embedding.as_ref().filter(|_| gradients.has_lookup());
        let lookup = tied.map(|embedding| owned(&embedding.spec, 0)).transpose()?;
        let mut sums = Self {
            device: gradients.device().clone(),
            ranks: Ranks::clone(ranks),
            tree,
            lookup,
            received: memory.zeros(0)?,
            n_added: 0,
        };
        let most = sums.groups().into_iter().map(|group| sums.n_owned(group)).max().unwrap_or(0);
        sums.received = memory.zeros(most * (ranks.world() - 1))?;
        Ok(sums)
    }

    /// The sums, in the order of [`Gradients::parts`].
    fn all(&self) -> impl Iterator<Item = &OwnedSum> {
        self.of_tree().chain(&self.lookup)
    }

    /// The sums of every trained parameter, in the order of the policy's weights.
    fn of_tree(&self) -> impl Iterator<Item = &OwnedSum> {
        self.tree.all().into_iter().flatten()
    }

    /// Ranges of the sums whose gradients are exchanged together.
    fn groups(&self) -> Vec<Range<usize>> {
        let mut groups: Vec<Range<usize>> = Vec::new();
        let mut n_elements = 0;
        for (idx, sum) in self.all().enumerate() {
            n_elements += sum.share.len;
            match groups.last_mut() {
                Some(group) if n_elements <= EXCHANGED_AT_ONCE => group.end = idx + 1,
                _ => {
                    n_elements = sum.share.len;
                    groups.push(idx..idx + 1);
                }
            }
        }
        groups
    }

    /// Elements of a group that this rank owns.
    fn n_owned(&self, group: Range<usize>) -> usize {
        self.all().skip(group.start).take(group.len()).map(|sum| sum.sum.len()).sum()
    }

    /// Adds a round of `n_microbatches`: that of rank 0 first. The ranks of numbers from `n_microbatches` on have none.
    /// Afterwards `gradients` are zero.
    pub fn add_round(&mut self, gradients: &mut Gradients, n_microbatches: usize) -> Result<(), RankError> {
        gradients.settle();
        let parts: Vec<View<'_, f32>> = gradients.parts().collect();
        for group in self.groups() {
            self.exchange(&parts, group.clone(), n_microbatches)?;
            self.add(&parts, group, n_microbatches);
        }
        self.n_added += n_microbatches;
        gradients.clear();
        Ok(())
    }

    /// Sends the gradients of a group to their owners, and receives those of the elements that this rank owns.
    fn exchange(
        &mut self,
        parts: &[View<'_, f32>],
        group: Range<usize>,
        n_microbatches: usize,
    ) -> Result<(), RankError> {
        let (rank, world) = (self.ranks.rank(), self.ranks.world());
        let shares: Vec<Share> = self.all().map(|sum| sum.share).collect();
        let mut sends = Vec::new();
        for to in (0..world).filter(|&to| to != rank && rank < n_microbatches) {
            let wanted = group.clone().map(|idx| (to, parts[idx].range(shares[idx].of(to))));
            sends.extend(wanted.filter(|(_, view)| view.len() > 0));
        }
        let mut receives: Vec<(usize, ViewMut<'_, f32>)> = Vec::new();
        let mut rest = self.received.view_mut();
        for from in (0..n_microbatches).filter(|&from| from != rank) {
            for len in group.clone().map(|idx| shares[idx].of(rank).len()).filter(|len| *len > 0) {
                let (own, after) = rest.split_at(len);
                receives.push((from, own));
                rest = after;
            }
        }
        self.ranks.exchange(sends, receives)
    }

    /// Adds the gradients of a group, micro-batch by micro-batch.
    fn add(&mut self, parts: &[View<'_, f32>], group: Range<usize>, n_microbatches: usize) {
        let Self { device, ranks, tree, lookup, received, n_added, .. } = self;
        let (rank, world) = (ranks.rank(), ranks.world());
        let n_senders = n_microbatches - usize::from(rank < n_microbatches);
        debug_assert!(n_senders < world);
        let mut sums: Vec<&mut OwnedSum> = tree.all_mut().into_iter().flatten().collect();
        sums.extend(lookup);
        let n_owned: usize = sums[group.clone()].iter().map(|sum| sum.sum.len()).sum();
        for microbatch in 0..n_microbatches {
            let sender = microbatch - usize::from(microbatch > rank);
            let mut at = sender * n_owned;
            for idx in group.clone() {
                let own = sums[idx].share.of(rank);
                let from = if microbatch == rank {
                    parts[idx].range(own)
                } else {
                    received.range(at..at + own.len())
                };
                at += from.len();
                let mut sum = sums[idx].sum.view_mut();
                if *n_added + microbatch == 0 {
                    sum.copy_from(from);
                } else {
                    residual::add(device, sum, from);
                }
            }
        }
    }

    /// Forgets all sums.
    pub fn clear(&mut self) {
        self.n_added = 0;
    }

    /// Adds the two gradients of a tied embedding: the tree then holds every gradient.
    pub(crate) fn join(&mut self) {
        self.settle();
        if let Some((lookup, embedding)) = self.lookup.as_mut().zip(self.tree.embedding.as_mut()) {
            residual::add(&self.device, embedding.sum.view_mut(), lookup.sum.view());
            lookup.sum.view_mut().fill(0.0);
        }
    }

    /// Sums over no micro-batch are zero.
    fn settle(&mut self) {
        if self.n_added == 0 {
            self.tree.visit_mut(&mut |sum| sum.iter_mut().for_each(|sum| sum.sum.view_mut().fill(0.0)));
            self.lookup.iter_mut().for_each(|lookup| lookup.sum.view_mut().fill(0.0));
        }
    }

    /// For each parameter how it is shared out, and the sums of the elements that this rank owns, after
    /// [`GradientSums::join`].
    pub(crate) fn owned(&self) -> impl Iterator<Item = (Share, View<'_, f32>)> {
        self.of_tree().map(|sum| (sum.share, sum.sum.view()))
    }

    /// The squared norm of all gradients together, after [`GradientSums::join`].
    pub(crate) fn sum_squares(&self) -> Result<f64, RankError> {
        self.squares(&self.of_tree().collect::<Vec<_>>())
    }

    /// The squared norm of the gradient of the head alone, for gradients that were not yet taken by an optimizer step. Of
    /// a tied embedding the part as a table of inputs is left out. 0 for a frozen head.
    pub fn head_sum_squares(&mut self) -> Result<f64, RankError> {
        self.settle();
        self.squares(&self.tree.head().iter().collect::<Vec<_>>())
    }

    /// Each rank adds the squares of its blocks; every rank adds these sums in the order of the blocks.
    fn squares(&self, sums: &[&OwnedSum]) -> Result<f64, RankError> {
        let own = reduce::square_parts(&self.device, sums.iter().map(|sum| sum.sum.view()));
        let bytes = self.ranks.all_gather(&encode(&own))?;
        let by_rank: Vec<Vec<Vec<f64>>> = bytes.iter().map(|bytes| decode(bytes)).collect();
        let of_sum = |(idx, sum): (usize, &&OwnedSum)| {
            let parts: Vec<Vec<f64>> = by_rank.iter().map(|of_rank| of_rank[idx].clone()).collect();
            sum.share.joined(&parts)
        };
        let parts: Vec<Vec<f64>> = sums.iter().enumerate().map(of_sum).collect();
        Ok(reduce::fold_squares(&self.device, &parts))
    }

    /// As [`Gradients::zero_tensors`].
    pub fn zero_tensors(&mut self, policy: &Policy) -> Result<Vec<&TensorSpec>, RankError> {
        self.settle();
        let this = &*self;
        let is_zero = |_: &TensorSpec, own: View<'_, f32>| u64::from(reduce::is_zero(&this.device, own));
        let all = this.of_tensors(is_zero, 1)?;
        let names: Vec<&TensorSpec> = this.all().flat_map(|sum| &sum.spec.parts).collect();
        let zero = |name: &str| {
            names
                .iter()
                .zip(&all)
                .filter(|(spec, _)| spec.name == name)
                .all(|(_, by_rank)| !by_rank.contains(&0))
        };
        let idle = policy.idle_factors();
        let specs = this.of_tree().flat_map(|sum| &sum.spec.parts);
        Ok(specs.filter(|spec| zero(&spec.name) && !idle.contains(&spec.name)).collect())
    }

    /// The tensor and the place in it of the first gradient that is not a finite number, after [`GradientSums::join`].
    pub(crate) fn first_non_finite(&self) -> Result<Option<(&TensorSpec, usize)>, RankError> {
        let found = |_: &TensorSpec, own: View<'_, f32>| {
            reduce::first_non_finite(&self.device, own).map_or(u64::MAX, |place| place as u64)
        };
        let all = self.of_tensors(found, u64::MAX)?;
        let specs =
            self.all().flat_map(|sum| sum.spec.tensors().map(move |(spec, range)| (spec, range, sum.share)));
        let place = |(spec, range, share): (_, Range<usize>, Share), by_rank: &Vec<u64>| {
            let places = by_rank.iter().enumerate().filter(|(_, place)| **place != u64::MAX);
            let in_tensor = places
                .map(|(rank, place)| overlap(&range, &share.of(rank)).start - range.start + *place as usize);
            Some((spec, in_tensor.min()?))
        };
        Ok(specs.zip(&all).find_map(|(of, by_rank)| place(of, by_rank)))
    }

    /// For each tensor what every rank finds in the elements that it owns; `nothing` for a rank that owns none.
    fn of_tensors(
        &self,
        find: impl Fn(&TensorSpec, View<'_, f32>) -> u64,
        nothing: u64,
    ) -> Result<Vec<Vec<u64>>, RankError> {
        let rank = self.ranks.rank();
        let mut own = Vec::new();
        for sum in self.all() {
            let of_rank = sum.share.of(rank);
            for (spec, range) in sum.spec.tensors() {
                let common = overlap(&range, &of_rank);
                let found = if common.is_empty() {
                    nothing
                } else {
                    let start = common.start - of_rank.start;
                    find(spec, sum.sum.range(start..start + common.len()))
                };
                own.extend(found.to_le_bytes());
            }
        }
        let by_rank = self.ranks.all_gather(&own)?;
        let n_tensors = own.len() / 8;
        let of_tensor = |idx: usize| by_rank.iter().map(|bytes| word(&bytes[8 * idx..])).collect();
        Ok((0..n_tensors).map(of_tensor).collect())
    }
}

/// The elements that two ranges have in common; empty at the start of `a` where they have none.
pub(crate) fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let common = a.start.max(b.start)..a.end.min(b.end);
    if common.is_empty() { a.start..a.start } else { common }
}

fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[..8]);
    u64::from_le_bytes(word)
}

/// Lists of numbers as bytes: the length of each before its numbers.
fn encode(lists: &[Vec<f64>]) -> Vec<u8> {
    let words = lists.iter().flat_map(|list| {
        std::iter::once(list.len() as u64).chain(list.iter().map(|number| number.to_bits()))
    });
    words.flat_map(u64::to_le_bytes).collect()
}

fn decode(bytes: &[u8]) -> Vec<Vec<f64>> {
    let mut words = bytes.chunks_exact(8).map(word);
    let mut lists = Vec::new();
    while let Some(len) = words.next() {
        lists.push(words.by_ref().take(len as usize).map(f64::from_bits).collect());
    }
    lists
}
