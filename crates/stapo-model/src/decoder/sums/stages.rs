//! What of a gradient is complete at one time during backward, and how it is cut into exchanges.

use crate::ranks::{SLICE, Share};
use std::ops::Range;

/// Gradients that are complete at one time, from the head down to the embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    Head,
    /// A block of layers.
    Layers(usize),
    /// The final norm, and the embedding as a table of inputs.
    Rest,
}

/// Elements that one exchange moves at most, between all ranks together.
pub const EXCHANGED_AT_ONCE: usize = 1 << 26;

/// Layers with fewer elements are exchanged several together: each exchange has a fixed cost. Less in tests, whose
/// models are small.
const FEWEST_AT_ONCE: usize = if cfg!(test) { 1 << 18 } else { 1 << 23 };

/// Blocks of layers whose gradients exist at one time: backward computes one while another is sent and added.
pub const N_BLOCKS_KEPT: usize = 2;

/// Layers whose gradients are exchanged together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocks {
    pub n_layers: usize,
    pub n_together: usize,
    /// Whether all layers have parameters of the same shapes, so that one layer's gradients can lie where another's were.
    are_alike: bool,
}

impl Blocks {
    /// For layers of up to `n_elements` each.
    pub fn new(n_layers: usize, n_elements: usize, are_alike: bool) -> Self {
        let n_together = (FEWEST_AT_ONCE / n_elements.max(1)).clamp(1, n_layers.max(1));
        Self { n_layers, n_together, are_alike }
    }

    /// Layers whose gradients exist at one time.
    pub fn n_kept(self) -> usize {
        if self.are_alike { N_BLOCKS_KEPT * self.n_together } else { self.n_layers }
    }

    fn len(self) -> usize {
        self.n_layers.div_ceil(self.n_together)
    }

    pub fn layers(self, block: usize) -> Range<usize> {
        block * self.n_together..((block + 1) * self.n_together).min(self.n_layers)
    }

    pub fn of_layer(self, layer: usize) -> usize {
        layer / self.n_together
    }

    /// Whether backward, which goes from the last layer to the first, completes a block with this layer.
    pub fn ends_with(self, layer: usize) -> bool {
        layer.is_multiple_of(self.n_together)
    }
}

/// A part of a parameter that one exchange moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The number of the parameter's sum.
    pub sum: usize,
    /// The number of its gradient among those of the stage.
    pub source: usize,
    /// Of how many equal parts of what each rank owns this is which.
    part: (usize, usize),
}

impl Piece {
    /// The elements of a rank that the piece has: whole slices.
    pub fn owned_by(&self, share: Share, rank: usize) -> Range<usize> {
        let owned = share.owned_by(rank);
        let n_slices = owned.len().div_ceil(SLICE);
        let start = |part: usize| (owned.start + part * n_slices / self.part.1 * SLICE).min(owned.end);
        start(self.part.0)..start(self.part.0 + 1)
    }
}

/// The exchanges of every stage.
#[derive(Debug)]
pub struct Stages {
    pub blocks: Blocks,
    groups: Vec<Vec<Vec<Piece>>>,
}

/// One exchange of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    pub stage: Stage,
    /// The number of the stage.
    number: usize,
    group: usize,
}

impl Stages {
    /// `sums` gives the sums of a stage with their elements, in the order in which backward leaves their gradients.
    pub fn new(blocks: Blocks, sums: impl Fn(Stage) -> Vec<(usize, usize)>) -> Self {
        let mut stages = Self { blocks, groups: Vec::new() };
        stages.groups = (0..blocks.len() + 2).map(|number| cut(&sums(stages.stage(number)))).collect();
        stages
    }

    pub fn len(&self) -> usize {
        self.groups.len()
    }

    /// The stage that is complete as the `number`-th.
    pub fn stage(&self, number: usize) -> Stage {
        match number {
            0 => Stage::Head,
            number if number <= self.blocks.len() => Stage::Layers(self.blocks.len() - number),
            _ => Stage::Rest,
        }
    }

