//! A step's rows as the ops take them, and the buffers they lie in.

use super::scheduler::{Run, Step};
use super::sequence::Sequence;
use super::{Alternative, Sampled, Ticket};
use crate::decoder::alternatives;
use stapo_ops::attention::paged::{self, GROUPED_KEYS};
use stapo_ops::{Buffer, Device, OutOfMemory, PendingDownload, View};

/// Rows of a step, sequence after sequence.
#[derive(Debug, Default)]
pub struct StepRows {
    /// `[T]` each: token (or the number of its draw), position, and place in the cache.
    tokens: Vec<u32>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    /// `[S + 1]`, `[S]`, `[S, table_width]`: see `paged::Sequences`.
    offsets: Vec<u32>,
    contexts: Vec<u32>,
    tables: Vec<u32>,
    /// `[n, 3]` of a decode step: see `paged::Sequences`.
    groups: Vec<u32>,
    /// `[R]`: the rows that predict a token to draw, some of them several times.
    drawing: Vec<u32>,
    /// Of each of these its request, its sample, and the position in the response.
    pub places: Vec<(Ticket, u32, u32)>,
    pub table_width: usize,
    /// One more than the largest position.
    pub n_positions: usize,
    /// Positions in a block of the cache.
    block_tokens: usize,
}

/// How many of each: what decides where the numbers of a step lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extent {
    pub rows: usize,
    pub sequences: usize,
    pub table_width: usize,
    pub groups: usize,
    pub drawn: usize,
}

impl StepRows {
    pub fn new(step: &Step, running: &[Sequence], block_tokens: usize) -> Self {
        let blocks_of = |run: &Run| running[run.slot].blocks.len();
        let table_width = step.runs.iter().map(blocks_of).max().unwrap_or(0);
        let mut rows = Self { offsets: vec![0], table_width, block_tokens, ..Self::default() };
        for run in &step.runs {
            rows.push(&running[run.slot], run);
        }
        rows
    }

    fn push(&mut self, sequence: &Sequence, run: &Run) {
        let context = sequence.n_cached + run.n_rows;
        for position in sequence.n_cached..context {
            let block = sequence.blocks[position / self.block_tokens].0 as usize;
            self.slots.push((block * self.block_tokens + position % self.block_tokens) as u32);
            self.positions.push(position as u32);
        }
        self.tokens.extend_from_slice(&sequence.tokens[sequence.n_cached..context]);
        self.offsets.push(self.tokens.len() as u32);
        self.contexts.push(context as u32);
        self.n_positions = self.n_positions.max(context);
        self.tables.extend(sequence.blocks.iter().map(|block| block.0));
        self.tables.resize(self.contexts.len() * self.table_width, 0);
        let row = self.tokens.len() as u32 - 1;
        if run.draws {
            self.drawing.push(row);
            self.places.push((sequence.ticket, sequence.sample, sequence.n_drawn as u32));
        }
        self.drawing.extend(run.others.iter().map(|_| row));
        self.places.extend(run.others.iter().map(|sample| (sequence.ticket, *sample, 0)));
    }

    pub fn extent(&self) -> Extent {
        Extent {
            rows: self.tokens.len(),
            sequences: self.contexts.len(),
            table_width: self.table_width,
            groups: self.groups.len() / 3,
            drawn: self.drawing.len(),
        }
    }

    /// Every sequence has one row, and draws.
    pub fn is_decode(&self) -> bool {
        let Extent { rows, sequences, drawn, .. } = self.extent();
        rows > 0 && rows == sequences && rows == drawn
    }

    /// Finds neighbours in a decode step that begin with the same blocks, and takes up to `max_members` of them together.
    pub fn group(&mut self, max_members: usize) {
        assert!(self.is_decode(), "group");
        let in_common = |a: &[u32], b: &[u32]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
        let tables: Vec<&[u32]> = self.tables.chunks_exact(self.table_width).collect();
        let mut start = 0;
        while start < tables.len() {
            let (mut count, mut common) = (1, tables[start].len());
            while count < max_members && start + count < tables.len() {
                let with_next = common.min(in_common(tables[start], tables[start + count]));
                // One who shares less than the others would take theirs away.
                if with_next * self.block_tokens < GROUPED_KEYS || (count > 1 && with_next < common) {
                    break;
                }
                (count, common) = (count + 1, with_next);
            }
            let common = if count > 1 { common * self.block_tokens / GROUPED_KEYS } else { 0 };
            self.groups.extend([start, count, common].map(|x| x as u32));
            start += count;
        }
    }

    /// Adds rows that nobody reads, of a sequence of one token in `spare_block`, until there are `n_rows`, and columns
    /// to the tables until they have `table_width`, and empty groups: steps of about the same size then have the same extent.
    pub fn pad(&mut self, n_rows: usize, n_groups: usize, table_width: usize, spare_block: usize) {
        assert!(self.is_decode() && n_rows >= self.tokens.len() && table_width >= self.table_width, "pad");
        let rows = std::mem::take(&mut self.tables);
        for row in rows.chunks_exact(self.table_width) {
            self.tables.extend_from_slice(row);
            self.tables.resize(self.tables.len() + table_width - self.table_width, 0);
        }
        self.table_width = table_width;
        self.groups.resize(3 * n_groups, 0);
        self.tables.resize(n_rows * table_width, spare_block as u32);
        self.slots.resize(n_rows, (spare_block * self.block_tokens) as u32);
        self.tokens.resize(n_rows, 0);
        self.positions.resize(n_rows, 0);
        self.contexts.resize(n_rows, 1);
        self.offsets = (0..=n_rows as u32).collect();
        self.drawing = (0..n_rows as u32).collect();
    }

