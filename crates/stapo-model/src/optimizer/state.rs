//! The state of a policy in training, read tensor by tensor from the ranks that own it.

use super::{Moment, Moments, Optimizer};
use crate::config::TensorSpec;
use crate::decoder::Policy;
use crate::decoder::sums::overlap;
use crate::ranks::{RankError, SLICE, Share};
use stapo_ops::sha256::{self, Digest, LEAF};
use stapo_ops::{Form, Stored, View};
use std::ops::Range;
use std::sync::Arc;

/// The weights or a moment of one tensor, in pieces: what each rank owns of it, in the order of the elements. Cheap to
/// clone.
#[derive(Clone)]
pub struct TensorState {
    /// The tensor's elements in its parameter.
    range: Range<usize>,
    gathered: Gathered,
}

/// A parameter's weights or a moment, gathered from all ranks in the order of the elements. Cheap to clone.
#[derive(Clone)]
struct Gathered {
    form: Form,
    parts: Arc<Vec<Part>>,
}

/// What one rank owns of a parameter.
struct Part {
    elements: Range<usize>,
    /// The elements as they are stored, and then their scales.
    bytes: Vec<u8>,
}

impl TensorState {
    /// The bytes of the elements as they are stored, and then those of the scales of 8-bit moments.
    pub fn slices(&self) -> Vec<&[u8]> {
        let n_bytes = self.gathered.form.n_bytes();
        let owned = |part: &'_ Part| overlap(&part.elements, &self.range);
        let parts = || self.gathered.parts.iter().filter(|part| !owned(part).is_empty());
        let elements = parts().map(|part| {
            let (common, first) = (owned(part), part.elements.start);
            &part.bytes[(common.start - first) * n_bytes..(common.end - first) * n_bytes]
        });
        let has_scales = self.gathered.form.n_scales(1) > 0;
        let scales = parts().filter(|_| has_scales).map(|part| {
            let (common, first) = (owned(part), part.elements.start);
            let before = common.start - first;
            assert!(before.is_multiple_of(Form::SCALED), "8-bit moments: a range from {before}");
            let start = part.elements.len() * n_bytes + 4 * (before / Form::SCALED);
            &part.bytes[start..start + 4 * self.gathered.form.n_scales(common.len())]
        });
        elements.chain(scales).collect()
    }

    /// The same in one piece.
    pub fn to_stored(&self) -> Stored {
        let mut bytes = self.slices().concat();
        let scales = bytes.split_off(self.range.len() * self.gathered.form.n_bytes());
        let scales = scales.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        Stored { form: self.gathered.form, bytes, scales }
    }
}

/// Elements of a tensor or of one of its moments that a rank stores.
pub struct OwnedPiece<'a> {
    pub ranges: FileRanges,
    pub elements: View<'a, f32>,
}

/// Where a file has the bytes of a piece, counted from the first tensor's first byte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRanges {
    /// In the file of all moments; in the file of all weights otherwise.
    pub is_moment: bool,
    pub elements: Range<usize>,
    /// Empty for a form without scales.
    pub scales: Range<usize>,
}

impl FileRanges {
    pub fn n_bytes(&self) -> usize {
        self.elements.len() + self.scales.len()
    }
}

/// The most elements of a piece.
const PIECE: usize = 16 << 20;

/// The most bytes of a piece.
pub const PIECE_BYTES: usize = 4 * PIECE;

/// A tensor of a file, of which a rank stores the elements that follow `n_before`.
struct StoredTensor {
    n_elements: usize,
    n_before: usize,
}

impl StoredTensor {
    /// Adds the pieces of a view, and moves `end` to where the file's next tensor begins.
    fn add<'a>(
        &self,
        moment: Option<Moment>,
        view: View<'a, f32>,
        end: &mut usize,
        pieces: &mut Vec<OwnedPiece<'a>>,
    ) {
        let form = view.form();
        let scales_start = *end + self.n_elements * form.n_bytes();
        let has_scales = form.n_scales(1) > 0;
        let is_aligned = view.len() == 0 || self.n_before.is_multiple_of(Form::SCALED);
        assert!(!has_scales || is_aligned, "8-bit moments: a range from {}", self.n_before);
        for start in (0..view.len()).step_by(PIECE) {
            let n = PIECE.min(view.len() - start);
            let before = self.n_before + start;
            let elements = *end + before * form.n_bytes();
            let scales = scales_start + 4 * form.n_scales(before);
            let ranges = FileRanges {
                is_moment: moment.is_some(),
                elements: elements..elements + n * form.n_bytes(),
                scales: scales..scales + 4 * form.n_scales(n),
            };
            pieces.push(OwnedPiece { ranges, elements: view.range(start..start + n) });
        }
        *end = scales_start + 4 * form.n_scales(self.n_elements);
    }
}