    pub fn number(&self, stage: Stage) -> usize {
        match stage {
            Stage::Head => 0,
            Stage::Layers(block) => self.blocks.len() - block,
            Stage::Rest => self.blocks.len() + 1,
        }
    }

    /// The exchanges of a stage, in order.
    pub fn steps(&self, stage: Stage) -> impl Iterator<Item = Step> + use<> {
        let number = self.number(stage);
        (0..self.groups[number].len()).map(move |group| Step { stage, number, group })
    }

    pub fn pieces(&self, step: Step) -> &[Piece] {
        &self.groups[step.number][step.group]
    }

    pub fn all(&self) -> impl Iterator<Item = &Vec<Piece>> {
        self.groups.iter().flatten()
    }
}

/// Small parameters are exchanged together, large ones in parts.
fn cut(sums: &[(usize, usize)]) -> Vec<Vec<Piece>> {
    let mut groups: Vec<Vec<Piece>> = Vec::new();
    let mut n_elements = 0;
    for (source, &(sum, len)) in sums.iter().enumerate() {
        let n_parts = len.div_ceil(EXCHANGED_AT_ONCE).max(1);
        for part in 0..n_parts {
            let piece = Piece { sum, source, part: (part, n_parts) };
            n_elements += len / n_parts;
            match groups.last_mut() {
                Some(group) if n_elements <= EXCHANGED_AT_ONCE => group.push(piece),
                _ => {
                    n_elements = len / n_parts;
                    groups.push(vec![piece]);
                }
            }
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pieces_of_a_parameter_have_every_element_once() {
        for len in [1, SLICE, 3 * SLICE + 5, EXCHANGED_AT_ONCE, 2 * EXCHANGED_AT_ONCE + 3 * SLICE + 7] {
            for world in [1, 2, 3, 8] {
                let share = Share { len, parameter_idx: 1, world };
                let groups = cut(&[(0, len)]);
                for rank in 0..world {
                    let ranges = groups.iter().flatten().map(|piece| piece.owned_by(share, rank));
                    let mut end = share.owned_by(rank).start;
                    for range in ranges {
                        assert_eq!(range.start, end, "{len} {world} {rank}");
                        end = range.end;
                    }
                    assert_eq!(end, share.owned_by(rank).end, "{len} {world} {rank}");
                }
                let most = groups.iter().map(|group| {
                    group
                        .iter()
                        .flat_map(|p| (0..world).map(|rank| p.owned_by(share, rank).len()))
                        .sum::<usize>()
                });
                assert!(most.max() <= Some(EXCHANGED_AT_ONCE + world * SLICE), "{len} {world}");
            }
        }
    }

    #[test]
    fn small_layers_go_together() {
        let blocks = Blocks::new(7, FEWEST_AT_ONCE / 3, true);
        assert_eq!(
            (0..blocks.len()).map(|block| blocks.layers(block)).collect::<Vec<_>>(),
            [0..3, 3..6, 6..7]
        );
        let ends: Vec<usize> = (0..7).rev().filter(|&layer| blocks.ends_with(layer)).collect();
        assert_eq!((ends, blocks.of_layer(5)), (vec![6, 3, 0], 1));
        let [alike, different] = [true, false].map(|are_alike| Blocks::new(28, 50_000_000, are_alike));
        assert_eq!((alike.n_together, alike.n_kept(), different.n_kept()), (1, 2, 28));
        assert_eq!(Blocks::new(4, 10, true).layers(0), 0..4);
    }

    #[test]
    fn a_stage_is_exchanged_together_up_to_the_limit() {
        let groups = cut(&[(4, 10), (5, 20), (6, EXCHANGED_AT_ONCE), (7, 1)]);
        let sums: Vec<Vec<usize>> =
            groups.iter().map(|group| group.iter().map(|piece| piece.sum).collect()).collect();
        assert_eq!(sums, [vec![4, 5], vec![6], vec![7]]);
    }
}
