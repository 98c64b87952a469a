//! Gradients summed micro-batch by micro-batch, each element by the rank that owns it.

mod layout;
mod microbatch;
mod round;
mod stages;
#[cfg(test)]
mod tests;

pub use layout::SumsLayout;

use super::policy::Policy;
use super::weights::ParameterSpec;
use crate::config::TensorSpec;
use crate::ranks::{RankError, Ranks, Share};
use layout::SumIndices;
use microbatch::Microbatch;
use stages::{N_BLOCKS_KEPT, Stages};
use stapo_ops::{Buffer, Device, Mark, OutOfMemory, View, reduce, residual};
use std::convert::Infallible;
use std::ops::Range;

/// The sums of the gradients of micro-batches, not yet divided by anything. The gradient of each micro-batch starts from
/// zero, and the gradients are added in the order of the micro-batches whichever rank computed them, so the number of
/// ranks changes no bit. A rank holds the sums of the elements that it owns, and the gradients of a few layers at a time.
pub struct GradientSums {
    /// Where backward runs.
    device: Device,
    /// Where exchanges and additions run: during backward if the transport queues them on the device.
    side: Device,
    is_queued: bool,
    ranks: Ranks,
    /// Of every trained parameter in the order of the policy's weights; that of a tied embedding as a table of inputs last.
    sums: Vec<OwnedSum>,
    sum_indices: SumIndices,
    stages: Stages,
    microbatch: Microbatch,
    /// What other ranks send, until it is added.
    received: Buffer<f32>,
    /// Micro-batches since the last [`GradientSums::clear`]; the first overwrites.
    n_added: usize,
    /// When the last exchange of each memory of the micro-batch is done.
    sent: [Option<Mark>; 1 + N_BLOCKS_KEPT],
    /// Before an exchange, between it and the addition, after that.
    exchanges: Vec<[Mark; 3]>,
    /// Before and after what ops wait for.
    waits: Vec<[Mark; 2]>,
    times: Exchanged,
}

/// The sum of the elements of one parameter that this rank owns.
struct OwnedSum {
    spec: ParameterSpec,
    share: Share,
    sum: Buffer<f32>,
}

/// What one rank sent to others, and how long that took.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Exchanged {
    /// Seconds of the exchanges of gradients. On GPUs with NCCL they run during backward.
    pub gradient_seconds: f64,
    /// Seconds of the additions in the order of the micro-batches.
    pub fold_seconds: f64,
    /// Seconds in which a GPU with nothing else to do waited for both.
    pub waited_seconds: f64,
    pub gradient_bytes: u64,
    /// Seconds and bytes of the weights that owners send after an optimizer step.
    pub weight_seconds: f64,
    pub weight_bytes: u64,
}

impl GradientSums {
    /// No sums yet, for gradients of this policy; `memory` is where sums and gradients lie.
    pub fn new(policy: &Policy, memory: &Device, ranks: &Ranks) -> Result<Self, OutOfMemory> {
        let Ok(specs) = policy.weights.try_map(&mut |parameter| Ok::<_, Infallible>(parameter.spec.clone()));
        let layout = SumsLayout::from_specs(&specs, ranks.world());
        let received = memory.zeros(layout.n_received(ranks.rank()))?;
        let SumsLayout { sums, sum_indices, stages, .. } = layout;
        let zeros = |(spec, share): (ParameterSpec, Share)| {
            Ok(OwnedSum { spec, share, sum: memory.zeros(share.owned_by(ranks.rank()).len())? })
        };
        let sums = sums.into_iter().map(zeros).collect::<Result<_, OutOfMemory>>()?;
        let device = policy.device();
        let is_queued = ranks.is_queued();
        Ok(Self {
            device: device.clone(),
            side: if is_queued { device.second_stream() } else { device.clone() },
            is_queued,
            ranks: Ranks::clone(ranks),
            microbatch: Microbatch::new(policy, memory, stages.blocks)?,
            received,
            sums,
            sum_indices,
            stages,
            n_added: 0,
            sent: Default::default(),
            exchanges: Vec::new(),
            waits: Vec::new(),
            times: Exchanged::default(),
        })
    }

    /// The sums of every trained parameter, in the order of the policy's weights.
    fn of_tree(&self) -> &[OwnedSum] {
        &self.sums[..self.sum_indices.lookup.unwrap_or(self.sums.len())]
    }

    /// Elements of all memory that the sums take.
    #[cfg(test)]
    fn n_elements(&self) -> usize {
        let sums: usize = self.sums.iter().map(|sum| sum.sum.len()).sum();
        sums + self.received.len() + self.microbatch.n_elements()
    }

    /// Orders the device's work after all exchanges and additions.
    fn await_exchanges(&mut self) {
        if self.is_queued {
            let mark = self.side.mark();
            self.wait_for(&mark);
            self.sent = Default::default();
        }
    }

    /// Forgets all sums.
    pub fn clear(&mut self) {
        self.await_exchanges();
        self.n_added = 0;
    }

    /// Adds the two gradients of a tied embedding: every sum of a parameter is then whole.
    pub(crate) fn join(&mut self) {
        self.settle();
        let Some(lookup) = self.sum_indices.lookup else { return };
        let (of_tree, lookups) = self.sums.split_at_mut(lookup);
        if let Some(embedding) = self.sum_indices.embedding.map(|embedding| &mut of_tree[embedding]) {
            let lookup = &mut lookups[0].sum;
            residual::add(&self.device, embedding.sum.view_mut(), lookup.view());
            lookup.view_mut().fill(0.0);
        }
    }