impl Optimizer<f32> {
    /// Gives every trained tensor of the policy to `take`, in its exact form, on rank 0; the other ranks send what they
    /// own.
    pub fn visit_weights<E: From<RankError>>(
        &self,
        policy: &Policy,
        mut take: impl FnMut(TensorState) -> Result<(), E>,
    ) -> Result<(), E> {
        let rank = self.ranks.rank();
        for (parameter, moments) in policy.weights.trained().zip(&self.moments) {
            let share = moments.share;
            let gathered = if policy.has_foreign_masters() {
                self.gathered(share, parameter.view().range(share.owned_by(rank)).read_stored())?
            } else if rank == 0 {
                let stored = parameter.view().read_stored();
                let parts = Arc::new(vec![Part { elements: 0..share.len, bytes: stored.bytes }]);
                Some(Gathered { form: stored.form, parts })
            } else {
                None
            };
            let Some(gathered) = gathered else { continue };
            for (_, range) in parameter.spec.tensors() {
                take(TensorState { range, gathered: gathered.clone() })?;
            }
        }
        Ok(())
    }

    /// Gives every tensor's two moments to `take`, on rank 0; the other ranks send theirs.
    pub fn visit_moments<E: From<RankError>>(
        &self,
        policy: &Policy,
        mut take: impl FnMut(&TensorSpec, Moment, TensorState) -> Result<(), E>,
    ) -> Result<(), E> {
        for (parameter, moments) in policy.weights.trained().zip(&self.moments) {
            let Moments { share, .. } = moments;
            let first = self.gathered(*share, moments.view(Moment::First).read_stored())?;
            let second = self.gathered(*share, moments.view(Moment::Second).read_stored())?;
            let Some((first, second)) = first.zip(second) else { continue };
            for (spec, range) in parameter.spec.tensors() {
                take(spec, Moment::First, TensorState { range: range.clone(), gathered: first.clone() })?;
                take(spec, Moment::Second, TensorState { range, gathered: second.clone() })?;
            }
        }
        Ok(())
    }

    /// The bytes of the weights and of the moments of all trained tensors, as they are stored.
    pub fn n_stored_bytes(&self, policy: &Policy) -> (usize, usize) {
        let stored = |form: Form, n: usize| n * form.n_bytes() + 4 * form.n_scales(n);
        let sizes = policy.trained_tensors().map(|(spec, values)| (spec.n_elements(), values.form()));
        let moments = [self.form(Moment::First), self.form(Moment::Second)];
        sizes.fold((0, 0), |(weights, of_moments), (n, form)| {
            let both = moments.iter().map(|form| stored(*form, n)).sum::<usize>();
            (weights + stored(form, n), of_moments + both)
        })
    }

    /// What this rank stores of every trained tensor and of its moments, with the place in a file of all weights and in one of
    /// all moments. The pieces of all ranks fill both files.
    pub fn owned_pieces<'a>(&'a self, policy: &'a Policy) -> Vec<OwnedPiece<'a>> {
        let rank = self.ranks.rank();
        let mut pieces = Vec::new();
        let (mut weights_end, mut moments_end) = (0, 0);
        for (parameter, moments) in policy.weights.trained().zip(&self.moments) {
            let owned = moments.share.owned_by(rank);
            let weights = parameter.view();
            for (_, range) in parameter.spec.tensors() {
                let common = overlap(&owned, &range);
                let tensor = StoredTensor {
                    n_elements: range.len(),
                    n_before: common.start.saturating_sub(range.start),
                };
                tensor.add(None, weights.range(common.clone()), &mut weights_end, &mut pieces);
                let in_owned = common.start - owned.start..common.end - owned.start;
                for moment in [Moment::First, Moment::Second] {
                    let view = moments.view(moment).range(in_owned.clone());
                    tensor.add(Some(moment), view, &mut moments_end, &mut pieces);
                }
            }
        }
        pieces
    }