    fn parts(&self) -> [&[u32]; 8] {
        let Self { tokens, positions, slots, offsets, contexts, tables, groups, drawing, .. } = self;
        [tokens, positions, slots, offsets, contexts, tables, groups, drawing]
    }
}

/// What a step reads and writes beside activations and caches, at addresses that stay.
#[derive(Debug)]
pub struct Desk {
    /// All of [`StepRows`], one after another: see [`Given::of`].
    pub given: Buffer<u32>,
    pub uniforms: Buffer<f64>,
    /// The rows' tokens, drawn ones looked up.
    pub tokens: Buffer<u32>,
    /// Of the tokens drawn, those of the step before until they are overwritten.
    pub ids: Buffer<u32>,
    pub logp: Buffer<f32>,
    pub entropy: Buffer<f32>,
    pub best_ids: Buffer<u32>,
    pub best_logp: Buffer<f32>,
}

/// Numbers of the tokens drawn, on their way.
#[derive(Debug)]
pub struct Numbers {
    ids: PendingDownload<u32>,
    logp: PendingDownload<f32>,
    entropy: PendingDownload<f32>,
    best_ids: PendingDownload<u32>,
    best_logp: PendingDownload<f32>,
}

impl Numbers {
    /// Waits for them.
    pub fn wait(self, n_alternatives: usize) -> impl Iterator<Item = Sampled> {
        let (ids, logp, entropy) = (self.ids.wait(), self.logp.wait(), self.entropy.wait());
        let mut best =
            alternatives(n_alternatives, &self.best_ids.wait(), &self.best_logp.wait()).into_iter();
        ids.into_iter().zip(logp).zip(entropy).map(move |((token, logp), entropy)| {
            let alternatives = best.next().unwrap_or_default().into_iter();
            let alternatives = alternatives.map(|(token, logp)| Alternative { token, logp }).collect();
            Sampled { token, logp, entropy, alternatives }
        })
    }
}

/// [`StepRows`] on the device.
#[derive(Debug, Clone, Copy)]
pub struct Given<'a> {
    pub tokens: View<'a, u32>,
    pub positions: View<'a, u32>,
    pub slots: View<'a, u32>,
    pub sequences: paged::Sequences<'a>,
    pub drawing: View<'a, u32>,
}

impl<'a> Given<'a> {
    /// The rows that were written to `buffer`, which had this extent.
    pub fn of(buffer: &'a Buffer<u32>, extent: Extent) -> Self {
        let Extent { rows, sequences, table_width, groups, drawn } = extent;
        let lens = [rows, rows, rows, sequences + 1, sequences, sequences * table_width, 3 * groups, drawn];
        let mut start = 0;
        let [tokens, positions, slots, offsets, contexts, tables, groups, drawing] = lens.map(|len| {
            start += len;
            buffer.range(start - len..start)
        });
        let groups = (groups.len() > 0).then_some(groups);
        let sequences = paged::Sequences { offsets, contexts, tables, groups };
        Given { tokens, positions, slots, sequences, drawing }
    }
}

impl Desk {
    pub fn new(
        device: &Device,
        max_rows: usize,
        max_drawn: usize,
        n_alternatives: usize,
    ) -> Result<Self, OutOfMemory> {
        Ok(Self {
            given: device.zeros(0)?,
            uniforms: device.zeros(max_drawn)?,
            tokens: device.zeros(max_rows)?,
            ids: device.zeros(max_drawn)?,
            logp: device.zeros(max_drawn)?,
            entropy: device.zeros(max_drawn)?,
            best_ids: device.zeros(max_drawn * n_alternatives)?,
            best_logp: device.zeros(max_drawn * n_alternatives)?,
        })
    }

    /// Writes the rows; true if what was there before has moved.
    pub fn write(&mut self, device: &Device, rows: &StepRows, uniforms: &[f64]) -> Result<bool, OutOfMemory> {
        let given = rows.parts().concat();
        let moves = given.len() > self.given.len();
        if moves {
            self.given = device.zeros(given.len().next_power_of_two())?;
        }
        self.given.range_mut(0..given.len()).write(&given);
        self.uniforms.range_mut(0..uniforms.len()).write(uniforms);
        Ok(moves)
    }

    /// Starts the way back of the first `n` drawn.
    pub fn fetch(&self, n: usize, n_alternatives: usize) -> Numbers {
        let n_best = n * n_alternatives;
        Numbers {
            ids: self.ids.range(0..n).fetch(),
            logp: self.logp.range(0..n).fetch(),
            entropy: self.entropy.range(0..n).fetch(),
            best_ids: self.best_ids.range(0..n_best).fetch(),
            best_logp: self.best_logp.range(0..n_best).fetch(),
        }
    }
}