    /// Waits for all exchanges; sums over no micro-batch are zero.
    fn settle(&mut self) {
        self.await_exchanges();
        if self.n_added == 0 {
            self.sums.iter_mut().for_each(|sum| sum.sum.view_mut().fill(0.0));
        }
    }

    /// For each parameter how it is shared out, and the sums of the elements that this rank owns, after
    /// [`GradientSums::join`].
    pub(crate) fn owned(&self) -> impl Iterator<Item = (Share, View<'_, f32>)> {
        self.of_tree().iter().map(|sum| (sum.share, sum.sum.view()))
    }

    /// The squared norm of all gradients together, after [`GradientSums::join`]. Waits for the device.
    pub(crate) fn sum_squares(&self) -> Result<f64, RankError> {
        self.squares(self.of_tree())
    }

    /// The squared norm of the gradient of the head alone, for gradients that were not yet taken by an optimizer step. Of
    /// a tied embedding the part as a table of inputs is left out. 0 for a frozen head.
    pub fn head_sum_squares(&mut self) -> Result<f64, RankError> {
        self.settle();
        self.squares(self.sum_indices.head.map_or(&[], |head| &self.sums[head..=head]))
    }

    /// Each rank adds the squares of its blocks; every rank adds these sums in the order of the blocks.
    fn squares(&self, sums: &[OwnedSum]) -> Result<f64, RankError> {
        let parts = reduce::square_parts(&self.device, sums.iter().map(|sum| sum.sum.view()));
        let bytes = self.ranks.all_gather(&encode(&parts))?;
        let by_rank: Vec<Vec<Vec<f64>>> = bytes.iter().map(|bytes| decode(bytes)).collect();
        let of_sum = |(idx, sum): (usize, &OwnedSum)| {
            let parts: Vec<Vec<f64>> = by_rank.iter().map(|of_rank| of_rank[idx].clone()).collect();
            sum.share.joined(&parts)
        };
        let parts: Vec<Vec<f64>> = sums.iter().enumerate().map(of_sum).collect();
        Ok(reduce::fold_squares(&self.device, &parts))
    }

    /// As [`super::gradients::Gradients::zero_tensors`].
    pub fn zero_tensors(&mut self, policy: &Policy) -> Result<Vec<&TensorSpec>, RankError> {
        self.settle();
        let this = &*self;
        let is_zero = |_: &TensorSpec, owned: View<'_, f32>| u64::from(reduce::is_zero(&this.device, owned));
        let all = this.of_tensors(is_zero, 1)?;
        let names: Vec<&TensorSpec> = this.sums.iter().flat_map(|sum| &sum.spec.parts).collect();
        let zero = |name: &str| {
            names
                .iter()
                .zip(&all)
                .filter(|(spec, _)| spec.name == name)
                .all(|(_, by_rank)| !by_rank.contains(&0))
        };
        let idle = policy.idle_factors();
        let specs = this.of_tree().iter().flat_map(|sum| &sum.spec.parts);
        Ok(specs.filter(|spec| zero(&spec.name) && !idle.contains(&spec.name)).collect())
    }

    /// The tensor and the place in it of the first gradient that is not a finite number, after [`GradientSums::join`].
    pub(crate) fn first_non_finite(&self) -> Result<Option<(&TensorSpec, usize)>, RankError> {
        let found = |_: &TensorSpec, owned: View<'_, f32>| {
            reduce::first_non_finite(&self.device, owned).map_or(u64::MAX, |idx| idx as u64)
        };
        let all = self.of_tensors(found, u64::MAX)?;
        let specs = self
            .sums
            .iter()
            .flat_map(|sum| sum.spec.tensors().map(move |(spec, range)| (spec, range, sum.share)));
        let first = |((spec, range, share), by_rank): ((_, Range<usize>, Share), &Vec<u64>)| {
            let found = by_rank.iter().enumerate().filter(|(_, idx)| **idx != u64::MAX);
            let in_tensor = found.map(|(rank, idx)| {
                overlap(&range, &share.owned_by(rank)).start - range.start + *idx as usize
            });
            Some((spec, in_tensor.min()?))
        };
        Ok(specs.zip(&all).find_map(first))
    }

    /// For each tensor what every rank finds in the elements that it owns; `nothing` for a rank that owns none.
    fn of_tensors(
        &self,
        find: impl Fn(&TensorSpec, View<'_, f32>) -> u64,
        nothing: u64,
    ) -> Result<Vec<Vec<u64>>, RankError> {
        let rank = self.ranks.rank();
        let mut found_here = Vec::new();
        for sum in &self.sums {
            let of_rank = sum.share.owned_by(rank);
            for (spec, range) in sum.spec.tensors() {
                let common = overlap(&range, &of_rank);
                let found = if common.is_empty() {
                    nothing
                } else {
                    let start = common.start - of_rank.start;
                    find(spec, sum.sum.range(start..start + common.len()))
                };
                found_here.extend(found.to_le_bytes());
            }
        }
        let by_rank = self.ranks.all_gather(&found_here)?;
        let n_tensors = found_here.len() / 8;
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