    /// The digests of the leaves of every trained parameter, of its weights, its first and its second moment, in this order,
    /// on rank 0. Each rank hashes what it owns, where it lies.
    pub fn digests(&self, policy: &Policy) -> Result<Option<Vec<Vec<Digest>>>, RankError> {
        const { assert!(SLICE.is_multiple_of(LEAF), "what a rank owns is whole leaves") };
        let rank = self.ranks.rank();
        let owned = policy.weights.trained().zip(&self.moments).flat_map(|(parameter, moments)| {
            let weights = parameter.view().range(moments.share.owned_by(rank));
            [weights, moments.view(Moment::First), moments.view(Moment::Second)]
        });
        let owned = sha256::leaves(policy.device(), owned);
        if self.ranks.world() == 1 {
            return Ok(Some(owned));
        }
        let sent = self.ranks.gather(owned.iter().flatten().flatten().copied().collect())?;
        if rank != 0 {
            return Ok(None);
        }
        // A form with scales has two digests for each leaf.
        let forms = policy
            .weights
            .trained()
            .map(|parameter| [parameter.view().form(), self.form(Moment::First), self.form(Moment::Second)]);
        let lists =
            forms.zip(&self.moments).flat_map(|(forms, moments)| forms.map(|form| (form, moments.share)));
        let mut unread: Vec<&[u8]> = sent.iter().map(Vec::as_slice).collect();
        let mut all = Vec::new();
        for (form, share) in lists {
            let mut digests = Vec::new();
            for rank in share.in_order() {
                let n_leaves = share.owned_by(rank).len().div_ceil(LEAF);
                let n_digests = if form.n_scales(1) > 0 { 2 * n_leaves } else { n_leaves };
                let (read, rest) = unread[rank]
                    .split_at_checked(n_digests * size_of::<Digest>())
                    .ok_or_else(|| RankError { rank, problem: "sent too few hashes of its state".into() })?;
                digests.extend(read.as_chunks().0);
                unread[rank] = rest;
            }
            all.push(digests);
        }
        match unread.iter().position(|rest| !rest.is_empty()) {
            Some(rank) => Err(RankError { rank, problem: "sent too many hashes of its state".into() }),
            None => Ok(Some(all)),
        }
    }

    /// What all ranks own of a parameter, in the order of the elements, on rank 0.
    fn gathered(&self, share: Share, owned: Stored) -> Result<Option<Gathered>, RankError> {
        let Stored { form, mut bytes, scales } = owned;
        for scale in &scales {
            bytes.extend_from_slice(&scale.to_le_bytes());
        }
        let mut sent = self.ranks.gather(bytes)?;
        if self.ranks.rank() != 0 {
            return Ok(None);
        }
        let mut parts = Vec::new();
        for rank in share.in_order() {
            let (elements, bytes) = (share.owned_by(rank), std::mem::take(&mut sent[rank]));
            let expected = elements.len() * form.n_bytes() + 4 * form.n_scales(elements.len());
            if bytes.len() != expected {
                let problem = format!("sent {} bytes of its state, expected {expected}", bytes.len());
                return Err(RankError { rank, problem });
            }
            parts.push(Part { elements, bytes });
        }
        Ok(Some(Gathered { form, parts: Arc::new(parts) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_is_put_together_from_what_ranks_own() {
        // 1,000 elements of 8 bits on two ranks, cut at 512; a tensor from 256 on.
        let element = |i: usize| (i % 251) as u8;
        let part = |elements: Range<usize>| {
            let scales = (elements.start / 256..elements.end.div_ceil(256)).map(|scale| scale as f32);
            let bytes = elements.clone().map(element).chain(scales.flat_map(f32::to_le_bytes)).collect();
            Part { elements, bytes }
        };
        let parts = Arc::new(vec![part(0..512), part(512..1000)]);
        let stored = |range: Range<usize>| {
            let gathered = Gathered { form: Form::First8, parts: Arc::clone(&parts) };
            TensorState { range, gathered }.to_stored()
        };
        let tensor = stored(256..1000);
        assert_eq!(tensor.bytes, (256..1000).map(element).collect::<Vec<u8>>());
        assert_eq!(tensor.scales, [1.0, 2.0, 3.0]);
        assert_eq!((stored(0..256).scales, stored(0..1000).len()), (vec![0.0], 1000));
        // Other forms have no scales, and their tensors may begin anywhere.
        let bytes: Vec<u8> = (0..300).map(|i| i as f32).flat_map(f32::to_le_bytes).collect();
        let parts = Arc::new(vec![Part { elements: 0..300, bytes }]);
        let stored =
            TensorState { range: 299..300, gathered: Gathered { form: Form::F32, parts } }.to_stored();
        assert_eq!((stored.to_f32(), stored.scales.len()), (vec![299.0], 0));
    }
}
